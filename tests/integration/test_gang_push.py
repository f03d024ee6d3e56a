"""Pushes between gangs of unequal tensor parallelism, with every rank a process of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.limits import MILLISECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    BlocksReleased,
    Grant,
    PushArrived,
    PushFailed,
    PushKey,
    SourceReleased,
)
from kv_transfer.protocol.ranks import GangLayout
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.backends import PREFERENCE, why_unavailable
from tests.support.rank_process import Gangs, RankHandle

NUM_BLOCKS = 24
LAYOUT = KVLayout(
    groups=(
        LayerGroup(num_layers=5, num_kv_heads=4, head_dim=64),
        LayerGroup(num_layers=2, num_kv_heads=1, head_dim=64, window=512),
    ),
    block_size=16,
    dtype="bfloat16",
)
"""The second group's head is held by every rank."""
LIMITS = PushLimits(max_blocks_per_write=4)
SHORT_LIMITS = PushLimits(max_blocks_per_write=4, stop_timeout_ns=200 * MILLISECOND_NS)
DEGREES = ((1, 2), (2, 1), (2, 4), (4, 2), (2, 2))
RNG = np.random.default_rng(5)

StartGangs = Callable[..., Gangs]


@pytest.fixture(params=PREFERENCE)
def transport(request: pytest.FixtureRequest) -> str:
    reason = why_unavailable(request.param)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def start_gangs() -> Iterator[StartGangs]:
    running: list[Gangs] = []

    def start(
        transport: str,
        degrees: tuple[int, int],
        *,
        limits: PushLimits = LIMITS,
        checksums: Checksums = Checksums.FULL,
    ) -> Gangs:
        sender, receiver = (GangLayout(model="m", layout=LAYOUT, num_ranks=degree) for degree in degrees)
        gangs = Gangs(transport, sender, receiver, num_blocks=NUM_BLOCKS, limits=limits, checksums=checksums)
        running.append(gangs)
        return gangs

    yield start
    for gangs in running:
        gangs.close()


def make_grant(gangs: Gangs, number: int, block_ids: list[int], ttl_s: float = 10) -> Grant:
    return Grant(
        key=PushKey(f"r{number}", 1),
        lease_id=number + 1,
        receiver=gangs.receiver,
        sender=gangs.sender,
        blocks=tuple(BlockGrant(index, block_id, 7) for index, block_id in enumerate(block_ids)),
        ttl_ns=int(ttl_s * 1e9),
    )


def random_blocks(count: int) -> list[bytes]:
    return [RNG.integers(0, 256, LAYOUT.block_size_bytes, dtype=np.uint8).tobytes() for _ in range(count)]


def begin_push(gangs: Gangs, grant: Grant, sources: list[int], content: list[bytes]) -> None:
    for block_id, block in zip(sources, content, strict=True):
        gangs.put(block_id, block)
    gangs.open(grant, len(content))


def push_at_once(gangs: Gangs, grant: Grant, content: list[bytes]) -> None:
    """From blocks 0, 1, ... until nobody holds anything of it."""
    sources = list(range(len(content)))
    begin_push(gangs, grant, sources, content)
    gangs.give(grant.key, list(enumerate(sources)))
    gangs.finish(grant.key, num_tokens=16 * len(content))
    gangs.wait_until(gangs.has_ended)


def check_received(gangs: Gangs, grant: Grant, content: list[bytes]) -> None:
    for number, rank in enumerate(gangs.receivers):
        for block, whole in zip(grant.blocks, content, strict=True):
            assert rank.call("get", block.block_id) == gangs.expected(number, whole)


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: f"{degrees[0]}to{degrees[1]}")
def test_every_rank_gets_its_heads(start_gangs: StartGangs, transport: str, degrees: tuple[int, int]) -> None:
    gangs = start_gangs(transport, degrees)
    for number in range(2):  # the second in the same blocks, the other way round
        block_ids = [3, 4, 5, 17, 9, 8, 20, 21, 22][:: 1 - 2 * number]
        sources = [2, 3, 4, 6, 10, 11, 12, 13, 0]
        content = random_blocks(len(sources))
        grant = make_grant(gangs, number, block_ids)
        begin_push(gangs, grant, sources, content)
        gangs.give(grant.key, [(index, sources[index]) for index in range(4)])
        for layers in (range(3), range(3, 5), range(5, 7)):  # the last chunk, while its layers are computed
            gangs.give(grant.key, [(index, sources[index]) for index in range(4, 9)], layers)
        gangs.finish(grant.key, num_tokens=9 * 16)
        gangs.wait_until(gangs.has_ended)
        (arrived,) = (effect for effect in gangs.heard_at_receiver if isinstance(effect, PushArrived))
        assert arrived.blocks == grant.blocks and arrived.num_tokens == 9 * 16
        sent = sum(size for rank in range(degrees[0]) for size in gangs.pairs.receiver_ranks(rank).values())
        assert arrived.stats.size_bytes == 9 * sent
        assert gangs.heard_at_sender == [SourceReleased(key=grant.key, committed=True)]
        check_received(gangs, grant, content)
        gangs.heard_at_receiver.clear()
        gangs.heard_at_sender.clear()
    assert all(rank.call("count") == (0, 0) for rank in gangs.processes)


def test_without_checksums(start_gangs: StartGangs, transport: str) -> None:
    gangs = start_gangs(transport, (1, 2), checksums=Checksums.OFF)
    content = random_blocks(6)
    grant = make_grant(gangs, 0, [1, 2, 3, 7, 6, 5])
    push_at_once(gangs, grant, content)
    check_received(gangs, grant, content)


