"""Which pool limits: a long queue says nothing by itself, nor does what prefill holds for decode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.cli.status import status_json, status_text
from cluster.core.ids import AttemptId, Role
from cluster.core.messages import PrefillDone
from cluster.core.state import ClusterState
from cluster.core.views import PressureView
from cluster.live.admin import status_response
from cluster.live.metrics import measure_pressure
from cluster.policy.bottleneck import decode_pressure, limiting_role, prefill_pressure, push_pressure
from cluster.policy.decision import MAX_BACKLOG_CHUNKS
from tests.support.coordinator import D0, P0, TIMELINE, Bench, make_config
from tests.support.fake_workers import make_worker

FULL_BACKLOG = 64 * MAX_BACKLOG_CHUNKS


@pytest.mark.bad_day(27)
def test_prompts_that_wait_for_a_full_decode_pool_do_not_make_prefill_the_bottleneck() -> None:
    """One fills decode, and the others wait in front of a prefill worker that has nothing to do."""
    bench = Bench(make_config())
    bench.connect()
    bench.join(P0, D0, num_blocks=20)
    assert bench.state.status(bench.now_ns).pressure == PressureView()
    for number in range(8):
        bench.submit(f"r{number}", num_prompt_tokens=160, max_tokens=150)
    bench.grant(AttemptId("r0", 1))
    bench.worker_says(P0, PrefillDone(attempt=AttemptId("r0", 1), outcome=None, timeline=TIMELINE))
    view = bench.state.status(bench.now_ns)
    assert view.num_queued == 7
    assert view.pressure.limiting is Role.DECODE and view.pressure.decode == 1.0


def test_prefill_limits_where_prompts_wait_to_be_read_and_decode_has_room() -> None:
    readers = [make_worker("p0", backlog_tokens=FULL_BACKLOG), make_worker("p1", backlog_tokens=FULL_BACKLOG)]
    writers = [make_worker("d0", num_sequences=2, num_promised_blocks=30)]
    pressures = prefill_pressure(readers), decode_pressure(writers, 16, None), push_pressure(readers)
    assert pressures == (1.0, 0.3, 0.0)
    assert limiting_role(*pressures) is Role.PREFILL
    assert limiting_role(0.5, 0.3, 0.0) is None
    assert limiting_role(2.0, 0.95, 0.0) is Role.DECODE, "what decode cannot take is not read sooner by more readers"


@pytest.mark.bad_day(27)
def test_kv_that_decode_does_not_take_over_counts_against_decode() -> None:
    """Prefill's blocks are full, but not of prompts that have to be read."""
    readers = [make_worker("p0", num_promised_blocks=95), make_worker("p1", num_promised_blocks=99)]
    assert push_pressure(readers) == pytest.approx(0.97)
    assert limiting_role(prefill_pressure(readers), 0.4, push_pressure(readers)) is Role.DECODE
    reading = [replace(reader, backlog_tokens=FULL_BACKLOG) for reader in readers]
    assert limiting_role(prefill_pressure(reading), 0.4, push_pressure(reading)) is Role.PREFILL


def test_the_nearest_of_a_decode_workers_limits_counts() -> None:
    costs = {"decode_base_ms": 10.0, "decode_context_token_ms": 0.0125}
    worker = make_worker("d0", num_sequences=6, num_promised_blocks=50, **costs)  # 20 ms a token
    assert decode_pressure([worker], 16, None) == 0.75  # six of eight sequences
    assert decode_pressure([worker], 16, 20.0) == pytest.approx(1.0)
    assert decode_pressure([worker, make_worker("d1")], 16, None) == 0.375
    assert decode_pressure([make_worker("d1", decode_base_ms=99.0)], 16, 20.0) == 0.0, "an idle one takes anything"
    assert decode_pressure([], 16, None) == prefill_pressure([]) == push_pressure([]) == 0.0


def test_operators_see_which_pool_to_make_larger() -> None:
    config = make_config()
    view = ClusterState(config, epoch=1).status(0)
    pressure = PressureView(prefill=0.25, decode=0.97, push=0.5, limiting=Role.DECODE)
    status = status_response(config, replace(view, pressure=pressure), uptime_ns=0, metrics_address="h:1")
    told = status_text(status)
    assert "decode limits: it is 97% full, with 50% of prefill's blocks held for it; more prefill workers would" in told
    assert status_json(status)["pressure"] == {"prefill": 0.25, "decode": 0.97, "push": 0.5, "limiting_role": "decode"}
    pressure = PressureView(prefill=1.5, decode=0.2, limiting=Role.PREFILL)
    status = status_response(config, replace(view, pressure=pressure), uptime_ns=0, metrics_address="h:1")
    expected = "prefill limits: its workers have 150% of what they may have to read; decode is 20% full"
    assert expected in status_text(status)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in measure_pressure(pressure)
        for sample in metric.samples
    }
    assert samples == {
        ("baton_pressure_ratio", "prefill"): 1.5,
        ("baton_pressure_ratio", "decode"): 0.2,
        ("baton_pressure_ratio", "push"): 0.0,
        ("baton_pool_limits", "prefill"): 1,
        ("baton_pool_limits", "decode"): 0,
    }
