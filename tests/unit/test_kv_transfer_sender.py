"""PushSender, case by case."""

from __future__ import annotations

import pytest

from kv_transfer.protocol.limits import MILLISECOND_NS, SECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    CancelWrite,
    ConnectPeer,
    FirstToken,
    Grant,
    LeaseRenew,
    PeerId,
    PushAbort,
    PushCommitted,
    PushEffect,
    PushEnd,
    PushFailed,
    PushKey,
    PushMessage,
    PushMissing,
    PushStop,
    SendMessage,
    SourceReleased,
    WriteBlocks,
)
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.protocol.sender import PushSender

KEY = PushKey("r1", 1)
PREFILL = PeerId("prefill-0", 1)
DECODE = PeerId("decode-0", 7)
FIRST = (FirstToken(choice=0, position=0, token_id=42),)
NUM_LAYERS = 5
LIMITS = PushLimits(max_inflight_writes=2, max_blocks_per_write=2, max_end_sends=2, max_missing_rounds=2)


def make_grant(num_blocks: int = 3, first_index: int = 0, key: PushKey = KEY, lease_id: int = 5) -> Grant:
    blocks = tuple(BlockGrant(first_index + i, 100 + i, 9) for i in range(num_blocks))
    return Grant(key=key, lease_id=lease_id, receiver=DECODE, sender=PREFILL, blocks=blocks, ttl_ns=8 * SECOND_NS)


def make_sender(limits: PushLimits = LIMITS) -> PushSender:
    return PushSender(limits, Checksums.OFF, block_size_bytes=10, num_layers=NUM_LAYERS)


def writes(effects: list[PushEffect]) -> list[WriteBlocks]:
    return [effect for effect in effects if isinstance(effect, WriteBlocks)]


def messages(effects: list[PushEffect]) -> list[PushMessage]:
    return [effect.message for effect in effects if isinstance(effect, SendMessage)]


def opened(sender: PushSender, grant: Grant, total_blocks: int) -> None:
    assert sender.open(0, grant, total_blocks) == [ConnectPeer(peer=DECODE)]
    assert sender.on_connected(0, DECODE) == [SendMessage(peer=DECODE, message=LeaseRenew(lease_ids=(5,), sent_ns=0))]


def ended(sender: PushSender, num_blocks: int = 2) -> PushEnd:
    """Brings one push of `num_blocks` blocks (one write each two) to its PushEnd."""
    opened(sender, make_grant(num_blocks), num_blocks)
    effects = sender.blocks_ready(1, KEY, [(i, i) for i in range(num_blocks)])
    effects += sender.finish(2, KEY, 20, FIRST)
    while writes(effects):
        effects = [e for w in writes(effects) for e in sender.on_write_completed(3, w.write_id)]
    (end,) = messages(effects)
    assert isinstance(end, PushEnd)
    sender.check_invariants()
    return end


def test_push_is_written_in_chunks_and_ended() -> None:
    sender = make_sender()
    opened(sender, make_grant(4), 3)  # the fourth block has no KV yet
    first = writes(sender.blocks_ready(1, KEY, [(0, 50), (1, 51), (2, 60)]))
    assert [(w.source_blocks, [b.block_id for b in w.message.blocks], w.message.chunk) for w in first] == [
        ((50, 51), [100, 101], 0),
        ((60,), [102], 1),
    ]
    sender.check_invariants()
    assert sender.on_write_completed(2, first[0].write_id) == []
    assert sender.finish(3, KEY, 33, FIRST) == []  # a write is in flight
    (end,) = messages(sender.on_write_completed(4, first[1].write_id))
    assert isinstance(end, PushEnd)
    assert (end.num_chunks, end.num_blocks, end.num_tokens, end.first_tokens) == (2, 3, 33, FIRST)
    assert (end.stats.size_bytes, end.stats.early_bytes, end.stats.duration_ns) == (30, 20, 3)
    committed = sender.on_message(5, DECODE, PushCommitted(key=KEY, lease_id=5))
    assert committed == [SourceReleased(key=KEY, committed=True)]
    assert sender.on_message(6, DECODE, PushCommitted(key=KEY, lease_id=5)) == []
    sender.check_invariants()
    assert sender.num_pushes == 0