def test_a_sample_catches_damage_to_what_is_in_it_and_to_nothing_else(start_gangs: StartGangs) -> None:
    limits = PushLimits(max_blocks_per_write=NUM_BLOCKS)
    gangs = start_gangs("shm", (1, 2), limits=limits, checksums=Checksums.SAMPLED)
    content = random_blocks(NUM_BLOCKS)
    # Lease 5 has blocks 0, 5, 21 and 23 summed, lease 6 blocks 0, 3, 19 and 23, lease 7 blocks 0, 13 and 23.
    for lease_id, victim, is_caught in ((5, 5, True), (6, 5, False), (7, 13, True)):
        grant = make_grant(gangs, lease_id - 1, list(range(NUM_BLOCKS)))
        gangs.receivers[1].call("damage", victim)
        push_at_once(gangs, grant, content)
        assert isinstance(gangs.heard_at_receiver[-1], PushArrived)
        for rank_number, rank in enumerate(gangs.receivers):
            found = [rank.call("get", block_id) for block_id in range(NUM_BLOCKS)]
            wrong = [index for index, whole in enumerate(content) if found[index] != gangs.expected(rank_number, whole)]
            assert wrong == ([] if is_caught or rank_number == 0 else [victim])


def half_pushed(start_gangs: StartGangs, transport: str, degrees: tuple[int, int], ttl_s: float) -> tuple[Gangs, Grant]:
    """A push of which every rank has been given one half, and has begun to write it."""
    gangs = start_gangs(transport, degrees, limits=SHORT_LIMITS)
    # So that the short lease has not to last while connections are made.
    push_at_once(gangs, make_grant(gangs, 1, [0]), random_blocks(1))
    gangs.heard_at_receiver.clear()
    gangs.heard_at_sender.clear()
    content = random_blocks(NUM_BLOCKS)
    grant = make_grant(gangs, 0, list(range(NUM_BLOCKS)), ttl_s)
    begin_push(gangs, grant, list(range(NUM_BLOCKS)), content)
    gangs.give(grant.key, [(index, index) for index in range(NUM_BLOCKS // 2)])
    deadline_s = time.monotonic() + 10
    for number, rank in enumerate(gangs.receivers):
        while rank.call("get", 0) != gangs.expected(number, content[0]):
            assert time.monotonic() < deadline_s, "nothing is written"
    return gangs, grant


def check_nothing_is_held(gangs: Gangs, grant: Grant, dead: RankHandle) -> None:
    """Every rank that lives has let go, nothing was committed, and both owners were told once."""
    gangs.wait_until(gangs.has_ended)
    block_ids = tuple(block.block_id for block in grant.blocks)
    assert not any(isinstance(effect, PushArrived) for effect in gangs.heard_at_receiver)
    assert sum(isinstance(effect, PushFailed) for effect in gangs.heard_at_receiver) == 1
    assert sum(isinstance(effect, PushFailed) for effect in gangs.heard_at_sender) == 1
    assert gangs.heard_at_receiver[-1] == BlocksReleased(key=grant.key, block_ids=block_ids)
    (released,) = (effect for effect in gangs.heard_at_sender if isinstance(effect, SourceReleased))
    assert not released.committed
    assert all(rank.call("count") == (0, 0) for rank in gangs.processes if rank is not dead)


@pytest.mark.bad_day(15, 16)
@pytest.mark.parametrize("is_sender", [True, False], ids=["sender", "receiver"])
@pytest.mark.parametrize("degrees", [(2, 4), (4, 2)], ids=lambda degrees: f"{degrees[0]}to{degrees[1]}")
def test_death_of_one_rank_in_mid_push_commits_nothing_anywhere(
    start_gangs: StartGangs, transport: str, degrees: tuple[int, int], is_sender: bool
) -> None:
    """Between gangs as between workers: the other legs learn of it at once and let go."""
    gangs, grant = half_pushed(start_gangs, transport, degrees, ttl_s=60)
    victim = (gangs.senders if is_sender else gangs.receivers)[1]
    gangs.give(grant.key, [(index, index) for index in range(NUM_BLOCKS // 2, NUM_BLOCKS - 1)])
    victim.kill()
    check_nothing_is_held(gangs, grant, victim)


@pytest.mark.bad_day(7)
def test_stopped_rank_is_fenced_and_changes_no_byte_when_it_wakes(start_gangs: StartGangs, transport: str) -> None:
    """The lease of one rank's part ends the whole push, and its blocks wait for that rank's fence."""
    gangs, grant = half_pushed(start_gangs, transport, (2, 4), ttl_s=2)
    victim = gangs.senders[1]
    victim.kill(signal.SIGSTOP)
    gangs.wait_until(lambda: gangs.target_leader.num_pushes == 0)
    blank = [bytes(len(rank.call("get", 0))) for rank in gangs.receivers]
    for rank, zeros in zip(gangs.receivers, blank, strict=True):
        for block in grant.blocks:  # they are somebody else's now
            rank.call("put", block.block_id, zeros)
    with suppress(ProcessLookupError):  # where the fence is its death
        victim.kill(signal.SIGCONT)
    check_nothing_is_held(gangs, grant, victim)
    time.sleep(0.05)  # nothing may land: a real late write needs real time
    for rank, zeros in zip(gangs.receivers, blank, strict=True):
        assert all(rank.call("get", block.block_id) == zeros for block in grant.blocks)
