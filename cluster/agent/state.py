"""WorkerState: one worker's side of everything that can happen between processes, as a pure state machine.

`handle(now_ns, event) -> effects` is its only mutator. It composes the scheduler and block pool (through Stepper),
both halves of the push protocol (Pushes), the token records (Outbox), the coordinator's link and the legs; LegControl
holds the rules by which they change together. The simulator and the live worker run the same object.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.agent import events as ev
from cluster.agent.block_reports import BlockReporter
from cluster.agent.disk_waits import DiskWaits
from cluster.agent.effects import CopyBlocks, DoDiskWork, Effect, RefuseFront, RunStep, Shutdown, ToCoordinator
from cluster.agent.inventory import inventory_of
from cluster.agent.leg_control import LegControl
from cluster.agent.legs import LegTable, push_key_of
from cluster.agent.limits import Work, WorkerStateConfig
from cluster.agent.link import CoordinatorLink
from cluster.agent.outbox import Outbox
from cluster.agent.peer_links import PeerLinks
from cluster.agent.pushes import Pushes
from cluster.agent.stepper import Stepper
from cluster.core.commands import (
    CancelLeg,
    CommandBody,
    PeerLost,
    Prefill,
    Reserve,
    RunLocal,
    SendBlockSnapshot,
    SenderStopped,
    WorkerRefused,
    WorkerWelcome,
)
from cluster.core.drain_orders import DrainOrder, Leave, StartDrain, WorkerLeft
from cluster.core.ids import FrontId, Outcome
from cluster.core.limits import NS_PER_MS, NS_PER_S
from cluster.core.messages import BlockCounts, Heartbeat, ReserveRefused, WorkerHello, WorkerLoad, WorkerMessage
from cluster.core.reports import LinkReport
from cluster.core.token_messages import Forget
from engine.core.block_pool import BlockPool
from engine.core.lower_tiers import LowerTiers
from engine.core.request import RequestBody
from engine.core.scheduler import Scheduler
from kv_transfer.protocol.messages import PushKey


class WorkerState:
    """See the module docstring."""

    def __init__(self, config: WorkerStateConfig, now_ns: int) -> None:
        """Raises ValueError if the pool cannot hold one sequence of the model's full length."""
        self._config = config
        limits = config.limits
        self._pool = BlockPool(
            config.num_blocks,
            max_reserved_blocks=config.max_reserved_blocks,
            lower_tiers=LowerTiers(config.num_host_blocks, config.num_disk_blocks, config.on_disk),
        )
        self._stepper = Stepper(Scheduler(config.scheduler, self._pool), config.scheduler.block_size)
        self._pushes = Pushes(
            self._pool,
            config.push_limits,
            checksums=config.checksums,
            block_size_bytes=config.hello.block_size_bytes,
            num_layers=config.num_layers,
        )
        self._block_reporter = BlockReporter(
            self._pool,
            interval_ns=limits.block_events_interval_ns,
            max_hashes=limits.max_hashes_per_block_events,
        )
        self._outbox = Outbox(limits)
        self._legs = LegTable(limits.max_cancelled_attempts)
        self._links = PeerLinks()
        self._disk_waits = DiskWaits(self._pool, self._stepper.scheduler, max_wait_ns=limits.max_disk_wait_ns)
        self._control = LegControl(
            config,
            pool=self._pool,
            stepper=self._stepper,
            pushes=self._pushes,
            outbox=self._outbox,
            legs=self._legs,
            links=self._links,
            disk_waits=self._disk_waits,
        )
        self._link = CoordinatorLink(config.hello.ref.worker, grace_ns=limits.coordinator_grace_ns, now_ns=now_ns)
        self._reports: list[WorkerMessage] = []
        self._refused_fronts: list[FrontId] = []
        self._step_began_ns: int | None = None
        self._step_due_ns: int | None = None
        self._shutdown_reason: str | None = None
        self._drain: DrainOrder | None = None
        self._drain_told_ns = now_ns
        self._leave: Leave | None = None
        self._leave_asked_ns: int | None = None
        self._last_needed_ns = now_ns
        """Of a worker that has been asked to leave: when it was, or when it last had a push."""

    # ---- the machine -----------------------------------------------------------------------------------------

    def handle(self, now_ns: int, event: ev.Event) -> list[Effect]:
        """Takes in one event and returns what is to be done, in order. After a Shutdown nothing more is done."""
        if self._shutdown_reason is not None:
            return []
        self._dispatch(now_ns, event)
        self._control.settle(now_ns)
        if self._shutdown_reason is not None:
            return [Shutdown(reason=self._shutdown_reason)]
        effects = self._collect(now_ns)
        if self._may_leave(now_ns):
            self._shutdown_reason = "asked to stop"
            if self._leave is not None and self._link.is_connected:
                effects.append(ToCoordinator(message=WorkerLeft()))
            effects.append(Shutdown(reason=self._shutdown_reason, leave=self._leave))
        return effects

    def next_deadline_ns(self) -> int | None:
        """When a Tick is due at the latest; None while nothing is timed."""
        deadlines = (
            self._link.next_deadline_ns(),
            self._pushes.next_deadline_ns(),
            self._outbox.next_deadline_ns(),
            self._disk_waits.next_deadline_ns(),
            self._control.fetches.next_deadline_ns(),
            self._block_reporter.next_deadline_ns() if self._link.is_registered else None,
            self._step_due_ns,
            self._leave_due_ns(),
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def load(self) -> WorkerLoad:
        scheduler, costs, counts = self._stepper.scheduler, self._stepper.costs, self._pool.counts()
        prefix = self._pool.prefix_counters()
        return WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_prefill_tokens=scheduler.waiting_prefill_tokens,
            num_steps=costs.num_steps,
            step_ms_per_token=costs.prefill_token_ms,
            decode_base_ms=costs.decode_base_ms,
            decode_context_token_ms=costs.context_token_ms,
            blocks=BlockCounts(
                total=counts.total,
                free=counts.free,
                active=counts.active,
                cached=counts.cached,
                reserved=counts.reserved,
                quarantined=counts.quarantined,
            ),
            prefix_query_tokens=prefix.num_query_tokens,
            prefix_hit_tokens=prefix.num_hit_tokens,
            chunk_token_ms=costs.chunk_token_ms,
            reading_ms=costs.reading_ms,
        )

    def links(self) -> tuple[LinkReport, ...]:
        """What this worker writes over, by peer."""
        return self._links.reports()

    @property
    def pool(self) -> BlockPool:
        """To look at (the simulator and tests do); only WorkerState changes it."""
        return self._pool

    @property
    def is_registered(self) -> bool:
        """Whether the coordinator has welcomed this worker on its present stream."""
        return self._link.is_registered

    @property
    def is_draining(self) -> bool:
        """Whether a coordinator has told it that nothing new will come."""
        return self._drain is not None

    def is_receiving(self, key: PushKey) -> bool:
        """Whether that push goes on here: nobody else may write to its blocks, and it has not been given up."""
        return self._pushes.is_receiving(key)

    def num_fetched_blocks(self) -> int:
        """Of prefixes, that other workers have pushed here since the start."""
        return self._control.fetches.num_fetched_blocks

    def num_legs(self) -> int:
        """Attempts of which anything is held or computed here."""
        return len(self._legs)

    def num_token_records(self) -> int:
        return self._outbox.num_records()

    def num_early_watches(self) -> int:
        """Watches of attempts that have not come (yet)."""
        return self._outbox.num_early_watches()

    def check_invariants(self) -> None:
        self._stepper.check_invariants()
        self._pushes.check_invariants()
        self._outbox.check_invariants()
        self._legs.check_invariants()
        self._control.check_invariants()
        self._disk_waits.check_invariants()
        self._link.check_invariants()

    # ---- inside ----------------------------------------------------------------------------------------------

    def _collect(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        copies = self._pool.take_copies()
        if copies:
            effects.append(CopyBlocks(copies=copies))
        disk_work = self._pool.take_disk_work()
        if disk_work is not None:
            effects.append(DoDiskWork(work=disk_work))
        self._disk_waits.settle(now_ns)
        plan = self._stepper.next_plan(self._control.step_limit_ms())
        if plan is not None:
            layer_marks = self._control.step_started(now_ns, plan)
            self._step_began_ns = now_ns
            self._step_due_ns = now_ns + self._config.limits.max_step_ns
            effects.append(RunStep(plan=plan, layer_marks=layer_marks))
        effects += self._pushes.take_effects()
        effects += self._outbox.flush()
        effects += [RefuseFront(front=front) for front in self._refused_fronts]
        self._refused_fronts = []
        messages = self._reports + self._control.take_messages()
        self._reports = []
        if self._link.is_registered and (block_events := self._block_reporter.take(now_ns)) is not None:
            messages.append(block_events)
        if self._link.is_connected:
            effects += [ToCoordinator(message=message) for message in messages]
        return effects

    def _dispatch(self, now_ns: int, event: ev.Event) -> None:
        match event:
            case ev.LayersWritten(step_id=step_id, num_layers=num_layers):
                assert self._stepper.is_running(step_id), f"step {step_id} is over"
                self._control.layers_written(now_ns, num_layers)
            case ev.StepDone(result=result, duration_ns=duration_ns):
                self._step_due_ns = self._step_began_ns = None
                self._control.step_done(now_ns, self._stepper.done(result, duration_ns))
                self._judge_engine()
            case ev.StepFailed(reason=reason):
                self._step_due_ns = self._step_began_ns = None
                self._on_step_failed(now_ns, reason)
            case ev.DiskWorkDone(result=result):
                self._pool.disk_done(result)
            case ev.CommandReceived(command=command, body=body):
                if self._link.accepts(command):
                    self._on_command(now_ns, command.body, body)
            case ev.CoordinatorConnected():
                self._link.connected()
                self._reports.append(self._hello(now_ns))
            case ev.LeaveRequested():
                self._on_leave_requested(now_ns)
            case ev.CoordinatorLost():
                self._link.lost(now_ns)
            case ev.FrontConnected(front=front):
                if not self._outbox.connect(front):
                    self._refused_fronts.append(front)
            case ev.FrontDisconnected(front=front):
                self._outbox.disconnect(front)
            case ev.TokenRequestReceived(front=front, request=request):
                self._outbox.request(now_ns, front, request)
                if isinstance(request, Forget) and request.choice is not None:
                    self._control.stop_choice(now_ns, request.attempt, request.choice)
            case ev.RunsWritten(front=front):
                self._outbox.written(front)
            case ev.Tick():
                self._on_tick(now_ns)
            case _:
                self._on_transport(now_ns, event)

    def _hello(self, now_ns: int) -> WorkerHello:
        return replace(
            self._config.hello,
            load=self._load(now_ns),
            inventory=inventory_of(self._legs, self._outbox, self._pushes.leases(now_ns), self._config.hello.role),
            fenced=self._pushes.fenced_lives(),
            epoch=self._link.epoch,
            drain=self._drain_left(now_ns),
        )

    def _on_transport(self, now_ns: int, event: ev.Event) -> None:
        match event:
            case ev.PushReceived(peer=peer, message=message):
                self._pushes.message(now_ns, peer, message)
            case ev.WriteDone(write_id=write_id):
                self._pushes.write_done(now_ns, write_id)
            case ev.WriteBroken(write_id=write_id, quiesced=quiesced, reason=reason):
                self._pushes.write_broken(now_ns, write_id, quiesced, reason)
            case ev.Verified(key=key, chunk=chunk, bad_block_ids=bad_block_ids):
                self._pushes.verified(now_ns, key, chunk, bad_block_ids)
            case ev.PeerConnected(peer=peer, transport=transport, bandwidth_bytes_per_s=bandwidth_bytes_per_s):
                self._links.connected(peer, transport, bandwidth_bytes_per_s)
                self._pushes.connected(now_ns, peer)
            case ev.PeerConnectFailed(peer=peer, reason=reason):
                self._pushes.connect_failed(now_ns, peer, reason)
            case ev.PeerGone(peer=peer, reason=reason):
                self._links.gone(peer)
                self._pushes.peer_gone(now_ns, peer, reason)
            case ev.FenceDone(peer=peer):
                self._links.gone(peer)
                self._control.fenced(now_ns, peer)
            case _:
                raise AssertionError(f"not an event: {event}")

    def _on_command(self, now_ns: int, command: CommandBody, body: RequestBody | None) -> None:
        match command:
            case Reserve() | Prefill() | RunLocal():
                self._on_work(now_ns, command, body)
            case CancelLeg(attempt=attempt, reason=reason):
                self._control.cancel(now_ns, attempt, reason)
            case SenderStopped(attempt=attempt):
                self._pushes.sender_stopped(now_ns, push_key_of(attempt))
            case PeerLost(peer=peer):
                self._control.peer_lost(now_ns, peer)
            case WorkerWelcome(heartbeat_ms=heartbeat_ms):
                self._link.welcomed(now_ns, heartbeat_ms)
                self._block_reporter.start_over()
            case SendBlockSnapshot():
                self._block_reporter.start_over()
            case StartDrain(order=order):
                self._drain, self._drain_told_ns = order, now_ns
            case Leave():
                self._leave = command
                self._on_leave_requested(now_ns)
            case WorkerRefused(reason=reason):
                self._shutdown_reason = f"the coordinator refused this worker: {reason}"

    def _on_work(self, now_ns: int, command: Work, body: RequestBody | None) -> None:
        is_fetch = isinstance(command, Reserve | Prefill) and command.num_prefix_blocks > 0
        if not (is_fetch or isinstance(command, self._config.accepts)):
            self._refuse_work(command, f"a {self._config.hello.role.value} worker takes no {type(command).__name__}")
            return
        if body is None:
            self._refuse_work(command, "the command came without a body")
            return
        match command:
            case Reserve():
                self._control.reserve(now_ns, command, body)
            case Prefill():
                self._control.prefill(now_ns, command, body)
            case RunLocal():
                self._control.run_local(now_ns, command, body)

    def _refuse_work(self, command: Work, reason: str) -> None:
        if isinstance(command, Reserve):
            self._reports.append(ReserveRefused(attempt=command.attempt, reason=reason))
        else:
            self._control.refuse(command.attempt, Outcome.INTERNAL, reason)

    def _on_step_failed(self, now_ns: int, reason: str) -> None:
        self._control.step_failed(now_ns, self._stepper.failed(), reason)
        if self._stepper.num_failed_in_a_row >= self._config.limits.max_step_failures:
            self._shutdown_reason = f"{self._stepper.num_failed_in_a_row} steps failed in a row: {reason}"

    def _judge_engine(self) -> None:
        """It computes nothing usable for anybody: whatever it is, only a new life can be free of it."""
        num_failed = self._stepper.num_unusable_in_a_row
        if num_failed >= self._config.limits.max_failed_sequences:
            self._shutdown_reason = f"the engine computed nothing usable for {num_failed} sequences in a row"

    # ---- leaving ---------------------------------------------------------------------------------------------

    def _on_leave_requested(self, now_ns: int) -> None:
        if self._leave_asked_ns is None:
            self._leave_asked_ns = self._last_needed_ns = now_ns
            if self._link.is_registered:
                self._reports.append(self._heartbeat(now_ns))

    def _drain_left(self, now_ns: int) -> DrainOrder | None:
        """The order that it has been told of, with what is left of its time."""
        if self._drain is None or self._drain.deadline_ms is None:
            return self._drain
        passed_ms = (now_ns - self._drain_told_ns) // NS_PER_MS
        return replace(self._drain, deadline_ms=max(0, self._drain.deadline_ms - passed_ms))

    def _may_leave(self, now_ns: int) -> bool:
        """Whether nobody needs what is held here any more, or has had time enough to take it over."""
        if self._leave_asked_ns is not None and self._pushes.num_leases:
            self._last_needed_ns = now_ns
        due_ns = self._leave_due_ns()
        return due_ns is not None and now_ns >= due_ns

    def _leave_due_ns(self) -> int | None:
        if self._leave_asked_ns is None:
            return None
        limits = self._config.limits
        latest_ns = self._leave_asked_ns + limits.max_leave_ns
        return latest_ns if self._pushes.num_leases else min(latest_ns, self._last_needed_ns + limits.leave_notice_ns)

    # ---- time ------------------------------------------------------------------------------------------------

    def _load(self, now_ns: int) -> WorkerLoad:
        age_ns = 0 if self._step_began_ns is None else now_ns - self._step_began_ns
        return replace(self.load(), step_age_ms=age_ns // NS_PER_MS)

    def _heartbeat(self, now_ns: int) -> Heartbeat:
        return Heartbeat(
            load=self._load(now_ns),
            leases=self._pushes.leases(now_ns),
            links=self.links(),
            is_leaving=self._leave_asked_ns is not None,
        )

    def _on_tick(self, now_ns: int) -> None:
        self._pushes.tick(now_ns)
        self._outbox.expire(now_ns)
        if self._link.is_given_up(now_ns):
            self._shutdown_reason = "no coordinator"
        elif self._step_due_ns is not None and now_ns >= self._step_due_ns:
            limit_s = self._config.limits.max_step_ns / NS_PER_S
            self._shutdown_reason = f"a step has not ended in {limit_s:g} s"
        elif self._link.is_heartbeat_due(now_ns):
            self._reports.append(self._heartbeat(now_ns))
