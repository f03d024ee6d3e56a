"""A ucx connection past its handshake: what is written over it, and what arrives."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.transport.base import PeerId
from kv_transfer.transport.ucx_link import Link
from kv_transfer.transport.ucx_reader import Reader
from kv_transfer.transport.ucx_wire import (
    ABANDON,
    ABANDONED,
    DONE,
    GRANT,
    NOTIFY,
    PING,
    WRITE,
    UcxProtocolError,
)
from kv_transfer.transport.ucx_writer import Writer


@dataclass(slots=True, kw_only=True, eq=False)
class Channel:
    """Both ends may notify; only the end that connected writes."""

    peer: PeerId
    link: Link
    writer: Writer
    reader: Reader

    def turn(self, now_ns: int) -> bool:
        """Hears, then does what can be done. True if there was something. Raises: LinkLostError, UcxProtocolError."""
        frames = self.link.hear()
        for frame in frames:
            if frame.kind in (GRANT, DONE, ABANDONED):
                self.writer.take(frame)
            elif frame.kind in (WRITE, NOTIFY, ABANDON):
                self.reader.take(frame, now_ns)
            elif frame.kind != PING:
                raise UcxProtocolError(f"frame {frame.kind} after the handshake")
        has_read = self.reader.advance(now_ns)
        return self.writer.advance(now_ns) or has_read or bool(frames)

    def close(self) -> None:
        self.link.close()

    def has_settled(self) -> bool:
        """After `close`: UCX neither reads nor writes any of our memory for it."""
        return self.link.has_settled() and self.reader.has_settled() and self.writer.has_settled()

    def check_invariants(self) -> None:
        self.writer.check_invariants()
        self.reader.check_invariants()
