"""Both halves of the push protocol, tied to the block pool.

Block states follow the protocol's effects here and nowhere else: reserved blocks belong to one lease each until they
are committed or released, and every source block that a push may still read is held by a use of its own, so that
neither the end of its sequence nor a preemption can give it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.agent import effects as out
from cluster.agent.legs import attempt_of
from cluster.core.ids import WorkerId
from cluster.core.limits import NS_PER_MS
from cluster.core.messages import RankEndpoint
from cluster.core.reports import LeaseInfo
from engine.core.block_pool import BlockPool
from kv_transfer.protocol.lease import LeaseView, Recent
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    BlocksQuarantined,
    BlocksReleased,
    CancelWrite,
    ConnectPeer,
    FencePeer,
    FirstToken,
    Grant,
    PushArrived,
    PushChunk,
    PushEffect,
    PushFailed,
    PushKey,
    PushMessage,
    SendMessage,
    SourceReleased,
    VerifyBlocks,
    WriteBlocks,
)
from kv_transfer.protocol.receiver import PushReceiver
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.protocol.sender import PushSender
from kv_transfer.transport.base import PeerId


class PushRefusedError(Exception):
    """The receiver takes no such push now. Nothing is held."""


@dataclass(slots=True, kw_only=True)
class _Target:
    """A push to here: the reserved (or quarantined) blocks of its lease."""

    blocks: tuple[BlockGrant, ...]
    first_chunk_ns: int | None = None
    is_quarantined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PushNotices:
    """What has become of pushes since the last look.

    `unsettled` are pushes from here that ended while a write of theirs may still land at the receiver.
    """

    arrived: tuple[PushArrived, ...]
    failed: tuple[PushFailed, ...]
    unsettled: tuple[PushKey, ...]


class Pushes:
    """See the module docstring. Effects for the owner are collected until `take_effects`."""

    def __init__(
        self, pool: BlockPool, limits: PushLimits, *, checksums: Checksums, block_size_bytes: int, num_layers: int
    ) -> None:
        self._pool = pool
        self._sender = PushSender(limits, checksums, block_size_bytes, num_layers=num_layers)
        self._receiver = PushReceiver(limits, checksums, num_layers=num_layers)
        self._block_size_bytes = block_size_bytes
        self._sources: dict[PushKey, list[int]] = {}
        """Pushes from here: the blocks they have a use of."""
        self._targets: dict[PushKey, _Target] = {}
        self._fenced: Recent[PeerId, None] = Recent(limits.max_fenced_lives)
        self._effects: list[out.Effect] = []
        self._arrived: list[PushArrived] = []
        self._failed: list[PushFailed] = []
        self._unsettled: list[PushKey] = []

    def holds(self, key: PushKey) -> bool:
        """Whether blocks are held, reserved or quarantined for the push."""
        return key in self._sources or key in self._targets

    def is_receiving(self, key: PushKey) -> bool:
        """Whether blocks are reserved for the push, and not quarantined."""
        target = self._targets.get(key)
        return target is not None and not target.is_quarantined

    def open_keys(self) -> list[PushKey]:
        return [*self._sources, *self._targets]

    def take_effects(self) -> list[out.Effect]:
        effects, self._effects = self._effects, []
        return effects

    def take_notices(self) -> PushNotices | None:
        if not (self._arrived or self._failed or self._unsettled):
            return None
        notices = PushNotices(
            arrived=tuple(self._arrived), failed=tuple(self._failed), unsettled=tuple(self._unsettled)
        )
        self._arrived, self._failed, self._unsettled = [], [], []
        return notices

    # ---- sending ---------------------------------------------------------------------------------------------

    def open_source(self, now_ns: int, grant: Grant, num_blocks: int, endpoints: tuple[RankEndpoint, ...]) -> None:
        """Starts a push of a sequence of `num_blocks` blocks. A push stopped before fails at once, by a notice.

        Raises: ValueError for a grant that cannot carry it.
        """
        effects = self._sender.open(now_ns, grant, num_blocks)
        self._sources[grant.key] = []
        self._absorb(effects, endpoints)

    def blocks_ready(
        self, now_ns: int, key: PushKey, blocks: Sequence[tuple[int, int]], layers: range | None = None
    ) -> None:
        """(index, block id) pairs whose KV is final, in these layers alone if they are given; ignored once the push has
        ended. The push takes its use of a block with the first layer, and reads all others from there."""
        if key not in self._sources:
            return
        if layers is None or layers.start == 0:
            block_ids = [block_id for _, block_id in blocks]
            self._pool.acquire(block_ids)
            self._sources[key] += block_ids
        self._absorb(self._sender.blocks_ready(now_ns, key, blocks, layers))

    def finish(self, now_ns: int, key: PushKey, num_tokens: int, first_tokens: Sequence[FirstToken]) -> None:
        """The prompt is computed and the first tokens are drawn: end the push once everything is written."""
        self._absorb(self._sender.finish(now_ns, key, num_tokens, first_tokens))

    # ---- receiving -------------------------------------------------------------------------------------------

    def reserve(self, now_ns: int, grant: Grant, *, num_cached: int, num_blocks: int) -> tuple[BlockGrant, ...]:
        """Reserves `num_blocks` blocks, for the indices from `num_cached` on, and watches over them.

        `grant` comes without blocks. Raises OutOfBlocksError or PushRefusedError, with nothing held.
        """
        reserved = self._pool.reserve(num_blocks)
        blocks = tuple(
            BlockGrant(num_cached + offset, block_id, generation)
            for offset, (block_id, generation) in enumerate(reserved)
        )
        effects = self._receiver.open(now_ns, replace(grant, blocks=blocks))
        self._targets[grant.key] = _Target(blocks=blocks)
        # Others fail, too, where this sender is a newer life of theirs.
        failure = next(
            (effect for effect in effects if isinstance(effect, PushFailed) and effect.key == grant.key), None
        )
        self._absorb([effect for effect in effects if effect is not failure])
        if failure is not None:
            raise PushRefusedError(failure.reason)
        return blocks

    def commit(self, arrived: PushArrived) -> list[int]:
        """Makes the blocks ours. Returns their ids, in use once, in token order.

        Raises: StaleGenerationError if one was granted to somebody else since; call `commit_failed` then.
        """
        self._pool.commit([(block.block_id, block.generation) for block in arrived.blocks])
        del self._targets[arrived.key]
        return [block.block_id for block in arrived.blocks]

    def committed(self, now_ns: int, key: PushKey) -> None:
        """Tells the sender that it may let its blocks go."""
        self._absorb(self._receiver.committed(now_ns, key))

    def commit_failed(self, now_ns: int, key: PushKey, reason: str) -> None:
        self._absorb(self._receiver.commit_failed(now_ns, key, reason))

    def measured_ns(self, now_ns: int, arrived: PushArrived) -> int:
        """From the first write (its arrival here, or the sender's own count if longer) until now."""
        first_chunk_ns = self._targets[arrived.key].first_chunk_ns
        return max(arrived.stats.duration_ns, 0 if first_chunk_ns is None else now_ns - first_chunk_ns)

    # ---- either side -----------------------------------------------------------------------------------------

    def cancel(self, now_ns: int, key: PushKey, reason: str) -> None:
        """Ends the push in any phase; one that is unknown so far is refused when it comes."""
        if key not in self._targets:
            self._absorb(self._sender.cancel(now_ns, key, reason))
        if key not in self._sources:
            self._absorb(self._receiver.cancel(now_ns, key, reason))

    def sender_stopped(self, now_ns: int, key: PushKey) -> None:
        self._absorb(self._receiver.on_sender_stopped(now_ns, key))

    def peer_lost(self, now_ns: int, peer: PeerId) -> bool:
        """Gives that life up. True if it is fenced already, so that no FenceDone will come."""
        self._absorb(self._sender.on_peer_gone(now_ns, peer, "given up by the coordinator"))
        self._absorb(self._receiver.fence(now_ns, peer))
        return peer in self._fenced

    def fenced_lives(self) -> tuple[WorkerId, ...]:
        """The latest ones, up to the limit on how many are remembered."""
        return tuple(WorkerId(peer.name, peer.incarnation) for peer in self._fenced)

    def is_fenced(self, peer: PeerId) -> bool:
        """Whether nothing of that life can land here any more, and no push of it is taken."""
        return peer in self._fenced

    def connected(self, now_ns: int, peer: PeerId) -> None:
        self._absorb(self._sender.on_connected(now_ns, peer))
        self._absorb(self._receiver.on_connected(now_ns, peer))

    def connect_failed(self, now_ns: int, peer: PeerId, reason: str) -> None:
        self._absorb(self._sender.on_connect_failed(now_ns, peer, reason))

    def peer_gone(self, now_ns: int, peer: PeerId, reason: str) -> None:
        self._absorb(self._sender.on_peer_gone(now_ns, peer, reason))
        self._absorb(self._receiver.on_peer_gone(now_ns, peer, reason))

    def fenced(self, now_ns: int, peer: PeerId) -> None:
        self._fenced.add(peer, None)
        self._absorb(self._receiver.on_fenced(now_ns, peer))

    def message(self, now_ns: int, peer: PeerId, message: PushMessage) -> None:
        if isinstance(message, PushChunk):
            target = self._targets.get(message.key)
            if target is not None and target.first_chunk_ns is None:
                target.first_chunk_ns = now_ns
        self._absorb(self._sender.on_message(now_ns, peer, message))
        self._absorb(self._receiver.on_message(now_ns, peer, message))

    def write_done(self, now_ns: int, write_id: int) -> None:
        self._absorb(self._sender.on_write_completed(now_ns, write_id))

    def write_broken(self, now_ns: int, write_id: int, quiesced: bool, reason: str) -> None:
        self._absorb(self._sender.on_write_failed(now_ns, write_id, quiesced, reason))

    def verified(self, now_ns: int, key: PushKey, chunk: int, bad_block_ids: tuple[int, ...]) -> None:
        self._absorb(self._receiver.on_verified(now_ns, key, chunk, bad_block_ids))

    def tick(self, now_ns: int) -> None:
        self._absorb(self._sender.on_tick(now_ns))
        self._absorb(self._receiver.on_tick(now_ns))

    def next_deadline_ns(self) -> int | None:
        deadlines = (self._sender.next_deadline_ns(), self._receiver.next_deadline_ns())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def num_leases(self) -> int:
        """Pushes of which anything is reserved or held here."""
        return self._sender.num_pushes + self._receiver.num_pushes

    def leases(self, now_ns: int) -> tuple[LeaseInfo, ...]:
        views = [*self._sender.leases(now_ns), *self._receiver.leases(now_ns)]
        return tuple(self._lease_info(view) for view in views)

    def check_invariants(self) -> None:
        self._sender.check_invariants()
        self._receiver.check_invariants()
        assert self._sender.num_pushes == len(self._sources), "a source that no push owns"
        assert self._receiver.num_pushes == len(self._targets), "a target that no lease owns"
        leased: dict[int, PushKey] = {}
        num_quarantined = 0
        for key, target in self._targets.items():
            assert key not in self._sources, f"{key} is pushed from here to here"
            num_quarantined += len(target.blocks) if target.is_quarantined else 0
            for block in target.blocks:
                assert leased.setdefault(block.block_id, key) == key, f"block {block.block_id} is leased twice"
        counts = self._pool.counts()
        assert counts.quarantined == num_quarantined, "a quarantined block that no lease owns"
        assert counts.reserved == len(leased) - num_quarantined, "a reserved block that no lease owns"

    # ---- inside ----------------------------------------------------------------------------------------------

    def _absorb(self, effects: list[PushEffect], endpoints: tuple[RankEndpoint, ...] = ()) -> None:
        for effect in effects:
            match effect:
                case ConnectPeer():
                    self._effects.append(out.ConnectPeer(peer=effect.peer, endpoints=endpoints))
                case SendMessage() | WriteBlocks() | CancelWrite() | VerifyBlocks() | FencePeer():
                    self._effects.append(effect)
                case PushArrived():
                    self._arrived.append(effect)
                case PushFailed():
                    self._failed.append(effect)
                case BlocksQuarantined():
                    self._pool.quarantine(effect.block_ids)
                    self._targets[effect.key].is_quarantined = True
                case BlocksReleased():
                    self._pool.release_reserved(effect.block_ids)
                    del self._targets[effect.key]
                case SourceReleased():
                    self._pool.release(self._sources.pop(effect.key))
                    if not effect.settled:
                        self._unsettled.append(effect.key)

    def _lease_info(self, view: LeaseView) -> LeaseInfo:
        target = self._targets.get(view.key)
        return LeaseInfo(
            lease_id=view.lease_id,
            attempt=attempt_of(view.key),
            side="quarantined" if target is not None and target.is_quarantined else view.side,
            peer=WorkerId(view.peer.name, view.peer.incarnation),
            num_blocks=view.num_blocks,
            size_bytes=view.num_blocks * self._block_size_bytes,
            age_ms=view.age_ns // NS_PER_MS,
            remaining_ms=view.remaining_ns // NS_PER_MS,
        )
