"""The worker's half of the comparison: answers requests, one JSON object a line, and keeps the times of its engine.

Needs nothing but the standard library, because each side runs it in its own environment; and all sides are timed by
this one module.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from benchmarks.engine_peers.threads import thread_uses

NUM_UNTIMED_STEPS = 2
"""After a prefill: the first steps of a new batch size may allocate."""

Handler = Callable[..., Any]


class Engine(Protocol):
    """What is compared: greedy generation in lock step for a group of prompts, without end-of-sequence."""

    def open(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Run prompts of one length until each has drawn its first token. At most `max_tokens` will be drawn."""

    def step(self) -> None:
        """Draw one more token for each."""

    def close(self) -> list[list[int]]:
        """End the group; the tokens drawn for each prompt."""


def take_stdout() -> TextIO:
    """Keeps stdout for the answers: whatever libraries print goes to stderr. Call it before importing them."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, handlers: Mapping[str, Handler]) -> None:
    """Answers requests until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        answer = handlers[request.pop("op")](**request)
        print(json.dumps(answer), file=answers, flush=True)


def engine_handlers(engine: Engine) -> dict[str, Handler]:
    """The requests that every engine answers. Times are wall-clock seconds."""

    def open_group(prompts: list[list[int]], max_tokens: int) -> float:
        start_s = time.perf_counter()
        engine.open(prompts, max_tokens)
        seconds = time.perf_counter() - start_s
        for _ in range(NUM_UNTIMED_STEPS):
            engine.step()
        return seconds

    def steps(count: int) -> list[float]:
        return time_each(engine.step, count)

    def prefill(prompt: list[int]) -> dict[str, Any]:
        gc.collect()
        start_s = time.perf_counter()
        engine.open([prompt], 1)
        seconds = time.perf_counter() - start_s
        return {"seconds": seconds, "tokens": engine.close()[0]}

    return {
        "open": open_group,
        "steps": steps,
        "close": engine.close,
        "prefill": prefill,
        "threads": lambda: [vars_of(use) for use in thread_uses()],
    }


def time_each(function: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, none of which pays for garbage from before."""
    gc.collect()
    times_s = []
    for _ in range(count):
        start_s = time.perf_counter()
        function()
        times_s.append(time.perf_counter() - start_s)
    return times_s


def vars_of(use: Any) -> dict[str, Any]:
    return {name: getattr(use, name) for name in use.__slots__}
