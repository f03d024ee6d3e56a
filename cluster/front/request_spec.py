"""What a front knows of a request when it starts: the request itself, and the limits of its waits."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.limits import NS_PER_S
from engine.core.request import RequestBody


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How long a request waits for others before it does something about it.

    Attributes:
        stream_lost_ns: a worker that must be heard may be out of reach for so long; then the attempt is given up.
        coordinator_lost_ns: what needs the coordinator waits so long for it to come back; then the request ends.
    """

    stream_lost_ns: int = 5 * NS_PER_S
    coordinator_lost_ns: int = 10 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A validated request.

    Attributes:
        body: complete; nothing is delivered of any answer yet.
        block_hashes: of the prompt's full blocks, in order, packed.
        deadline_ns: the client's deadline on the owner's clock, None if it has none.
        max_latency_ms: longest time to the first token that is of use to the client, None if there is no limit.
        block_size, extra_key: what else names the blocks that are filled later; 0 where they need no names.
        has_stop_strings: the owner searches the delivered text and reports StopMatched.
    """

    request_id: str
    body: RequestBody
    block_hashes: bytes = b""
    block_size: int = 0
    extra_key: bytes = b""
    tenant: str = ""
    deadline_ns: int | None = None
    max_latency_ms: int | None = None
    has_stop_strings: bool = False
