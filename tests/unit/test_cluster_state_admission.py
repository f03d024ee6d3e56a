"""ClusterState's accounts: quotas, turns, limits on the first token, expected output, and a restart."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.core.commands import Reserve
from cluster.core.config import ClusterConfig
from cluster.core.ids import AttemptId, LegStage, Outcome, RefusalCause, Role
from cluster.core.messages import (
    CancelRequest,
    Committed,
    Finished,
    FrontHello,
    Heartbeat,
    PrefillDone,
    Refused,
    RequestDone,
    ReserveRefused,
    StreamLost,
    Submit,
    WorkerLoad,
)
from cluster.core.reports import HeldLeg, LiveRequest
from cluster.core.tenant_config import NamedTenant, QuotaConfig, SloConfig, TenantConfig, TenantsConfig
from cluster.core.views import TenantView
from tests.support.coordinator import D0, D1, FRONT, P0, P1, TIMELINE, Bench, make_config, make_hello, make_load, only

QUOTA = TenantConfig(quota=QuotaConfig(tokens_per_s=100, burst_tokens=400))


def limited(config: ClusterConfig | None = None, *, slo_ttft_ms: int | None = None, **tenants: TenantConfig) -> Bench:
    named = tuple(NamedTenant(name=name, config=tenant) for name, tenant in tenants.items())
    config = dataclasses.replace(
        config or make_config(), slo=SloConfig(ttft_ms=slo_ttft_ms), tenants=TenantsConfig(named=named)
    )
    bench = Bench(config)
    bench.connect()
    return bench


def submit(bench: Bench, request_id: str, tenant: str = "", **fields: int) -> Refused | None:
    """Its refusal, if it is refused at once."""
    values = {"num_prompt_tokens": 40, "max_tokens": 8, **fields}
    bench.front_says(Submit(request_id=request_id, tenant=tenant, **values))  # type: ignore[arg-type]
    refusals = [message for message in bench.said() if isinstance(message, Refused)]
    return next((refused for refused in refusals if refused.request_id == request_id), None)


def tenant_view(bench: Bench, name: str) -> TenantView:
    return next(view for view in bench.state.status(bench.now_ns).admission.tenants if view.name == name)


def level_tokens(bench: Bench, name: str = "a") -> int:
    quota = tenant_view(bench, name).quota
    assert quota is not None
    return quota.level_tokens


def answer(bench: Bench, request_id: str, num_output_tokens: int) -> None:
    """From the queue to its end."""
    attempt = AttemptId(request_id, 1)
    bench.grant(attempt)
    bench.worker_says(P0, PrefillDone(attempt=attempt, outcome=None, timeline=TIMELINE))
    bench.worker_says(D0, Committed(attempt=attempt, timeline=TIMELINE))
    bench.release(P0, attempt)
    finished = Finished(attempt=attempt, outcome=Outcome.STOP, num_output_tokens=num_output_tokens, timeline=TIMELINE)
    bench.worker_says(D0, finished)
    done = RequestDone(request_id=request_id, outcome=Outcome.STOP, num_output_tokens=num_output_tokens)
    bench.front_says(done)


# ---- quotas ---------------------------------------------------------------------------------------------------


def test_a_quota_is_used_up_and_comes_back() -> None:
    bench = limited(a=QUOTA)
    assert submit(bench, "r0", "a", max_tokens=160) is None
    assert submit(bench, "r1", "a", max_tokens=160) is None, "200 tokens each"
    refused = submit(bench, "r2", "a", max_tokens=160)
    assert refused is not None and refused.outcome is Outcome.REJECTED_OVERLOAD
    assert (refused.cause, refused.retry_after_ms) == (RefusalCause.QUOTA, 2_000)
    assert bench.dropped() == ["r2"]
    assert submit(bench, "r3", "b", max_tokens=160) is None, "others have their own, or none"
    bench.wait_ms(2_000)
    assert submit(bench, "r2", "a", max_tokens=160) is None
    assert tenant_view(bench, "a").num_refused == 1 and tenant_view(bench, "b").num_refused == 0


def test_what_never_had_a_place_is_given_back() -> None:
    bench = limited(a=QUOTA)
    submit(bench, "r", "a", max_tokens=160)
    assert level_tokens(bench) == 200
    bench.front_says(CancelRequest(request_id="r", outcome=Outcome.CANCELLED, reason="left"))
    assert level_tokens(bench) == 400
    bench.assert_nothing_left()


def test_the_quota_pays_for_what_was_written() -> None:
    """Expected are 256 tokens; in fact it has 3, so that nearly all of it comes back."""
    bench = limited(a=QUOTA)
    bench.join(P0, D0)
    submit(bench, "r", "a", max_tokens=1_000)
    assert level_tokens(bench) == 400 - 40 - 256
    answer(bench, "r", 3)
    assert level_tokens(bench) == 400 - 43
    view = tenant_view(bench, "a")
    assert (view.num_ended, view.num_prompt_tokens, view.num_output_tokens) == (1, 40, 3)
    bench.assert_nothing_left()


# ---- turns ----------------------------------------------------------------------------------------------------


def _full(bench: Bench) -> None:
    """Nothing can be placed: there is no decode worker."""
    bench.join(P0)


def test_the_smaller_tenant_has_its_turn_before_the_larger_ones_backlog() -> None:
    bench = limited()
    _full(bench)
    for number in range(6):
        submit(bench, f"a{number}", "a")
    submit(bench, "b0", "b")
    bench.join(D0, num_blocks=30)
    reserved = [body.attempt.request_id for body in bench.commands(D0) if isinstance(body, Reserve)]
    assert reserved[:3] == ["a0", "b0", "a1"], reserved


def test_a_refused_reservation_gives_the_turn_back() -> None:
    bench = limited()
    _full(bench)
    for number in range(2):
        submit(bench, f"a{number}", "a")
        submit(bench, f"b{number}", "b")
    bench.join(D0, num_blocks=4)  # idle, it takes one, however large
    reserve = only([body for body in bench.commands(D0) if isinstance(body, Reserve)])
    assert reserve.attempt.request_id == "a0"
    bench.worker_says(D0, ReserveRefused(attempt=reserve.attempt, reason="no blocks"))
    bench.wait_ms(50)
    reserve = only([body for body in bench.commands(D0) if isinstance(body, Reserve)])
    assert reserve.attempt == AttemptId("a0", 2), "its tenant was not charged for the attempt that came to nothing"


def test_a_full_queue_makes_room_for_another_tenant() -> None:
    bench = limited(make_config(queue_limit=4))
    _full(bench)
    for number in range(4):
        assert submit(bench, f"a{number}", "a") is None
    refused = submit(bench, "a4", "a")
    assert refused is not None and refused.cause is RefusalCause.TOO_MANY
    assert submit(bench, "b0", "b") is None
    displaced = only([message for message in bench.said() if isinstance(message, Refused)])
    assert (displaced.request_id, displaced.cause) == ("a3", RefusalCause.DISPLACED)
    assert displaced.retry_after_ms is not None and bench.dropped() == ["a3"]
    view = bench.state.status(bench.now_ns)
    assert view.num_queued == 4
    assert dict(view.admission.refusals) == {RefusalCause.TOO_MANY: 1, RefusalCause.DISPLACED: 1}


# ---- limits on the first token --------------------------------------------------------------------------------


def _slow_reader(bench: Bench) -> None:
    """2 ms a token, so that a prompt of 40 takes 80 ms, and nobody to write."""
    bench.worker_says(P0, make_hello(P0, Role.PREFILL, step_ms_per_token=2.0))


def test_what_would_wait_for_too_long_is_refused_at_once() -> None:
    bench = limited(slo_ttft_ms=250)
    _slow_reader(bench)
    assert submit(bench, "r0") is None
    assert submit(bench, "r1") is None, "it waits for 80 ms, and hardly for 160"
    refused = submit(bench, "r2")
    assert refused is not None and refused.cause is RefusalCause.SLO
    assert "expected in 240 to 400 ms, the cluster's slo.ttft_ms is 250" in refused.reason
    assert refused.retry_after_ms == 150
    late = submit(bench, "r3", max_latency_ms=150)
    assert late is not None and late.cause is RefusalCause.MAX_LATENCY
    assert submit(bench, "r4", "other") is None, "its tenant's turn comes first"


def test_what_waits_is_refused_once_its_first_token_would_come_too_late() -> None:
    bench = limited()
    _slow_reader(bench)
    submit(bench, "r", max_latency_ms=200)
    bench.wait_ms(119)
    assert bench.said() == [] and bench.phase() == "queued"
    bench.wait_ms(1)
    refused = only(bench.said())
    assert isinstance(refused, Refused) and refused.cause is RefusalCause.MAX_LATENCY
    assert "no decode worker is alive; max_latency_ms is 200" in refused.reason and refused.retry_after_ms is not None
    bench.assert_nothing_left()


def test_a_limit_holds_until_the_first_place_and_not_for_what_comes_back() -> None:
    """After a failure the client may have tokens already; its front watches the limit itself."""
    bench = limited(slo_ttft_ms=200)
    bench.worker_says(P0, make_hello(P0, Role.PREFILL, step_ms_per_token=2.0))
    bench.join(D0)
    submit(bench, "r")
    bench.worker_says(D0, ReserveRefused(attempt=AttemptId("r", 1), reason="no"))
    bench.wait_ms(50)
    assert bench.phase() == "reserving"
    bench.grant(AttemptId("r", 2))
    bench.front_says(StreamLost(attempt=AttemptId("r", 2), worker=D0, reason="cut"))
    bench.wait_ms(500)
    assert bench.phase() == "waiting_front" and not any(isinstance(message, Refused) for message in bench.said())


# ---- expected output ------------------------------------------------------------------------------------------


@pytest.mark.bad_day(26)
def test_expected_output_is_learned_of_each_tenant() -> None:
    bench = limited()
    bench.join(P0, D0)
    for number in range(60):
        submit(bench, f"r{number}", "a", max_tokens=900)
        answer(bench, f"r{number}", 20)
    short = tenant_view(bench, "a").expected_output_tokens
    assert 20 <= short <= 40
    submit(bench, "s", "b", max_tokens=900)
    new = tenant_view(bench, "b").expected_output_tokens
    assert short <= new <= 2 * short, "like the others"


@pytest.mark.bad_day(26)
def test_room_for_expected_output_keeps_others_waiting() -> None:
    """A decode worker of 100 blocks: of requests that are expected to need 19 it takes five, of short ones more."""
    for num_before, num_placed in ((0, 5), (60, 8)):
        bench = limited()
        bench.join(P0, D0)
        for number in range(num_before):
            submit(bench, f"w{number}", max_tokens=900)
            answer(bench, f"w{number}", 20)
        for number in range(8):
            submit(bench, f"r{number}", max_tokens=900)
            bench.release(P0, AttemptId(f"r{number}", 1))
        assert bench.num_legs(D0) == num_placed, num_before


@pytest.mark.bad_day(26)
def test_answers_that_outgrow_what_was_expected_leave_no_room() -> None:
    """The books say that eight blocks are needed; the worker says that 95 of its 100 are."""
    bench = limited()
    bench.join(P0, D0)
    submit(bench, "r0", num_prompt_tokens=100)
    load = make_load(100)
    grown = dataclasses.replace(load, blocks=dataclasses.replace(load.blocks, active=95, free=5))
    bench.worker_says(D0, Heartbeat(load=grown))
    submit(bench, "r1", num_prompt_tokens=100)
    assert bench.phase("r1") == "queued"
    bench.worker_says(D0, Heartbeat(load=WorkerLoad(blocks=dataclasses.replace(grown.blocks, active=50, free=50))))
    assert bench.phase("r1") == "reserving"


# ---- a restart ------------------------------------------------------------------------------------------------


def test_a_restarted_coordinator_accounts_for_what_runs() -> None:
    """From what fronts and workers say: whose requests there are, what they use of quota, share and room."""
    bench = Bench(
        dataclasses.replace(make_config(), tenants=TenantsConfig(named=(NamedTenant(name="a", config=QUOTA),)))
    )
    attempt = AttemptId("r", 1)
    leg = HeldLeg(attempt=attempt, half=Role.DECODE, stage=LegStage.RUNNING)
    bench.worker_says(D0, make_hello(D0, Role.DECODE, inventory=(leg,), epoch=2))
    live = LiveRequest(
        request_id="r", attempt=1, is_running=True, num_prompt_tokens=40, max_tokens=60, tenant="a", num_delivered=5
    )
    bench.front_says(FrontHello(front=FRONT, address="f", live=(live,), epoch=2))
    view = tenant_view(bench, "a")
    assert (view.num_running, view.num_queued) == (1, 0) and level_tokens(bench) == 400 - 100
    bench.join(P0, P1, D1)
    bench.wait_ms(5_000)
    assert bench.phase() == "local"
    bench.worker_says(D0, Finished(attempt=attempt, outcome=Outcome.STOP, num_output_tokens=10, timeline=TIMELINE))
    bench.front_says(RequestDone(request_id="r", outcome=Outcome.STOP, num_output_tokens=10))
    assert tenant_view(bench, "a").num_ended == 1 and level_tokens(bench) == 400
    bench.assert_nothing_left()
