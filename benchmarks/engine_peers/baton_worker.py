"""The Baton side: scheduler and runner as a worker's engine thread drives them, at a worker's default step sizes."""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

from benchmarks.engine_peers.worker_loop import Handler, engine_handlers, serve, take_stdout, time_each

BLOCK_SIZE = 16
STEP_TOKENS = 512
PREFILL_CHUNK_TOKENS = 256


class BatonEngine:
    """Implements `worker_loop.Engine`; also runs plans of the past again, for what is asked about the runner alone."""

    def __init__(self, model_dir: str, max_model_tokens: int, max_running: int, kv_bytes: int, num_threads: int):
        import torch

        from benchmarks.engine_peers.kernel_clock import KernelClock
        from engine.core.block_pool import BlockPool
        from engine.core.scheduler import Scheduler, SchedulerConfig
        from engine.model.config import ModelConfig
        from engine.runner import Runner, kv_block_size_bytes

        torch.set_num_threads(num_threads)
        num_blocks = kv_bytes // kv_block_size_bytes(ModelConfig.from_directory(model_dir), "bfloat16", BLOCK_SIZE)
        self.clock = KernelClock()
        self.clock.install()
        self._runner = Runner.from_directory(model_dir, "bfloat16", num_blocks, BLOCK_SIZE, num_threads)
        self._runner.warm_up(STEP_TOKENS, max_running)
        assert self.clock.seconds > 0, "the native kernels are not built: run python -m engine.attention.build"
        self._pool = BlockPool(num_blocks)
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_step_tokens=STEP_TOKENS,
            max_running=max_running,
            prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
            max_model_tokens=max_model_tokens,
        )
        self._scheduler = Scheduler(config, self._pool)
        self._num_requests = 0
        self._tokens: dict[Any, list[int]] = {}
        self._last_plan: Any = None
        self._kept_plans: dict[str, Any] = {}

    def open(self, prompts: list[list[int]], max_tokens: int) -> None:
        from engine.core.sampling import SamplingParams
        from engine.core.scheduler import SequenceMode, SequenceSpec
        from engine.core.step import SequenceKey

        assert not self._tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for prompt in prompts:
            key = SequenceKey(request_id=str(self._num_requests), attempt=0)
            self._num_requests += 1
            self._tokens[key] = []
            # A key of its own switches the prefix cache off: blocks are shared under equal keys only.
            extra_key = key.request_id.encode()
            self._scheduler.add(
                SequenceSpec(
                    key=key, prompt_ids=prompt, sampling=sampling, mode=SequenceMode.LOCAL, extra_key=extra_key
                )
            )
        while not all(self._tokens.values()):
            self._run_step()

    def step(self) -> None:
        assert self._run_step() == len(self._tokens), "a step that not all sequences took part in"

    def close(self) -> list[list[int]]:
        for key in self._tokens:
            self._scheduler.abort(key)
        tokens, self._tokens = list(self._tokens.values()), {}
        return tokens

    def clocked_steps(self, count: int) -> list[dict[str, float]]:
        """Each step's seconds in all and inside the native kernels."""
        steps = []
        for _ in range(count):
            self.clock.seconds = 0.0
            seconds = time_each(self.step, 1)[0]
            steps.append({"seconds": seconds, "kernel_seconds": self.clock.seconds})
        return steps

    def keep_plan(self, name: str) -> int:
        """Remembers the step that ran last, with the blocks it ran on. Returns the tokens whose KV it read."""
        self._kept_plans[name] = copy.deepcopy(self._last_plan)
        return sum(sequence.start + len(sequence.token_ids) for sequence in self._last_plan.sequences)

    def replay(self, name: str, count: int) -> list[float]:
        """Seconds of the runner alone for a step of the past. No group may be open: its blocks are others' by now."""
        assert not self._tokens
        plan = self._kept_plans[name]
        return time_each(partial(self._runner.run, plan), count)

    def num_cache_hits(self) -> int:
        """Prompt tokens that were found in the prefix cache so far."""
        return self._pool.prefix_counters().num_hit_tokens

    def _run_step(self) -> int:
        plan = self._scheduler.schedule()
        assert plan is not None, "nothing can run: the pool is too small for the group"
        self._last_plan = plan
        outcome = self._scheduler.apply(self._runner.run(plan))
        for emitted in outcome.emitted:
            self._tokens[emitted.key].append(emitted.token_id)
        return len(outcome.emitted)

    def handlers(self) -> dict[str, Handler]:
        return {
            **engine_handlers(self),
            "clocked_steps": self.clocked_steps,
            "keep_plan": self.keep_plan,
            "replay": self.replay,
            "num_cache_hits": self.num_cache_hits,
        }


def main() -> None:
    answers = take_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-tokens", type=int, required=True)
    parser.add_argument("--max-running", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    args = parser.parse_args()
    engine = BatonEngine(args.model, args.max_model_tokens, args.max_running, args.kv_bytes, args.num_threads)
    print('"ready"', file=answers, flush=True)
    serve(answers, engine.handlers())


if __name__ == "__main__":
    main()
