"""How much is done by tests that can run for long: some seconds, or as much as the environment says (`make soak`)."""

from __future__ import annotations

import os
from typing import Any

NUM_SCHEDULER_HISTORIES = int(os.environ.get("BATON_SCHEDULER_HISTORIES", "200"))
"""Random histories of scheduler and block pool on a toy model."""
NUM_MODEL_HISTORIES = int(os.environ.get("BATON_MODEL_HISTORIES", "25"))
"""Of the same on a real, tiny model in float32."""
NUM_SHORT_REQUESTS = int(os.environ.get("BATON_SHORT_REQUESTS", "1000"))
"""Requests after which a worker's memory is looked at."""
NUM_PUSH_HISTORIES = int(os.environ.get("BATON_PUSH_HISTORIES", "400"))
"""Random histories of senders and receivers of pushes over a faulty network."""
NUM_KILLED_PUSHES = int(os.environ.get("BATON_KILLED_PUSHES", "4"))
"""Pushes over shared memory in whose middle a process is killed or stopped, of each kind."""
NUM_KILLED_REMOTE_PUSHES = int(os.environ.get("BATON_KILLED_REMOTE_PUSHES", "0"))
"""The same over the transports between hosts, which take longer: `make test-wires` asks for some."""
ALL_PROMPTS = bool(os.environ.get("BATON_ALL_PROMPTS"))
"""Whether all reference prompts are answered to their ends in every way; else in one, and a share in the others."""
ALL_RAY = bool(os.environ.get("BATON_ALL_RAY"))
"""Whether clusters on Ray go through what takes minutes there and is tested without Ray, too."""
TIERS_OF_PROCESSES = bool(os.environ.get("BATON_TIERS_OF_PROCESSES"))
"""Whether the prefix cache's lower tiers are looked at in real workers too, one of which is started again."""
CHAOS_S = float(os.environ.get("BATON_CHAOS_S", "30"))
"""For so long processes of a cluster under load are killed and stopped, at the least."""

MAX_BATCH = 250
"""Histories that one test plays: Hypothesis remembers all that it has drawn in a test, half a megabyte for each."""


def share_of(prompts: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """One reference prompt of each length, and every so-manyth of the others; all of them if ALL_PROMPTS."""
    if ALL_PROMPTS:
        return prompts
    first_of_length = {len(prompt["prompt_ids"]): prompt for prompt in reversed(prompts) if _is_of_length(prompt)}
    others = [prompt for prompt in prompts if not _is_of_length(prompt)]
    return [*first_of_length.values(), *others[::every]]


def _is_of_length(prompt: dict[str, Any]) -> bool:
    return bool(prompt["name"].startswith("length_"))


def batches(num_histories: int) -> list[int]:
    """Sizes of the tests that play so many together."""
    return [min(MAX_BATCH, num_histories - start) for start in range(0, num_histories, MAX_BATCH)]
