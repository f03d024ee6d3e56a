"""PushReceiver, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.protocol.codec import encode
from kv_transfer.protocol.limits import MAX_MISSING_CHUNKS, SECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    BlocksQuarantined,
    BlocksReleased,
    FencePeer,
    FirstToken,
    Grant,
    LeaseRenew,
    PeerId,
    PushAbort,
    PushArrived,
    PushChunk,
    PushCommitted,
    PushEffect,
    PushEnd,
    PushFailed,
    PushKey,
    PushMessage,
    PushMissing,
    PushStats,
    PushStop,
    SendMessage,
    VerifyBlocks,
)
from kv_transfer.protocol.receiver import PushReceiver
from kv_transfer.protocol.sampling import Checksums

KEY = PushKey("r1", 1)
PREFILL = PeerId("prefill-0", 1)
DECODE = PeerId("decode-0", 7)
STATS = PushStats(size_bytes=3, early_bytes=2, duration_ns=1)
FIRST = (FirstToken(choice=0, position=0, token_id=42),)
LIMITS = PushLimits(max_missing_rounds=2)
BLOCK_IDS = (100, 101, 102)
NUM_LAYERS = 4
EVERY_LAYER = range(NUM_LAYERS)
QUARANTINED = BlocksQuarantined(key=KEY, block_ids=BLOCK_IDS)
RELEASED = BlocksReleased(key=KEY, block_ids=BLOCK_IDS)


def make_grant(num_blocks: int = 3, key: PushKey = KEY, lease_id: int = 5, first_block: int = 100) -> Grant:
    blocks = tuple(BlockGrant(i, first_block + i, 9) for i in range(num_blocks))
    return Grant(key=key, lease_id=lease_id, receiver=DECODE, sender=PREFILL, blocks=blocks, ttl_ns=8 * SECOND_NS)


def make_chunk(
    number: int,
    indices: tuple[int, ...],
    *,
    layers: range = EVERY_LAYER,
    checksums: bool = False,
    round_: int = 0,
    rank: int = 0,
) -> PushChunk:
    blocks = tuple(BlockGrant(i, 100 + i, 9) for i in indices)
    sums = tuple(1000 + i for i in indices) if checksums else ()
    summed = tuple(range(len(blocks))) if checksums else ()
    return PushChunk(
        key=KEY,
        lease_id=5,
        rank=rank,
        chunk=number,
        blocks=blocks,
        first_layer=layers.start,
        num_layers=len(layers),
        summed=summed,
        checksums=sums,
        round=round_,
    )


def make_end(num_chunks: int = 2, num_blocks: int = 3, round_: int = 0) -> PushEnd:
    return PushEnd(
        key=KEY,
        lease_id=5,
        rank=0,
        num_chunks=num_chunks,
        num_blocks=num_blocks,
        num_tokens=40,
        first_tokens=FIRST,
        stats=STATS,
        round=round_,
    )


def messages(effects: list[PushEffect]) -> list[PushMessage]:
    return [effect.message for effect in effects if isinstance(effect, SendMessage)]


def make_receiver(
    limits: PushLimits = LIMITS,
    *,
    connected: bool = True,
    checksums: Checksums = Checksums.OFF,
    num_blocks: int = 3,
) -> PushReceiver:
    receiver = PushReceiver(limits, checksums, num_layers=NUM_LAYERS)
    assert receiver.open(0, make_grant(num_blocks)) == []
    if connected:
        assert receiver.on_connected(0, PREFILL) == []
    return receiver


def tell(receiver: PushReceiver, *told: PushMessage, now_ns: int = 1, peer: PeerId = PREFILL) -> list[PushEffect]:
    effects: list[PushEffect] = []
    for message in told:
        effects += receiver.on_message(now_ns, peer, message)
        receiver.check_invariants()
    return effects


def arrived(receiver: PushReceiver) -> PushArrived:
    (effect,) = tell(receiver, make_chunk(0, (0, 1)), make_chunk(1, (2,)), make_end())
    assert isinstance(effect, PushArrived)
    return effect


def test_complete_push_arrives_and_is_committed() -> None:
    receiver = make_receiver()
    effect = arrived(receiver)
    assert effect.blocks == make_grant().blocks and effect.num_tokens == 40 and effect.first_tokens == FIRST
    assert effect.stats == STATS
    assert tell(receiver, make_end()) == []  # its owner is committing
    committed = PushCommitted(key=KEY, lease_id=5)
    assert messages(receiver.committed(2, KEY)) == [committed]
    assert receiver.num_pushes == 0 and receiver.leases(2) == []
    assert messages(tell(receiver, make_end())) == [committed]  # the answer may have been lost
    assert tell(receiver, make_chunk(0, (0, 1))) == []
    assert tell(receiver, PushAbort(key=KEY, lease_id=5, stopped=True, reason="late")) == []


def test_granted_block_without_kv_need_not_arrive() -> None:
    receiver = make_receiver()
    (effect,) = tell(receiver, make_chunk(0, (0, 1)), make_end(num_chunks=1, num_blocks=2))
    assert isinstance(effect, PushArrived) and effect.blocks == make_grant().blocks


def test_push_without_blocks_arrives_with_its_end() -> None:
    receiver = PushReceiver(LIMITS, Checksums.OFF, num_layers=NUM_LAYERS)
    receiver.open(0, make_grant(0))
    receiver.on_connected(0, PREFILL)
    (effect,) = tell(receiver, make_end(num_chunks=0))
    assert isinstance(effect, PushArrived)


def test_chunks_are_verified_before_the_end_is_answered() -> None:
    receiver = make_receiver()
    effects = tell(receiver, make_chunk(0, (0, 1), checksums=True), make_chunk(1, (2,), checksums=True), make_end())
    assert effects == [
        VerifyBlocks(key=KEY, chunk=0, block_ids=(100, 101), layers=EVERY_LAYER, checksums=(1000, 1001)),
        VerifyBlocks(key=KEY, chunk=1, block_ids=(102,), layers=EVERY_LAYER, checksums=(1002,)),
    ]
    assert tell(receiver, make_chunk(0, (0, 1), checksums=True)) == []  # a copy
    assert receiver.on_verified(2, KEY, 1, ()) == []
    (effect,) = receiver.on_verified(2, KEY, 0, ())
    assert isinstance(effect, PushArrived)


def test_lost_and_corrupt_chunks_are_asked_for_again() -> None:
    receiver = make_receiver()
    tell(receiver, make_chunk(1, (2,), checksums=True), make_end())
    effects = receiver.on_verified(2, KEY, 1, (102,))
    missing = PushMissing(key=KEY, lease_id=5, chunks=(0, 1), round=1)
    assert messages(effects) == [missing]
    assert messages(tell(receiver, make_end())) == [missing]  # the answer may have been lost
    assert tell(receiver, make_chunk(0, (0, 1)), make_chunk(1, (2,))) == []  # late copies of round 0 prove nothing
    (effect,) = tell(receiver, make_chunk(0, (0, 1), round_=1), make_chunk(1, (2,), round_=1), make_end(round_=1))
    assert isinstance(effect, PushArrived)


def test_chunk_without_the_sums_that_are_asked_for_is_asked_for_again() -> None:
    receiver = make_receiver(checksums=Checksums.FULL)
    receiver.on_message(1, PREFILL, make_chunk(0, (0, 1), checksums=True))
    receiver.on_verified(2, KEY, 0, ())
    assert receiver.on_message(3, PREFILL, make_chunk(1, (2,))) == []
    assert messages(receiver.on_message(4, PREFILL, make_end())) == [
        PushMissing(key=KEY, lease_id=5, chunks=(1,), round=1)
    ]
    receiver.on_message(5, PREFILL, make_chunk(1, (2,), checksums=True, round_=1))
    receiver.on_message(6, PREFILL, make_end(round_=1))
    assert isinstance(receiver.on_verified(7, KEY, 1, ())[0], PushArrived)


SAMPLE = (0, 5, 19)
"""What is summed of twenty blocks under lease 5."""


def sampled_chunk(summed: tuple[int, ...] = SAMPLE, round_: int = 0) -> PushChunk:
    sums = tuple(1000 + position for position in summed)
    return replace(make_chunk(0, tuple(range(20)), round_=round_), summed=summed, checksums=sums)


def test_of_a_sample_exactly_the_summed_blocks_are_verified() -> None:
    receiver = make_receiver(checksums=Checksums.SAMPLED, num_blocks=20)
    (verify,) = tell(receiver, sampled_chunk(), make_end(num_chunks=1, num_blocks=20))
    block_ids, sums = (100, 105, 119), (1000, 1005, 1019)
    assert verify == VerifyBlocks(key=KEY, chunk=0, block_ids=block_ids, layers=EVERY_LAYER, checksums=sums)
    (effect,) = receiver.on_verified(2, KEY, 0, ())
    assert isinstance(effect, PushArrived)


def test_corrupt_block_of_a_sample_has_the_whole_chunk_sent_and_verified_again() -> None:
    receiver = make_receiver(checksums=Checksums.SAMPLED, num_blocks=20)
    tell(receiver, sampled_chunk(), make_end(num_chunks=1, num_blocks=20))
    missing = PushMissing(key=KEY, lease_id=5, chunks=(0,), round=1)
    assert messages(receiver.on_verified(2, KEY, 0, (105,))) == [missing]
    assert tell(receiver, sampled_chunk(round_=1)) == [], "where one is damaged its neighbours may be"
    rewritten = sampled_chunk(tuple(range(20)), round_=1)
    (verify,) = tell(receiver, rewritten, make_end(num_chunks=1, num_blocks=20, round_=1))
    assert isinstance(verify, VerifyBlocks) and len(verify.block_ids) == 20
    assert isinstance(receiver.on_verified(3, KEY, 0, ())[0], PushArrived)


@pytest.mark.parametrize("summed", [(), (0, 19), (0, 5), (0, 4, 6, 19)], ids=["none", "ends", "no last", "others"])
def test_chunk_with_the_sums_of_another_sample_counts_as_lost(summed: tuple[int, ...]) -> None:
    receiver = make_receiver(checksums=Checksums.SAMPLED, num_blocks=20)
    assert tell(receiver, sampled_chunk(summed)) == []
    assert receiver.num_ignored_messages == 1
    (answer,) = messages(tell(receiver, make_end(num_chunks=1, num_blocks=20)))
    assert answer == PushMissing(key=KEY, lease_id=5, chunks=(0,), round=1)


def test_sums_that_nobody_asked_for_are_verified_as_well() -> None:
    for checksums in (Checksums.OFF, Checksums.SAMPLED):
        receiver = make_receiver(checksums=checksums)
        (verify,) = tell(receiver, make_chunk(0, (0, 1, 2), checksums=True))
        assert isinstance(verify, VerifyBlocks) and verify.block_ids == BLOCK_IDS


def test_late_end_of_an_earlier_round_never_commits() -> None:
    """A rewrite may be in flight: it would land in a block that is somebody else's by then."""
    receiver = make_receiver()
    tell(receiver, make_chunk(0, (0, 1)), make_end())
    tell(receiver, make_chunk(1, (2,), round_=1))
    effects = tell(receiver, make_end())
    assert messages(effects) == [PushMissing(key=KEY, lease_id=5, chunks=(1,), round=1)] and len(effects) == 1


