"""Which programs are compared, and the command that starts each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_peers.vllm_environment import vllm_variables
from benchmarks.engine_peers.worker_process import Side

BATON, VLLM, TRANSFORMERS, READER = "Baton", "vLLM", "transformers", "read loop"
MAX_RUNNING = 32
MAX_MODEL_TOKENS = 4352
KV_BYTES = 1024**3
"""The pool of Baton and of vLLM: eight sequences of 4,352 tokens take 802 MB of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all workers of a run need to know."""

    model_dir: Path
    vllm_dir: Path
    vllm_cache_dir: Path
    log_dir: Path
    read_bytes: int


def engine_sides(setting: Setting, cores: Sequence[int]) -> dict[str, Side]:
    """The engines, in the order in which they take turns."""
    limits = ["--max-model-tokens", str(MAX_MODEL_TOKENS), "--max-running", str(MAX_RUNNING)]
    limits += ["--kv-bytes", str(KV_BYTES)]
    model = ["--model", str(setting.model_dir)]
    vllm_python = str(setting.vllm_dir / "bin" / "python")
    return {
        BATON: Side(name=BATON, command=[*_module("baton_worker"), *model, *limits]),
        VLLM: Side(
            name=VLLM,
            command=[*_module("vllm_worker", vllm_python), *model, *limits],
            environment=vllm_variables(setting.vllm_dir, setting.vllm_cache_dir, cores),
        ),
        TRANSFORMERS: transformers_side(setting, "bfloat16"),
    }


def transformers_side(setting: Setting, dtype: str) -> Side:
    command = [*_module("transformers_worker"), "--model", str(setting.model_dir), "--dtype", dtype]
    return Side(name=TRANSFORMERS if dtype == "bfloat16" else f"{TRANSFORMERS} in {dtype}", command=command)


def reader_side(setting: Setting) -> Side:
    return Side(name=READER, command=[*_module("reader_worker"), "--size-bytes", str(setting.read_bytes)])


def _module(name: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", f"benchmarks.engine_peers.{name}"]
