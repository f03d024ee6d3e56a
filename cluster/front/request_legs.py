"""The workers of a request's attempt: what each has still to send, what is asked of it, and whether it can be heard."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import AttemptId, WorkerId
from cluster.core.messages import WorkerRef
from cluster.core.token_messages import PROMPT_CHOICE, Watch
from cluster.front.request_answers import Answers, Track
from cluster.front.request_effects import Effect, ForgetWorker, WatchWorker


@dataclass(slots=True)
class Leg:
    """One worker of the attempt.

    Attributes:
        open_choices: what it has still to send of.
        is_done: it has sent all it has to send, and was told that it may forget it.
        lost_since_ns, lost_reason: set while its token stream is down.
    """

    ref: WorkerRef
    open_choices: dict[int, None]
    is_done: bool = False
    lost_since_ns: int | None = None
    lost_reason: str = ""


class AttemptLegs:
    """Prefill, if there is one, and then decode.

    Attributes:
        has_progress: a token of the attempt has been delivered.
    """

    def __init__(self, attempt: AttemptId, refs: tuple[WorkerRef, ...], answers: Answers) -> None:
        self.attempt = attempt
        self.has_progress = False
        self._answers = answers
        live = answers.live()
        for track in (answers.scores, *live):
            track.rewatched_at = None
        self._legs = [Leg(ref, dict.fromkeys(answer.choice for answer in live)) for ref in refs]
        if not answers.has_scores:
            self._legs[0].open_choices[PROMPT_CHOICE] = None  # whoever computes the prompt has them

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(leg.ref.worker for leg in self._legs)

    def of(self, worker: WorkerId) -> Leg | None:
        return next((leg for leg in self._legs if leg.ref.worker == worker), None)

    # ---- what is asked of them ----

    def watch_all(self, out: list[Effect]) -> None:
        for leg in self._legs:
            self.watch(leg, out)

    def watch(self, leg: Leg, out: list[Effect]) -> None:
        """Asks for what is wanted now of what this worker has to send."""
        tracks = self._answers.live() if self._answers.has_scores else [self._answers.scores]
        for track in tracks:
            if track.choice in leg.open_choices:
                self._watch(leg, track, out)

    def watch_again(self, leg: Leg, track: Track, out: list[Effect]) -> None:
        """Tokens are missing before a run: ask for them, once for each position that is waited for."""
        if track.rewatched_at != track.next_position:
            track.rewatched_at = track.next_position
            self._watch(leg, track, out)

    def has_sent(self, leg: Leg, choice: int, out: list[Effect]) -> None:
        """This worker has no more of it; with the last of all, it may forget the attempt."""
        leg.open_choices.pop(choice, None)
        if not leg.open_choices and not leg.is_done:
            leg.is_done = True
            out.append(ForgetWorker(worker=leg.ref.worker, attempt=self.attempt))

    def finish(self, choice: int, out: list[Effect]) -> None:
        """No more of it is wanted of anybody."""
        for leg in self._legs:
            self.has_sent(leg, choice, out)

    def stop(self, choice: int, out: list[Effect]) -> None:
        """Decode need not go on with it."""
        out.append(ForgetWorker(worker=self._legs[-1].ref.worker, attempt=self.attempt, choice=choice))

    def drop(self, out: list[Effect]) -> None:
        """The attempt is over, or the request."""
        for leg in self._legs:
            if not leg.is_done:
                out.append(ForgetWorker(worker=leg.ref.worker, attempt=self.attempt))

    # ---- whether they can be heard ----

    def first_lost(self) -> Leg | None:
        """The one that has been out of reach for longest, of those that must be heard.

        Decode always; prefill until the attempt's first token is here, from whichever of them.
        """
        needed = self._legs[-1:] if self.has_progress else self._legs
        lost = [leg for leg in needed if leg.lost_since_ns is not None]
        return min(lost, key=lambda leg: (leg.lost_since_ns or 0, leg.ref.worker), default=None)

    def check_invariants(self) -> None:
        assert 1 <= len(self._legs) <= 2
        live = [answer.choice for answer in self._answers.live()]
        for leg in self._legs:
            assert leg.is_done or not live or leg.open_choices, f"{leg.ref.worker} was not told that it is done"
            for choice in leg.open_choices:
                assert choice in live or not live or (choice == PROMPT_CHOICE and leg is self._legs[0])

    def _watch(self, leg: Leg, track: Track, out: list[Effect]) -> None:
        watch = Watch(attempt=self.attempt, choice=track.choice, next_position=track.next_position)
        out.append(WatchWorker(ref=leg.ref, watch=watch))
