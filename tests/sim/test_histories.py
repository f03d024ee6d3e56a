"""Random histories of a whole cluster, by seed: every answer right, every request ended once, nothing left behind.

A seed that goes wrong is named in the failure; `python -m cluster.sim --seed N --trace` replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster.core.ids import Outcome
from cluster.sim.__main__ import main
from cluster.sim.generator import LARGE_EVERY, generate
from cluster.sim.history import HistoryError, Report, run_seed
from cluster.sim.scenario import FaultKind
from cluster.sim.trace import Trace

ROOT = Path(__file__).parents[2]


def test_random_histories(seeds: range) -> None:
    failures: list[str] = []
    for seed in seeds:
        try:
            run_seed(seed)
        except HistoryError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


def test_histories_reach_what_they_are_meant_to_reach() -> None:
    """Outcomes, fences, late writes and lost workers do occur, and most requests are answered all the same."""
    total = Report(num_histories=0)
    for seed in range(300):
        total.add(run_seed(seed))
    assert total.num_fences > 10 and total.num_late_copies > 5 and total.num_given_up > 30, str(total)
    assert total.num_copies > 1000 and total.num_partial_copies > 500, str(total)
    for outcome in (Outcome.STOP, Outcome.LENGTH, Outcome.CANCELLED, Outcome.DEADLINE_EXCEEDED):
        assert total.outcomes[outcome.value] > 20, str(total)
    # What does not go on was cut by another fault, is poison, or its client left.
    assert total.num_coordinator_deaths > 20 and total.num_continued > 0.35 * total.num_interrupted > 5, str(total)
    # That every attempt's transfer fails is too rare to count on; scenarios have it.
    for outcome in (Outcome.REJECTED_INVALID, Outcome.REJECTED_OVERLOAD):
        assert total.outcomes[outcome.value] > 0, str(total)
    num_answered = total.outcomes[Outcome.STOP.value] + total.outcomes[Outcome.LENGTH.value]
    assert num_answered > 0.55 * sum(total.outcomes.values()), str(total)


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in range(200) for fault in generate(seed).faults}
    assert drawn == set(FaultKind)


def test_clusters_of_all_sizes_are_drawn() -> None:
    sizes = [len(generate(seed).worker_names) for seed in range(LARGE_EVERY)]
    assert sum(size > 5 for size in sizes) == 1 and min(sizes) <= 2
    large = [len(generate(seed).worker_names) for seed in range(LARGE_EVERY - 1, 40 * LARGE_EVERY, LARGE_EVERY)]
    assert min(large) < 10 and 45 < max(large) <= 50


def test_requests_for_several_answers_and_for_scores_are_drawn() -> None:
    requests = [request for seed in range(200) for request in generate(seed).requests]
    assert {request.num_choices for request in requests} == {1, 2, 4}
    assert any(request.num_choices > 1 and request.sampling.prompt_logprobs is not None for request in requests)
    assert any(request.num_choices > 1 and request.stop_pair is not None for request in requests)


def test_equal_seeds_give_equal_histories() -> None:
    for seed in (1, 5, 17, 42):
        first, second = Trace(enabled=True), Trace(enabled=True)
        run_seed(seed, trace=first)
        run_seed(seed, trace=second)
        assert first.lines and first.lines == second.lines


def test_a_replay_does_not_depend_on_the_process() -> None:
    """The same bytes come out of two interpreters whose sets and dicts of strings hash differently."""
    outputs = [_replay(hash_seed) for hash_seed in ("1", "2")]
    assert outputs[0] == outputs[1]
    assert b"FAULT" in outputs[0] and outputs[0].count(b"\n") > 50


def _replay(hash_seed: str) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
    command = [sys.executable, "-m", "cluster.sim", "--seed", "5", "--trace"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=60).stdout


def test_the_command_line_runs_many_and_says_which_went_wrong(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["--seed", "3", "--count", "2"]) == 0
    assert "2 histories" in capsys.readouterr().out
    monkeypatch.setattr("cluster.sim.history.check_outcomes", _complain)
    assert main(["--seed", "3"]) == 1
    assert "replay: python -m cluster.sim --seed 3 --trace" in capsys.readouterr().err


def _complain(_world: object) -> None:
    raise AssertionError("as if something were wrong")
