"""Request records: who asked, how long it may take, and which phase it is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cluster.core.ids import AttemptId, FrontId, Outcome, RefusalCause, WorkerId
from cluster.core.limits import MAX_REMEMBERED_ATTEMPTS


class Phase(StrEnum):
    """Where a request stands.

    RECOVERING ran in an earlier life of the coordinator, and its workers have not (all) said that they have it; QUEUED
    waits for a place; RESERVING waits for decode's answer to Reserve; PREFILLING has a prompt being read and
    pushed; DECODING runs on decode alone; LOCAL runs wholly on one worker; FINISHED has its last token drawn and
    waits for the front's RequestDone; WAITING_FRONT has a failed attempt and waits for the front's Resubmit. A request
    that has ended has no record.
    """

    RECOVERING = "recovering"
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    LOCAL = "local"
    FINISHED = "finished"
    WAITING_FRONT = "waiting_front"


_NEXT_PHASES: Final[dict[Phase, tuple[Phase, ...]]] = {
    Phase.RECOVERING: (
        Phase.PREFILLING,
        Phase.DECODING,
        Phase.LOCAL,
        Phase.FINISHED,
        Phase.WAITING_FRONT,
    ),
    Phase.QUEUED: (Phase.RESERVING, Phase.LOCAL),
    Phase.RESERVING: (Phase.PREFILLING, Phase.QUEUED),
    Phase.PREFILLING: (Phase.DECODING, Phase.FINISHED, Phase.WAITING_FRONT),
    Phase.DECODING: (Phase.FINISHED, Phase.WAITING_FRONT),
    Phase.LOCAL: (Phase.FINISHED, Phase.WAITING_FRONT),
    Phase.FINISHED: (Phase.WAITING_FRONT,),
    Phase.WAITING_FRONT: (Phase.QUEUED,),
}

PLACED_PHASES: Final = (Phase.RESERVING, Phase.PREFILLING, Phase.DECODING, Phase.LOCAL, Phase.FINISHED)
"""Phases in which the request's latest attempt is its current one."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed, and the outcome it would be if there is no other."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBy:
    """By then it must have a place, or its first token cannot come within a limit: which one, and how long that is."""

    due_ns: int
    cause: RefusalCause
    limit_ms: int


@dataclass(slots=True, kw_only=True)
class Request:
    """One request that has not ended.

    Attributes:
        rank: order of admission; kept for life.
        chain: packed hashes of the blocks that what it reads can find in a cache (its last token is computed always).
        tenant: whom it counts for. cost_tokens: what its tenant is charged for it. is_charged: whether it has been, for
            the turn it had.
        deadline_ns: the client's deadline. phase_deadline_ns: when this phase must be over. None where there is none.
        queued_ns: when it entered the queue; a refused reservation does not change it.
        attempt: number of the latest attempt, 0 before the first.
        attempt_floor: numbers up to this may have been given to earlier attempts, as far as others know.
        num_failures: attempts that failed after the front had heard of them.
        num_choices: answers that are still to be written.
        num_delivered: output tokens of one of them that its client has, and the next attempt reads first.
        num_unshared: such tokens of the others beyond these.
        source: a worker that is being drained and has the KV of what is to be read: the next attempt's prefill worker.
        excluded: decode workers not to be asked, until when.
        start_by: until its first place, None if nothing but the queue's timeout limits its wait.
        waiting_for: why it has no place, in words.
        suspicions: workers that ended while they computed it, since it last came through a trial.
        apart_until_ns: until when it waits for workers of its own, once that has begun.
        num_own_failures: attempts for which an engine computed nothing usable. avoided: the last worker of these.
    """

    request_id: str
    front: FrontId
    rank: int
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    submitted_ns: int
    queued_ns: int
    deadline_ns: int | None
    phase_deadline_ns: int | None
    phase: Phase = Phase.QUEUED
    tenant: str = ""
    cost_tokens: int = 0
    is_charged: bool = False
    start_by: StartBy | None = None
    chain: bytes = b""
    num_choices: int = 1
    attempt: int = 0
    attempt_floor: int = 0
    num_failures: int = 0
    num_delivered: int = 0
    num_unshared: int = 0
    last_failure: Failure | None = None
    source: WorkerId | None = None
    excluded: dict[WorkerId, int] = field(default_factory=dict)
    waiting_for: str = ""
    suspicions: tuple[WorkerId, ...] = ()
    apart_until_ns: int | None = None
    num_own_failures: int = 0
    avoided: WorkerId | None = None

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request_id, self.attempt)

    @property
    def next_attempt(self) -> int:
        """Number of the next attempt. Workers may remember the earlier ones, so none comes twice."""
        return max(self.attempt, self.attempt_floor) + 1

    @property
    def num_read_tokens(self) -> int:
        """Tokens the next attempt reads before it draws one: the prompt and what has been delivered."""
        return self.num_prompt_tokens + self.num_delivered

    @property
    def due_ns(self) -> int | None:
        """When something must happen if nothing else does. A finished request has met its client's deadline."""
        if self.deadline_ns is None or self.phase is Phase.FINISHED:
            return self.phase_deadline_ns
        if self.phase_deadline_ns is None:
            return self.deadline_ns
        return min(self.deadline_ns, self.phase_deadline_ns)

    def wait_until_ns(self, queue_timeout_ns: int) -> int:
        """How long it may stay in the queue, which it entered at `queued_ns`."""
        timeout_ns = self.queued_ns + queue_timeout_ns
        return timeout_ns if self.start_by is None else min(timeout_ns, self.start_by.due_ns)

    def enter(self, phase: Phase, phase_deadline_ns: int | None = None) -> None:
        assert phase in _NEXT_PHASES[self.phase], f"{self.request_id}: {self.phase.name} -> {phase.name}"
        self.phase = phase
        self.phase_deadline_ns = phase_deadline_ns


