"""One simulated cluster: its processes, who starts them again, its clients and its faults."""

from __future__ import annotations

from cluster.agent.limits import WorkerStateConfig
from cluster.agent.state import WorkerState
from cluster.core.drain_orders import AfterDrain, DrainOrder, Leave
from cluster.core.ids import Role, WorkerId
from cluster.core.state import ClusterState
from cluster.front.request import FrontRequest, Phase
from cluster.front.request_spec import RequestSpec
from cluster.sim.client import Client
from cluster.sim.coordinator_node import CoordinatorNode
from cluster.sim.fabric import Fabric
from cluster.sim.faults import FaultInjector
from cluster.sim.front_node import FrontNode
from cluster.sim.kernel import MILLISECOND_NS, Kernel
from cluster.sim.network import Network
from cluster.sim.process import Process
from cluster.sim.scenario import Request, Scenario
from cluster.sim.shape import MODEL_FINGERPRINT, cluster_config, role_of, worker_config
from cluster.sim.trace import Trace
from cluster.sim.worker_node import WorkerNode
from engine.core.block_hash import extra_key, hash_blocks
from engine.core.request import RequestBody, Sibling

MAX_EVENTS = 200_000
MAX_CLOCK_OFFSET_NS = 10**12
MAX_KILL_DELAY_NS = 300 * MILLISECOND_NS
COORDINATOR = "coordinator"


