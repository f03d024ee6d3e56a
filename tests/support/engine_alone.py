"""The answers of the engine by itself, which those of a whole cluster are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.core.request import RequestBody
from engine.core.step import StepPlan
from engine.runner import Runner
from tests.support.engine_model import make_step

BLOCK_SIZE = 16


def engine_alone(model: Path, num_context_tokens: int) -> Callable[[RequestBody], list[int]]:
    """What the engine alone draws, one sequence at a time and without chunks."""
    runner = Runner.from_directory(model, "float32", num_context_tokens // BLOCK_SIZE, BLOCK_SIZE, 1)
    table = list(range(num_context_tokens // BLOCK_SIZE))

    def draw(body: RequestBody) -> list[int]:
        output: list[int] = []
        tokens, start = list(body.prompt_ids), 0
        while len(output) < body.sampling.max_tokens:
            step = make_step(
                tokens,
                start,
                table,
                sampling=body.sampling,
                position=len(output),
                prompt_ids=body.prompt_ids,
                output_ids=output,
            )
            ((drawn,),) = runner.run(StepPlan(step_id=0, sequences=[step])).tokens
            output.append(drawn.token_id)
            tokens, start = [drawn.token_id], start + len(tokens)
        return output

    return draw
