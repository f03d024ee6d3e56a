"""What a failed call means to the user: in words, as an exit code, and as the outcome that `--json` names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import grpc

from cluster.cli.errors import FAILED, INVALID, NOT_FOUND, TRY_LATER
from cluster.core.ids import Outcome
from cluster.wire.channels import RETRY_AFTER_TRAILER

_EXIT_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: INVALID,
    grpc.StatusCode.ALREADY_EXISTS: INVALID,
    grpc.StatusCode.FAILED_PRECONDITION: INVALID,
    grpc.StatusCode.NOT_FOUND: NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE: NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED: NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TRY_LATER,
    grpc.StatusCode.DEADLINE_EXCEEDED: TRY_LATER,
}
_OUTCOMES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: Outcome.REJECTED_INVALID,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.REJECTED_OVERLOAD,
    grpc.StatusCode.DEADLINE_EXCEEDED: Outcome.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: Outcome.CANCELLED,
    grpc.StatusCode.ABORTED: Outcome.WORKER_LOST,
    grpc.StatusCode.INTERNAL: Outcome.INTERNAL,
}
"""Where the front does not name the outcome itself. Other statuses mean that the request never became one."""
NUMBERS: Final = {
    "max_tokens": "--max-tokens",
    "min_tokens": "--min-tokens",
    "num_choices": "--choices",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "repetition_penalty": "--repetition-penalty",
    "seed": "--seed",
    "logprobs": "--logprobs",
    "prompt_logprobs": "--prompt-logprobs",
}
"""Sampling parameters that are one number, and the options of `baton generate` that set them."""
OPTIONS: Final = {
    **{f"sampling.{name}": option for name, option in NUMBERS.items()},
    "sampling.stop_token_ids": "--stop-token-ids",
    "sampling.logit_bias": "--logit-bias",
    "stop": "--stop",
    "tenant": "--tenant",
    "priority": "--priority",
    "max_latency_ms": "--max-latency",
    "prompt": "--prompt",
    "chat": "--chat",
    "chat.messages": "--chat",
    "token_ids": "--token-ids",
    "token_ids.ids": "--token-ids",
    "timeout_ms": "--timeout",
}
"""By the fields of a request that a front's complaints begin with."""
_FIELD: Final = re.compile(r"([a-z_.]+)(?:\[(\d+)\])?: (.*)")
_BY_VALUE: Final = {outcome.value: outcome for outcome in Outcome if outcome not in (Outcome.STOP, Outcome.LENGTH)}
"""Of calls that fail. (`stop` is a field of a request too.)"""
_COORDINATOR_PREFIX: Final = "the coordinator: "
"""A front begins with it the details of what the coordinator, or the connection to it, has answered an operator."""
_LOCAL_DEADLINE: Final = "Deadline Exceeded"
"""In gRPC's own text, bare or as `Stream removed (Deadline Exceeded)`."""
_CONNECTION_WORDS: Final = (
    "failed to connect",
    "socket closed",
    "stream removed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "recvmsg",
    "sendmsg",
    "goaway",
    "ping timeout",
    "keepalive",
    "transport closed",
)
"""Of gRPC's own texts for UNAVAILABLE. A front's own reasons, which have the same status, are in other words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`outcome` is None where the request never became one, or what became of it is not known."""

    message: str
    exit_code: int
    outcome: Outcome | None


def describe_failure(error: grpc.RpcError, address: str) -> Failure:
    code: grpc.StatusCode = error.code()
    outcome, reason = _split_outcome(" ".join((error.details() or "no details").split()))
    kind = code.name.lower() if outcome is None else outcome.value
    message = _in_own_words(code, reason, address) or f"{kind.replace('_', ' ')}: {reason}"
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == RETRY_AFTER_TRAILER:
            message += f" (try again in {value} ms)"
    return Failure(message=message, exit_code=_EXIT_CODES.get(code, FAILED), outcome=outcome or _OUTCOMES.get(code))


def _split_outcome(details: str) -> tuple[Outcome | None, str]:
    """A front begins its details with the outcome, if the request had one."""
    name, _, reason = details.partition(": ")
    outcome = _BY_VALUE.get(name)
    return (None, details) if outcome is None else (outcome, reason)


def _in_own_words(code: grpc.StatusCode, reason: str, address: str) -> str | None:
    """What gRPC has found out by itself, or handed on of the coordinator, or a complaint about a field that an option
    sets; None for what else a front has said.
    """
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _naming_the_option(reason)
    is_about_coordinator = reason.startswith(_COORDINATOR_PREFIX)
    if is_about_coordinator and code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
        return reason.removeprefix(_COORDINATOR_PREFIX)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        if is_about_coordinator:
            return f"the coordinator of the cluster at {address} did not answer in time"
        return "the deadline passed" if _LOCAL_DEADLINE in reason else reason
    if code is grpc.StatusCode.UNAVAILABLE and any(word in reason.lower() for word in _CONNECTION_WORDS):
        if is_about_coordinator:
            return f"the cluster at {address} cannot reach its coordinator at the moment"
        return f"the connection to the cluster at {address} was lost before the answer was complete"
    return None


def _naming_the_option(reason: str) -> str | None:
    """A complaint about one of several values says which: a number from 1, or the token that a bias is for."""
    match = _FIELD.fullmatch(reason)
    option = None if match is None else OPTIONS.get(match[1])
    if match is None or option is None:
        return None
    which = ""
    if match[2] is not None:
        which = f" (token {match[2]})" if option == "--logit-bias" else f" (number {int(match[2]) + 1})"
    return f"{option}{which}: {match[3]}"
