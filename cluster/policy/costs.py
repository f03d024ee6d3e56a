"""What policies read of a worker, and what they predict from it: reading, writing and pushing, in milliseconds.

Costs are those that workers have measured of their own steps. One that has measured nothing yet counts as an average
one of those it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.core.ids import WorkerId
from cluster.core.limits import MS_PER_S

UNMEASURED_MS_PER_TOKEN: Final = 1.0
"""Taken for every worker while none has been measured: only the order matters then."""


class WorkerLike(Protocol):
    """What policies read of a worker. Costs are 0 while unmeasured.

    `num_promised_blocks` counts what its requests have and are expected to need. `num_given_tokens` is what it has been
    given to read in all its life, `backlog_tokens` what of that it has still to read. Of its sequences `num_writing`
    write their answers there, or will, with `num_writing_blocks`. `chunk_token_ms` is what a prompt token adds to a
    step that writes as well; `reading_share` is the share of its time in which it has lately read prompts.
    """

    @property
    def id(self) -> WorkerId: ...
    @property
    def pool_name(self) -> str: ...
    @property
    def num_total_blocks(self) -> int: ...
    @property
    def num_promised_blocks(self) -> int: ...
    @property
    def block_size_bytes(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def backlog_tokens(self) -> int: ...
    @property
    def num_given_tokens(self) -> int: ...
    @property
    def ms_per_token(self) -> float: ...
    @property
    def decode_base_ms(self) -> float: ...
    @property
    def decode_context_token_ms(self) -> float: ...
    @property
    def chunk_token_ms(self) -> float: ...
    @property
    def reading_share(self) -> float: ...
    @property
    def num_writing(self) -> int: ...
    @property
    def num_writing_blocks(self) -> int: ...


class LinksLike(Protocol):
    """What is known of the links between workers."""

    def bandwidth_bytes_per_s(self, writer: WorkerId, peer: WorkerId, pools: tuple[str, str]) -> int:
        """Of the link, or else the usual one between the two pools; 0 if nothing is known."""
        ...


@dataclass(slots=True, kw_only=True)  # not frozen: that would treble what it costs to make one
class StepCosts:
    """Of one prompt token, of a decode step without its contexts, and of each token of these; and of a prompt token in
    such a step, 0 while unmeasured."""

    ms_per_token: float
    decode_base_ms: float
    decode_context_token_ms: float
    chunk_token_ms: float


def usual_costs(workers: Sequence[WorkerLike]) -> StepCosts:
    """Of an average worker among these."""
    num_readers = num_writers = num_chunk_costs = 0
    ms_per_token = base_ms = context_token_ms = chunk_token_ms = 0.0
    for worker in workers:  # one pass, at every decision
        if worker.ms_per_token > 0:
            num_readers += 1
            ms_per_token += worker.ms_per_token
        if worker.chunk_token_ms > 0:
            num_chunk_costs += 1
            chunk_token_ms += worker.chunk_token_ms
        if worker.decode_base_ms > 0 or worker.decode_context_token_ms > 0:
            num_writers += 1
            base_ms += worker.decode_base_ms
            context_token_ms += worker.decode_context_token_ms
    return StepCosts(
        ms_per_token=ms_per_token / num_readers if num_readers else UNMEASURED_MS_PER_TOKEN,
        decode_base_ms=base_ms / max(1, num_writers),
        decode_context_token_ms=context_token_ms / max(1, num_writers),
        chunk_token_ms=chunk_token_ms / max(1, num_chunk_costs),
    )


def mean_ms_per_token(workers: Iterable[WorkerLike]) -> float | None:
    """Over those that have been measured; None if none has."""
    measured = [worker.ms_per_token for worker in workers if worker.ms_per_token > 0]
    return sum(measured) / len(measured) if measured else None


def read_ms(worker: WorkerLike, num_tokens: int, usual: StepCosts) -> float:
    """Until it has read so many tokens, after all that it has been given before."""
    return (worker.backlog_tokens + num_tokens) * (worker.ms_per_token or usual.ms_per_token)


def tpot_ms(worker: WorkerLike, num_more_tokens: int, block_size: int, usual: StepCosts) -> float:
    """Time per output token once all contexts have grown to what is expected of them, with so many tokens more."""
    return decode_step_ms(worker, worker.num_promised_blocks * block_size + num_more_tokens, usual)


def decode_step_ms(worker: WorkerLike, num_context_tokens: int, usual: StepCosts) -> float:
    """A step that writes one token of each of its answers, with so much context in all; 0 while nothing is measured."""
    if worker.decode_base_ms > 0 or worker.decode_context_token_ms > 0:
        return worker.decode_base_ms + num_context_tokens * worker.decode_context_token_ms
    return usual.decode_base_ms + num_context_tokens * usual.decode_context_token_ms


def push_ms(links: LinksLike, writer: WorkerLike, peer: WorkerLike, num_blocks: int) -> float:
    """What writing so many blocks takes; nothing where no link is known."""
    pools = (writer.pool_name, peer.pool_name)
    bandwidth_bytes_per_s = links.bandwidth_bytes_per_s(writer.id, peer.id, pools)
    if not bandwidth_bytes_per_s:
        return 0.0
    return num_blocks * peer.block_size_bytes * MS_PER_S / bandwidth_bytes_per_s
