"""One request as its client sees it: submitted, placed, perhaps tried again, its tokens delivered exactly once, ended.

    NEW -Start-> WAITING -Placed-> RUNNING -finish-> ENDED
                    ^                 |      `-> CHECKING -> ENDED  (if the end is to be searched for stop strings)
                    `--AttemptFailed--'
    any -client gone, deadline, Refused, EndRequest-> ENDED

Exactly once: in RUNNING, a token is accepted if it belongs to the current attempt, comes from that very life of one of
the attempt's workers, and has the next position. In every other state nothing is accepted. Both workers are watched
from the next position on, and decode's record begins with the token that prefill drew, so overlaps are the rule and
are cut off here; a gap makes the request watch again.

A later attempt is handed the delivered ids as forced input. An attempt that was started from fewer ids than have been
delivered since could continue a different text, so it is refused and asked for again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from cluster.core.ids import AttemptId, Outcome, WorkerId
from cluster.core.limits import NS_PER_MS, NS_PER_S
from cluster.core.messages import (
    AttemptFailed,
    CancelRequest,
    EndRequest,
    LiveRequest,
    Placed,
    Refused,
    RequestDone,
    Resubmit,
    StreamLost,
    Submit,
    WorkerRef,
)
from cluster.core.token_messages import TokenInfo, Watch
from cluster.front.request_effects import Deliver, Effect, End, ForgetWorker, ToCoordinator, WatchWorker
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
from cluster.front.request_spec import RequestLimits, RequestSpec
from cluster.front.request_timeline import TimelineRecorder


class Phase(Enum):
    """See the diagram above: WAITING for a placement, RUNNING on an attempt's workers, CHECKING the last text."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    CHECKING = "checking"
    ENDED = "ended"


@dataclass(slots=True)
class _Leg:
    """A worker of the current attempt. `is_done`: it has sent all it has to send."""

    ref: WorkerRef
    is_done: bool = False
    lost_since_ns: int | None = None
    lost_reason: str = ""