def test_layers_of_blocks_are_written_as_they_come() -> None:
    sender = make_sender()
    opened(sender, make_grant(3), 3)
    first = writes(sender.blocks_ready(1, KEY, [(0, 50)]))
    first += writes(sender.blocks_ready(1, KEY, [(1, 51), (2, 52)], range(2)))
    assert [(w.source_blocks, w.message.chunk, w.message.layers) for w in first] == [
        ((50,), 0, range(5)),
        ((51, 52), 1, range(2)),
    ]
    for write in first:
        assert sender.on_write_completed(2, write.write_id) == []
    with pytest.raises(ValueError, match="index 1 is ready"):
        sender.finish(2, KEY, 33, FIRST)
    second = writes(sender.blocks_ready(3, KEY, [(2, 52), (1, 51)], range(2, 5)))
    assert [(w.source_blocks, w.message.layers) for w in second] == [((52, 51), range(2, 5))]
    sender.check_invariants()
    assert sender.finish(4, KEY, 33, FIRST) == []
    (end,) = messages(sender.on_write_completed(5, second[0].write_id))
    assert isinstance(end, PushEnd)
    assert (end.num_chunks, end.num_blocks) == (3, 3)
    # A block of five layers has ten bytes; the last two blocks' last three layers were written after the end.
    assert (end.stats.size_bytes, end.stats.early_bytes) == (30, 18)


def test_writes_have_blocks_of_the_same_layers() -> None:
    sender = make_sender(PushLimits(max_inflight_writes=8, max_blocks_per_write=8))
    sender.open(0, make_grant(3), 3)
    sender.blocks_ready(1, KEY, [(0, 50)])
    for layers in (range(1), range(1, 5)):
        sender.blocks_ready(1, KEY, [(1, 51), (2, 52)], layers)
    sender.check_invariants()
    posted = writes(sender.on_connected(2, DECODE))
    assert [(w.source_blocks, w.message.layers) for w in posted] == [
        ((50,), range(5)),
        ((51, 52), range(1)),
        ((51, 52), range(1, 5)),
    ]
    sender.check_invariants()


@pytest.mark.parametrize(("max_bytes", "sizes"), [(9, [1] * 5), (10, [1] * 5), (29, [2, 2, 1]), (1000, [4, 1])])
def test_a_write_has_a_bounded_number_of_bytes(max_bytes: int, sizes: list[int]) -> None:
    """Of blocks of ten bytes: one at least, and no more than the bound on their number."""
    sender = make_sender(PushLimits(max_inflight_writes=8, max_blocks_per_write=4, max_write_bytes=max_bytes))
    sender.open(0, make_grant(5), 5)
    sender.blocks_ready(1, KEY, [(index, 50 + index) for index in range(5)])
    assert [len(write.source_blocks) for write in writes(sender.on_connected(2, DECODE))] == sizes
    sender.check_invariants()


def test_lost_layers_are_written_again() -> None:
    sender = make_sender()
    opened(sender, make_grant(1), 1)
    effects: list[PushEffect] = []
    for layers in (range(3), range(3, 5)):
        effects += sender.blocks_ready(1, KEY, [(0, 50)], layers)
    effects += sender.finish(2, KEY, 20, FIRST)
    for write in writes(effects):
        sender.on_write_completed(3, write.write_id)
    (again,) = writes(sender.on_message(4, DECODE, PushMissing(key=KEY, lease_id=5, chunks=(1,), round=1)))
    assert (again.message.chunk, again.message.layers, again.message.round) == (1, range(3, 5), 1)
    sender.check_invariants()


