"""The one exception tree of the control plane, and what each leaf is called on the outside.

    BatonError
    ├── ConfigError            the cluster file is refused: file, line, key, what was found, what was expected
    ├── ClusterError
    │   ├── StartupError       a process of the cluster did not come up (port in use, too little memory, ...)
    │   └── UnreachableError   no cluster answers at that address
    └── RequestError
        ├── InvalidRequestError    the request's own fault, found before it was admitted; names the field
        ├── NotFoundError          no such model or request
        ├── DuplicateRequestError  a request of that id is already running
        └── RequestEndedError      the request was admitted or refused, and ended in an outcome without an answer

Servers raise and clients catch these; `status_of` gives the gRPC status code's name and the HTTP status. The names are
strings, because this package imports neither library. Packages below the cluster (engine, kv_transfer) have their own
few exceptions, which the worker turns into a leg's failure; they never reach a client as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.core.ids import Outcome, RefusalCause


@dataclass(frozen=True, slots=True)
class Status:
    """How an error looks from outside: name of a gRPC status code, and the HTTP status."""

    grpc: str
    http: int


class BatonError(Exception):
    """Root of the tree; never raised itself."""


class ConfigError(BatonError):
    """The cluster file is refused; nothing was changed.

    Attributes:
        source: the file, as the user named it. line: 1-based, None where unknown.
        path: the key, such as `pools[1].replicas`; empty for the file as a whole.
        found, expected: in words, for the message. hint: what to do about it, may be empty.
    """

    def __init__(self, *, source: str, line: int | None, path: str, found: str, expected: str, hint: str = "") -> None:
        self.source = source
        self.line = line
        self.path = path
        self.found = found
        self.expected = expected
        self.hint = hint
        where = source if line is None else f"{source}:{line}"
        key = f"{path}: " if path else ""
        tail = f" ({hint})" if hint else ""
        super().__init__(f"{where}: {key}found {found}, expected {expected}{tail}")


class ClusterError(BatonError):
    """The cluster as a whole is not there to be used; never raised itself."""


class StartupError(ClusterError):
    """A part of the cluster did not come up."""


class UnreachableError(ClusterError):
    """No cluster answers at the address."""


class RequestError(BatonError):
    """One request has no answer; never raised itself."""


class InvalidRequestError(RequestError):
    """The request is refused before admission; `field` names what is wrong in it."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(f"{field}: {message}")


class NotFoundError(RequestError):
    """No model or request of that name."""


class DuplicateRequestError(RequestError):
    """A request with this id is running already."""


class RequestEndedError(RequestError):
    """The request ended in an outcome other than `stop` and `length`.

    `cause` and `retry_after_ms` are of one that was refused: None where it was not, or trying again cannot help.
    """

    def __init__(
        self, outcome: Outcome, reason: str, *, retry_after_ms: int | None = None, cause: RefusalCause | None = None
    ) -> None:
        self.outcome = outcome
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        self.cause = cause
        super().__init__(f"{outcome.value}: {reason}")


OUTCOME_STATUS: Final[dict[Outcome, Status]] = {
    Outcome.STOP: Status("OK", 200),
    Outcome.LENGTH: Status("OK", 200),
    Outcome.CANCELLED: Status("CANCELLED", 499),
    Outcome.DEADLINE_EXCEEDED: Status("DEADLINE_EXCEEDED", 504),
    Outcome.REJECTED_INVALID: Status("INVALID_ARGUMENT", 400),
    Outcome.REJECTED_OVERLOAD: Status("RESOURCE_EXHAUSTED", 429),
    Outcome.WORKER_LOST: Status("ABORTED", 503),
    Outcome.TRANSFER_FAILED: Status("ABORTED", 502),
    Outcome.INTERNAL: Status("INTERNAL", 500),
}

ERROR_STATUS: Final[dict[type[BatonError], Status]] = {
    ConfigError: Status("INVALID_ARGUMENT", 400),
    StartupError: Status("FAILED_PRECONDITION", 503),
    UnreachableError: Status("UNAVAILABLE", 503),
    InvalidRequestError: Status("INVALID_ARGUMENT", 400),
    NotFoundError: Status("NOT_FOUND", 404),
    DuplicateRequestError: Status("ALREADY_EXISTS", 409),
}
"""Every leaf but RequestEndedError, whose status is its outcome's."""


def status_of(error: BatonError) -> Status:
    """The status of a leaf of the tree. Raises KeyError for a class that is not in the table (a bug)."""
    if isinstance(error, RequestEndedError):
        return OUTCOME_STATUS[error.outcome]
    return ERROR_STATUS[type(error)]
