"""What a history consists of, as data: the cluster's shape and limits, the clients' requests, and the faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.agent.limits import AgentLimits
from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.ids import Role
from cluster.core.tenant_config import TenantsConfig
from cluster.front.request_spec import RequestLimits
from cluster.sim.engine_model import StepCost
from cluster.sim.fabric import Family
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from engine.core.sampling import SamplingParams
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.sampling import Checksums


class PoisonKind(Enum):
    """What a poison request does to the worker that computes it: CRASH ends it in the midst of the step, RAISE fails
    the step, NOT_FINITE leaves nothing usable of the request itself, STUCK never lets the step end."""

    CRASH = "crash"
    RAISE = "raise"
    NOT_FINITE = "not_finite"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """It strikes in the step that computes the `num_tokens`-th token of prompt and answer together."""

    kind: PoisonKind
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client's request.

    Attributes:
        arrival_ns: when the client calls its front, which is number `front`.
        deadline_ns: the client's deadline after its arrival, None if it has none.
        leave_ns: the client leaves so long after its arrival; leave_after_tokens: once it has so many tokens.
        num_choices: answers asked for.
        stop_pair: two token ids that stand for a stop string.
        is_invalid: it can never fit and must be refused.
        poison: computing it does harm, None for what is harmless.
    """

    request_id: str
    front: int
    arrival_ns: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    deadline_ns: int | None = None
    max_latency_ms: int | None = None
    leave_ns: int | None = None
    leave_after_tokens: int | None = None
    stop_pair: tuple[int, int] | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    is_invalid: bool = False
    poison: Poison | None = None


class FaultKind(Enum):
    """See `cluster.sim.faults` for what each does with target, other, duration and amount."""

    CRASH = "crash"
    LEAVE = "leave"
    DRAIN = "drain"
    PAUSE = "pause"
    TWIN = "twin"
    CUT = "cut"
    PARTITION = "partition"
    STALL = "stall"
    CUT_DATA = "cut_data"
    DATA = "data"
    CLOCK_JUMP = "clock_jump"
    SLOW_ENGINE = "slow_engine"
    FAIL_STEPS = "fail_steps"
    STUCK_ENGINE = "stuck_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`detail` names the field of DataFaults for DATA, and what follows a DRAIN.

    Of a DRAIN `amount` is the deadline in seconds, 0 for none; `migrate` and `force` are the order's.
    """

    kind: FaultKind
    at_ns: int
    duration_ns: int
    target: str
    other: str = ""
    amount: float = 0.0
    detail: str = ""
    migrate: bool = False
    force: bool = False


SIM_COST = StepCost()
SIM_PUSH_LIMITS = PushLimits(
    lease_ttl_ns=2 * SECOND_NS,
    write_timeout_ns=2 * SECOND_NS,
    end_resend_interval_ns=200 * MILLISECOND_NS,
    stop_resend_interval_ns=200 * MILLISECOND_NS,
    stop_timeout_ns=2 * SECOND_NS,
    max_blocks_per_write=4,
)
SIM_AGENT_LIMITS = AgentLimits(
    coordinator_grace_ns=6 * SECOND_NS,
    finished_record_ttl_ns=6 * SECOND_NS,
    early_watch_ttl_ns=4 * SECOND_NS,
    max_batches_in_flight=4,
)
SIM_REQUEST_LIMITS = RequestLimits(stream_lost_ns=2 * SECOND_NS, coordinator_lost_ns=4 * SECOND_NS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A history before it happens. Equal scenarios with equal seeds give equal histories.

    Attributes:
        num_host_blocks: of the tier in host memory below each worker's pool. num_disk_blocks: of that in files.
        fetch_prefixes: see CoordinatorConfig.
        num_layers: of a simulated block. What a prompt's last chunk has of them is pushed in groups.
        num_variants: 1 is exact arithmetic; with more, each draw picks one of so many equally right tokens.
        link_ns_per_byte: what pushing costs; simulated blocks are tiny.
        same_address: a restarted worker serves at the address of its earlier life.
        can_kill: a life that the coordinator gives up is killed; otherwise it has to find out by itself.
        restart_ns: how long after its end a process is started again.
        disaggregation: when a request takes another way than a push.
        decode_chunk_tokens: what a decode worker reads in a step; None: as much as a prefill worker.
    """

    seed: int
    num_prefill: int = 1
    num_decode: int = 1
    num_fronts: int = 1
    block_size: int = 4
    num_blocks: int = 48
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    fetch_prefixes: bool = False
    num_layers: int = 3
    max_model_tokens: int = 64
    max_step_tokens: int = 24
    prefill_chunk_tokens: int = 16
    decode_chunk_tokens: int | None = None
    max_running: int = 8
    checksums: Checksums = Checksums.FULL
    family: Family = Family.SHARED_MEMORY
    same_address: bool = False
    restart_ns: int = 300 * MILLISECOND_NS
    can_kill: bool = True
    queue_limit: int = 64
    queue_timeout_s: float = 10.0
    heartbeat_timeout_s: float = 3.0
    max_attempts: int = 4
    slo_ttft_ms: int | None = None
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    num_variants: int = 1
    cost: StepCost = SIM_COST
    link_ns_per_byte: int = 400
    push_limits: PushLimits = SIM_PUSH_LIMITS
    agent_limits: AgentLimits = SIM_AGENT_LIMITS
    request_limits: RequestLimits = SIM_REQUEST_LIMITS
    disaggregation: DisaggregationConfig = ALWAYS_PUSHED
    requests: tuple[Request, ...] = ()
    faults: tuple[Fault, ...] = field(default=())

    def chunk_tokens(self, role: Role) -> int:
        of_decode = self.prefill_chunk_tokens if self.decode_chunk_tokens is None else self.decode_chunk_tokens
        return of_decode if role is Role.DECODE else self.prefill_chunk_tokens

    @property
    def has_trouble(self) -> bool:
        """Whether something is to go wrong."""
        return bool(self.faults) or any(request.poison is not None for request in self.requests)

    @property
    def worker_names(self) -> tuple[str, ...]:
        return (*self.prefill_names, *self.decode_names)

    @property
    def prefill_names(self) -> tuple[str, ...]:
        return tuple(f"p{index}" for index in range(self.num_prefill))

    @property
    def decode_names(self) -> tuple[str, ...]:
        return tuple(f"d{index}" for index in range(self.num_decode))

    @property
    def front_names(self) -> tuple[str, ...]:
        return tuple(f"f{index}" for index in range(self.num_fronts))

    @property
    def faults_end_ns(self) -> int:
        return max((fault.at_ns + fault.duration_ns for fault in self.faults), default=0)

    @property
    def requests_end_ns(self) -> int:
        return max((request.arrival_ns for request in self.requests), default=0)
