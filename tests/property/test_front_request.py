"""FrontRequest under random interleavings: every position of every answer is delivered once, in order, from one attempt
at a time, and so is every log-probability of the prompt."""

from __future__ import annotations

import copy
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
from cluster.core.token_messages import PROMPT_CHOICE, TokenInfo, TokenRun
from cluster.front import request_events as events
from cluster.front.request import FrontRequest, Phase
from cluster.front.request_effects import (
    Deliver,
    DeliverScores,
    Effect,
    End,
    EndChoice,
    ForgetWorker,
    ToCoordinator,
    WatchWorker,
)
from cluster.front.request_spec import RequestLimits, RequestSpec
from engine.core.request import RequestBody, Sibling
from engine.core.sampling import SamplingParams
from tests.support.worker_pair import delivered_of

NS_PER_MS = 1_000_000
LENGTH = 16
REQUEST = "r"


PROMPT_IDS = (1, 2, 3, 4, 5, 6)


def _token(attempt: int, choice: int, position: int) -> TokenInfo:
    """Attempts and answers differ in what they draw, so that a token from the wrong one shows."""
    return TokenInfo(token_id=attempt * 1000 + choice * 100 + position)


@dataclass
class _Attempt:
    """What the workers of a placed attempt can say: tokens from `start` on; prefill draws the first."""

    number: int
    forced: dict[int, tuple[int, ...]]
    prefill: WorkerRef | None
    decode: WorkerRef