def test_too_many_rounds_fail_the_push() -> None:
    receiver = make_receiver()
    for round_ in (0, 1):
        (effect,) = tell(receiver, make_end(round_=round_))
        assert isinstance(effect, SendMessage)
    effects = tell(receiver, make_end(round_=2))
    assert isinstance(effects[0], PushFailed) and effects[1] == QUARANTINED


def test_more_chunks_lost_than_one_message_can_name_fail_the_push() -> None:
    for num_chunks, is_asked in ((MAX_MISSING_CHUNKS, True), (MAX_MISSING_CHUNKS + 1, False)):
        receiver = make_receiver(num_blocks=MAX_MISSING_CHUNKS)
        effects = tell(receiver, make_end(num_chunks=num_chunks))
        assert isinstance(effects[0], SendMessage if is_asked else PushFailed)
        assert all(len(encode(message)) < 1 << 16 for message in messages(effects))


@pytest.mark.parametrize(
    "chunk",
    [
        replace(make_chunk(0, (0,)), blocks=(BlockGrant(0, 100, 8),)),
        replace(make_chunk(0, (0,)), blocks=(BlockGrant(0, 101, 9),)),
        make_chunk(0, (3,)),
        make_chunk(0, ()),
        make_chunk(3 * NUM_LAYERS, (0,)),
        make_chunk(0, (0,), rank=1),
        replace(make_chunk(0, (0,), checksums=True), checksums=(1, 2)),
        replace(make_chunk(0, (0,), checksums=True), checksums=()),
        replace(make_chunk(0, (0,)), checksums=(1,)),
        replace(make_chunk(0, (0, 1)), summed=(2,), checksums=(1,)),
        replace(make_chunk(0, (0, 1)), summed=(-1,), checksums=(1,)),
        replace(make_chunk(0, (0, 1)), summed=(1, 1), checksums=(1, 1)),
        replace(make_chunk(0, (0, 1)), summed=(1, 0), checksums=(1, 1)),
        make_chunk(0, (0,), layers=range(3, 5)),
        make_chunk(0, (0,), layers=range(2, 2)),
        make_chunk(0, (0, 0)),
    ],
    ids=[
        "generation",
        "block",
        "index",
        "empty",
        "number",
        "rank",
        "too many checksums",
        "cut checksums",
        "nobody's checksum",
        "checksum beyond",
        "checksum before",
        "checksum twice",
        "checksums out of order",
        "layers",
        "no layer",
        "twice",
    ],
)
def test_chunk_that_contradicts_its_grant_fails_the_push(chunk: PushChunk) -> None:
    effects = tell(make_receiver(), chunk)
    assert isinstance(effects[0], PushFailed) and effects[1] == QUARANTINED
    assert isinstance(messages(effects)[0], PushStop)