class World:
    """Everything of one history.

    `check_every`: invariants are checked after every so-many-th event of a machine. `max_events`: bring it to rest.
    """

    def __init__(self, scenario: Scenario, *, trace: Trace, check_every: int, max_events: int = MAX_EVENTS) -> None:
        self.scenario = scenario
        self.kernel = Kernel(scenario.seed, max_events=max_events, trace=trace)
        self.network = Network(self.kernel)
        self.fabric = Fabric(self.kernel, self.network, scenario.family, ns_per_byte=scenario.link_ns_per_byte)
        self.clients: list[Client] = []
        self.all_workers: list[WorkerNode] = []
        """Every life of every worker, in order of start."""
        self.num_given_up = 0
        self.num_late_copies = 0
        """Blocks that were written after their receiver had given them up: what quarantine is for."""
        self.num_partial_copies = 0
        """Of some layers of a block alone."""
        self.num_coordinator_deaths = 0
        self.interrupted: list[tuple[FrontRequest, int]] = []
        """At each death of the coordinator, each request that ran, with its attempt."""
        self._random = self.kernel.stream("world")
        self._check_every = check_every
        self._num_handled = 0
        self.retired: dict[str, None] = {}
        """Workers that were drained and are not started again."""
        self.num_drains = 0
        """Orders that a coordinator has taken."""
        self.num_left = 0
        """Lives that ended because they had been drained."""
        self._roles = {name: role_of(scenario, name) for name in scenario.worker_names}
        self._incarnations: dict[str, int] = {}
        self._held_down_until_ns: dict[str, int] = {}
        self._workers: dict[str, WorkerNode] = {}
        self._fronts: dict[str, FrontNode] = {}
        self.coordinator = self._start_coordinator()
        for name in scenario.front_names:
            self._start_front(name)
        for name in scenario.worker_names:
            self._start_worker(name)
        for request in scenario.requests:
            self.kernel.at(request.arrival_ns, lambda request=request: self.submit(request))  # type: ignore[misc]
        FaultInjector(self, scenario.faults)

    # ---- processes --------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process | None:
        if name == self.coordinator.process.name:
            return self.coordinator.process if self.coordinator.process.alive else None
        node = self._workers.get(name) or self._fronts[name]
        return node.process if node.process.alive else None

    def worker(self, name: str) -> WorkerNode | None:
        node = self._workers[name]
        return node if node.process.alive else None

    def front(self, name: str) -> FrontNode | None:
        node = self._fronts[name]
        return node if node.process.alive else None

    @property
    def fronts(self) -> list[FrontNode]:
        return list(self._fronts.values())

    def hold_down(self, name: str, until_ns: int) -> None:
        self._held_down_until_ns[name] = max(until_ns, self._held_down_until_ns.get(name, 0))

    def start_twin(self, name: str) -> None:
        if name not in self.retired:
            self._start_worker(name)

    def drain(self, order: DrainOrder, *, force: bool) -> None:
        def call() -> None:
            self.num_drains += node.drain(order, force=force)

        node = self.coordinator
        node.process.deliver(call)

    def stop_faults(self) -> None:
        """What has no end of its own ends now."""
        self.fabric.faults.clear()
        for node in self.all_workers:
            node.faults.num_steps_to_fail = 0
            node.faults.is_stuck = False

    def _new_process(self, name: str) -> Process:
        incarnation = self._incarnations.get(name, 0) + 1
        self._incarnations[name] = incarnation
        return Process(self.kernel, name, incarnation, self._random.randrange(MAX_CLOCK_OFFSET_NS))

    def _start_coordinator(self) -> CoordinatorNode:
        process = self._new_process(COORDINATOR)
        process.on_exit(lambda _reason: self._coordinator_died(process))
        state = ClusterState(cluster_config(self.scenario), epoch=process.incarnation)
        return CoordinatorNode(
            process, self.network, state, end_worker=self._end_worker_later, after_event=self._after_event
        )

    def _coordinator_died(self, process: Process) -> None:
        self.num_coordinator_deaths += 1
        for node in self.fronts:
            if node.process.alive:
                running = [request for request in node.requests if request.phase is Phase.RUNNING]
                self.interrupted += [(request, request.attempt) for request in running]
        self._restart_later(COORDINATOR, process)

    def _start_front(self, name: str) -> None:
        process = self._new_process(name)
        process.on_exit(lambda _reason: self._restart_later(name, process))
        limits = self.scenario.request_limits
        self._fronts[name] = FrontNode(process, self.network, limits, after_event=self._after_event)

    def _start_worker(self, name: str) -> None:
        process = self._new_process(name)
        process.on_exit(lambda _reason: self._restart_later(name, process))
        worker = WorkerId(name, process.incarnation)
        is_twin = name in self._workers and self._workers[name].process.alive
        address = f"{name}:tokens" if self.scenario.same_address and not is_twin else f"{worker}:tokens"
        config = worker_config(self.scenario, worker, role=self._roles[name], token_address=address)
        self._workers[name] = self._make_worker(process, config)

    def add_stranger(self, config: WorkerStateConfig) -> WorkerNode:
        """Starts a worker that does not belong to the scenario and that nobody starts again."""
        worker = config.hello.ref.worker
        return self._make_worker(Process(self.kernel, worker.name, worker.incarnation), config)

    def _make_worker(self, process: Process, config: WorkerStateConfig) -> WorkerNode:
        node = WorkerNode(
            process,
            self.network,
            self.fabric,
            config,
            cost=self.scenario.cost,
            num_variants=self.scenario.num_variants,
            poisons={each.request_id: each.poison for each in self.scenario.requests if each.poison is not None},
            random=self.kernel.stream(str(process)),
            after_event=self._after_event,
            on_leave=lambda leave: self._left(process, leave),
        )
        self.all_workers.append(node)
        return node

    def _left(self, process: Process, leave: Leave) -> None:
        """A drained worker ends, and tells its supervisor what is to follow."""
        self.num_left += 1
        if self._incarnations[process.name] != process.incarnation:
            return
        if leave.then is AfterDrain.STOP:
            self.retired[process.name] = None
        else:
            self._roles[process.name] = Role(leave.pool)  # pools are named after their roles

    def _restart_later(self, name: str, process: Process) -> None:
        """A supervisor starts the next life, unless there is a newer one already."""

        def restart() -> None:
            if self._incarnations[name] != process.incarnation or name in self.retired:
                return
            if name == COORDINATOR:
                self.coordinator = self._start_coordinator()
            elif name in self._fronts:
                self._start_front(name)
            else:
                self._start_worker(name)

        earliest_ns = self.kernel.now_ns + self.scenario.restart_ns
        self.kernel.at(max(earliest_ns, self._held_down_until_ns.get(name, 0)), restart)

    def _end_worker_later(self, worker: WorkerId) -> None:
        """The coordinator gave that life up: its process is killed, if the coordinator's host can reach it."""
        self.num_given_up += 1
        node = next(node for node in self.all_workers if node.worker == worker)

        def kill() -> None:
            is_reachable = self.coordinator.process.alive and not self.network.is_partitioned(worker.name, COORDINATOR)
            if self.scenario.can_kill and is_reachable:
                node.process.exit("given up by the coordinator")

        self.kernel.after(int(self._random.random() * MAX_KILL_DELAY_NS), kill)

    # ---- clients ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """The client calls its front; a dead front refuses the connection."""
        name = f"f{request.front}"
        client = Client(request, self.scenario, lambda: self.kernel.now_ns)
        self.clients.append(client)
        node = self.front(name)
        if node is None:
            client.on_unavailable()
            return
        if request.leave_ns is not None:
            self.kernel.after(request.leave_ns, lambda: self._leave(client, node))
        if request.leave_after_tokens is not None:
            client.on_token = lambda count: self._leave_after(client, node, count)
        node.process.on_exit(lambda _reason: client.on_unavailable())
        node.process.deliver(lambda: node.submit(self._spec(request, node.process), client))

    def _spec(self, request: Request, process: Process) -> RequestSpec:
        """What the front's shell makes of the call: the validated, hashed request on its own clock."""
        extra = extra_key(MODEL_FINGERPRINT, "", request.cache_salt)
        return RequestSpec(
            request_id=request.request_id,
            body=RequestBody(
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                siblings=tuple(Sibling(choice=choice) for choice in range(1, request.num_choices)),
                cache_salt=request.cache_salt,
                priority=request.priority,
            ),
            block_hashes=b"".join(hash_blocks(request.prompt_ids, self.scenario.block_size, extra)),
            block_size=self.scenario.block_size,
            extra_key=extra,
            tenant=request.tenant,
            deadline_ns=None if request.deadline_ns is None else process.now_ns() + request.deadline_ns,
            max_latency_ms=request.max_latency_ms,
            has_stop_strings=request.stop_pair is not None,
        )

    def _leave_after(self, client: Client, node: FrontNode, num_tokens: int) -> None:
        wanted = client.request.leave_after_tokens
        if wanted is not None and num_tokens >= wanted:
            self.kernel.after(0, lambda: self._leave(client, node))

    def _leave(self, client: Client, node: FrontNode) -> None:
        if client.has_ended or client.has_left:
            return
        client.has_left = True
        node.process.deliver(lambda: node.hang_up(client.request.request_id))

    # ---- checks -----------------------------------------------------------------------------------------------

    def _after_event(self, machine: ClusterState | WorkerState | FrontRequest) -> None:
        self._num_handled += 1
        if self._num_handled % self._check_every == 0:
            machine.check_invariants()

    def check_invariants(self) -> None:
        """Of every machine that lives."""
        if self.coordinator.process.alive:
            self.coordinator.state.check_invariants()
        for node in self.all_workers:
            if node.process.alive:
                node.state.check_invariants()
