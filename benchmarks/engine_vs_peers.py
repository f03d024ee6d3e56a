"""Baton's engine against vLLM's and transformers' on the same cores, weights and prompts, engine against engine.

Every side is a process that answers to this one, pinned to one core and then to two; they take turns round by round
and only one of them computes at a time. Baton is its scheduler and runner, vLLM the engine behind its offline class
(compiled), transformers a loop around its model, which sits out what would take it too long (`transformers_left_out`).
Prefix caches are off, prompts are new in every round. What the sides drew is checked token by token with the model in
float32 (engine_peers/outputs.py).

vLLM lives in an environment of its own, which the script makes at first use (engine_peers/vllm_environment.py).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.engine_peers.arithmetic import prefill_products
from benchmarks.engine_peers.evaluation import Evaluation, judge_outputs
from benchmarks.engine_peers.measuring import Effort, Measuring, Samples, decode_name, measure_starts
from benchmarks.engine_peers.plotting import plot_bars
from benchmarks.engine_peers.prompts import PromptSource
from benchmarks.engine_peers.sides import KV_BYTES, Setting, engine_sides, reader_side, transformers_side
from benchmarks.engine_peers.vllm_environment import REQUIREMENT, allocator, ensure_vllm
from benchmarks.engine_peers.worker_process import Worker
from benchmarks.report import Report, arguments, finish
from cluster.live.environment import read_environment
from engine.model.config import ModelConfig
from engine.model.importer import import_model
from engine.model.packaged_models import SMOLLM2
from engine.runner import kv_block_size_bytes

FULL = Effort(
    decode_rounds=8, decode_steps=16, long_decode_rounds=8, long_decode_steps=8, prefill_rounds=7, start_rounds=4
)
QUICK = Effort(
    decode_rounds=3, decode_steps=8, long_decode_rounds=3, long_decode_steps=4, prefill_rounds=3, start_rounds=1
)
SHORT_CONTEXT, LONG_CONTEXT, LONG_BATCH = 256, 4096, 8
BATCHES = (1, 8, 32)
PREFILLS = (128, 512, 2048)
SETTINGS = {1: "one core", 2: "two cores"}


def main() -> None:
    args = _arguments().parse_args()
    effort = QUICK if args.quick else FULL
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    environment = read_environment(os.environ)
    vllm_dir = args.vllm or environment.cache_dir / "peers" / "vllm"
    ensure_vllm(vllm_dir)
    model_dir = import_model(SMOLLM2.name, environment.models_dir)
    seed = time.time_ns()
    prompts = PromptSource(model_dir, seed)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="engine_vs_peers-") as folder:
        setting = Setting(
            model_dir=model_dir,
            vllm_dir=vllm_dir,
            vllm_cache_dir=vllm_dir.with_name(f"{vllm_dir.name}-cache"),
            log_dir=args.logs or Path(folder),
            read_bytes=max(weights_bytes(model_dir), KV_BYTES),
        )
        config = ModelConfig.from_directory(model_dir)
        evaluation = Evaluation(
            weights_bytes=weights_bytes(model_dir),
            prefill_products={num_tokens: prefill_products(config, num_tokens) for num_tokens in PREFILLS},
        )
        details = {
            "seed": seed,
            "effort": asdict(effort),
            "vllm": {"requirement": REQUIREMENT, "allocator": allocator()},
            "load_at_start": os.getloadavg()[0],
        }
        report = Report("engine_vs_peers", details=details)
        for num_cores in args.cores:
            samples = measure(setting, cores[:num_cores], prompts, effort)
            evaluation.add(SETTINGS[num_cores], samples, report)
        with Worker(transformers_side(setting, "float32"), cores, setting.log_dir / "judge.log") as judge:
            judge.read_answer()
            judge_outputs(evaluation.answers, partial(judge.call, "margins"), report)
    finish(report, args, lambda path: plot_bars(evaluation.ratios, evaluation.shares, path))


def measure(setting: Setting, cores: Sequence[int], prompts: PromptSource, effort: Effort) -> Samples:
    """Everything on these cores."""
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Worker(side, cores, setting.log_dir / f"{name}.log"))
            for name, side in engine_sides(setting, cores).items()
        }
        reader = stack.enter_context(Worker(reader_side(setting), cores, setting.log_dir / "reader.log"))
        for worker in (*engines.values(), reader):
            worker.read_answer()
        run = Measuring(engines, reader, prompts, cores, effort)
        for num_tokens in PREFILLS:
            run.prefill(num_tokens)
        rounds, steps = effort.decode_rounds, effort.decode_steps
        for batch in BATCHES:
            read_bytes = weights_bytes(setting.model_dir) if batch == 1 else 0
            run.decode(batch, SHORT_CONTEXT, rounds=rounds, steps=steps, read_bytes=read_bytes)
        run.outside_kernels(LONG_BATCH, SHORT_CONTEXT, rounds=rounds, steps=steps)
        rounds, steps = effort.long_decode_rounds, effort.long_decode_steps
        run.decode(LONG_BATCH, LONG_CONTEXT, rounds=rounds, steps=steps)
        plans = decode_name(LONG_BATCH, LONG_CONTEXT), decode_name(LONG_BATCH, SHORT_CONTEXT)
        run.attention(*plans, rounds=rounds, steps=steps, token_bytes=kv_token_bytes(setting.model_dir))
        run.check_cache_off()
    measure_starts(setting, cores, prompts, run.samples, effort.start_rounds)
    return run.samples


def weights_bytes(model_dir: Path) -> int:
    """Bytes of weights that a decode step reads: all of them, the tied embedding as the output head."""
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


def kv_token_bytes(model_dir: Path) -> int:
    return kv_block_size_bytes(ModelConfig.from_directory(model_dir), "bfloat16", 1)


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="vLLM's environment (default: in the user's cache)")
    parser.add_argument("--cores", type=int, nargs="+", choices=sorted(SETTINGS), default=sorted(SETTINGS))
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the workers' logs in this folder")
    return parser


if __name__ == "__main__":
    main()
