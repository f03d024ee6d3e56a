"""What the coordinator tells workers, as plain data; see `cluster.core.messages`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.drain_orders import Leave, StartDrain
from cluster.core.ids import AttemptId, WorkerId
from cluster.core.messages import WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWelcome:
    heartbeat_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused:
    """Registration is refused (layout mismatch, unreachable address, given up for lost); the worker ends."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Decode leg: reserve blocks for `num_tokens` tokens, less those cached. Carries a body.

    With `num_prefix_blocks`, only so many blocks of the prompt's beginning are to come, for the prefix cache.
    `is_trial`: as in RunLocal.
    """

    attempt: AttemptId
    lease_id: int
    source: WorkerRef
    num_tokens: int
    ttl_ms: int
    is_trial: bool = False
    num_prefix_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prefill leg: compute the prompt, push its blocks to `destination`, draw the first token. Carries a body.

    With `num_prefix_blocks`, only push so many blocks of its beginning, all of which are cached.
    """

    attempt: AttemptId
    lease_id: int
    destination: WorkerRef
    blocks: bytes
    num_cached_blocks: int
    ttl_ms: int
    num_prefix_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLocal:
    """Run the whole request here, prompt and answer. Carries a body.

    `step_limit_ms`: while the prompt is read, steps that also write answers are to take no longer; 0 for no limit.
    `is_trial`: LegSurvived is wanted.
    """

    attempt: AttemptId
    step_limit_ms: float = 0.0
    is_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelLeg:
    """Stop this worker's part of the attempt in whatever state it is; answer LegReleased once nothing is held."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStopped:
    """To decode: the prefill leg acknowledged that it stopped, or never heard of the attempt."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """Give that life of the peer up: fence it and fail what depended on it."""

    peer: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBlockSnapshot:
    """Block events were missed: begin them anew with a snapshot."""


CommandBody = (
    WorkerWelcome
    | WorkerRefused
    | Reserve
    | Prefill
    | RunLocal
    | CancelLeg
    | SenderStopped
    | PeerLost
    | SendBlockSnapshot
    | StartDrain
    | Leave
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as sent: a worker refuses an epoch lower than one it has seen, and another incarnation's commands."""

    epoch: int
    worker: WorkerId
    body: CommandBody
