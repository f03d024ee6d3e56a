"""The leader of a gang: makes one push of what arrives at, or leaves from, the gang's ranks.

The ranks of a gang hold the same blocks, and one of them leads: it grants blocks, commits them and lets go of them for
all. Each rank's GangReceiver (or GangSender) tells the leader what it would tell an owner, and the leader tells each
what an owner would. Blocks arrive when they have at every rank and all ranks say the same of the sequence; the owner
commits them once, in the leader's block pool. One rank's failure cancels the push at the others.

Between leader and ranks nothing is lost or reordered: a rank that cannot be heard is lost (`on_rank_lost`), and its
gang's life ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.protocol.gang_push import IncomingParts, OutgoingParts, PartState, SourceEffect, TargetEffect
from kv_transfer.protocol.lease import Recent
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import (
    BlocksReleased,
    Grant,
    PushEffect,
    PushFailed,
    PushKey,
    SourceReleased,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAtRank:
    """Call GangReceiver.open there, with the ranks of the sender that write to it (GangPair.sender_ranks).

    The rank answers, after what GangReceiver had to say, with TargetLeader.on_opened.
    """

    rank: int
    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOutGrant:
    """Every rank watches over its blocks: the sender may be told. Earlier, its writes would find no grant."""

    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAtRank:
    """Call GangReceiver.committed there."""

    rank: int
    key: PushKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAtRank:
    """Call GangReceiver.cancel (or GangSender.cancel) there."""

    rank: int
    key: PushKey
    reason: str


LeaderEffect = PushEffect | OpenAtRank | HandOutGrant | CommitAtRank | CancelAtRank


class TargetLeader:
    """Pushes to a gang. Its owner hears of them what PushReceiver would tell."""

    def __init__(self, limits: PushLimits) -> None:
        self._pushes: dict[PushKey, IncomingParts] = {}
        self._opening: dict[PushKey, list[int]] = {}
        """Ranks that have not answered OpenAtRank."""
        self._ended: Recent[PushKey, None] = Recent(limits.max_tombstones)

    def open(self, grant: Grant, ranks: Sequence[int]) -> list[LeaderEffect]:
        """Watches over the grant's blocks at all of `ranks`. A push that was cancelled before fails at once.

        Raises: ValueError for a push that is open already.
        """
        if grant.key in self._pushes or not ranks:
            raise ValueError(f"grant: {grant.key} is open already, or for no rank")
        push = IncomingParts.expect(grant, ranks)
        if grant.key in self._ended:
            return [PushFailed(key=grant.key, reason="it has ended already"), _released(push)]
        self._pushes[grant.key] = push
        self._opening[grant.key] = list(ranks)
        return [OpenAtRank(rank=rank, grant=grant) for rank in ranks]

    def on_opened(self, rank: int, key: PushKey) -> list[LeaderEffect]:
        """A rank has carried OpenAtRank out. The grant of a push that has failed by then is never handed out."""
        push = self._pushes.get(key)
        if push is None:
            return []
        opening = self._opening[key]
        opening.remove(rank)
        return [HandOutGrant(grant=push.grant)] if push.failure is None and not opening else []

    def on_rank(self, rank: int, effect: TargetEffect) -> list[LeaderEffect]:
        """A rank's GangReceiver has said this."""
        push = self._pushes.get(effect.key)
        if push is None:
            return []
        had_failed = push.failure is not None
        effects: list[LeaderEffect] = [*push.take(rank, effect)]
        if push.failure is not None and not had_failed:
            # The rank that says it has failed needs no telling; one that contradicts the others does.
            spared = rank if isinstance(effect, PushFailed) else None
            effects += self._cancel_parts(push, push.failure, spared)
        if push.is_released:
            self._forget(effect.key)
        return effects

    def on_rank_lost(self, rank: int, reason: str) -> list[LeaderEffect]:
        """The rank's process has ended, and its memory with it: nothing can land in it any more."""
        effects: list[LeaderEffect] = []
        for key, push in list(self._pushes.items()):
            if push.parts.get(rank, PartState.RELEASED) is not PartState.RELEASED:
                effects += self.on_rank(rank, PushFailed(key=key, reason=reason))
                effects += self.on_rank(rank, _released(push))
        return effects

    def committed(self, key: PushKey) -> list[LeaderEffect]:
        """The owner has committed what PushArrived named. Raises: ValueError if nothing of `key` waits for that."""
        push = self._delivered(key)
        self._forget(key)
        return [CommitAtRank(rank=rank, key=key) for rank in push.parts]

    def commit_failed(self, key: PushKey, reason: str) -> list[LeaderEffect]:
        return self._give_up(self._delivered(key), f"commit failed: {reason}")

    def cancel(self, key: PushKey, reason: str) -> list[LeaderEffect]:
        """Gives a push up in any phase; one that is unknown so far will be refused when it is opened."""
        push = self._pushes.get(key)
        if push is None:
            self._ended.add(key, None)
            return []
        return self._give_up(push, reason)

    @property
    def num_pushes(self) -> int:
        return len(self._pushes)

    def check_invariants(self) -> None:
        for push in self._pushes.values():
            push.check_invariants()
            assert not push.is_released, "what nobody holds is forgotten"
        assert list(self._opening) == list(self._pushes)

    def _delivered(self, key: PushKey) -> IncomingParts:
        push = self._pushes.get(key)
        if push is None or not push.is_delivered or push.failure is not None:
            raise ValueError(f"key: {key} does not wait for a commit")
        return push

    def _give_up(self, push: IncomingParts, reason: str) -> list[LeaderEffect]:
        if push.failure is not None:
            return []
        return [*push.fail(reason), *self._cancel_parts(push, reason, None)]

    def _cancel_parts(self, push: IncomingParts, reason: str, spared: int | None) -> list[LeaderEffect]:
        ranks = [rank for rank in push.living_parts() if rank != spared]
        return [CancelAtRank(rank=rank, key=push.grant.key, reason=reason) for rank in ranks]

    def _forget(self, key: PushKey) -> None:
        del self._pushes[key]
        del self._opening[key]
        self._ended.add(key, None)


