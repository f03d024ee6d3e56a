"""What fronts and workers tell the coordinator of what they have: parts of their hellos and heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import AttemptId, LegStage, Role, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request that was placed once and that its front still serves, as it announces it on a new stream.

    Attributes:
        attempt: the one that runs, or the last one that is known to be over.
        is_running: its tokens are awaited; otherwise the front asks for another attempt once it is welcome.
        num_choices, num_delivered, num_unshared: as in Resubmit, as things stand now.
        num_failures: attempts that failed so far. tenant: as in Submit.
    """

    request_id: str
    attempt: int
    is_running: bool
    num_prompt_tokens: int
    max_tokens: int
    num_choices: int = 1
    priority: int = 0
    deadline_ms: int | None = None
    num_delivered: int = 0
    num_unshared: int = 0
    num_failures: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLeg:
    """A part of an attempt that a worker has when it registers.

    Attributes:
        half: as in the coordinator's books; DECODE also where the worker reads the prompt itself.
        peer: the other side of its push, None for a leg that never had one.
        lease_id, num_blocks: of what is reserved or held for the push, 0 where nothing is.
    """

    attempt: AttemptId
    half: Role
    stage: LegStage
    peer: WorkerId | None = None
    lease_id: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseInfo:
    """A lease or quarantined run of blocks as its holder sees it. side: `reserved`, `held` or `quarantined`."""

    lease_id: int
    attempt: AttemptId
    side: str
    peer: WorkerId
    num_blocks: int
    size_bytes: int
    age_ms: int
    remaining_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """A connection over which the worker writes to a peer, and the bandwidth measured when it was made."""

    peer: WorkerId
    transport: str
    bandwidth_bytes_per_s: int
