"""The receiver's half of a push: watches over reserved blocks until they are committed or nothing can land in them.

Rules (ARCHITECTURE.md §5, §7):
* Only PushEnd of the current round leads to a commit, after every chunk it counts has arrived and proved good, and
  with them every layer of every block that it counts. The sender sends it with no write in flight and writes again
  only when asked, so nothing lands after the commit.
* Blocks of a push that ends otherwise are quarantined. They are released when the sender has acknowledged that it
  stopped (by PushAbort, or relayed: on_sender_stopped) or when its life is fenced, never by time alone.
* A lease is a duration from the last word about it. When it expires the push is given up and the fence begins: the
  sender is asked to stop, and a life that has not answered within `stop_timeout_ns` is fenced.
* What does not match a grant (life, lease, generation) is not believed; a chunk that contradicts its own grant
  fails the push.
"""

from __future__ import annotations

from kv_transfer.protocol.lease import LeaseView, Recent
from kv_transfer.protocol.limits import MAX_MISSING_CHUNKS, PushLimits
from kv_transfer.protocol.messages import (
    BlocksQuarantined,
    BlocksReleased,
    FencePeer,
    Grant,
    LeaseRenew,
    PeerId,
    PushAbort,
    PushArrived,
    PushChunk,
    PushCommitted,
    PushEffect,
    PushEnd,
    PushFailed,
    PushKey,
    PushMessage,
    PushMissing,
    PushStop,
    SendMessage,
    VerifyBlocks,
)
from kv_transfer.protocol.receiver_push import ChunkState, IncomingPush, ReceiverPhase, check_grant
from kv_transfer.protocol.sampling import Checksums, summed_positions


