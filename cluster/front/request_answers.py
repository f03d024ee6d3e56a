"""What a request's client has of each of its answers, and of the prompt's log-probabilities."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from cluster.core.ids import Outcome
from cluster.core.token_messages import PROMPT_CHOICE
from engine.core.request import RequestBody, Sibling


@dataclass(slots=True)
class Track:
    """Tokens that are delivered once each, in order: of an answer, or of the prompt where those are scored.

    Attributes:
        next_position: of the first token that is not delivered yet.
        rewatched_at: the position that was last asked for again because of a gap.
    """

    choice: int
    next_position: int
    rewatched_at: int | None = None


@dataclass(slots=True)
class Answer(Track):
    """One answer. It is live while tokens of it are wanted, then its text may have to be checked, then it has ended.

    Attributes:
        finish: how it ends, unless its text is found to hold a stop string. None while it is live.
        num_tokens: of its output, once it has ended.
    """

    delivered_ids: list[int] = field(default_factory=list)
    finish: Outcome | None = None
    num_tokens: int | None = None

    @property
    def is_live(self) -> bool:
        return self.finish is None

    @property
    def has_ended(self) -> bool:
        return self.num_tokens is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far several answers are: as in `cluster.core.messages.Resubmit`."""

    num_choices: int
    num_delivered: int
    num_unshared: int


class Answers:
    """All of them, by choice. Order is by number."""

    def __init__(self, body: RequestBody) -> None:
        self._body = body
        self._by_choice = {choice: Answer(choice, 0) for choice in sorted(body.choices)}
        self._scores = Track(PROMPT_CHOICE, 1)

    # ---- the prompt's log-probabilities ----

    @property
    def scores(self) -> Track:
        return self._scores

    @property
    def has_scores(self) -> bool:
        """Whether all that are wanted are delivered. Before that no token is: what follows a prompt comes after it."""
        return self._scores.next_position > self._body.num_scores

    # ---- the answers ----

    def get(self, choice: int) -> Answer | None:
        return self._by_choice.get(choice)

    def all(self) -> list[Answer]:
        return list(self._by_choice.values())

    def live(self) -> list[Answer]:
        return [answer for answer in self._by_choice.values() if answer.is_live]

    @property
    def num_delivered(self) -> int:
        """Tokens, of all answers together."""
        return sum(answer.next_position for answer in self._by_choice.values())

    @property
    def num_output_tokens(self) -> int:
        """As delivered, but for what follows a stop string."""
        return sum(
            answer.next_position if answer.num_tokens is None else answer.num_tokens
            for answer in self._by_choice.values()
        )

    @property
    def have_ended(self) -> bool:
        return all(answer.has_ended for answer in self._by_choice.values())

    @property
    def outcome(self) -> Outcome:
        """Of all together, once they have ended: one that was cut makes the whole cut."""
        finishes = [answer.finish for answer in self._by_choice.values()]
        assert all(finish in (Outcome.STOP, Outcome.LENGTH) for finish in finishes)
        return Outcome.LENGTH if Outcome.LENGTH in finishes else Outcome.STOP

    # ---- another attempt ----

    def progress(self) -> Progress:
        """Of the answers that are live, of which there is at least one."""
        positions = [answer.next_position for answer in self.live()]
        least = min(positions)
        num_unshared = sum(position - least for position in positions)
        return Progress(num_choices=len(positions), num_delivered=least, num_unshared=num_unshared)

    def body(self) -> RequestBody:
        """What the next attempt goes on from. At least one answer is live; the one with least delivered leads."""
        live = self.live()
        lead = min(live, key=lambda answer: (answer.next_position, answer.choice))
        sampling = self._body.sampling
        return dataclasses.replace(
            self._body,
            sampling=dataclasses.replace(sampling, prompt_logprobs=None) if self.has_scores else sampling,
            choice=lead.choice,
            delivered_ids=tuple(lead.delivered_ids),
            siblings=tuple(
                Sibling(choice=answer.choice, delivered_ids=tuple(answer.delivered_ids))
                for answer in live
                if answer is not lead
            ),
        )

    def fit(self, body: RequestBody) -> bool:
        """Whether an attempt with this body goes on where the answers are. (Some that it names may have ended.)"""
        siblings = {sibling.choice: sibling.delivered_ids for sibling in body.siblings}
        delivered = {body.choice: body.delivered_ids, **siblings}
        return all(delivered.get(answer.choice) == tuple(answer.delivered_ids) for answer in self.live())

    def check_invariants(self) -> None:
        for choice, answer in self._by_choice.items():
            assert answer.choice == choice and answer.next_position == len(answer.delivered_ids)
            assert not answer.has_ended or not answer.is_live, "an answer ends in some way"
            assert answer.num_tokens is None or answer.num_tokens <= answer.next_position
        assert self.has_scores or not self.num_delivered, "a token was delivered before the prompt's scores"
