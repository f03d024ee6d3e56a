"""What a worker does with pushes, without engine, scheduler and coordinator: `cluster.agent`'s own halves on a loop.

Reservation and grants are calls here; everything else is the worker's own code over a real transport.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.agent import effects as fx
from cluster.agent import events as ev
from cluster.agent.job_thread import JobThread
from cluster.agent.pushes import Pushes
from cluster.agent.transport_port import TransportPort
from cluster.core.messages import RankEndpoint
from engine.core.block_pool import BlockPool
from kv_transfer.checksum import Memory
from kv_transfer.checksum import checksums as sums_of
from kv_transfer.protocol.layout import KVLayout
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import BlockGrant, Grant, PeerId, PushArrived, PushKey
from kv_transfer.protocol.ranks import bad_blocks
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.base import Transport

STOP_TIMEOUT_S = 5.0


class PushHost:
    """One worker life.

    `on_arrived` is told of what is committed: key and block ids, in use once, in token order. `on_failed` is told of
    pushes, from here or to here, that will not be, and why.
    """

    def __init__(
        self,
        me: PeerId,
        transport: Transport,
        memory: Memory,
        layout: KVLayout,
        *,
        limits: PushLimits,
        checksums: Checksums,
        on_arrived: Callable[[PushKey, list[int]], None],
        on_failed: Callable[[PushKey, str], None],
    ) -> None:
        self.me = me
        self.pool = BlockPool(memory.size // layout.block_size_bytes)
        size_bytes = layout.block_size_bytes
        self.pushes = Pushes(
            self.pool, limits, checksums=checksums, block_size_bytes=size_bytes, num_layers=layout.num_layers
        )
        self._transport = transport
        self._memory = memory
        self._layout = layout
        self._on_arrived = on_arrived
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._verifier = JobThread("verifier", self._loop)
        self._port = TransportPort(transport, layout, post=self.post)
        self._events: deque[ev.Event] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._loop.add_reader(transport.fileno(), self._port.poll)

    # ---- what a coordinator or an engine would ask for ------------------------------------------------------

    def reserve(self, key: PushKey, lease_id: int, sender: PeerId, num_blocks: int, *, ttl_ns: int) -> Grant:
        """Raises: PushRefusedError, OutOfBlocksError."""
        asked = Grant(key=key, lease_id=lease_id, receiver=self.me, sender=sender, blocks=(), ttl_ns=ttl_ns)
        blocks = self.pushes.reserve(time.monotonic_ns(), asked, num_cached=0, num_blocks=num_blocks)
        self._settle()
        return replace(asked, blocks=tuple(BlockGrant(b.index, b.block_id, b.generation) for b in blocks))

    def open(self, grant: Grant, endpoint: bytes) -> None:
        """Starts the push; `endpoint` is where the receiver is to be found."""
        where = (RankEndpoint(rank=0, transport=self._transport.name, endpoint=endpoint),)
        self.pushes.open_source(time.monotonic_ns(), grant, len(grant.blocks), where)
        self._settle()

    def give(self, key: PushKey, blocks: Sequence[tuple[int, int]]) -> None:
        """(index, block id) pairs whose KV is final."""
        self.pushes.blocks_ready(time.monotonic_ns(), key, blocks)
        self._settle()

    def finish(self, key: PushKey, num_tokens: int) -> None:
        self.pushes.finish(time.monotonic_ns(), key, num_tokens, ())
        self._settle()

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Looks again whenever something has happened."""
        if not is_so():
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append((is_so, future))
            await future

    def close(self) -> None:
        self._loop.remove_reader(self._transport.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._verifier.close(STOP_TIMEOUT_S)

    # ---- as a worker's process does it ----------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        self._events.append(event)
        if not self._is_handling:
            self._settle()

    def _settle(self) -> None:
        """Handles what has happened, and what follows from it, until nothing is left."""
        self._is_handling = True
        self._carry_out()
        while self._events:
            self._handle(self._events.popleft())
            self._carry_out()
        self._is_handling = False
        self._set_timer()
        still_waiting = []
        for is_so, future in self._waiting:
            if is_so():
                future.set_result(None)
            else:
                still_waiting.append((is_so, future))
        self._waiting = still_waiting

    def _handle(self, event: ev.Event) -> None:
        now_ns = time.monotonic_ns()
        match event:
            case ev.PeerConnected(peer=peer):
                self.pushes.connected(now_ns, peer)
            case ev.PeerConnectFailed(peer=peer, reason=reason):
                self.pushes.connect_failed(now_ns, peer, reason)
            case ev.PeerGone(peer=peer, reason=reason):
                self.pushes.peer_gone(now_ns, peer, reason)
            case ev.FenceDone(peer=peer):
                self.pushes.fenced(now_ns, peer)
            case ev.PushReceived(peer=peer, message=message):
                self.pushes.message(now_ns, peer, message)
            case ev.WriteDone(write_id=write_id):
                self.pushes.write_done(now_ns, write_id)
            case ev.WriteBroken(write_id=write_id, quiesced=quiesced, reason=reason):
                self.pushes.write_broken(now_ns, write_id, quiesced, reason)
            case ev.Verified(key=key, chunk=chunk, bad_block_ids=bad_block_ids):
                self.pushes.verified(now_ns, key, chunk, bad_block_ids)
            case ev.Tick():
                self.pushes.tick(now_ns)
            case _:
                raise AssertionError(f"nobody posts {event}")

    def _carry_out(self) -> None:
        notices = self.pushes.take_notices()
        if notices is not None:
            for arrived in notices.arrived:
                self._commit(arrived)
            for failed in notices.failed:
                self._on_failed(failed.key, failed.reason)
        for effect in self.pushes.take_effects():
            self._execute(effect)

    def _commit(self, arrived: PushArrived) -> None:
        block_ids = self.pushes.commit(arrived)
        self.pushes.committed(time.monotonic_ns(), arrived.key)
        self._on_arrived(arrived.key, block_ids)

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.WriteBlocks():
                self._port.write(effect)
            case fx.SendMessage():
                self._port.send(effect)
            case fx.VerifyBlocks():
                self._verify(effect)
            case fx.ConnectPeer():
                self._port.connect(effect)
            case fx.CancelWrite():
                self._port.cancel(effect)
            case fx.FencePeer():
                self._port.fence(effect)
            case _:
                raise AssertionError(f"pushes do not ask for {effect}")

    def _verify(self, effect: fx.VerifyBlocks) -> None:
        ranges = [self._layout.layers_slice(block_id, effect.layers) for block_id in effect.block_ids]

        def done(sums: list[int]) -> None:
            bad = bad_blocks(effect.block_ids, sums, effect.checksums)
            self.post(ev.Verified(key=effect.key, chunk=effect.chunk, bad_block_ids=bad))

        def failed(error: BaseException) -> None:
            raise error

        self._verifier.submit(lambda: sums_of(self._memory, ranges), done, failed)

    def _set_timer(self) -> None:
        deadline_ns = self.pushes.next_deadline_ns()
        if deadline_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = deadline_ns
        self._timer = None if deadline_ns is None else self._loop.call_at(deadline_ns / 1e9, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_ns = None
        self.post(ev.Tick())
