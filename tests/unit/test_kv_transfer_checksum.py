"""The checksum: its definition, the two implementations, and the copy that sums in the same pass."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer import native_library
from kv_transfer.build import NativeBuildError, build
from kv_transfer.checksum import as_memory, checksum, checksums, fallback_checksum
from kv_transfer.native_library import NativeLibrary, Walk, load, measure_walks
from kv_transfer.transport.shm_copier import copy_ranges

MASK = 2**64 - 1
VECTORS = [
    (b"", 0x0),
    (b"\0", 0x8778EDD0E570ADA7),
    (b"Baton", 0xA35461050A15ACC6),
    (bytes(range(256)) * 64, 0xE0058A20EBF2F6FB),
]
SIZES = [0, 1, 7, 8, 9, 31, 32, 63, 64, 65, 4096, 16_383, 16_384, 16_385, 40_001, 368_640]


def by_definition(data: bytes) -> int:
    total = 0
    padded = data + bytes(-len(data) % 8)
    for index, (word,) in enumerate(struct.iter_unpack("<Q", padded)):
        value = word ^ (0xD1B54A32D192ED03 + index * 0x9E3779B97F4A7C15 & MASK)
        total += value + value % 2**32 * (value >> 32)
    h = total & MASK ^ len(data) * 0xC2B2AE3D27D4EB4F & MASK
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD & MASK
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53 & MASK
    return h ^ (h >> 33)


@pytest.fixture(params=Walk, ids=lambda walk: walk.name.lower())
def native(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    """Every way through memory that this processor can go, not only the one that is fastest here."""
    try:
        library = NativeLibrary(str(build()))
    except NativeBuildError as error:
        pytest.skip(str(error))
    best = library.walk
    try:
        library.set_walk(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield library
    library.set_walk(best)


def noise(size: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_vectors(data: bytes, expected: int) -> None:
    assert by_definition(data) == checksum(data) == fallback_checksum(as_memory(data)) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 8, 32])
def test_implementations_agree(native: NativeLibrary, size: int, offset: int) -> None:
    memory = noise(size + offset + 3)
    expected = fallback_checksum(memory[offset : offset + size])
    assert native.checksums(memory, [(offset, size)]) == [expected]
    if size <= 4096:
        assert by_definition(memory[offset : offset + size].tobytes()) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 5, 32])
def test_copy_moves_exactly_its_bytes_and_sums_them(native: NativeLibrary, size: int, offset: int) -> None:
    source, target = noise(size + 100), noise(size + 200, seed=1)
    before = target.copy()
    copies = np.array([(7, offset + 64, size)], dtype=np.uint64)
    for with_sums in (True, False):
        target[:] = before
        sums = native.copy(target, source, copies, checksum=with_sums)
        assert sums == ([fallback_checksum(source[7 : 7 + size])] if with_sums else [])
        before[offset + 64 : offset + 64 + size] = source[7 : 7 + size]
        assert (target == before).all()
        before = noise(size + 200, seed=1)


def test_the_fastest_way_through_memory_is_taken(native: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure_walks(native)
    assert measured and all(0 < seconds < 10 for seconds in measured.values())
    for fastest in measured:
        seconds = {walk: 0.5 if walk is fastest else 1.0 for walk in measured}
        monkeypatch.setattr("kv_transfer.native_library.measure_walks", lambda _, seconds=seconds: seconds)
        library = load.__wrapped__()
        assert library is not None and library.walk is fastest


def test_copy_without_the_library_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transport.shm_copier.load", lambda: None)
    source, target = noise(1000), np.zeros(1000, dtype=np.uint8)
    sums = copy_ranges(target, source, np.array([(0, 500, 100), (100, 0, 9)], dtype=np.uint64), checksum=True)
    assert sums == [fallback_checksum(source[:100]), fallback_checksum(source[100:109])]
    assert (target[500:600] == source[:100]).all() and (target[:9] == source[100:109]).all()
    assert not target[9:500].any() and not target[600:].any()


def test_every_flipped_bit_shows() -> None:
    memory = noise(64)
    expected = fallback_checksum(memory)
    for bit in range(8 * memory.size):
        memory[bit // 8] ^= 1 << bit % 8
        assert fallback_checksum(memory) != expected
        memory[bit // 8] ^= 1 << bit % 8


def test_swapped_moved_and_shortened_words_show() -> None:
    memory = noise(4096)
    sums = [fallback_checksum(memory), fallback_checksum(memory[:-8]), fallback_checksum(np.roll(memory, 8))]
    words = memory.view(np.uint64).copy()
    words[[0, 300]] = words[[300, 0]]
    sums.append(fallback_checksum(words.view(np.uint8)))
    sums += [fallback_checksum(np.zeros(size, dtype=np.uint8)) for size in (4096, 4088, 8)]
    assert len(set(sums)) == len(sums)


def test_ranges_outside_of_memory_raise() -> None:
    for bad in ((0, 11), (-1, 2), (5, 6), (0, -1)):
        with pytest.raises(ValueError, match="ranges"):
            checksums(noise(10), [(0, 10), bad])


def test_missing_library_warns_once_and_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_library, "library_path", lambda: tmp_path / "absent.so")
    native_library.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native_library.load() is None
            assert native_library.load() is None
            assert checksum(b"Baton") == 0xA35461050A15ACC6
        assert len(caplog.records) == 1 and "kv_transfer.build" in caplog.text
    finally:
        native_library.load.cache_clear()


def test_build_without_a_working_compiler_says_so(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="not installed"):
        build(tmp_path, compiler="no-such-compiler")
    with pytest.raises(NativeBuildError, match="failed"):
        build(tmp_path, compiler="false")
    assert list(tmp_path.iterdir()) == []
