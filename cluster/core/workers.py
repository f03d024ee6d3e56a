"""The registry of workers: which lives are registered, what each one holds, and which lives are lost for good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.attempts import Leg, LegState
from cluster.core.config import ClusterConfig, PoolConfig
from cluster.core.ids import AttemptId, Role, WorkerId
from cluster.core.limits import MAX_HEARTBEAT_MS, MAX_LOST_NAMES, MAX_WORKERS, NS_PER_MS, READING_MEMORY_MS
from cluster.core.messages import WorkerHello, WorkerLoad


@dataclass(slots=True, kw_only=True)
class Worker:
    """One registered life of a worker. Read by placement as `cluster.policy.costs.WorkerLike`.

    `legs` has every leg here of an attempt that is not over; the counts are of those not released. What placement
    counts with is the coordinator's own book-keeping: exact at once, where a heartbeat comes late. What every decision
    reads of the hello, the pool and the load is kept in fields of its own.
    `num_expected_blocks` is what its legs are expected to need; `num_used_blocks` is what they used by the last
    heartbeat, less what has been released since. Answers that outgrow what was expected of them count as what they have
    (`num_promised_blocks`). Of the prompt tokens to be read here before a new prompt's (`backlog_tokens`), what was
    assigned and is not done counts whole, less what the last heartbeat knows to have been read of it, and what should
    have been since, up to `foresee`: `num_left_tokens` should have been left at `left_at_ns`.
    """

    hello: WorkerHello
    pool: PoolConfig
    load: WorkerLoad
    last_heard_ns: int
    load_heard_ns: int
    id: WorkerId = field(init=False)
    role: Role = field(init=False)
    pool_name: str = field(init=False)
    block_size_bytes: int = field(init=False)
    max_running: int = field(init=False)
    chunk_tokens: int = field(init=False)
    num_total_blocks: int = field(init=False)
    ms_per_token: float = field(init=False)
    decode_base_ms: float = field(init=False)
    decode_context_token_ms: float = field(init=False)
    chunk_token_ms: float = field(init=False)
    legs: dict[AttemptId, Leg] = field(default_factory=dict)
    num_legs: int = 0
    num_sequences: int = 0
    num_expected_blocks: int = 0
    num_used_blocks: int = 0
    num_promised_blocks: int = 0
    num_unread_tokens: int = 0
    num_unreported_tokens: int = 0
    backlog_tokens: int = 0
    num_left_tokens: float = 0.0
    left_at_ns: int = 0
    is_leaving: bool = False
    num_given_tokens: int = 0
    num_writing: int = 0
    num_writing_blocks: int = 0
    reading_share: float = 0.0

    def __post_init__(self) -> None:
        self.id = self.hello.ref.worker
        self.role = self.hello.role
        self.pool_name = self.pool.name
        self.block_size_bytes = self.hello.block_size_bytes
        self.max_running = self.pool.max_running
        self.chunk_tokens = self.pool.prefill_chunk_tokens
        self._take_load(self.load)
        self._sum_up()

    def foresee(self, now_ns: int) -> None:
        """It reads on between its heartbeats, at the speed that it has measured. That is believed until the next one is
        due: of a worker that says nothing nobody knows that it reads."""
        until_ns = min(now_ns, self.load_heard_ns + MAX_HEARTBEAT_MS * NS_PER_MS)
        if self.ms_per_token > 0 and until_ns > self.left_at_ns:
            num_read_tokens = (until_ns - self.left_at_ns) / (NS_PER_MS * self.ms_per_token)
            self.num_left_tokens = max(0.0, self.num_left_tokens - num_read_tokens)
            self._sum_up()
        self.left_at_ns = now_ns

    def take(self, now_ns: int, leg: Leg) -> None:
        assert leg.attempt_id not in self.legs and not leg.is_released
        self.foresee(now_ns)
        self.legs[leg.attempt_id] = leg
        self.num_legs += 1
        self.num_sequences += leg.num_sequences
        self.num_expected_blocks += leg.num_blocks
        self.num_unread_tokens += leg.num_unread_tokens
        self.num_unreported_tokens += leg.num_unread_tokens
        self.num_given_tokens += leg.num_unread_tokens
        self.num_left_tokens += leg.num_unread_tokens
        if leg.half is Role.DECODE:
            self.num_writing += leg.num_sequences
            self.num_writing_blocks += leg.num_blocks
        self._sum_up()

    def mark_read(self, leg: Leg) -> None:
        """The leg's prompt has been read, or never will be."""
        if not leg.num_unread_tokens:
            return
        self.num_unread_tokens -= leg.num_unread_tokens
        if leg.unreported:
            self.num_unreported_tokens -= leg.num_unread_tokens
        leg.num_unread_tokens = 0
        self._sum_up()

    def release(self, leg: Leg) -> None:
        """The leg holds nothing here any more."""
        assert not leg.is_released
        self.mark_read(leg)
        leg.state = LegState.RELEASED
        self.num_legs -= 1
        self.num_sequences -= leg.num_sequences
        self.num_expected_blocks -= leg.num_blocks
        self.num_used_blocks = max(0, self.num_used_blocks - leg.num_blocks)
        if leg.half is Role.DECODE:
            self.num_writing -= leg.num_sequences
            self.num_writing_blocks -= leg.num_blocks
        self._sum_up()

    def hear(self, now_ns: int, load: WorkerLoad) -> None:
        """A heartbeat. Its numbers are taken to include every leg that the worker has been told of."""
        elapsed_ms = (now_ns - self.load_heard_ns) / NS_PER_MS
        self.load_heard_ns = self.left_at_ns = now_ns
        if elapsed_ms > 0:
            busy_share = min(1.0, max(0, load.reading_ms - self.load.reading_ms) / elapsed_ms)
            self.reading_share += min(1.0, elapsed_ms / READING_MEMORY_MS) * (busy_share - self.reading_share)
        self._take_load(load)
        for leg in self.legs.values():
            if leg.unreported and leg.state is not LegState.PLANNED:
                leg.unreported = False
                self.num_unreported_tokens -= leg.num_unread_tokens
        num_told_tokens = load.waiting_prefill_tokens + self.num_unreported_tokens
        self.num_left_tokens = min(self.num_unread_tokens, num_told_tokens)
        self._sum_up()

    def _take_load(self, load: WorkerLoad) -> None:
        self.load = load
        self.num_total_blocks = load.blocks.total
        self.ms_per_token = load.step_ms_per_token
        self.decode_base_ms = load.decode_base_ms
        self.decode_context_token_ms = load.decode_context_token_ms
        self.chunk_token_ms = load.chunk_token_ms
        self.num_used_blocks = load.blocks.active

    def _sum_up(self) -> None:
        """To be called whenever a count has changed: decisions read the sums more often than that."""
        self.num_promised_blocks = max(self.num_expected_blocks, self.num_used_blocks)
        self.backlog_tokens = min(self.num_unread_tokens, int(self.num_left_tokens))

    def check_invariants(self) -> None:
        held = [leg for leg in self.legs.values() if not leg.is_released]
        assert self.num_legs == len(held)
        assert self.num_sequences == sum(leg.num_sequences for leg in held)
        assert self.num_expected_blocks == sum(leg.num_blocks for leg in held)
        writing = [leg for leg in held if leg.half is Role.DECODE]
        assert self.num_writing == sum(leg.num_sequences for leg in writing)
        assert self.num_writing_blocks == sum(leg.num_blocks for leg in writing)
        assert 0 <= self.reading_share <= 1
        assert self.num_unread_tokens == sum(leg.num_unread_tokens for leg in held)
        assert self.num_unreported_tokens == sum(leg.num_unread_tokens for leg in held if leg.unreported)
        assert self.num_promised_blocks == max(self.num_expected_blocks, self.num_used_blocks)
        assert 0 <= self.backlog_tokens == min(self.num_unread_tokens, int(self.num_left_tokens))
        assert all(leg.worker == self.id for leg in self.legs.values())


