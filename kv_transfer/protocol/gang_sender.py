"""What leaves one rank of a gang: PushSender's interface over one PushSender for each receiver rank.

See `gang`. Every part writes from the same source blocks, each its own heads of them: they are released when every
part has released them, and committed if every part was. When one part fails the others are cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kv_transfer.protocol.gang_half import GangHalf
from kv_transfer.protocol.gang_push import OutgoingParts, joint_view
from kv_transfer.protocol.lease import LeaseView
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import (
    FirstToken,
    Grant,
    PeerId,
    PushEffect,
    PushFailed,
    PushKey,
    PushMessage,
    SourceReleased,
)
from kv_transfer.protocol.ranks import MAX_PIECES_PER_WRITE, MAX_RANKS, rank_peer
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.protocol.sender import PushSender
from kv_transfer.protocol.sender_push import check_grant


class GangSender:
    """All pushes that leave one rank. `peer` is always a rank's name; a grant's `receiver` names the gang."""

    def __init__(self, limits: PushLimits, checksums: Checksums, rank: int, *, num_layers: int) -> None:
        """As PushSender. The limits hold for the pushes to each receiver rank; a write takes fewer blocks than they
        allow where the checksums of its pieces (at most one a layer of a block) would not fit into one notification."""
        max_blocks = max(1, MAX_PIECES_PER_WRITE // num_layers)
        own_limits = replace(limits, max_blocks_per_write=min(limits.max_blocks_per_write, max_blocks))
        self._rank = rank
        self._half: GangHalf[PushSender, OutgoingParts] = GangHalf(
            lambda _: PushSender(own_limits, checksums, num_layers=num_layers, rank=rank), limits.max_tombstones
        )
        self._pushes = self._half.pushes

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
        refusal = self._half.refusal(parts)
        if refusal is not None:
            failed = PushFailed(key=grant.key, reason=refusal)
            return [failed, SourceReleased(key=grant.key, committed=False)]
        self._pushes[grant.key] = OutgoingParts.expect(grant.key, tuple(parts))
        effects: list[PushEffect] = []
        for rank, part in parts.items():
            opened = self._half.machines[rank].open(now_ns, part, total_blocks, receiver_ranks[rank])
            effects += self._half.absorb(now_ns, rank, opened)
        return effects

    def blocks_ready(
        self, now_ns: int, key: PushKey, blocks: Sequence[tuple[int, int]], layers: range | None = None
    ) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for rank in self._living_parts(key):
            given = self._half.machines[rank].blocks_ready(now_ns, key, blocks, layers)
            effects += self._half.absorb(now_ns, rank, given)
        return effects

    def finish(
        self, now_ns: int, key: PushKey, num_tokens: int, first_tokens: Sequence[FirstToken]
    ) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for rank in self._living_parts(key):
            finished = self._half.machines[rank].finish(now_ns, key, num_tokens, first_tokens)
            effects += self._half.absorb(now_ns, rank, finished)
        return effects

    def cancel(self, now_ns: int, key: PushKey, reason: str) -> list[PushEffect]:
        push = self._pushes.get(key)
        if push is None:
            self._half.ended.add(key, None)
            return []
        return push.fail(reason) + self._half.cancel_parts(now_ns, push, reason)

    # ---- the transport's side --------------------------------------------------------------------------------

    def on_connected(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        return self._half.on_connected(now_ns, peer)

    def on_connect_failed(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        rank = self._half.rank_of(peer)
        if rank is None:
            return []
        return self._half.absorb(now_ns, rank, self._half.machine(rank).on_connect_failed(now_ns, peer, reason))

    def on_peer_gone(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        return self._half.on_peer_gone(now_ns, peer, reason)

    def on_write_completed(self, now_ns: int, write_id: int) -> list[PushEffect]:
        part_id, rank = divmod(write_id, MAX_RANKS)
        return self._half.absorb(now_ns, rank, self._half.machines[rank].on_write_completed(now_ns, part_id))

    def on_write_failed(self, now_ns: int, write_id: int, quiesced: bool, reason: str) -> list[PushEffect]:
        part_id, rank = divmod(write_id, MAX_RANKS)
        failed = self._half.machines[rank].on_write_failed(now_ns, part_id, quiesced, reason)
        return self._half.absorb(now_ns, rank, failed)

    def on_message(self, now_ns: int, peer: PeerId, message: PushMessage) -> list[PushEffect]:
        return self._half.on_message(now_ns, peer, message)

    # ---- time ------------------------------------------------------------------------------------------------

    def on_tick(self, now_ns: int) -> list[PushEffect]:
        return self._half.on_tick(now_ns)

    def next_deadline_ns(self) -> int | None:
        return self._half.next_deadline_ns()

    # ---- views -----------------------------------------------------------------------------------------------

    @property
    def num_pushes(self) -> int:
        return len(self._pushes)

    @property
    def num_ignored_messages(self) -> int:
        return self._half.num_ignored_messages

    def leases(self, now_ns: int) -> list[LeaseView]:
        """One a push, as GangReceiver.leases."""
        parts = self._half.views(now_ns)
        return [joint_view([parts[rank, key] for rank in push.living_parts()]) for key, push in self._pushes.items()]

    def check_invariants(self) -> None:
        self._half.check_invariants()
        states = {part: view.state for part, view in self._half.views(0).items()}
        for key, push in self._pushes.items():
            push.check_invariants()
            for rank in push.parts:
                assert ((rank, key) in states) == (rank in push.living_parts()), "a part is lost"
                if push.failure is not None and (rank, key) in states:
                    assert states[rank, key] == "stopping", "one failed part ends all others"
        assert len(states) == sum(len(push.living_parts()) for push in self._pushes.values())

    # ---- inside ----------------------------------------------------------------------------------------------

    def _living_parts(self, key: PushKey) -> list[int]:
        return self._pushes[key].living_parts() if key in self._pushes else []
