"""Tenants: their share of the queue, their quota, and how long their answers are expected to be."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.config import parse_cluster_config
from cluster.core.errors import ConfigError
from cluster.core.fair_share import MAX_IDLE_COUNTERS, FairShare
from cluster.core.ids import RefusalCause
from cluster.core.lane import QueueEntry
from cluster.core.limits import NS_PER_MS, NS_PER_S
from cluster.core.output_estimate import UNMEASURED_OUTPUT_TOKENS, OutputEstimate
from cluster.core.queue import RequestQueue
from cluster.core.tenant_config import NamedTenant, QuotaConfig, TenantConfig, TenantsConfig
from cluster.core.tenants import MAX_IDLE_TENANTS, TenantTable
from cluster.core.token_bucket import TokenBucket


def push(
    queue: RequestQueue,
    request_id: str,
    *,
    tenant: str = "",
    priority: int = 0,
    rank: int = 1,
    num_tokens: int = 10,
    weight: float = 1.0,
    is_fixed: bool = False,
) -> None:
    entry = QueueEntry(
        neg_priority=-priority,
        rank=rank,
        request_id=request_id,
        tenant=tenant,
        num_tokens=num_tokens,
        cost_tokens=2 * num_tokens,
        is_fixed=is_fixed,
    )
    queue.push(entry, weight)
    queue.check_invariants()


def drain(queue: RequestQueue) -> list[str]:
    order = []
    while (request_id := queue.head()) is not None:
        order.append(request_id)
        queue.serve(request_id)
        queue.check_invariants()
    return order


# ---- the queue ------------------------------------------------------------------------------------------------


def test_one_tenants_requests_go_by_priority_then_rank() -> None:
    queue = RequestQueue(limit=3)
    for rank, (request_id, priority) in enumerate([("a", 0), ("b", 1), ("c", 1), ("d", -1)]):
        push(queue, request_id, priority=priority, rank=rank)
    assert len(queue) == 4 > queue.limit and queue.num_tokens == 40 and "a" in queue
    assert drain(queue) == ["b", "c", "a", "d"]
    assert queue.num_tokens == 0 and len(queue) == 0 and "a" not in queue


def test_the_queue_takes_back_by_rank_what_was_in_it_before() -> None:
    queue = RequestQueue(limit=3)
    push(queue, "a", rank=1, num_tokens=1)
    push(queue, "b", rank=2, num_tokens=1)
    queue.remove("a")
    push(queue, "a", rank=1, num_tokens=7)
    assert queue.num_tokens == 8 and drain(queue) == ["a", "b"]


def test_the_queue_stays_small_when_many_leave_from_its_middle() -> None:
    queue = RequestQueue(limit=10_000)
    push(queue, "first", priority=9, rank=0)
    for rank in range(1, 2_000):
        entry = QueueEntry(0, rank, str(rank), "", 1, 1, False)
        queue.push(entry)
        queue.remove(str(rank))
    queue.check_invariants()
    assert drain(queue) == ["first"]


def test_tenants_take_turns_whatever_their_priorities() -> None:
    queue = RequestQueue(limit=9)
    for rank in range(3):
        push(queue, f"a{rank}", tenant="a", rank=rank, priority=9)
    for rank in range(2):
        push(queue, f"b{rank}", tenant="b", rank=10 + rank)
    assert drain(queue) == ["a0", "b0", "a1", "b1", "a2"]


def test_twice_the_weight_is_twice_the_tokens() -> None:
    queue = RequestQueue(limit=9)
    for rank in range(6):
        push(queue, f"a{rank}", tenant="a", rank=rank, weight=2.0)
        push(queue, f"b{rank}", tenant="b", rank=rank)
    assert sorted(drain(queue)[:6]) == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_who_was_away_has_no_claim_and_no_debt() -> None:
    """While alone a tenant had as much as it wanted; from the moment when another comes they take turns."""
    queue = RequestQueue(limit=9)
    for rank in range(50):
        push(queue, f"a{rank}", tenant="a", rank=rank)
        drain(queue)
    for rank in range(50, 53):
        push(queue, f"a{rank}", tenant="a", rank=rank)
        push(queue, f"b{rank}", tenant="b", rank=rank)
    order = drain(queue)
    assert [request_id[0] for request_id in order[1:]].count("a") in (2, 3)
    assert {order[0][0], order[1][0]} == {"a", "b"}


def test_an_answer_that_was_longer_than_charged_for_costs_the_next_turn() -> None:
    queue = RequestQueue(limit=9)
    for rank in range(3):
        push(queue, f"a{rank}", tenant="a", rank=rank)
        push(queue, f"b{rank}", tenant="b", rank=rank)
    assert queue.head() == "a0"
    queue.correct("a", 30, 1.0)
    assert drain(queue) == ["b0", "b1", "a0", "b2", "a1", "a2"]


def test_what_comes_before_a_new_request_is_its_own_and_what_others_have_a_claim_to() -> None:
    queue = RequestQueue(limit=99)
    for rank in range(10):
        push(queue, f"a{rank}", tenant="a", rank=rank)
    assert queue.ahead_of("a", 0, 1.0).num_tokens == 100
    assert queue.ahead_of("a", 1, 1.0).num_tokens == 0, "of a higher priority"
    assert queue.ahead_of("b", 0, 1.0).num_tokens == 0, "it has its turn at once"
    push(queue, "b", tenant="b")
    assert queue.ahead_of("b", 0, 1.0).num_tokens == 20, "one of its own, and as much of the other's"
    assert queue.ahead_of("b", 0, 0.5).num_tokens == 30, "of half the weight, twice as much of the other's"


def test_a_full_queue_makes_room_for_who_has_less_than_its_share() -> None:
    queue = RequestQueue(limit=4)
    for rank in range(4):
        push(queue, f"a{rank}", tenant="a", rank=rank)
    assert queue.displaced_by("b", 0, 1.0) == "a3"
    assert queue.displaced_by("b", 0, 0.2) is None, "its share is a quarter of a request"
    assert queue.displaced_by("a", 0, 1.0) is None
    assert queue.displaced_by("a", 1, 1.0) == "a3", "a tenant's own, of a lower priority"
    queue.remove("a3")
    push(queue, "b0", tenant="b")
    assert queue.displaced_by("b", 0, 1.0) == "a2"
    queue.remove("a2")
    push(queue, "b1", tenant="b", rank=2)
    assert queue.displaced_by("b", 0, 1.0) is None and queue.displaced_by("c", 0, 1.0) == "b1"


def test_what_has_been_placed_before_is_not_displaced() -> None:
    queue = RequestQueue(limit=2)
    push(queue, "a0", tenant="a", rank=0)
    push(queue, "a1", tenant="a", rank=1, is_fixed=True)
    assert queue.displaced_by("b", 0, 1.0) == "a0"
    queue.remove("a0")
    push(queue, "a2", tenant="a", rank=2, is_fixed=True)
    assert queue.displaced_by("b", 0, 1.0) is None


def test_counters_of_many_tenants_are_forgotten() -> None:
    share = FairShare()
    for number in range(MAX_IDLE_COUNTERS + 10):
        share.enter(str(number))
        share.serve(str(number), 5, 1.0)
        share.leave(str(number))
    share.check_invariants()
    assert share.counter("0") == share.virtual_time < share.counter(str(MAX_IDLE_COUNTERS + 9))


# ---- quotas ---------------------------------------------------------------------------------------------------


def test_a_bucket_gives_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(tokens_per_s=100, burst_tokens=50)
    assert bucket.wait_ms(0, 50) == 0
    bucket.take(0, 50)
    assert bucket.wait_ms(0, 10) == 100 and bucket.level_tokens(0) == 0
    assert bucket.wait_ms(99 * NS_PER_MS, 10) == 1 and bucket.wait_ms(100 * NS_PER_MS, 10) == 0
    assert bucket.level_tokens(NS_PER_S) == 50, "no more than a burst"


def test_more_than_a_burst_is_given_to_a_full_bucket_and_paid_off() -> None:
    bucket = TokenBucket(tokens_per_s=100, burst_tokens=50)
    assert bucket.wait_ms(0, 500) == 0
    bucket.take(0, 500)
    assert bucket.level_tokens(0) == -450 and bucket.wait_ms(0, 1) == 4_510
    bucket.take(0, -480)
    assert bucket.level_tokens(0) == 30, "a correction"
    bucket.take(0, -480)
    assert bucket.level_tokens(0) == 50


def test_what_is_taken_over_makes_no_debt() -> None:
    bucket = TokenBucket(tokens_per_s=100, burst_tokens=50)
    bucket.take_what_is_there(0, 30)
    bucket.take_what_is_there(0, 30)
    assert bucket.level_tokens(0) == 0
    bucket.take(0, 5)
    bucket.take_what_is_there(0, 30)
    assert bucket.level_tokens(0) == -5


# ---- estimates ------------------------------------------------------------------------------------------------


def test_an_estimate_follows_the_answers_and_keeps_room_for_their_spread() -> None:
    even, uneven = OutputEstimate(), OutputEstimate()
    assert even.num_tokens == UNMEASURED_OUTPUT_TOKENS
    for number in range(200):
        even.learn(40)
        uneven.learn(10 if number % 2 else 70)
    assert 40 <= even.num_tokens <= 42 and 60 <= uneven.num_tokens <= 75
    even.learn(400)
    assert even.num_tokens > 100, "one long answer is noticed at once"


def test_a_new_tenant_is_expected_to_be_like_the_others() -> None:
    table = TenantTable(TenantsConfig(named=(NamedTenant(name="n", config=TenantConfig(weight=3.0)),)))
    for _ in range(200):
        table.learn(table.of("a"), 10)
    assert 10 <= table.of("b").output.num_tokens <= 12
    assert (table.of("n").weight, table.of("b").weight) == (3.0, 1.0)


def test_idle_tenants_are_forgotten_unless_the_file_names_them() -> None:
    table = TenantTable(TenantsConfig(named=(NamedTenant(name="n", config=TenantConfig()),)))
    live = table.of("live")
    table.begin(live)
    for number in range(MAX_IDLE_TENANTS + 5):
        table.refuse(table.of(str(number)), RefusalCause.QUOTA)
    table.check_invariants()
    assert table.get("0") is None and table.get("n") is not None and table.get("live") is live
    assert table.refusals[RefusalCause.QUOTA] == MAX_IDLE_TENANTS + 5
    assert [tenant.name for tenant in table.all()[:3]] == ["n", "live", str(MAX_IDLE_TENANTS + 4)]
    table.end(live)
    table.check_invariants()
    assert table.get("live") is live


# ---- the cluster file -----------------------------------------------------------------------------------------


def _parse(**sections: Any) -> TenantsConfig:
    pools = [{"name": "d", "role": "decode"}]
    data = {"version": 1, "model": {"path": "m"}, "pools": pools, **sections}
    return parse_cluster_config(data, "cluster.yaml", lambda path: None).tenants


def test_the_file_names_tenants_and_what_the_others_have() -> None:
    tenants = _parse(
        tenants=[{"name": "a", "weight": 2, "tokens_per_s": 100, "burst_tokens": 300}, {"name": "b"}],
        default_tenant={"weight": 0.5, "tokens_per_s": 7},
    )
    assert tenants.named == (
        NamedTenant(name="a", config=TenantConfig(weight=2.0, quota=QuotaConfig(tokens_per_s=100, burst_tokens=300))),
        NamedTenant(name="b", config=TenantConfig()),
    )
    assert tenants.others == TenantConfig(weight=0.5, quota=QuotaConfig(tokens_per_s=7, burst_tokens=70))
    assert _parse() == TenantsConfig()


@pytest.mark.parametrize(
    ("sections", "path", "found"),
    [
        ({"tenants": []}, "tenants", "a list of 0"),
        ({"tenants": [{"weight": 1}]}, "tenants[0].name", "nothing"),
        ({"tenants": [{"name": "a"}, {"name": "a"}]}, "tenants[1].name", "'a' a second time"),
        ({"tenants": [{"name": "a", "weight": 0}]}, "tenants[0].weight", "0 (integer)"),
        ({"tenants": [{"name": "a", "tokens_per_s": 1.5}]}, "tenants[0].tokens_per_s", "1.5 (number)"),
        ({"tenants": [{"name": "a", "burst_tokens": 5}]}, "tenants[0].burst_tokens", "5 without tokens_per_s"),
        ({"tenants": [{"name": "a", "quota": 5}]}, "tenants[0].quota", "the unknown key 'quota'"),
        ({"default_tenant": {"name": "a"}}, "default_tenant.name", "the unknown key 'name'"),
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms", "0 (integer)"),
        ({"slo": {"ttft": 5}}, "slo.ttft", "the unknown key 'ttft'"),
        ({"slo": {"tpot_ms": 0}}, "slo.tpot_ms", "0 (integer)"),
        ({"slo": {"tpot_ms": "fast"}}, "slo.tpot_ms", "'fast' (text)"),
    ],
)
def test_errors_name_the_field(sections: dict[str, Any], path: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _parse(**sections)
    assert (caught.value.path, caught.value.found) == (path, found)
