"""The vLLM side: its engine in this process, stepped by hand. Runs in vLLM's own environment."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.engine_peers.worker_loop import engine_handlers, serve, take_stdout

BLOCK_SIZE = 128
"""What vLLM chooses on a CPU itself; said here because the size of the pool is counted in it."""
STEP_TOKENS = 2048


class VllmEngine:
    """Steps the engine that stands behind vLLM's offline `LLM` class, without its loop, which hides the steps."""

    def __init__(self, model_dir: str, max_model_tokens: int, max_running: int, kv_bytes: int) -> None:
        vllm: Any = importlib.import_module("vllm")
        self._sampling_params = vllm.SamplingParams
        self._llm: Any = vllm.LLM(
            model=model_dir,
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            max_model_len=max_model_tokens,
            max_num_seqs=max_running,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_memory_bytes=kv_bytes,
            enable_prefix_caching=False,
            enforce_eager=False,
            disable_log_stats=True,
            seed=0,
        )
        self._engine = self._llm.llm_engine
        self._num_requests = 0
        self._tokens: dict[str, Sequence[int]] = {}

    def open(self, prompts: list[list[int]], max_tokens: int) -> None:
        assert not self._tokens
        params = self._sampling_params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            name = str(self._num_requests)
            self._num_requests += 1
            self._tokens[name] = ()
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while not all(self._tokens.values()):
            self._run_step()

    def step(self) -> None:
        assert self._run_step() == len(self._tokens), "a step that not all sequences took part in"

    def close(self) -> list[list[int]]:
        self._engine.abort_request(list(self._tokens))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        tokens = [list(token_ids) for token_ids in self._tokens.values()]
        self._tokens = {}
        return tokens

    def _run_step(self) -> int:
        outputs = self._engine.step()
        for output in outputs:
            self._tokens[output.request_id] = output.outputs[0].token_ids
        return len(outputs)


def main() -> None:
    answers = take_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-tokens", type=int, required=True)
    parser.add_argument("--max-running", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    args = parser.parse_args()
    assert int(os.environ["OMP_NUM_THREADS"]) == args.num_threads == len(os.sched_getaffinity(0))
    engine = VllmEngine(args.model, args.max_model_tokens, args.max_running, args.kv_bytes)
    print('"ready"', file=answers, flush=True)
    serve(answers, engine_handlers(engine))


if __name__ == "__main__":
    main()
