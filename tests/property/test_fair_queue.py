"""The fair queue and the token bucket keep their promises whatever is asked of them."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.lane import QueueEntry
from cluster.core.limits import NS_PER_MS, NS_PER_S
from cluster.core.queue import RequestQueue
from cluster.core.token_bucket import TokenBucket

WEIGHTS = {"a": 1.0, "b": 0.5, "c": 3.0}
COST = st.integers(min_value=1, max_value=500)


def entry(number: int, tenant: str, cost: int, priority: int = 0) -> QueueEntry:
    return QueueEntry(
        neg_priority=-priority,
        rank=number,
        request_id=str(number),
        tenant=tenant,
        num_tokens=cost,
        cost_tokens=cost,
        is_fixed=False,
    )


@given(costs=st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), COST), min_size=2, max_size=120))
@settings(deadline=None)
def test_tenants_that_wait_all_the_time_get_tokens_by_weight(costs: list[tuple[str, int]]) -> None:
    """The bound of start-time fair queueing: between any two that wait, the tokens given, divided by weight, differ by
    no more than one request of each."""
    queue = RequestQueue(limit=1000)
    largest = dict.fromkeys(WEIGHTS, 0.0)
    left = dict.fromkeys(WEIGHTS, 0)
    for number, (tenant, cost) in enumerate(costs):
        queue.push(entry(number, tenant, cost), WEIGHTS[tenant])
        largest[tenant] = max(largest[tenant], cost / WEIGHTS[tenant])
        left[tenant] += 1
    given_tokens = dict.fromkeys(WEIGHTS, 0.0)
    while True:
        request_id = queue.head()
        assert request_id is not None
        tenant, cost = costs[int(request_id)]
        queue.serve(request_id)
        queue.check_invariants()
        given_tokens[tenant] += cost / WEIGHTS[tenant]
        left[tenant] -= 1
        if not all(left[name] for name in left if largest[name]):
            break  # somebody has nothing that waits any more
        for one in WEIGHTS:
            for other in WEIGHTS:
                if largest[one] and largest[other]:
                    assert given_tokens[one] - given_tokens[other] <= largest[one] + largest[other] + 1e-6


STEP = st.tuples(
    st.sampled_from(("push", "push", "serve", "remove", "correct")),
    st.sampled_from(sorted(WEIGHTS)),
    COST,
    st.integers(min_value=-2, max_value=2),
)


@given(steps=st.lists(STEP, max_size=80))
@settings(deadline=None)
def test_whatever_comes_and_goes_somebody_has_a_turn_and_nobody_is_lost(
    steps: list[tuple[str, str, int, int]],
) -> None:
    queue = RequestQueue(limit=5)
    waiting: dict[str, QueueEntry] = {}
    for number, (action, tenant, cost, priority) in enumerate(steps):
        if action == "push":
            waiting[str(number)] = entry(number, tenant, cost, priority)
            queue.push(waiting[str(number)], WEIGHTS[tenant])
        elif action == "correct":
            queue.correct(tenant, cost * priority, WEIGHTS[tenant])
        elif waiting:
            head = queue.head()
            assert head is not None
            chosen = head if action == "serve" else sorted(waiting)[cost % len(waiting)]
            (queue.serve if action == "serve" else queue.remove)(chosen)
            del waiting[chosen]
        queue.check_invariants()
        assert len(queue) == len(waiting) and queue.num_tokens == sum(item.num_tokens for item in waiting.values())
        head = queue.head()
        assert (head is None) is not bool(waiting)
        if head is not None:
            lane = [item for item in waiting.values() if item.tenant == waiting[head].tenant]
            assert waiting[head] == min(lane), "of a tenant's own, the first"
            ahead = queue.ahead_of(tenant, priority, WEIGHTS[tenant])
            own = sum(item.num_tokens for item in waiting.values() if item.tenant == tenant)
            assert ahead.num_tokens >= own * (priority == -2), "the lowest priority comes after all of its own"
            victim = queue.displaced_by(tenant, priority, WEIGHTS[tenant])
            assert victim is None or victim in waiting


@given(
    rate=st.integers(min_value=1, max_value=10_000),
    burst=st.integers(min_value=1, max_value=5_000),
    wishes=st.lists(
        st.tuples(st.integers(min_value=0, max_value=3 * NS_PER_S), st.integers(min_value=1, max_value=5_000)),
        max_size=40,
    ),
)
@settings(deadline=None)
def test_a_bucket_gives_no_more_than_a_burst_and_its_rate(rate: int, burst: int, wishes: list[tuple[int, int]]) -> None:
    """Over any time, of requests that are no larger than a burst; and what it says of waiting is exact."""
    bucket = TokenBucket(rate, burst)
    now_ns = 0
    taken: list[tuple[int, int]] = []
    for pause_ns, wish in wishes:
        now_ns += pause_ns
        num_tokens = min(wish, burst)
        wait_ms = bucket.wait_ms(now_ns, num_tokens)
        if wait_ms:
            probe = copy.copy(bucket)
            assert probe.wait_ms(now_ns + (wait_ms - 1) * NS_PER_MS, num_tokens) == 1
            assert probe.wait_ms(now_ns + wait_ms * NS_PER_MS, num_tokens) == 0
            continue
        bucket.take(now_ns, num_tokens)
        bucket.check_invariants()
        assert bucket.level_tokens(now_ns) >= 0
        taken.append((now_ns, num_tokens))
        for start, (start_ns, _) in enumerate(taken):
            total = sum(amount for _, amount in taken[start:])
            assert total * NS_PER_S <= burst * NS_PER_S + rate * (now_ns - start_ns)
