"""What legs have for their fronts: a record of tokens for each answer, and one of the prompt where it is scored."""

from __future__ import annotations

from cluster.agent.legs import Leg, LegKind
from cluster.agent.outbox import Outbox
from cluster.core.ids import Outcome
from cluster.core.token_messages import PROMPT_CHOICE, TokenInfo
from engine.core.outcome import EmittedToken, ScoredPrompt

FIRST_SCORED_POSITION = 1
"""Nothing comes before the first token of a prompt."""


class LegOutput:
    """Writes to the outbox, and keeps count of the answers that have ended."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def open(self, leg: Leg) -> None:
        """A leg has come. Its answers go on after what has been delivered of each."""
        body = leg.body
        self._outbox.open(leg.attempt, body.choice, first_position=len(body.delivered_ids))
        for sibling in body.siblings:
            self._outbox.open(leg.attempt, sibling.choice, first_position=len(sibling.delivered_ids))
        if leg.scores_prompt:
            self._outbox.open(leg.attempt, PROMPT_CHOICE, first_position=FIRST_SCORED_POSITION)

    def scored(self, leg: Leg, part: ScoredPrompt) -> None:
        tokens = [TokenInfo(token_id=token.token_id, logprob=token.logprob, top=token.top) for token in part.tokens]
        self._outbox.append(leg.attempt, PROMPT_CHOICE, part.position, tokens)

    def emitted(self, now_ns: int, leg: Leg, emitted: EmittedToken) -> None:
        """An answer's next token, and its end if it is the last."""
        if leg.first_token_ns is None:
            leg.first_token_ns = now_ns
            if leg.scores_prompt:
                self._outbox.end(now_ns, leg.attempt, PROMPT_CHOICE, finish=None, timeline=leg.timeline(now_ns))
            for choice in leg.running:
                self._outbox.measured(leg.attempt, choice, leg.timeline(now_ns))
        choice = emitted.key.choice
        token = TokenInfo(token_id=emitted.token_id, logprob=emitted.logprob, top=emitted.top)
        self._outbox.append(leg.attempt, choice, emitted.position, (token,))
        outcome = outcome_of(emitted)
        if outcome is not None:
            self.end(now_ns, leg, choice, outcome, num_tokens=emitted.position + 1)

    def end(self, now_ns: int, leg: Leg, choice: int, outcome: Outcome, *, num_tokens: int) -> None:
        leg.end_choice(choice, outcome, num_tokens)
        self._outbox.end(now_ns, leg.attempt, choice, finish=outcome, timeline=leg.timeline(now_ns))

    def hand_over(self, now_ns: int, leg: Leg) -> None:
        """Prefill has drawn what it had to: what has not ended goes on at decode."""
        assert leg.kind is LegKind.PREFILL
        for choice in leg.running:
            self._outbox.end(now_ns, leg.attempt, choice, finish=None, timeline=leg.timeline(now_ns))

    def drop(self, leg: Leg) -> None:
        self._outbox.drop(leg.attempt)


def outcome_of(emitted: EmittedToken) -> Outcome | None:
    if emitted.finish_reason is None:
        return None
    return Outcome.STOP if emitted.finish_reason == "stop" else Outcome.LENGTH