@dataclass
class _Client:
    """What came out of the machine."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    score_ids: list[int] = field(default_factory=list)
    finishes: dict[int, Outcome] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids.values())


class FrontRequestMachine(RuleBasedStateMachine):
    @initialize(
        deadline_ms=st.none() | st.integers(1, 2000),
        max_latency_ms=st.none() | st.integers(1, 2000),
        has_stop_strings=st.booleans(),
        num_choices=st.sampled_from([1, 1, 2, 3]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    def start(
        self,
        deadline_ms: int | None,
        max_latency_ms: int | None,
        has_stop_strings: bool,
        num_choices: int,
        prompt_logprobs: int | None,
    ) -> None:
        self.now_ns = 10**9
        self.choices = range(num_choices)
        self.num_scores = 0 if prompt_logprobs is None else len(PROMPT_IDS) - 1
        spec = RequestSpec(
            request_id=REQUEST,
            body=RequestBody(
                prompt_ids=PROMPT_IDS,
                sampling=SamplingParams(max_tokens=LENGTH, prompt_logprobs=prompt_logprobs),
                siblings=tuple(Sibling(choice=choice) for choice in range(1, num_choices)),
            ),
            deadline_ns=None if deadline_ms is None else self.now_ns + deadline_ms * NS_PER_MS,
            max_latency_ms=max_latency_ms,
            has_stop_strings=has_stop_strings,
        )
        limits = RequestLimits(stream_lost_ns=50 * NS_PER_MS, coordinator_lost_ns=100 * NS_PER_MS)
        self.request = FrontRequest(spec, limits)
        self.client = _Client(token_ids={choice: [] for choice in self.choices})
        self.sent: list[events.Event] = []
        self.attempts: list[_Attempt] = []
        self.next_attempt = 1
        self.told: dict[int, tuple[int, ...]] = {}  # delivered ids of each answer that the coordinator was last given
        self.checking: set[int] = set()  # answers whose last text is to be searched
        self.handle(events.Start())

    # ---- driving and judging -----------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        was_ended = bool(self.client.ends)
        effects = self.request.handle(self.now_ns, event)
        self.request.check_invariants()
        if was_ended:
            assert not effects
        self.sent.append(event)
        for effect in effects:
            self.judge(effect)
        if self.live and not self.client.ends:
            assert self.request.phase in (Phase.WAITING, Phase.RUNNING)
        elif self.checking and not self.client.ends:
            assert self.request.phase is Phase.CHECKING

    @property
    def live(self) -> list[int]:
        """Answers of which more is wanted."""
        return [c for c in self.choices if c not in self.client.finishes and c not in self.checking]

    def judge(self, effect: Effect) -> None:
        assert not self.client.ends, f"{effect} after the end"
        match effect:
            case Deliver():
                assert effect.choice in self.live
                assert len(self.client.score_ids) == self.num_scores, "tokens before the prompt's scores"
                token_ids = self.client.token_ids[effect.choice]
                assert effect.position == len(token_ids)
                token_ids.extend(token.token_id for token in effect.tokens)
                if effect.last:
                    self.checking.add(effect.choice)
            case DeliverScores():
                assert effect.tokens and effect.position == 1 + len(self.client.score_ids)
                self.client.score_ids.extend(token.token_id for token in effect.tokens)
            case EndChoice():
                assert self.client.finishes.setdefault(effect.choice, effect.outcome) is effect.outcome
                self.checking.discard(effect.choice)
            case End():
                self.client.ends.append(effect)
                if effect.outcome in (Outcome.STOP, Outcome.LENGTH):
                    assert sorted(self.client.finishes) == list(self.choices)
                    assert (effect.outcome is Outcome.LENGTH) == (Outcome.LENGTH in self.client.finishes.values())
            case ToCoordinator():
                self.judge_message(effect)
            case WatchWorker():
                choice, position = effect.watch.choice, effect.watch.next_position
                if choice == PROMPT_CHOICE:
                    assert position == 1 + len(self.client.score_ids) <= self.num_scores
                else:
                    assert choice in self.live and position == len(self.client.token_ids[choice])
                assert effect.watch.attempt.attempt == self.attempts[-1].number
            case ForgetWorker():
                is_over = effect.choice in self.client.finishes or effect.choice in self.checking
                assert effect.choice is None or (is_over and len(self.choices) > 1)
                assert any(
                    effect.attempt.attempt == attempt.number
                    and effect.worker in (attempt.decode.worker, attempt.prefill and attempt.prefill.worker)
                    for attempt in self.attempts
                )

    def judge_message(self, effect: ToCoordinator) -> None:
        message = effect.message
        assert (effect.body is not None) == isinstance(message, Submit | Resubmit)
        if effect.body is not None:
            self.told = delivered_of(effect.body)
            assert self.told == {choice: tuple(self.client.token_ids[choice]) for choice in self.live}
            assert len(effect.body.delivered_ids) == min(len(ids) for ids in self.told.values())
            is_scored = effect.body.sampling.prompt_logprobs is not None
            assert is_scored == (len(self.client.score_ids) < self.num_scores)
        if isinstance(message, Resubmit):
            assert message.num_choices == len(self.told)
            assert message.num_unshared == sum(len(ids) - message.num_delivered for ids in self.told.values())
        if isinstance(message, StreamLost):
            assert message.attempt.attempt == self.attempts[-1].number
        if isinstance(message, RequestDone):
            assert message.num_output_tokens <= self.client.num_tokens
            assert message.outcome in (Outcome.STOP, Outcome.LENGTH)
        if isinstance(message, CancelRequest):
            assert message.outcome in (Outcome.CANCELLED, Outcome.DEADLINE_EXCEEDED, Outcome.REJECTED_OVERLOAD)

    @invariant()
    def output_is_whole(self) -> None:
        """Each token is at its position, and each attempt continues what was delivered before it was started."""
        if not hasattr(self, "client"):
            return
        assert self.client.score_ids == [position % 100 for position in range(1, 1 + len(self.client.score_ids))]
        starts = {attempt.number: attempt.forced for attempt in self.attempts}
        for choice, ids in self.client.token_ids.items():
            assert [token % 100 for token in ids] == list(range(len(ids))) and len(ids) <= LENGTH
            assert all(token // 100 % 10 == choice for token in ids)
            numbers = [token // 1000 for token in ids]
            assert numbers == sorted(numbers)
            for position, number in enumerate(numbers):
                if position == 0 or numbers[position - 1] != number:
                    assert starts[number][choice] == tuple(ids[:position])

    @invariant()
    def deadlines_lie_ahead_or_are_due(self) -> None:
        if hasattr(self, "request"):
            due_ns = self.request.next_deadline_ns()
            assert due_ns is None or not self.client.ends

    # ---- the coordinator ---------------------------------------------------------------------------------------

    @rule(has_prefill=st.booleans(), skip=st.integers(0, 2))
    def place(self, has_prefill: bool, skip: int) -> None:
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
        self.handle(events.CoordinatorLost() if lost else events.CoordinatorRegained(epoch=1))

    # ---- the workers -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), of_prefill=st.booleans())
    def run(self, data: st.DataObject, of_prefill: bool) -> None:
        attempt = data.draw(st.sampled_from(self.attempts[-3:]))
        choice = data.draw(st.sampled_from(sorted(attempt.forced)))
        start = len(attempt.forced[choice])
        if of_prefill and attempt.prefill is not None:
            position, stop, worker = start, start + 1, attempt.prefill.worker
        else:
            # Mostly what is wanted next, in short runs; sometimes earlier or later.
            position = max(start, len(self.client.token_ids[choice]) + data.draw(st.integers(-2, 1)))
            stop, worker = position + data.draw(st.sampled_from([0, 1, 2, 3, LENGTH])), attempt.decode.worker
        self.handle(events.RunReceived(worker=worker, run=self.run_of(attempt, choice, min(position, LENGTH), stop)))

    def run_of(self, attempt: _Attempt, choice: int, position: int, stop: int) -> TokenRun:
        is_end = stop >= LENGTH
        return TokenRun(
            attempt=AttemptId(REQUEST, attempt.number),
            choice=choice,
            position=position,
            tokens=tuple(_token(attempt.number, choice, index) for index in range(position, min(stop, LENGTH))),
            finish=Outcome.LENGTH if is_end else None,
            leg_done=is_end,
        )

    @precondition(lambda self: self.attempts and self.num_scores)
    @rule(data=st.data(), count=st.integers(0, 5))
    def score(self, data: st.DataObject, count: int) -> None:
        attempt = data.draw(st.sampled_from(self.attempts[-2:]))
        position = max(1, 1 + len(self.client.score_ids) + data.draw(st.integers(-2, 1)))
        self.score_from(attempt, position, min(count, self.num_scores + 1 - position))

    def score_from(self, attempt: _Attempt, position: int, count: int) -> None:
        run = TokenRun(
            attempt=AttemptId(REQUEST, attempt.number),
            choice=PROMPT_CHOICE,
            position=position,
            tokens=tuple(_token(0, 0, index) for index in range(position, position + count)),
            leg_done=position + count > self.num_scores,
        )
        worker = (attempt.prefill or attempt.decode).worker
        self.handle(events.RunReceived(worker=worker, run=run))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def stranger_speaks(self, data: st.DataObject) -> None:
        """Another life of a worker, or a choice that was not asked for, is never listened to."""
        attempt = self.attempts[-1]
        position = len(self.client.token_ids[0])
        run = TokenRun(
            attempt=AttemptId(REQUEST, attempt.number),
            choice=data.draw(st.sampled_from((0, 9))),
            position=position,
            tokens=(TokenInfo(token_id=9900 + position),),
        )
        worker = attempt.decode.worker if run.choice == 9 else WorkerId("d", 77)
        before = copy.deepcopy(self.client.token_ids)
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

    @precondition(lambda self: self.checking)
    @rule(data=st.data(), matched=st.booleans())
    def answer_check(self, data: st.DataObject, matched: bool) -> None:
        self.check(data.draw(st.sampled_from(sorted(self.checking))), matched)

    def check(self, choice: int, matched: bool) -> None:
        token_ids = self.client.token_ids[choice]
        if matched and token_ids:
            self.handle(events.StopMatched(choice=choice, num_tokens=len(token_ids)))
            assert self.client.ends or self.client.finishes[choice] is Outcome.STOP
        else:
            self.handle(events.NoStopMatched(choice=choice))
            assert self.client.ends or self.client.finishes[choice] is Outcome.LENGTH
            assert len(token_ids) == LENGTH

    @precondition(lambda self: self.request.spec.has_stop_strings and not self.client.ends and len(self.live) > 1)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """A stop string is found in the middle of an answer."""
        choice = data.draw(st.sampled_from(self.live))
        if self.client.token_ids[choice]:
            self.handle(events.StopMatched(choice=choice, num_tokens=len(self.client.token_ids[choice])))
            assert self.client.finishes[choice] is Outcome.STOP

    @precondition(lambda self: self.client.num_tokens > 10)
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
        self.handle(events.CoordinatorRegained(epoch=1))
        for _ in range(2):  # the first may run from too few ids, and is then asked for again
            self.place(True, 0)
            attempt = self.attempts[-1]
            if self.num_scores:
                self.score_from(attempt, 1, self.num_scores)
            for choice, forced in attempt.forced.items():
                run = self.run_of(attempt, choice, len(forced), LENGTH)
                self.handle(events.RunReceived(worker=attempt.decode.worker, run=run))
        for choice in sorted(self.checking):
            self.check(choice, False)
        assert len(self.client.ends) == 1
        assert self.client.ends[0].report.num_output_tokens <= self.client.num_tokens
        if self.client.ends[0].outcome is Outcome.LENGTH:
            cut = [choice for choice, finish in self.client.finishes.items() if finish is Outcome.LENGTH]
            assert cut and all(len(self.client.token_ids[choice]) == LENGTH for choice in cut)


FrontRequestMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestFrontRequest = FrontRequestMachine.TestCase