@pytest.mark.parametrize("end", [make_end(num_chunks=13), make_end(round_=1), make_end(num_chunks=1)])
def test_end_that_does_not_fit_never_commits(end: PushEnd) -> None:
    effects = tell(make_receiver(), make_chunk(0, (0, 1)), end)
    assert isinstance(effects[0], PushFailed) and effects[1] == QUARANTINED


def test_push_in_groups_of_layers_is_verified_and_arrives() -> None:
    receiver = make_receiver(checksums=Checksums.FULL)
    chunks = [
        make_chunk(0, (0, 1), checksums=True),
        make_chunk(1, (2,), layers=range(1), checksums=True),
        make_chunk(2, (2,), layers=range(1, 3), checksums=True),
        make_chunk(3, (2,), layers=range(3, 4), checksums=True),
    ]
    effects = tell(receiver, *reversed(chunks), make_end(num_chunks=4))
    assert [(e.block_ids, e.layers) for e in effects if isinstance(e, VerifyBlocks)] == [
        ((102,), range(3, 4)),
        ((102,), range(1, 3)),
        ((102,), range(1)),
        ((100, 101), EVERY_LAYER),
    ]
    for number in (0, 1, 2):
        assert receiver.on_verified(2, KEY, number, ()) == []
        receiver.check_invariants()
    (effect,) = receiver.on_verified(2, KEY, 3, ())
    assert isinstance(effect, PushArrived)
    receiver.check_invariants()


