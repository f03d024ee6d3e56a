"""What fronts and workers say to each other on the token stream, as plain data; see cluster.core.messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cluster.core.ids import AttemptId, FrontId, Outcome, WorkerId
from cluster.core.messages import LegTimeline

PROMPT_CHOICE: Final = 65_535
"""Stands for a choice where the tokens are the prompt's: those whose log-probabilities were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHello:
    """First message on a token stream."""

    front: FrontId


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Send this attempt's tokens to this front from `next_position` on. Also how a front resumes after a reconnect.

    A worker that does not know the attempt yet remembers the watch: command and watch may cross.
    """

    attempt: AttemptId
    choice: int
    next_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The front has what it needs of this attempt from this worker: its finished records may go.

    With a choice only that answer is meant, and it is not to be continued: the front has found its end.
    """

    attempt: AttemptId
    choice: int | None = None


TokenRequest = StreamHello | Watch | Forget


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """One emitted token; logprob and top alternatives (token id, logprob) where asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Consecutive tokens of one choice from `position` on, or of the prompt: of PROMPT_CHOICE, from position 1 on.

    `finish` is set on the run with a choice's last token. `leg_done` without `finish` means that this worker (prefill)
    has no more to send and another goes on. `timeline` comes with either, and so far as it is known with the first run.
    """

    attempt: AttemptId
    choice: int
    position: int
    tokens: tuple[TokenInfo, ...]
    finish: Outcome | None = None
    leg_done: bool = False
    timeline: LegTimeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Everything a worker's step has for one front, in one message."""

    worker: WorkerId
    runs: tuple[TokenRun, ...] = field(default=())
