"""KVLayout and the plan of copies."""

from __future__ import annotations

import random

import pytest

from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.plan import Copy, plan_block_copies, plan_copies

SMOL = KVLayout(groups=(LayerGroup(num_layers=30, num_kv_heads=3, head_dim=64),), block_size=16, dtype="bfloat16")
MIXED = KVLayout(
    groups=(
        LayerGroup(num_layers=2, num_kv_heads=4, head_dim=8),
        LayerGroup(num_layers=3, num_kv_heads=1, head_dim=32, window=512),
    ),
    block_size=4,
    dtype="float32",
)


def test_sizes() -> None:
    assert SMOL.token_size_bytes == 23_040
    assert SMOL.block_size_bytes == 360 * 1024
    assert SMOL.num_layers == 30
    assert SMOL.pool_size_bytes(10) == SMOL.block_offset_bytes(10) == 3_686_400


@pytest.mark.parametrize("layout", [SMOL, MIXED])
def test_slices_tile_a_block(layout: KVLayout) -> None:
    """Layers follow each other without gaps, and so do the heads within a layer."""
    at = layout.block_offset_bytes(2)
    for layer in range(layout.num_layers):
        offset, size = layout.layer_slice(2, layer)
        assert offset == at
        num_heads = next(
            group.num_kv_heads
            for group, first in zip(layout.groups, (0, layout.groups[0].num_layers), strict=False)
            if first <= layer < first + group.num_layers
        )
        heads = [layout.head_slice(2, layer, head, 1) for head in range(num_heads)]
        assert [start for start, _ in heads] == [offset + n * heads[0][1] for n in range(num_heads)]
        assert sum(size for _, size in heads) == size
        at += size
    assert at == layout.block_offset_bytes(3)


@pytest.mark.parametrize("layout", [SMOL, MIXED])
def test_ranges_of_layers_are_their_slices_together(layout: KVLayout) -> None:
    for first in range(layout.num_layers):
        for stop in range(first + 1, layout.num_layers + 1):
            slices = [layout.layer_slice(2, layer) for layer in range(first, stop)]
            assert layout.layers_slice(2, range(first, stop)) == (slices[0][0], sum(size for _, size in slices))
    assert layout.layers_slice(2, range(layout.num_layers)) == (layout.block_offset_bytes(2), layout.block_size_bytes)


def test_slices_out_of_range_raise() -> None:
    for layers in (range(6), range(-1, 2), range(2, 2), range(0, 4, 2), range(3, 1, -1)):
        with pytest.raises(ValueError, match="layer"):
            MIXED.layers_slice(0, layers)
    for layer in (-1, 5):
        with pytest.raises(ValueError, match="layer"):
            MIXED.layer_slice(0, layer)
    for first, count in ((0, 5), (-1, 1), (0, 0), (4, 1)):
        with pytest.raises(ValueError, match="num_heads"):
            MIXED.head_slice(0, 0, first, count)


def test_compatibility_names_everything_that_matters() -> None:
    assert SMOL.compatibility() == "kv1 block,layer,kv_head,kv,token,head_dim bfloat16 block=16 30x3x64w0"
    variants = [
        SMOL,
        KVLayout(groups=SMOL.groups, block_size=32, dtype="bfloat16"),
        KVLayout(groups=SMOL.groups, block_size=16, dtype="float32"),
        KVLayout(
            groups=(LayerGroup(num_layers=30, num_kv_heads=3, head_dim=64, window=9),), block_size=16, dtype="bfloat16"
        ),
        MIXED,
    ]
    assert len({variant.compatibility() for variant in variants}) == len(variants)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("groups", lambda: KVLayout(groups=(), block_size=16, dtype="float32")),
        ("block_size", lambda: KVLayout(groups=SMOL.groups, block_size=0, dtype="float32")),
        ("dtype", lambda: KVLayout(groups=SMOL.groups, block_size=16, dtype="int4")),
        ("num_layers", lambda: LayerGroup(num_layers=0, num_kv_heads=1, head_dim=1)),
        ("window", lambda: LayerGroup(num_layers=1, num_kv_heads=1, head_dim=1, window=0)),
    ],
)
def test_bad_layouts_name_the_field(field: str, make: object) -> None:
    with pytest.raises(ValueError, match=field):
        make()  # type: ignore[operator]


def test_neighbours_on_both_sides_become_one_copy() -> None:
    size = MIXED.block_size_bytes
    pairs = [(4, 10), (5, 11), (6, 12), (8, 13), (9, 15), (3, 2)]
    assert plan_copies(pairs, MIXED) == [
        Copy(4 * size, 10 * size, 3 * size),
        Copy(8 * size, 13 * size, size),
        Copy(9 * size, 15 * size, size),
        Copy(3 * size, 2 * size, size),
    ]
    assert plan_copies([], MIXED) == []


def test_both_plans_move_the_same_bytes() -> None:
    rng = random.Random(7)
    for _ in range(100):
        count = rng.randint(0, 12)
        pairs = list(zip(rng.sample(range(16), count), rng.sample(range(16), count), strict=True))
        assert _moved(plan_copies(pairs, MIXED)) == _moved(plan_block_copies(pairs, MIXED)) == dict(pairs)
        assert len(plan_block_copies(pairs, MIXED)) == len(pairs)


def test_plans_of_layers_tile_those_of_whole_blocks() -> None:
    pairs = [(4, 10), (5, 11), (8, 2)]
    moved: dict[int, int] = {}
    for layers in (range(1), range(1, 4), range(4, 5)):
        copies = plan_block_copies(pairs, MIXED, layers)
        assert [(copy.source_bytes, copy.size_bytes) for copy in copies] == [
            MIXED.layers_slice(source, layers) for source, _ in pairs
        ]
        assert plan_copies(pairs, MIXED, layers) == copies, "layers of two blocks do not touch"
        moved.update(
            (copy.source_bytes + at, copy.target_bytes + at) for copy in copies for at in range(copy.size_bytes)
        )
    whole = plan_copies(pairs, MIXED)
    assert moved == {copy.source_bytes + at: copy.target_bytes + at for copy in whole for at in range(copy.size_bytes)}
    assert plan_copies(pairs, MIXED, range(5)) == whole


def _moved(copies: list[Copy]) -> dict[int, int]:
    size = MIXED.block_size_bytes
    return {
        (copy.source_bytes + at) // size: (copy.target_bytes + at) // size
        for copy in copies
        for at in range(0, copy.size_bytes, size)
    }
