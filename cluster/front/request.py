"""One request as its client sees it: submitted, placed, perhaps tried again, its tokens delivered exactly once, ended.

    NEW -Start-> WAITING -Placed-> RUNNING -finish-> ENDED
                    ^                 |      `-> CHECKING -> ENDED  (if the end is to be searched for stop strings)
                    `--AttemptFailed--'
    any -client gone, deadline, Refused, EndRequest-> ENDED

Exactly once: in RUNNING, a token is accepted if it belongs to the current attempt, comes from that very life of one of
the attempt's workers, and has the next position of its answer. In every other state nothing is accepted. Both workers
are watched from the next position on, and decode's record begins with the token that prefill drew, so overlaps are the
rule and are cut off here; a gap makes the request watch again. Log-probabilities of the prompt, where they are wanted,
come in the same way from the worker that computes it; the answers are watched once they are all there.

Several answers end one by one, and the request with the last of them. A later attempt is handed those that have not
ended, with the delivered ids of each as forced input. An attempt that was started from other ids than have been
delivered since could continue a different text, so it is refused and asked for again.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from cluster.core.ids import Outcome, RefusalCause, WorkerId
from cluster.core.limits import MAX_ATTEMPTS_PER_LIFE, NS_PER_MS, NS_PER_S
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
)
from cluster.core.reports import LiveRequest
from cluster.core.token_messages import PROMPT_CHOICE, TokenInfo, TokenRun
from cluster.front.request_answers import Answer, Answers, Track
from cluster.front.request_effects import (
    Deliver,
    DeliverScores,
    Effect,
    End,
    EndChoice,
    ToCoordinator,
)
from cluster.front.request_events import (
    ClientGone,
    CoordinatorLost,
    CoordinatorRegained,
    Event,
    FromCoordinator,
    NoStopMatched,
    RunReceived,
    Start,
    StopMatched,
    Tick,
    WorkerStreamLost,
    WorkerStreamRestored,
)
from cluster.front.request_hashes import hashes_of
from cluster.front.request_legs import AttemptLegs
from cluster.front.request_spec import RequestLimits, RequestSpec
from cluster.front.request_timeline import TimelineRecorder


class Phase(Enum):
    """See the diagram above: WAITING for a placement, RUNNING on an attempt's workers, CHECKING the last texts."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    CHECKING = "checking"
    ENDED = "ended"


