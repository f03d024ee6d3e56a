"""A client in the simulator: what it asked for, what it was given, and the right answer to compare with."""

from __future__ import annotations

from collections.abc import Callable

from cluster.core.ids import Outcome
from cluster.sim.engine_model import Oracle
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
        self.is_unavailable = False
        self.has_left = False
        self.first_token_ns: int | None = None
        self.ended_ns: int | None = None
        self.on_token: Callable[[int], None] = lambda num_tokens: None
        self._now_ns = now_ns
        self._oracle = Oracle(
            request.prompt_ids,
            request.sampling,
            scenario.max_model_tokens,
            stop_pair=request.stop_pair,
            num_variants=scenario.num_variants,
        )

    @property
    def token_ids(self) -> list[int]:
        return self._oracle.token_ids

    @property
    def has_ended(self) -> bool:
        return self.outcome is not None or self.is_unavailable

    def on_tokens(self, position: int, token_ids: tuple[int, ...]) -> int | None:
        """Returns the number of tokens up to the stop string, if that has come."""
        name = self.request.request_id
        if self.has_ended:
            raise Violation(f"{name} was given tokens after its end")
        if position != len(self.token_ids):
            raise Violation(f"{name} was given position {position} after {len(self.token_ids)} tokens")
        if token_ids and self.first_token_ns is None:
            self.first_token_ns = self._now_ns()
        for token_id in token_ids:
            choices = self._oracle.choices()
            if token_id not in choices:
                position = len(self.token_ids)
                raise Violation(f"{name} was given token {token_id} at position {position}, right is {choices}")
            self._oracle.accept(token_id)
            if self._oracle.has_stop_match:
                return len(self.token_ids)
        if token_ids:
            self.on_token(len(self.token_ids))
        return None

    def on_end(self, outcome: Outcome, reason: str, retry_after_ms: int | None) -> None:
        if self.has_ended:
            raise Violation(f"{self.request.request_id} ended as {outcome.value} after it had ended")
        self.outcome, self.reason, self.retry_after_ms = outcome, reason, retry_after_ms
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
        told = f"{name} ended as {outcome.value} ({self.reason}) with {len(self.token_ids)} tokens"
        if outcome in (Outcome.STOP, Outcome.LENGTH):
            if outcome is not self._oracle.outcome:
                raise Violation(f"{told}; right is {self._oracle.outcome or 'to go on'}")
        elif outcome is Outcome.CANCELLED:
            if not self.has_left:
                raise Violation(f"{told}, but its client did not leave")
        elif outcome is Outcome.DEADLINE_EXCEEDED:
            if request.deadline_ns is None:
                raise Violation(f"{told}, but it has no deadline")
        elif outcome is Outcome.REJECTED_INVALID:
            if not request.is_invalid or self.token_ids:
                raise Violation(f"{told}, but it is valid")
        elif outcome is Outcome.REJECTED_OVERLOAD and self.token_ids:
            raise Violation(f"{told}: it had been admitted")
