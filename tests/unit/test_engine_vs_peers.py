"""The engine comparison's judgement: what it takes for right, for near enough, and for properly placed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.engine_peers.arithmetic import prefill_products
from benchmarks.engine_peers.figures import figure, ratios, round_medians
from benchmarks.engine_peers.outputs import NEAR_TIE, Sample, divergences, verdict
from benchmarks.engine_peers.threads import PlacementError, ThreadUse, check_placement, thread_uses
from benchmarks.engine_peers.worker_process import Side, Worker, WorkerFailedError
from engine.model.config import ModelConfig


def _use(tid: int, cores: Sequence[int], cpu_s: float) -> ThreadUse:
    return ThreadUse(tid=tid, name=f"thread-{tid}", cores=list(cores), cpu_s=cpu_s)


def _sample(mine: list[int], theirs: list[int], margins: dict[str, list[float]]) -> Sample:
    return Sample(measure="decode", prompt=[1], tokens={"mine": mine, "theirs": theirs}, margins=margins)


def test_a_figure_is_the_median_with_its_quartiles() -> None:
    assert figure([5.0, 1.0, 2.0, 4.0, 3.0]).median == 3.0
    assert (figure([5.0, 1.0, 2.0, 4.0, 3.0]).low, figure([5.0, 1.0, 2.0, 4.0, 3.0]).high) == (2.0, 4.0)
    assert figure([7.0]).median == figure([7.0]).low == figure([7.0]).high == 7.0
    with pytest.raises(ValueError, match="values"):
        figure([])


def test_ratios_are_taken_round_by_round() -> None:
    slowed = round_medians([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]])
    assert slowed == [1.0, 2.0]
    assert ratios([2.0, 4.0], slowed) == [2.0, 2.0]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], slowed)


def test_the_worst_token_decides() -> None:
    samples = [
        _sample([5, 6], [5, 6], {"mine": [0.0, 0.0], "theirs": [0.0, 0.0]}),
        _sample([5, 7], [5, 8], {"mine": [0.0, NEAR_TIE / 2], "theirs": [0.0, 4.0]}),
    ]
    mine, theirs = verdict(samples, "mine"), verdict(samples, "theirs")
    assert (mine.num_tokens, mine.num_off, mine.worst_margin) == (4, 1, NEAR_TIE / 2)
    assert theirs.worst_margin > NEAR_TIE
    with pytest.raises(ValueError, match="nobody"):
        verdict(samples, "nobody")


def test_only_the_first_divergence_counts_and_an_early_end_is_none() -> None:
    margins = {"mine": [0.0, 0.1, 9.0], "theirs": [0.0, 0.3, 0.0]}
    (found,) = divergences([_sample([5, 6, 7], [5, 8, 9], margins)], "mine", "theirs")
    assert found.position == 1
    assert found.margin == pytest.approx(0.2)
    assert divergences([_sample([5, 6, 7], [5, 6], margins)], "mine", "theirs") == []
    assert divergences([_sample([5, 6, 7], [5, 8, 9], margins)], "mine", "of one that took no part") == []


def test_threads_on_all_their_cores_and_no_others() -> None:
    before = [_use(1, [0], 10.0), _use(2, [1], 1.0)]
    busy = check_placement(before, [_use(1, [0], 12.0), _use(2, [1], 2.0), _use(3, [0, 1], 0.0)], [0, 1])
    assert [(use.tid, use.cpu_s) for use in busy] == [(1, 2.0), (2, 1.0)]
    assert check_placement([], [_use(1, [0, 1], 1.0), _use(2, [0, 1], 1.0)], [0, 1])


@pytest.mark.parametrize(
    "after",
    [
        [_use(1, [0], 1.0), _use(2, [0], 1.0)],  # both on one core
        [_use(1, [0], 1.0), _use(2, [1], 0.01)],  # one does not take part
        [_use(1, [0], 1.0), _use(2, [1], 1.0), _use(3, [0, 1], 1.0)],  # one too many
        [_use(1, [0], 1.0), _use(2, [1], 1.0), _use(3, [2], 0.0)],  # one might go elsewhere
    ],
    ids=["shared core", "idle core", "too many", "elsewhere"],
)
def test_misplaced_threads_are_an_error(after: list[ThreadUse]) -> None:
    with pytest.raises(PlacementError):
        check_placement([], after, [0, 1])


def test_every_thread_of_a_process_is_seen() -> None:
    uses = {use.tid: use for use in thread_uses()}
    assert set(uses[os.getpid()].cores) == os.sched_getaffinity(0)
    assert uses[os.getpid()].cpu_s > 0


ECHO = """
import os
from benchmarks.engine_peers.worker_loop import serve, take_stdout
answers = take_stdout()
print("noise")
print('"ready"', file=answers, flush=True)
cores = lambda: sorted(os.sched_getaffinity(0))
serve(answers, {"cores": cores, "double": lambda x: 2 * x, "die": lambda: os._exit(3)})
"""


def test_a_worker_runs_on_its_cores_answers_and_is_missed_when_it_dies(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    log = tmp_path / "log"
    with Worker(Side(name="echo", command=[sys.executable, "-c", ECHO]), cores[:1], log) as worker:
        assert worker.read_answer() == "ready"
        assert worker.call("cores") == cores[:1]
        assert worker.call("double", x=21) == 42
        with pytest.raises(WorkerFailedError, match="noise"):
            worker.call("die")
    assert sorted(os.sched_getaffinity(0)) == cores


def test_a_prompts_products_are_those_of_its_parts() -> None:
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "vocab_size": 10,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
        }
    )
    # A token: 64 for q, 64 for k and v, 64 for the output, 384 for the MLP. A seen key: 8 for score, 8 for value.
    first = 3 * (64 + 64 + 64 + 384) + 6 * 16
    last = 3 * 64 + (64 + 64 + 384) + 3 * 16
    assert prefill_products(config, 3) == first + last + 80