class WorkerRegistry:
    """Registered lives by name, at most one a name, and for each name the newest life that was lost.

    `max_model_tokens` is the longest prompt and answer together that all of them, and the cluster file, take;
    `max_decode_blocks` is the size of the largest decode worker; None while unknown. `are_pools_whole`: there are
    prefill pools, and as many workers of either role as the cluster file has.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._by_name: dict[str, Worker] = {}
        self._by_role: dict[Role, list[Worker]] = {role: [] for role in Role}
        self._lost: dict[str, int] = {}
        self.max_model_tokens = config.model.max_model_tokens
        self.max_decode_blocks: int | None = None
        self.are_pools_whole = False

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, worker_id: WorkerId) -> Worker | None:
        """That life, if it is registered."""
        worker = self._by_name.get(worker_id.name)
        return worker if worker is not None and worker.id == worker_id else None

    def named(self, name: str) -> Worker | None:
        return self._by_name.get(name)

    def with_role(self, role: Role) -> Sequence[Worker]:
        """Those that may be given work, in order of registration; valid until one registers, retires or is lost."""
        return self._by_role[role]

    def all(self) -> tuple[Worker, ...]:
        """Ordered by name."""
        return tuple(self._by_name[name] for name in sorted(self._by_name))

    def is_lost(self, worker_id: WorkerId) -> bool:
        """Whether that life, or a later one of its name, has been lost."""
        return worker_id.incarnation <= self._lost.get(worker_id.name, -1)

    def refusal(self, hello: WorkerHello) -> str | None:
        """Why this worker may not register, with both sides' values; None if it may.

        A registered older life of the same name is no obstacle: the caller declares it lost.
        """
        life = hello.ref.worker
        if self.is_lost(life):
            return f"{life} was given up for lost; only a later life may register"
        present = self._by_name.get(life.name)
        if present is not None and present.id.incarnation > life.incarnation:
            return f"{life} is older than {present.id}, which is registered"
        if present is None and len(self._by_name) >= MAX_WORKERS:
            return f"{len(self._by_name)} workers are registered, which is the limit"
        return self._pool_refusal(hello) or self._layout_refusal(hello)

    def add(self, hello: WorkerHello, now_ns: int) -> Worker:
        """Registers a life that `refusal` accepts. No other life of its name may be registered."""
        pool = self._config.pool(hello.pool)
        assert pool is not None and hello.ref.worker.name not in self._by_name
        worker = Worker(hello=hello, pool=pool, load=hello.load, last_heard_ns=now_ns, load_heard_ns=now_ns)
        self._by_name[worker.id.name] = worker
        self._by_role[worker.role].append(worker)
        self._update_limits()
        return worker

    def retire(self, worker: Worker) -> None:
        """It is about to leave: from now on nothing is placed on it, and what it has goes on."""
        worker.is_leaving = True
        self._take_from_role(worker)

    def lose(self, worker_id: WorkerId) -> Worker | None:
        """Marks that life as lost for good and removes it. Returns it if it was registered."""
        newest = max(worker_id.incarnation, self._lost.pop(worker_id.name, -1))
        self._lost[worker_id.name] = newest
        if len(self._lost) > MAX_LOST_NAMES:
            del self._lost[next(iter(self._lost))]
        worker = self.get(worker_id)
        if worker is not None:
            del self._by_name[worker_id.name]
            self._take_from_role(worker)
        return worker

    def check_invariants(self) -> None:
        num_leaving = sum(worker.is_leaving for worker in self._by_name.values())
        assert len(self._by_name) == num_leaving + sum(len(workers) for workers in self._by_role.values())
        for name, worker in self._by_name.items():
            assert worker.id.name == name
            assert any(other is worker for other in self._by_role[worker.role]) is not worker.is_leaving
            assert not self.is_lost(worker.id) or self._lost[name] > worker.id.incarnation
            worker.check_invariants()

    def _take_from_role(self, worker: Worker) -> None:
        self._by_role[worker.role] = [other for other in self._by_role[worker.role] if other is not worker]
        self._update_limits()

    def _update_limits(self) -> None:
        """Workers come and go rarely, and requests ask often."""
        lengths = [worker.hello.max_model_tokens for worker in self._by_name.values()]
        if self._config.model.max_model_tokens is not None:
            lengths.append(self._config.model.max_model_tokens)
        self.max_model_tokens = min(lengths, default=None)
        decode = self._by_role[Role.DECODE]
        self.max_decode_blocks = max((worker.hello.load.blocks.total for worker in decode), default=None)
        self.are_pools_whole = all(1 <= self._num_replicas(role) <= len(self._by_role[role]) for role in Role)

    def _num_replicas(self, role: Role) -> int:
        return sum(pool.replicas for pool in self._config.pools if pool.role is role)

    def _pool_refusal(self, hello: WorkerHello) -> str | None:
        pool = self._config.pool(hello.pool)
        if pool is None:
            names = ", ".join(pool.name for pool in self._config.pools)
            return f"pool {hello.pool!r} is not in the cluster file, which has {names}"
        if pool.role is not hello.role:
            return f"the worker's role is {hello.role.value}, that of pool {pool.name!r} is {pool.role.value}"
        if hello.block_size != self._config.kv.block_size:
            return f"the worker's block size is {hello.block_size}, the cluster's is {self._config.kv.block_size}"
        return None

    def _layout_refusal(self, hello: WorkerHello) -> str | None:
        """Workers pair only if their KV means the same. The first one registered sets what that is."""
        others = (worker for worker in self._by_name.values() if worker.id.name != hello.ref.worker.name)
        other = next(others, None)
        if other is None or other.hello.compatibility == hello.compatibility:
            return None
        return (
            f"KV does not match: {hello.ref.worker} has {hello.compatibility} ({hello.compatibility_details}), "
            f"{other.id} has {other.hello.compatibility} ({other.hello.compatibility_details})"
        )
