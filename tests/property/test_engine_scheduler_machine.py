"""10,000 random histories of scheduler and block pool (200 by default): invariants hold, tokens are as when run alone.

Preemption, prefix sharing, several answers, pushes that come, fail and are given up, aborts, and failing steps.
"""

from __future__ import annotations

import pytest

from tests.support.scheduler_machine import SchedulerMachine, play
from tests.support.soak import NUM_SCHEDULER_HISTORIES, batches


@pytest.mark.parametrize("num_histories", batches(NUM_SCHEDULER_HISTORIES))
def test_random_work_gives_undisturbed_tokens(num_histories: int) -> None:
    play(SchedulerMachine, num_histories, num_steps=40)
