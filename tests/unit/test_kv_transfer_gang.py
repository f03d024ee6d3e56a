"""GangReceiver, GangSender and the leaders, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_transfer.protocol.gang import GangReceiver
from kv_transfer.protocol.gang_leader import (
    CancelAtRank,
    CommitAtRank,
    HandOutGrant,
    OpenAtRank,
    SourceLeader,
    TargetLeader,
)
from kv_transfer.protocol.gang_sender import GangSender
from kv_transfer.protocol.limits import SECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    BlocksQuarantined,
    BlocksReleased,
    CancelWrite,
    ConnectPeer,
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
    PushStats,
    PushStop,
    SendMessage,
    SourceReleased,
    VerifyBlocks,
    WriteBlocks,
)
from kv_transfer.protocol.ranks import MAX_PIECES_PER_WRITE, rank_peer
from kv_transfer.protocol.sampling import Checksums

KEY = PushKey("r1", 1)
PREFILL, DECODE = PeerId("prefill-0", 1), PeerId("decode-0", 7)
P0, P1 = PREFILL, rank_peer(PREFILL, 1)
D0, D1 = DECODE, rank_peer(DECODE, 1)
FIRST = (FirstToken(choice=0, position=0, token_id=42),)
LIMITS = PushLimits(max_pushes=2, max_blocks_per_write=2)
BLOCK_IDS = (100, 101, 102)
QUARANTINED = BlocksQuarantined(key=KEY, block_ids=BLOCK_IDS)
RELEASED = BlocksReleased(key=KEY, block_ids=BLOCK_IDS)


def make_grant(key: PushKey = KEY, lease_id: int = 5, first_block: int = 100) -> Grant:
    blocks = tuple(BlockGrant(i, first_block + i, 9) for i in range(3))
    return Grant(key=key, lease_id=lease_id, receiver=DECODE, sender=PREFILL, blocks=blocks, ttl_ns=8 * SECOND_NS)


def make_chunk(rank: int, *, num_pieces: int = 1, checksums: tuple[int, ...] | None = None) -> PushChunk:
    blocks = make_grant().blocks
    return PushChunk(
        key=KEY,
        lease_id=5,
        rank=rank,
        chunk=0,
        blocks=blocks,
        first_layer=0,
        num_layers=2,
        num_pieces=num_pieces,
        summed=() if checksums is None else (0, 1, 2),
        checksums=checksums or (),
    )


def make_end(rank: int, num_tokens: int = 40) -> PushEnd:
    stats = PushStats(size_bytes=10 + rank, early_bytes=1, duration_ns=5 + rank)
    return PushEnd(
        key=KEY,
        lease_id=5,
        rank=rank,
        num_chunks=1,
        num_blocks=3,
        num_tokens=num_tokens,
        first_tokens=FIRST,
        stats=stats,
    )


def messages(effects: Sequence[object]) -> list[tuple[PeerId, PushMessage]]:
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, SendMessage)]


# ---- GangReceiver ------------------------------------------------------------------------------------------------


def make_receiver(checksums: Checksums = Checksums.OFF) -> GangReceiver:
    receiver = GangReceiver(LIMITS, checksums, num_layers=2)
    assert receiver.open(0, make_grant(), [0, 1]) == []
    for peer in (P0, P1):
        assert receiver.on_connected(0, peer) == []
    return receiver


def tell(receiver: GangReceiver, peer: PeerId, *told: PushMessage, now_ns: int = 1) -> list[PushEffect]:
    effects: list[PushEffect] = []
    for message in told:
        effects += receiver.on_message(now_ns, peer, message)
        receiver.check_invariants()
    return effects


def arrived(receiver: GangReceiver) -> PushArrived:
    assert tell(receiver, P1, make_chunk(1), make_end(1)) == []
    (effect,) = tell(receiver, P0, make_chunk(0), make_end(0))
    assert isinstance(effect, PushArrived)
    return effect


def test_blocks_arrive_once_when_every_rank_has_sent_its_part() -> None:
    receiver = make_receiver()
    effect = arrived(receiver)
    assert effect.blocks == make_grant().blocks and effect.num_tokens == 40 and effect.first_tokens == FIRST
    assert effect.stats == PushStats(size_bytes=21, early_bytes=2, duration_ns=6)
    assert tell(receiver, P0, make_end(0)) == tell(receiver, P1, make_end(1)) == []
    committed = PushCommitted(key=KEY, lease_id=5)
    assert messages(receiver.committed(2, KEY)) == [(P0, committed), (P1, committed)]
    assert receiver.num_pushes == 0 and receiver.leases(2) == []
    assert messages(tell(receiver, P1, make_end(1))) == [(P1, committed)]  # the answer may have been lost
    receiver.check_invariants()


def test_nothing_is_committed_before_all_parts_are_there() -> None:
    receiver = make_receiver()
    tell(receiver, P1, make_chunk(1), make_end(1))
    with pytest.raises(ValueError, match="does not wait"):
        receiver.committed(2, KEY)


def test_ranks_that_contradict_each_other_fail_closed() -> None:
    receiver = make_receiver()
    tell(receiver, P1, make_chunk(1), make_end(1))
    effects = tell(receiver, P0, make_chunk(0), make_end(0, num_tokens=41))
    assert isinstance(effects[0], PushFailed) and "num_tokens is 40 of one, 41 of another" in effects[0].reason
    assert QUARANTINED in effects and not any(isinstance(effect, PushArrived) for effect in effects)
    assert {peer for peer, message in messages(effects) if isinstance(message, PushStop)} == {P0, P1}


def test_a_failed_part_cancels_the_others_and_blocks_wait_for_all() -> None:
    receiver = make_receiver()
    tell(receiver, P1, make_chunk(1), make_end(1))
    effects = tell(receiver, P0, PushAbort(key=KEY, lease_id=5, stopped=True, reason="cancelled"))
    assert effects[:2] == [PushFailed(key=KEY, reason="rank 0: cancelled"), QUARANTINED]
    assert [(peer, type(message)) for peer, message in messages(effects)] == [(P1, PushStop)]
    assert receiver.num_quarantined_blocks == 3 and receiver.leases(1)[0].state == "stopping"
    assert tell(receiver, P0, PushAbort(key=KEY, lease_id=5, stopped=True, reason="again")) == []
    assert tell(receiver, P1, PushAbort(key=KEY, lease_id=5, stopped=True, reason="stopped")) == [RELEASED]
    assert receiver.num_pushes == 0
    again = receiver.open(2, make_grant(), [0, 1])
    assert again == [PushFailed(key=KEY, reason="it has ended already"), RELEASED]


def test_part_that_has_arrived_can_be_retracted_while_others_are_awaited() -> None:
    receiver = make_receiver()
    tell(receiver, P1, make_chunk(1), make_end(1))
    strange = PushAbort(key=KEY, lease_id=4, stopped=True, reason="of another lease")
    assert tell(receiver, P1, strange) == []
    effects = tell(receiver, P1, PushAbort(key=KEY, lease_id=5, stopped=True, reason="no answer"))
    assert effects[:2] == [PushFailed(key=KEY, reason="rank 1: no answer"), QUARANTINED]
    assert tell(receiver, P0, PushAbort(key=KEY, lease_id=5, stopped=True, reason="stopped")) == [RELEASED]


def test_what_was_delivered_is_only_ended_by_its_owner() -> None:
    receiver = make_receiver()
    arrived(receiver)
    assert tell(receiver, P1, PushAbort(key=KEY, lease_id=5, stopped=True, reason="no answer")) == []
    assert receiver.on_peer_gone(2, P0, "killed") == []
    assert receiver.on_sender_stopped(2, KEY) == []
    effects = receiver.commit_failed(3, KEY, "stale generation")
    assert effects[:2] == [PushFailed(key=KEY, reason="commit failed: stale generation"), QUARANTINED]
    receiver.check_invariants()
    assert receiver.on_sender_stopped(4, KEY) == [RELEASED]


def test_lost_rank_is_fenced_while_the_others_stop() -> None:
    receiver = make_receiver()
    effects = receiver.on_peer_gone(1, P1, "killed")
    assert effects[0] == PushFailed(key=KEY, reason=f"rank 1: lost {P1.name}: killed")
    assert effects.count(QUARANTINED) == 1 and FencePeer(peer=P1) in effects
    assert [peer for peer, _ in messages(effects)] == [P0]
    receiver.check_invariants()
    assert receiver.on_fenced(2, P1) == []
    assert tell(receiver, P0, PushAbort(key=KEY, lease_id=5, stopped=True, reason="stopped")) == [RELEASED]
    refused = receiver.open(3, make_grant(PushKey("r2", 1), 6), [0, 1])
    assert isinstance(refused[0], PushFailed) and "fenced" in refused[0].reason
    assert receiver.num_pushes == 0, "no part of it is open"
    receiver.check_invariants()


def test_one_expired_lease_ends_the_push() -> None:
    receiver = make_receiver()
    renewed = tell(receiver, P1, LeaseRenew(lease_ids=(5,), sent_ns=9), now_ns=SECOND_NS)
    assert messages(renewed) == [(P1, LeaseRenew(lease_ids=(5,), sent_ns=9, is_reply=True))]
    assert receiver.next_deadline_ns() == 8 * SECOND_NS
    assert receiver.leases(2 * SECOND_NS)[0].remaining_ns == 6 * SECOND_NS, "of the part that expires first"
    effects = receiver.on_tick(8 * SECOND_NS)
    assert effects[0] == PushFailed(key=KEY, reason="rank 0: lease expired")
    assert [peer for peer, _ in messages(effects)] == [P0, P1]
    receiver.check_invariants()
    assert receiver.cancel(8 * SECOND_NS, KEY, "client left") == []


def test_pieces_are_verified_by_the_rank_that_sent_them() -> None:
    receiver = make_receiver(Checksums.FULL)
    sums = (1, 2, 3, 4, 5, 6)
    (verify,) = tell(receiver, P1, make_chunk(1, num_pieces=2, checksums=sums))
    assert verify == VerifyBlocks(key=KEY, chunk=0, block_ids=BLOCK_IDS, layers=range(2), checksums=sums, rank=1)
    (verify,) = tell(receiver, P0, make_chunk(0, num_pieces=2, checksums=sums))
    assert verify == VerifyBlocks(key=KEY, chunk=0, block_ids=BLOCK_IDS, layers=range(2), checksums=sums, rank=0)
    tell(receiver, P0, make_end(0))
    tell(receiver, P1, make_end(1))
    assert receiver.on_verified(2, KEY, 0, (), rank=0) == []
    ((peer, missing),) = messages(receiver.on_verified(3, KEY, 0, (101,), rank=1))
    assert peer == P1 and missing.chunks == (0,)  # type: ignore[union-attr]
    receiver.check_invariants()


def test_layers_of_which_a_rank_owes_nothing_are_verified_all_the_same() -> None:
    """Only the owner knows what is owed, so a chunk that says there is nothing to sum is not believed unseen."""
    receiver = make_receiver(Checksums.FULL)
    (verify,) = tell(receiver, P1, make_chunk(1, num_pieces=0, checksums=()))
    assert verify == VerifyBlocks(key=KEY, chunk=0, block_ids=BLOCK_IDS, layers=range(2), checksums=(), rank=1)
    assert tell(receiver, P0, make_chunk(0)) == [], "a chunk without the sums of its pieces counts as lost"
    assert receiver.num_ignored_messages == 1


def test_rank_that_speaks_for_another_fails_the_push() -> None:
    effects = tell(make_receiver(), P0, make_chunk(1))
    assert isinstance(effects[0], PushFailed) and "rank 1 cannot exist" in effects[0].reason


def test_strangers_are_passed_over() -> None:
    receiver = make_receiver()
    stranger = PeerId("prefill-0/x", 1)
    assert receiver.on_connected(1, stranger) == receiver.on_peer_gone(1, stranger, "?") == []
    assert tell(receiver, stranger, make_end(0)) == receiver.fence(1, stranger) == receiver.on_fenced(1, stranger) == []
    assert receiver.num_ignored_messages == 5
    assert [type(m) for _, m in messages(tell(receiver, rank_peer(PREFILL, 2), make_end(2)))] == []  # not connected


def test_misuse_raises_and_limits_hold() -> None:
    receiver = make_receiver()
    with pytest.raises(ValueError, match="open already"):
        receiver.open(1, make_grant(), [0])
    with pytest.raises(ValueError, match="sender_ranks"):
        receiver.open(1, make_grant(PushKey("r2", 1), 6), [])
    with pytest.raises(ValueError, match="sender_ranks"):
        receiver.open(1, make_grant(PushKey("r2", 1), 6), [1, 1])
    assert receiver.cancel(1, PushKey("r9", 1), "early") == []
    assert isinstance(receiver.open(1, make_grant(PushKey("r9", 1), 9, 500), [0])[0], PushFailed)
    assert receiver.open(1, make_grant(PushKey("r2", 1), 6, 200), [1]) == []
    assert not receiver.can_grant
    refused = receiver.open(1, make_grant(PushKey("r3", 1), 7, 300), [3])
    assert isinstance(refused[0], PushFailed) and "limit" in refused[0].reason
    receiver.check_invariants()


# ---- GangSender --------------------------------------------------------------------------------------------------


def make_sender() -> GangSender:
    sender = GangSender(LIMITS, Checksums.FULL, 1, num_layers=2)
    opened = sender.open(0, make_grant(), 3, {0: 10, 1: 20})
    assert opened == [ConnectPeer(peer=D0), ConnectPeer(peer=D1)]
    for peer in (D0, D1):
        assert messages(sender.on_connected(0, peer)) == [(peer, LeaseRenew(lease_ids=(5,), sent_ns=0))]
    return sender


def writes(effects: Sequence[PushEffect]) -> list[WriteBlocks]:
    return [effect for effect in effects if isinstance(effect, WriteBlocks)]


def ended(sender: GangSender) -> dict[PeerId, PushEnd]:
    effects = sender.blocks_ready(1, KEY, [(0, 50), (1, 51), (2, 52)])
    effects += sender.finish(2, KEY, 40, FIRST)
    ends: dict[PeerId, PushEnd] = {}
    for write in writes(effects):
        for peer, message in messages(sender.on_write_completed(3, write.write_id)):
            assert isinstance(message, PushEnd)
            ends[peer] = message
    sender.check_invariants()
    return ends


def test_every_receiver_is_written_its_part_and_the_source_is_released_once() -> None:
    sender = make_sender()
    effects = sender.blocks_ready(1, KEY, [(0, 50), (1, 51)])
    assert [(w.peer, w.source_blocks, w.message.rank) for w in writes(effects)] == [
        (D0, (50, 51), 1),
        (D1, (50, 51), 1),
    ]
    assert len({w.write_id for w in writes(effects)}) == 2
    for write in writes(effects):
        sender.on_write_completed(1, write.write_id)
    effects = sender.blocks_ready(2, KEY, [(2, 52)]) + sender.finish(2, KEY, 40, FIRST)
    ends = [
        message for write in writes(effects) for _, message in messages(sender.on_write_completed(3, write.write_id))
    ]
    assert [end.stats.size_bytes for end in ends] == [30, 60]  # type: ignore[union-attr]
    committed = PushCommitted(key=KEY, lease_id=5)
    assert sender.on_message(4, D1, committed) == []
    sender.check_invariants()
    assert [view.peer for view in sender.leases(4)] == [DECODE]
    assert sender.on_message(5, D0, committed) == [SourceReleased(key=KEY, committed=True)]
    assert sender.num_pushes == 0 and sender.leases(5) == []
    assert isinstance(sender.open(6, make_grant(), 3, {0: 10})[0], PushFailed)


def test_one_receivers_failure_ends_the_parts_of_the_others() -> None:
    sender = make_sender()
    posted = writes(sender.blocks_ready(1, KEY, [(0, 50), (1, 51)]))
    effects = sender.on_peer_gone(2, D0, "killed")
    assert effects[0] == PushFailed(key=KEY, reason="to rank 0: lost decode-0: killed")
    assert [e.write_id for e in effects if isinstance(e, CancelWrite)] == [w.write_id for w in posted]
    assert messages(effects)[0][0] == D1
    sender.check_invariants()
    assert sender.blocks_ready(3, KEY, [(2, 52)]) == sender.finish(3, KEY, 40, FIRST) == []
    assert sender.on_write_failed(4, posted[0].write_id, False, "reset") == []
    effects = sender.on_write_completed(5, posted[1].write_id)
    assert effects[-1] == SourceReleased(key=KEY, committed=False, settled=False)
    sender.check_invariants()


def test_source_of_which_one_part_was_committed_is_not_committed() -> None:
    sender = make_sender()
    assert set(ended(sender)) == {D0, D1}
    assert sender.on_message(4, D0, PushCommitted(key=KEY, lease_id=5)) == []
    effects = sender.on_message(5, D1, PushStop(key=KEY, lease_id=5, reason="cancelled"))
    assert isinstance(effects[0], PushFailed)
    assert effects[-1] == SourceReleased(key=KEY, committed=False)
    sender.check_invariants()


def test_a_write_has_few_enough_pieces_for_its_checksums() -> None:
    limits = PushLimits(max_blocks_per_write=3)
    for num_layers, num_blocks in (
        (2, [3]),
        (MAX_PIECES_PER_WRITE // 2, [2, 1]),
        (MAX_PIECES_PER_WRITE * 2, [1, 1, 1]),
    ):
        sender = GangSender(limits, Checksums.FULL, 0, num_layers=num_layers)
        sender.open(0, make_grant(), 3, {0: 10})
        sender.on_connected(0, D0)
        effects = sender.blocks_ready(1, KEY, [(0, 50), (1, 51), (2, 52)])
        assert [len(write.source_blocks) for write in writes(effects)] == num_blocks


def test_senders_misuse_cancel_and_ticks() -> None:
    sender = make_sender()
    with pytest.raises(ValueError, match="open already"):
        sender.open(1, make_grant(), 3, {0: 1})
    with pytest.raises(ValueError, match="receiver_ranks"):
        sender.open(1, make_grant(PushKey("r2", 1), 6), 3, {})
    assert sender.cancel(1, PushKey("r9", 1), "early") == []
    refused = sender.open(1, make_grant(PushKey("r9", 1), 9), 3, {1: 1})
    assert refused[-1] == SourceReleased(key=PushKey("r9", 1), committed=False)
    assert sender.on_message(1, PeerId("x/y", 1), PushCommitted(key=KEY, lease_id=5)) == []
    assert sender.num_ignored_messages == 1
    assert sender.next_deadline_ns() == 2 * SECOND_NS
    assert {peer for peer, _ in messages(sender.on_tick(2 * SECOND_NS))} == {D0, D1}
    effects = sender.on_connect_failed(3 * SECOND_NS, D1, "refused")
    assert [type(effect) for effect in effects if not isinstance(effect, SendMessage)] == [PushFailed, SourceReleased]
    assert sender.cancel(4 * SECOND_NS, KEY, "late") == []


# ---- the leaders -------------------------------------------------------------------------------------------------

ARRIVED = PushArrived(
    key=KEY,
    lease_id=5,
    blocks=make_grant().blocks,
    num_blocks=3,
    num_tokens=40,
    first_tokens=FIRST,
    stats=PushStats(size_bytes=10, early_bytes=0, duration_ns=4),
)


def make_leader() -> TargetLeader:
    leader = TargetLeader(LIMITS)
    grant = make_grant()
    assert leader.open(grant, [0, 1]) == [OpenAtRank(rank=0, grant=grant), OpenAtRank(rank=1, grant=grant)]
    return leader


def test_grant_is_handed_out_when_every_rank_watches_over_its_blocks() -> None:
    leader = make_leader()
    assert leader.on_opened(1, KEY) == []
    assert leader.on_opened(0, KEY) == [HandOutGrant(grant=make_grant())]
    leader.check_invariants()


def test_grant_that_one_rank_refuses_is_never_handed_out() -> None:
    leader = make_leader()
    leader.on_rank(0, PushFailed(key=KEY, reason="too many pushes are open"))
    leader.on_rank(0, RELEASED)
    assert leader.on_opened(0, KEY) == leader.on_opened(1, KEY) == []
    assert leader.on_rank(1, RELEASED) == [RELEASED]
    assert leader.on_opened(1, KEY) == []


def test_leader_commits_when_every_rank_has_everything() -> None:
    leader = make_leader()
    assert leader.on_rank(1, ARRIVED) == []
    leader.check_invariants()
    with pytest.raises(ValueError, match="does not wait"):
        leader.committed(KEY)
    (effect,) = leader.on_rank(0, ARRIVED)
    assert effect == replace(ARRIVED, stats=PushStats(size_bytes=20, early_bytes=0, duration_ns=4))
    assert leader.committed(KEY) == [CommitAtRank(rank=0, key=KEY), CommitAtRank(rank=1, key=KEY)]
    assert leader.num_pushes == 0
    assert leader.on_rank(0, PushFailed(key=KEY, reason="late")) == []


def test_one_ranks_failure_cancels_the_push_at_the_others() -> None:
    leader = make_leader()
    leader.on_rank(1, ARRIVED)
    effects = leader.on_rank(0, PushFailed(key=KEY, reason="lease expired"))
    reason = "rank 0: lease expired"
    assert effects == [PushFailed(key=KEY, reason=reason), CancelAtRank(rank=1, key=KEY, reason=reason)]
    assert leader.on_rank(0, QUARANTINED) == [QUARANTINED]
    assert leader.on_rank(1, PushFailed(key=KEY, reason=reason)) == leader.on_rank(1, QUARANTINED) == []
    leader.check_invariants()
    assert leader.on_rank(0, RELEASED) == []
    assert leader.on_rank(1, RELEASED) == [RELEASED]
    assert leader.num_pushes == 0


def test_ranks_that_received_different_sequences_fail_closed() -> None:
    leader = make_leader()
    leader.on_rank(0, ARRIVED)
    effects = leader.on_rank(1, replace(ARRIVED, first_tokens=()))
    assert isinstance(effects[0], PushFailed) and "first_tokens" in effects[0].reason
    assert [effect.rank for effect in effects if isinstance(effect, CancelAtRank)] == [0, 1]


def test_lost_rank_holds_nothing_any_more() -> None:
    leader = make_leader()
    leader.on_rank(0, ARRIVED)
    effects = leader.on_rank_lost(0, "its process died")
    assert [type(effect) for effect in effects] == [PushFailed, CancelAtRank]
    assert leader.on_rank_lost(0, "again") == []
    assert leader.on_rank(1, ARRIVED) == [], "it had not heard of the cancel yet"
    leader.check_invariants()
    assert leader.on_rank(1, RELEASED) == [RELEASED]


def test_leader_refuses_what_was_cancelled_and_gives_up_what_cannot_be_committed() -> None:
    leader = make_leader()
    leader.on_rank(0, ARRIVED)
    leader.on_rank(1, ARRIVED)
    effects = leader.commit_failed(KEY, "stale generation")
    assert [type(effect) for effect in effects] == [PushFailed, CancelAtRank, CancelAtRank]
    assert leader.cancel(KEY, "late") == []
    with pytest.raises(ValueError, match="open already"):
        leader.open(make_grant(), [0])
    other = make_grant(PushKey("r2", 1), 6, 200)
    assert leader.cancel(other.key, "early") == []
    assert [type(effect) for effect in leader.open(other, [0, 1])] == [PushFailed, BlocksReleased]
    leader.check_invariants()


def test_source_is_released_when_no_rank_needs_it() -> None:
    leader = SourceLeader(LIMITS)
    assert leader.open(KEY, [0, 1]) == []
    done = SourceReleased(key=KEY, committed=True)
    assert leader.on_rank(0, done) == []
    leader.check_invariants()
    assert leader.on_rank(1, done) == [done]
    assert leader.num_pushes == 0 and leader.on_rank(1, done) == []


def test_source_of_a_lost_rank_is_not_settled() -> None:
    leader = SourceLeader(LIMITS)
    leader.open(KEY, [0, 1])
    effects = leader.on_rank_lost(1, "its process died")
    assert [type(effect) for effect in effects] == [PushFailed, CancelAtRank]
    assert leader.cancel(KEY, "late") == []
    leader.check_invariants()
    released = leader.on_rank(0, SourceReleased(key=KEY, committed=False))
    assert released == [SourceReleased(key=KEY, committed=False, settled=False)]
    assert leader.cancel(PushKey("r2", 1), "early") == []
    assert [type(effect) for effect in leader.open(PushKey("r2", 1), [0])] == [PushFailed, SourceReleased]
    with pytest.raises(ValueError, match="no rank"):
        leader.open(PushKey("r3", 1), [])