class RequestTable:
    """All requests, by id and by front."""

    def __init__(self) -> None:
        self._last_attempts: dict[str, int] = {}
        self._by_id: dict[str, Request] = {}
        self._by_front: dict[FrontId, dict[str, None]] = {}
        self._num_ranked = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def next_rank(self) -> int:
        self._num_ranked += 1
        return self._num_ranked

    def add(self, request: Request) -> None:
        assert request.request_id not in self._by_id
        self._by_id[request.request_id] = request
        self._by_front.setdefault(request.front, {})[request.request_id] = None

    def remove(self, request_id: str) -> None:
        request = self._by_id.pop(request_id)
        self._remember(request_id, request.next_attempt - 1)
        siblings = self._by_front[request.front]
        del siblings[request_id]
        if not siblings:
            del self._by_front[request.front]

    def heard_of(self, attempt_id: AttemptId) -> None:
        """Somebody has a part of an attempt of that number: the next one has a higher number."""
        request = self._by_id.get(attempt_id.request_id)
        if request is None:
            self._remember(attempt_id.request_id, attempt_id.attempt)
        else:
            request.attempt_floor = max(request.attempt_floor, attempt_id.attempt)

    def _remember(self, request_id: str, number: int) -> None:
        number = max(number, self._last_attempts.pop(request_id, 0))
        if number:
            self._last_attempts[request_id] = number
        if len(self._last_attempts) > MAX_REMEMBERED_ATTEMPTS:
            del self._last_attempts[next(iter(self._last_attempts))]

    def get(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def last_attempt(self, request_id: str) -> int:
        """Number of the last attempt of a forgotten request, 0 if it had none.

        A front that lost its stream submits again what it has not seen placed; the workers may still remember the
        attempts made before that, so their numbers must not come again.
        """
        return self._last_attempts.get(request_id, 0)

    def of_front(self, front: FrontId) -> tuple[Request, ...]:
        """In order of admission."""
        return tuple(self._by_id[request_id] for request_id in self._by_front.get(front, {}))

    def all(self) -> tuple[Request, ...]:
        return tuple(self._by_id.values())

    def check_invariants(self) -> None:
        num_listed = 0
        for front, request_ids in self._by_front.items():
            assert request_ids, f"{front} has an empty list"
            num_listed += len(request_ids)
            assert all(self._by_id[request_id].front == front for request_id in request_ids)
        assert num_listed == len(self._by_id)
        for request in self._by_id.values():
            assert request.num_failures <= request.attempt
            assert (request.phase_deadline_ns is not None) == (
                request.phase in (Phase.QUEUED, Phase.RESERVING, Phase.FINISHED, Phase.WAITING_FRONT)
            ), f"{request.request_id} in {request.phase.name} must have a phase deadline, or must not"