class FrontRequest:
    """The state machine. Pure: time comes in with every event, effects go out in order; nothing after End."""

    def __init__(self, spec: RequestSpec, limits: RequestLimits | None = None) -> None:
        self.spec = spec
        self.phase = Phase.NEW
        self._limits = limits or RequestLimits()
        self._epoch = 0
        self._attempt = 0  # the current attempt, or the last one known to be over
        self._attempt_floor = 0  # others, that nobody here heard of, may have had numbers up to this
        self._asked_epoch: int | None = None  # of the coordinator that was last asked for an attempt, or announced to
        self._num_failures = 0
        self._legs: AttemptLegs | None = None  # while it runs
        self._answers = Answers(spec.body)
        self._told_body = spec.body  # what the coordinator was last given
        self._is_stream_reported = False
        self._coordinator_lost_ns: int | None = None
        self._first_token_due_ns: int | None = None
        self._timeline = TimelineRecorder(0)

    # ---- views -------------------------------------------------------------------------------------------------

    @property
    def num_delivered(self) -> int:
        """Tokens, of all answers together."""
        return self._answers.num_delivered

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Whose token streams matter to the current attempt."""
        return () if self._legs is None else self._legs.workers

    @property
    def attempt(self) -> int:
        """The one that runs, or the last one that is known to be over; 0 before the first."""
        return self._attempt

    def live(self, now_ns: int) -> LiveRequest | None:
        """How this request is announced on a new stream to the coordinator.

        None for one that was never placed, which is submitted again, and for one that needs no more of anybody.
        """
        if self._attempt == 0 or self.phase not in (Phase.WAITING, Phase.RUNNING):
            return None
        progress = self._answers.progress()
        return LiveRequest(
            request_id=self.spec.request_id,
            attempt=self._attempt,
            is_running=self.phase is Phase.RUNNING,
            num_prompt_tokens=len(self.spec.body.prompt_ids),
            max_tokens=self.spec.body.sampling.max_tokens,
            num_choices=progress.num_choices,
            priority=self.spec.body.priority,
            deadline_ms=self._remaining_ms(now_ns),
            num_delivered=progress.num_delivered,
            num_unshared=progress.num_unshared,
            num_failures=self._num_failures,
            tenant=self.spec.tenant,
        )

    def next_deadline_ns(self) -> int | None:
        """When a Tick is due at the latest; None while only messages can move the request."""
        if self.phase in (Phase.NEW, Phase.ENDED):
            return None
        dues = [self.spec.deadline_ns, self._latency_due_ns(), self._stream_due_ns(), self._coordinator_due_ns()]
        return min((due for due in dues if due is not None), default=None)

    def check_invariants(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        self._answers.check_invariants()
        if self._legs is None:
            assert self.phase is not Phase.RUNNING
        else:
            assert self.phase in (Phase.RUNNING, Phase.CHECKING), self.phase
            self._legs.check_invariants()
        assert self._attempt >= 1 or not self.num_delivered
        if self.phase in (Phase.NEW, Phase.WAITING, Phase.RUNNING):
            assert self._answers.live(), "nothing is left to wait for"
        if self.phase is Phase.CHECKING:
            assert not self._answers.live() and not self._answers.have_ended
        if self.phase is Phase.WAITING:
            assert self._answers.fit(self._told_body), "the coordinator was not told of all delivered tokens"
        if self.phase is Phase.ENDED:
            assert self.next_deadline_ns() is None

    # ---- events ------------------------------------------------------------------------------------------------

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        if self.phase is Phase.ENDED:
            return []  # messages cross: whatever arrives after the end is of no interest
        assert (self.phase is Phase.NEW) == isinstance(event, Start), f"{event} in {self.phase}"
        effects: list[Effect] = []
        self._dispatch(now_ns, event, effects)
        return effects

    def _dispatch(self, now_ns: int, event: Event, out: list[Effect]) -> None:
        match event:
            case RunReceived():
                self._on_run(now_ns, event, out)
            case Start():
                self._on_start(now_ns, event, out)
            case FromCoordinator():
                self._on_coordinator(event, out)
            case CoordinatorLost():
                if self._coordinator_lost_ns is None:
                    self._coordinator_lost_ns = now_ns
            case CoordinatorRegained():
                self._on_coordinator_regained(now_ns, event, out)
            case WorkerStreamLost():
                self._on_stream_lost(now_ns, event)
            case WorkerStreamRestored():
                self._on_stream_restored(event, out)
            case ClientGone():
                self._on_client_gone(now_ns, event, out)
            case StopMatched():
                self._on_stop_matched(event, out)
            case NoStopMatched():
                answer = self._answers.get(event.choice)
                assert answer is not None and answer.finish is not None, "it answers a Deliver that was marked last"
                self._end_choice(out, answer, answer.finish, answer.next_position)
            case Tick():
                self._on_tick(now_ns, out)
            case _:
                assert_never(event)

    def _on_start(self, now_ns: int, event: Start, out: list[Effect]) -> None:
        self.phase = Phase.WAITING
        self._asked_epoch = event.epoch
        self._timeline = TimelineRecorder(now_ns)
        if self.spec.max_latency_ms is not None:
            self._first_token_due_ns = now_ns + self.spec.max_latency_ms * NS_PER_MS
        self._submit(now_ns, out)

    def _on_coordinator(self, event: FromCoordinator, out: list[Effect]) -> None:
        message = event.message
        if self.phase is Phase.CHECKING:
            return  # the last token has been delivered: the outcome is decided
        if isinstance(message, Refused):
            self._end_as(out, message)
            return
        if message.epoch < self._epoch:
            return  # from a coordinator that has been replaced
        self._epoch = message.epoch
        if isinstance(message, EndRequest):
            self._end(out, message.outcome, message.reason)
        elif isinstance(message, Placed):
            self._on_placed(message, out)
        else:
            self._on_attempt_failed(message, out)

    def _on_placed(self, placed: Placed, out: list[Effect]) -> None:
        if placed.attempt.attempt <= self._attempt:
            return
        self._drop_legs(out)
        self._attempt = placed.attempt.attempt
        if not self._answers.fit(self._told_body):
            self._resubmit(out)
            return
        self.phase = Phase.RUNNING
        self._timeline.placed(placed)
        self._is_stream_reported = False
        refs = (placed.decode,) if placed.prefill is None else (placed.prefill, placed.decode)
        self._legs = AttemptLegs(placed.attempt, refs, self._answers)
        self._legs.watch_all(out)
        for choice in self._told_body.choices:
            answer = self._answers.get(choice)
            if answer is not None and not answer.is_live:
                self._legs.stop(choice, out)  # its end was found after the coordinator had been told

    def _on_attempt_failed(self, failed: AttemptFailed, out: list[Effect]) -> None:
        is_over = self.phase is Phase.WAITING and failed.attempt.attempt == self._attempt
        if failed.attempt.attempt < self._attempt or is_over:
            return
        self._drop_legs(out)
        self._attempt = failed.attempt.attempt
        self._num_failures += not failed.is_planned
        self._resubmit(out)

    def _on_run(self, now_ns: int, event: RunReceived, out: list[Effect]) -> None:
        run, legs = event.run, self._legs
        if self.phase is not Phase.RUNNING or legs is None or run.attempt != legs.attempt:
            return
        leg, track = legs.of(event.worker), self._track_of(run.choice)
        if leg is None or track is None:
            return
        if run.position > track.next_position:
            legs.watch_again(leg, track, out)
            return
        if run.timeline is not None:
            self._timeline.leg(run.timeline)
        fresh = run.tokens[track.next_position - run.position :]
        if isinstance(track, Answer):
            self._on_tokens(now_ns, track, run, fresh, out)
        else:
            self._deliver_scores(track, fresh, out)
        if run.leg_done and self._legs is legs and self.phase is Phase.RUNNING:
            legs.has_sent(leg, run.choice, out)

    def _track_of(self, choice: int) -> Track | None:
        """What is wanted under that number now; None if nothing is."""
        if not self._answers.has_scores:
            return self._answers.scores if choice == PROMPT_CHOICE else None
        answer = self._answers.get(choice)
        return answer if answer is not None and answer.is_live else None

    def _deliver_scores(self, track: Track, fresh: tuple[TokenInfo, ...], out: list[Effect]) -> None:
        if not fresh:
            return
        out.append(DeliverScores(position=track.next_position, tokens=fresh))
        track.next_position += len(fresh)
        track.rewatched_at = None
        if self._answers.has_scores and self._legs is not None:
            self._legs.watch_all(out)

    def _on_tokens(
        self, now_ns: int, answer: Answer, run: TokenRun, fresh: tuple[TokenInfo, ...], out: list[Effect]
    ) -> None:
        is_end = run.finish is not None and run.position + len(run.tokens) == answer.next_position + len(fresh)
        is_checked = is_end and self.spec.has_stop_strings
        if fresh or is_checked:
            out.append(Deliver(choice=answer.choice, position=answer.next_position, tokens=fresh, last=is_checked))
        if fresh:
            answer.delivered_ids.extend(token.token_id for token in fresh)
            answer.next_position += len(fresh)
            answer.rewatched_at = None
            if self._legs is not None:
                self._legs.has_progress = True
            self._timeline.tokens(now_ns, answer.choice, len(fresh))
        if not is_end:
            return
        assert run.finish is not None
        if is_checked:
            self._finish(answer, run.finish, out)
        else:
            self._end_choice(out, answer, run.finish, answer.next_position)

    def _on_stop_matched(self, event: StopMatched, out: list[Effect]) -> None:
        answer = self._answers.get(event.choice)
        assert answer is not None and 0 < event.num_tokens <= answer.next_position
        self._end_choice(out, answer, Outcome.STOP, event.num_tokens)
        if self._legs is not None and self.phase is Phase.RUNNING:
            self._legs.stop(answer.choice, out)

    def _finish(self, answer: Answer, outcome: Outcome, out: list[Effect]) -> None:
        """No more tokens of the answer are wanted."""
        answer.finish = outcome
        if not self._answers.live():
            self.phase = Phase.CHECKING
        elif self._legs is not None:
            self._legs.finish(answer.choice, out)

    def _end_choice(self, out: list[Effect], answer: Answer, outcome: Outcome, num_tokens: int) -> None:
        """The answer is complete, and with the last of them the request."""
        self._finish(answer, outcome, out)
        answer.num_tokens = num_tokens
        out.append(EndChoice(choice=answer.choice, outcome=outcome))
        if self._answers.have_ended:
            self._complete(out)

    def _on_client_gone(self, now_ns: int, event: ClientGone, out: list[Effect]) -> None:
        # At its deadline a client hangs up as well, and that may be noticed first.
        if self.spec.deadline_ns is not None and now_ns >= self.spec.deadline_ns:
            self._cancel(out, Outcome.DEADLINE_EXCEEDED, "the client's deadline was reached")
        else:
            self._cancel(out, Outcome.CANCELLED, event.reason)

    def _on_stream_lost(self, now_ns: int, event: WorkerStreamLost) -> None:
        leg = None if self._legs is None else self._legs.of(event.worker)
        if leg is not None and leg.lost_since_ns is None:
            leg.lost_since_ns = now_ns
            leg.lost_reason = event.reason

    def _on_stream_restored(self, event: WorkerStreamRestored, out: list[Effect]) -> None:
        leg = None if self._legs is None else self._legs.of(event.worker)
        if self._legs is not None and leg is not None:
            leg.lost_since_ns = None
            self._legs.watch(leg, out)

    def _on_coordinator_regained(self, now_ns: int, event: CoordinatorRegained, out: list[Effect]) -> None:
        """What was sent last may be lost: ask again. Submit is idempotent, so is Resubmit of one failed attempt.

        A coordinator that was asked for an attempt and has died may have begun some that nobody here has heard of, and
        workers may remember them. Their numbers must not come again.
        """
        self._coordinator_lost_ns = None
        self._is_stream_reported = False
        is_other, self._asked_epoch = self._asked_epoch not in (None, event.epoch), event.epoch
        if self.phase is Phase.WAITING:
            if is_other:
                self._attempt_floor = max(self._attempt_floor, self._attempt) + MAX_ATTEMPTS_PER_LIFE
            if self._attempt == 0:
                self._submit(now_ns, out)
            else:
                self._resubmit(out)

    def _on_tick(self, now_ns: int, out: list[Effect]) -> None:
        if _is_due(self.spec.deadline_ns, now_ns):
            self._cancel(out, Outcome.DEADLINE_EXCEEDED, "the client's deadline was reached")
        elif _is_due(self._latency_due_ns(), now_ns):
            reason = f"no token came within max_latency_ms ({self.spec.max_latency_ms})"
            self._cancel(out, Outcome.REJECTED_OVERLOAD, reason, cause=RefusalCause.MAX_LATENCY)
        elif _is_due(self._stream_due_ns(), now_ns):
            self._report_stream_lost(out)
        if self.phase is not Phase.ENDED and _is_due(self._coordinator_due_ns(), now_ns):
            seconds = self._limits.coordinator_lost_ns / NS_PER_S
            self._end(out, Outcome.WORKER_LOST, f"the coordinator has been out of reach for {seconds:g} s")

    # ---- what is due when --------------------------------------------------------------------------------------

    def _latency_due_ns(self) -> int | None:
        return None if self.num_delivered else self._first_token_due_ns

    def _stream_due_ns(self) -> int | None:
        """When the first worker that must be heard will have been out of reach for too long."""
        lost = None if self._legs is None or self._is_stream_reported else self._legs.first_lost()
        return None if lost is None or lost.lost_since_ns is None else lost.lost_since_ns + self._limits.stream_lost_ns

    def _coordinator_due_ns(self) -> int | None:
        needs_coordinator = self.phase is Phase.WAITING or self._is_stream_reported
        if self._coordinator_lost_ns is None or not needs_coordinator:
            return None
        return self._coordinator_lost_ns + self._limits.coordinator_lost_ns

    def _report_stream_lost(self, out: list[Effect]) -> None:
        lost = None if self._legs is None else self._legs.first_lost()
        assert self._legs is not None and lost is not None
        self._is_stream_reported = True
        message = StreamLost(attempt=self._legs.attempt, worker=lost.ref.worker, reason=lost.lost_reason)
        out.append(ToCoordinator(message=message))

    # ---- parts of effects --------------------------------------------------------------------------------------

    def _submit(self, now_ns: int, out: list[Effect]) -> None:
        spec = self.spec
        message = Submit(
            request_id=spec.request_id,
            num_prompt_tokens=len(spec.body.prompt_ids),
            max_tokens=spec.body.sampling.max_tokens,
            num_choices=len(spec.body.choices),
            block_hashes=spec.block_hashes,
            priority=spec.body.priority,
            tenant=spec.tenant,
            adapter=spec.body.adapter,
            cache_salt=spec.body.cache_salt,
            deadline_ms=self._remaining_ms(now_ns),
            max_latency_ms=spec.max_latency_ms,
            attempt_floor=self._attempt_floor,
        )
        out.append(ToCoordinator(message=message, body=spec.body))

    def _remaining_ms(self, now_ns: int) -> int | None:
        """Until the client's deadline."""
        return None if self.spec.deadline_ns is None else max(0, self.spec.deadline_ns - now_ns) // NS_PER_MS

    def _resubmit(self, out: list[Effect]) -> None:
        """From here on nothing of the failed attempt is accepted: the next one starts from exactly these ids."""
        self.phase = Phase.WAITING
        body = self._told_body = self._answers.body()
        progress = self._answers.progress()
        message = Resubmit(
            request_id=self.spec.request_id,
            failed_attempt=self._attempt,
            num_delivered=progress.num_delivered,
            num_choices=progress.num_choices,
            num_unshared=progress.num_unshared,
            attempt_floor=self._attempt_floor,
            block_hashes=hashes_of(self.spec, body),
        )
        out.append(ToCoordinator(message=message, body=body))

    def _drop_legs(self, out: list[Effect]) -> None:
        if self._legs is not None:
            self._legs.drop(out)
            self._legs = None

    def _complete(self, out: list[Effect]) -> None:
        """All answers are complete: tell everyone."""
        outcome = self._answers.outcome
        done = RequestDone(
            request_id=self.spec.request_id, outcome=outcome, num_output_tokens=self._answers.num_output_tokens
        )
        out.append(ToCoordinator(message=done))
        self._end(out, outcome, "")

    def _cancel(self, out: list[Effect], outcome: Outcome, reason: str, cause: RefusalCause | None = None) -> None:
        message = CancelRequest(request_id=self.spec.request_id, outcome=outcome, reason=reason)
        out.append(ToCoordinator(message=message))
        self._end(out, outcome, reason, cause)

    def _end(self, out: list[Effect], outcome: Outcome, reason: str, cause: RefusalCause | None = None) -> None:
        self._end_as(out, Refused(request_id=self.spec.request_id, outcome=outcome, reason=reason, cause=cause))

    def _end_as(self, out: list[Effect], refused: Refused) -> None:
        """The coordinator's refusal says all that there may be to say of an end; others say less."""
        report = self._timeline.report(
            num_output_tokens=self._answers.num_output_tokens,
            num_prompt_tokens=len(self.spec.body.prompt_ids),
        )
        self._drop_legs(out)
        self.phase = Phase.ENDED
        end = End(
            outcome=refused.outcome,
            reason=refused.reason,
            retry_after_ms=refused.retry_after_ms,
            report=report,
            is_duplicate=refused.is_duplicate,
            cause=refused.cause,
        )
        out.append(end)


def ended_meanwhile(request_id: str) -> CancelRequest:
    """For a coordinator that has just heard, or still thinks, that the request is running, when it is not."""
    return CancelRequest(request_id=request_id, outcome=Outcome.CANCELLED, reason="the request has ended")


def _is_due(due_ns: int | None, now_ns: int) -> bool:
    return due_ns is not None and due_ns <= now_ns
