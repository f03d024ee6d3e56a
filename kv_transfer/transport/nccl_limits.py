"""Every limit of the nccl backend, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kv_transfer.transport.base import TransportError

SECOND_NS = 1_000_000_000
MIB = 1 << 20


class NcclTimeoutError(TransportError):
    """The peer, or NCCL, took longer or left more waiting than a named limit allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLimits:
    """Bounds on what a connection holds, posts and waits for. All values are positive."""

    connect_timeout_ns: int = 10 * SECOND_NS
    """From the dial to the first bytes that arrived: NCCL has no limit of its own for making a communicator."""
    group_timeout_ns: int = 10 * SECOND_NS
    """A group of copies that was announced and has not arrived for so long ends the connection."""
    heartbeat_interval_ns: int = SECOND_NS
    silence_timeout_ns: int = 4 * SECOND_NS
    """A peer that says nothing for so long is gone: a stopped process and a cut link look like this."""
    linger_timeout_ns: int = 2 * SECOND_NS
    """How long a writer whose connection ended waits for the receiver's word that nothing can land any more."""
    max_group_bytes: int = 256 * MIB
    """A larger write is cut, so that a group stays well within its timeout on a slow link."""
    max_receiving_groups: int = 4
    """Receives posted to one GPU by all writers together: each holds some of its cores while it waits."""
    max_waiting: int = 4096
    """Groups and notifications of one connection that wait to be sent; one more and the peer counts as gone."""
    max_strangers: int = 64
    """Accepted connections that have not said who they are; beyond it the oldest is closed."""
    max_dials: int = 64
    """Connections that are being made at once; one more is refused."""
    max_fenced_lives: int = 4096

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}: must be at least 1, is {getattr(self, field.name)}")