class PushReceiver:
    """All pushes that arrive at one worker. Every method returns what its owner has to do; none blocks.

    Messages for the other half (PushStop, PushMissing, PushCommitted, LeaseRenew that replies) are passed over, so
    an owner of both halves may give every message to both.
    """

    def __init__(self, limits: PushLimits, checksums: Checksums, *, num_layers: int, sender_rank: int = 0) -> None:
        """`checksums`: which blocks are to be verified; a chunk that comes without the sum of one of them counts as
        lost, so that nothing is taken over unverified because a sender sums less. Sums beyond those are verified as
        well. `num_layers`: of a block. `sender_rank`: that all senders have within their gangs (GangReceiver has one of
        us for each)."""
        self._num_layers = num_layers
        self._checksums = checksums
        self._sender_rank = sender_rank
        self.num_ignored_messages = 0
        self._limits = limits
        self._pushes: dict[PushKey, IncomingPush] = {}
        self._connected: dict[PeerId, None] = {}
        self._fencing: dict[PeerId, None] = {}
        self._fenced: Recent[PeerId, None] = Recent(limits.max_fenced_lives)
        self._committed: Recent[PushKey, tuple[int, PeerId]] = Recent(limits.max_tombstones)
        """Lease and sender of recent commits: a late PushEnd is answered again."""
        self._ended: Recent[PushKey, None] = Recent(limits.max_tombstones)
        """Pushes that ended otherwise, or were cancelled before they were opened."""

    # ---- the owner's side ------------------------------------------------------------------------------------

    def open(self, now_ns: int, grant: Grant) -> list[PushEffect]:
        """Watches over the grant's reserved blocks from now on.

        The push fails at once, and its blocks are released, if it was cancelled before, if the sender's life is
        fenced, or at a limit. Raises: ValueError for a malformed grant, or for a push that is open already.
        """
        check_grant(grant)
        if grant.key in self._pushes or any(p.grant.lease_id == grant.lease_id for p in self._pushes.values()):
            raise ValueError(f"grant: {grant.key} or lease {grant.lease_id} is open already")
        refusal = self.refusal(grant)
        push = IncomingPush(
            grant=grant,
            num_layers=self._num_layers,
            opened_ns=now_ns,
            lease_deadline_ns=now_ns + grant.ttl_ns,
            sender_rank=self._sender_rank,
        )
        if refusal is not None:
            return [PushFailed(key=grant.key, reason=refusal), _released(push)]
        effects = self._evict_older_lives(now_ns, grant.sender)
        self._pushes[grant.key] = push
        return effects

    def committed(self, now_ns: int, key: PushKey) -> list[PushEffect]:
        """The owner has committed what PushArrived named. Raises: ValueError if nothing of `key` waits for that."""
        push = self._arrived(key)
        del self._pushes[key]
        self._committed.add(key, (push.grant.lease_id, push.peer))
        return self._send(push.peer, PushCommitted(key=key, lease_id=push.grant.lease_id))

    def commit_failed(self, now_ns: int, key: PushKey, reason: str) -> list[PushEffect]:
        """The owner could not commit what PushArrived named: the push is given up as by a cancel."""
        return self._give_up(now_ns, self._arrived(key), f"commit failed: {reason}")

    def cancel(self, now_ns: int, key: PushKey, reason: str) -> list[PushEffect]:
        """Gives a push up in any phase; one that is unknown so far will be refused when it is opened."""
        push = self._pushes.get(key)
        if push is None:
            self._ended.add(key, None)
            return []
        return [] if push.is_quarantined else self._give_up(now_ns, push, reason)

    def on_sender_stopped(self, now_ns: int, key: PushKey) -> list[PushEffect]:
        """Somebody who knows says that no write of this push is in flight and none will start."""
        push = self._pushes.get(key)
        if push is None or push.phase is ReceiverPhase.ARRIVED:
            return []
        failed = [] if push.is_quarantined else [PushFailed(key=key, reason="the sender stopped")]
        return [*failed, self._release(push)]

    def fence(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        """Gives up that life of a sender: its pushes fail, and stay quarantined until on_fenced."""
        effects: list[PushEffect] = []
        for push in self._pushes_of(peer):
            if push.phase is ReceiverPhase.RECEIVING:
                effects += self._fail(push, f"{peer.name} is fenced")
            if push.phase is not ReceiverPhase.ARRIVED:
                push.phase = ReceiverPhase.FENCING
        if peer not in self._fencing and peer not in self._fenced:
            self._fencing[peer] = None
            effects.append(FencePeer(peer=peer))
        return effects

    def on_verified(self, now_ns: int, key: PushKey, chunk: int, bad_block_ids: tuple[int, ...]) -> list[PushEffect]:
        """Answers VerifyBlocks: the blocks of the chunk whose sums do not match."""
        push = self._pushes.get(key)
        arrived = None if push is None else push.chunks.get(chunk)
        if push is None or arrived is None or arrived.state is not ChunkState.VERIFYING:
            return []
        arrived.state = ChunkState.BAD if bad_block_ids else ChunkState.GOOD
        return self._evaluate(now_ns, push)

    # ---- the transport's side --------------------------------------------------------------------------------

    def on_connected(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        effects = self._evict_older_lives(now_ns, peer)
        self._connected[peer] = None
        for push in self._pushes_of(peer):
            if push.phase is ReceiverPhase.STOPPING:
                effects += self._send_stop(now_ns, push)
        return effects

    def on_peer_gone(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        """A life that loses its connection while it holds leases is given up: nothing it says can be heard."""
        self._connected.pop(peer, None)
        holding = [push for push in self._pushes_of(peer) if push.phase is not ReceiverPhase.ARRIVED]
        if not holding:
            return []
        effects: list[PushEffect] = []
        for push in holding:
            if push.phase is ReceiverPhase.RECEIVING:
                effects += self._fail(push, f"lost {peer.name}: {reason}")
        return effects + self.fence(now_ns, peer)

    def on_fenced(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for effect in self.fence(now_ns, peer):
            if not isinstance(effect, FencePeer):
                effects.append(effect)
        self._fencing.pop(peer, None)
        self._fenced.add(peer, None)
        self._connected.pop(peer, None)
        for push in self._pushes_of(peer):
            if push.phase is ReceiverPhase.FENCING:
                effects.append(self._release(push))
        return effects

    def on_message(self, now_ns: int, peer: PeerId, message: PushMessage) -> list[PushEffect]:
        if isinstance(message, LeaseRenew):
            return [] if message.is_reply else self._on_renew(now_ns, peer, message)
        if not isinstance(message, PushChunk | PushEnd | PushAbort):
            return []
        push = self._pushes.get(message.key)
        if push is None:
            return self._on_unknown(peer, message)
        if push.peer != peer or push.grant.lease_id != message.lease_id:
            self.num_ignored_messages += 1
            return []
        if isinstance(message, PushAbort):
            return self._on_abort(now_ns, push, message)
        if push.phase is not ReceiverPhase.RECEIVING:
            return []
        push.lease_deadline_ns = now_ns + push.grant.ttl_ns
        if isinstance(message, PushChunk):
            return self._on_chunk(now_ns, push, message)
        return self._on_end(now_ns, push, message)

    # ---- time ------------------------------------------------------------------------------------------------

    def on_tick(self, now_ns: int) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for push in list(self._pushes.values()):
            if push.phase is ReceiverPhase.RECEIVING and now_ns >= push.lease_deadline_ns:
                effects += self._give_up(now_ns, push, "lease expired")
            elif push.phase is ReceiverPhase.STOPPING and now_ns >= push.stop_deadline_ns:
                effects += self.fence(now_ns, push.peer)
            elif push.phase is ReceiverPhase.STOPPING and now_ns >= push.stop_due_ns:
                effects += self._send_stop(now_ns, push)
        return effects

    def next_deadline_ns(self) -> int | None:
        if not self._pushes:  # asked after every event of a worker
            return None
        deadlines = [push.next_deadline_ns(push.peer in self._connected) for push in self._pushes.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # ---- views -----------------------------------------------------------------------------------------------

    @property
    def num_pushes(self) -> int:
        return len(self._pushes)

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(len(push.grant.blocks) for push in self._pushes.values() if push.is_quarantined)

    @property
    def can_grant(self) -> bool:
        """False at the limits above which `open` refuses everything."""
        return self._limit_reached() is None

    def refusal(self, grant: Grant) -> str | None:
        """Why `open` would refuse the grant at once; None if it would not."""
        if grant.key in self._ended or grant.key in self._committed:
            return "it has ended already"
        if grant.sender in self._fencing or grant.sender in self._fenced:
            return f"that life of {grant.sender.name} is fenced"
        return self._limit_reached()

    def leases(self, now_ns: int) -> list[LeaseView]:
        return [
            LeaseView(
                lease_id=push.grant.lease_id,
                key=push.grant.key,
                peer=push.peer,
                side="reserved",
                num_blocks=len(push.grant.blocks),
                age_ns=now_ns - push.opened_ns,
                remaining_ns=max(0, push.lease_deadline_ns - now_ns),
                state=push.phase.value,
            )
            for push in self._pushes.values()
        ]

    def check_invariants(self) -> None:
        owned: dict[int, PushKey] = {}
        leases: dict[int, PushKey] = {}
        for key, push in self._pushes.items():
            push.check_invariants()
            assert leases.setdefault(push.grant.lease_id, key) == key, "two pushes share a lease"
            for block_id in push.block_ids:
                assert owned.setdefault(block_id, key) == key, f"block {block_id} is granted twice"
            if push.phase is ReceiverPhase.FENCING:
                assert push.peer in self._fencing, "nobody fences that life"
            else:
                assert push.phase is ReceiverPhase.ARRIVED or push.peer not in self._fencing
            assert push.phase is ReceiverPhase.ARRIVED or push.peer not in self._fenced
        assert len(self._pushes) <= self._limits.max_pushes

    # ---- messages --------------------------------------------------------------------------------------------

    def _on_renew(self, now_ns: int, peer: PeerId, message: LeaseRenew) -> list[PushEffect]:
        named = dict.fromkeys(message.lease_ids)
        alive = []
        for push in self._pushes_of(peer):
            if push.grant.lease_id in named and not push.is_quarantined:
                push.lease_deadline_ns = now_ns + push.grant.ttl_ns
                alive.append(push.grant.lease_id)
        if not alive:
            return []
        return self._send(peer, LeaseRenew(lease_ids=tuple(alive), sent_ns=message.sent_ns, is_reply=True))

    def _on_unknown(self, peer: PeerId, message: PushChunk | PushEnd | PushAbort) -> list[PushEffect]:
        """A push that is not open here: committed already, or over; its sender must learn which."""
        if isinstance(message, PushAbort):
            return []
        if self._committed.get(message.key) == (message.lease_id, peer):
            if isinstance(message, PushEnd):
                return self._send(peer, PushCommitted(key=message.key, lease_id=message.lease_id))
            return []
        self.num_ignored_messages += 1
        return self._send(peer, PushStop(key=message.key, lease_id=message.lease_id, reason="no such push is open"))

    def _on_abort(self, now_ns: int, push: IncomingPush, message: PushAbort) -> list[PushEffect]:
        if push.phase is ReceiverPhase.ARRIVED:
            return []
        if message.stopped:
            failed = [] if push.is_quarantined else [PushFailed(key=message.key, reason=message.reason)]
            return [*failed, self._release(push)]
        return [] if push.is_quarantined else self._give_up(now_ns, push, message.reason)

    def _on_chunk(self, now_ns: int, push: IncomingPush, message: PushChunk) -> list[PushEffect]:
        violation = push.violation(message)
        if violation is not None:
            return self._give_up(now_ns, push, violation)
        if not frozenset(summed_positions(self._checksums, message)).issubset(message.summed):
            self.num_ignored_messages += 1
            return []
        if not push.is_news(message):
            return []
        state = ChunkState.VERIFYING if message.summed else ChunkState.GOOD
        push.add_chunk(message, state)
        if state is ChunkState.GOOD:
            return self._evaluate(now_ns, push)
        block_ids = tuple(message.blocks[position].block_id for position in message.summed)
        return [
            VerifyBlocks(
                key=message.key,
                chunk=message.chunk,
                block_ids=block_ids,
                layers=message.layers,
                checksums=message.checksums,
                rank=message.rank,
            )
        ]

    def _on_end(self, now_ns: int, push: IncomingPush, message: PushEnd) -> list[PushEffect]:
        if message.round < push.round:
            return self._send_missing(push)
        is_possible = message.num_chunks <= push.max_chunks and message.rank == push.sender_rank
        if message.round > push.round or not is_possible:
            return self._give_up(now_ns, push, f"the end of round {message.round} cannot exist")
        push.end = message
        return self._evaluate(now_ns, push)

    # ---- progress --------------------------------------------------------------------------------------------

    def _evaluate(self, now_ns: int, push: IncomingPush) -> list[PushEffect]:
        """Answers the round's PushEnd once it is there and nothing is being verified any more."""
        end = push.end
        if end is None or push.phase is not ReceiverPhase.RECEIVING or push.is_verifying():
            return []
        lost = push.lost_chunks(end.num_chunks)
        if lost:
            if push.round >= self._limits.max_missing_rounds or len(lost) > MAX_MISSING_CHUNKS:
                return self._give_up(now_ns, push, f"{len(lost)} chunks are lost or corrupt after {push.round} rounds")
            push.begin_round(lost)
            return self._send_missing(push)
        if not push.is_complete(end):
            return self._give_up(now_ns, push, "the chunks do not cover the granted blocks")
        push.phase = ReceiverPhase.ARRIVED
        return [
            PushArrived(
                key=push.grant.key,
                lease_id=push.grant.lease_id,
                blocks=push.grant.blocks,
                num_blocks=end.num_blocks,
                num_tokens=end.num_tokens,
                first_tokens=end.first_tokens,
                stats=end.stats,
            )
        ]

    def _send_missing(self, push: IncomingPush) -> list[PushEffect]:
        missing = PushMissing(key=push.grant.key, lease_id=push.grant.lease_id, chunks=push.missing, round=push.round)
        return self._send(push.peer, missing)

    # ---- giving up -------------------------------------------------------------------------------------------

    def _give_up(self, now_ns: int, push: IncomingPush, reason: str) -> list[PushEffect]:
        """Fails the push and asks the sender to stop; without blocks there is nothing to wait for."""
        effects = self._fail(push, reason)
        push.stop_deadline_ns = now_ns + self._limits.stop_timeout_ns
        if push.peer in self._fencing:
            push.phase = ReceiverPhase.FENCING
            return effects
        effects += self._send_stop(now_ns, push)
        if not push.grant.blocks or push.peer in self._fenced:
            effects.append(self._release(push))
        return effects

    def _fail(self, push: IncomingPush, reason: str) -> list[PushEffect]:
        push.phase = ReceiverPhase.STOPPING
        push.stop_reason = reason
        key = push.grant.key
        return [PushFailed(key=key, reason=reason), BlocksQuarantined(key=key, block_ids=push.block_ids)]

    def _send_stop(self, now_ns: int, push: IncomingPush) -> list[PushEffect]:
        push.stop_due_ns = now_ns + self._limits.stop_resend_interval_ns
        stop = PushStop(key=push.grant.key, lease_id=push.grant.lease_id, reason=push.stop_reason)
        return self._send(push.peer, stop)

    def _release(self, push: IncomingPush) -> PushEffect:
        del self._pushes[push.grant.key]
        self._ended.add(push.grant.key, None)
        return _released(push)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _limit_reached(self) -> str | None:
        if len(self._pushes) >= self._limits.max_pushes:
            return f"{len(self._pushes)} pushes are open, which is the limit"
        if self.num_quarantined_blocks > self._limits.max_quarantined_blocks:
            return f"{self.num_quarantined_blocks} blocks are quarantined, which is above the limit"
        return None

    def _evict_older_lives(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        """A newer life of a sender means that the older ones are given up; where they hold leases, by a fence."""
        older = [
            push.peer
            for push in self._pushes.values()
            if push.peer.name == peer.name and push.peer.incarnation < peer.incarnation
        ]
        effects: list[PushEffect] = []
        for life in dict.fromkeys(older):
            effects += self.fence(now_ns, life)
        return effects

    def _pushes_of(self, peer: PeerId) -> list[IncomingPush]:
        return [push for push in self._pushes.values() if push.peer == peer]

    def _arrived(self, key: PushKey) -> IncomingPush:
        push = self._pushes.get(key)
        if push is None or push.phase is not ReceiverPhase.ARRIVED:
            raise ValueError(f"key: {key} does not wait for a commit")
        return push

    def _send(self, peer: PeerId, message: PushMessage) -> list[PushEffect]:
        return [SendMessage(peer=peer, message=message)] if peer in self._connected else []


def _released(push: IncomingPush) -> BlocksReleased:
    return BlocksReleased(key=push.grant.key, block_ids=push.block_ids)
