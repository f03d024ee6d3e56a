"""A worker that some prompts are poison for: `python -m tests.support.poison_worker ROLE ...`, otherwise a plain one.

It ends, as by a fault in native code, when it is to compute a chunk with the tokens DEADLY in a row; a step with
FAILING in it raises. Both are long enough that no model writes them by chance.
"""

from __future__ import annotations

import os
import sys

from cluster.agent.assembly import Engine
from cluster.agent.main import main
from decode_worker.profile import PROFILE as DECODE
from engine.attention.base import LayerWritten
from engine.core.step import StepPlan, StepResult
from prefill_worker.profile import PROFILE as PREFILL

DEADLY = (91, 5, 92, 6, 91, 7)
FAILING = (92, 6, 91, 5, 92, 8)
EXIT_STATUS = 139

_run = Engine.run


def run(self: Engine, plan: StepPlan, on_layer_written: LayerWritten | None = None) -> StepResult:
    chunks = [step.token_ids for step in plan.sequences]
    if any(_has(chunk, DEADLY) for chunk in chunks):
        os._exit(EXIT_STATUS)
    if any(_has(chunk, FAILING) for chunk in chunks):
        raise RuntimeError("this prompt cannot be computed")
    return _run(self, plan, on_layer_written)


def _has(token_ids: list[int], mark: tuple[int, ...]) -> bool:
    return any(tuple(token_ids[start : start + len(mark)]) == mark for start in range(len(token_ids)))


if __name__ == "__main__":
    Engine.run = run  # type: ignore[method-assign]
    sys.exit(main({"prefill": PREFILL, "decode": DECODE}[sys.argv[1]], sys.argv[2:]))
