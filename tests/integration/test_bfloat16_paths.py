"""In bfloat16 too, the path changes nothing: the logits of every position are the same to the last bit.

Both paths are forced along the float32 reference tokens, so that they can be compared to the end whatever happens.
*Apart*: the prompt in chunks on one runner, its blocks copied to other blocks of a second runner's pool, which decodes
several sequences in one batch. *Single*: one runner, the prompt in one piece, every sequence by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.step import StepPlan
from engine.runner import Runner
from tests.support.engine_model import make_step, real_model_dir, reference
from tests.support.soak import ALL_PROMPTS, share_of

BLOCK_SIZE = 16
CHUNK = 256
BATCH = 6
NUM_TOKENS = 64 if ALL_PROMPTS else 32


@pytest.fixture(scope="module")
def model_dir() -> Path:
    directory, reason = real_model_dir()
    if directory is None:
        pytest.skip(reason)
    return directory


def _num_tokens(entry: dict[str, Any]) -> int:
    return min(NUM_TOKENS, len(entry["output_ids"]))


def _single(runner: Runner, entry: dict[str, Any]) -> torch.Tensor:
    """Logits [position, V] of the forced run."""
    ids, output, table = entry["prompt_ids"], entry["output_ids"][:NUM_TOKENS], list(range(140))
    rows = [runner.logits(StepPlan(step_id=0, sequences=[make_step(ids, 0, table)]))[0]]
    for index, token in enumerate(output[:-1]):
        step = make_step([token], len(ids) + index, table)
        rows.append(runner.logits(StepPlan(step_id=0, sequences=[step]))[0])
    return torch.stack(rows)


def _prefill_and_push(prefill: Runner, decode: Runner, entry: dict[str, Any], table: list[int]) -> torch.Tensor:
    """Logits [V] of the first position; the prompt's KV then lies in `table` of decode's pool."""
    ids = entry["prompt_ids"]
    source = list(range(140))
    for start in range(0, len(ids), CHUNK):
        logits = prefill.logits(StepPlan(step_id=0, sequences=[make_step(ids[start : start + CHUNK], start, source)]))
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    decode.cache.pool_BLKCSD[table[:num_blocks]] = prefill.cache.pool_BLKCSD[source[:num_blocks]]
    return logits[0]


def _apart(prefill: Runner, decode: Runner, entries: list[dict[str, Any]]) -> list[torch.Tensor]:
    tables = [list(range((number + 1) * 140 - 1, number * 140 - 1, -1)) for number in range(len(entries))]
    rows = [[_prefill_and_push(prefill, decode, entry, table)] for entry, table in zip(entries, tables, strict=True)]
    for index in range(max(_num_tokens(entry) for entry in entries) - 1):
        live = [number for number, entry in enumerate(entries) if index < _num_tokens(entry) - 1]
        steps = [
            make_step(
                [entries[n]["output_ids"][index]], len(entries[n]["prompt_ids"]) + index, tables[n], request_id=str(n)
            )
            for n in live
        ]
        for number, logits in zip(live, decode.logits(StepPlan(step_id=0, sequences=steps)), strict=True):
            rows[number].append(logits)
    return [torch.stack(row) for row in rows]


@pytest.mark.timeout(600)
def test_apart_and_single_have_the_same_logits(model_dir: Path) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = Runner.from_directory(model_dir, "bfloat16", 140, BLOCK_SIZE, 1)
        prefill = Runner.from_directory(model_dir, "bfloat16", 140, BLOCK_SIZE, 1)
        decode = Runner.from_directory(model_dir, "bfloat16", 140 * BATCH, BLOCK_SIZE, 1)
        entries = sorted(share_of(reference()["prompts"], 4), key=lambda entry: len(entry["prompt_ids"]))
        num_positions, differing = 0, []
        for first in range(0, len(entries), BATCH):
            batch = entries[first : first + BATCH]
            for entry, apart_PV in zip(batch, _apart(prefill, decode, batch), strict=True):
                single_PV = _single(single, entry)
                num_positions += len(single_PV)
                is_equal_P = (single_PV == apart_PV).all(dim=-1)
                differing += [(entry["name"], position) for position in torch.nonzero(~is_equal_P).flatten().tolist()]
    finally:
        torch.set_num_threads(num_threads)
    assert num_positions > 500
    assert not differing
