"""A prefill and a decode WorkerState with toys below the boundary: engine, link, memory, coordinator and front.

Nothing happens by itself: a test (or Hypothesis) says which step ends, which message arrives, which write lands.
`settle` lets everything happen in order. KV is copied slot by slot between the toy runners, so that a block pushed
to the wrong place, too early or not at all changes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.agent import effects as fx
from cluster.agent import events as ev
from cluster.agent.limits import AgentLimits, Work, WorkerStateConfig
from cluster.agent.state import WorkerState
from cluster.agent.translation import peer_of
from cluster.core.commands import (
    CancelLeg,
    Command,
    CommandBody,
    PeerLost,
    Prefill,
    Reserve,
    RunLocal,
    SenderStopped,
    WorkerWelcome,
)
from cluster.core.ids import AttemptId, FrontId, Outcome, Role, WorkerId
from cluster.core.messages import (
    Committed,
    Finished,
    LegFailed,
    LegReleased,
    PeerFenced,
    PrefillDone,
    RankEndpoint,
    ReserveGranted,
    ReserveRefused,
    WorkerHello,
    WorkerLoad,
    WorkerMessage,
    WorkerRef,
)
from cluster.core.token_messages import PROMPT_CHOICE, Forget, TokenRun, Watch
from engine.core.request import RequestBody
from engine.core.scheduler import SchedulerConfig
from engine.core.step import StepPlan
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import PushMessage, VerifyBlocks, WriteBlocks
from kv_transfer.transport.base import PeerId
from tests.support.toy_engine import ToyRunner

BLOCK_SIZE = 4
NUM_LAYERS = 3
SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000
FRONT = FrontId("front", 1)
TTL_MS = 10_000
TOY_BANDWIDTH_BYTES_PER_S = 5_000_000_000


def worker_config(
    worker: WorkerId,
    role: Role,
    *,
    num_blocks: int = 48,
    num_host_blocks: int = 0,
    limits: AgentLimits | None = None,
    accepts: tuple[type[Work], ...] = (Reserve, Prefill, RunLocal),
    eos_token_ids: frozenset[int] = frozenset(),
) -> WorkerStateConfig:
    address = f"{worker}:0"
    endpoint = RankEndpoint(rank=0, transport="auto", endpoint=address.encode())
    scheduler = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_step_tokens=24,
        max_running=8,
        prefill_chunk_tokens=8,
        max_model_tokens=96,
        eos_token_ids=eos_token_ids,
    )
    hello = WorkerHello(
        ref=WorkerRef(worker=worker, token_address=address, endpoints=(endpoint,)),
        pool=role.value,
        role=role,
        host="toy",
        pid=1,
        model="toy",
        compatibility="toy",
        compatibility_details="toy",
        block_size=BLOCK_SIZE,
        block_size_bytes=64,
        max_model_tokens=96,
        load=WorkerLoad(),
    )
    return WorkerStateConfig(
        hello=hello,
        scheduler=scheduler,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_layers=NUM_LAYERS,
        model_fingerprint="toy",
        accepts=accepts,
        push_limits=PushLimits(max_blocks_per_write=2, max_inflight_writes=3),
        limits=limits or AgentLimits(),
    )


class Host:
    """One life of a worker and what it has outstanding."""

    def __init__(self, world: World, config: WorkerStateConfig) -> None:
        self.world = world
        self.config = config
        self.worker = config.hello.ref.worker
        self.peer = peer_of(self.worker)
        self.state = WorkerState(config, world.now_ns)
        self.runner = ToyRunner(self.state.pool, BLOCK_SIZE, num_layers=NUM_LAYERS)
        self.plan: StepPlan | None = None
        self.layer_marks: list[int] = []
        """Of the plan: those that have not been reached."""
        self.num_layers_written = 0
        self.connecting: list[PeerId] = []
        self.writes: list[WriteBlocks] = []
        self.verifications: list[VerifyBlocks] = []
        self.inbox: list[tuple[PeerId, PushMessage]] = []
        self.shutdown_reason: str | None = None
        self.refused_fronts: list[FrontId] = []
        self.unwritten_batches = 0
        self.reads_at_once = True

    def handle(self, event: ev.Event) -> None:
        for effect in self.state.handle(self.world.now_ns, event):
            self._execute(effect)
        self.state.check_invariants()

    def command(self, body: CommandBody, request: RequestBody | None = None, *, epoch: int = 1) -> None:
        command = Command(epoch=epoch, worker=self.worker, body=body)
        self.handle(ev.CommandReceived(command=command, body=request))

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.ToCoordinator(message=message):
                self.world.told(self, message)
            case fx.CopyBlocks(copies=copies):
                self.runner.copy_blocks(copies)
            case fx.RunStep(plan=plan, layer_marks=layer_marks):
                assert self.plan is None, "two steps at once"
                self.plan, self.layer_marks, self.num_layers_written = plan, list(layer_marks), 0
            case fx.SendRuns(front=front, runs=runs):
                assert front == FRONT
                self.world.front.take(runs)
                self.unwritten_batches += 1
                if self.reads_at_once:
                    self.world.later(self.batch_written)
            case fx.ConnectPeer(peer=peer, endpoints=endpoints):
                assert endpoints, "nothing to connect to"
                self.connecting.append(peer)
            case fx.SendMessage(peer=peer, message=message):
                self.world.post(self, peer, message)
            case fx.WriteBlocks():
                self.writes.append(effect)
            case fx.VerifyBlocks():
                self.verifications.append(effect)
            case fx.FencePeer(peer=peer):
                self.world.fence(self, peer)
            case fx.Shutdown(reason=reason):
                self.shutdown_reason = reason
            case fx.RefuseFront(front=front):
                self.refused_fronts.append(front)
            case fx.CancelWrite():
                pass  # Everything posted here is in flight already.

    # ---- what a test lets happen ----

    def batch_written(self) -> None:
        if self.unwritten_batches:
            self.unwritten_batches -= 1
            self.handle(ev.RunsWritten(front=FRONT))

    def write_layers(self) -> None:
        """Up to the next mark of the running step."""
        assert self.plan is not None
        num_layers = self.layer_marks.pop(0)
        self.runner.run_layers(self.plan, range(self.num_layers_written, num_layers))
        self.num_layers_written = num_layers
        self.handle(ev.LayersWritten(step_id=self.plan.step_id, num_layers=num_layers))

    def end_step(self, duration_ns: int = 1_000_000) -> None:
        """Layers whose marks were not told are written now."""
        assert self.plan is not None
        plan, self.plan, self.layer_marks = self.plan, None, []
        self.handle(ev.StepDone(result=self.runner.run(plan), duration_ns=duration_ns))

    def fail_step(self) -> None:
        self.plan, self.layer_marks = None, []
        self.handle(ev.StepFailed(reason="toy"))

    def connect(self, *, fails: bool = False) -> None:
        peer = self.connecting.pop(0)
        other = self.world.host(peer)
        if fails or other is None:
            self.handle(ev.PeerConnectFailed(peer=peer, reason="toy"))
            return
        other.handle(ev.PeerConnected(peer=self.peer, transport="toy"))
        self.handle(ev.PeerConnected(peer=peer, transport="toy", bandwidth_bytes_per_s=TOY_BANDWIDTH_BYTES_PER_S))

    def land_write(self, index: int = 0, *, is_corrupt: bool = False, loses_notification: bool = False) -> None:
        """The bytes land, then the notification is on its way, then the write is completed."""
        write = self.writes.pop(index)
        target = self.world.host(write.peer)
        if target is None:
            self.handle(ev.WriteBroken(write_id=write.write_id, quiesced=True, reason="the peer is gone"))
            return
        sums, layers = [], write.message.layers
        for source, block in zip(write.source_blocks, write.message.blocks, strict=True):
            content = self.runner.block(source, layers)
            sums.append(_checksum(content))
            if is_corrupt:
                content = [[value + 1 for value in slots] for slots in content]
            target.runner.put_block(block.block_id, layers, content)
        if not loses_notification:
            self.world.post(self, write.peer, replace(write.message, checksums=tuple(sums)))
        self.handle(ev.WriteDone(write_id=write.write_id))

    def break_write(self, index: int = 0, *, quiesced: bool = True) -> None:
        write = self.writes.pop(index)
        self.handle(ev.WriteBroken(write_id=write.write_id, quiesced=quiesced, reason="toy"))

    def receive(self, index: int = 0, *, keeps: bool = False) -> None:
        peer, message = self.inbox[index]
        if not keeps:
            del self.inbox[index]
        self.handle(ev.PushReceived(peer=peer, message=message))

    def verify(self, index: int = 0) -> None:
        effect = self.verifications.pop(index)
        pairs = zip(effect.block_ids, effect.checksums, strict=True)
        bad = tuple(b for b, wanted in pairs if _checksum(self.runner.block(b, effect.layers)) != wanted)
        self.handle(ev.Verified(key=effect.key, chunk=effect.chunk, bad_block_ids=bad))

    def advance_once(self) -> bool:
        """Lets one outstanding thing happen; False if there is none."""
        if self.connecting:
            self.connect()
        elif self.inbox:
            self.receive()
        elif self.verifications:
            self.verify()
        elif self.writes:
            self.land_write()
        elif self.plan is not None and self.layer_marks:
            self.write_layers()
        elif self.plan is not None:
            self.end_step()
        else:
            return False
        return True


class ToyFront:
    """Takes each position once and keeps every run as it came."""

    def __init__(self) -> None:
        self.tokens: dict[str, dict[int, int]] = {}
        """By the answer's name and position."""
        self.finishes: dict[str, Outcome] = {}
        self.scores: dict[str, dict[int, tuple[int, float | None]]] = {}
        """By request and position: the prompt's tokens and their log-probabilities."""
        self.runs: list[TokenRun] = []

    def take(self, runs: tuple[TokenRun, ...]) -> None:
        for run in runs:
            self.runs.append(run)
            name = answer_name(run.attempt.request_id, run.choice)
            if run.choice == PROMPT_CHOICE:
                scores = self.scores.setdefault(run.attempt.request_id, {})
                for position, token in enumerate(run.tokens, start=run.position):
                    scored = (token.token_id, token.logprob)
                    assert scores.setdefault(position, scored) == scored
                continue
            tokens = self.tokens.setdefault(name, {})
            for position, token in enumerate(run.tokens, start=run.position):
                known = tokens.setdefault(position, token.token_id)
                assert known == token.token_id, f"{run.attempt}: position {position} is {known} and {token.token_id}"
            if run.finish is not None:
                assert self.finishes.setdefault(name, run.finish) == run.finish

    def token_ids(self, request_id: str, choice: int = 0) -> list[int]:
        tokens = self.tokens.get(answer_name(request_id, choice), {})
        return [tokens[position] for position in sorted(tokens)]


