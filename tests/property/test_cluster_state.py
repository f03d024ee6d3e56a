"""ClusterState among model workers and fronts, in any order of events that the streams allow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.drain_orders import AfterDrain, DrainOrder
from cluster.core.ids import Outcome, Role
from tests.support.coordinator_world import ModelFront, ModelWorker, World

NAMES = (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
PICK = st.integers(min_value=0, max_value=1_000)
MAX_LIVES = 14
MAX_REQUESTS = 20
MAX_DRAINS = 3
MAX_DEATHS = 3
"""Of workers; more would leave too little running for the rest of an example."""


class ClusterMachine(RuleBasedStateMachine):
    """Rules pick by number, so that any example is an interleaving; what cannot move at the moment is left alone."""

    world: World
    num_deaths = 0
    num_drains = 0

    @initialize(
        with_prefill=st.sampled_from((True, True, False)),
        is_up=st.sampled_from((True, True, False)),
        rules=st.sampled_from((ALWAYS_PUSHED, ALWAYS_PUSHED, DisaggregationConfig(max_local_tokens=20))),
    )
    def begin(self, with_prefill: bool, is_up: bool, rules: DisaggregationConfig) -> None:
        self.world = World(with_prefill=with_prefill, disaggregation=rules)
        self.names = NAMES if with_prefill else NAMES[2:]
        for name, role in self.names:
            self.world.start_worker(name, role)
        self.world.start_front("f")
        self.world.start_front("g")
        if is_up:
            self._let_all_arrive(1)

    def _worker(self, pick: int, *, able: str) -> ModelWorker | None:
        """One of the workers that have something in that attribute."""
        workers = [worker for worker in self.world.workers.values() if getattr(worker, able)]
        return workers[pick % len(workers)] if workers else None

    def _front(self, pick: int, *, able: str = "id") -> ModelFront | None:
        fronts = [front for front in self.world.fronts.values() if getattr(front, able)]
        return fronts[pick % len(fronts)] if fronts else None

    # ---- messages move ----

    @rule(pick=PICK, choice=PICK)
    def a_command_arrives(self, pick: int, choice: int) -> None:
        worker = self._worker(pick, able="inbox")
        if worker is not None:
            self.world.deliver_command(worker, choice)

    @rule(pick=PICK)
    def a_report_arrives(self, pick: int) -> None:
        worker = self._worker(pick, able="outbox")
        if worker is not None:
            self.world.deliver_report(worker)

    @rule(pick=PICK)
    def a_front_hears(self, pick: int) -> None:
        front = self._front(pick, able="inbox")
        if front is not None:
            self.world.deliver_to_front(front)

    @rule(pick=PICK)
    def a_front_is_heard(self, pick: int) -> None:
        front = self._front(pick, able="outbox")
        if front is not None:
            self.world.deliver_from_front(front)

    @rule(choices=st.lists(PICK, min_size=1, max_size=8))
    def everything_arrives(self, choices: list[int]) -> None:
        """Reaches later phases more often than single steps would."""
        self._let_all_arrive(*choices)

    def _let_all_arrive(self, *choices: int) -> None:
        for choice in choices:
            for worker in tuple(self.world.workers.values()):
                while worker.outbox and worker.id in self.world.workers:
                    self.world.deliver_report(worker)
                if worker.inbox and worker.id in self.world.workers:
                    self.world.deliver_command(worker, choice)
            for front in tuple(self.world.fronts.values()):
                while front.outbox:
                    self.world.deliver_from_front(front)
                while front.inbox:
                    self.world.deliver_to_front(front)

    # ---- somebody acts ----

    @rule(pick=PICK, leg=PICK, choice=PICK)
    def a_leg_moves_on(self, pick: int, leg: int, choice: int) -> None:
        worker = self._worker(pick, able="legs")
        if worker is not None:
            attempts = tuple(worker.legs)
            worker.act(attempts[leg % len(attempts)], choice, self.world)

    @precondition(lambda self: self.world.num_requests < MAX_REQUESTS)
    @rule(
        pick=PICK,
        num_prompt_tokens=st.integers(min_value=1, max_value=150),
        deadline_ms=st.none() | st.integers(min_value=0, max_value=3_000),
        priority=st.integers(min_value=-1, max_value=1),
        num_choices=st.sampled_from([1, 1, 2, 9]),
        num_rounds=st.integers(min_value=0, max_value=3),
    )
    def a_request_is_submitted(
        self,
        pick: int,
        num_prompt_tokens: int,
        deadline_ms: int | None,
        priority: int,
        num_choices: int,
        num_rounds: int,
    ) -> None:
        front = self._front(pick)
        if front is not None:
            self.world.submit(front.id, num_prompt_tokens, deadline_ms, priority, num_choices)
            self._let_all_arrive(*[1] * num_rounds)

    @rule(pick=PICK, request=PICK)
    def a_client_leaves(self, pick: int, request: int) -> None:
        front = self._front(pick, able="outcomes")
        if front is not None and front.live():
            front.end(front.live()[request % len(front.live())], Outcome.CANCELLED)

    @rule(pick=PICK, request=PICK)
    def a_front_reads_the_last_token(self, pick: int, request: int) -> None:
        front = self._front(pick, able="outcomes")
        if front is not None and front.live():
            self.world.read_finish(front, front.live()[request % len(front.live())])

    @rule(pick=PICK, request=PICK, worker=PICK)
    def a_token_stream_breaks(self, pick: int, request: int, worker: int) -> None:
        front = self._front(pick, able="outcomes")
        if front is not None and front.live() and self.world.workers:
            workers = tuple(self.world.workers)
            request_id = front.live()[request % len(front.live())]
            self.world.break_stream(front, request_id, workers[worker % len(workers)])

    # ---- bad days ----

    @precondition(lambda self: self.num_deaths < MAX_DEATHS)
    @rule(pick=PICK)
    def a_worker_dies(self, pick: int) -> None:
        worker = self._worker(pick, able="legs") or self._worker(pick, able="id")
        if worker is not None:
            self.num_deaths += 1
            self.world.kill_worker(worker.id)

    @precondition(lambda self: self.world.num_lives < MAX_LIVES)
    @rule(pick=PICK)
    def a_worker_starts(self, pick: int) -> None:
        self.world.start_worker(*self.names[pick % len(self.names)])

    @precondition(lambda self: self.world.num_lives < MAX_LIVES)
    @rule(pick=PICK)
    def a_front_dies_and_another_starts(self, pick: int) -> None:
        front = self._front(pick)
        assert front is not None
        self.world.kill_front(front.id)
        self.world.start_front(front.id.name)

    @precondition(lambda self: self.num_drains < MAX_DRAINS)
    @rule(
        pick=PICK,
        then=st.sampled_from(AfterDrain),
        migrate=st.booleans(),
        deadline_ms=st.none() | st.sampled_from((10, 5_000)),
        force=st.booleans(),
    )
    def a_worker_is_drained(
        self, pick: int, then: AfterDrain, migrate: bool, deadline_ms: int | None, force: bool
    ) -> None:
        worker = self._worker(pick, able="legs") or self._worker(pick, able="id")
        if worker is not None:
            self.num_drains += 1
            order = DrainOrder(worker=worker.id.name, then=then, migrate=migrate, deadline_ms=deadline_ms)
            self.world.order_drain(order, force=force)

    @rule(duration_ms=st.sampled_from((1, 50, 1_000, 9_000, 31_000)))
    def time_passes(self, duration_ms: int) -> None:
        self.world.pass_time(duration_ms)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.assert_at_rest()
            self.world.replay()


ClusterMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestClusterState = ClusterMachine.TestCase