@pytest.mark.parametrize("layers", [range(2, 4), range(1), range(2, 7), range(-1, 2), range(2, 2), range(2, 5, 2)])
def test_layers_that_are_not_next_raise_and_nothing_is_queued(layers: range) -> None:
    sender = make_sender()
    opened(sender, make_grant(2), 2)
    sender.blocks_ready(1, KEY, [(0, 50)], range(2))
    with pytest.raises(ValueError, match="layers"):
        sender.blocks_ready(1, KEY, [(0, 50), (1, 51)], layers)
    sender.check_invariants()
    assert len(writes(sender.blocks_ready(1, KEY, [(0, 50)], range(2, 5)))) == 1


def test_half_given_blocks_of_a_push_that_fails_are_forgotten() -> None:
    sender = make_sender()
    opened(sender, make_grant(2), 2)
    (write,) = writes(sender.blocks_ready(1, KEY, [(0, 50), (1, 51)], range(2)))
    sender.cancel(2, KEY, "the engine failed")
    assert sender.blocks_ready(3, KEY, [(0, 50), (1, 51)], range(2, 5)) == []
    sender.check_invariants()
    assert sender.on_write_completed(4, write.write_id)[-1] == SourceReleased(key=KEY, committed=False)


def test_blocks_cached_at_the_receiver_are_skipped() -> None:
    sender = make_sender()
    opened(sender, make_grant(2, first_index=1), 3)
    (write,) = writes(sender.blocks_ready(1, KEY, [(0, 50), (1, 51), (2, 52)]))
    assert write.source_blocks == (51, 52)


def test_push_with_nothing_to_send_still_ends() -> None:
    sender = make_sender()
    opened(sender, make_grant(0), 3)
    assert sender.blocks_ready(1, KEY, [(0, 50), (1, 51), (2, 52)]) == []
    (end,) = messages(sender.finish(2, KEY, 48, FIRST))
    assert isinstance(end, PushEnd) and end.num_chunks == 0


def test_writes_wait_for_the_connection_and_for_the_inflight_bound() -> None:
    sender = make_sender()
    sender.open(0, make_grant(6), 6)
    assert sender.blocks_ready(1, KEY, [(i, i) for i in range(6)]) == []
    posted = writes(sender.on_connected(2, DECODE))
    assert [w.source_blocks for w in posted] == [(0, 1), (2, 3)]
    (third,) = writes(sender.on_write_completed(3, posted[0].write_id))
    assert third.source_blocks == (4, 5)
    sender.check_invariants()


def test_pushes_to_one_peer_take_turns() -> None:
    sender = make_sender(PushLimits(max_inflight_writes=1, max_blocks_per_write=1))
    other = PushKey("r2", 1)
    opened(sender, make_grant(3), 3)
    sender.open(0, make_grant(3, key=other, lease_id=6), 3)
    effects = sender.blocks_ready(1, KEY, [(0, 10), (1, 11), (2, 12)])
    effects += sender.blocks_ready(1, other, [(0, 20), (1, 21), (2, 22)])
    order: list[int] = []
    while writes(effects):
        (write,) = writes(effects)
        order += write.source_blocks
        effects = sender.on_write_completed(2, write.write_id)
        sender.check_invariants()
    assert order == [10, 11, 20, 12, 21, 22]


def test_end_is_resent_then_the_push_fails() -> None:
    sender = make_sender()
    end = ended(sender)
    due = sender.next_deadline_ns()
    assert due == 3 + LIMITS.end_resend_interval_ns
    assert messages(sender.on_tick(due)) == [end]
    effects = sender.on_tick(due + LIMITS.end_resend_interval_ns)
    assert isinstance(effects[0], PushFailed) and "does not answer" in effects[0].reason
    assert messages(effects)[0] == PushAbort(key=KEY, lease_id=5, stopped=True, reason=effects[0].reason)
    assert effects[2] == SourceReleased(key=KEY, committed=False)


