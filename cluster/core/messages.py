"""What fronts, the coordinator and workers say to each other, as plain data.

`cluster.wire` maps each class one to one onto a protobuf message; the simulator delivers them as they are. Two kinds
of content never pass through these classes, because the coordinator's state must not hold them: a request's *body*
(prompt ids, sampling parameters, ids already delivered; `engine.core.request.RequestBody`) travels beside the message
that `carries a body`, and KV blocks travel between workers.

Durations are relative (`_ms`, `_ns` of remaining time), since hosts' clocks differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.core.drain_orders import DrainOrder, WorkerLeft
from cluster.core.ids import AttemptId, Blame, FrontId, Outcome, RefusalCause, Role, Route, WorkerId
from cluster.core.reports import HeldLeg, LeaseInfo, LinkReport, LiveRequest

BLOCK_HASH_BYTES: Final = 16
"""Length of a block's hash. Hashes of blocks that follow each other travel *packed*, one after the other."""
GRANTED_BLOCK_BYTES: Final = 16
"""Length of a block in `ReserveGranted.blocks`."""

# ---- shared parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEndpoint:
    """Where one rank of a worker is reached by one transport. `endpoint` is opaque to all but that transport."""

    rank: int
    transport: str
    endpoint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRef:
    """How others reach a worker: fronts at `token_address` (host:port), peers at `endpoints`."""

    worker: WorkerId
    token_address: str
    endpoints: tuple[RankEndpoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    total: int
    free: int
    active: int
    cached: int
    reserved: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LegTimeline:
    """What one worker measured of its part of an attempt; durations in milliseconds, absent parts None.

    Attributes:
        waiting_ms: from the command to the first chunk's start.
        prefill_ms: from the first chunk's start to the first token's draw.
        push_ms: from the first write to the commit.
        decode_ms: from joining the batch to the last token.
        kv_bytes, kv_early_bytes: pushed in all, and pushed before the last chunk had been computed.
        kv_transport: name of the transport used.
        num_cached_tokens: prompt tokens whose KV was found in this worker's prefix cache.
    """

    waiting_ms: float | None = None
    prefill_ms: float | None = None
    push_ms: float | None = None
    decode_ms: float | None = None
    kv_bytes: int = 0
    kv_early_bytes: int = 0
    kv_transport: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0


# ---- front -> coordinator -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontHello:
    """`epoch`: the highest that the front has seen, 0 if it has known no coordinator."""

    front: FrontId
    address: str
    live: tuple[LiveRequest, ...] = ()
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A new request. Carries a body. The request id is the idempotency key: a second Submit of it is ignored.

    Attributes:
        num_prompt_tokens, max_tokens: lengths, max_tokens of each answer. num_choices: answers asked for.
        block_hashes: of the prompt's full blocks, in order, packed.
        deadline_ms: time left until the client's deadline, None if it has none.
        max_latency_ms: the client's own limit on time to first token, None if it has none.
        attempt_floor: earlier lives of the coordinator may have given attempts numbers up to this.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: bytes = b""
    num_choices: int = 1
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    cache_salt: str = ""
    deadline_ms: int | None = None
    max_latency_ms: int | None = None
    attempt_floor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """The front has ended the request with `outcome` (its client left, a deadline passed); nothing of it is wanted."""

    request_id: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resubmit:
    """Answers AttemptFailed: run it again, after the tokens delivered so far. Carries a body (with those ids).

    Attributes:
        num_delivered: of the answer of which least was delivered: they are read before anything is drawn.
        num_choices: answers that are still to be written.
        num_unshared: tokens delivered of the other answers beyond that.
        block_hashes: of the full blocks of the prompt and of what was delivered of that answer, in order, packed.
        attempt_floor: as in Submit.
    """

    request_id: str
    failed_attempt: int
    num_delivered: int
    num_choices: int = 1
    num_unshared: int = 0
    attempt_floor: int = 0
    block_hashes: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLost:
    """The front cannot reach the worker that should be sending it this attempt's tokens."""

    attempt: AttemptId
    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone:
    """The request has ended for its client; the coordinator forgets it."""

    request_id: str
    outcome: Outcome
    num_output_tokens: int


FrontMessage = FrontHello | Submit | CancelRequest | Resubmit | StreamLost | RequestDone

# ---- coordinator -> front -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontWelcome:
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request was not admitted. `retry_after_ms` is None where trying again cannot help.

    `is_duplicate`: because another front has one of that id. `cause`: for clients and counters; None for a duplicate.
    """

    request_id: str
    outcome: Outcome
    reason: str
    retry_after_ms: int | None = None
    is_duplicate: bool = False
    cause: RefusalCause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The attempt is running: watch these workers. `prefill` is None where `decode` reads the prompt and writes.

    `route`, `why`: which way it takes, and the placement's reason, in words.
    """

    epoch: int
    attempt: AttemptId
    prefill: WorkerRef | None
    decode: WorkerRef
    queued_ms: float
    reserved_ms: float
    route: Route = Route.PUSHED
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """The attempt is over without an outcome. The front answers Resubmit, or RequestDone if it wants no more.

    `is_planned`: its worker is being drained, which is no failure.
    """

    epoch: int
    attempt: AttemptId
    reason: str
    is_planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest:
    """The coordinator ends the request (deadline, attempts used up, cancelled by an operator)."""

    epoch: int
    request_id: str
    outcome: Outcome
    reason: str


ToFrontMessage = FrontWelcome | Refused | Placed | AttemptFailed | EndRequest

# ---- worker -> coordinator ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What placement needs to know; sent with the hello and with every heartbeat. Costs are 0 while unmeasured.

    `step_ms_per_token` is a prompt token's; a decode step takes `decode_base_ms`, and `decode_context_token_ms` for a
    token of context. `prefix_query_tokens` have been looked up in the prefix cache, `prefix_hit_tokens` found.
    `chunk_token_ms` is what a prompt token adds to a step that writes as well, `reading_ms` what all steps that read
    prompts have taken.
    `step_age_ms` is how long the step that is under way has been running, 0 if none is.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_prefill_tokens: int = 0
    num_steps: int = 0
    step_ms_per_token: float = 0.0
    decode_base_ms: float = 0.0
    decode_context_token_ms: float = 0.0
    blocks: BlockCounts = BlockCounts(total=0, free=0, active=0, cached=0, reserved=0, quarantined=0)
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    chunk_token_ms: float = 0.0
    reading_ms: int = 0
    step_age_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """A worker registers. Fields of the compatibility hash are repeated in the clear for error messages.

    `compatibility` must agree between all workers of a cluster (model fingerprint, dtype, block size, layout).
    `metrics_address` is its Prometheus page's host:port, empty if it has none; `engine` names what computes the model.
    `epoch` is the highest that this life has seen, 0 if it has known no coordinator. `inventory` is all it has, and
    `fenced` are the lives of peers that it has cut off.
    """

    ref: WorkerRef
    pool: str
    role: Role
    host: str
    pid: int
    model: str
    compatibility: str
    compatibility_details: str
    block_size: int
    block_size_bytes: int
    max_model_tokens: int
    load: WorkerLoad
    inventory: tuple[HeldLeg, ...] = ()
    fenced: tuple[WorkerId, ...] = ()
    epoch: int = 0
    metrics_address: str = ""
    engine: str = "native"
    drain: DrainOrder | None = None  # that it has been told of


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    load: WorkerLoad
    leases: tuple[LeaseInfo, ...] = ()
    links: tuple[LinkReport, ...] = ()
    is_leaving: bool = False  # asked to stop: it ends once its pushes have, and is to get no new work


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Packed hashes of blocks that follow each other; `parent` is that of the block before the first one."""

    parent: bytes
    hashes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvents:
    """What has changed of the blocks that this life of the worker can find by content.

    Attributes:
        sequence_number: one more than that of the last message of this kind.
        is_snapshot: what was told before is void; all that can be found now is told anew, here and in what follows.
        stored: can be found from now on. evicted: packed hashes of blocks that followed each other, and are gone.
    """

    sequence_number: int
    is_snapshot: bool
    stored: tuple[BlockRun, ...] = ()
    evicted: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveGranted:
    """Decode reserved `blocks` (packed; the coordinator only counts them: see `cluster.agent.translation`) and pinned
    the `num_cached_blocks` blocks before them."""

    attempt: AttemptId
    lease_id: int
    num_cached_blocks: int
    blocks: bytes
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRefused:
    """Decode cannot reserve now; placement runs again."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """Prefill drew the first token of each answer. Where they end the request `outcome` is set; decode's is void."""

    attempt: AttemptId
    outcome: Outcome | None
    timeline: LegTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Decode took the KV over; the prefill leg is over."""

    attempt: AttemptId
    timeline: LegTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The worker that emitted the last token ended the attempt with an outcome; `num_output_tokens` of all answers."""

    attempt: AttemptId
    outcome: Outcome
    num_output_tokens: int
    timeline: LegTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LegFailed:
    """This worker cannot go on and is releasing its part. `retryable` if another attempt may work."""

    attempt: AttemptId
    outcome: Outcome
    reason: str
    retryable: bool
    blame: Blame = Blame.NOBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class LegSurvived:
    """Decode has drawn a few tokens of an attempt that is on trial, and lives."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class LegReleased:
    """This worker holds nothing of the attempt any more, and no write of its push is in flight."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFenced:
    """No write of that life of the peer can land here any more."""

    peer: WorkerId


WorkerMessage = (
    WorkerHello
    | Heartbeat
    | ReserveGranted
    | ReserveRefused
    | PrefillDone
    | Committed
    | Finished
    | LegFailed
    | LegReleased
    | PeerFenced
    | BlockEvents
    | LegSurvived
    | WorkerLeft
)
