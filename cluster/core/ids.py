"""Names of things that live in a cluster, and the small enumerations everyone shares.

Names are tuples and the enumerations strings, because both are keys of most tables, and these hash and compare fastest.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WorkerId(NamedTuple):
    """One life of a worker: its name plus a counter that rises at every start."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class FrontId(NamedTuple):
    """One life of a front."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class AttemptId(NamedTuple):
    """One attempt at running a request. The coordinator numbers attempts from 1."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class Role(StrEnum):
    """What a pool's workers are for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Route(StrEnum):
    """Which workers an attempt takes.

    PUSHED: prefill reads the prompt and its KV is pushed to decode. LOCAL: decode reads the prompt itself. STAYED: the
    prefill worker that reads it writes the answer as well.
    """

    PUSHED = "pushed"
    LOCAL = "local"
    STAYED = "stayed"


class LegStage(StrEnum):
    """Where a worker's part of an attempt stands, as the worker tells a coordinator that did not see it come.

    RESERVED: decode waits for its KV. READING: prefill reads the prompt. PUSHING: prefill has drawn the first token and
    the push goes on. RUNNING: decode owns the KV, or reads the prompt itself. FINISHED: the last token is drawn here
    and kept for the front. CLOSING: nothing of it is wanted any more, and something is still held.
    """

    RESERVED = "reserved"
    READING = "reading"
    PUSHING = "pushing"
    RUNNING = "running"
    FINISHED = "finished"
    CLOSING = "closing"


class Blame(StrEnum):
    """Whose fault a worker takes a failure of an attempt for.

    NOBODY: the worker's own, or the transfer's. SHARED: the engine failed in a step, and it may have been any of those
    that were in it. OWN: the engine computed nothing usable for this one, while others were sound.
    """

    NOBODY = "nobody"
    SHARED = "shared"
    OWN = "own"


class Outcome(StrEnum):
    """How a request ends; every request ends in exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    REJECTED_INVALID = "rejected_invalid"
    REJECTED_OVERLOAD = "rejected_overload"
    WORKER_LOST = "worker_lost"
    TRANSFER_FAILED = "transfer_failed"
    INTERNAL = "internal"


class RefusalCause(StrEnum):
    """Why a request was refused; `cluster.policy.admission` decides.

    INVALID: it can never run. TOO_MANY: the queue is full, or so many requests are served. DISPLACED: it had to leave a
    full queue to a tenant with less than its share. QUOTA: its tenant has used its quota up. SLO, MAX_LATENCY,
    DEADLINE: its first token cannot come within the cluster's limit, its own, or its deadline. NO_PLACE: it waited in
    vain.
    """

    INVALID = "invalid"
    TOO_MANY = "too_many"
    DISPLACED = "displaced"
    QUOTA = "quota"
    SLO = "slo"
    MAX_LATENCY = "max_latency"
    DEADLINE = "deadline"
    NO_PLACE = "no_place"
