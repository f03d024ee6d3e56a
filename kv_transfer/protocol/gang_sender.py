"""What leaves one rank of a gang: PushSender's interface over one PushSender for each receiver rank.

See `gang`. Every part writes from the same source blocks, each its own heads of them: they are released when every
part has released them, and committed if every part was. When one part fails the others are cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kv_transfer.protocol.gang_push import OutgoingParts, joint_view
from kv_transfer.protocol.lease import LeaseView, Recent
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import (
    CancelWrite,
    FirstToken,
    Grant,
    PeerId,
    PushEffect,
    PushFailed,
    PushKey,
    PushMessage,
    SourceReleased,
    WriteBlocks,
)
from kv_transfer.protocol.ranks import MAX_PIECES_PER_WRITE, MAX_RANKS, rank_of, rank_peer
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.protocol.sender import PushSender
from kv_transfer.protocol.sender_push import check_grant


class GangSender:
    """All pushes that leave one rank. `peer` is always a rank's name; a grant's `receiver` names the gang."""

    def __init__(self, limits: PushLimits, checksums: Checksums, rank: int, *, num_layers: int) -> None:
        """As PushSender. The limits hold for the pushes to each receiver rank; a write takes fewer blocks than they
        allow where the checksums of its pieces (at most one a layer of a block) would not fit into one notification."""
        max_blocks = max(1, MAX_PIECES_PER_WRITE // num_layers)
        self._checksums = checksums
        self._limits = replace(limits, max_blocks_per_write=min(limits.max_blocks_per_write, max_blocks))
        self._rank = rank
        self._num_layers = num_layers
        self._senders: dict[int, PushSender] = {}
        """By receiver rank."""
        self._pushes: dict[PushKey, tuple[Grant, OutgoingParts]] = {}
        self._ended: Recent[PushKey, None] = Recent(limits.max_tombstones)
        self._num_strangers = 0

    # ---- the owner's side ------------------------------------------------------------------------------------

    def open(self, now_ns: int, grant: Grant, total_blocks: int, receiver_ranks: Mapping[int, int]) -> list[PushEffect]:
        """As PushSender.open, to those ranks of `grant.receiver`, each with the bytes that it is sent of a block
        (GangPair.receiver_ranks)."""
        if not receiver_ranks:
            raise ValueError("receiver_ranks: at least one is needed")
        check_grant(grant, total_blocks)
        if grant.key in self._pushes:
            raise ValueError(f"key: {grant.key} is open already")
        parts = {
            rank: replace(grant, sender=rank_peer(grant.sender, self._rank), receiver=rank_peer(grant.receiver, rank))
            for rank in receiver_ranks
        }
        refusal = self._refusal(parts)
        if refusal is not None:
            failed = PushFailed(key=grant.key, reason=refusal)
            return [failed, SourceReleased(key=grant.key, committed=False)]
        self._pushes[grant.key] = (grant, OutgoingParts.expect(grant.key, tuple(parts)))
        effects: list[PushEffect] = []
        for rank, part in parts.items():
            opened = self._senders[rank].open(now_ns, part, total_blocks, receiver_ranks[rank])
            effects += self._absorb(now_ns, rank, opened)
        return effects

    def blocks_ready(
        self, now_ns: int, key: PushKey, blocks: Sequence[tuple[int, int]], layers: range | None = None
    ) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for rank in self._living_parts(key):
            effects += self._absorb(now_ns, rank, self._senders[rank].blocks_ready(now_ns, key, blocks, layers))
        return effects

    def finish(
        self, now_ns: int, key: PushKey, num_tokens: int, first_tokens: Sequence[FirstToken]
    ) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for rank in self._living_parts(key):
            effects += self._absorb(now_ns, rank, self._senders[rank].finish(now_ns, key, num_tokens, first_tokens))
        return effects

    def cancel(self, now_ns: int, key: PushKey, reason: str) -> list[PushEffect]:
        if key not in self._pushes:
            self._ended.add(key, None)
            return []
        _, push = self._pushes[key]
        return push.fail(reason) + self._cancel_parts(now_ns, push, reason)

    # ---- the transport's side --------------------------------------------------------------------------------

    def on_connected(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        rank = self._rank_of(peer)
        return [] if rank is None else self._absorb(now_ns, rank, self._sender(rank).on_connected(now_ns, peer))

    def on_connect_failed(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        rank = self._rank_of(peer)
        if rank is None:
            return []
        return self._absorb(now_ns, rank, self._sender(rank).on_connect_failed(now_ns, peer, reason))

    def on_peer_gone(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        rank = self._rank_of(peer)
        if rank is None:
            return []
        return self._absorb(now_ns, rank, self._sender(rank).on_peer_gone(now_ns, peer, reason))

    def on_write_completed(self, now_ns: int, write_id: int) -> list[PushEffect]:
        part_id, rank = divmod(write_id, MAX_RANKS)
        return self._absorb(now_ns, rank, self._senders[rank].on_write_completed(now_ns, part_id))

    def on_write_failed(self, now_ns: int, write_id: int, quiesced: bool, reason: str) -> list[PushEffect]:
        part_id, rank = divmod(write_id, MAX_RANKS)
        return self._absorb(now_ns, rank, self._senders[rank].on_write_failed(now_ns, part_id, quiesced, reason))

    def on_message(self, now_ns: int, peer: PeerId, message: PushMessage) -> list[PushEffect]:
        rank = self._rank_of(peer)
        return [] if rank is None else self._absorb(now_ns, rank, self._sender(rank).on_message(now_ns, peer, message))

    # ---- time ------------------------------------------------------------------------------------------------

    def on_tick(self, now_ns: int) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for rank, sender in self._senders.items():
            effects += self._absorb(now_ns, rank, sender.on_tick(now_ns))
        return effects

    def next_deadline_ns(self) -> int | None:
        deadlines = (sender.next_deadline_ns() for sender in self._senders.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # ---- views -----------------------------------------------------------------------------------------------

    @property
    def num_pushes(self) -> int:
        return len(self._pushes)

    @property
    def num_ignored_messages(self) -> int:
        return self._num_strangers + sum(sender.num_ignored_messages for sender in self._senders.values())

    def leases(self, now_ns: int) -> list[LeaseView]:
        """One a push, as GangReceiver.leases."""
        parts = {(rank, view.key): view for rank, sub in self._senders.items() for view in sub.leases(now_ns)}
        return [
            joint_view(grant.receiver, [parts[rank, key] for rank in push.living_parts()])
            for key, (grant, push) in self._pushes.items()
        ]

    def check_invariants(self) -> None:
        states = {(rank, view.key): view.state for rank, sub in self._senders.items() for view in sub.leases(0)}
        for sender in self._senders.values():
            sender.check_invariants()
        for key, (_, push) in self._pushes.items():
            push.check_invariants()
            assert not push.is_released, "what nobody needs is forgotten"
            for rank in push.parts:
                assert ((rank, key) in states) == (rank in push.living_parts()), "a part is lost"
                if push.failure is not None and (rank, key) in states:
                    assert states[rank, key] == "stopping", "one failed part ends all others"
        assert len(states) == sum(len(push.living_parts()) for _, push in self._pushes.values())

    # ---- inside ----------------------------------------------------------------------------------------------

    def _sender(self, rank: int) -> PushSender:
        if rank not in self._senders:
            self._senders[rank] = PushSender(
                self._limits, self._checksums, num_layers=self._num_layers, rank=self._rank
            )
        return self._senders[rank]

    def _refusal(self, parts: Mapping[int, Grant]) -> str | None:
        """No part is opened where one would be refused."""
        for rank, part in parts.items():
            refusal = "it has ended already" if part.key in self._ended else self._sender(rank).refusal(part)
            if refusal is not None:
                return refusal
        return None

    def _rank_of(self, peer: PeerId) -> int | None:
        try:
            return rank_of(peer)
        except ValueError:
            self._num_strangers += 1
            return None

    def _living_parts(self, key: PushKey) -> list[int]:
        return self._pushes[key][1].living_parts() if key in self._pushes else []

    def _cancel_parts(self, now_ns: int, push: OutgoingParts, reason: str) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for rank in push.living_parts():
            effects += self._absorb(now_ns, rank, self._senders[rank].cancel(now_ns, push.key, reason))
        return effects

    def _absorb(self, now_ns: int, rank: int, effects: list[PushEffect]) -> list[PushEffect]:
        """What one part's effects come to for the owner."""
        result: list[PushEffect] = []
        touched: dict[PushKey, OutgoingParts] = {}
        failed: list[OutgoingParts] = []
        for effect in effects:
            if isinstance(effect, WriteBlocks | CancelWrite):
                result.append(replace(effect, write_id=effect.write_id * MAX_RANKS + rank))
                continue
            if not isinstance(effect, PushFailed | SourceReleased):
                result.append(effect)
                continue
            _, push = self._pushes[effect.key]
            touched[effect.key] = push
            had_failed = push.failure is not None
            result += push.take(rank, effect)
            if push.failure is not None and not had_failed:
                failed.append(push)
        # Only now, because the others' words must not come between two of this part's.
        for push in failed:
            assert push.failure is not None
            result += self._cancel_parts(now_ns, push, push.failure)
        for key, push in touched.items():
            if push.is_released and key in self._pushes:
                del self._pushes[key]
                self._ended.add(key, None)
        return result
