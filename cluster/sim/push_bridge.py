"""Between WorkerState's push effects and the simulated transport: what the live worker's shell does for a real one."""

from __future__ import annotations

from collections.abc import Callable

from cluster.agent import effects, events
from cluster.core.ids import WorkerId
from cluster.sim.fabric import Fabric
from cluster.sim.kv_memory import KVMemory
from cluster.sim.process import Process
from cluster.sim.transport import Delivered, SimTransport, SimTransportEvent
from kv_transfer.protocol.messages import CancelWrite, FencePeer, PushMessage, SendMessage, WriteBlocks
from kv_transfer.protocol.plan import plan_block_copies
from kv_transfer.transport import base
from kv_transfer.transport.base import PeerId, UnknownPeerError


class PushBridge:
    """Carries out push effects on a SimTransport, and tells the worker what the transport reports."""

    def __init__(
        self,
        fabric: Fabric,
        process: Process,
        worker: WorkerId,
        memory: KVMemory,
        *,
        handle: Callable[[events.Event], None],
    ) -> None:
        me = PeerId(worker.name, worker.incarnation)
        self.transport = SimTransport(fabric, process, me, memory, self._poll)
        self._memory = memory
        self._handle = handle
        self._write_of: dict[int, int] = {}
        """Transport handle -> write id, for writes that have not ended."""
        self._handle_of: dict[int, int] = {}

    def close(self) -> None:
        self.transport.close()

    def carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.ConnectPeer():
                endpoint = next(rank.endpoint for rank in effect.endpoints if rank.rank == 0)
                self.transport.connect(effect.peer, endpoint)
            case SendMessage():
                self._send(effect.peer, effect.message)
            case WriteBlocks():
                self._write(effect)
            case CancelWrite():
                handle = self._handle_of.get(effect.write_id)
                if handle is not None:
                    self.transport.cancel(handle)
            case FencePeer():
                self.transport.fence(effect.peer)
            case _:
                raise AssertionError(f"not a push effect: {effect}")

    def _send(self, peer: PeerId, message: PushMessage) -> None:
        try:
            self.transport.write(peer, (), message)
        except UnknownPeerError:
            return  # swallowed, as by any connection that is gone: every wait has its own deadline

    def _write(self, effect: WriteBlocks) -> None:
        targets = [block.block_id for block in effect.message.blocks]
        pairs = list(zip(effect.source_blocks, targets, strict=True))
        copies = plan_block_copies(pairs, self._memory.layout, effect.message.layers)
        try:
            handle = self.transport.write(effect.peer, copies, effect.message)
        except UnknownPeerError:
            broken = events.WriteBroken(write_id=effect.write_id, quiesced=True, reason="not connected")
            self.transport.process.after(0, lambda: self._handle(broken))
            return
        self._write_of[handle] = effect.write_id
        self._handle_of[effect.write_id] = handle

    def _poll(self) -> None:
        for event in self.transport.poll():
            translated = self._translate(event)
            if translated is not None:
                self._handle(translated)

    def _translate(self, event: SimTransportEvent) -> events.Event | None:
        match event:
            case base.Connected():
                return events.PeerConnected(peer=event.peer, transport=self.transport.name)
            case base.ConnectFailed():
                return events.PeerConnectFailed(peer=event.peer, reason=event.reason)
            case base.PeerGone():
                return events.PeerGone(peer=event.peer, reason=event.reason)
            case base.Fenced():
                return events.FenceDone(peer=event.peer)
            case Delivered():
                return events.PushReceived(peer=event.peer, message=event.message)
            case base.WriteCompleted():
                write_id = self._ended(event.handle)
                return None if write_id is None else events.WriteDone(write_id=write_id)
            case base.WriteFailed():
                write_id = self._ended(event.handle)
                if write_id is None:
                    return None
                return events.WriteBroken(write_id=write_id, quiesced=event.quiesced, reason=event.reason)

    def _ended(self, handle: int) -> int | None:
        """The write id of a handle that has ended; None for a message without data."""
        write_id = self._write_of.pop(handle, None)
        if write_id is not None:
            del self._handle_of[write_id]
        return write_id
