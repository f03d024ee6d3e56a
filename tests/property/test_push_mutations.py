"""The histories of pushes see broken rules: each test breaks one and expects a history of the default run to notice."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.block_pool import BlockPool, BlockState
from kv_transfer.protocol.messages import PeerId
from kv_transfer.protocol.receiver import PushReceiver
from kv_transfer.protocol.sender import PushSender
from kv_transfer.transport.base import Fenced
from kv_transfer.transport.loopback import LoopbackHub, LoopbackTransport, _Life
from tests.support.push_world import run_history
from tests.support.soak import NUM_PUSH_HISTORIES


def first_failure() -> str:
    """What the first history that goes wrong says."""
    for seed in range(NUM_PUSH_HISTORIES):
        try:
            run_history(seed)
        except AssertionError as error:
            return str(error)
    pytest.fail(f"{NUM_PUSH_HISTORIES} histories did not notice")


@pytest.mark.bad_day(4)
def test_a_commit_that_does_not_look_at_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit_blindly(self: BlockPool, blocks: Any) -> None:
        for block_id, _generation in blocks:
            self._move(block_id, BlockState.ACTIVE)
            self._num_users[block_id] = 1

    monkeypatch.setattr(BlockPool, "commit", commit_blindly)
    assert "somebody else's is committed" in first_failure()


@pytest.mark.bad_day(4, 20)
def test_checksums_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    on_verified = PushReceiver.on_verified

    def believe(self: PushReceiver, now_ns: int, key: Any, chunk: int, _bad: Any) -> Any:
        return on_verified(self, now_ns, key, chunk, ())

    monkeypatch.setattr(PushReceiver, "on_verified", believe)
    assert "wrong bytes" in first_failure()


@pytest.mark.bad_day(1, 7)
def test_blocks_that_are_freed_without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender has not answered in time; whether it still writes is not known."""
    fence = PushReceiver.fence

    def free_as_well(self: PushReceiver, now_ns: int, peer: PeerId) -> Any:
        keys = [push.grant.key for push in self._pushes_of(peer)]
        released = [effect for key in keys for effect in self.on_sender_stopped(now_ns, key)]
        return fence(self, now_ns, peer) + released

    monkeypatch.setattr(PushReceiver, "fence", free_as_well)
    assert "lands in block" in first_failure()


def test_blocks_that_are_freed_when_the_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up = PushReceiver._give_up

    def give_up_and_free(self: PushReceiver, now_ns: int, push: Any, reason: str) -> Any:
        effects = give_up(self, now_ns, push, reason)
        return effects + self.on_sender_stopped(now_ns, push.grant.key)

    monkeypatch.setattr(PushReceiver, "_give_up", give_up_and_free)
    assert "lands in block" in first_failure()


def test_a_fence_that_does_not_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopbackTransport, "fence", lambda self, peer: self.deliver(Fenced(peer=peer)))
    assert "lands in block" in first_failure()


@pytest.mark.bad_day(5)
def test_lives_at_one_address_that_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers at the address is taken for the life that a grant names."""

    def whoever_answers(self: LoopbackHub, peer: PeerId) -> Any:
        lives = [life for life in self._lives if life.name == peer.name]
        return self._lives[max(lives)] if lives else None

    monkeypatch.setattr(LoopbackHub, "_life", whoever_answers)

    def register(self: LoopbackHub, transport: LoopbackTransport) -> None:
        self._lives[transport.me] = _Life(transport=transport)

    monkeypatch.setattr(LoopbackHub, "register", register)
    assert " lands at " in first_failure()


def test_a_sender_that_says_stopped_although_a_write_may_still_land(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = PushSender._abort

    def say_stopped(self: PushSender, push: Any, *, stopped: bool, reason: str) -> Any:
        return abort(self, push, stopped=True, reason=reason)

    monkeypatch.setattr(PushSender, "_abort", say_stopped)
    assert "lands in block" in first_failure()


def test_a_lease_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver waits for ever for a sender that was never told of its grant."""
    monkeypatch.setattr(PushReceiver, "on_tick", lambda self, now_ns: [])
    monkeypatch.setattr(PushReceiver, "next_deadline_ns", lambda self: None)
    assert "a lease is left" in first_failure()