def test_missing_chunks_are_written_again_in_a_new_round() -> None:
    sender = make_sender()
    ended(sender, 4)
    missing = PushMissing(key=KEY, lease_id=5, chunks=(1, 1), round=1)
    (write,) = writes(sender.on_message(4, DECODE, missing))  # once, however often it was named
    assert (write.message.chunk, write.message.round, write.source_blocks) == (1, 1, (2, 3))
    assert sender.on_message(5, DECODE, missing) == []  # a copy
    assert sender.on_tick(6 + LIMITS.end_resend_interval_ns) == []  # no end while a write is in flight
    (end,) = messages(sender.on_write_completed(7, write.write_id))
    assert isinstance(end, PushEnd) and end.round == 1
    assert sender.on_message(8, DECODE, missing) == []
    sender.check_invariants()


def test_too_many_rounds_fail() -> None:
    sender = make_sender()
    ended(sender)
    for round_ in (1, 2):
        (write,) = writes(sender.on_message(4, DECODE, PushMissing(key=KEY, lease_id=5, chunks=(0,), round=round_)))
        sender.on_write_completed(5, write.write_id)
    effects = sender.on_message(6, DECODE, PushMissing(key=KEY, lease_id=5, chunks=(0,), round=3))
    assert effects[0] == PushFailed(key=KEY, reason="chunks were lost in 3 rounds")


def test_cancel_before_the_connection_releases_at_once() -> None:
    sender = make_sender()
    sender.open(0, make_grant(), 3)
    sender.blocks_ready(0, KEY, [(0, 0)])
    assert sender.cancel(1, KEY, "client left") == [
        PushFailed(key=KEY, reason="client left"),
        SourceReleased(key=KEY, committed=False),
    ]
    assert sender.blocks_ready(2, KEY, [(1, 1)]) == []
    assert sender.finish(2, KEY, 1, ()) == []
    assert sender.on_connected(3, DECODE) == []
    sender.check_invariants()


def test_cancel_waits_for_writes_in_flight() -> None:
    sender = make_sender()
    opened(sender, make_grant(4), 4)
    posted = writes(sender.blocks_ready(1, KEY, [(i, i) for i in range(4)]))
    effects = sender.cancel(2, KEY, "client left")
    assert effects == [
        PushFailed(key=KEY, reason="client left"),
        *[CancelWrite(write_id=w.write_id) for w in posted],
        SendMessage(peer=DECODE, message=PushAbort(key=KEY, lease_id=5, stopped=False, reason="client left")),
    ]
    assert sender.cancel(2, KEY, "again") == []
    sender.check_invariants()
    assert sender.on_write_completed(3, posted[0].write_id) == []
    effects = sender.on_write_failed(4, posted[1].write_id, True, "cancelled")
    assert messages(effects) == [PushAbort(key=KEY, lease_id=5, stopped=True, reason="stopped")]
    assert effects[-1] == SourceReleased(key=KEY, committed=False)
    sender.check_invariants()


def test_cancel_or_stop_before_open_refuses_the_open() -> None:
    sender = make_sender()
    assert sender.cancel(0, KEY, "early") == []
    assert sender.open(1, make_grant(), 3) == [
        PushFailed(key=KEY, reason="it has ended already"),
        SourceReleased(key=KEY, committed=False),
    ]
    other = PushKey("r2", 1)
    stop = PushStop(key=other, lease_id=6, reason="cancelled")
    assert messages(sender.on_message(2, DECODE, stop)) == [
        PushAbort(key=other, lease_id=6, stopped=True, reason="stopped")
    ]
    assert isinstance(sender.open(3, make_grant(key=other, lease_id=6), 3)[0], PushFailed)


def test_stop_is_answered_once_nothing_is_in_flight_and_again_when_asked_again() -> None:
    sender = make_sender()
    opened(sender, make_grant(2), 2)
    (write,) = writes(sender.blocks_ready(1, KEY, [(0, 0), (1, 1)]))
    stop = PushStop(key=KEY, lease_id=5, reason="cancelled")
    assert messages(sender.on_message(2, DECODE, stop))[0] == PushAbort(
        key=KEY, lease_id=5, stopped=False, reason="stopped by decode-0: cancelled"
    )
    assert sender.on_message(2, DECODE, stop) == []
    stopped = PushAbort(key=KEY, lease_id=5, stopped=True, reason="stopped")
    assert messages(sender.on_write_completed(3, write.write_id)) == [stopped]
    assert messages(sender.on_message(4, DECODE, stop)) == [stopped]