@pytest.mark.parametrize("left_out", range(4))
def test_push_that_lacks_layers_never_commits(left_out: int) -> None:
    """Its end counts only the chunks that came, as a sender's bug would have it."""
    layers = [layer for layer in EVERY_LAYER if layer != left_out]
    chunks = [make_chunk(0, (0, 1))]
    chunks += [make_chunk(1 + n, (2,), layers=range(layer, layer + 1)) for n, layer in enumerate(layers)]
    effects = tell(make_receiver(), *chunks, make_end(num_chunks=4))
    assert effects[0] == PushFailed(key=KEY, reason="the chunks do not cover the granted blocks")
    assert effects[1] == QUARANTINED


def test_lost_group_of_layers_is_asked_for_again() -> None:
    receiver = make_receiver()
    groups = [make_chunk(1 + n, (2,), layers=range(2 * n, 2 * n + 2), checksums=True) for n in range(2)]
    tell(receiver, make_chunk(0, (0, 1)), *groups, make_end(num_chunks=3))
    receiver.on_verified(2, KEY, 1, (102,))
    effects = receiver.on_verified(2, KEY, 2, ())
    assert messages(effects) == [PushMissing(key=KEY, lease_id=5, chunks=(1,), round=1)]
    receiver.check_invariants()
    (effect,) = tell(receiver, replace(groups[0], round=1, summed=(), checksums=()), make_end(num_chunks=3, round_=1))
    assert isinstance(effect, PushArrived)


