"""What arrives at one rank of a gang: PushReceiver's interface over one PushReceiver for each sender rank.

Between each two ranks of which one writes to the other goes an ordinary push: same key, same lease, same blocks. A
peer's name tells its rank (`ranks.rank_of`), and with it which PushReceiver is meant. What is more than the sum of
the parts (`gang_push`):

* Blocks arrive when the pushes of all sender ranks have, and have said the same of the sequence. A part that has
  arrived waits for the others without a deadline of its own: theirs end the wait.
* When one part fails the others are cancelled. Blocks are released when every part has released them.

`gang_sender` is the other end; `gang_leader` makes one push of what arrives at the ranks of a gang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kv_transfer.protocol.gang_half import GangHalf
from kv_transfer.protocol.gang_push import IncomingParts, PartState, joint_view
from kv_transfer.protocol.lease import LeaseView
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import (
    BlocksReleased,
    Grant,
    PeerId,
    PushAbort,
    PushEffect,
    PushFailed,
    PushKey,
    PushMessage,
)
from kv_transfer.protocol.ranks import rank_peer
from kv_transfer.protocol.receiver import PushReceiver
from kv_transfer.protocol.receiver_push import check_grant
from kv_transfer.protocol.sampling import Checksums


class GangReceiver:
    """All pushes that arrive at one rank. `peer` is always a rank's name; a grant's `sender` names the gang."""

    def __init__(self, limits: PushLimits, checksums: Checksums, *, num_layers: int) -> None:
        """As PushReceiver. The limits hold for each sender rank's pushes and for the whole alike."""
        self._limits = limits
        self._half: GangHalf[PushReceiver, IncomingParts] = GangHalf(
            lambda rank: PushReceiver(limits, checksums, num_layers=num_layers, sender_rank=rank), limits.max_tombstones
        )
        self._pushes = self._half.pushes

    # ---- the owner's side ------------------------------------------------------------------------------------

    def open(self, now_ns: int, grant: Grant, sender_ranks: Sequence[int]) -> list[PushEffect]:
        """As PushReceiver.open, for what those ranks of `grant.sender` write (GangPair.sender_ranks)."""
        check_grant(grant)
        if not sender_ranks or len(dict.fromkeys(sender_ranks)) != len(sender_ranks):
            raise ValueError(f"sender_ranks: {tuple(sender_ranks)}")
        if grant.key in self._pushes or any(p.grant.lease_id == grant.lease_id for p in self._pushes.values()):
            raise ValueError(f"grant: {grant.key} or lease {grant.lease_id} is open already")
        grants = {rank: replace(grant, sender=rank_peer(grant.sender, rank)) for rank in sender_ranks}
        refusal = self._half.refusal(grants) or self._limit_reached()
        if refusal is not None:
            block_ids = tuple(block.block_id for block in grant.blocks)
            return [PushFailed(key=grant.key, reason=refusal), BlocksReleased(key=grant.key, block_ids=block_ids)]
        self._pushes[grant.key] = IncomingParts.expect(grant, sender_ranks)
        effects: list[PushEffect] = []
        for rank, part in grants.items():
            effects += self._half.absorb(now_ns, rank, self._half.machine(rank).open(now_ns, part))
        return effects

    def committed(self, now_ns: int, key: PushKey) -> list[PushEffect]:
        """As PushReceiver.committed; in a gang of several receivers, when the leader says so."""
        push = self._delivered(key)
        effects: list[PushEffect] = []
        for rank in push.parts:
            effects += self._half.machines[rank].committed(now_ns, key)
        self._half.forget(key)
        return effects

    def commit_failed(self, now_ns: int, key: PushKey, reason: str) -> list[PushEffect]:
        push = self._delivered(key)
        return self._give_up(now_ns, push, f"commit failed: {reason}")

    def cancel(self, now_ns: int, key: PushKey, reason: str) -> list[PushEffect]:
        push = self._pushes.get(key)
        if push is None:
            self._half.ended.add(key, None)
            return []
        return self._give_up(now_ns, push, reason)

    def on_sender_stopped(self, now_ns: int, key: PushKey) -> list[PushEffect]:
        """As PushReceiver.on_sender_stopped: of no rank of the sender a write is in flight, and none will start."""
        push = self._pushes.get(key)
        if push is None or (push.is_delivered and push.failure is None):
            return []
        effects = self._give_up(now_ns, push, "the sender stopped")
        for rank in push.parts:
            effects += self._half.absorb(now_ns, rank, self._half.machines[rank].on_sender_stopped(now_ns, key))
        return effects

    def fence(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        rank = self._half.rank_of(peer)
        return [] if rank is None else self._half.absorb(now_ns, rank, self._half.machine(rank).fence(now_ns, peer))

    def on_verified(
        self, now_ns: int, key: PushKey, chunk: int, bad_block_ids: tuple[int, ...], rank: int
    ) -> list[PushEffect]:
        """Answers VerifyBlocks, naming its `rank`."""
        verified = self._half.machine(rank).on_verified(now_ns, key, chunk, bad_block_ids)
        return self._half.absorb(now_ns, rank, verified)

    # ---- the transport's side --------------------------------------------------------------------------------

    def on_connected(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        return self._half.on_connected(now_ns, peer)

    def on_peer_gone(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        return self._half.on_peer_gone(now_ns, peer, reason)

    def on_fenced(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        rank = self._half.rank_of(peer)
        return [] if rank is None else self._half.absorb(now_ns, rank, self._half.machine(rank).on_fenced(now_ns, peer))

    def on_message(self, now_ns: int, peer: PeerId, message: PushMessage) -> list[PushEffect]:
        effects: list[PushEffect] = []
        if isinstance(message, PushAbort):
            # PushReceiver passes over an abort of what has arrived, because its owner commits that at once. Here the
            # other parts are still awaited, and a sender that gave one up has given all of them up.
            effects += self._retract(now_ns, peer, message)
        return effects + self._half.on_message(now_ns, peer, message)

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

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(len(push.grant.blocks) for push in self._pushes.values() if push.failure is not None)

    @property
    def can_grant(self) -> bool:
        return self._limit_reached() is None

    def leases(self, now_ns: int) -> list[LeaseView]:
        """One a push, not one a part; it shows the state and the time left of the part that is waited for."""
        parts = self._half.views(now_ns)
        return [
            joint_view([parts[rank, key] for rank in push.parts if (rank, key) in parts])
            for key, push in self._pushes.items()
        ]

    def check_invariants(self) -> None:
        open_parts = 0
        owned: dict[int, PushKey] = {}
        self._half.check_invariants()
        states = {part: view.state for part, view in self._half.views(0).items()}
        for key, push in self._pushes.items():
            push.check_invariants()
            assert push.failure is None or not push.living_parts(), "one failed part ends all others"
            for block in push.grant.blocks:
                assert owned.setdefault(block.block_id, key) == key, f"block {block.block_id} is granted twice"
            for rank, state in push.parts.items():
                open_parts += state is not PartState.RELEASED
                assert ((rank, key) in states) == (state is not PartState.RELEASED), "a part is lost"
                assert (states.get((rank, key)) == "arrived") == (state is PartState.ARRIVED)
        assert open_parts == len(states), "a part without a push"

    # ---- inside ----------------------------------------------------------------------------------------------

    def _limit_reached(self) -> str | None:
        if len(self._pushes) >= self._limits.max_pushes:
            return f"{len(self._pushes)} pushes are open, which is the limit"
        if self.num_quarantined_blocks > self._limits.max_quarantined_blocks:
            return f"{self.num_quarantined_blocks} blocks are quarantined, which is above the limit"
        return None

    def _delivered(self, key: PushKey) -> IncomingParts:
        push = self._pushes.get(key)
        if push is None or not push.is_delivered or push.failure is not None:
            raise ValueError(f"key: {key} does not wait for a commit")
        return push

    def _retract(self, now_ns: int, peer: PeerId, message: PushAbort) -> list[PushEffect]:
        """Gives up what has arrived from that rank and is awaited from others."""
        push = self._pushes.get(message.key)
        if push is None or push.is_delivered or push.grant.lease_id != message.lease_id:
            return []
        arrived = (rank for rank, state in push.parts.items() if state is PartState.ARRIVED)
        retracted = next((rank for rank in arrived if rank_peer(push.grant.sender, rank) == peer), None)
        if retracted is None:
            return []
        return self._give_up(now_ns, push, f"rank {retracted}: {message.reason}")

    def _give_up(self, now_ns: int, push: IncomingParts, reason: str) -> list[PushEffect]:
        return push.fail(reason) + self._half.cancel_parts(now_ns, push, reason)
