"""A worker's process in the simulator: feeds WorkerState and carries out its effects on simulated streams, transport
and engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from cluster.agent import effects, events
from cluster.agent.limits import WorkerStateConfig
from cluster.agent.state import WorkerState
from cluster.core.brief import brief
from cluster.core.commands import Command, CommandBody, Prefill, Reserve, RunLocal
from cluster.core.drain_orders import Leave
from cluster.core.ids import FrontId, WorkerId
from cluster.core.token_messages import StreamHello, TokenBatch, TokenRequest
from cluster.sim.client import Violation
from cluster.sim.coordinator_node import ADDRESS, Envelope
from cluster.sim.engine_model import StepCost, StepRun
from cluster.sim.fabric import Fabric
from cluster.sim.kernel import MILLISECOND_NS
from cluster.sim.kv_memory import KVMemory, checksum
from cluster.sim.network import Network, StreamEnd
from cluster.sim.process import Alarm, Process
from cluster.sim.push_bridge import PushBridge
from cluster.sim.scenario import Poison, PoisonKind
from engine.core.disk_tier import DiskResult, DiskWork
from engine.core.step import StepPlan
from kv_transfer.protocol.ranks import bad_blocks

RECONNECT_DELAY_NS = 200 * MILLISECOND_NS
MAX_VERIFY_NS = 2 * MILLISECOND_NS
MAX_DISK_NS = 60 * MILLISECOND_NS
"""What one piece of work with files takes at most: two of them take longer than a prompt waits."""
DISK_FAILURE_SHARE = 0.1
RUBBISH_FILE = b""
"""Read into a slot, it would make the block's bytes disappear."""


@dataclass(slots=True)
class EngineFaults:
    """What is wrong with a worker's engine at the moment."""

    slowness: float = 1.0
    num_steps_to_fail: int = 0
    is_stuck: bool = False