@pytest.mark.parametrize(
    "second",
    [
        make_chunk(1, (1,)),
        make_chunk(1, (2, 1), layers=range(3, 4)),
        make_chunk(0, (0, 1), layers=range(2)),
        make_chunk(0, (0,)),
    ],
    ids=["all layers", "one layer", "other layers", "other blocks"],
)
def test_chunk_that_contradicts_another_one_fails_the_push(second: PushChunk) -> None:
    effects = tell(make_receiver(), make_chunk(0, (0, 1)), second)
    assert isinstance(effects[0], PushFailed) and effects[1] == QUARANTINED
    assert isinstance(messages(effects)[0], PushStop)


@pytest.mark.parametrize("peer", [PeerId("prefill-0", 2), PeerId("prefill-1", 1), DECODE])
def test_strangers_are_ignored(peer: PeerId) -> None:
    receiver = make_receiver()
    receiver.on_connected(0, PeerId("prefill-1", 1))
    abort = PushAbort(key=KEY, lease_id=5, stopped=True, reason="?")
    assert tell(receiver, make_chunk(0, (0, 1)), make_end(), abort, peer=peer) == []
    assert tell(receiver, LeaseRenew(lease_ids=(5,), sent_ns=1), peer=peer, now_ns=7) == []
    assert receiver.leases(7)[0].remaining_ns == 8 * SECOND_NS - 7
    assert receiver.num_ignored_messages == 3


def test_another_lease_is_ignored() -> None:
    receiver = make_receiver()
    end = PushEnd(key=KEY, lease_id=4, rank=0, num_chunks=0, num_blocks=0, num_tokens=0, first_tokens=())
    assert tell(receiver, end, PushAbort(key=KEY, lease_id=4, stopped=True, reason="?")) == []
    assert receiver.num_ignored_messages == 2 and receiver.num_pushes == 1


def test_unknown_push_is_told_to_stop() -> None:
    receiver = PushReceiver(LIMITS, Checksums.OFF, num_layers=NUM_LAYERS)
    receiver.on_connected(0, PREFILL)
    stop = PushStop(key=KEY, lease_id=5, reason="no such push is open")
    assert messages(tell(receiver, make_chunk(0, (0,)))) == [stop]
    assert messages(tell(receiver, make_end())) == [stop]


