"""10,000 random histories of scheduler and block pool (200 by default): invariants hold, tokens are as when run alone.

Preemption, prefix sharing, several answers, pushes that come, fail and are given up, aborts, and failing steps.
"""

from __future__ import annotations

from hypothesis import settings

from tests.support.scheduler_machine import SchedulerMachine
from tests.support.soak import NUM_SCHEDULER_HISTORIES

SchedulerMachine.TestCase.settings = settings(
    max_examples=NUM_SCHEDULER_HISTORIES, stateful_step_count=40, deadline=None
)
test_random_work_gives_undisturbed_tokens = SchedulerMachine.TestCase
