"""Which heads a rank holds, what one rank owes another, and which gangs may exchange KV."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kv_transfer.protocol.codec import MalformedMessageError, decode, encode
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.messages import BlockGrant, PeerId, PushChunk, PushKey
from kv_transfer.protocol.plan import Copy
from kv_transfer.protocol.ranks import (
    MAX_RANKS,
    GangLayout,
    PairingError,
    Rank,
    RankPair,
    bad_blocks,
    heads_to_move,
    pair_gangs,
    rank_of,
    rank_peer,
)

LLAMA_70B = KVLayout(groups=(LayerGroup(num_layers=80, num_kv_heads=8, head_dim=128),), block_size=16, dtype="bfloat16")
MIXED = KVLayout(
    groups=(
        LayerGroup(num_layers=2, num_kv_heads=4, head_dim=2),
        LayerGroup(num_layers=1, num_kv_heads=1, head_dim=8, window=512),
    ),
    block_size=2,
    dtype="float32",
)


def gang(num_ranks: int = 1, layout: KVLayout = LLAMA_70B, model: str = "m1") -> GangLayout:
    return GangLayout(model=model, layout=layout, num_ranks=num_ranks)


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 10, MAX_RANKS - 1])
def test_a_name_tells_the_rank(rank: int) -> None:
    worker = PeerId("prefill-0", 3)
    peer = rank_peer(worker, rank)
    assert rank_of(peer) == rank and peer.incarnation == 3
    assert (peer == worker) == (rank == 0), "rank 0 is the worker itself"


@pytest.mark.parametrize("name", ["p/0", "p/", "p/x", "p/-1", "p/01", "p/1/2", "p/256", "p/99999999999", "p/²"])
def test_other_names_tell_no_rank(name: str) -> None:
    with pytest.raises(ValueError, match="rank"):
        rank_of(PeerId(name, 1))


@pytest.mark.parametrize("rank", [-1, MAX_RANKS])
def test_ranks_have_a_limit(rank: int) -> None:
    with pytest.raises(ValueError, match=f"{rank} of at most {MAX_RANKS}"):
        rank_peer(PeerId("p", 1), rank)
    with pytest.raises(ValueError, match="rank"):
        Rank(rank, MAX_RANKS)


# ---- heads -------------------------------------------------------------------------------------------------------


def test_heads_are_shared_out_or_held_several_times() -> None:
    assert [Rank(r, 2).heads(8) for r in range(2)] == [range(4), range(4, 8)]
    assert [Rank(r, 8).heads(8) for r in range(8)] == [range(r, r + 1) for r in range(8)]
    assert [Rank(r, 4).heads(2) for r in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(8, 3), (8, 12), (3, 2), (6, 4)])
def test_heads_that_cannot_be_shared_are_refused_with_both_numbers(num_heads: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{num_ranks} ranks cannot share {num_heads} KV heads"):
        Rank(0, num_ranks).heads(num_heads)
    layout = replace(MIXED, groups=(LayerGroup(num_layers=1, num_kv_heads=num_heads, head_dim=1),))
    with pytest.raises(ValueError, match=f"{num_ranks} ranks cannot share {num_heads} KV heads"):
        gang(num_ranks, layout)


def test_held_heads_are_written_by_one_rank_and_the_load_is_spread() -> None:
    to_receivers = [[s for s in range(4) if heads_to_move(2, Rank(s, 4), Rank(r, 4))] for r in range(4)]
    assert to_receivers == [[0], [1], [2], [3]], "equal degrees write to their like"
    assert [s for s in range(4) if heads_to_move(2, Rank(s, 4), Rank(0, 1))] == [0, 2], "one of each two that hold it"
    assert [s for s in range(4) if heads_to_move(1, Rank(s, 4), Rank(1, 2))] == [1]


DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@given(num_heads=DEGREES, num_senders=DEGREES, num_receivers=DEGREES)
@settings(max_examples=300, deadline=None)
def test_every_receiver_gets_each_of_its_heads_once(num_heads: int, num_senders: int, num_receivers: int) -> None:
    for degree in (num_senders, num_receivers):
        assume(num_heads % degree == 0 or degree % num_heads == 0)
    for number in range(num_receivers):
        receiver = Rank(number, num_receivers)
        moved: list[int] = []
        for s in range(num_senders):
            sender = Rank(s, num_senders)
            heads = heads_to_move(num_heads, sender, receiver)
            assert not heads or (heads.start in sender.heads(num_heads) and heads[-1] in sender.heads(num_heads))
            moved += heads
        assert sorted(moved) == list(receiver.heads(num_heads))


# ---- pieces and copies -------------------------------------------------------------------------------------------


def test_pieces_of_a_70b_layout() -> None:
    pair = pair_gangs(gang(1), gang(2)).pair(0, 1)
    head = 2 * 16 * 128 * 2
    assert pair.source_layout == LLAMA_70B and pair.target_layout.block_size_bytes == LLAMA_70B.block_size_bytes // 2
    assert pair.num_pieces() == 80 and pair.block_size_bytes == LLAMA_70B.block_size_bytes // 2
    assert pair.pieces(range(3, 5)) == [
        Copy(3 * 8 * head + 4 * head, 3 * 4 * head, 4 * head),
        Copy(4 * 8 * head + 4 * head, 4 * 4 * head, 4 * head),
    ]
    layer = pair.copies([(7, 2)], range(3, 4))
    assert layer == [
        Copy(7 * LLAMA_70B.block_size_bytes + 28 * head, 2 * pair.target_layout.block_size_bytes + 12 * head, 4 * head)
    ]


def test_equal_degrees_move_whole_blocks() -> None:
    pairs = pair_gangs(gang(2), gang(2))
    assert pairs.sender_ranks(1) == (1,) and list(pairs.receiver_ranks(0)) == [0]
    pair = pairs.pair(1, 1)
    half = LLAMA_70B.block_size_bytes // 2
    assert pair.copies([(3, 5), (4, 9)]) == [Copy(3 * half, 5 * half, half), Copy(4 * half, 9 * half, half)]
    assert len(pair.copies([(3, 5)], range(10, 30))) == 1, "layers that follow each other are one piece"


def test_who_writes_to_whom() -> None:
    pairs = pair_gangs(gang(4), gang(2))
    assert [pairs.sender_ranks(r) for r in range(2)] == [(0, 1), (2, 3)]
    assert [list(pairs.receiver_ranks(r)) for r in range(4)] == [[0], [0], [1], [1]]
    assert pairs.receiver_ranks(2) == {1: LLAMA_70B.block_size_bytes // 4}
    assert pairs.pair(0, 1).copies([(0, 0)]) == [] and pairs.pair(0, 1).num_pieces() == 0
    spread = pair_gangs(gang(1), gang(16))
    assert list(spread.receiver_ranks(0)) == list(range(16)), "a head that two ranks hold is sent to both"


def test_layers_that_do_not_exist_raise() -> None:
    pair = RankPair(MIXED, Rank(0, 1), Rank(0, 2))
    for layers in (range(4), range(-1, 2), range(1, 1), range(0, 3, 2)):
        with pytest.raises(ValueError, match="layers"):
            pair.pieces(layers)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    group = st.builds(
        LayerGroup,
        num_layers=st.integers(1, 3),
        num_kv_heads=DEGREES,
        head_dim=st.integers(1, 3),
        window=st.none() | st.integers(1, 9),
    )
    groups = draw(st.lists(group, min_size=1, max_size=3))
    return KVLayout(
        groups=tuple(groups), block_size=draw(st.integers(1, 3)), dtype=draw(st.sampled_from(["float32", "bfloat16"]))
    )


def elements(layout: KVLayout, block: int) -> list[tuple[int, int, int, int]]:
    """A whole block of a model: each element named by (block, layer, head, place within the head)."""
    named: list[tuple[int, int, int, int]] = []
    layer = 0
    for group in layout.groups:
        size = 2 * layout.block_size * group.head_dim
        for _ in range(group.num_layers):
            named += [(block, layer, head, at) for head in range(group.num_kv_heads) for at in range(size)]
            layer += 1
    return named


def share(layout: KVLayout, rank: Rank, blocks: int) -> list[tuple[int, int, int, int]]:
    """The rank's pool of so many blocks: of each what it holds, in the order of its own layout."""
    own = [rank.heads(group.num_kv_heads) for group in layout.groups for _ in range(group.num_layers)]
    return [name for block in range(blocks) for name in elements(layout, block) if name[2] in own[name[1]]]


