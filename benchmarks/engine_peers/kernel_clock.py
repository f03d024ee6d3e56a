"""Tells the time that Baton's engine spends inside its native kernels, by standing between it and the library."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine.attention import cpu
from engine.attention.native_structs import OpKind

RUN_FUNCTION = "baton_run"


class KernelClock:
    """Adds up the wall-clock time of the calls that run the model's operations.

    Finding the largest logits is an operation too, but belongs to sampling, and is not counted.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def install(self) -> None:
        """Every backend made from now on is timed. It costs a step, which makes one or two calls, some microseconds."""
        module: Any = cpu  # which does not offer the name for exchange
        load_kernels = module.load_kernels
        module.load_kernels = lambda: _TimedLibrary(load_kernels(), self)

    def timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def run(team: Any, ops: Any, begin: int, *rest: Any) -> None:
            if ops[begin].kind == OpKind.ARGMAX:
                function(team, ops, begin, *rest)
                return
            start_s = time.perf_counter()
            function(team, ops, begin, *rest)
            self.seconds += time.perf_counter() - start_s

        return run


class _TimedLibrary:
    """The library, with the function that runs operations exchanged."""

    def __init__(self, library: Any, clock: KernelClock) -> None:
        self._library = library
        self._run = clock.timed(getattr(library, RUN_FUNCTION))

    def __getattr__(self, name: str) -> Any:
        return self._run if name == RUN_FUNCTION else getattr(self._library, name)
