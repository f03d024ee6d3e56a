"""Both halves of a fetch: a prefix that was cached on one worker is pushed to another, to be found there.

The sequence that wants it is held back in the scheduler meanwhile, for a bounded time.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.agent.legs import Leg, LegKind, LegTable, Phase, push_key_of
from cluster.agent.limits import WorkerStateConfig
from cluster.agent.prefix_pins import pin_prefix
from cluster.agent.pushes import Pushes, PushRefusedError
from cluster.agent.translation import block_grants, matchable_hashes, pack_grants, peer_of
from cluster.core.commands import Prefill, Reserve
from cluster.core.ids import AttemptId
from cluster.core.limits import NS_PER_MS
from cluster.core.messages import Committed, LegReleased, ReserveGranted, ReserveRefused, WorkerMessage
from engine.core.block_hash import ROOT_HASH
from engine.core.block_pool import BlockPool
from engine.core.errors import OutOfBlocksError, StaleGenerationError
from engine.core.request import RequestBody
from engine.core.scheduler import Scheduler
from engine.core.step import SequenceKey
from kv_transfer.protocol.messages import Grant, PushArrived


class PrefixFetches:
    """Messages for the coordinator are returned; legs of a fetch are known to the leg table alone. `num_fetched_blocks`
    have come here since the start."""

    def __init__(
        self, config: WorkerStateConfig, *, pool: BlockPool, pushes: Pushes, legs: LegTable, scheduler: Scheduler
    ) -> None:
        self._peer = peer_of(config.hello.ref.worker)
        self._pool = pool
        self._pushes = pushes
        self._legs = legs
        self._scheduler = scheduler
        self._block_size = config.scheduler.block_size
        self._fingerprint = config.model_fingerprint
        self._max_wait_ns = config.limits.max_fetch_wait_ns
        self.num_fetched_blocks = 0
        self._coming: dict[AttemptId, frozenset[bytes]] = {}
        self._waiting: dict[SequenceKey, tuple[AttemptId, int]] = {}

    def reserve(self, now_ns: int, command: Reserve, body: RequestBody) -> WorkerMessage:
        """Reserves blocks for what is missing here of the prefix, and pins what is not."""
        num_blocks = command.num_prefix_blocks
        hashes = matchable_hashes(body, self._block_size, self._fingerprint)[:num_blocks]
        if len(hashes) < num_blocks:
            return ReserveRefused(attempt=command.attempt, reason=f"the prompt has {len(hashes)} blocks to be found")
        pinned = pin_prefix(self._pool, hashes, num_blocks).block_ids
        grant = Grant(
            key=push_key_of(command.attempt),
            lease_id=command.lease_id,
            receiver=self._peer,
            sender=peer_of(command.source.worker),
            blocks=(),
            ttl_ns=command.ttl_ms * NS_PER_MS,
        )
        num_missing = num_blocks - len(pinned)
        try:
            if not num_missing:
                raise PushRefusedError("nothing of the prefix is missing")
            blocks = self._pushes.reserve(now_ns, grant, num_cached=len(pinned), num_blocks=num_missing)
        except (OutOfBlocksError, PushRefusedError) as error:
            self._pool.release(pinned)
            return ReserveRefused(attempt=command.attempt, reason=str(error))
        leg = Leg(attempt=command.attempt, kind=LegKind.PREFIX_SINK, phase=Phase.RESERVED, body=body, created_ns=now_ns)
        leg.peer, leg.pinned_blocks = grant.sender, pinned
        self._legs.add(leg)
        self._coming[leg.attempt] = frozenset(hashes[len(pinned) :])
        return ReserveGranted(
            attempt=command.attempt,
            lease_id=command.lease_id,
            num_cached_blocks=len(pinned),
            blocks=pack_grants(blocks),
            ttl_ms=command.ttl_ms,
        )

    def send(self, now_ns: int, command: Prefill, body: RequestBody) -> str | None:
        """Pushes the prefix, all of which must be here. Returns why it cannot."""
        num_blocks = command.num_prefix_blocks
        hashes = matchable_hashes(body, self._block_size, self._fingerprint)[:num_blocks]
        pinned = pin_prefix(self._pool, hashes, num_blocks).block_ids
        if len(pinned) < num_blocks:
            self._pool.release(pinned)
            return f"{len(pinned)} of {num_blocks} blocks of the prefix are here"
        leg = Leg(
            attempt=command.attempt, kind=LegKind.PREFIX_SOURCE, phase=Phase.RUNNING, body=body, created_ns=now_ns
        )
        leg.peer = peer_of(command.destination.worker)
        grant = Grant(
            key=leg.push_key,
            lease_id=command.lease_id,
            receiver=leg.peer,
            sender=self._peer,
            blocks=block_grants(command.blocks),
            ttl_ns=command.ttl_ms * NS_PER_MS,
        )
        try:
            self._pushes.open_source(now_ns, grant, num_blocks, command.destination.endpoints)
        except ValueError as error:
            self._pool.release(pinned)
            return f"impossible grant: {error}"
        self._legs.add(leg)
        self._legs.leave(leg, Phase.PUSHING)
        indices = range(command.num_cached_blocks, num_blocks)
        self._pushes.blocks_ready(now_ns, leg.push_key, [(index, pinned[index]) for index in indices])
        self._pool.release(pinned)  # the push has a use of its own of what it reads
        self._pushes.finish(now_ns, leg.push_key, num_blocks * self._block_size, ())
        return None

    def arrived(self, now_ns: int, leg: Leg, arrived: PushArrived) -> list[WorkerMessage]:
        """Makes what has come findable. It then lies in the cache, to be used like all that does."""
        num_blocks = len(leg.pinned_blocks) + len(arrived.blocks)
        if arrived.first_tokens or arrived.num_blocks != num_blocks:
            self._pushes.commit_failed(now_ns, arrived.key, f"{arrived.num_blocks} blocks came, not {num_blocks}")
            return []
        try:
            committed = self._pushes.commit(arrived)
        except StaleGenerationError as error:
            self._pushes.commit_failed(now_ns, arrived.key, str(error))
            return []
        self._pushes.committed(now_ns, arrived.key)
        hashes = matchable_hashes(leg.body, self._block_size, self._fingerprint)[:num_blocks]
        blocks, leg.pinned_blocks = leg.pinned_blocks, []
        for index, block_id in enumerate(committed, start=len(blocks)):
            parent_hash = hashes[index - 1] if index else ROOT_HASH
            blocks.append(self._pool.index(block_id, hashes[index], parent_hash))
        self._pool.release(blocks)
        self.num_fetched_blocks += len(committed)
        self._legs.remove(leg)
        return [
            Committed(attempt=leg.attempt, timeline=leg.timeline(now_ns)),
            LegReleased(attempt=leg.attempt),
        ]

    # ---- who waits for it ----

    @property
    def is_expecting(self) -> bool:
        """Whether anything is to come, so that `added` should be asked."""
        return bool(self._coming)

    def added(self, now_ns: int, key: SequenceKey, hashes: Sequence[bytes]) -> bool:
        """The scheduler has that sequence now; `hashes` are of its blocks that may be found. Whether it waits for a
        fetch: its own, or one for another prompt with the same beginning."""
        num_here = len(self._pool.match(hashes))
        num_here += self._pool.num_loadable(hashes[num_here:])
        missing = hashes[num_here : num_here + 1]
        for attempt, coming in self._coming.items():
            if missing and missing[0] in coming and self._is_coming(attempt):
                self._waiting[key] = attempt, now_ns + self._max_wait_ns
                self._scheduler.hold_back(key, is_held_back=True)
                return True
        return False

    def settle(self, now_ns: int) -> list[Leg]:
        """Lets go of those whose fetch is over, or has taken too long: these are returned, and are to be given up."""
        late: dict[AttemptId, Leg] = {}
        for key, (attempt, deadline_ns) in list(self._waiting.items()):
            if self._is_coming(attempt) and now_ns < deadline_ns and self._scheduler.has(key):
                continue
            del self._waiting[key]
            self._scheduler.hold_back(key, is_held_back=False)
            leg = self._legs.get(attempt)
            if leg is not None and now_ns >= deadline_ns and self._is_coming(attempt):
                late[attempt] = leg
        for attempt in [attempt for attempt in self._coming if not self._is_coming(attempt)]:
            del self._coming[attempt]
        return list(late.values())

    def _is_coming(self, attempt: AttemptId) -> bool:
        leg = self._legs.get(attempt)
        return leg is not None and leg.phase is Phase.RESERVED

    def next_deadline_ns(self) -> int | None:
        return min((deadline_ns for _, deadline_ns in self._waiting.values()), default=None)

    def check_invariants(self) -> None:
        for attempt, _ in self._waiting.values():
            leg = self._legs.get(attempt)
            assert leg is None or leg.kind is LegKind.PREFIX_SINK
