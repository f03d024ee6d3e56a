"""FrontRequest under random interleavings: every position is delivered once, in order, from one attempt at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.ids import AttemptId, Outcome, WorkerId
from cluster.core.messages import (
    AttemptFailed,
    CancelRequest,
    EndRequest,
    Placed,
    Refused,
    RequestDone,
    Resubmit,
    StreamLost,
    Submit,
    WorkerRef,
)
from cluster.core.token_messages import TokenInfo, TokenRun
from cluster.front import request_events as events
from cluster.front.request import FrontRequest, Phase
from cluster.front.request_effects import Deliver, Effect, End, ForgetWorker, ToCoordinator, WatchWorker
from cluster.front.request_spec import RequestLimits, RequestSpec
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams

NS_PER_MS = 1_000_000
LENGTH = 16
REQUEST = "r"


def _token(attempt: int, position: int) -> TokenInfo:
    """Attempts differ in what they draw, so that a token from the wrong one shows."""
    return TokenInfo(token_id=attempt * 100 + position)


@dataclass
class _Attempt:
    """What the workers of a placed attempt can say: tokens from `start` on; prefill draws the first."""

    number: int
    forced: tuple[int, ...]
    prefill: WorkerRef | None
    decode: WorkerRef

    @property
    def start(self) -> int:
        return len(self.forced)


@dataclass
class _Client:
    """What came out of the machine."""

    token_ids: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)


class FrontRequestMachine(RuleBasedStateMachine):
    @initialize(
        deadline_ms=st.none() | st.integers(1, 2000),
        max_latency_ms=st.none() | st.integers(1, 2000),
        has_stop_strings=st.booleans(),
    )
    def start(self, deadline_ms: int | None, max_latency_ms: int | None, has_stop_strings: bool) -> None:
        self.now_ns = 10**9
        spec = RequestSpec(
            request_id=REQUEST,
            body=RequestBody(prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=LENGTH)),
            deadline_ns=None if deadline_ms is None else self.now_ns + deadline_ms * NS_PER_MS,
            max_latency_ms=max_latency_ms,
            has_stop_strings=has_stop_strings,
        )
        limits = RequestLimits(stream_lost_ns=50 * NS_PER_MS, coordinator_lost_ns=100 * NS_PER_MS)
        self.request = FrontRequest(spec, limits)
        self.client = _Client()
        self.sent: list[events.Event] = []
        self.attempts: list[_Attempt] = []
        self.next_attempt = 1
        self.told: tuple[int, ...] | None = None  # delivered ids that the coordinator was last given
        self.current_from = 0  # number of tokens delivered before the current attempt
        self.handle(events.Start())

    # ---- driving and judging -----------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        was_ended = bool(self.client.ends)
        effects = self.request.handle(self.now_ns, event)
        self.request.check_invariants()
        if was_ended:
            assert not effects
        self.sent.append(event)
        last = None
        for effect in effects:
            self.judge(effect)
            if isinstance(effect, Deliver) and effect.last:
                last = effect
        if last is not None and not self.client.ends:
            assert self.request.phase is Phase.CHECKING

    def judge(self, effect: Effect) -> None:
        assert not self.client.ends, f"{effect} after the end"
        match effect:
            case Deliver():
                assert effect.position == len(self.client.token_ids)
                self.client.token_ids.extend(token.token_id for token in effect.tokens)
            case End():
                self.client.ends.append(effect)
            case ToCoordinator():
                self.judge_message(effect)
            case WatchWorker():
                assert effect.watch.next_position == len(self.client.token_ids)
                assert effect.watch.attempt.attempt == self.attempts[-1].number
            case ForgetWorker():
                assert any(
                    effect.attempt.attempt == attempt.number
                    and effect.worker in (attempt.decode.worker, attempt.prefill and attempt.prefill.worker)
                    for attempt in self.attempts
                )

    def judge_message(self, effect: ToCoordinator) -> None:
        message = effect.message
        assert (effect.body is not None) == isinstance(message, Submit | Resubmit)
        if effect.body is not None:
            assert effect.body.delivered_ids == tuple(self.client.token_ids)
            self.told = effect.body.delivered_ids
        if isinstance(message, Resubmit):
            assert message.num_delivered == len(self.client.token_ids)
        if isinstance(message, StreamLost):
            assert message.attempt.attempt == self.attempts[-1].number
        if isinstance(message, RequestDone):
            assert message.num_output_tokens <= len(self.client.token_ids)
            assert message.outcome in (Outcome.STOP, Outcome.LENGTH)
        if isinstance(message, CancelRequest):
            assert message.outcome in (Outcome.CANCELLED, Outcome.DEADLINE_EXCEEDED, Outcome.REJECTED_OVERLOAD)

    @invariant()
    def output_is_whole(self) -> None:
        """Each token is at its position, and each attempt continues what was delivered before it was started."""
        ids = self.client.token_ids
        assert [token % 100 for token in ids] == list(range(len(ids))) and len(ids) <= LENGTH
        starts = {attempt.number: attempt.forced for attempt in self.attempts}
        numbers = [token // 100 for token in ids]
        assert numbers == sorted(numbers)
        for position, number in enumerate(numbers):
            if position == 0 or numbers[position - 1] != number:
                assert starts[number] == tuple(ids[:position])

    @invariant()
    def deadlines_lie_ahead_or_are_due(self) -> None:
        due_ns = self.request.next_deadline_ns()
        assert due_ns is None or not self.client.ends

    # ---- the coordinator ---------------------------------------------------------------------------------------

    @rule(has_prefill=st.booleans(), skip=st.integers(0, 2))
    def place(self, has_prefill: bool, skip: int) -> None:
        assert self.told is not None
        self.next_attempt += skip
        number = self.next_attempt
        self.next_attempt += 1
        prefill = WorkerRef(worker=WorkerId("p", number), token_address="p:1") if has_prefill else None
        decode = WorkerRef(worker=WorkerId("d", 1), token_address="d:1")
        self.attempts.append(_Attempt(number=number, forced=self.told, prefill=prefill, decode=decode))
        placed = Placed(
            epoch=1,
            attempt=AttemptId(REQUEST, number),
            prefill=prefill,
            decode=decode,
            queued_ms=1.0,
            reserved_ms=2.0,
        )
        self.handle(events.FromCoordinator(message=placed))

    @rule(offset=st.integers(-2, 1))
    def fail_attempt(self, offset: int) -> None:
        number = max(1, self.next_attempt - 1 + offset)
        self.next_attempt = max(self.next_attempt, number + 1)
        failed = AttemptFailed(epoch=1, attempt=AttemptId(REQUEST, number), reason="test")
        self.handle(events.FromCoordinator(message=failed))

    @rule(data=st.data())
    def repeat_an_old_message(self, data: st.DataObject) -> None:
        old = [event for event in self.sent if isinstance(event, events.FromCoordinator | events.RunReceived)]
        if old:
            self.handle(data.draw(st.sampled_from(old)))

    @precondition(lambda self: self.next_attempt > 8)
    @rule(refused=st.booleans())
    def end_by_coordinator(self, refused: bool) -> None:
        message: Refused | EndRequest
        if refused:
            message = Refused(request_id=REQUEST, outcome=Outcome.REJECTED_OVERLOAD, reason="full", retry_after_ms=5)
        else:
            message = EndRequest(epoch=1, request_id=REQUEST, outcome=Outcome.WORKER_LOST, reason="attempts used up")
        self.handle(events.FromCoordinator(message=message))

    @rule(lost=st.booleans())
    def coordinator_stream(self, lost: bool) -> None:
        self.handle(events.CoordinatorLost() if lost else events.CoordinatorRegained())

    # ---- the workers -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), of_prefill=st.booleans())
    def run(self, data: st.DataObject, of_prefill: bool) -> None:
        attempt = data.draw(st.sampled_from(self.attempts[-3:]))
        if of_prefill and attempt.prefill is not None:
            position, stop, worker = attempt.start, attempt.start + 1, attempt.prefill.worker
        else:
            # Mostly what is wanted next, in short runs; sometimes earlier or later.
            position = max(attempt.start, len(self.client.token_ids) + data.draw(st.integers(-2, 1)))
            stop, worker = position + data.draw(st.integers(0, 3)), attempt.decode.worker
        position = min(position, LENGTH)
        run = TokenRun(
            attempt=AttemptId(REQUEST, attempt.number),
            choice=0,
            position=position,
            tokens=tuple(_token(attempt.number, index) for index in range(position, min(stop, LENGTH))),
            finish=Outcome.LENGTH if stop >= LENGTH else None,
            leg_done=of_prefill or stop >= LENGTH,
        )
        self.handle(events.RunReceived(worker=worker, run=run))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def stranger_speaks(self, data: st.DataObject) -> None:
        """Another life of a worker, or another choice, is never listened to."""
        attempt = self.attempts[-1]
        position = len(self.client.token_ids)
        run = TokenRun(
            attempt=AttemptId(REQUEST, attempt.number),
            choice=data.draw(st.sampled_from((0, 1))),
            position=position,
            tokens=(TokenInfo(token_id=9900 + position),),
        )
        worker = attempt.decode.worker if run.choice == 1 else WorkerId("d", 77)
        before = list(self.client.token_ids)
        self.handle(events.RunReceived(worker=worker, run=run))
        assert self.client.token_ids == before

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), lost=st.booleans())
    def worker_stream(self, data: st.DataObject, lost: bool) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        refs = [ref for ref in (attempt.prefill, attempt.decode) if ref is not None]
        worker = data.draw(st.sampled_from(refs)).worker
        if lost:
            self.handle(events.WorkerStreamLost(worker=worker, reason="cut"))
        else:
            self.handle(events.WorkerStreamRestored(worker=worker))

    # ---- the client and time -----------------------------------------------------------------------------------

    @precondition(lambda self: self.request.phase is Phase.CHECKING)
    @rule(matched=st.booleans())
    def answer_check(self, matched: bool) -> None:
        if matched and self.client.token_ids:
            self.handle(events.StopMatched(num_tokens=len(self.client.token_ids)))
            assert self.client.ends[-1].outcome is Outcome.STOP
        else:
            self.handle(events.NoStopMatched())
            assert self.client.ends[-1].outcome is Outcome.LENGTH
            assert len(self.client.token_ids) == LENGTH

    @precondition(lambda self: len(self.client.token_ids) > 10)
    @rule()
    def client_leaves(self) -> None:
        self.handle(events.ClientGone(reason="cancelled"))
        assert len(self.client.ends) == 1

    @rule(milliseconds=st.integers(0, 60))
    def time_passes(self, milliseconds: int) -> None:
        self.now_ns += milliseconds * NS_PER_MS
        due_ns = self.request.next_deadline_ns()
        self.handle(events.Tick())
        if due_ns is not None and due_ns <= self.now_ns:
            again_ns = self.request.next_deadline_ns()
            assert again_ns is None or again_ns > self.now_ns, "a due deadline stays due"

    def teardown(self) -> None:
        """Whatever has happened, one attempt that goes well brings the request to its one end."""
        if not hasattr(self, "request"):
            return
        self.handle(events.CoordinatorRegained())
        for _ in range(2):  # the first may run from too few ids, and is then asked for again
            self.place(True, 0)
            attempt = self.attempts[-1]
            run = TokenRun(
                attempt=AttemptId(REQUEST, attempt.number),
                choice=0,
                position=attempt.start,
                tokens=tuple(_token(attempt.number, index) for index in range(attempt.start, LENGTH)),
                finish=Outcome.LENGTH,
                leg_done=True,
            )
            self.handle(events.RunReceived(worker=attempt.decode.worker, run=run))
        if self.request.phase is Phase.CHECKING:
            self.handle(events.NoStopMatched())
        assert len(self.client.ends) == 1
        assert self.client.ends[0].report.num_output_tokens <= len(self.client.token_ids)
        if self.client.ends[0].outcome is Outcome.LENGTH:
            assert len(self.client.token_ids) == LENGTH


FrontRequestMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestFrontRequest = FrontRequestMachine.TestCase