class SourceLeader:
    """Pushes from a gang. Its owner hears of them that they failed and that the source is released."""

    def __init__(self, limits: PushLimits) -> None:
        self._pushes: dict[PushKey, OutgoingParts] = {}
        self._ended: Recent[PushKey, None] = Recent(limits.max_tombstones)

    def open(self, key: PushKey, ranks: Sequence[int]) -> list[LeaderEffect]:
        """To be called before GangSender.open at all of `ranks`, those that write to somebody.

        A push that was cancelled before fails at once, and is to be opened nowhere.
        Raises: ValueError for a push that is open already.
        """
        if key in self._pushes or not ranks:
            raise ValueError(f"key: {key} is open already, or for no rank")
        if key in self._ended:
            return [PushFailed(key=key, reason="it has ended already"), SourceReleased(key=key, committed=False)]
        self._pushes[key] = OutgoingParts.expect(key, ranks)
        return []

    def on_rank(self, rank: int, effect: SourceEffect) -> list[LeaderEffect]:
        """A rank's GangSender has said this."""
        push = self._pushes.get(effect.key)
        if push is None:
            return []
        had_failed = push.failure is not None
        effects: list[LeaderEffect] = [*push.take(rank, effect)]
        if push.failure is not None and not had_failed:
            effects += self._cancel_parts(push, push.failure, rank)
        if push.is_released:
            del self._pushes[push.key]
            self._ended.add(push.key, None)
        return effects

    def on_rank_lost(self, rank: int, reason: str) -> list[LeaderEffect]:
        """The rank's process has ended. What it had written may still land at a receiver: only a fence settles it."""
        effects: list[LeaderEffect] = []
        for key, push in list(self._pushes.items()):
            if rank in push.living_parts():
                effects += self.on_rank(rank, PushFailed(key=key, reason=reason))
                effects += self.on_rank(rank, SourceReleased(key=key, committed=False, settled=False))
        return effects

    def cancel(self, key: PushKey, reason: str) -> list[LeaderEffect]:
        push = self._pushes.get(key)
        if push is None:
            self._ended.add(key, None)
            return []
        if push.failure is not None:
            return []
        return [*push.fail(reason), *self._cancel_parts(push, reason, None)]

    @property
    def num_pushes(self) -> int:
        return len(self._pushes)

    def check_invariants(self) -> None:
        for push in self._pushes.values():
            push.check_invariants()
            assert not push.is_released, "what nobody needs is forgotten"

    def _cancel_parts(self, push: OutgoingParts, reason: str, spared: int | None) -> list[LeaderEffect]:
        ranks = [rank for rank in push.living_parts() if rank != spared]
        return [CancelAtRank(rank=rank, key=push.key, reason=reason) for rank in ranks]


def _released(push: IncomingParts) -> BlocksReleased:
    return BlocksReleased(key=push.grant.key, block_ids=tuple(block.block_id for block in push.grant.blocks))
