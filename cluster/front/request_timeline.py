"""Where a request's time went: put together from the coordinator's, the workers' and the front's own measurements."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from cluster.core.limits import NS_PER_MS
from cluster.core.messages import LegTimeline, Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """What the client learns beside its tokens. Durations in milliseconds; None where it did not happen or is unknown.

    Attributes:
        queued_ms, reserved_ms: of the last attempt, as the coordinator measured them.
        prefill_ms, push_ms: of the last attempt, as its workers measured them.
        first_token_ms: from the start of the request to its first token, as delivered.
        decode_ms: from the first delivered token to the last.
        handover_gap_ms: in the last attempt, the gap before the second token less the median of the later gaps, of
            the answer that came first; None where no hand-over took place or no gap follows it.
        prefill_worker, decode_worker: names of the last attempt's workers; prefill is empty where one worker did
            everything, both where the request was never placed.
        num_cached_tokens: prompt tokens whose KV was found in a prefix cache; None while no worker has said.
        kv_bytes, kv_early_bytes: None unless decode has said that it took the KV over, or reads the prompt itself.
        num_attempts: attempts that ran.
        route, route_reason: which way the last attempt took, and why; empty where the request was never placed.
    """

    num_output_tokens: int
    num_attempts: int
    num_cached_tokens: int | None
    prefill_worker: str
    decode_worker: str
    kv_bytes: int | None
    kv_early_bytes: int | None
    kv_transport: str
    queued_ms: float | None
    reserved_ms: float | None
    prefill_ms: float | None
    push_ms: float | None
    first_token_ms: float | None
    decode_ms: float | None
    handover_gap_ms: float | None
    route: str = ""
    route_reason: str = ""


class TimelineRecorder:
    """Collects one request's measurements. The attempt's part starts anew with every placement."""

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._first_token_ns: int | None = None
        self._last_token_ns: int | None = None
        self._num_tokens = 0
        self._num_attempts = 0
        self._placed: Placed | None = None
        self._legs: list[LegTimeline] = []
        self._attempt_token_ns: list[int] = []
        self._attempt_choice: int | None = None

    def placed(self, placed: Placed) -> None:
        self._placed = placed
        self._num_attempts += 1
        self._legs = []
        self._attempt_token_ns = []
        self._attempt_choice = None

    def leg(self, timeline: LegTimeline) -> None:
        """A worker of the current attempt has reported its part, or what it has measured of it so far."""
        self._legs.append(timeline)

    def tokens(self, now_ns: int, choice: int, num_tokens: int) -> None:
        """So many tokens of that answer were delivered now."""
        if self._first_token_ns is None:
            self._first_token_ns = now_ns
        self._last_token_ns = now_ns
        self._num_tokens += num_tokens
        if self._attempt_choice is None:
            self._attempt_choice = choice
        if choice == self._attempt_choice:
            self._attempt_token_ns.extend([now_ns] * num_tokens)

    def report(self, *, num_output_tokens: int, num_prompt_tokens: int) -> RequestReport:
        placed = self._placed
        push_ms = [leg.push_ms for leg in self._legs if leg.push_ms is not None]
        prefill_ms = [leg.prefill_ms for leg in self._legs if leg.prefill_ms is not None]
        cached = max((leg.num_cached_tokens for leg in self._legs), default=None)
        is_kv_known = bool(push_ms) or (placed is not None and placed.prefill is None)
        return RequestReport(
            num_output_tokens=num_output_tokens,
            num_attempts=self._num_attempts,
            # In a later attempt delivered tokens are read like a prompt, and may be found in a cache as well.
            num_cached_tokens=None if cached is None else min(cached, num_prompt_tokens),
            prefill_worker=placed.prefill.worker.name if placed and placed.prefill else "",
            decode_worker=placed.decode.worker.name if placed else "",
            # A worker may report more than once, and of a push both its ends.
            kv_bytes=max((leg.kv_bytes for leg in self._legs), default=0) if is_kv_known else None,
            kv_early_bytes=max((leg.kv_early_bytes for leg in self._legs), default=0) if is_kv_known else None,
            kv_transport=next((leg.kv_transport for leg in reversed(self._legs) if leg.kv_transport), ""),
            queued_ms=placed.queued_ms if placed else None,
            reserved_ms=placed.reserved_ms if placed else None,
            prefill_ms=prefill_ms[0] if prefill_ms else None,
            push_ms=push_ms[-1] if push_ms else None,
            first_token_ms=_elapsed_ms(self._start_ns, self._first_token_ns),
            decode_ms=_elapsed_ms(self._first_token_ns, self._last_token_ns),
            handover_gap_ms=self._handover_gap_ms(),
            route=placed.route.value if placed else "",
            route_reason=placed.why if placed else "",
        )

    def _handover_gap_ms(self) -> float | None:
        times = self._attempt_token_ns
        if self._placed is None or self._placed.prefill is None or len(times) < 3:
            return None
        later = [(after - before) / NS_PER_MS for before, after in pairwise(times[1:])]
        return (times[1] - times[0]) / NS_PER_MS - median(later)


def _elapsed_ms(since_ns: int | None, until_ns: int | None) -> float | None:
    if since_ns is None or until_ns is None:
        return None
    return (until_ns - since_ns) / NS_PER_MS
