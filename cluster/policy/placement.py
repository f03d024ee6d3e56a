"""Placement: which decode worker and which prefill worker run the next request, or why it waits.

Decode comes first (it holds the request longer): most blocks left after the reservation, then fewest sequences. Then
prefill by predicted time to the first token. Both or neither. Ties go to the smallest worker id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.core.ids import WorkerId

MAX_BACKLOG_CHUNKS: Final = 4
"""A worker starts a prompt soon if it has at most so many chunks to read before it."""
MAX_RESERVED_PERCENT: Final = 75
"""A reservation of a larger share of a decode worker's blocks than this is never granted: it is read there instead."""
UNMEASURED_MS_PER_TOKEN: Final = 1.0
"""Taken for every worker while none has been measured: only the order matters then."""
EXPECTED_OUTPUT_TOKENS: Final = 256
"""An answer is expected to be no longer than this; where it is, decode preempts as the last resort."""


class WorkerLike(Protocol):
    """What placement reads of a worker."""

    @property
    def id(self) -> WorkerId: ...
    @property
    def num_total_blocks(self) -> int: ...
    @property
    def num_promised_blocks(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def backlog_tokens(self) -> int: ...
    @property
    def ms_per_token(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs.

    Attributes:
        num_tokens: to be read before the first token is drawn.
        num_sequences: answers that are written at once.
        num_read_blocks: for the tokens and one more: what prefill takes.
        num_kv_blocks: these, and one for each further answer: what is reserved.
        num_expected_blocks: with the answers expected of it: what placement counts with.
    """

    num_tokens: int
    num_sequences: int
    num_read_blocks: int
    num_kv_blocks: int
    num_expected_blocks: int


def demand_of(
    num_tokens: int, num_tokens_left: int, block_size: int, *, num_choices: int = 1, num_unshared: int = 0
) -> Demand:
    """What a request needs that has `num_tokens` to be read and may emit `num_tokens_left` more.

    With several choices, each emits so many. They share the tokens read, except for a part of the last block and
    `num_unshared` tokens that all of them together have been given beyond.
    """
    num_emitted = max(1, min(num_tokens_left, EXPECTED_OUTPUT_TOKENS))
    num_read_blocks = -(-(num_tokens + 1) // block_size)
    num_others = num_choices - 1
    num_own_tokens = num_others * (block_size - 1 + num_emitted) + num_unshared
    return Demand(
        num_tokens=num_tokens,
        num_sequences=num_choices,
        num_read_blocks=num_read_blocks,
        num_kv_blocks=num_read_blocks + num_others,
        num_expected_blocks=-(-(num_tokens + num_emitted) // block_size) + -(-num_own_tokens // block_size),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`prefill` is None where the decode worker reads the prompt itself."""

    prefill: WorkerId | None
    decode: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing can take the request now."""

    reason: str


def place(
    demand: Demand,
    prefill: Iterable[WorkerLike],
    decode: Iterable[WorkerLike],
    excluded: Mapping[WorkerId, int],
    why_local: str | None = None,
) -> Placement | Wait:
    """Chooses workers for one request; costs O(workers given).

    Args:
        prefill, decode: the workers of either role that are alive.
        excluded: decode workers that must not be taken now.
        why_local: if given, decode is to read the prompt itself, for this reason.
    """
    prefill = () if why_local else tuple(prefill)
    decode = tuple(decode)
    decode_worker = min(
        (
            worker
            for worker in decode
            if worker.id not in excluded
            and _has_room(worker, demand.num_expected_blocks, demand.num_sequences)
            and (starts_soon(worker) or prefill)
        ),
        key=lambda worker: (worker.num_promised_blocks - worker.num_total_blocks, worker.num_sequences, worker.id),
        default=None,
    )
    if decode_worker is None:
        return Wait(reason="no decode worker has room" if decode else "no decode worker is alive")
    if not prefill:
        return _place_local(decode_worker, why_local or "no prefill worker is alive")
    if demand.num_kv_blocks > max(1, decode_worker.num_total_blocks * MAX_RESERVED_PERCENT // 100):
        return _place_local(decode_worker, f"{demand.num_kv_blocks} blocks are too large a share for a push")
    return _place_both(demand, prefill, decode_worker)


def starts_soon(worker: WorkerLike) -> bool:
    """Whether a prompt given to it now would not wait long."""
    return worker.backlog_tokens <= MAX_BACKLOG_CHUNKS * worker.chunk_tokens


def _place_both(demand: Demand, prefill: tuple[WorkerLike, ...], decode_worker: WorkerLike) -> Placement | Wait:
    ms_per_token = mean_ms_per_token(prefill) or UNMEASURED_MS_PER_TOKEN
    prefill_worker = min(
        (worker for worker in prefill if starts_soon(worker) and _has_room(worker, demand.num_read_blocks, 1)),
        key=lambda worker: (_ttft_ms(worker, demand.num_tokens, ms_per_token), worker.num_sequences, worker.id),
        default=None,
    )
    if prefill_worker is None:
        return Wait(reason="no prefill worker can start soon")
    ttft_ms = _ttft_ms(prefill_worker, demand.num_tokens, ms_per_token)
    return Placement(
        prefill=prefill_worker.id,
        decode=decode_worker.id,
        reason=f"{decode_worker.id} has the most room; {prefill_worker.id} should have read it in {ttft_ms:.0f} ms",
    )


def _place_local(worker: WorkerLike, why: str) -> Placement | Wait:
    if not starts_soon(worker):
        return Wait(reason=f"{why}, and {worker.id} cannot start soon")
    return Placement(prefill=None, decode=worker.id, reason=f"{why}: {worker.id} reads the prompt itself")


def _has_room(worker: WorkerLike, num_blocks: int, num_sequences: int) -> bool:
    """An idle worker takes anything that was admitted: it holds at least one sequence of maximum length."""
    if worker.num_sequences == 0:
        return True
    has_blocks = worker.num_promised_blocks + num_blocks <= worker.num_total_blocks
    return has_blocks and worker.num_sequences + num_sequences <= worker.max_running


def _ttft_ms(worker: WorkerLike, num_tokens: int, default_ms_per_token: float) -> float:
    ms_per_token = worker.ms_per_token if worker.ms_per_token > 0 else default_ms_per_token
    return (worker.backlog_tokens + num_tokens) * ms_per_token


def mean_ms_per_token(workers: Iterable[WorkerLike]) -> float | None:
    """Over those that have been measured; None if none has."""
    measured = [worker.ms_per_token for worker in workers if worker.ms_per_token > 0]
    return sum(measured) / len(measured) if measured else None