class FrontRequest:
    """The state machine. Pure: time comes in with every event, effects go out in order; nothing after End."""

    def __init__(self, spec: RequestSpec, limits: RequestLimits | None = None) -> None:
        self.spec = spec
        self.phase = Phase.NEW
        self._limits = limits or RequestLimits()
        self._epoch = 0
        self._attempt = 0  # the current attempt, or the last one known to be over
        self._legs: list[_Leg] = []  # prefill (if there is one), then decode
        self._delivered_ids: list[int] = []
        self._num_forced = 0  # delivered ids that the coordinator was last given
        self._rewatched_at: int | None = None
        self._is_stream_reported = False
        self._coordinator_lost_ns: int | None = None
        self._first_token_due_ns: int | None = None
        self._timeline = TimelineRecorder(0)
        self._finish: Outcome | None = None

    # ---- views -------------------------------------------------------------------------------------------------

    @property
    def num_delivered(self) -> int:
        return len(self._delivered_ids)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Whose token streams matter to the current attempt."""
        return tuple(leg.ref.worker for leg in self._legs)

    def live(self) -> LiveRequest:
        """How this request is announced to a coordinator that has come back; one of attempt 0 is submitted anew."""
        return LiveRequest(request_id=self.spec.request_id, attempt=self._attempt, num_delivered=self.num_delivered)

    def next_deadline_ns(self) -> int | None:
        """When a Tick is due at the latest; None while only messages can move the request."""
        if self.phase in (Phase.NEW, Phase.ENDED):
            return None
        dues = [self.spec.deadline_ns, self._latency_due_ns(), self._stream_due_ns(), self._coordinator_due_ns()]
        return min((due for due in dues if due is not None), default=None)

    def check_invariants(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        assert bool(self._legs) == (self.phase is Phase.RUNNING or self.phase is Phase.CHECKING), self.phase
        assert len(self._legs) <= 2
        assert self._num_forced <= self.num_delivered
        assert (self._finish is not None) == (self.phase is Phase.CHECKING)
        assert self._attempt >= 1 or not self._delivered_ids
        if self.phase is Phase.WAITING:
            assert self._num_forced == self.num_delivered, "the coordinator was not told of all delivered tokens"
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
                self._on_start(now_ns, out)
            case FromCoordinator():
                self._on_coordinator(event, out)
            case CoordinatorLost():
                if self._coordinator_lost_ns is None:
                    self._coordinator_lost_ns = now_ns
            case CoordinatorRegained():
                self._on_coordinator_regained(now_ns, out)
            case WorkerStreamLost():
                self._on_stream_lost(now_ns, event)
            case WorkerStreamRestored():
                self._on_stream_restored(event, out)
            case ClientGone():
                self._on_client_gone(now_ns, event, out)
            case StopMatched():
                assert 0 < event.num_tokens <= self.num_delivered
                self._complete(out, Outcome.STOP, event.num_tokens)
            case NoStopMatched():
                assert self._finish is not None, "NoStopMatched answers a Deliver that was marked last"
                self._complete(out, self._finish, self.num_delivered)
            case Tick():
                self._on_tick(now_ns, out)
            case _:
                assert_never(event)

    def _on_start(self, now_ns: int, out: list[Effect]) -> None:
        self.phase = Phase.WAITING
        self._timeline = TimelineRecorder(now_ns)
        if self.spec.max_latency_ms is not None:
            self._first_token_due_ns = now_ns + self.spec.max_latency_ms * NS_PER_MS
        self._submit(now_ns, out)

    def _on_coordinator(self, event: FromCoordinator, out: list[Effect]) -> None:
        message = event.message
        if self.phase is Phase.CHECKING:
            return  # the last token has been delivered: the outcome is decided
        if isinstance(message, Refused):
            self._end(out, message.outcome, message.reason, retry_after_ms=message.retry_after_ms)
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
        if self._num_forced != self.num_delivered:
            self._resubmit(out)
            return
        self.phase = Phase.RUNNING
        self._timeline.placed(placed)
        self._rewatched_at = None
        self._is_stream_reported = False
        refs = (placed.decode,) if placed.prefill is None else (placed.prefill, placed.decode)
        self._legs = [_Leg(ref) for ref in refs]
        for leg in self._legs:
            self._watch(leg, out)

    def _on_attempt_failed(self, failed: AttemptFailed, out: list[Effect]) -> None:
        is_over = self.phase is Phase.WAITING and failed.attempt.attempt == self._attempt
        if failed.attempt.attempt < self._attempt or is_over:
            return
        self._drop_legs(out)
        self._attempt = failed.attempt.attempt
        self._resubmit(out)

    def _on_run(self, now_ns: int, event: RunReceived, out: list[Effect]) -> None:
        run = event.run
        leg = self._leg_of(event.worker)
        if self.phase is not Phase.RUNNING or leg is None or run.choice != 0 or run.attempt != self._attempt_id():
            return
        if run.position > self.num_delivered:
            self._watch_again(leg, out)
            return
        if run.timeline is not None:
            self._timeline.leg(run.timeline)
        fresh = run.tokens[self.num_delivered - run.position :]
        is_end = run.finish is not None and run.position + len(run.tokens) == self.num_delivered + len(fresh)
        self._deliver(now_ns, fresh, is_last=is_end and self.spec.has_stop_strings, out=out)
        if is_end:
            assert run.finish is not None
            self._finished(run.finish, out)
        elif run.leg_done and not leg.is_done:
            leg.is_done = True
            out.append(ForgetWorker(worker=leg.ref.worker, attempt=run.attempt))

    def _deliver(self, now_ns: int, fresh: tuple[TokenInfo, ...], *, is_last: bool, out: list[Effect]) -> None:
        if fresh or is_last:
            out.append(Deliver(position=self.num_delivered, tokens=fresh, last=is_last))
        if fresh:
            self._delivered_ids.extend(token.token_id for token in fresh)
            self._timeline.tokens(now_ns, len(fresh))
            self._rewatched_at = None

    def _finished(self, outcome: Outcome, out: list[Effect]) -> None:
        if self.spec.has_stop_strings:
            self.phase = Phase.CHECKING
            self._finish = outcome
        else:
            self._complete(out, outcome, self.num_delivered)

    def _on_client_gone(self, now_ns: int, event: ClientGone, out: list[Effect]) -> None:
        # At its deadline a client hangs up as well, and that may be noticed first.
        if self.spec.deadline_ns is not None and now_ns >= self.spec.deadline_ns:
            self._cancel(out, Outcome.DEADLINE_EXCEEDED, "the client's deadline was reached")
        else:
            self._cancel(out, Outcome.CANCELLED, event.reason)

    def _on_stream_lost(self, now_ns: int, event: WorkerStreamLost) -> None:
        leg = self._leg_of(event.worker)
        if leg is not None and leg.lost_since_ns is None:
            leg.lost_since_ns = now_ns
            leg.lost_reason = event.reason

    def _on_stream_restored(self, event: WorkerStreamRestored, out: list[Effect]) -> None:
        leg = self._leg_of(event.worker)
        if leg is not None:
            leg.lost_since_ns = None
            if not leg.is_done:
                self._watch(leg, out)

    def _on_coordinator_regained(self, now_ns: int, out: list[Effect]) -> None:
        """What was sent last may be lost: ask again. Submit is idempotent, so is Resubmit of one failed attempt."""
        self._coordinator_lost_ns = None
        self._is_stream_reported = False
        if self.phase is Phase.WAITING:
            if self._attempt == 0:
                self._submit(now_ns, out)
            else:
                self._resubmit(out)

    def _on_tick(self, now_ns: int, out: list[Effect]) -> None:
        if _is_due(self.spec.deadline_ns, now_ns):
            self._cancel(out, Outcome.DEADLINE_EXCEEDED, "the client's deadline was reached")
        elif _is_due(self._latency_due_ns(), now_ns):
            reason = f"no token came within max_latency_ms ({self.spec.max_latency_ms})"
            self._cancel(out, Outcome.REJECTED_OVERLOAD, reason)
        elif _is_due(self._stream_due_ns(), now_ns):
            self._report_stream_lost(now_ns, out)
        if self.phase is not Phase.ENDED and _is_due(self._coordinator_due_ns(), now_ns):
            seconds = self._limits.coordinator_lost_ns / NS_PER_S
            self._end(out, Outcome.WORKER_LOST, f"the coordinator has been out of reach for {seconds:g} s")

    # ---- what is due when --------------------------------------------------------------------------------------

    def _latency_due_ns(self) -> int | None:
        return None if self._delivered_ids else self._first_token_due_ns

    def _stream_due_ns(self) -> int | None:
        """When the first worker that must be heard will have been out of reach for too long."""
        since = [leg.lost_since_ns for leg in self._needed_legs() if leg.lost_since_ns is not None]
        if not since or self._is_stream_reported:
            return None
        return min(since) + self._limits.stream_lost_ns

    def _coordinator_due_ns(self) -> int | None:
        needs_coordinator = self.phase is Phase.WAITING or self._is_stream_reported
        if self._coordinator_lost_ns is None or not needs_coordinator:
            return None
        return self._coordinator_lost_ns + self._limits.coordinator_lost_ns

    def _needed_legs(self) -> list[_Leg]:
        """Decode always; prefill until the attempt's first token is here, from whichever of them."""
        return self._legs if self.num_delivered == self._num_forced else self._legs[-1:]

    def _report_stream_lost(self, now_ns: int, out: list[Effect]) -> None:
        lost = [leg for leg in self._needed_legs() if leg.lost_since_ns is not None]
        leg = min(lost, key=lambda leg: (leg.lost_since_ns or 0, leg.ref.worker))
        self._is_stream_reported = True
        message = StreamLost(attempt=self._attempt_id(), worker=leg.ref.worker, reason=leg.lost_reason)
        out.append(ToCoordinator(message=message))

    # ---- parts of effects --------------------------------------------------------------------------------------

    def _attempt_id(self) -> AttemptId:
        return AttemptId(self.spec.request_id, self._attempt)

    def _leg_of(self, worker: WorkerId) -> _Leg | None:
        return next((leg for leg in self._legs if leg.ref.worker == worker), None)

    def _submit(self, now_ns: int, out: list[Effect]) -> None:
        spec = self.spec
        remaining_ns = None if spec.deadline_ns is None else max(0, spec.deadline_ns - now_ns)
        message = Submit(
            request_id=spec.request_id,
            num_prompt_tokens=len(spec.body.prompt_ids),
            max_tokens=spec.body.sampling.max_tokens,
            block_hashes=spec.block_hashes,
            priority=spec.body.priority,
            tenant=spec.tenant,
            adapter=spec.body.adapter,
            cache_salt=spec.body.cache_salt,
            deadline_ms=None if remaining_ns is None else remaining_ns // NS_PER_MS,
            max_latency_ms=spec.max_latency_ms,
        )
        out.append(ToCoordinator(message=message, body=spec.body))

    def _resubmit(self, out: list[Effect]) -> None:
        """From here on nothing of the failed attempt is accepted: the next one starts from exactly these ids."""
        self.phase = Phase.WAITING
        self._num_forced = self.num_delivered
        message = Resubmit(
            request_id=self.spec.request_id, failed_attempt=self._attempt, num_delivered=self.num_delivered
        )
        body = dataclasses.replace(self.spec.body, delivered_ids=tuple(self._delivered_ids))
        out.append(ToCoordinator(message=message, body=body))

    def _watch(self, leg: _Leg, out: list[Effect]) -> None:
        watch = Watch(attempt=self._attempt_id(), choice=0, next_position=self.num_delivered)
        out.append(WatchWorker(ref=leg.ref, watch=watch))

    def _watch_again(self, leg: _Leg, out: list[Effect]) -> None:
        """Tokens are missing before a run: ask for them, once for each position that is waited for."""
        if self._rewatched_at != self.num_delivered:
            self._rewatched_at = self.num_delivered
            self._watch(leg, out)

    def _drop_legs(self, out: list[Effect]) -> None:
        for leg in self._legs:
            if not leg.is_done:
                out.append(ForgetWorker(worker=leg.ref.worker, attempt=self._attempt_id()))
        self._legs = []

    def _complete(self, out: list[Effect], outcome: Outcome, num_tokens: int) -> None:
        """The answer is complete: tell everyone."""
        done = RequestDone(request_id=self.spec.request_id, outcome=outcome, num_output_tokens=num_tokens)
        out.append(ToCoordinator(message=done))
        self._end(out, outcome, "", num_tokens=num_tokens)

    def _cancel(self, out: list[Effect], outcome: Outcome, reason: str) -> None:
        message = CancelRequest(request_id=self.spec.request_id, outcome=outcome, reason=reason)
        out.append(ToCoordinator(message=message))
        self._end(out, outcome, reason)

    def _end(
        self,
        out: list[Effect],
        outcome: Outcome,
        reason: str,
        *,
        retry_after_ms: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        report = self._timeline.report(
            num_output_tokens=self.num_delivered if num_tokens is None else num_tokens,
            num_prompt_tokens=len(self.spec.body.prompt_ids),
        )
        self._drop_legs(out)
        self.phase = Phase.ENDED
        self._finish = None
        out.append(End(outcome=outcome, reason=reason, retry_after_ms=retry_after_ms, report=report))


def _is_due(due_ns: int | None, now_ns: int) -> bool:
    return due_ns is not None and due_ns <= now_ns
