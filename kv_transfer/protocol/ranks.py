"""Pools of unequal tensor parallelism: which KV heads a rank holds, and which bytes one rank owes another.

A worker may be a gang of ranks. They share the model's KV heads; each has a pool of its own, with the same blocks
(ids, generations) as its siblings. Of H heads a rank of T holds H / T neighbours; where T is a multiple of H it holds
one, and T / H neighbouring ranks hold the same. Between two gangs each rank writes to a peer what both hold, and of
several ranks that hold the same head exactly one writes it to a given peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.messages import PeerId
from kv_transfer.protocol.plan import Copy, merge_copies

MAX_RANKS = 256
"""Of one gang."""
MAX_PIECES_PER_WRITE = 4096
"""Their checksums fit into one notification of every transport."""
_SEPARATOR = "/"
"""No worker's name holds it."""


class PairingError(Exception):
    """Two gangs hold KV that cannot be exchanged; the message names each difference with both sides' values."""


# ---- names -------------------------------------------------------------------------------------------------------


def rank_peer(worker: PeerId, rank: int) -> PeerId:
    """What rank `rank` of that life of a worker is called on the data connection: `name` for rank 0, `name/1`, ...

    Rank 0 bears the worker's name, so that a worker of one rank is an ordinary peer.
    """
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank: {rank} of at most {MAX_RANKS}")
    return worker if rank == 0 else PeerId(f"{worker.name}{_SEPARATOR}{rank}", worker.incarnation)


def rank_of(peer: PeerId) -> int:
    """The rank that a peer's name tells. Raises: ValueError for a name that rank_peer does not make."""
    worker, separator, digits = peer.name.partition(_SEPARATOR)
    if not separator:
        return 0
    rank = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 4 else 0
    if rank == 0 or rank_peer(PeerId(worker, peer.incarnation), rank) != peer:
        raise ValueError(f"peer: {peer.name!r} is no rank's name")
    return rank


def worker_of(peer: PeerId) -> PeerId:
    """The life of a worker of which the peer is a rank."""
    return PeerId(peer.name.partition(_SEPARATOR)[0], peer.incarnation)


