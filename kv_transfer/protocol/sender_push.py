"""One push as its sender sees it: what is ready, what is written, what is in flight. PushSender drives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kv_transfer.protocol.messages import BlockGrant, FirstToken, Grant, PeerId, PushChunk, PushEnd, PushStats
from kv_transfer.protocol.sampling import Checksums, summed_positions


class SenderPhase(Enum):
    SENDING = "sending"
    """Blocks are still being computed."""
    ENDING = "ending"
    """Every block is known; PushEnd goes out, again and again, once no write is in flight."""
    STOPPING = "stopping"
    """Failed or cancelled; waits for its own writes to end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers of a block that are ready and not written."""

    target: BlockGrant
    source: int
    layers: range


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one write carries; kept so that it can be written again."""

    blocks: tuple[BlockGrant, ...]
    sources: tuple[int, ...]
    layers: range


@dataclass(frozen=True, slots=True)
class Write:
    num_block_layers: int
    """Blocks times layers of each."""
    deadline_ns: int


@dataclass(slots=True, kw_only=True)
class OutgoingPush:
    grant: Grant
    num_blocks: int
    num_layers: int
    opened_ns: int
    lease_deadline_ns: int
    rank: int = 0
    """The sender's within its gang."""
    block_size_bytes: int = 0
    """What is sent of a block; for the statistics alone."""
    phase: SenderPhase = SenderPhase.SENDING
    ungiven: dict[int, BlockGrant] = field(default_factory=dict)
    """Granted blocks, by index, that blocks_ready has not named yet, or not with all their layers."""
    num_layers_given: dict[int, int] = field(default_factory=dict)
    """Of those that it has named with some, by index: how many, from the first on."""
    pending: deque[Piece] = field(default_factory=deque)
    rewrites: deque[int] = field(default_factory=deque)
    """Chunk numbers that the receiver asked for again."""
    chunks: list[Chunk] = field(default_factory=list)
    inflight: dict[int, Write] = field(default_factory=dict)
    """By write id, oldest first."""
    round: int = 0
    num_tokens: int = 0
    first_tokens: tuple[FirstToken, ...] = ()
    num_end_sends: int = 0
    end_due_ns: int | None = None
    """When PushEnd is sent again; None before it was sent in this round."""
    num_written_layers: int = 0
    """Counted once a block, as in Write."""
    num_early_layers: int = 0
    """Written before finish was called."""
    first_post_ns: int | None = None
    last_write_ns: int = 0
    settle_deadline_ns: int = 0
    is_unsettled: bool = False
    """A write ended without telling whether it may still land."""

    @property
    def peer(self) -> PeerId:
        return self.grant.receiver

    @property
    def has_work(self) -> bool:
        return bool(self.rewrites or self.pending)

    @property
    def is_written(self) -> bool:
        return not (self.has_work or self.inflight)

    @property
    def write_deadline_ns(self) -> int | None:
        return next((write.deadline_ns for write in self.inflight.values()), None)

    def give(self, blocks: Sequence[tuple[int, int]], layers: range) -> None:
        """Queues these layers of (index, source block id) pairs; indices below the first granted one are cached at the
        receiver.

        Raises: ValueError for an index or layers out of range, given twice, or not next; nothing is queued then.
        """
        if not (0 <= layers.start < layers.stop <= self.num_layers and layers.step == 1):
            raise ValueError(f"layers: {layers} of {self.num_layers}")
        granted = self.grant.blocks
        first_index = granted[0].index if granted else self.num_blocks
        wanted: dict[int, int] = {}
        for index, source in blocks:
            if not 0 <= index < self.num_blocks:
                raise ValueError(f"blocks: index {index} of a push of {self.num_blocks} blocks")
            if index < first_index:
                continue
            if index in wanted or index not in self.ungiven:
                raise ValueError(f"blocks: index {index} given twice")
            num_given = self.num_layers_given.get(index, 0)
            if layers.start != num_given:
                raise ValueError(f"layers: block index {index} goes on with layer {num_given}, not {layers.start}")
            wanted[index] = source
        for index, source in wanted.items():
            self.pending.append(Piece(self.ungiven[index], source, layers))
            if layers.stop < self.num_layers:
                self.num_layers_given[index] = layers.stop
            else:
                del self.ungiven[index]
                self.num_layers_given.pop(index, None)

    def take_chunk(self, max_blocks: int, checksums: Checksums) -> tuple[tuple[int, ...], PushChunk]:
        """The next write: its source blocks and the message that goes with it, its checksums still to be taken. Needs
        has_work.

        The blocks of one write have the same layers.
        """
        if self.rewrites:
            number = self.rewrites.popleft()
        else:
            number = len(self.chunks)
            self.chunks.append(self._next_chunk(max_blocks))
        chunk = self.chunks[number]
        message = PushChunk(
            key=self.grant.key,
            lease_id=self.grant.lease_id,
            rank=self.rank,
            chunk=number,
            blocks=chunk.blocks,
            first_layer=chunk.layers.start,
            num_layers=len(chunk.layers),
            round=self.round,
        )
        summed = summed_positions(checksums, message)
        return chunk.sources, replace(message, summed=summed) if summed else message

    def _next_chunk(self, max_blocks: int) -> Chunk:
        layers = self.pending[0].layers
        taken: list[Piece] = []
        while self.pending and len(taken) < max_blocks and self.pending[0].layers == layers:
            taken.append(self.pending.popleft())
        return Chunk(tuple(piece.target for piece in taken), tuple(piece.source for piece in taken), layers)

    def post(self, now_ns: int, write_id: int, write: Write) -> None:
        self.inflight[write_id] = write
        if self.first_post_ns is None:
            self.first_post_ns = now_ns

    def written(self, now_ns: int, write: Write) -> None:
        """Takes one completed write into the statistics."""
        self.last_write_ns = now_ns
        self.num_written_layers += write.num_block_layers
        if self.phase is SenderPhase.SENDING:
            self.num_early_layers += write.num_block_layers

    def end_message(self) -> PushEnd:
        """Its statistics take all layers to be of one size."""
        duration_ns = 0 if self.first_post_ns is None else self.last_write_ns - self.first_post_ns
        return PushEnd(
            key=self.grant.key,
            lease_id=self.grant.lease_id,
            rank=self.rank,
            num_chunks=len(self.chunks),
            num_blocks=self.num_blocks,
            num_tokens=self.num_tokens,
            first_tokens=self.first_tokens,
            stats=PushStats(
                size_bytes=self.num_written_layers * self.block_size_bytes // self.num_layers,
                early_bytes=self.num_early_layers * self.block_size_bytes // self.num_layers,
                duration_ns=duration_ns,
            ),
            round=self.round,
        )

    def begin_round(self, number: int, chunks: Sequence[int]) -> None:
        self.round = number
        self.rewrites.extend(chunks)
        self.num_end_sends = 0
        self.end_due_ns = None

    def next_deadline_ns(self) -> int:
        if self.phase is SenderPhase.STOPPING:
            return self.settle_deadline_ns
        deadline_ns = self.lease_deadline_ns
        for due_ns in (self.write_deadline_ns, self.end_due_ns):
            if due_ns is not None and due_ns < deadline_ns:
                deadline_ns = due_ns
        return deadline_ns

    def check_invariants(self) -> None:
        if self.phase is SenderPhase.STOPPING:
            assert not self.has_work, "a stopping push posts nothing"
            assert self.inflight, "a stopping push waits for a write"
        if self.phase is SenderPhase.ENDING:
            assert not self.ungiven, "an ending push has been given every block"
        if self.end_due_ns is not None:
            assert self.phase is SenderPhase.ENDING, "only an ending push has sent its end"
            assert self.is_written, "PushEnd is sent only when every write has completed"
        assert all(number < len(self.chunks) for number in self.rewrites)
        self._check_layers()

    def _check_layers(self) -> None:
        """Of each block, the layers that were given lie in chunks and pending pieces: once, in order, without gaps."""
        if self.phase is SenderPhase.STOPPING:
            return
        pieces = [(block, chunk.layers) for chunk in self.chunks for block in chunk.blocks]
        pieces += [(piece.target, piece.layers) for piece in self.pending]
        num_known: dict[int, int] = {}
        for block, layers in pieces:
            assert layers.start == num_known.get(block.index, 0), (
                f"layers of block index {block.index} are out of order"
            )
            num_known[block.index] = layers.stop
        for block in self.grant.blocks:
            if block.index < self.num_blocks:
                is_whole = block.index not in self.ungiven
                expected = self.num_layers if is_whole else self.num_layers_given.get(block.index, 0)
                assert is_whole or expected < self.num_layers, f"block index {block.index} was given whole"
                assert num_known.pop(block.index, 0) == expected, (
                    f"layers of block index {block.index} are lost or doubled"
                )
        assert not num_known, "a block that was not granted"
        assert all(index in self.ungiven for index in self.num_layers_given)


def check_grant(grant: Grant, num_blocks: int) -> None:
    """Raises ValueError where a grant cannot carry a push of `num_blocks` blocks."""
    if grant.ttl_ns < 1:
        raise ValueError(f"ttl_ns: must be positive, is {grant.ttl_ns}")
    if num_blocks < 0:
        raise ValueError(f"total_blocks: must not be negative, is {num_blocks}")
    for before, after in zip(grant.blocks, grant.blocks[1:], strict=False):
        if after.index != before.index + 1:
            raise ValueError(f"blocks: index {after.index} follows index {before.index}")
    if grant.blocks and num_blocks > grant.blocks[-1].index + 1:
        raise ValueError(f"total_blocks: {num_blocks}, but the grant ends with index {grant.blocks[-1].index}")