def test_a_write_that_may_still_land_is_never_called_stopped() -> None:
    sender = make_sender()
    opened(sender, make_grant(2), 2)
    (write,) = writes(sender.blocks_ready(1, KEY, [(0, 0), (1, 1)]))
    effects = sender.on_write_failed(2, write.write_id, False, "timeout")
    assert isinstance(effects[0], PushFailed)
    assert [m.stopped for m in messages(effects) if isinstance(m, PushAbort)] == [False]
    assert effects[-1] == SourceReleased(key=KEY, committed=False, settled=False)
    (answer,) = messages(sender.on_message(3, DECODE, PushStop(key=KEY, lease_id=5, reason="?")))
    assert isinstance(answer, PushAbort) and not answer.stopped


def test_write_that_never_ends_is_given_up() -> None:
    sender = make_sender()
    opened(sender, make_grant(2), 2)
    (write,) = writes(sender.blocks_ready(0, KEY, [(0, 0), (1, 1)]))
    now = LIMITS.write_timeout_ns
    sender.on_message(now - 1, DECODE, LeaseRenew(lease_ids=(5,), sent_ns=now - 1, is_reply=True))
    effects = sender.on_tick(now)
    assert PushFailed(key=KEY, reason="write timed out") in effects and CancelWrite(write_id=write.write_id) in effects
    assert sender.next_deadline_ns() == now + LIMITS.write_timeout_ns
    effects = sender.on_tick(now + LIMITS.write_timeout_ns)
    assert effects[-1] == SourceReleased(key=KEY, committed=False, settled=False)
    assert sender.on_write_completed(now, write.write_id) == []
    sender.check_invariants()


def test_lease_counts_from_before_the_renewal_was_sent() -> None:
    sender = make_sender()
    opened(sender, make_grant(), 3)
    due = sender.next_deadline_ns()
    assert due == 2 * SECOND_NS
    assert messages(sender.on_tick(due)) == [LeaseRenew(lease_ids=(5,), sent_ns=due)]
    sender.on_message(due + SECOND_NS, DECODE, LeaseRenew(lease_ids=(5, 77), sent_ns=due, is_reply=True))
    (lease,) = sender.leases(due + SECOND_NS)
    assert lease.remaining_ns == 7 * SECOND_NS and lease.age_ns == 3 * SECOND_NS and lease.state == "sending"
    assert not any(isinstance(e, PushFailed) for e in sender.on_tick(due + 8 * SECOND_NS - 1))
    effects = sender.on_tick(due + 8 * SECOND_NS)
    assert effects[0] == PushFailed(key=KEY, reason="lease expired")
    assert effects[-1] == SourceReleased(key=KEY, committed=False)


def test_pushes_over_a_connection_that_is_there_ask_for_their_leases_in_one_message() -> None:
    sender = make_sender()
    assert sender.on_connected(0, DECODE) == []
    for number in range(3):
        grant = make_grant(0, key=PushKey(f"r{number}", 1), lease_id=number)
        assert sender.open(number, grant, 0) == []
    sender.finish(3, PushKey("r0", 1), 20, FIRST)
    sender.on_message(4, DECODE, PushCommitted(key=PushKey("r0", 1), lease_id=0))
    assert sender.on_tick(LIMITS.first_renewal_ns - 1) == []
    assert messages(sender.on_tick(LIMITS.first_renewal_ns)) == [
        LeaseRenew(lease_ids=(1, 2), sent_ns=LIMITS.first_renewal_ns)
    ]


def test_a_push_that_is_over_before_asks_for_no_lease() -> None:
    sender = make_sender()
    sender.on_connected(0, DECODE)
    sender.open(0, make_grant(0), 0)
    sender.finish(1, KEY, 20, FIRST)
    sender.on_message(2, DECODE, PushCommitted(key=KEY, lease_id=5))
    assert sender.next_deadline_ns() is None
    sender.check_invariants()