# ---- heads -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `number` of a gang of `num_ranks`."""

    number: int
    num_ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.num_ranks <= MAX_RANKS:
            raise ValueError(f"rank: {self.number} of {self.num_ranks} ranks, where {MAX_RANKS} are the most")

    def num_copies(self, num_kv_heads: int) -> int:
        """How many ranks of the gang hold each head. Raises: ValueError where the heads cannot be shared out."""
        if num_kv_heads % self.num_ranks and self.num_ranks % num_kv_heads:
            raise ValueError(
                f"num_ranks: {self.num_ranks} ranks cannot share {num_kv_heads} KV heads, "
                "because neither is a multiple of the other"
            )
        return max(1, self.num_ranks // num_kv_heads)

    def heads(self, num_kv_heads: int) -> range:
        """The heads that the rank holds. Raises: ValueError as `num_copies`."""
        if self.num_copies(num_kv_heads) > 1:
            first = self.number * num_kv_heads // self.num_ranks
            return range(first, first + 1)
        num_own = num_kv_heads // self.num_ranks
        return range(self.number * num_own, (self.number + 1) * num_own)


def heads_to_move(num_kv_heads: int, sender: Rank, receiver: Rank) -> range:
    """The heads that `sender` writes to `receiver`; empty if none. Raises: ValueError as Rank.num_copies.

    Over all ranks of the sender's gang these ranges are the receiver's heads, each once. Receivers of one head are
    spread over the senders that hold it, and ranks of equal degrees write to their like.
    """
    num_copies = sender.num_copies(num_kv_heads)
    wanted = receiver.number % receiver.num_copies(num_kv_heads) % num_copies
    own, theirs = sender.heads(num_kv_heads), receiver.heads(num_kv_heads)
    first, stop = max(own.start, theirs.start), min(own.stop, theirs.stop)
    return range(first, stop) if first < stop and sender.number % num_copies == wanted else range(0)


# ---- gangs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLayout:
    """What a worker holds: KV of the model with that fingerprint, laid out as `layout` (all heads), over its ranks."""

    model: str
    layout: KVLayout
    num_ranks: int = 1

    def __post_init__(self) -> None:
        """Raises: ValueError where the ranks cannot share a group's heads."""
        for group in self.layout.groups:
            Rank(0, self.num_ranks).num_copies(group.num_kv_heads)

    def rank_layout(self) -> KVLayout:
        """The layout of each rank's own pool."""
        one = Rank(0, self.num_ranks)
        groups = (replace(group, num_kv_heads=len(one.heads(group.num_kv_heads))) for group in self.layout.groups)
        return replace(self.layout, groups=tuple(groups))


class RankPair:
    """What moves from one rank to another, block by block. `GangPair.pair` makes it."""

    def __init__(self, model: KVLayout, sender: Rank, receiver: Rank) -> None:
        """`model` is the layout of all heads, the same on both sides. Raises: ValueError as Rank.num_copies."""
        self.source_layout = GangLayout(model="", layout=model, num_ranks=sender.num_ranks).rank_layout()
        self.target_layout = GangLayout(model="", layout=model, num_ranks=receiver.num_ranks).rank_layout()
        self._layers: list[Copy | None] = []
        """Of each layer, what moves of it from block 0 to block 0."""
        layer = 0
        for group in model.groups:
            for _ in range(group.num_layers):
                self._layers.append(self._piece_of(layer, group, sender, receiver))
                layer += 1
        self.block_size_bytes = sum(piece.size_bytes for piece in self._layers if piece is not None)
        """What moves of a whole block; 0 if the sender writes nothing to this receiver."""

    def pieces(self, layers: range | None = None) -> list[Copy]:
        """What moves of these layers (None: of all) from block 0 to block 0, in ascending order, neighbours merged.

        Whole blocks, where the degrees are equal, are one piece; else there is one a layer.
        Raises: ValueError for layers that do not exist.
        """
        wanted = range(len(self._layers)) if layers is None else layers
        if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= len(self._layers):
            raise ValueError(f"layers: {wanted} of {len(self._layers)}")
        return merge_copies([piece for piece in self._layers[wanted.start : wanted.stop] if piece is not None])

    def num_pieces(self, layers: range | None = None) -> int:
        """Pieces of a block, which is what PushChunk.num_pieces must say where checksums are on. There is none where
        only other layers move, as between groups of layers whose heads are shared out differently."""
        return len(self.pieces(layers))

    def copies(self, pairs: Iterable[tuple[int, int]], layers: range | None = None) -> list[Copy]:
        """For (source block id, target block id) pairs: block after block, one copy a piece."""
        source_size, target_size = self.source_layout.block_size_bytes, self.target_layout.block_size_bytes
        pieces = self.pieces(layers)
        starts = [(source * source_size, target * target_size) for source, target in pairs]
        return [
            Copy(source_start + source, target_start + target, size)
            for source_start, target_start in starts
            for source, target, size in pieces
        ]

    def target_ranges(self, block_ids: Iterable[int], layers: range | None = None) -> list[tuple[int, int]]:
        """(offset, size) in bytes of the receiver's pool of what `copies` writes, in the same order."""
        size_bytes = self.target_layout.block_size_bytes
        pieces = self.pieces(layers)
        return [(block * size_bytes + p.target_bytes, p.size_bytes) for block in block_ids for p in pieces]

    def _piece_of(self, layer: int, group: LayerGroup, sender: Rank, receiver: Rank) -> Copy | None:
        heads = heads_to_move(group.num_kv_heads, sender, receiver)
        if not heads:
            return None
        first_own = sender.heads(group.num_kv_heads).start
        first_theirs = receiver.heads(group.num_kv_heads).start
        source_bytes, size_bytes = self.source_layout.head_slice(0, layer, heads.start - first_own, len(heads))
        target_bytes, _ = self.target_layout.head_slice(0, layer, heads.start - first_theirs, len(heads))
        return Copy(source_bytes, target_bytes, size_bytes)


class GangPair:
    """Two gangs whose KV can be exchanged. `pair_gangs` makes it."""

    def __init__(self, layout: KVLayout, num_senders: int, num_receivers: int) -> None:
        self._layout = layout
        self._num_senders = num_senders
        self._num_receivers = num_receivers
        self._pairs: dict[tuple[int, int], RankPair] = {}
        """Made when asked for: most ranks never meet."""

    def pair(self, sender_rank: int, receiver_rank: int) -> RankPair:
        """Raises: ValueError for a rank that does not exist."""
        key = (sender_rank, receiver_rank)
        if key not in self._pairs:
            sender, receiver = Rank(sender_rank, self._num_senders), Rank(receiver_rank, self._num_receivers)
            self._pairs[key] = RankPair(self._layout, sender, receiver)
        return self._pairs[key]

    def sender_ranks(self, receiver_rank: int) -> tuple[int, ...]:
        """Who writes to that receiver, ascending."""
        ranks = range(self._num_senders)
        return tuple(rank for rank in ranks if self.pair(rank, receiver_rank).block_size_bytes)

    def receiver_ranks(self, sender_rank: int) -> dict[int, int]:
        """To whom that sender writes, ascending, with the bytes that each is sent of a block."""
        sizes = {rank: self.pair(sender_rank, rank).block_size_bytes for rank in range(self._num_receivers)}
        return {rank: size_bytes for rank, size_bytes in sizes.items() if size_bytes}


def pair_gangs(sender: GangLayout, receiver: GangLayout) -> GangPair:
    """Raises: PairingError where model, dtype, tokens a block or the layers' heads differ; only degrees may."""
    differences = [
        f"{what} is {ours} at the sender and {theirs} at the receiver"
        for what, ours, theirs in zip(_TOLD, _told(sender), _told(receiver), strict=True)
        if ours != theirs
    ]
    if differences:
        raise PairingError("these workers cannot exchange KV: " + "; ".join(differences))
    return GangPair(sender.layout, sender.num_ranks, receiver.num_ranks)


def bad_blocks(block_ids: Sequence[int], sums: Sequence[int], checksums: Sequence[int]) -> tuple[int, ...]:
    """The blocks of which a piece is damaged: `sums` were found, `checksums` sent, as many for each block.

    If their numbers do not fit, no block is trusted.
    """
    num_pieces = len(sums) // len(block_ids)
    if len(sums) != len(checksums) or len(sums) != num_pieces * len(block_ids):
        return tuple(block_ids)
    is_bad = [ours != theirs for ours, theirs in zip(sums, checksums, strict=True)]
    return tuple(
        block for number, block in enumerate(block_ids) if any(is_bad[number * num_pieces : (number + 1) * num_pieces])
    )


_TOLD = ("the model", "dtype", "block_size (tokens)", "layers x KV heads x head_dim (w: window)")


def _told(gang: GangLayout) -> tuple[str, str, str, str]:
    groups = (f"{g.num_layers}x{g.num_kv_heads}x{g.head_dim}w{g.window or 0}" for g in gang.layout.groups)
    return gang.model, gang.layout.dtype, str(gang.layout.block_size), " + ".join(groups)
