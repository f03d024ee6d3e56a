"""Which pool limits a cluster: what has to be known before either is made larger.

Requests wait before both pools, so a long queue by itself says nothing: while decode is full nothing is placed, and
prompts pile up in front of prefill workers that idle. Nor does memory in use at prefill: what decode has not taken over
stays there. So each pool is asked how near its workers are to where placement stops giving them more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cluster.core.ids import Role
from cluster.policy.costs import StepCosts, WorkerLike, tpot_ms, usual_costs
from cluster.policy.decision import MAX_BACKLOG_CHUNKS

LIMITING_PRESSURE: Final = 0.9
"""A pool limits from here on."""


def prefill_pressure(workers: Sequence[WorkerLike]) -> float:
    """Mean of what prefill workers have to read, by the most with which they are given more. 0 without workers."""
    return _mean([worker.backlog_tokens / (MAX_BACKLOG_CHUNKS * worker.chunk_tokens) for worker in workers])


def decode_pressure(workers: Sequence[WorkerLike], block_size: int, max_tpot_ms: float | None) -> float:
    """Mean over decode workers of the nearest of their limits: blocks, sequences, time per token. 0 without workers."""
    usual = usual_costs(workers)
    return _mean([_writer_pressure(worker, block_size, max_tpot_ms, usual) for worker in workers])


def push_pressure(workers: Sequence[WorkerLike]) -> float:
    """Mean share of prefill workers' blocks that requests have although they need not be read any more: their KV is
    held until decode has taken it over. 0 without workers."""
    return _mean([_held_share(worker) for worker in workers])


def limiting_role(prefill: float, decode: float, push: float) -> Role | None:
    """Of these pressures. Decode first: while it is full prefill cannot get rid of what it has read, however much waits
    there, and more prefill workers would only hold more."""
    if max(decode, push) >= LIMITING_PRESSURE:
        return Role.DECODE
    return Role.PREFILL if prefill >= LIMITING_PRESSURE else None


def _writer_pressure(worker: WorkerLike, block_size: int, max_tpot_ms: float | None, usual: StepCosts) -> float:
    if not worker.num_sequences:  # it takes anything
        return 0.0
    shares = [worker.num_promised_blocks / worker.num_total_blocks, worker.num_sequences / worker.max_running]
    if max_tpot_ms is not None:
        shares.append(tpot_ms(worker, 0, block_size, usual) / max_tpot_ms)
    return max(shares)


def _held_share(worker: WorkerLike) -> float:
    return 0.0 if worker.backlog_tokens else worker.num_promised_blocks / worker.num_total_blocks


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
