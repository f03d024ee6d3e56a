"""What is compared: a prefill and a decode worker, and two workers that do both. Both have a core for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving import cluster_config
from cluster.core.config import ClusterConfig

KV_MEMORY = "1GiB"
"""Of each worker: more than 40,000 tokens of the demo model, so that it is never what limits a side."""
MAX_RUNNING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """`chunk_tokens`: of prompts, beside all answers, in one step; None for separate workers as they come."""

    chunk_tokens: int | None

    @property
    def name(self) -> str:
        return "disaggregated" if self.chunk_tokens is None else f"aggregated, chunks of {self.chunk_tokens}"

    def config(self, cores: Sequence[int]) -> ClusterConfig:
        """The workers are pinned to the first two of these cores; nothing else is pinned."""
        pinned = [[core] for core in cores[:2]]
        if self.chunk_tokens is None:
            pools = [
                {"name": "prefill", "role": "prefill", "kv_memory": KV_MEMORY, "cores": pinned[:1]},
                {"name": "decode", "role": "decode", "kv_memory": KV_MEMORY, "cores": pinned[1:]},
            ]
            return cluster_config(pools)
        # A cluster of decode workers alone: each runs whole requests, reading chunks beside the answers it writes.
        pool: dict[str, Any] = {
            "name": "both",
            "role": "decode",
            "replicas": 2,
            "kv_memory": KV_MEMORY,
            "cores": pinned,
            "max_running": MAX_RUNNING,
            "max_step_tokens": MAX_RUNNING + self.chunk_tokens,
            "prefill_chunk_tokens": self.chunk_tokens,
        }
        return cluster_config([pool])


DISAGGREGATED = Side(chunk_tokens=None)


def aggregated(chunk_tokens: int) -> Side:
    return Side(chunk_tokens=chunk_tokens)
