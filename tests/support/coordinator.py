"""A ClusterState on a bench: events are one short call each, invariants are checked after every one."""

from __future__ import annotations

from typing import Any, TypeVar

from cluster.core.commands import CommandBody
from cluster.core.config import ClusterConfig, CoordinatorConfig, ModelConfig, PoolConfig
from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.effects import DropBody, Effect, GiveUpWorker, ToFront, ToWorker
from cluster.core.events import Event, FromFront, FromWorker, FrontGone, Tick, WorkerGone
from cluster.core.ids import AttemptId, FrontId, Role, WorkerId
from cluster.core.messages import (
    GRANTED_BLOCK_BYTES,
    BlockCounts,
    Committed,
    FrontHello,
    FrontMessage,
    Heartbeat,
    LegReleased,
    LegTimeline,
    PrefillDone,
    RankEndpoint,
    ReserveGranted,
    Submit,
    ToFrontMessage,
    WorkerHello,
    WorkerLoad,
    WorkerMessage,
    WorkerRef,
)
from cluster.core.reports import HeldLeg
from cluster.core.state import ClusterState

MS = 1_000_000
FRONT = FrontId("f", 1)
P0, P1 = WorkerId("p0", 1), WorkerId("p1", 1)
D0, D1 = WorkerId("d0", 1), WorkerId("d1", 1)
TIMELINE = LegTimeline()

Found = TypeVar("Found")


def make_config(
    *,
    with_prefill: bool = True,
    max_running: int = 8,
    disaggregation: DisaggregationConfig = ALWAYS_PUSHED,
    **limits: float,
) -> ClusterConfig:
    """A prefill pool `p` and a decode pool `d`; `limits` are fields of CoordinatorConfig."""
    pools = [PoolConfig(name="d", role=Role.DECODE, replicas=2, max_running=max_running)]
    if with_prefill:
        pools.insert(0, PoolConfig(name="p", role=Role.PREFILL, replicas=2, prefill_chunk_tokens=64))
    values = {"queue_limit": 8, **limits}
    coordinator = CoordinatorConfig(**values)  # type: ignore[arg-type]
    return ClusterConfig(
        name="bench",
        model=ModelConfig(path="m"),
        pools=tuple(pools),
        coordinator=coordinator,
        disaggregation=disaggregation,
    )


def make_load(num_blocks: int, **values: float) -> WorkerLoad:
    blocks = BlockCounts(total=num_blocks, free=num_blocks, active=0, cached=0, reserved=0, quarantined=0)
    return WorkerLoad(blocks=blocks, **values)  # type: ignore[arg-type]


def make_hello(
    worker: WorkerId,
    role: Role,
    *,
    num_blocks: int = 100,
    compatibility: str = "layout-a",
    pool: str | None = None,
    block_size: int = 16,
    inventory: tuple[HeldLeg, ...] = (),
    fenced: tuple[WorkerId, ...] = (),
    epoch: int = 0,
    **load: float,
) -> WorkerHello:
    endpoint = RankEndpoint(rank=0, transport="loopback", endpoint=str(worker).encode())
    return WorkerHello(
        ref=WorkerRef(worker=worker, token_address=f"{worker.name}:1", endpoints=(endpoint,)),
        pool=role.value[0] if pool is None else pool,
        role=role,
        host="host",
        pid=7,
        model="m",
        compatibility=compatibility,
        compatibility_details=f"dtype=float32 ({compatibility})",
        block_size=block_size,
        block_size_bytes=1000,
        max_model_tokens=1024,
        load=make_load(num_blocks, **load),
        inventory=inventory,
        fenced=fenced,
        epoch=epoch,
    )


