"""Effects of FrontRequest: what its owner is to do, in order."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import AttemptId, Outcome, RefusalCause, WorkerId
from cluster.core.messages import FrontMessage, WorkerRef
from cluster.core.token_messages import TokenInfo, Watch
from cluster.front.request_timeline import RequestReport
from engine.core.request import RequestBody


@dataclass(frozen=True, slots=True, kw_only=True)
class ToCoordinator:
    """Send, with `body` where the message carries one. Dropped without a stream: CoordinatorRegained repeats it."""

    message: FrontMessage
    body: RequestBody | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchWorker:
    """Send the watch on the token stream of that worker, opening the stream if there is none.

    An open stream sends it at once. A stream that is known to be down is answered by WorkerStreamLost now, and by
    WorkerStreamRestored when it is back, which makes the request watch again.
    """

    ref: WorkerRef
    watch: Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetWorker:
    """Send Forget for the attempt to that worker (dropped if its stream is down: the worker's own limit applies).

    With a choice only that answer is meant, and is not to be continued.
    """

    worker: WorkerId
    attempt: AttemptId
    choice: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Hand these tokens to the client: they are positions `position .. position + len(tokens) - 1`, each given once.

    `last` is set where nothing follows and the output is to be searched for stop strings first: answer StopMatched or
    NoStopMatched.
    """

    choice: int
    position: int
    tokens: tuple[TokenInfo, ...]
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverScores:
    """Hand the log-probabilities of these prompt tokens to the client, each once, before any token of an answer."""

    position: int
    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndChoice:
    """That answer is complete, once for each, before a good End."""

    choice: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The request is over; the last effect of its life, and the only one of its kind.

    `is_duplicate`: it never began, since another front has one of that id. `cause`: why the coordinator refused it.
    """

    outcome: Outcome
    reason: str
    retry_after_ms: int | None
    report: RequestReport
    is_duplicate: bool = False
    cause: RefusalCause | None = None


Effect = ToCoordinator | WatchWorker | ForgetWorker | Deliver | DeliverScores | EndChoice | End