def test_renewal_extends_the_lease_and_is_answered() -> None:
    receiver = make_receiver()
    effects = tell(receiver, LeaseRenew(lease_ids=(5, 99), sent_ns=123), now_ns=SECOND_NS)
    assert messages(effects) == [LeaseRenew(lease_ids=(5,), sent_ns=123, is_reply=True)]
    assert receiver.leases(SECOND_NS)[0].remaining_ns == 8 * SECOND_NS
    assert receiver.next_deadline_ns() == 9 * SECOND_NS
    assert receiver.on_tick(9 * SECOND_NS - 1) == []


def test_expiry_asks_to_stop_then_fences_and_never_frees_by_itself() -> None:
    receiver = make_receiver()
    expiry = 8 * SECOND_NS
    effects = receiver.on_tick(expiry)
    stop = PushStop(key=KEY, lease_id=5, reason="lease expired")
    assert effects[:2] == [PushFailed(key=KEY, reason="lease expired"), QUARANTINED] and messages(effects) == [stop]
    assert messages(receiver.on_tick(expiry + LIMITS.stop_resend_interval_ns)) == [stop]
    assert receiver.on_tick(expiry + LIMITS.stop_timeout_ns) == [FencePeer(peer=PREFILL)]
    receiver.check_invariants()
    assert receiver.next_deadline_ns() is None
    assert receiver.on_tick(expiry * 1000) == []
    assert receiver.num_quarantined_blocks == 3
    assert receiver.on_fenced(expiry * 1000, PREFILL) == [RELEASED]
    receiver.check_invariants()
    refused = receiver.open(expiry * 1000, make_grant(key=PushKey("r2", 1)))
    assert isinstance(refused[0], PushFailed) and isinstance(refused[1], BlocksReleased)


def test_cancel_quarantines_until_the_sender_has_stopped() -> None:
    receiver = make_receiver()
    effects = receiver.cancel(1, KEY, "client left")
    assert effects == [
        PushFailed(key=KEY, reason="client left"),
        QUARANTINED,
        SendMessage(peer=PREFILL, message=PushStop(key=KEY, lease_id=5, reason="client left")),
    ]
    assert receiver.cancel(1, KEY, "again") == []
    assert tell(receiver, make_chunk(0, (0, 1)), make_end(), LeaseRenew(lease_ids=(5,), sent_ns=1)) == []
    assert tell(receiver, PushAbort(key=KEY, lease_id=5, stopped=False, reason="stopping")) == []
    assert tell(receiver, PushAbort(key=KEY, lease_id=5, stopped=True, reason="stopped")) == [RELEASED]


def test_cancel_of_a_sender_that_never_connected() -> None:
    """Its old grant may still be used later, so the blocks wait for the coordinator's word, a stop or the fence."""
    receiver = make_receiver(connected=False)
    assert receiver.cancel(1, KEY, "client left") == [PushFailed(key=KEY, reason="client left"), QUARANTINED]
    receiver.check_invariants()
    assert receiver.on_sender_stopped(2, KEY) == [RELEASED]

    receiver = make_receiver(connected=False)
    receiver.cancel(1, KEY, "client left")
    assert isinstance(messages(receiver.on_connected(2, PREFILL))[0], PushStop)

    receiver = make_receiver(connected=False)
    receiver.cancel(1, KEY, "client left")
    assert receiver.next_deadline_ns() == 1 + LIMITS.stop_timeout_ns
    assert receiver.on_tick(1 + LIMITS.stop_timeout_ns) == [FencePeer(peer=PREFILL)]


def test_cancel_before_open_refuses_the_open() -> None:
    receiver = PushReceiver(LIMITS, Checksums.OFF, num_layers=NUM_LAYERS)
    assert receiver.cancel(0, KEY, "early") == []
    assert receiver.open(1, make_grant()) == [PushFailed(key=KEY, reason="it has ended already"), RELEASED]


def test_failed_commit_is_given_up_as_a_cancel() -> None:
    receiver = make_receiver()
    arrived(receiver)
    effects = receiver.commit_failed(2, KEY, "stale generation")
    assert effects[:2] == [PushFailed(key=KEY, reason="commit failed: stale generation"), QUARANTINED]
    receiver.check_invariants()
    with pytest.raises(ValueError, match="does not wait"):
        receiver.committed(3, KEY)


