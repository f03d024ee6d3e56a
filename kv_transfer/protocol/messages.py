"""The push protocol's vocabulary: what sender and receiver tell each other, and what they ask their owner to do.

A push moves one attempt's KV blocks from a prefill worker (sender) into blocks that a decode worker (receiver) has
reserved for it. Block *indices* count a sequence's blocks in token order; block *ids* name blocks of a pool.
Encoded form: `kv_transfer.protocol.codec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """One life of a worker, or of one rank of a gang (`ranks.rank_peer` gives its name)."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True, order=True)
class PushKey:
    """Names a push: one attempt at one request."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """A reserved block the sender may write: `index` in the sequence, `block_id` and `generation` at the receiver."""

    index: int
    block_id: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a lease entitles to. The indices follow each other.

    Blocks below `blocks[0].index` are cached at the receiver and not sent; without `blocks`, all of them are.
    """

    key: PushKey
    lease_id: int
    receiver: PeerId
    sender: PeerId
    blocks: tuple[BlockGrant, ...]
    ttl_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A token that the sender drew, handed over with the KV (one a choice).

    `logprob` and `top` (token id, logprob) are what only the sender has computed of it, where that was asked for: the
    receiver sends the token to the client as well, and whichever comes first counts.
    """

    choice: int
    position: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStats:
    """What the sender measured of one push, for the request's timeline.

    `size_bytes` were written, `early_bytes` of them before the last chunk's computation ended (before `finish` was
    called), `duration_ns` from the first write's posting to the last one's completion.
    """

    size_bytes: int = 0
    early_bytes: int = 0
    duration_ns: int = 0


# ---- messages on the data connection -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PushChunk:
    """Sender to receiver, with a write: of these blocks, `num_layers` layers from `first_layer` on are in place.

    That is all layers, except where blocks are written while they are computed, in groups of layers. `summed` are the
    positions within `blocks`, ascending, of those that have a checksum (`sampling`: all, some or none); `checksums` are
    theirs, in that order, each of that block's layers alone. Between ranks that share the heads differently those
    layers of a block move in `num_pieces` pieces, with as many checksums; in none if the sender owes nothing of them.
    `round` counts the receiver's PushMissing answers: 0 for the first writing, r for what PushMissing(round=r) asked.
    """

    key: PushKey
    lease_id: int
    rank: int
    chunk: int
    blocks: tuple[BlockGrant, ...]
    first_layer: int
    num_layers: int
    summed: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()
    round: int = 0
    num_pieces: int = 1

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def num_checksums(self) -> int:
        """How many belong to the chunk once the transport has added them."""
        return len(self.summed) * self.num_pieces


def are_positions(summed: tuple[int, ...], num_blocks: int) -> bool:
    """Whether a chunk of so many blocks can have said PushChunk.summed: each within it, and in ascending order."""
    is_ascending = all(before < after for before, after in pairwise(summed))
    return is_ascending and (not summed or (summed[0] >= 0 and summed[-1] < num_blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEnd:
    """Sender to receiver: every write of chunks 0..num_chunks-1 has completed; take the sequence over.

    The sequence's first `num_blocks` blocks hold the KV of its `num_tokens` tokens; blocks granted beyond them carry
    nothing yet. The receiver commits only an end of its own `round`: an older one may be a late copy, sent before
    writes that are in flight now.
    """

    key: PushKey
    lease_id: int
    rank: int
    num_chunks: int
    num_blocks: int
    num_tokens: int
    first_tokens: tuple[FirstToken, ...]
    stats: PushStats = PushStats()
    round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushAbort:
    """Sender to receiver: the push ends without a commit and, if `stopped`, no write is in flight any more.

    Without `stopped` another PushAbort follows once the writes have ended, or none if that can never be told.
    """

    key: PushKey
    lease_id: int
    stopped: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStop:
    """Receiver to sender: stop this push for good; answer PushAbort(stopped=True) once nothing is in flight."""

    key: PushKey
    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushMissing:
    """Receiver to sender, answering PushEnd: write these chunks again (lost or corrupt), then send PushEnd again."""

    key: PushKey
    lease_id: int
    chunks: tuple[int, ...]
    round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCommitted:
    """Receiver to sender: the KV is the receiver's; the sender may let its source blocks go."""

    key: PushKey
    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenew:
    """For all pushes of the pair at once: these leases are alive here.

    The sender asks, naming its own clock's `sent_ns`; the receiver replies with those of them that live, and with the
    same `sent_ns`. So the sender counts a lease from before it asked and the receiver from when it was asked.
    """

    lease_ids: tuple[int, ...]
    sent_ns: int = 0
    is_reply: bool = False


PushMessage = PushChunk | PushEnd | PushAbort | PushStop | PushMissing | PushCommitted | LeaseRenew


# ---- effects: what the machines ask their owner to do ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectPeer:
    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Deliver `message` without data. A connection that is gone swallows it: every wait has its own deadline."""

    peer: PeerId
    message: PushMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBlocks:
    """Copy `message.layers` of blocks (`source_blocks[i]` -> `message.blocks[i]`), then deliver `message` with the
    checksums of those blocks that `message.summed` names.

    Whole blocks, or what `peer` holds of them (`ranks.RankPair`); the owner sets `message.num_pieces` accordingly.
    The owner answers with PushSender.on_write_completed / on_write_failed naming `write_id`.
    """

    peer: PeerId
    write_id: int
    source_blocks: tuple[int, ...]
    message: PushChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWrite:
    write_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBlocks:
    """Sum these layers of each of these local blocks, the summed ones of a chunk, off the engine thread; the owner
    answers with PushReceiver.on_verified.

    `rank` is the sender's: it tells which pieces of the layers were written, and have a checksum each.
    """

    key: PushKey
    chunk: int
    block_ids: tuple[int, ...]
    layers: range
    checksums: tuple[int, ...]
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushArrived:
    """Receiver: all blocks are in place and verified. The owner commits them by generation (BlockPool.commit).

    The first `num_blocks` of the sequence's blocks hold the KV of its `num_tokens` tokens.
    """

    key: PushKey
    lease_id: int
    blocks: tuple[BlockGrant, ...]
    num_blocks: int
    num_tokens: int
    first_tokens: tuple[FirstToken, ...]
    stats: PushStats = PushStats()


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFailed:
    """Receiver or sender: the push will not complete. What happens to the blocks is told apart by the next two."""

    key: PushKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksQuarantined:
    """Receiver: these reserved blocks are given up but a write may still land in them."""

    key: PushKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReleased:
    """Receiver: nothing can land in these reserved or quarantined blocks any more; they may be free."""

    key: PushKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReleased:
    """Sender: the push needs its source blocks no more (committed, or stopped). Exactly once a push.

    Unless `settled`, a write of it may still land at the receiver: only a fence, never a word of ours, frees those
    blocks (the owner must not report such a push as stopped).
    """

    key: PushKey
    committed: bool
    settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FencePeer:
    """Start Transport.fence; the owner answers with PushReceiver.on_fenced."""

    peer: PeerId


PushEffect = (
    ConnectPeer
    | SendMessage
    | WriteBlocks
    | CancelWrite
    | VerifyBlocks
    | PushArrived
    | PushFailed
    | BlocksQuarantined
    | BlocksReleased
    | SourceReleased
    | FencePeer
)
