"""One push as its receiver sees it: which chunks have arrived and proved good. PushReceiver drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.protocol.limits import MAX_CHUNKS
from kv_transfer.protocol.messages import BlockGrant, Grant, PeerId, PushChunk, PushEnd, are_positions


class ReceiverPhase(Enum):
    RECEIVING = "receiving"
    ARRIVED = "arrived"
    """Complete and verified; the owner is committing it. No write is in flight any more."""
    STOPPING = "stopping"
    """Given up; quarantined until the sender acknowledges the stop."""
    FENCING = "fencing"
    """Given up; quarantined until the sender's life is fenced."""


class ChunkState(Enum):
    VERIFYING = "verifying"
    GOOD = "good"
    BAD = "bad"


@dataclass(slots=True)
class ArrivedChunk:
    blocks: tuple[BlockGrant, ...]
    layers: range
    state: ChunkState


@dataclass(slots=True, kw_only=True)
class IncomingPush:
    grant: Grant
    num_layers: int
    """Of a block."""
    opened_ns: int
    lease_deadline_ns: int
    sender_rank: int = 0
    phase: ReceiverPhase = ReceiverPhase.RECEIVING
    chunks: dict[int, ArrivedChunk] = field(default_factory=dict)
    """By chunk number; one that was asked for again is absent until it arrives again."""
    layers_arrived: dict[int, int] = field(default_factory=dict)
    """By block index: bit l is set if one of `chunks` holds layer l of it."""
    round: int = 0
    missing: tuple[int, ...] = ()
    """What this round asked for."""
    end: PushEnd | None = None
    """This round's PushEnd, while chunks are still being verified."""
    stop_reason: str = ""
    stop_deadline_ns: int = 0
    stop_due_ns: int = 0

    @property
    def peer(self) -> PeerId:
        return self.grant.sender

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(block.block_id for block in self.grant.blocks)

    @property
    def is_quarantined(self) -> bool:
        return self.phase in (ReceiverPhase.STOPPING, ReceiverPhase.FENCING)

    @property
    def max_chunks(self) -> int:
        """No push can have more: each holds at least one layer of a block."""
        return min(len(self.grant.blocks) * self.num_layers, MAX_CHUNKS)

    def is_granted(self, blocks: Sequence[BlockGrant]) -> bool:
        """Whether the grant holds exactly these indices, ids and generations."""
        if not self.grant.blocks:
            return not blocks
        first = self.grant.blocks[0].index
        return all(
            0 <= block.index - first < len(self.grant.blocks) and self.grant.blocks[block.index - first] == block
            for block in blocks
        )

    def violation(self, message: PushChunk) -> str | None:
        """Why the chunk contradicts the grant or what was said before; None if it does not."""
        if not message.blocks or not self.is_granted(message.blocks):
            return f"chunk {message.chunk} names blocks that were not granted"
        if not 0 <= message.chunk < self.max_chunks or message.rank != self.sender_rank:
            return f"chunk {message.chunk} of rank {message.rank} cannot exist"
        if message.num_layers < 1 or message.first_layer < 0 or message.layers.stop > self.num_layers:
            return f"chunk {message.chunk} names layers {message.layers} of {self.num_layers}"
        if not are_positions(message.summed, len(message.blocks)):
            return f"chunk {message.chunk} of {len(message.blocks)} blocks has the sums of {message.summed}"
        if len(message.checksums) != message.num_checksums:
            return f"chunk {message.chunk} has {len(message.checksums)} checksums for {len(message.summed)} blocks"
        return self._contradiction(message)

    def _contradiction(self, message: PushChunk) -> str | None:
        """How the chunk and those that have arrived cannot be of one push; None if they can."""
        known = self.chunks.get(message.chunk)
        if known is not None:
            is_copy = known.blocks == message.blocks and known.layers == message.layers
            return None if is_copy else f"chunk {message.chunk} came with other blocks or layers before"
        if not self.is_news(message):
            return None
        layers, seen = _bits(message.layers), set()
        for block in message.blocks:
            if block.index in seen or self.layers_arrived.get(block.index, 0) & layers:
                return f"chunk {message.chunk} holds layers of block index {block.index} that have arrived already"
            seen.add(block.index)
        return None

    def add_chunk(self, message: PushChunk, state: ChunkState) -> None:
        """Takes in a chunk that is news and no violation."""
        self.chunks[message.chunk] = ArrivedChunk(message.blocks, message.layers, state)
        for block in message.blocks:
            self.layers_arrived[block.index] = self.layers_arrived.get(block.index, 0) | _bits(message.layers)

    def is_news(self, message: PushChunk) -> bool:
        """False for late copies: of an earlier round, or of a chunk that this round has already."""
        return message.round == self.round and message.chunk not in self.chunks

    def lost_chunks(self, num_chunks: int) -> tuple[int, ...]:
        """Chunks that have not proved good: absent ones and bad ones."""
        return tuple(
            number
            for number in range(num_chunks)
            if number not in self.chunks or self.chunks[number].state is not ChunkState.GOOD
        )

    def is_verifying(self) -> bool:
        return any(chunk.state is ChunkState.VERIFYING for chunk in self.chunks.values())

    def is_complete(self, end: PushEnd) -> bool:
        """Whether the chunks are those that `end` counts, and hold every layer of each granted block that it counts.

        They hold none twice: that is a contradiction already when it arrives.
        """
        if len(self.chunks) != end.num_chunks or self.lost_chunks(end.num_chunks):
            return False
        every_layer = _bits(range(self.num_layers))
        counted = [block.index for block in self.grant.blocks if block.index < end.num_blocks]
        return self.layers_arrived == dict.fromkeys(counted, every_layer)

    def begin_round(self, lost: tuple[int, ...]) -> None:
        self.round += 1
        self.missing = lost
        self.end = None
        for number in lost:
            chunk = self.chunks.pop(number, None)
            if chunk is not None:
                self._take_out(chunk)

    def _take_out(self, chunk: ArrivedChunk) -> None:
        for block in chunk.blocks:
            rest = self.layers_arrived.pop(block.index) & ~_bits(chunk.layers)
            if rest:
                self.layers_arrived[block.index] = rest

    def next_deadline_ns(self, can_send: bool) -> int | None:
        if self.phase is ReceiverPhase.RECEIVING:
            return self.lease_deadline_ns
        if self.phase is ReceiverPhase.STOPPING:
            return min(self.stop_deadline_ns, self.stop_due_ns) if can_send else self.stop_deadline_ns
        return None

    def check_invariants(self) -> None:
        if self.phase is ReceiverPhase.ARRIVED:
            assert self.end is not None and self.end.round == self.round
            assert self.is_complete(self.end) and not self.is_verifying()
        if self.phase is ReceiverPhase.RECEIVING and self.end is not None:
            assert self.is_verifying(), "an end that waits for nothing must have been answered"
        arrived: dict[int, int] = {}
        for chunk in self.chunks.values():
            assert self.is_granted(chunk.blocks)
            assert chunk.layers and chunk.layers.start >= 0 and chunk.layers.stop <= self.num_layers
            for block in chunk.blocks:
                known = arrived.get(block.index, 0)
                assert not known & _bits(chunk.layers), f"layers of block index {block.index} lie in two chunks"
                arrived[block.index] = known | _bits(chunk.layers)
        assert arrived == self.layers_arrived, "what has arrived is not what the chunks hold"
        assert len(self.chunks) <= self.max_chunks
        assert self.phase is not ReceiverPhase.STOPPING or self.grant.blocks, "nothing to wait for"


def _bits(layers: range) -> int:
    """One bit a layer."""
    return (1 << layers.stop) - (1 << layers.start)


def check_grant(grant: Grant) -> None:
    """Raises ValueError for a grant that no push could carry."""
    if grant.ttl_ns < 1:
        raise ValueError(f"ttl_ns: must be positive, is {grant.ttl_ns}")
    for before, after in zip(grant.blocks, grant.blocks[1:], strict=False):
        if after.index != before.index + 1:
            raise ValueError(f"blocks: index {after.index} follows index {before.index}")
    if len(dict.fromkeys(block.block_id for block in grant.blocks)) != len(grant.blocks):
        raise ValueError("blocks: a block id appears twice")