def answer_name(request_id: str, choice: int) -> str:
    return f"{request_id}/{choice}" if choice else request_id


def delivered_of(body: RequestBody) -> dict[int, tuple[int, ...]]:
    """By choice."""
    siblings = {sibling.choice: sibling.delivered_ids for sibling in body.siblings}
    return {body.choice: body.delivered_ids, **siblings}


@dataclass(slots=True, kw_only=True)
class Request:
    """What the toy coordinator knows of an attempt. Legs are named by the life they are on."""

    attempt: AttemptId
    body: RequestBody
    is_local: bool = False
    legs: dict[WorkerId, None] = field(default_factory=dict)
    failures: list[LegFailed] = field(default_factory=list)
    refusals: list[ReserveRefused] = field(default_factory=list)
    prefill_done: PrefillDone | None = None
    committed: Committed | None = None
    finished: Finished | None = None
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or bool(self.failures or self.refusals) or self.finished is not None


class World:
    """Two workers, a front and a coordinator that follows the flow of a request and nothing more."""

    def __init__(self, **options: object) -> None:
        self.now_ns = 1_000
        self.front = ToyFront()
        self.requests: dict[AttemptId, Request] = {}
        self.messages: list[tuple[WorkerId, WorkerMessage]] = []
        self._options = options
        self._later: list[Callable[[], None]] = []
        self._next_lease = 1
        self._lost: list[WorkerId] = []
        self.prefill = self._start("p", Role.PREFILL, 1)
        self.decode = self._start("d", Role.DECODE, 1)

    def hosts(self) -> list[Host]:
        return [self.prefill, self.decode]

    def host(self, peer: PeerId) -> Host | None:
        return next((host for host in self.hosts() if host.peer == peer), None)

    def _start(self, name: str, role: Role, incarnation: int) -> Host:
        host = Host(self, worker_config(WorkerId(name, incarnation), role, **self._options))  # type: ignore[arg-type]
        host.handle(ev.CoordinatorConnected())
        host.command(WorkerWelcome(heartbeat_ms=1_000))
        host.handle(ev.FrontConnected(front=FRONT))
        return host

    # ---- requests ----

    def submit(self, request_id: str, body: RequestBody, *, attempt: int = 1, local: bool = False) -> Request:
        request = Request(attempt=AttemptId(request_id, attempt), body=body, is_local=local)
        self.requests[request.attempt] = request
        request.legs[self.decode.worker] = None
        self._watch(self.decode, request)
        if local:
            self.decode.command(RunLocal(attempt=request.attempt), body)
        else:
            self._watch(self.prefill, request)
            reserve = Reserve(
                attempt=request.attempt,
                lease_id=self._next_lease,
                source=self.prefill.config.hello.ref,
                num_tokens=body.num_input_tokens + 1,
                ttl_ms=TTL_MS,
            )
            self._next_lease += 1
            self.decode.command(reserve, body)
        self.run_later()
        return request

    def cancel(self, request: Request) -> None:
        request.is_cancelled = True
        self._close(request)
        self.run_later()

    def forget(self, request: Request) -> None:
        for host in self.hosts():
            host.handle(ev.TokenRequestReceived(front=FRONT, request=Forget(attempt=request.attempt)))

    def _watch(self, host: Host, request: Request) -> None:
        for choice, delivered_ids in delivered_of(request.body).items():
            self.watch(host, request, choice, len(delivered_ids))
        if request.body.num_scores and (request.is_local or host is self.prefill):
            self.watch(host, request, PROMPT_CHOICE, 1)

    def watch(self, host: Host, request: Request, choice: int, next_position: int) -> None:
        watch = Watch(attempt=request.attempt, choice=choice, next_position=next_position)
        host.handle(ev.TokenRequestReceived(front=FRONT, request=watch))

    def stop_choice(self, request: Request, choice: int) -> None:
        """The front has found the end of that answer."""
        forget = Forget(attempt=request.attempt, choice=choice)
        self.decode.handle(ev.TokenRequestReceived(front=FRONT, request=forget))
        self.run_later()

    # ---- the toy coordinator ----

    def told(self, host: Host, message: WorkerMessage) -> None:
        self.messages.append((host.worker, message))
        self.later(lambda: self._react(host, message))

    def later(self, action: Callable[[], None]) -> None:
        self._later.append(action)

    def run_later(self) -> None:
        while self._later:
            self._later.pop(0)()

    def _react(self, host: Host, message: WorkerMessage) -> None:
        match message:
            case PeerFenced(peer=peer):
                if self.prefill.worker == peer:
                    self.lose_prefill()
                return
            case ReserveGranted() | ReserveRefused() | PrefillDone() | Committed() | Finished():
                pass
            case LegFailed() | LegReleased():
                pass
            case _:
                return
        request = self.requests[message.attempt]
        match message:
            case ReserveGranted():
                self._on_granted(host, request, message)
            case ReserveRefused():
                request.refusals.append(message)
                del request.legs[host.worker]
            case PrefillDone(outcome=outcome):
                request.prefill_done = message
                if outcome is not None:
                    self._cancel_on(self.decode, request)
            case Committed():
                request.committed = message
            case Finished():
                request.finished = message
                del request.legs[host.worker]
            case LegFailed():
                request.failures.append(message)
                self._close(request)
            case LegReleased():
                self._on_released(host, request)

    def _on_granted(self, host: Host, request: Request, granted: ReserveGranted) -> None:
        if request.is_over or self.prefill.worker in self._lost:
            self._cancel_on(host, request)
            host.command(SenderStopped(attempt=request.attempt))
            return
        request.legs[self.prefill.worker] = None
        prefill = Prefill(
            attempt=request.attempt,
            lease_id=granted.lease_id,
            destination=host.config.hello.ref,
            blocks=granted.blocks,
            num_cached_blocks=granted.num_cached_blocks,
            ttl_ms=granted.ttl_ms,
        )
        self.prefill.command(prefill, request.body)

    def _on_released(self, host: Host, request: Request) -> None:
        request.legs.pop(host.worker, None)
        if host is self.prefill and self.decode.worker in request.legs:
            self.decode.command(SenderStopped(attempt=request.attempt))

    def _close(self, request: Request) -> None:
        for host in self.hosts():
            if host.worker in request.legs:
                self._cancel_on(host, request)

    def _cancel_on(self, host: Host, request: Request) -> None:
        host.command(CancelLeg(attempt=request.attempt, reason="toy"))

    # ---- links and lives ----

    def post(self, sender: Host, peer: PeerId, message: PushMessage) -> None:
        target = self.host(peer)
        if target is not None:
            target.inbox.append((sender.peer, message))

    def fence(self, host: Host, peer: PeerId) -> None:
        """Ends that life (fail-stop); then nothing of it can land."""
        target = self.host(peer)
        if target is not None:
            assert target is self.prefill, "only a sender is fenced"
            self.lose_prefill()
        self.later(lambda: host.handle(ev.FenceDone(peer=peer)))

    def lose_prefill(self) -> None:
        """The prefill worker dies with everything in flight; a new life takes its place."""
        dead = self.prefill
        self._lost.append(dead.worker)
        self.prefill = self._start("p", Role.PREFILL, dead.worker.incarnation + 1)
        self.decode.inbox = [entry for entry in self.decode.inbox if entry[0] != dead.peer]
        self.decode.connecting = [peer for peer in self.decode.connecting if peer != dead.peer]
        self.later(lambda: self._after_loss(dead))

    def _after_loss(self, dead: Host) -> None:
        self.decode.handle(ev.PeerGone(peer=dead.peer, reason="died"))
        self.decode.command(PeerLost(peer=dead.worker))
        for request in self.requests.values():
            if dead.worker in request.legs:
                del request.legs[dead.worker]
                request.is_cancelled = request.is_cancelled or request.committed is None
                if request.committed is None:
                    self._close(request)

    # ---- time ----

    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        for host in self.hosts():
            host.handle(ev.Tick())
        self.run_later()

    def settle(self, *, max_events: int = 20_000) -> None:
        """Everything outstanding happens, without faults."""
        for _ in range(max_events):
            self.run_later()
            if not any(host.advance_once() for host in self.hosts()):
                self.run_later()
                if not any(host.plan or host.inbox or host.writes or host.connecting for host in self.hosts()):
                    return
        raise AssertionError("it does not come to rest")

    def check_nothing_left(self) -> None:
        """After every request has ended and its front has forgotten it."""
        for host in self.hosts():
            counts = host.state.pool.counts()
            assert (counts.active, counts.reserved, counts.quarantined) == (0, 0, 0), f"{host.worker}: {counts}"
            assert host.state.num_legs() == 0, f"{host.worker} still has legs"
            assert host.state.num_token_records() == 0, f"{host.worker} still has tokens"


def _checksum(content: list[list[int]]) -> int:
    return hash(tuple(map(tuple, content))) & (2**64 - 1)
