"""A client in the simulator: what it asked for, what it was given, and the right answers to compare with."""

from __future__ import annotations

from collections.abc import Callable

from cluster.core.ids import Outcome, RefusalCause
from cluster.core.token_messages import TokenInfo
from cluster.sim.engine_model import Oracle, prompt_logprobs
from cluster.sim.scenario import Request, Scenario


class Violation(Exception):
    """The cluster broke a promise."""


class Client:
    """Receives one request's tokens and its end, and complains the moment either is wrong."""

    def __init__(self, request: Request, scenario: Scenario, now_ns: Callable[[], int]) -> None:
        self.request = request
        self.outcome: Outcome | None = None
        self.reason = ""
        self.retry_after_ms: int | None = None
        self.refusal: RefusalCause | None = None
        self.is_unavailable = False
        self.has_left = False
        self.first_token_ns: int | None = None
        self.ended_ns: int | None = None
        self.on_token: Callable[[int], None] = lambda num_tokens: None
        self._now_ns = now_ns
        self._oracles = [
            Oracle(
                request.prompt_ids,
                request.sampling,
                scenario.max_model_tokens,
                choice=choice,
                stop_pair=request.stop_pair,
                num_variants=scenario.num_variants,
            )
            for choice in range(request.num_choices)
        ]
        self._finishes: dict[int, Outcome] = {}
        self._scores: list[float | None] = []
        self._right_scores = prompt_logprobs(request.prompt_ids, request.sampling)

    @property
    def token_ids(self) -> list[int]:
        """Of the first answer."""
        return self._oracles[0].token_ids

    @property
    def num_tokens(self) -> int:
        return sum(len(oracle.token_ids) for oracle in self._oracles)

    @property
    def num_scores(self) -> int:
        """Prompt tokens whose log-probabilities it has."""
        return len(self._scores)

    @property
    def has_ended(self) -> bool:
        return self.outcome is not None or self.is_unavailable

    def on_scores(self, position: int, tokens: tuple[TokenInfo, ...]) -> None:
        """Log-probabilities of the prompt."""
        name = self.request.request_id
        if self.has_ended or self.num_tokens:
            raise Violation(f"{name} was given scores of its prompt after its tokens or its end")
        if position != 1 + len(self._scores):
            raise Violation(f"{name} was given scores from {position} on after {len(self._scores)}")
        self._scores += [token.logprob for token in tokens]
        token_ids = tuple(token.token_id for token in tokens)
        if token_ids != self.request.prompt_ids[position : position + len(tokens)]:
            raise Violation(f"{name} was given scores of {token_ids} at {position}, which is not its prompt")
        if self._scores != self._right_scores[: len(self._scores)]:
            raise Violation(f"{name} was given scores {self._scores}, right is {self._right_scores}")

    def on_tokens(self, choice: int, position: int, token_ids: tuple[int, ...]) -> int | None:
        """Returns the number of the answer's tokens up to the stop string, if that has come."""
        name, oracle = f"{self.request.request_id}/{choice}", self._oracles[choice]
        if self.has_ended or choice in self._finishes:
            raise Violation(f"{name} was given tokens after its end")
        if len(self._scores) != len(self._right_scores):
            raise Violation(f"{name} was given tokens with {len(self._scores)} of {len(self._right_scores)} scores")
        if position != len(oracle.token_ids):
            raise Violation(f"{name} was given position {position} after {len(oracle.token_ids)} tokens")
        if token_ids and self.first_token_ns is None:
            self.first_token_ns = self._now_ns()
        for token_id in token_ids:
            choices = oracle.choices()
            if token_id not in choices:
                position = len(oracle.token_ids)
                raise Violation(f"{name} was given token {token_id} at position {position}, right is {choices}")
            oracle.accept(token_id)
            if oracle.has_stop_match:
                return len(oracle.token_ids)
        if token_ids:
            self.on_token(self.num_tokens)
        return None

    def on_choice_end(self, choice: int, outcome: Outcome) -> None:
        name, right = f"{self.request.request_id}/{choice}", self._oracles[choice].outcome
        if self.has_ended or choice in self._finishes:
            raise Violation(f"{name} ended as {outcome.value} after it had ended")
        if outcome is not right:
            raise Violation(f"{name} ended as {outcome.value}, right is {right or 'to go on'}")
        self._finishes[choice] = outcome

    def on_end(
        self, outcome: Outcome, reason: str, retry_after_ms: int | None, refusal: RefusalCause | None = None
    ) -> None:
        if self.has_ended:
            raise Violation(f"{self.request.request_id} ended as {outcome.value} after it had ended")
        self.outcome, self.reason, self.retry_after_ms, self.refusal = outcome, reason, retry_after_ms, refusal
        self.ended_ns = self._now_ns()
        self._judge(outcome)

    def on_unavailable(self) -> None:
        """The front is dead: the connection breaks, which after the end is of no interest."""
        if not self.has_ended:
            self.is_unavailable = True
            self.ended_ns = self._now_ns()

    def _judge(self, outcome: Outcome) -> None:
        """Whether this outcome may be, whatever happened in the cluster."""
        request, name = self.request, self.request.request_id
        told = f"{name} ended as {outcome.value} ({self.reason}) with {self.num_tokens} tokens"
        if outcome in (Outcome.STOP, Outcome.LENGTH):
            if len(self._finishes) != request.num_choices:
                raise Violation(
                    f"{told}, but only {sorted(self._finishes)} of {request.num_choices} answers have ended"
                )
            is_cut = Outcome.LENGTH in self._finishes.values()
            if outcome is not (Outcome.LENGTH if is_cut else Outcome.STOP):
                raise Violation(f"{told}, but its answers as {self._finishes}")
        elif outcome is Outcome.CANCELLED:
            if not self.has_left:
                raise Violation(f"{told}, but its client did not leave")
        elif outcome is Outcome.DEADLINE_EXCEEDED:
            if request.deadline_ns is None:
                raise Violation(f"{told}, but it has no deadline")
        elif outcome is Outcome.REJECTED_INVALID:
            if not request.is_invalid or self.num_tokens:
                raise Violation(f"{told}, but it is valid")
        elif outcome is Outcome.REJECTED_OVERLOAD and self.num_tokens:
            raise Violation(f"{told}: it had been admitted")
