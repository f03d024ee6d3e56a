"""A worker that is drained: what it keeps of the order, and its last words."""

from __future__ import annotations

from dataclasses import replace

from cluster.agent import effects as fx
from cluster.agent import events as ev
from cluster.agent.state import WorkerState
from cluster.core.commands import Command, CommandBody, Prefill, WorkerWelcome
from cluster.core.drain_orders import AfterDrain, DrainOrder, Leave, StartDrain, WorkerLeft
from cluster.core.ids import Role, WorkerId
from cluster.core.limits import NS_PER_MS
from cluster.core.messages import Heartbeat, WorkerHello
from decode_worker.profile import PROFILE as DECODE
from tests.support.worker_pair import worker_config

ME = WorkerId("d", 1)
ORDER = DrainOrder(worker="d", then=AfterDrain.FLIP, pool="p", deadline_ms=5_000)


class Bench:
    """A worker that has just been welcomed."""

    def __init__(self) -> None:
        self.config = worker_config(ME, Role.DECODE)
        self.state = WorkerState(self.config, 0)
        self.now_ns = 0
        self.handle(ev.CoordinatorConnected())
        self.obey(WorkerWelcome(heartbeat_ms=1000))

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.state.handle(self.now_ns, event)
        self.state.check_invariants()
        return effects

    def obey(self, body: CommandBody) -> list[fx.Effect]:
        return self.handle(ev.CommandReceived(command=Command(epoch=1, worker=ME, body=body)))

    def wait_ms(self, duration_ms: int) -> list[fx.Effect]:
        self.now_ns += duration_ms * NS_PER_MS
        return self.handle(ev.Tick())


def said(effects: list[fx.Effect], kind: type) -> list[object]:
    messages = [effect.message for effect in effects if isinstance(effect, fx.ToCoordinator)]
    return [message for message in messages if isinstance(message, kind)]


def test_a_new_coordinator_is_told_of_the_drain_and_what_is_left_of_its_time() -> None:
    bench = Bench()
    bench.obey(StartDrain(order=ORDER))
    assert bench.state.is_draining
    bench.handle(ev.CoordinatorLost())
    bench.now_ns += 1_500 * NS_PER_MS
    (hello,) = said(bench.handle(ev.CoordinatorConnected()), WorkerHello)
    assert isinstance(hello, WorkerHello) and hello.drain == replace(ORDER, deadline_ms=3_500)


def test_it_leaves_with_a_last_word_and_the_order_for_whoever_runs_it() -> None:
    bench = Bench()
    leave = Leave(then=AfterDrain.FLIP, pool="p")
    effects = bench.obey(leave)
    (beat,) = said(effects, Heartbeat)
    assert isinstance(beat, Heartbeat) and beat.is_leaving
    assert not any(isinstance(effect, fx.Shutdown) for effect in effects)
    effects = bench.wait_ms(bench.config.limits.leave_notice_ns // NS_PER_MS)
    assert effects[-1] == fx.Shutdown(reason="asked to stop", leave=leave)
    assert effects[-2] == fx.ToCoordinator(message=WorkerLeft())


def test_one_that_is_stopped_by_a_signal_has_no_last_word() -> None:
    bench = Bench()
    bench.handle(ev.LeaveRequested())
    effects = bench.wait_ms(bench.config.limits.leave_notice_ns // NS_PER_MS)
    assert effects[-1] == fx.Shutdown(reason="asked to stop") and not said(effects, WorkerLeft)


def test_a_decode_worker_can_push_what_it_has() -> None:
    assert Prefill in DECODE.accepts
