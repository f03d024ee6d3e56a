"""The attempts a worker has a part in, and what it measured of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from cluster.core.ids import AttemptId, Outcome
from cluster.core.limits import NS_PER_MS
from cluster.core.messages import LegTimeline
from engine.core.request import RequestBody
from engine.core.step import SequenceKey
from kv_transfer.protocol.lease import Recent
from kv_transfer.protocol.messages import PushKey
from kv_transfer.transport.base import PeerId


class LegKind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"
    PREFIX_SOURCE = "prefix_source"
    """Pushes a cached prefix to another worker."""
    PREFIX_SINK = "prefix_sink"
    """Waits for one."""

    @property
    def is_fetch(self) -> bool:
        return self in (LegKind.PREFIX_SOURCE, LegKind.PREFIX_SINK)


class Phase(Enum):
    """Where a leg is; the last two are on their way out and go once nothing is held of them any more."""

    RESERVED = "reserved"
    """Decode waits for its KV."""
    RUNNING = "running"
    """The scheduler has the sequence."""
    PUSHING = "pushing"
    """Prefill has drawn the first token; the push goes on."""
    CLOSING = "closing"
    """Failed, cancelled, or ended by its first token: nothing of it is wanted any more."""


@dataclass(slots=True, kw_only=True)
class Leg:
    """One attempt's part on this worker. Times are None until they have come.

    Attributes:
        peer: the other side of the push, None for a local leg.
        running: answers that have not ended here. unwanted: of these, the ones that the front has found an end of.
        outcome, num_output_tokens: of the answers that have ended here, all together.
        pinned_blocks: prefix blocks acquired at the reservation, until the sequence or the cancellation takes them.
        num_blocks_ready: leading blocks of the sequence that the receiver has or the push was given (prefill).
        is_unsettled: the push has ended, but a write of it may still land at the receiver. Only the end of the
            receiver's life, or of this one by a fence, releases such a leg.
    """

    attempt: AttemptId
    kind: LegKind
    phase: Phase
    body: RequestBody
    created_ns: int
    running: dict[int, None] = field(init=False)
    unwanted: dict[int, None] = field(default_factory=dict)
    outcome: Outcome | None = None
    num_output_tokens: int = 0
    peer: PeerId | None = None
    pinned_blocks: list[int] = field(default_factory=list)
    num_blocks_ready: int = 0
    is_unsettled: bool = False
    started_ns: int | None = None
    first_token_ns: int | None = None
    joined_ns: int | None = None
    push_ns: int | None = None
    kv_bytes: int = 0
    kv_early_bytes: int = 0
    kv_transport: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.running = dict.fromkeys(self.body.choices)

    @property
    def lead_key(self) -> SequenceKey:
        """The sequence whose input is computed for all."""
        return self.key_of(self.body.choice)

    @property
    def sequence_keys(self) -> list[SequenceKey]:
        """Of all answers, the leading one first."""
        return [self.key_of(choice) for choice in self.body.choices]

    def key_of(self, choice: int) -> SequenceKey:
        return SequenceKey(self.attempt.request_id, self.attempt.attempt, choice)

    @property
    def push_key(self) -> PushKey:
        return push_key_of(self.attempt)

    @property
    def is_leaving(self) -> bool:
        return self.phase in (Phase.PUSHING, Phase.CLOSING)

    @property
    def scores_prompt(self) -> bool:
        """Whether this leg computes log-probabilities of the prompt."""
        return self.kind in (LegKind.PREFILL, LegKind.LOCAL) and self.body.num_scores > 0

    def end_choice(self, choice: int, outcome: Outcome, num_tokens: int) -> None:
        """That answer has ended, with so many tokens. One cut for its length makes the whole one cut."""
        del self.running[choice]
        self.num_output_tokens += num_tokens
        if self.outcome is not Outcome.LENGTH:
            self.outcome = outcome

    def timeline(self, now_ns: int) -> LegTimeline:
        """What has been measured up to now; `decode_ms` ends now."""
        prefill_end_ns = self.first_token_ns
        decode_start_ns = self.joined_ns if self.kind is LegKind.DECODE else self.first_token_ns
        return LegTimeline(
            waiting_ms=_span_ms(self.created_ns, self.started_ns),
            prefill_ms=_span_ms(self.started_ns, prefill_end_ns) if self.kind is not LegKind.DECODE else None,
            push_ms=None if self.push_ns is None else self.push_ns / NS_PER_MS,
            decode_ms=_span_ms(decode_start_ns, now_ns) if self.kind is not LegKind.PREFILL else None,
            kv_bytes=self.kv_bytes,
            kv_early_bytes=self.kv_early_bytes,
            kv_transport=self.kv_transport,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )


class LegTable:
    """All legs by attempt, in the order in which they came, and the attempts that must not come any more."""

    def __init__(self, max_cancelled: int) -> None:
        self._legs: dict[AttemptId, Leg] = {}
        self._cancelled: Recent[AttemptId, None] = Recent(max_cancelled)
        self._num_leaving = 0

    def __len__(self) -> int:
        return len(self._legs)

    def __iter__(self) -> Iterator[Leg]:
        return iter(self._legs.values())

    def get(self, attempt: AttemptId) -> Leg | None:
        return self._legs.get(attempt)

    def of_sequence(self, key: SequenceKey) -> Leg | None:
        return self._legs.get(AttemptId(key.request_id, key.attempt))

    def of_push(self, key: PushKey) -> Leg | None:
        return self._legs.get(attempt_of(key))

    def add(self, leg: Leg) -> None:
        assert leg.attempt not in self._legs
        self._legs[leg.attempt] = leg

    def leave(self, leg: Leg, phase: Phase) -> None:
        """The leg is on its way out (PUSHING or CLOSING)."""
        if not leg.is_leaving:
            self._num_leaving += 1
        leg.phase = phase
        assert leg.is_leaving

    def remove(self, leg: Leg) -> None:
        del self._legs[leg.attempt]
        if leg.is_leaving:
            self._num_leaving -= 1

    def leaving(self) -> list[Leg]:
        if not self._num_leaving:
            return []
        return [leg for leg in self._legs.values() if leg.is_leaving]

    def forbid(self, attempt: AttemptId) -> None:
        """The attempt is cancelled: a command for it that comes later must not start it."""
        self._cancelled.add(attempt, None)

    def is_forbidden(self, attempt: AttemptId) -> bool:
        return attempt in self._cancelled

    def check_invariants(self) -> None:
        assert self._num_leaving == sum(leg.is_leaving for leg in self._legs.values())
        for attempt, leg in self._legs.items():
            assert leg.attempt == attempt
            is_receiving = leg.kind in (LegKind.DECODE, LegKind.PREFIX_SINK)
            assert leg.phase is not Phase.RESERVED or is_receiving, f"{attempt}: {leg.kind} is reserved"
            is_sending = leg.kind in (LegKind.PREFILL, LegKind.PREFIX_SOURCE)
            assert leg.phase is not Phase.PUSHING or is_sending, f"{attempt}: {leg.kind} is pushing"
            assert not leg.is_unsettled or leg.phase is Phase.CLOSING, f"{attempt}: unsettled in phase {leg.phase}"
            assert not leg.pinned_blocks or leg.phase is Phase.RESERVED, f"{attempt}: pins in phase {leg.phase}"


def push_key_of(attempt: AttemptId) -> PushKey:
    return PushKey(attempt.request_id, attempt.attempt)


def attempt_of(key: PushKey) -> AttemptId:
    return AttemptId(key.request_id, key.attempt)


def _span_ms(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / NS_PER_MS
