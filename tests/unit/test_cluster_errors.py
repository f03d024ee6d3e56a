"""The exception tree: every leaf and every outcome has one status."""

from __future__ import annotations

import pytest

from cluster.core import errors
from cluster.core.ids import Outcome

GRPC_CODES = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
}


def _leaves(root: type[errors.BatonError]) -> list[type[errors.BatonError]]:
    children = root.__subclasses__()
    return [leaf for child in children for leaf in _leaves(child)] if children else [root]


def test_every_leaf_is_mapped_and_nothing_else() -> None:
    leaves = [leaf for leaf in _leaves(errors.BatonError) if leaf is not errors.RequestEndedError]
    assert sorted(leaf.__name__ for leaf in leaves) == sorted(leaf.__name__ for leaf in errors.ERROR_STATUS)


def test_the_drawing_names_every_class() -> None:
    drawing = errors.__doc__ or ""
    for leaf in _leaves(errors.BatonError):
        assert leaf.__name__ in drawing


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_a_status(outcome: Outcome) -> None:
    status = errors.status_of(errors.RequestEndedError(outcome, "why"))
    assert status == errors.OUTCOME_STATUS[outcome]
    assert status.grpc in GRPC_CODES and 200 <= status.http < 600
    assert (status.grpc == "OK") == (outcome in (Outcome.STOP, Outcome.LENGTH))


def test_bad_input_is_the_callers_fault() -> None:
    error = errors.InvalidRequestError("temperature", "must be finite, got nan")
    assert str(error) == "temperature: must be finite, got nan"
    assert errors.status_of(error) == errors.Status("INVALID_ARGUMENT", 400)


def test_overload_says_when_to_come_back() -> None:
    error = errors.RequestEndedError(Outcome.REJECTED_OVERLOAD, "queue full", retry_after_ms=250)
    assert error.retry_after_ms == 250 and "queue full" in str(error)
    assert errors.status_of(error).http == 429