def test_sender_that_aborts_stopped_frees_at_once() -> None:
    effects = tell(make_receiver(), PushAbort(key=KEY, lease_id=5, stopped=True, reason="cancelled"))
    assert effects == [PushFailed(key=KEY, reason="cancelled"), RELEASED]


def test_sender_that_aborts_with_writes_in_flight_does_not() -> None:
    receiver = make_receiver()
    effects = tell(receiver, PushAbort(key=KEY, lease_id=5, stopped=False, reason="cancelled"))
    assert effects[:2] == [PushFailed(key=KEY, reason="cancelled"), QUARANTINED]
    assert tell(receiver, PushAbort(key=KEY, lease_id=5, stopped=True, reason="stopped")) == [RELEASED]


def test_lost_sender_is_fenced_and_all_its_pushes_fail() -> None:
    receiver = make_receiver()
    other = make_grant(2, key=PushKey("r2", 1), lease_id=6, first_block=200)
    receiver.open(0, other)
    effects = receiver.on_peer_gone(1, PREFILL, "killed")
    assert [type(e) for e in effects] == [PushFailed, BlocksQuarantined, PushFailed, BlocksQuarantined, FencePeer]
    receiver.check_invariants()
    assert receiver.on_peer_gone(1, PREFILL, "again") == []
    assert receiver.on_fenced(2, PREFILL) == [RELEASED, BlocksReleased(key=other.key, block_ids=(200, 201))]
    receiver.check_invariants()


def test_sender_without_leases_may_leave() -> None:
    receiver = PushReceiver(LIMITS, Checksums.OFF, num_layers=NUM_LAYERS)
    receiver.on_connected(0, PREFILL)
    assert receiver.on_peer_gone(1, PREFILL, "closed") == []


def test_newer_life_of_a_sender_fences_the_older_one() -> None:
    receiver = make_receiver()
    effects = receiver.on_connected(1, PeerId("prefill-0", 2))
    assert [type(e) for e in effects] == [PushFailed, BlocksQuarantined, FencePeer]
    assert effects[2] == FencePeer(peer=PREFILL)


def test_fence_spares_what_has_arrived() -> None:
    receiver = make_receiver()
    arrived(receiver)
    assert receiver.fence(2, PREFILL) == [FencePeer(peer=PREFILL)]
    assert receiver.fence(2, PREFILL) == []
    assert receiver.on_fenced(3, PREFILL) == []
    receiver.check_invariants()
    assert receiver.committed(4, KEY) == []  # nobody to tell


def test_failed_commit_after_the_fence_releases() -> None:
    receiver = make_receiver()
    arrived(receiver)
    receiver.on_fenced(2, PREFILL)
    assert receiver.commit_failed(3, KEY, "x")[1:] == [QUARANTINED, RELEASED]


def test_limits_refuse_new_pushes() -> None:
    receiver = make_receiver(PushLimits(max_pushes=1))
    assert not receiver.can_grant
    other = make_grant(1, key=PushKey("r2", 1), lease_id=6, first_block=200)
    assert isinstance(receiver.open(1, other)[0], PushFailed)

    receiver = make_receiver(PushLimits(max_quarantined_blocks=2))
    assert receiver.can_grant
    receiver.cancel(1, KEY, "x")
    assert not receiver.can_grant
    refused = receiver.open(1, other)
    assert isinstance(refused[0], PushFailed) and "quarantined" in refused[0].reason


def test_misuse_raises() -> None:
    receiver = make_receiver()
    with pytest.raises(ValueError, match="open already"):
        receiver.open(1, make_grant())
    with pytest.raises(ValueError, match="open already"):
        receiver.open(1, make_grant(key=PushKey("r2", 1)))
    with pytest.raises(ValueError, match="does not wait"):
        receiver.committed(1, KEY)
