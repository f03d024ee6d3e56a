"""Attempts and their legs: who runs a request, and which worker still holds something of an attempt that is over.

An attempt outlives its request's interest in it: its legs stay in the table until their workers have released them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cluster.core.ids import AttemptId, Role, WorkerId


class LegState(StrEnum):
    """Where a leg stands.

    PLANNED: its worker has not been told. ACTIVE: told. CLOSING: to stop, and not yet released. RELEASED: its worker
    said that it holds nothing, or never was told. LOST: its worker is lost, and what it held with it.
    """

    PLANNED = "planned"
    ACTIVE = "active"
    CLOSING = "closing"
    RELEASED = "released"
    LOST = "lost"


_RELEASED: Final = (LegState.RELEASED, LegState.LOST)


@dataclass(slots=True, kw_only=True)
class Leg:
    """One worker's part of an attempt.

    Attributes:
        half: PREFILL reads the prompt and pushes; DECODE takes it over and writes, or does both, on a worker of either
            role.
        num_blocks, num_sequences: KV blocks it is expected to take, and sequences it runs at once; counted against the
            worker until released.
        num_unread_tokens: prompt tokens it has still to read, as far as is known; 0 once it has.
        expectation: what the prefix map calls it while it expects the prompt's blocks of its worker because of it.
        unreported: whether the worker's last heartbeat left before it was told of this leg.
        was_computed: it was told to stop, or said that it does, while its worker may have had it in a step.
    """

    attempt_id: AttemptId
    worker: WorkerId
    half: Role
    num_blocks: int
    num_sequences: int
    num_unread_tokens: int
    state: LegState = LegState.PLANNED
    unreported: bool = True
    was_computed: bool = False
    expectation: int | None = None

    @property
    def is_released(self) -> bool:
        return self.state in _RELEASED


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One run of a request.

    Attributes:
        prefill: None where the decode leg reads the prompt itself.
        is_current: its request still counts on it.
        committed: decode has taken the KV over (from the start, for a local one).
        finished_by: the half whose worker drew the request's last token, None before that.
        read_ns: when the prefill worker said that it had drawn the first token, None before that.
        why: the placement's reason, in words.
        is_trial: its request is suspected of having ended workers. is_alone: and nothing is computed beside it that
            may do so as well. has_survived: it has come through its first steps.
        num_fetched_blocks: of a fetch (`handlers.fetching`), which is never current: blocks of the prefix. Otherwise 0.
    """

    attempt_id: AttemptId
    lease_id: int
    placed_ns: int
    prefill: Leg | None
    decode: Leg
    why: str
    is_current: bool = True
    committed: bool = False
    finished_by: Role | None = None
    read_ns: int | None = None
    is_trial: bool = False
    is_alone: bool = False
    has_survived: bool = False
    num_fetched_blocks: int = 0

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The prefill leg first: it is the one to stop first."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def is_over(self) -> bool:
        """Nobody counts on it and no worker holds anything of it."""
        if self.is_current or self.decode.state not in _RELEASED:
            return False
        return self.prefill is None or self.prefill.state in _RELEASED

    def is_computed(self, leg: Leg) -> bool:
        """Whether the leg's worker may have it in a step: prefill until it has read it, decode since it has its KV."""
        if leg.state is not LegState.ACTIVE or self.finished_by is not None:
            return False
        return leg.num_unread_tokens > 0 if leg.half is Role.PREFILL else self.committed

    def leg_on(self, worker: WorkerId) -> Leg | None:
        if self.decode.worker == worker:
            return self.decode
        return self.prefill if self.prefill is not None and self.prefill.worker == worker else None


class AttemptTable:
    """All attempts that are not over, by id."""

    def __init__(self) -> None:
        self._by_id: dict[AttemptId, Attempt] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, attempt: Attempt) -> None:
        assert attempt.attempt_id not in self._by_id
        self._by_id[attempt.attempt_id] = attempt

    def get(self, attempt_id: AttemptId) -> Attempt | None:
        return self._by_id.get(attempt_id)

    def remove(self, attempt_id: AttemptId) -> None:
        assert self._by_id[attempt_id].is_over
        del self._by_id[attempt_id]

    def all(self) -> tuple[Attempt, ...]:
        return tuple(self._by_id.values())

    def check_invariants(self) -> None:
        for attempt_id, attempt in self._by_id.items():
            assert attempt.attempt_id == attempt_id
            assert not attempt.is_over, f"{attempt_id} is over but kept"
            assert all(leg.attempt_id == attempt_id for leg in attempt.legs)
            if attempt.prefill is None:
                assert attempt.committed
            else:
                assert attempt.prefill.worker != attempt.decode.worker