def test_reply_from_the_future_renews_nothing() -> None:
    sender = make_sender()
    opened(sender, make_grant(), 3)
    sender.on_message(1, DECODE, LeaseRenew(lease_ids=(5,), sent_ns=SECOND_NS, is_reply=True))
    assert sender.leases(0)[0].remaining_ns == 8 * SECOND_NS and sender.num_ignored_messages == 1


def test_lost_connection_fails_every_push_of_that_peer() -> None:
    sender = make_sender()
    opened(sender, make_grant(2), 2)
    (write,) = writes(sender.blocks_ready(1, KEY, [(0, 0), (1, 1)]))
    effects = sender.on_peer_gone(2, DECODE, "reset")
    assert effects == [
        PushFailed(key=KEY, reason="lost decode-0: reset"),
        CancelWrite(write_id=write.write_id),
    ]
    assert sender.on_write_failed(3, write.write_id, True, "reset") == [SourceReleased(key=KEY, committed=False)]
    other = PushKey("r2", 1)
    assert sender.open(4, make_grant(key=other), 3) == [ConnectPeer(peer=DECODE)]
    effects = sender.on_connect_failed(5, DECODE, "refused")
    assert effects[0] == PushFailed(key=other, reason="cannot connect to decode-0: refused")
    sender.check_invariants()


def test_newer_life_of_the_receiver_ends_pushes_to_the_older_one() -> None:
    sender = make_sender()
    opened(sender, make_grant(), 3)
    effects = sender.on_connected(1, PeerId(DECODE.name, DECODE.incarnation + 1))
    assert effects[0] == PushFailed(key=KEY, reason="decode-0 has a newer life")
    late = sender.open(2, make_grant(key=PushKey("r2", 1)), 3)
    assert late[0] == PushFailed(key=PushKey("r2", 1), reason="decode-0 has a newer life")
    sender.check_invariants()


@pytest.mark.parametrize("peer", [PeerId("decode-0", 6), PeerId("decode-1", 7), PREFILL])
def test_messages_of_a_stranger_or_of_another_lease_are_ignored(peer: PeerId) -> None:
    sender = make_sender()
    ended(sender)
    for message in (
        PushCommitted(key=KEY, lease_id=5),
        PushStop(key=KEY, lease_id=5, reason="?"),
        PushMissing(key=KEY, lease_id=5, chunks=(0,)),
    ):
        assert sender.on_message(4, peer, message) == []
    assert sender.on_message(4, DECODE, PushCommitted(key=KEY, lease_id=4)) == []
    assert sender.num_ignored_messages == 4 and sender.num_pushes == 1


def test_misuse_raises() -> None:
    sender = make_sender()
    opened(sender, make_grant(), 3)
    with pytest.raises(ValueError, match="open already"):
        sender.open(1, make_grant(), 3)
    with pytest.raises(ValueError, match="total_blocks"):
        sender.open(1, make_grant(key=PushKey("r2", 1)), 4)
    sender.blocks_ready(1, KEY, [(0, 0)])
    with pytest.raises(ValueError, match="twice"):
        sender.blocks_ready(1, KEY, [(1, 1), (0, 0)])
    with pytest.raises(ValueError, match="index 3"):
        sender.blocks_ready(1, KEY, [(3, 1)])
    with pytest.raises(ValueError, match="index 1 is ready"):
        sender.finish(1, KEY, 1, ())
    sender.check_invariants()


def test_one_push_too_many_is_refused() -> None:
    sender = make_sender(PushLimits(max_pushes=1))
    opened(sender, make_grant(), 3)
    effects = sender.open(1, make_grant(key=PushKey("r2", 1), lease_id=6), 3)
    assert isinstance(effects[0], PushFailed) and "limit" in effects[0].reason


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_pushes"):
        PushLimits(max_pushes=0)
    assert PushLimits().end_resend_interval_ns == 500 * MILLISECOND_NS