@given(layout=layouts(), num_senders=DEGREES, num_receivers=DEGREES, data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_byte_is_written_once_from_its_own_head(
    layout: KVLayout, num_senders: int, num_receivers: int, data: st.DataObject
) -> None:
    for group in layout.groups:
        for degree in (num_senders, num_receivers):
            assume(group.num_kv_heads % degree == 0 or degree % group.num_kv_heads == 0)
    pairs = pair_gangs(gang(num_senders, layout), gang(num_receivers, layout))
    count = data.draw(st.integers(1, 3))
    targets = data.draw(st.permutations(range(4)))[:count]
    block_pairs = list(enumerate(targets))
    num_layers = layout.num_layers
    cut = data.draw(st.integers(0, num_layers - 1))
    cuts = [range(num_layers)] if cut == 0 else [range(cut), range(cut, num_layers)]
    size = layout.dtype_size_bytes
    for number in range(num_receivers):
        got: dict[int, tuple[int, int, int, int]] = {}
        for sender in pairs.sender_ranks(number):
            source = share(layout, Rank(sender, num_senders), count)
            pair = pairs.pair(sender, number)
            copies = [copy for layers in cuts for copy in pair.copies(block_pairs, layers)]
            ranges = [found for layers in cuts for found in pair.target_ranges(targets, layers)]
            assert ranges == [(copy.target_bytes, copy.size_bytes) for copy in copies]
            assert all(len(pair.copies(block_pairs, part)) == count * pair.num_pieces(part) for part in cuts)
            assert sum(copy.size_bytes for copy in copies) == count * pair.block_size_bytes
            for copy in copies:
                assert copy.source_bytes % size == copy.target_bytes % size == copy.size_bytes % size == 0
                for at in range(copy.size_bytes // size):
                    target = copy.target_bytes // size + at
                    assert target not in got, "written twice"
                    got[target] = source[copy.source_bytes // size + at]
        expected = share(layout, Rank(number, num_receivers), count)
        per_block = len(expected) // count
        wanted = {
            target * per_block + at: expected[source * per_block + at]
            for source, target in block_pairs
            for at in range(per_block)
        }
        assert got == wanted


def test_damaged_pieces_name_their_blocks() -> None:
    sent = (1, 2, 3, 4, 5, 6)
    assert bad_blocks((7, 8, 9), sent, sent) == ()
    assert bad_blocks((7, 8, 9), (1, 2, 3, 0, 5, 6), sent) == (8,)
    assert bad_blocks((7, 8, 9), (1, 2, 3), sent) == (7, 8, 9), "one sum a block, where two were sent"
    assert bad_blocks((7, 8), (1, 2), ()) == (7, 8), "what comes without sums is not trusted"
    assert bad_blocks((7, 8), (), ()) == (), "where nothing was to be written, nothing is damaged"


@given(num_blocks=st.integers(1, 5), num_pieces=st.integers(1, 300), is_summed=st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_chunk_carries_a_checksum_for_each_piece(num_blocks: int, num_pieces: int, is_summed: bool) -> None:
    chunk = PushChunk(
        key=PushKey("r", 1),
        lease_id=2,
        rank=3,
        chunk=0,
        blocks=tuple(BlockGrant(index, index + 9, 1) for index in range(num_blocks)),
        first_layer=0,
        num_layers=1,
        summed=tuple(range(num_blocks)) if is_summed else (),
        checksums=tuple(range(num_blocks * num_pieces)) if is_summed else (),
        num_pieces=num_pieces,
    )
    payload = encode(chunk)
    assert decode(payload) == chunk
    if is_summed:
        with pytest.raises(MalformedMessageError):
            decode(payload[:-8])


def test_checksums_of_another_number_have_no_encoding() -> None:
    blocks = (BlockGrant(0, 1, 1), BlockGrant(1, 2, 1))
    for num_pieces, num_sums in ((2, 2), (1, 4), (3, 5)):
        chunk = PushChunk(
            key=PushKey("r", 1),
            lease_id=2,
            rank=0,
            chunk=0,
            blocks=blocks,
            first_layer=0,
            num_layers=1,
            summed=(0, 1),
            checksums=tuple(range(num_sums)),
            num_pieces=num_pieces,
        )
        with pytest.raises(ValueError, match=f"{num_sums} for 2 blocks of {num_pieces} pieces"):
            encode(chunk)


# ---- pairing -----------------------------------------------------------------------------------------------------


@pytest.mark.bad_day(12)
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (gang(2, model="m2"), ["the model is m1", "m2 at the receiver"]),
        (gang(2, replace(LLAMA_70B, block_size=32)), ["block_size (tokens) is 16 at the sender", "32 at the receiver"]),
        (gang(2, replace(LLAMA_70B, dtype="float32")), ["dtype is bfloat16 at the sender", "float32 at the receiver"]),
        (
            gang(2, replace(LLAMA_70B, groups=(replace(LLAMA_70B.groups[0], num_kv_heads=4),))),
            ["80x8x128w0 at the sender", "80x4x128w0 at the receiver"],
        ),
    ],
    ids=["model", "block_size", "dtype", "heads"],
)
def test_gangs_that_differ_in_more_than_their_degree_are_refused(other: GangLayout, told: list[str]) -> None:
    """Refused with both sides' values, before anything is reserved."""
    with pytest.raises(PairingError) as refused:
        pair_gangs(gang(1), other)
    assert all(part in str(refused.value) for part in told)


def test_all_differences_are_told_at_once() -> None:
    with pytest.raises(PairingError, match=r"the model is .* dtype is .* block_size"):
        pair_gangs(gang(), gang(1, replace(LLAMA_70B, block_size=8, dtype="float32"), "m2"))
