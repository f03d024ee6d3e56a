"""WorkerState's transport effects on a real Transport, and the transport's events as WorkerState's.

Writes are known by `write_id` above and by the transport's handle below; push messages are objects above and bytes
below.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.agent import effects as fx
from cluster.agent import events as ev
from kv_transfer.protocol.codec import MalformedMessageError, decode, encode
from kv_transfer.protocol.layout import KVLayout
from kv_transfer.protocol.plan import plan_write
from kv_transfer.transport.auto import AutoTransport
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    Transport,
    TransportError,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)

logger = logging.getLogger(__name__)


class TransportPort:
    """All calls come from the loop's thread."""

    def __init__(self, transport: Transport, layout: KVLayout, *, post: Callable[[ev.Event], None]) -> None:
        self._transport = transport
        self._layout = layout
        self._post = post
        self._handles: dict[int, int] = {}
        self._write_ids: dict[int, int] = {}

    def fileno(self) -> int:
        return self._transport.fileno()

    def poll(self) -> None:
        """Posts everything that has happened. Called whenever fileno() is readable."""
        for event in self._transport.poll():
            self._on_event(event)

    def connect(self, effect: fx.ConnectPeer) -> None:
        for endpoint in effect.endpoints:
            if endpoint.rank == 0 and endpoint.transport == self._transport.name:
                self._transport.connect(effect.peer, endpoint.endpoint)
                return
        offered = ", ".join(endpoint.transport for endpoint in effect.endpoints) or "nothing"
        reason = f"it offers {offered}, this worker speaks {self._transport.name}"
        self._post(ev.PeerConnectFailed(peer=effect.peer, reason=reason))

    def send(self, effect: fx.SendMessage) -> None:
        try:
            self._transport.write(effect.peer, [], encode(effect.message))
        except UnknownPeerError:
            # The connection has just gone; PeerGone tells the state, and every wait has its own deadline.
            logger.debug("%s is gone: %s not sent", effect.peer, type(effect.message).__name__)

    def write(self, effect: fx.WriteBlocks) -> None:
        message = effect.message
        pairs = list(zip(effect.source_blocks, (block.block_id for block in message.blocks), strict=True))
        copies = plan_write(pairs, self._layout, message.layers, message.summed)
        num_sums = len(message.summed)
        try:
            handle = self._transport.write(effect.peer, copies, encode(message), num_sums=num_sums)
        except (TransportError, ValueError) as error:  # the second for a grant of blocks that the peer does not have
            self._post(ev.WriteBroken(write_id=effect.write_id, quiesced=True, reason=str(error)))
            return
        self._handles[effect.write_id] = handle
        self._write_ids[handle] = effect.write_id

    def cancel(self, effect: fx.CancelWrite) -> None:
        handle = self._handles.get(effect.write_id)
        if handle is not None:
            self._transport.cancel(handle)

    def fence(self, effect: fx.FencePeer) -> None:
        logger.warning("fencing %s#%d", effect.peer.name, effect.peer.incarnation)
        self._transport.fence(effect.peer)

    def _on_event(self, event: TransportEvent) -> None:
        match event:
            case Connected(peer=peer):
                self._on_connected(peer)
            case ConnectFailed(peer=peer, reason=reason):
                logger.warning("cannot connect to %s#%d: %s", peer.name, peer.incarnation, reason)
                self._post(ev.PeerConnectFailed(peer=peer, reason=reason))
            case PeerGone(peer=peer, reason=reason):
                logger.info("%s#%d is gone: %s", peer.name, peer.incarnation, reason)
                self._post(ev.PeerGone(peer=peer, reason=reason))
            case Fenced(peer=peer):
                self._post(ev.FenceDone(peer=peer))
            case Notified(peer=peer, payload=payload):
                self._on_payload(event, payload)
            case WriteCompleted(handle=handle):
                write_id = self._end_write(handle)
                if write_id is not None:
                    self._post(ev.WriteDone(write_id=write_id))
            case WriteFailed(handle=handle, quiesced=quiesced, reason=reason):
                write_id = self._end_write(handle)
                if write_id is not None:
                    self._post(ev.WriteBroken(write_id=write_id, quiesced=quiesced, reason=reason))

    def _on_connected(self, peer: PeerId) -> None:
        transport = self._transport
        backend, link = transport.name, None
        if isinstance(transport, AutoTransport):
            backend = transport.backend_of(peer)
            link = next((link for link in transport.links() if link.peer == peer), None)
        if link is None:
            logger.info("%s#%d has connected over %s", peer.name, peer.incarnation, backend)
            self._post(ev.PeerConnected(peer=peer, transport=backend))
            return
        bandwidth_bytes_per_s = round(link.bandwidth_bytes_per_s)
        gigabytes_per_s = bandwidth_bytes_per_s / 1e9
        logger.info("connected to %s#%d over %s, %.2f GB/s", peer.name, peer.incarnation, link.backend, gigabytes_per_s)
        self._post(ev.PeerConnected(peer=peer, transport=link.backend, bandwidth_bytes_per_s=bandwidth_bytes_per_s))

    def _on_payload(self, event: Notified, payload: bytes) -> None:
        try:
            message = decode(payload)
        except MalformedMessageError as error:
            logger.warning("%s#%d sent a malformed message: %s", event.peer.name, event.peer.incarnation, error)
            return
        self._post(ev.PushReceived(peer=event.peer, message=message))

    def _end_write(self, handle: int) -> int | None:
        """The state's name of the write; None for a message alone."""
        write_id = self._write_ids.pop(handle, None)
        if write_id is not None:
            del self._handles[write_id]
        return write_id
