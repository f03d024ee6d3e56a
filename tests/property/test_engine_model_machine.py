"""The same random histories on a real, tiny model in float32: requests give the same tokens whatever the schedule.

Chunks, batches, budgets, preemption, hits, pushes, several answers and aborts differ from history to history; tokens,
KV and scores are compared with those of the sequence run alone, all its input at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.model_engine import ModelEngine
from tests.support.scheduler_machine import SchedulerMachine, play
from tests.support.soak import NUM_MODEL_HISTORIES, batches


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The model is so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("num_histories", batches(NUM_MODEL_HISTORIES))
def test_tokens_do_not_depend_on_the_schedule_in_float32(
    num_histories: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    class ModelMachine(SchedulerMachine):
        engine = ModelEngine(tmp_path_factory.mktemp("model"))

    play(ModelMachine, num_histories, num_steps=25)
