"""The sender's half of a push: writes an attempt's blocks into a receiver's reserved ones and hands them over.

Rules (ARCHITECTURE.md §5, §7):
* Nothing is written without a live lease. The lease counts from before the sender asked for its renewal, so it ends
  here no later than at the receiver. Expiry stops posting; the source blocks are let go once own writes have ended.
* PushEnd goes out only while no write of the push is in flight and is repeated, boundedly, until the receiver
  commits, asks for chunks again (a new round) or stops the push.
* A push that ends without a commit tells its receiver, and says `stopped` only if no byte of it can land later.
* What ended is remembered (boundedly), so that a late open of the same push is refused, and a stop asked again
  is answered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.protocol.lease import LeaseView, Recent
from kv_transfer.protocol.limits import RENEWALS_PER_TTL, PushLimits
from kv_transfer.protocol.messages import (
    CancelWrite,
    ConnectPeer,
    FirstToken,
    Grant,
    LeaseRenew,
    PeerId,
    PushAbort,
    PushCommitted,
    PushEffect,
    PushFailed,
    PushKey,
    PushMessage,
    PushMissing,
    PushStop,
    SendMessage,
    SourceReleased,
    WriteBlocks,
)
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.protocol.sender_push import OutgoingPush, SenderPhase, Write, check_grant


class _LinkState(Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    CONNECTED = "connected"


@dataclass(slots=True, kw_only=True)
class _Link:
    """One life of a receiver: its pushes, and whose turn it is to write."""

    state: _LinkState = _LinkState.IDLE
    pushes: dict[PushKey, OutgoingPush] = field(default_factory=dict)
    turns: deque[PushKey] = field(default_factory=deque)
    """Pushes with blocks to write, each once."""
    num_inflight: int = 0
    renew_due_ns: int | None = None


class PushSender:
    """All pushes that leave one worker. Every method returns what its owner has to do; none blocks.

    Messages for the other half (PushChunk, PushEnd, PushAbort, LeaseRenew that asks) are passed over, so an owner
    of both halves may give every message to both.
    """

    def __init__(
        self, limits: PushLimits, checksums: Checksums, block_size_bytes: int = 0, *, num_layers: int, rank: int = 0
    ) -> None:
        """`checksums`: of which blocks. `block_size_bytes` is for the bound on a write's bytes and the statistics in
        PushEnd; 0 leaves both out. `num_layers`: of a block. `rank`: this worker's within its gang."""
        self._checksums = checksums
        self._num_layers = num_layers
        self._rank = rank
        self._block_size_bytes = block_size_bytes
        self.num_ignored_messages = 0
        self._limits = limits
        self._pushes: dict[PushKey, OutgoingPush] = {}
        self._links: dict[PeerId, _Link] = {}
        self._writes: dict[int, PushKey] = {}
        self._next_write_id = 1
        self._ended: Recent[PushKey, None] = Recent(limits.max_tombstones)
        self._unsettled: Recent[PeerId, None] = Recent(limits.max_fenced_lives)
        """Lives into which a write may still land after its push has ended here."""

    # ---- the owner's side ------------------------------------------------------------------------------------

    def open(
        self, now_ns: int, grant: Grant, total_blocks: int, block_size_bytes: int | None = None
    ) -> list[PushEffect]:
        """Starts a push of a sequence of `total_blocks` blocks and connects to its receiver.

        `block_size_bytes` is what is sent of each, where that is not the whole block.
        A push that was cancelled or stopped before it was opened fails at once, and so does one too many.
        Raises: ValueError for a grant that cannot carry it, or for a push that is open already.
        """
        check_grant(grant, total_blocks)
        if grant.key in self._pushes:
            raise ValueError(f"key: {grant.key} is open already")
        refusal = self.refusal(grant)
        if refusal is not None:
            failed = PushFailed(key=grant.key, reason=refusal)
            return [failed, SourceReleased(key=grant.key, committed=False)]
        effects = self._evict_older_lives(now_ns, grant.receiver)
        push = OutgoingPush(
            grant=grant,
            num_blocks=total_blocks,
            num_layers=self._num_layers,
            opened_ns=now_ns,
            lease_deadline_ns=now_ns + grant.ttl_ns,
            rank=self._rank,
            block_size_bytes=self._block_size_bytes if block_size_bytes is None else block_size_bytes,
            ungiven={block.index: block for block in grant.blocks if block.index < total_blocks},
        )
        self._pushes[grant.key] = push
        link = self._links.setdefault(grant.receiver, _Link())
        link.pushes[grant.key] = push
        if link.state is _LinkState.CONNECTED:
            due_ns = now_ns + min(self._limits.first_renewal_ns, _renewal_interval_ns(grant))
            link.renew_due_ns = due_ns if link.renew_due_ns is None else min(link.renew_due_ns, due_ns)
        elif link.state is _LinkState.IDLE:
            link.state = _LinkState.CONNECTING
            effects.append(ConnectPeer(peer=grant.receiver))
        return effects

    def blocks_ready(
        self, now_ns: int, key: PushKey, blocks: Sequence[tuple[int, int]], layers: range | None = None
    ) -> list[PushEffect]:
        """(index, source block id) pairs whose KV is final, in these layers alone if they are given.

        Each layer of each index once: the layers of one in order and without gaps, the indices in any order. A push
        that has ended or is ending takes no more. Raises: ValueError for what is out of range, given twice, or not
        next.
        """
        push = self._pushes.get(key)
        if push is None or push.phase is SenderPhase.STOPPING:
            return []
        if push.phase is SenderPhase.ENDING:
            raise ValueError(f"blocks: {key} is finished already")
        push.give(blocks, range(self._num_layers) if layers is None else layers)
        return self._advance(now_ns, push)

    def finish(
        self, now_ns: int, key: PushKey, num_tokens: int, first_tokens: Sequence[FirstToken]
    ) -> list[PushEffect]:
        """All blocks are known: end the push as soon as they are written.

        Raises: ValueError if a block is missing, or if it was called before."""
        push = self._pushes.get(key)
        if push is None or push.phase is SenderPhase.STOPPING:
            return []
        if push.phase is SenderPhase.ENDING:
            raise ValueError(f"key: {key} is finished already")
        if push.ungiven:
            raise ValueError(f"key: {key} cannot finish before block index {next(iter(push.ungiven))} is ready")
        push.phase = SenderPhase.ENDING
        push.num_tokens = num_tokens
        push.first_tokens = tuple(first_tokens)
        return self._advance(now_ns, push)

    def cancel(self, now_ns: int, key: PushKey, reason: str) -> list[PushEffect]:
        """Ends a push in any phase; one that is unknown so far will be refused when it is opened."""
        push = self._pushes.get(key)
        if push is None:
            self._ended.add(key, None)
            return []
        return self._fail(now_ns, push, reason)

    # ---- the transport's side --------------------------------------------------------------------------------

    def on_connected(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        effects = self._evict_older_lives(now_ns, peer)
        link = self._links.setdefault(peer, _Link())
        link.state = _LinkState.CONNECTED
        effects += self._renew(now_ns, peer, link)
        effects += self._post(now_ns, peer, link)
        for push in list(link.pushes.values()):
            effects += self._maybe_end(now_ns, push)
        return effects

    def on_connect_failed(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        return self._drop_link(now_ns, peer, f"cannot connect to {peer.name}: {reason}")

    def on_peer_gone(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        return self._drop_link(now_ns, peer, f"lost {peer.name}: {reason}")

    def on_write_completed(self, now_ns: int, write_id: int) -> list[PushEffect]:
        ended = self._end_write(write_id)
        if ended is None:
            return []
        push, write = ended
        push.written(now_ns, write)
        if push.phase is SenderPhase.STOPPING:
            effects = [] if push.inflight else self._end_stopped(push)
        else:
            effects = self._maybe_end(now_ns, push)
        return effects + self._post_for(now_ns, push.peer)

    def on_write_failed(self, now_ns: int, write_id: int, quiesced: bool, reason: str) -> list[PushEffect]:
        ended = self._end_write(write_id)
        if ended is None:
            return []
        push, _ = ended
        if not quiesced:
            push.is_unsettled = True
            self._unsettled.add(push.peer, None)
        if push.phase is not SenderPhase.STOPPING:
            effects = self._fail(now_ns, push, f"write failed: {reason}")
        else:
            effects = [] if push.inflight else self._end_stopped(push)
        return effects + self._post_for(now_ns, push.peer)

    def on_message(self, now_ns: int, peer: PeerId, message: PushMessage) -> list[PushEffect]:
        if isinstance(message, PushStop):
            return self._on_stop(now_ns, peer, message)
        if isinstance(message, PushMissing):
            return self._on_missing(now_ns, peer, message)
        if isinstance(message, PushCommitted):
            return self._on_committed(peer, message)
        if isinstance(message, LeaseRenew) and message.is_reply:
            self._on_renewed(now_ns, peer, message)
        return []

    # ---- time ------------------------------------------------------------------------------------------------

    def on_tick(self, now_ns: int) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for push in list(self._pushes.values()):
            effects += self._tick_push(now_ns, push)
        for peer, link in list(self._links.items()):
            if link.renew_due_ns is not None and now_ns >= link.renew_due_ns:
                effects += self._renew(now_ns, peer, link)
        return effects

    def next_deadline_ns(self) -> int | None:
        if not self._pushes:  # asked after every event of a worker
            return None
        deadlines = [push.next_deadline_ns() for push in self._pushes.values()]
        deadlines += [link.renew_due_ns for link in self._links.values() if link.renew_due_ns is not None]
        return min(deadlines, default=None)

    # ---- views -----------------------------------------------------------------------------------------------

    @property
    def num_pushes(self) -> int:
        return len(self._pushes)

    def refusal(self, grant: Grant) -> str | None:
        """Why `open` would refuse the grant at once; None if it would not."""
        if grant.key in self._ended:
            return "it has ended already"
        if len(self._pushes) >= self._limits.max_pushes:
            return f"{len(self._pushes)} pushes are open, which is the limit"
        if any(peer.name == grant.receiver.name and peer > grant.receiver for peer in self._links):
            return f"{grant.receiver.name} has a newer life"
        return None

    def leases(self, now_ns: int) -> list[LeaseView]:
        return [
            LeaseView(
                lease_id=push.grant.lease_id,
                key=push.grant.key,
                peer=push.peer,
                side="held",
                num_blocks=push.num_blocks,
                age_ns=now_ns - push.opened_ns,
                remaining_ns=max(0, push.lease_deadline_ns - now_ns),
                state=push.phase.value,
            )
            for push in self._pushes.values()
        ]

    def check_invariants(self) -> None:
        assert sum(len(link.pushes) for link in self._links.values()) == len(self._pushes)
        for peer, link in self._links.items():
            assert link.num_inflight == sum(len(push.inflight) for push in link.pushes.values())
            assert len(link.turns) == len(dict.fromkeys(link.turns)), "a push has one turn"
            assert link.renew_due_ns is None or (link.pushes and link.state is _LinkState.CONNECTED)
            for key, push in link.pushes.items():
                assert self._pushes[key] is push and push.peer == peer
                assert (key in link.turns) == push.has_work, "a push has a turn exactly while it has work"
        for key, push in self._pushes.items():
            push.check_invariants()
            assert all(self._writes[write_id] == key for write_id in push.inflight)
        assert len(self._writes) == sum(len(push.inflight) for push in self._pushes.values())
        assert len(self._pushes) <= self._limits.max_pushes

    # ---- messages --------------------------------------------------------------------------------------------

    def _on_stop(self, now_ns: int, peer: PeerId, message: PushStop) -> list[PushEffect]:
        push = self._pushes.get(message.key)
        if push is None:
            self._ended.add(message.key, None)
            stopped = peer not in self._unsettled
            reason = "stopped" if stopped else "a write may still land"
            abort = PushAbort(key=message.key, lease_id=message.lease_id, stopped=stopped, reason=reason)
            return [SendMessage(peer=peer, message=abort)]
        if not self._is_expected(push, peer, message.lease_id) or push.phase is SenderPhase.STOPPING:
            return []
        return self._fail(now_ns, push, f"stopped by {peer.name}: {message.reason}")

    def _on_missing(self, now_ns: int, peer: PeerId, message: PushMissing) -> list[PushEffect]:
        push = self._pushes.get(message.key)
        if push is None or not self._is_expected(push, peer, message.lease_id):
            return []
        is_answer = push.end_due_ns is not None and message.round == push.round + 1
        if not is_answer or not all(number < len(push.chunks) for number in message.chunks):
            self.num_ignored_messages += message.round > push.round
            return []
        if message.round > self._limits.max_missing_rounds:
            return self._fail(now_ns, push, f"chunks were lost in {message.round} rounds")
        push.begin_round(message.round, tuple(dict.fromkeys(message.chunks)))
        return self._advance(now_ns, push)

    def _on_committed(self, peer: PeerId, message: PushCommitted) -> list[PushEffect]:
        push = self._pushes.get(message.key)
        if push is None or not self._is_expected(push, peer, message.lease_id):
            return []
        if push.end_due_ns is None:
            self.num_ignored_messages += 1
            return []
        self._forget(push)
        return [SourceReleased(key=message.key, committed=True)]

    def _on_renewed(self, now_ns: int, peer: PeerId, message: LeaseRenew) -> None:
        link = self._links.get(peer)
        if link is None or message.sent_ns > now_ns:
            self.num_ignored_messages += 1
            return
        renewed = dict.fromkeys(message.lease_ids)
        for push in link.pushes.values():
            if push.grant.lease_id in renewed:
                push.lease_deadline_ns = max(push.lease_deadline_ns, message.sent_ns + push.grant.ttl_ns)

    def _is_expected(self, push: OutgoingPush, peer: PeerId, lease_id: int) -> bool:
        if push.peer == peer and push.grant.lease_id == lease_id:
            return True
        self.num_ignored_messages += 1
        return False

    # ---- writing ---------------------------------------------------------------------------------------------

    def _advance(self, now_ns: int, push: OutgoingPush) -> list[PushEffect]:
        """Gives the push its turn if it has work; ends it if that was all."""
        link = self._links[push.peer]
        if push.has_work and push.grant.key not in link.turns:
            link.turns.append(push.grant.key)
        return self._post(now_ns, push.peer, link) + self._maybe_end(now_ns, push)

    def _post_for(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        link = self._links.get(peer)
        return [] if link is None else self._post(now_ns, peer, link)

    def _post(self, now_ns: int, peer: PeerId, link: _Link) -> list[PushEffect]:
        """Posts writes within the in-flight bound, the pushes taking turns."""
        effects: list[PushEffect] = []
        if link.state is not _LinkState.CONNECTED:
            return effects
        while link.turns and link.num_inflight < self._limits.max_inflight_writes:
            key = link.turns.popleft()
            push = link.pushes[key]
            sources, message = push.take_chunk(self._limits.blocks_per_write(push.block_size_bytes), self._checksums)
            write_id = self._next_write_id
            self._next_write_id += 1
            num_block_layers = len(sources) * message.num_layers
            push.post(now_ns, write_id, Write(num_block_layers, now_ns + self._limits.write_timeout_ns))
            self._writes[write_id] = key
            link.num_inflight += 1
            if push.has_work:
                link.turns.append(key)
            effects.append(WriteBlocks(peer=peer, write_id=write_id, source_blocks=sources, message=message))
        return effects

    def _end_write(self, write_id: int) -> tuple[OutgoingPush, Write] | None:
        """The write, and the push that it belonged to; None for a write that was given up."""
        key = self._writes.pop(write_id, None)
        if key is None:
            return None
        push = self._pushes[key]
        self._links[push.peer].num_inflight -= 1
        return push, push.inflight.pop(write_id)

    def _maybe_end(self, now_ns: int, push: OutgoingPush) -> list[PushEffect]:
        """Sends the round's first PushEnd if nothing is left to write or in flight."""
        is_ready = push.phase is SenderPhase.ENDING and push.is_written and push.end_due_ns is None
        if not is_ready or self._links[push.peer].state is not _LinkState.CONNECTED:
            return []
        return self._send_end(now_ns, push)

    def _send_end(self, now_ns: int, push: OutgoingPush) -> list[PushEffect]:
        push.num_end_sends += 1
        push.end_due_ns = now_ns + self._limits.end_resend_interval_ns
        return [SendMessage(peer=push.peer, message=push.end_message())]

    def _renew(self, now_ns: int, peer: PeerId, link: _Link) -> list[PushEffect]:
        alive = [push for push in link.pushes.values() if push.phase is not SenderPhase.STOPPING]
        if not alive or link.state is not _LinkState.CONNECTED:
            link.renew_due_ns = None
            return []
        link.renew_due_ns = now_ns + min(_renewal_interval_ns(push.grant) for push in alive)
        message = LeaseRenew(lease_ids=tuple(push.grant.lease_id for push in alive), sent_ns=now_ns)
        return [SendMessage(peer=peer, message=message)]

    def _tick_push(self, now_ns: int, push: OutgoingPush) -> list[PushEffect]:
        if push.phase is SenderPhase.STOPPING:
            return self._give_up_writes(push) if now_ns >= push.settle_deadline_ns else []
        if now_ns >= push.lease_deadline_ns:
            return self._fail(now_ns, push, "lease expired")
        if push.write_deadline_ns is not None and now_ns >= push.write_deadline_ns:
            return self._fail(now_ns, push, "write timed out")
        if push.end_due_ns is None or now_ns < push.end_due_ns:
            return []
        if push.num_end_sends >= self._limits.max_end_sends:
            return self._fail(now_ns, push, f"{push.peer.name} does not answer the end of the push")
        return self._send_end(now_ns, push)

    # ---- ending ----------------------------------------------------------------------------------------------

    def _fail(self, now_ns: int, push: OutgoingPush, reason: str) -> list[PushEffect]:
        """Stops posting and says so; the push ends now or when its last write in flight does."""
        if push.phase is SenderPhase.STOPPING:
            return []
        push.phase = SenderPhase.STOPPING
        push.pending.clear()
        push.rewrites.clear()
        push.end_due_ns = None
        link = self._links[push.peer]
        if push.grant.key in link.turns:
            link.turns.remove(push.grant.key)
        failed = PushFailed(key=push.grant.key, reason=reason)
        if not push.inflight:
            return [failed, *self._end_stopped(push, reason)]
        push.settle_deadline_ns = now_ns + self._limits.write_timeout_ns
        cancels = [CancelWrite(write_id=write_id) for write_id in push.inflight]
        return [failed, *cancels, *self._abort(push, stopped=False, reason=reason)]

    def _end_stopped(self, push: OutgoingPush, reason: str = "stopped") -> list[PushEffect]:
        settled = not push.is_unsettled
        effects = self._abort(push, stopped=settled, reason=reason if settled else "a write may still land")
        self._forget(push)
        return [*effects, SourceReleased(key=push.grant.key, committed=False, settled=settled)]

    def _abort(self, push: OutgoingPush, *, stopped: bool, reason: str) -> list[PushEffect]:
        if self._links[push.peer].state is not _LinkState.CONNECTED:
            return []
        message = PushAbort(key=push.grant.key, lease_id=push.grant.lease_id, stopped=stopped, reason=reason)
        return [SendMessage(peer=push.peer, message=message)]

    def _give_up_writes(self, push: OutgoingPush) -> list[PushEffect]:
        """The transport never said how its writes ended: only a fence at the receiver settles them now."""
        push.is_unsettled = True
        self._unsettled.add(push.peer, None)
        for write_id in list(push.inflight):
            self._end_write(write_id)
        return self._end_stopped(push)

    def _forget(self, push: OutgoingPush) -> None:
        key = push.grant.key
        self._ended.add(key, None)
        del self._pushes[key]
        link = self._links[push.peer]
        del link.pushes[key]
        if not link.pushes:
            link.renew_due_ns = None
            if link.state is not _LinkState.CONNECTED:
                del self._links[push.peer]

    def _drop_link(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        link = self._links.get(peer)
        if link is None:
            return []
        link.state = _LinkState.IDLE
        link.renew_due_ns = None
        effects: list[PushEffect] = []
        for push in list(link.pushes.values()):
            effects += self._fail(now_ns, push, reason)
        if not link.pushes:
            self._links.pop(peer, None)
        return effects

    def _evict_older_lives(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        """A newer life of a receiver ends all pushes to the older ones."""
        effects: list[PushEffect] = []
        for other in list(self._links):
            if other.name == peer.name and other.incarnation < peer.incarnation:
                effects += self._drop_link(now_ns, other, f"{peer.name} has a newer life")
        return effects


def _renewal_interval_ns(grant: Grant) -> int:
    return max(1, grant.ttl_ns // RENEWALS_PER_TTL)