class Bench:
    """`effects` are those of the last event; the finders below look at them alone."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self.state = ClusterState(config or make_config(), epoch=3)
        self.now_ns = 1_000 * MS
        self.effects: list[Effect] = []

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        self.effects = self.state.handle(self.now_ns, event)
        self.state.check_invariants()
        return self.effects

    def front_says(self, message: FrontMessage, front: FrontId = FRONT) -> list[Effect]:
        return self.handle(FromFront(front=front, message=message))

    def worker_says(self, worker: WorkerId, message: WorkerMessage) -> list[Effect]:
        return self.handle(FromWorker(worker=worker, message=message))

    def worker_gone(self, worker: WorkerId) -> list[Effect]:
        return self.handle(WorkerGone(worker=worker, reason="stream ended"))

    def front_gone(self, front: FrontId = FRONT) -> list[Effect]:
        return self.handle(FrontGone(front=front))

    def wait_ms(self, duration_ms: int) -> list[Effect]:
        """Time passes, with a Tick at every deadline on the way. All effects count as the last ones."""
        end_ns = self.now_ns + duration_ms * MS
        effects: list[Effect] = []
        while (deadline_ns := self.state.next_deadline_ns()) is not None and deadline_ns <= end_ns:
            self.now_ns = max(self.now_ns, deadline_ns)
            effects += self.handle(Tick())
        self.now_ns = end_ns
        effects += self.handle(Tick())
        self.effects = effects
        return effects

    # ---- a cluster and its requests ----

    def join(self, *workers: WorkerId, **hello: int) -> None:
        """Workers register; their names' first letter says which role they have."""
        for worker in workers:
            role = Role.PREFILL if worker.name.startswith("p") else Role.DECODE
            self.worker_says(worker, make_hello(worker, role, **hello))  # type: ignore[arg-type]

    def connect(self, front: FrontId = FRONT) -> None:
        self.front_says(FrontHello(front=front, address="f:1"), front)

    def beat(self, *workers: WorkerId, **load: float) -> None:
        for worker in workers:
            self.worker_says(worker, Heartbeat(load=make_load(100, **load)))

    def submit(
        self, request_id: str = "r", *, num_prompt_tokens: int = 40, max_tokens: int = 8, **fields: Any
    ) -> list[Effect]:
        message = Submit(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            **fields,
        )
        return self.front_says(message)

    def grant(self, attempt: AttemptId, decode: WorkerId = D0, lease_id: int = 0) -> list[Effect]:
        blocks = bytes(2 * GRANTED_BLOCK_BYTES)
        granted = ReserveGranted(attempt=attempt, lease_id=lease_id, num_cached_blocks=0, blocks=blocks, ttl_ms=9_000)
        return self.worker_says(decode, granted)

    def run_to_decoding(self, request_id: str = "r", prefill: WorkerId = P0, decode: WorkerId = D0) -> AttemptId:
        """Submitted, granted, read, committed; prefill still holds its source blocks."""
        self.submit(request_id)
        attempt = AttemptId(request_id, 1)
        self.grant(attempt, decode)
        self.worker_says(prefill, PrefillDone(attempt=attempt, outcome=None, timeline=TIMELINE))
        self.worker_says(decode, Committed(attempt=attempt, timeline=TIMELINE))
        return attempt

    def release(self, worker: WorkerId, attempt: AttemptId) -> list[Effect]:
        return self.worker_says(worker, LegReleased(attempt=attempt))

    # ---- what came of it ----

    def commands(self, worker: WorkerId) -> list[CommandBody]:
        """What the last event has the worker told."""
        told = []
        for effect in self.effects:
            if isinstance(effect, ToWorker) and effect.worker == worker:
                assert effect.command.worker == worker and effect.command.epoch >= 3
                told.append(effect.command.body)
        return told

    def said(self, front: FrontId = FRONT) -> list[ToFrontMessage]:
        return [e.message for e in self.effects if isinstance(e, ToFront) and e.front == front]

    def dropped(self) -> list[str]:
        return [effect.request_id for effect in self.effects if isinstance(effect, DropBody)]

    def given_up(self) -> list[WorkerId]:
        return [effect.worker for effect in self.effects if isinstance(effect, GiveUpWorker)]

    def phase(self, request_id: str = "r") -> str | None:
        views = self.state.requests(self.now_ns)
        return next((view.phase for view in views if view.request_id == request_id), None)

    def num_legs(self, worker: WorkerId) -> int:
        pools = self.state.status(self.now_ns).pools
        return next(view.num_legs for pool in pools for view in pool.workers if view.worker == worker)

    def assert_nothing_left(self) -> None:
        """No request, lease or leg, and no deadline but those of silent workers."""
        view = self.state.status(self.now_ns)
        assert view.num_requests == 0 and view.num_leases == 0
        assert self.state.leases(self.now_ns) == ()
        assert all(worker.num_legs == 0 for pool in view.pools for worker in pool.workers)


def only(found: list[Found]) -> Found:
    """The single element."""
    assert len(found) == 1, found
    return found[0]