class WorkerNode:
    """One life of a worker."""

    def __init__(
        self,
        process: Process,
        network: Network,
        fabric: Fabric,
        config: WorkerStateConfig,
        *,
        cost: StepCost,
        num_variants: int,
        poisons: Mapping[str, Poison],
        random: Random,
        after_event: Callable[[WorkerState], None],
        on_leave: Callable[[Leave], None],
    ) -> None:
        self.process = process
        self.worker: WorkerId = config.hello.ref.worker
        self.state = WorkerState(config, process.now_ns())
        self.faults = EngineFaults()
        self.busy_ns = 0
        """What its steps have taken."""
        self.num_computed_tokens = 0
        """In all of its steps."""
        rubbish = random.getrandbits(60)
        self.memory = KVMemory(
            config.num_blocks, config.hello.block_size, rubbish, config.num_layers, config.num_host_blocks
        )
        self._files: dict[bytes, bytes] = {}
        self._disk_free_ns = 0
        self._answers: set[str] = set()
        self._network = network
        self._cost = cost
        self._num_variants = num_variants
        self._poisons = poisons
        self._random = random
        self._after_event = after_event
        self._on_leave = on_leave
        self.bridge = PushBridge(fabric, process, self.worker, self.memory, handle=self.handle)
        self._coordinator: StreamEnd | None = None
        self._fronts: dict[FrontId, StreamEnd] = {}
        self._alarm = Alarm(process, lambda: self.handle(events.Tick()))
        network.listen(config.hello.ref.token_address, process, self._accept_front)
        self._dial_coordinator()

    # ---- control stream ---------------------------------------------------------------------------------------

    def _dial_coordinator(self) -> None:
        self._network.dial(self.process, ADDRESS, self._coordinator_opened, self._coordinator_failed)

    def _coordinator_opened(self, stream: StreamEnd) -> None:
        self._coordinator = stream
        stream.on_message = self._commanded
        stream.on_closed = self._coordinator_failed
        self.handle(events.CoordinatorConnected())

    def _commanded(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Command)
        self._judge(envelope.message.body)
        self.handle(events.CommandReceived(command=envelope.message, body=envelope.body))

    def _judge(self, command: CommandBody) -> None:
        """Nothing new comes to a worker that is being drained. Of an answer that it had it may have to push what it has
        to its successor."""
        if not isinstance(command, Reserve | RunLocal | Prefill):
            return
        request_id = command.attempt.request_id
        is_push = isinstance(command, Prefill) and request_id in self._answers
        if self.state.is_draining and not is_push:
            raise Violation(f"{self.worker} is being drained and was told {brief(command)}")
        if not isinstance(command, Prefill):
            self._answers.add(request_id)

    def _coordinator_failed(self, _reason: str) -> None:
        self._coordinator = None
        self.process.after(RECONNECT_DELAY_NS, self._dial_coordinator)
        self.handle(events.CoordinatorLost())

    # ---- token streams ----------------------------------------------------------------------------------------

    def _accept_front(self, stream: StreamEnd) -> None:
        def on_hello(hello: StreamHello) -> None:
            front = hello.front
            older = self._fronts.get(front)
            if older is not None:
                older.close()
            self._fronts[front] = stream
            stream.on_message = lambda request: self._front_asked(front, request)
            stream.on_closed = lambda _reason: self._front_left(front, stream)
            self.handle(events.FrontConnected(front=front))

        stream.on_message = on_hello

    def _front_asked(self, front: FrontId, request: TokenRequest) -> None:
        assert not isinstance(request, StreamHello)
        self.handle(events.TokenRequestReceived(front=front, request=request))

    def _front_left(self, front: FrontId, stream: StreamEnd) -> None:
        if self._fronts.get(front) is stream:
            del self._fronts[front]
            self.handle(events.FrontDisconnected(front=front))

    def _send_runs(self, effect: effects.SendRuns) -> None:
        stream, front = self._fronts[effect.front], effect.front

        def taken() -> None:
            if self._fronts.get(front) is stream:
                self.handle(events.RunsWritten(front=front))

        stream.send(TokenBatch(worker=self.worker, runs=effect.runs), taken)

    # ---- engine -----------------------------------------------------------------------------------------------

    def _run_step(self, effect: effects.RunStep) -> None:
        """The pool is read and written at the step's end or, as often, at its start: either may happen. Where somebody
        waits for layers, they are written one group after the other. A step may fail anywhere among them."""
        plan, marks = effect.plan, effect.layer_marks
        duration_ns = int(self._cost.duration_ns(plan) * self.faults.slowness * (0.9 + 0.2 * self._random.random()))
        self.busy_ns += duration_ns
        self.num_computed_tokens += plan.num_tokens
        struck = self._struck(plan)
        unusable = frozenset(index for index, kind in struck.items() if kind is PoisonKind.NOT_FINITE)
        run = StepRun(plan, self.memory, self._random.randrange(self._num_variants), unusable)
        kinds = struck.values()
        if PoisonKind.CRASH in kinds:
            self.process.after(int(duration_ns * self._random.random()), lambda: self.process.exit("poisoned"))
        if self.faults.is_stuck or PoisonKind.STUCK in kinds:
            return
        fails = self.faults.num_steps_to_fail > 0 or PoisonKind.RAISE in kinds
        if fails:
            self.faults.num_steps_to_fail = max(0, self.faults.num_steps_to_fail - 1)
            marks = marks[: self._random.randrange(len(marks) + 1)]
        if self._random.random() < 0.5:
            run.compute()
            if not marks:
                run.finish()
        for mark in marks:
            self.process.after(duration_ns * mark // (self.memory.num_layers + 1), self._writing(run, plan, mark))
        if fails:
            self.process.after(duration_ns, lambda: self.handle(events.StepFailed(reason="injected failure")))
        else:
            self.process.after(duration_ns, lambda: self._step_done(run, duration_ns))

    def _struck(self, plan: StepPlan) -> dict[int, PoisonKind]:
        """What the poison requests in the step do, by their index in the plan."""
        struck = {}
        for index, step in enumerate(plan.sequences):
            poison = self._poisons.get(step.key.request_id) if self._poisons else None
            if poison is None:
                continue
            end = step.start + len(step.token_ids)
            # What is not finite stays so; the rest is a matter of one token.
            if end >= poison.num_tokens and (step.start < poison.num_tokens or poison.kind is PoisonKind.NOT_FINITE):
                struck[index] = poison.kind
        return struck

    def _writing(self, run: StepRun, plan: StepPlan, num_layers: int) -> Callable[[], None]:
        def write() -> None:
            run.write_layers(num_layers)
            self.handle(events.LayersWritten(step_id=plan.step_id, num_layers=num_layers))

        return write

    def _step_done(self, run: StepRun, duration_ns: int) -> None:
        self.handle(events.StepDone(result=run.finish(), duration_ns=duration_ns))

    def _verify(self, effect: effects.VerifyBlocks) -> None:
        """A verifier thread sums the blocks as they are when it gets to them."""

        def sum_blocks() -> None:
            sums = [checksum(self.memory.block(block_id, effect.layers)) for block_id in effect.block_ids]
            bad = bad_blocks(effect.block_ids, sums, effect.checksums)
            self.handle(events.Verified(key=effect.key, chunk=effect.chunk, bad_block_ids=bad))

        self.process.after(int(self._random.random() * MAX_VERIFY_NS), sum_blocks)

    def _do_disk_work(self, work: DiskWork) -> None:
        """After earlier work. Now and then a file cannot be read, or not be written."""
        self._disk_free_ns = max(self._disk_free_ns, self.process.now_ns()) + int(self._random.random() * MAX_DISK_NS)

        def do() -> None:
            failed = [b.block_hash for b in (*work.reads, *work.writes) if self._random.random() < DISK_FAILURE_SHARE]
            for block in work.reads:
                content = self._files.get(block.block_hash, RUBBISH_FILE)
                self.memory.put_host_block(block.slot, RUBBISH_FILE if block.block_hash in failed else content)
            for block_hash in (*work.deletions, *failed):
                self._files.pop(block_hash, None)
            for block in work.writes:
                if block.block_hash not in failed:
                    self._files[block.block_hash] = self.memory.host_block(block.slot)
            self.handle(events.DiskWorkDone(result=DiskResult(work=work, failed=frozenset(failed))))

        self.process.after(self._disk_free_ns - self.process.now_ns(), do)

    def leave(self) -> None:
        """SIGTERM."""
        self.process.deliver(lambda: self.handle(events.LeaveRequested()))

    # ---- the state machine ------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        for effect in self.state.handle(self.process.now_ns(), event):
            self._carry_out(effect)
            if not self.process.alive:
                return
        self._alarm.set(self.state.next_deadline_ns())
        self._after_event(self.state)

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.RunStep():
                self._run_step(effect)
            case effects.DoDiskWork():
                self._do_disk_work(effect.work)
            case effects.CopyBlocks():
                self.memory.copy(effect.copies)
            case effects.SendRuns():
                self._send_runs(effect)
            case effects.ToCoordinator():
                if self._coordinator is not None:
                    self._coordinator.send(Envelope(message=effect.message))
            case effects.VerifyBlocks():
                self._verify(effect)
            case effects.Shutdown():
                self.bridge.close()
                if effect.leave is not None:
                    self._on_leave(effect.leave)
                self.process.exit(f"shut down: {effect.reason}")
            case _:
                self.bridge.carry_out(effect)
