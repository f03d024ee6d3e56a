"""Events of FrontRequest: everything its owner (the front's process, or the simulator) can tell it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import WorkerId
from cluster.core.messages import AttemptFailed, EndRequest, Placed, Refused
from cluster.core.token_messages import TokenRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first event: the request goes to the coordinator, whose epoch it is; None where there is none."""

    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCoordinator:
    """A message that names this request."""

    message: Refused | Placed | AttemptFailed | EndRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLost:
    """The stream to the coordinator has ended. What was not answered on it may never have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRegained:
    """A new stream is open, welcomed, and this request was announced on it (see FrontRequest.live()).

    `epoch`: of the coordinator, which may be another one than before.
    """

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReceived:
    """A run of tokens of this request, of whichever attempt, from that life of a worker."""

    worker: WorkerId
    run: TokenRun


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStreamLost:
    """The token stream to that worker has ended, or cannot be opened. Repeated reports are harmless."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStreamRestored:
    """The token stream to that worker is open (again); what was watched on an older one is not any more."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGone:
    """The client has cancelled, disconnected, asked for an abort, or does not read what it is sent."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatched:
    """That answer's delivered text holds a stop string, completed by the token that is number `num_tokens` (from 1)."""

    choice: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStopMatched:
    """Answers the Deliver that was marked `last`: its text was searched and holds no stop string."""

    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; the owner sends one at FrontRequest.next_deadline_ns() at the latest."""


Event = (
    Start
    | FromCoordinator
    | CoordinatorLost
    | CoordinatorRegained
    | RunReceived
    | WorkerStreamLost
    | WorkerStreamRestored
    | ClientGone
    | StopMatched
    | NoStopMatched
    | Tick
)
