"""More than a cluster can do, in whole clusters: who is served, who is refused, when, and what it costs others."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.ids import Outcome, RefusalCause
from cluster.core.output_estimate import OutputEstimate
from cluster.core.tenant_config import NamedTenant, QuotaConfig, TenantConfig, TenantsConfig
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import Request
from engine.core.planning import StepBuilder
from engine.core.sequence import Sequence
from tests.sim.worlds import ANSWERED, ARRIVAL_NS, ask, finish, make_world

LARGE, SMALL = "large", "small"
NUM_SMALL = 12


def steady(tenant: str = SMALL) -> list[Request]:
    """A request every 80 ms; each takes some 100 ms, and eight can run at once."""
    return [
        ask(index, tenant=tenant, arrival_ns=ARRIVAL_NS + index * 80 * MILLISECOND_NS) for index in range(NUM_SMALL)
    ]


def burst(number: int) -> list[Request]:
    """Many at once, while the others go on."""
    arrival_ns = ARRIVAL_NS + 200 * MILLISECOND_NS
    return [ask(100 + index, tenant=LARGE, arrival_ns=arrival_ns, max_tokens=16) for index in range(number)]


def worst_first_token_ms(*requests: Request, **fields: Any) -> float:
    """Of the steady ones, all of which are answered."""
    clients = finish(make_world(*requests, max_running=8, **fields))
    judged = [client for client in clients if int(client.request.request_id[1:]) < NUM_SMALL]
    assert all(client.outcome in ANSWERED for client in judged)
    times = [(client.first_token_ns or 0) - client.request.arrival_ns for client in judged]
    return max(times) / MILLISECOND_NS


@pytest.mark.bad_day(31)
def test_a_tenants_burst_does_not_move_anothers_worst_time() -> None:
    """Tenants take turns. Once the cluster is full it makes no difference to one how much another has asked for; to
    requests of the same tenant it does."""
    some, many = (worst_first_token_ms(*steady(), *burst(number)) for number in (15, 40))
    same_tenant = worst_first_token_ms(*steady(LARGE), *burst(40))
    assert many <= 1.1 * some and many * 5 < same_tenant, (some, many, same_tenant)


@pytest.mark.bad_day(31)
def test_a_quota_keeps_a_burst_out_altogether() -> None:
    """What is over it is refused at once, and the others hardly notice what is not."""
    quota = QuotaConfig(tokens_per_s=100, burst_tokens=80)
    tenants = TenantsConfig(named=(NamedTenant(name=LARGE, config=TenantConfig(quota=quota)),))
    world = make_world(*steady(), *burst(50), max_running=8, tenants=tenants)
    clients = finish(world)
    refused = [client for client in clients if client.outcome is Outcome.REJECTED_OVERLOAD]
    assert len(refused) == 48, "of 34 tokens each, two fit"
    for client in refused:
        assert client.request.tenant == LARGE and client.refusal is RefusalCause.QUOTA and client.retry_after_ms
        assert client.ended_ns is not None and client.ended_ns - client.request.arrival_ns < 10 * MILLISECOND_NS
    alone = worst_first_token_ms(*steady())
    beside = worst_first_token_ms(*steady(), *burst(50), tenants=tenants)
    assert beside < 2 * alone


@pytest.mark.bad_day(31)
def test_under_overload_what_is_served_keeps_its_limit_and_the_rest_is_refused_early() -> None:
    """Three times what the cluster can do, with a limit of 150 ms on the first token. Before that its costs are
    measured, and workers have told of them."""
    quiet = [ask(index, arrival_ns=ARRIVAL_NS + index * 40 * MILLISECOND_NS) for index in range(8)]
    storm = [
        ask(100 + index, arrival_ns=2 * SECOND_NS + index * 6 * MILLISECOND_NS, max_tokens=16) for index in range(120)
    ]
    clients = finish(make_world(*quiet, *storm, max_running=8, slo_ttft_ms=150))[len(quiet) :]
    served = [client for client in clients if client.outcome in ANSWERED]
    refused = [client for client in clients if client.outcome is Outcome.REJECTED_OVERLOAD]
    assert len(served) + len(refused) == len(clients) and min(len(served), len(refused)) > 20
    assert all(client.refusal is RefusalCause.SLO and client.retry_after_ms for client in refused)
    times_ms = sorted(((c.first_token_ns or 0) - c.request.arrival_ns) / MILLISECOND_NS for c in served)
    assert times_ms[int(0.9 * len(times_ms))] <= 150, times_ms
    told_ms = sorted(((c.ended_ns or 0) - c.request.arrival_ns) / MILLISECOND_NS for c in refused)
    assert told_ms[int(0.9 * len(told_ms))] <= 10, told_ms


@pytest.mark.bad_day(26)
def test_preemption_ends_once_the_length_of_answers_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first answers are thought to be short, and are preempted as they are not; then what runs has room to grow."""
    monkeypatch.setattr(OutputEstimate.__init__, "__defaults__", (2,))
    preempted: list[str] = []
    preempt = StepBuilder._preempt

    def note(self: StepBuilder, victim: Sequence) -> None:
        preempted.append(victim.key.request_id)
        preempt(self, victim)

    monkeypatch.setattr(StepBuilder, "_preempt", note)
    gap_ns = 20 * MILLISECOND_NS
    requests = [
        ask(index, num_prompt_tokens=12, max_tokens=40, arrival_ns=ARRIVAL_NS + index * gap_ns) for index in range(60)
    ]
    world = make_world(*requests, num_blocks=30, queue_limit=99, queue_timeout_s=60.0)
    assert all(client.outcome in ANSWERED for client in finish(world))
    numbers = [int(request_id[1:]) for request_id in preempted]
    first, last = sum(number < 20 for number in numbers), sum(number >= 40 for number in numbers)
    assert first > 3 and last * 4 <= first, (first, last)
