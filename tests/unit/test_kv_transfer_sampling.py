"""The rule of which blocks are summed, and that a write sums those and no others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.limits import SECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    Grant,
    PeerId,
    PushChunk,
    PushKey,
    PushMissing,
    WriteBlocks,
)
from kv_transfer.protocol.plan import Copy, plan_write, summed_first
from kv_transfer.protocol.sampling import SAMPLE_INTERVAL, Checksums, summed_positions
from kv_transfer.protocol.sender import PushSender
from kv_transfer.transport.base import check_num_sums

KEY = PushKey("r", 1)
PREFILL, DECODE = PeerId("p0", 3), PeerId("d0", 5)
LAYOUT = KVLayout(groups=(LayerGroup(num_layers=2, num_kv_heads=1, head_dim=8),), block_size=2, dtype="float32")
SIZE = LAYOUT.block_size_bytes


def make_chunk(num_blocks: int = 64, *, first_index: int = 0, lease_id: int = 7) -> PushChunk:
    blocks = tuple(BlockGrant(first_index + place, 500 + place, 1) for place in range(num_blocks))
    return PushChunk(key=KEY, lease_id=lease_id, rank=0, chunk=0, blocks=blocks, first_layer=0, num_layers=2, summed=())


def sample(chunk: PushChunk) -> tuple[int, ...]:
    return summed_positions(Checksums.SAMPLED, chunk)


def test_off_sums_nothing_and_full_everything() -> None:
    assert summed_positions(Checksums.OFF, make_chunk()) == ()
    assert summed_positions(Checksums.OFF, replace(make_chunk(), round=1)) == ()
    assert summed_positions(Checksums.FULL, make_chunk()) == tuple(range(64))


def test_a_sample_is_the_ends_and_every_sixteenth_between() -> None:
    for lease_id in range(40):
        positions = sample(make_chunk(lease_id=lease_id))
        assert positions[0] == 0 and positions[-1] == 63 and list(positions) == sorted(set(positions))
        inner = [position for position in positions if position not in (0, 63)]
        assert len(inner) in (3, 4) and all(after - before == SAMPLE_INTERVAL for before, after in pairwise(inner))
    for num_blocks in (1, 2):
        assert sample(make_chunk(num_blocks)) == tuple(range(num_blocks))


def test_what_is_summed_depends_on_places_in_the_sequence_not_in_chunks() -> None:
    """So damage to sixteen neighbours is caught wherever the sequence is cut into chunks."""
    whole = sample(make_chunk(64))
    for cut in range(1, 64):
        parts = (make_chunk(cut), make_chunk(64 - cut, first_index=cut))
        summed = [part.blocks[position].index for part in parts for position in sample(part)]
        assert set(whole) <= set(summed) <= {*whole, cut - 1, cut}


@pytest.mark.parametrize("step", [*range(1, 34), 55, 89, 144, 256, 1 << 32])
def test_over_pushes_every_block_gets_its_turn(step: int) -> None:
    """Leases rise by one, or by more where other workers' are between: no block is always left out."""
    seen: set[int] = set()
    for number in range(200):
        seen.update(sample(make_chunk(64, lease_id=(1 << 32) + number * step)))
    assert seen == set(range(64))


def test_groups_of_layers_and_ranks_take_other_samples() -> None:
    chunk = make_chunk()
    assert len({sample(replace(chunk, first_layer=layer)) for layer in range(16)}) > 5
    assert len({sample(replace(chunk, rank=rank)) for rank in range(16)}) > 5


def test_what_is_written_again_is_summed_whole() -> None:
    assert sample(replace(make_chunk(), round=1)) == tuple(range(64))


def test_the_sender_names_the_sample_of_each_write() -> None:
    sender = PushSender(PushLimits(max_blocks_per_write=20), Checksums.SAMPLED, num_layers=2)
    blocks = tuple(BlockGrant(index, 100 + index, 9) for index in range(24))
    sender.open(0, Grant(key=KEY, lease_id=7, receiver=DECODE, sender=PREFILL, blocks=blocks, ttl_ns=SECOND_NS), 24)
    sender.on_connected(0, DECODE)
    effects = sender.blocks_ready(0, KEY, [(index, index) for index in range(21)])
    effects += sender.blocks_ready(0, KEY, [(21, 21), (22, 22), (23, 23)], range(1))
    effects += sender.blocks_ready(0, KEY, [(21, 21), (22, 22), (23, 23)], range(1, 2))
    writes = [effect for effect in effects if isinstance(effect, WriteBlocks)]
    assert [write.message.summed for write in writes] == [(0, 13, 19), (0,), (0, 2), (0, 2)]
    assert all(write.message.checksums == () for write in writes), "the transport takes them"
    for write in writes:
        sender.on_write_completed(1, write.write_id)
    sender.finish(2, KEY, 48, ())
    again = sender.on_message(3, DECODE, PushMissing(key=KEY, lease_id=7, chunks=(0,), round=1))
    (write,) = (effect for effect in again if isinstance(effect, WriteBlocks))
    assert write.message.summed == tuple(range(20))


def test_a_write_begins_with_what_is_summed_and_merges_the_rest() -> None:
    pairs = [(place, 10 + place) for place in range(8)]
    assert summed_first(pairs, (1, 6)) == [pairs[i] for i in (1, 6, 0, 2, 3, 4, 5, 7)]
    assert plan_write(pairs, LAYOUT, range(2), (1, 6)) == [
        Copy(SIZE, 11 * SIZE, SIZE),
        Copy(6 * SIZE, 16 * SIZE, SIZE),
        Copy(0, 10 * SIZE, SIZE),
        Copy(2 * SIZE, 12 * SIZE, 4 * SIZE),
        Copy(7 * SIZE, 17 * SIZE, SIZE),
    ]
    assert plan_write(pairs, LAYOUT, range(2), ()) == [Copy(0, 10 * SIZE, 8 * SIZE)]
    assert len(plan_write(pairs, LAYOUT, range(1), tuple(range(8)))) == 8


def test_no_more_sums_than_copies() -> None:
    copies = [Copy(0, 0, 1)] * 3
    for number in range(4):
        check_num_sums(copies, number)
    for number in (-1, 4):
        with pytest.raises(ValueError, match="num_sums"):
            check_num_sums(copies, number)
