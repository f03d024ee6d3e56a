"""Both halves of a hand-over: prefill pushes the KV of a prompt while it computes it, decode goes on from there.

Blocks are reserved at decode before anything is computed, and the sequence joins its scheduler once all of them have
come.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.agent.last_chunks import LastChunks
from cluster.agent.leg_output import LegOutput
from cluster.agent.legs import Leg, LegKind, LegTable, Phase, push_key_of
from cluster.agent.limits import WorkerStateConfig
from cluster.agent.peer_links import PeerLinks
from cluster.agent.prefix_pins import pin_prefix
from cluster.agent.pushes import Pushes, PushRefusedError
from cluster.agent.translation import (
    block_grants,
    first_token,
    matchable_hashes,
    mismatch_of,
    pack_grants,
    peer_of,
    sequence_spec,
)
from cluster.core.commands import Prefill, Reserve
from cluster.core.limits import NS_PER_MS
from cluster.core.messages import (
    Committed,
    PeerFenced,
    PrefillDone,
    ReserveGranted,
    ReserveRefused,
    WorkerMessage,
)
from engine.core.block_pool import BlockPool
from engine.core.errors import OutOfBlocksError, StaleGenerationError
from engine.core.outcome import EmittedToken, PrefillProgress
from engine.core.request import RequestBody
from engine.core.scheduler import Scheduler
from engine.core.sequence import SequenceMode, num_blocks_for
from engine.core.step import StepPlan
from kv_transfer.protocol.messages import Grant, PushArrived


class HandOverError(Exception):
    """The hand-over cannot go on, and the leg is to fail."""


class HandOvers:
    """Messages for the coordinator are returned. Whether a leg may start, and what its end means, is left to the
    caller."""

    def __init__(
        self,
        config: WorkerStateConfig,
        *,
        pool: BlockPool,
        pushes: Pushes,
        legs: LegTable,
        scheduler: Scheduler,
        output: LegOutput,
        links: PeerLinks,
    ) -> None:
        self._peer = peer_of(config.hello.ref.worker)
        self._block_size = config.scheduler.block_size
        self._max_tokens = config.scheduler.max_model_tokens
        self._fingerprint = config.model_fingerprint
        self._pool = pool
        self._pushes = pushes
        self._legs = legs
        self._scheduler = scheduler
        self._output = output
        self._links = links
        self._last_chunks = LastChunks(pushes, num_layers=config.num_layers, block_size=self._block_size)

    # ---- prefill ---------------------------------------------------------------------------------------------

    def open(self, now_ns: int, leg: Leg, command: Prefill) -> None:
        """Starts the push, and with it the renewal of its lease; the prompt is yet to be computed.

        Raises: HandOverError if decode has granted what a prompt of that length has no use for.
        """
        leg.peer = peer_of(command.destination.worker)
        leg.num_blocks_ready = command.num_cached_blocks
        num_blocks = num_blocks_for(leg.body.num_input_tokens, self._block_size)
        try:
            grant = Grant(
                key=leg.push_key,
                lease_id=command.lease_id,
                receiver=leg.peer,
                sender=self._peer,
                blocks=block_grants(command.blocks),
                ttl_ns=command.ttl_ms * NS_PER_MS,
            )
            self._pushes.open_source(now_ns, grant, num_blocks, command.destination.endpoints)
        except ValueError as error:
            raise HandOverError(f"impossible grant: {error}") from error
        self._last_chunks.add(leg)

    def step_started(self, plan: StepPlan) -> tuple[int, ...]:
        """Returns the numbers of layers after which `layers_written` is wanted."""
        return self._last_chunks.step_started(plan)

    def layers_written(self, now_ns: int, num_layers: int) -> None:
        """By the running step."""
        self._last_chunks.layers_written(now_ns, num_layers)

    def progress(self, now_ns: int, leg: Leg, progress: PrefillProgress) -> None:
        """Pushes the blocks that have become whole."""
        num_ready = progress.num_computed_tokens // self._block_size
        if progress.num_computed_tokens == progress.num_total_tokens:
            num_ready = num_blocks_for(progress.num_total_tokens, self._block_size)
        if num_ready > leg.num_blocks_ready:
            indices = range(leg.num_blocks_ready, num_ready)
            leg.num_blocks_ready = num_ready
            if not self._last_chunks.complete(now_ns, leg):
                blocks = [(index, progress.block_table[index]) for index in indices]
                self._pushes.blocks_ready(now_ns, leg.push_key, blocks)

    def finish(self, now_ns: int, leg: Leg, tokens: list[EmittedToken]) -> PrefillDone:
        """Prefill has drawn the first tokens and is done. The blocks stay in use by the push alone."""
        self._last_chunks.remove(leg)
        self._pool.release(self._scheduler.take_blocks(leg.lead_key))
        leg.kv_transport = self._links.transport_of(leg.peer)
        self._output.hand_over(now_ns, leg)
        outcome = None if leg.running else leg.outcome
        done = PrefillDone(attempt=leg.attempt, outcome=outcome, timeline=leg.timeline(now_ns))
        if outcome is None:
            self._legs.leave(leg, Phase.PUSHING)
            firsts = [first_token(token) for token in tokens]
            self._pushes.finish(now_ns, leg.push_key, leg.body.num_input_tokens, firsts)
        else:
            # The push stays as it is until the coordinator has had decode stop it: an abort that overtook PrefillDone
            # would look like a failed attempt.
            self._legs.leave(leg, Phase.CLOSING)
        return done

    def abandon(self, leg: Leg) -> None:
        """Its prompt is not wanted any more; the caller stops the push."""
        self._last_chunks.remove(leg)

    # ---- decode ----------------------------------------------------------------------------------------------

    def reserve(self, now_ns: int, command: Reserve, body: RequestBody) -> list[WorkerMessage]:
        """Pins what is cached of the prompt and reserves blocks for the rest, or refuses and holds nothing."""
        refusal = self._refusal(command, body)
        if refusal is not None:
            return [ReserveRefused(attempt=command.attempt, reason=refusal)]
        # Each sibling has a block for what it does not share.
        num_blocks = num_blocks_for(command.num_tokens, self._block_size) + len(body.siblings)
        hashes = matchable_hashes(body, self._block_size, self._fingerprint)
        pinned = pin_prefix(self._pool, hashes, num_blocks)
        cached = pinned.block_ids
        grant = Grant(
            key=push_key_of(command.attempt),
            lease_id=command.lease_id,
            receiver=self._peer,
            sender=peer_of(command.source.worker),
            blocks=(),
            ttl_ns=command.ttl_ms * NS_PER_MS,
        )
        try:
            blocks = self._pushes.reserve(now_ns, grant, num_cached=len(cached), num_blocks=num_blocks - len(cached))
        except (OutOfBlocksError, PushRefusedError) as error:
            self._pool.release(cached)
            refused = ReserveRefused(attempt=command.attempt, reason=str(error))
            if self._pushes.is_fenced(grant.sender):
                # Who places a request there has not heard of the fence: a coordinator that has restarted since.
                return [PeerFenced(peer=command.source.worker), refused]
            return [refused]
        leg = Leg(attempt=command.attempt, kind=LegKind.DECODE, phase=Phase.RESERVED, body=body, created_ns=now_ns)
        self._legs.add(leg)
        self._output.open(leg)
        leg.peer, leg.pinned_blocks = grant.sender, cached
        leg.num_cached_tokens = len(cached) * self._block_size
        num_loaded_tokens = pinned.num_loaded * self._block_size
        self._pool.count_lookup(body.num_input_tokens, leg.num_cached_tokens, num_loaded_tokens)
        granted = ReserveGranted(
            attempt=command.attempt,
            lease_id=command.lease_id,
            num_cached_blocks=len(cached),
            blocks=pack_grants(blocks),
            ttl_ms=command.ttl_ms,
        )
        return [granted]

    def _refusal(self, command: Reserve, body: RequestBody) -> str | None:
        num_tokens = body.num_input_tokens + 1
        if not body.prompt_ids or command.num_tokens != num_tokens:
            return f"asked for {command.num_tokens} tokens, the body has {num_tokens} with the next one"
        if num_tokens > self._max_tokens:
            return f"{num_tokens} tokens, the model takes {self._max_tokens}"
        return None

    def take_over(self, now_ns: int, leg: Leg, arrived: PushArrived) -> Committed | None:
        """The KV has come: the sequence joins the scheduler, and the first tokens are put out.

        Returns None if the KV is not what the leg waits for: then the push fails, and the leg with it.
        Raises: HandOverError if the scheduler cannot go on from there. The leg holds no blocks then.
        """
        mismatch = mismatch_of(leg, arrived, self._block_size)
        if mismatch is not None:
            self._pushes.commit_failed(now_ns, arrived.key, mismatch)
            return None
        leg.push_ns = self._pushes.measured_ns(now_ns, arrived)
        try:
            block_ids = self._pushes.commit(arrived)
        except StaleGenerationError as error:
            self._pushes.commit_failed(now_ns, arrived.key, str(error))
            return None
        self._pushes.committed(now_ns, arrived.key)
        block_table, leg.pinned_blocks = leg.pinned_blocks + block_ids, []
        leg.phase = Phase.RUNNING
        first_tokens = self._join(leg, block_table, [token.token_id for token in arrived.first_tokens])
        leg.joined_ns = now_ns
        leg.kv_transport = self._links.transport_of(leg.peer)
        leg.kv_bytes = arrived.stats.size_bytes
        leg.kv_early_bytes = arrived.stats.early_bytes
        committed = Committed(attempt=leg.attempt, timeline=leg.timeline(now_ns))
        for emitted, first in zip(first_tokens, arrived.first_tokens, strict=True):
            self._output.emitted(now_ns, leg, replace(emitted, logprob=first.logprob, top=first.top))
        return committed

    def _join(self, leg: Leg, block_table: list[int], first_token_ids: list[int]) -> list[EmittedToken]:
        spec = sequence_spec(leg, SequenceMode.DECODE, self._fingerprint)
        num_lead_blocks = len(block_table) - len(spec.siblings)
        try:
            return self._scheduler.add_with_kv(
                spec, block_table[:num_lead_blocks], first_token_ids, block_table[num_lead_blocks:]
            )
        except ValueError as error:
            self._pool.release(block_table)
            raise HandOverError(str(error)) from error

    def check_invariants(self) -> None:
        self._last_chunks.check_invariants()
