"""Pushes with sampled checksums over the loopback transport, some of whose blocks arrive damaged.

Damage to a block that is summed never reaches a commit; damage to any other does, knowingly: that is what sampling
means. Ranks of a gang and groups of layers each take a sample of their own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.checksum import as_memory, checksums
from kv_transfer.protocol.codec import decode, encode
from kv_transfer.protocol.gang import GangReceiver
from kv_transfer.protocol.gang_sender import GangSender
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.limits import SECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    ConnectPeer,
    Grant,
    PeerId,
    PushArrived,
    PushChunk,
    PushEffect,
    PushKey,
    SendMessage,
    SourceReleased,
    VerifyBlocks,
    WriteBlocks,
)
from kv_transfer.protocol.plan import summed_first
from kv_transfer.protocol.ranks import GangLayout, bad_blocks, pair_gangs, rank_of, rank_peer
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.base import Connected, Copy, Notified, TransportEvent, WriteCompleted
from kv_transfer.transport.loopback import LoopbackHub, LoopbackTransport, endpoint_of

LAYOUT = KVLayout(groups=(LayerGroup(num_layers=3, num_kv_heads=2, head_dim=4),), block_size=2, dtype="float32")
LIMITS = PushLimits(max_blocks_per_write=24)
NUM_BLOCKS = 40
NUM_LATE = 12
"""Of the last blocks, which are pushed layer after layer."""
PREFILL, DECODE = PeerId("p0", 1), PeerId("d0", 1)
KEY = PushKey("r", 1)


class Push:
    """One push from one rank to one or two, of whole blocks or halves of each layer's heads."""

    def __init__(self, num_receivers: int, lease_id: int, damaged: set[tuple[int, int]], seed: int) -> None:
        """`damaged`: (block index, layer) pairs of which a byte is changed on its way, the first time."""
        self.damaged = damaged
        self.now_ns = 0
        self.hub = LoopbackHub(random.Random(seed))
        model = GangLayout(model="m", layout=LAYOUT), GangLayout(model="m", layout=LAYOUT, num_ranks=num_receivers)
        self.gangs = pair_gangs(*model)
        block_size = model[1].rank_layout().block_size_bytes
        self.pool = bytearray(np.random.default_rng(seed).bytes(NUM_BLOCKS * LAYOUT.block_size_bytes))
        self.targets = {rank: bytearray(NUM_BLOCKS * block_size) for rank in range(num_receivers)}
        self.sender = GangSender(LIMITS, Checksums.SAMPLED, 0, num_layers=LAYOUT.num_layers)
        self.receivers = {
            rank: GangReceiver(LIMITS, Checksums.SAMPLED, num_layers=LAYOUT.num_layers) for rank in self.targets
        }
        self.near = LoopbackTransport(self.hub, PREFILL, memoryview(self.pool))
        self.far = {
            rank: LoopbackTransport(self.hub, rank_peer(DECODE, rank), memoryview(pool))
            for rank, pool in self.targets.items()
        }
        self.writes: dict[int, int] = {}
        self.chunks: list[tuple[int, PushChunk]] = []
        """With the receiver's rank, in the order in which they were written."""
        self.arrived: dict[int, PushArrived] = {}
        self.is_committed = False
        blocks = tuple(BlockGrant(index, NUM_BLOCKS - 1 - index, 1) for index in range(NUM_BLOCKS))
        self.grant = Grant(key=KEY, lease_id=lease_id, receiver=DECODE, sender=PREFILL, blocks=blocks, ttl_ns=SECOND_NS)

    def run(self) -> None:
        for rank, receiver in self.receivers.items():
            self.perform_receiver(rank, receiver.open(0, self.grant, self.gangs.sender_ranks(rank)))
        self.perform_sender(self.sender.open(0, self.grant, NUM_BLOCKS, self.gangs.receiver_ranks(0)))
        ready = [(index, index) for index in range(NUM_BLOCKS)]
        self.perform_sender(self.sender.blocks_ready(0, KEY, ready[:-NUM_LATE]))
        for layer in range(LAYOUT.num_layers):
            late = self.sender.blocks_ready(0, KEY, ready[-NUM_LATE:], range(layer, layer + 1))
            self.perform_sender(late)
        self.perform_sender(self.sender.finish(0, KEY, NUM_BLOCKS * LAYOUT.block_size, ()))
        while not self.is_committed:
            due_ns = self.hub.next_due_ns()
            assert due_ns is not None and self.now_ns < SECOND_NS // 2, "nothing more happens"
            self.now_ns = max(self.now_ns, due_ns)
            self.hub.advance(self.now_ns)
            for event in self.near.poll():
                self.on_sender_event(event)
            for rank, transport in self.far.items():
                for event in transport.poll():
                    self.on_receiver_event(rank, event)

    def on_sender_event(self, event: TransportEvent) -> None:
        if isinstance(event, Connected):
            self.perform_sender(self.sender.on_connected(self.now_ns, event.peer))
        elif isinstance(event, Notified):
            self.perform_sender(self.sender.on_message(self.now_ns, event.peer, decode(event.payload)))
        elif isinstance(event, WriteCompleted) and event.handle in self.writes:
            self.perform_sender(self.sender.on_write_completed(self.now_ns, self.writes.pop(event.handle)))

    def on_receiver_event(self, rank: int, event: TransportEvent) -> None:
        receiver = self.receivers[rank]
        if isinstance(event, Connected):
            self.perform_receiver(rank, receiver.on_connected(self.now_ns, event.peer))
        elif isinstance(event, Notified):
            message = decode(event.payload)
            if isinstance(message, PushChunk) and message.round == 0:
                self.damage(rank, message)
            self.perform_receiver(rank, receiver.on_message(self.now_ns, event.peer, message))

    def perform_sender(self, effects: Sequence[PushEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ConnectPeer):
                self.near.connect(effect.peer, endpoint_of(effect.peer))
            elif isinstance(effect, SendMessage):
                self.near.write(effect.peer, [], encode(effect.message))
            elif isinstance(effect, WriteBlocks):
                self.write(effect)
            else:
                assert effect == SourceReleased(key=KEY, committed=True)
                self.is_committed = True
        self.sender.check_invariants()

    def perform_receiver(self, rank: int, effects: Sequence[PushEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendMessage):
                self.far[rank].write(effect.peer, [], encode(effect.message))
            elif isinstance(effect, VerifyBlocks):
                ranges = self.gangs.pair(effect.rank, rank).target_ranges(effect.block_ids, effect.layers)
                bad = bad_blocks(effect.block_ids, checksums(as_memory(self.targets[rank]), ranges), effect.checksums)
                verified = self.receivers[rank].on_verified(self.now_ns, KEY, effect.chunk, bad, effect.rank)
                self.perform_receiver(rank, verified)
            else:
                assert isinstance(effect, PushArrived)
                self.arrived[rank] = effect
                self.perform_receiver(rank, self.receivers[rank].committed(self.now_ns, KEY))
        self.receivers[rank].check_invariants()

    def write(self, effect: WriteBlocks) -> None:
        rank = rank_of(effect.peer)
        pair = self.gangs.pair(0, rank)
        message = replace(effect.message, num_pieces=pair.num_pieces(effect.message.layers))
        self.chunks.append((rank, message))
        pairs = list(zip(effect.source_blocks, (block.block_id for block in message.blocks), strict=True))
        copies, num_sums = pair.copies(summed_first(pairs, message.summed), message.layers), message.num_checksums
        handle = self.near.write(effect.peer, copies, encode(message), num_sums=num_sums)
        self.writes[handle] = effect.write_id

    def damage(self, rank: int, message: PushChunk) -> None:
        """As on the wire: the bytes have landed, and the receiver has not looked at them."""
        for copy in self.pieces(rank, message, self.damaged):
            self.targets[rank][copy.target_bytes] ^= 1

    def pieces(self, rank: int, message: PushChunk, places: set[tuple[int, int]]) -> list[Copy]:
        return [
            copy
            for block in message.blocks
            for layer in message.layers
            if (block.index, layer) in places
            for copy in self.gangs.pair(0, rank).copies([(block.index, block.block_id)], range(layer, layer + 1))
        ]

    def wrong_places(self, rank: int) -> set[tuple[int, int]]:
        """What the receiver has of other bytes than the sender, by block index and layer."""
        wrong = set()
        for block in self.grant.blocks:
            for layer in range(LAYOUT.num_layers):
                pair = [(block.index, block.block_id)]
                for source, target, size in self.gangs.pair(0, rank).copies(pair, range(layer, layer + 1)):
                    if self.pool[source : source + size] != self.targets[rank][target : target + size]:
                        wrong.add((block.index, layer))
        return wrong


PLACES = st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, LAYOUT.num_layers - 1))


