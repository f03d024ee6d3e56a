"""The one-sided transport every backend implements (ARCHITECTURE.md §7).

A transport belongs to one worker life. It registers one memory region (the KV pool), describes itself in an
opaque endpoint that peers connect to, writes byte ranges from its own region into a peer's, and delivers small
notifications. It never blocks its caller: everything that takes time is reported by `poll()`, and `fileno()`
becomes readable when there is something to poll.

Ordering contract: a write's notification is delivered to the peer only after all of the write's bytes are in the
peer's memory. Notifications of one sender arrive in the order in which the writes were posted, unless a fault
drops, delays, duplicates or reorders them; the push protocol tolerates all four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.protocol.messages import PeerId as PeerId
from kv_transfer.protocol.plan import Copy as Copy


class TransportError(Exception):
    """Root of what a transport raises: UnknownPeerError, and each backend's own."""


class UnknownPeerError(TransportError):
    """There is no connection to that life of the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The peer can be written to, or (on the passive side) has connected to us."""

    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectFailed:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCompleted:
    """The write has left our memory for good: its source may change, and no byte of it will land later."""

    handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """The write may have landed in part and, unless `quiesced`, may still land: only a fence settles that."""

    handle: int
    quiesced: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notified:
    peer: PeerId
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """The connection to that life of the peer has ended. It says nothing about writes still in flight."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """From now on no write of that life of the peer can land in our region; later connections of it are refused."""

    peer: PeerId


TransportEvent = Connected | ConnectFailed | WriteCompleted | WriteFailed | Notified | PeerGone | Fenced


def check_num_sums(copies: Sequence[Copy], num_sums: int) -> None:
    """Raises: ValueError where `Transport.write` is asked for more checksums than there are copies."""
    if not 0 <= num_sums <= len(copies):
        raise ValueError(f"num_sums: {num_sums} of {len(copies)} copies")


class Transport(Protocol):
    """See the module docstring. All calls come from one thread and return at once."""

    name: str

    def endpoint(self) -> bytes:
        """Describes this side to peers: opaque, at most 4 KiB, valid for this life."""

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """Starts connecting; Connected or ConnectFailed follows. Connecting twice to one life is a no-op."""

    def write(
        self,
        peer: PeerId,
        copies: Sequence[Copy],
        notify: bytes,
        *,
        num_sums: int = 0,
    ) -> int:
        """Posts one write and returns its handle; WriteCompleted or WriteFailed follows.

        The source bytes of the first `num_sums` copies are summed (64 bit, `kv_transfer.checksum`) in the same pass,
        and the sums are appended to `notify` as little-endian u64, one a copy, in order. What is not summed costs
        nothing for it. An empty `copies` sends the notification alone.

        Raises: UnknownPeerError if not connected to that life; ValueError for more sums than copies.
        """

    def cancel(self, handle: int) -> None:
        """Stops posting what is not yet in flight; the handle still ends as completed or failed."""

    def poll(self) -> list[TransportEvent]: ...

    def fence(self, peer: PeerId) -> None:
        """Starts the fence; Fenced follows, at once if that life never connected. Idempotent."""

    def disconnect(self, peer: PeerId) -> None: ...

    def fileno(self) -> int: ...

    def close(self) -> None:
        """Ends every connection and gives back every resource. Idempotent."""
