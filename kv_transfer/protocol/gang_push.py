"""One push that comes in parts, one a rank: what its parts say, and what that means for the whole.

A push between gangs is an ordinary push between each two ranks of which one writes to the other. To an owner it is
one push: it arrives when every part has, fails with the first part that does, and lets go of its blocks when the last
part has let go. GangReceiver, GangSender and GangLeader keep these books; they cancel the other parts when one fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kv_transfer.protocol.lease import LeaseView
from kv_transfer.protocol.messages import (
    BlocksQuarantined,
    BlocksReleased,
    Grant,
    PushArrived,
    PushEffect,
    PushFailed,
    PushKey,
    PushStats,
    SourceReleased,
)
from kv_transfer.protocol.ranks import worker_of

TargetEffect = PushArrived | PushFailed | BlocksQuarantined | BlocksReleased
"""What a part of a push says at the receiver."""
SourceEffect = PushFailed | SourceReleased
"""And at the sender."""

_WAITED_FOR = ("fencing", "stopping", "receiving", "sending", "ending", "arrived")
"""LeaseView.state: of several parts, the one with the first of these is what the push waits for."""


class PartState(Enum):
    RECEIVING = "receiving"
    ARRIVED = "arrived"
    QUARANTINED = "quarantined"
    RELEASED = "released"


@dataclass(slots=True, kw_only=True)
class IncomingParts:
    """A push at its receiver. The parts are ranks, and are granted the same blocks."""

    grant: Grant
    parts: dict[int, PartState]
    arrivals: dict[int, PushArrived] = field(default_factory=dict)
    is_delivered: bool = False
    """The owner was told that it has arrived; from then on only the owner ends it."""
    failure: str | None = None
    is_quarantined: bool = False

    @classmethod
    def expect(cls, grant: Grant, parts: Sequence[int]) -> IncomingParts:
        return cls(grant=grant, parts=dict.fromkeys(parts, PartState.RECEIVING))

    @property
    def key(self) -> PushKey:
        return self.grant.key

    @property
    def is_released(self) -> bool:
        return all(state is PartState.RELEASED for state in self.parts.values())

    def living_parts(self) -> list[int]:
        """Those that have not been given up yet, and must be when the push fails."""
        return [part for part, state in self.parts.items() if state in (PartState.RECEIVING, PartState.ARRIVED)]

    def take(self, part: int, effect: TargetEffect) -> list[PushEffect]:
        """What the part's word means to the owner. `failure` tells whether the others are to be cancelled."""
        if isinstance(effect, PushArrived):
            return self._on_arrived(part, effect)
        if isinstance(effect, PushFailed):
            return self.fail(f"rank {part}: {effect.reason}" if len(self.parts) > 1 else effect.reason)
        if isinstance(effect, BlocksQuarantined):
            self.parts[part] = PartState.QUARANTINED
            if self.is_quarantined:
                return []
            self.is_quarantined = True
            return [BlocksQuarantined(key=self.key, block_ids=self._block_ids())]
        self.parts[part] = PartState.RELEASED
        return [BlocksReleased(key=self.key, block_ids=self._block_ids())] if self.is_released else []

    def fail(self, reason: str) -> list[PushEffect]:
        """The push will not complete, if that is news."""
        if self.failure is not None:
            return []
        self.failure = reason
        return [PushFailed(key=self.key, reason=reason)]

    def check_invariants(self) -> None:
        states = self.parts.values()
        assert states, "a push without parts waits for nobody"
        arrived = [part for part, state in self.parts.items() if state is PartState.ARRIVED]
        if self.failure is None:
            assert all(state in (PartState.RECEIVING, PartState.ARRIVED) for state in states)
            assert arrived == [part for part in self.parts if part in self.arrivals]
            assert self.is_delivered == (len(arrived) == len(self.parts)), "told exactly when all have arrived"

    def _on_arrived(self, part: int, effect: PushArrived) -> list[PushEffect]:
        if self.failure is not None:
            return []  # it was cancelled meanwhile
        self.parts[part] = PartState.ARRIVED
        self.arrivals[part] = effect
        first = next(iter(self.arrivals.values()))
        for name in ("blocks", "num_blocks", "num_tokens", "first_tokens"):
            ours, theirs = getattr(effect, name), getattr(first, name)
            if ours != theirs:
                return self.fail(f"the ranks contradict each other: {name} is {theirs} of one, {ours} of another")
        if len(self.arrivals) < len(self.parts):
            return []
        self.is_delivered = True
        return [
            PushArrived(
                key=first.key,
                lease_id=first.lease_id,
                blocks=first.blocks,
                num_blocks=first.num_blocks,
                num_tokens=first.num_tokens,
                first_tokens=first.first_tokens,
                stats=_sum_stats([arrival.stats for arrival in self.arrivals.values()]),
            )
        ]

    def _block_ids(self) -> tuple[int, ...]:
        return tuple(block.block_id for block in self.grant.blocks)


@dataclass(slots=True, kw_only=True)
class OutgoingParts:
    """A push at its sender. A part is None until it has released its source."""

    key: PushKey
    parts: dict[int, SourceReleased | None]
    failure: str | None = None

    @classmethod
    def expect(cls, key: PushKey, parts: Sequence[int]) -> OutgoingParts:
        return cls(key=key, parts=dict.fromkeys(parts))

    @property
    def is_released(self) -> bool:
        return all(released is not None for released in self.parts.values())

    def living_parts(self) -> list[int]:
        return [part for part, released in self.parts.items() if released is None]

    def take(self, part: int, effect: SourceEffect) -> list[PushEffect]:
        """As IncomingParts.take. The source is released when no part needs it; committed if all of them are."""
        if isinstance(effect, PushFailed):
            return self.fail(f"to rank {part}: {effect.reason}" if len(self.parts) > 1 else effect.reason)
        self.parts[part] = effect
        if not self.is_released:
            return []
        ends = [released for released in self.parts.values() if released is not None]
        return [
            SourceReleased(
                key=self.key,
                committed=all(end.committed for end in ends),
                settled=all(end.settled for end in ends),
            )
        ]

    def fail(self, reason: str) -> list[PushEffect]:
        if self.failure is not None:
            return []
        self.failure = reason
        return [PushFailed(key=self.key, reason=reason)]

    def check_invariants(self) -> None:
        assert self.parts, "a push without parts goes to nobody"
        ends = [end for end in self.parts.values() if end is not None]
        assert self.failure is not None or all(end.committed for end in ends), "a part failed and nobody was told"


def _sum_stats(stats: Sequence[PushStats]) -> PushStats:
    return PushStats(
        size_bytes=sum(each.size_bytes for each in stats),
        early_bytes=sum(each.early_bytes for each in stats),
        duration_ns=max(each.duration_ns for each in stats),
    )


def joint_view(views: Sequence[LeaseView]) -> LeaseView:
    """The leases of a push's parts as one, with the state and the time left of the part that is waited for."""
    waited_for = min(views, key=lambda view: (_WAITED_FOR.index(view.state), view.remaining_ns))
    return replace(waited_for, peer=worker_of(waited_for.peer))