@given(
    num_receivers=st.sampled_from([1, 2]),
    lease_id=st.integers(0, 2**64 - 1 - LAYOUT.num_layers),
    damaged=st.sets(PLACES, max_size=4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_damage_is_committed_only_where_nothing_was_summed(
    num_receivers: int, lease_id: int, damaged: set[tuple[int, int]], seed: int
) -> None:
    push = Push(num_receivers, lease_id, damaged, seed)
    push.run()
    assert set(push.arrived) == set(push.receivers)
    for rank in push.receivers:
        first = [message for target, message in push.chunks if target == rank and message.round == 0]
        repaired = [message for target, message in push.chunks if target == rank and message.round > 0]
        caught = [
            message
            for message in first
            if damaged & {(message.blocks[at].index, layer) for at in message.summed for layer in message.layers}
        ]
        assert [message.chunk for message in repaired] == [message.chunk for message in caught]
        assert all(message.summed == tuple(range(len(message.blocks))) for message in repaired)
        missed = damaged - {(b.index, layer) for message in caught for b in message.blocks for layer in message.layers}
        assert push.wrong_places(rank) == missed, "everything but what is knowingly not looked at"


def test_a_block_that_is_always_damaged_is_caught_by_one_push_in_about_sixteen() -> None:
    """Whichever block it is: none is left out for good, so a wire that damages one is found out."""
    index = 9  # of the first chunk, neither its first nor its last block
    num_caught = 0
    for lease_id in range(1, 65):
        push = Push(1, lease_id, {(index, 1)}, seed=lease_id)
        push.run()
        is_caught = not push.wrong_places(0)
        assert is_caught == any(message.round == 1 for _, message in push.chunks)
        num_caught += is_caught
    assert 2 <= num_caught <= 8
