"""Files of the prefix cache: what is read is what was written, whatever lies in the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.disk_tier import DiskBlock, DiskWork
from engine.disk_cache import HEADER_SIZE_BYTES, DiskCache

BLOCK_SIZE_BYTES = 96


def name(number: int) -> bytes:
    return bytes([number]) * 16


class Bench:
    def __init__(self, directory: Path, layout: str = "model, layout") -> None:
        self.slots = [bytearray(BLOCK_SIZE_BYTES) for _ in range(4)]
        self.directory = directory
        self.cache = DiskCache(directory, layout, lambda slot: memoryview(self.slots[slot]), BLOCK_SIZE_BYTES)

    def write(self, number: int) -> bool:
        self.slots[0][:] = bytes([number + 100]) * BLOCK_SIZE_BYTES
        block = DiskBlock(block_hash=name(number), parent_hash=name(number - 1), slot=0)
        return not self.cache.do(DiskWork(reads=(), deletions=(), writes=(block,))).failed

    def read(self, number: int) -> bytes | None:
        block = DiskBlock(block_hash=name(number), parent_hash=name(number - 1), slot=3)
        result = self.cache.do(DiskWork(reads=(block,), deletions=(), writes=()))
        return None if result.failed else bytes(self.slots[3])

    def path(self, number: int) -> Path:
        return self.directory / f"{name(number).hex()}.kv"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "new" / "p0")


def test_what_is_written_is_read_also_by_the_next_life(bench: Bench) -> None:
    assert all(bench.write(number) for number in (1, 2, 3))
    assert bench.read(2) == bytes([102]) * BLOCK_SIZE_BYTES
    again = Bench(bench.directory)
    found = again.cache.scan(10)
    assert sorted(found) == [(name(number), name(number - 1)) for number in (1, 2, 3)]
    assert again.read(3) == bytes([103]) * BLOCK_SIZE_BYTES
    assert (again.cache.num_bad_files, again.cache.read_bytes) == (0, BLOCK_SIZE_BYTES)


def test_a_deleted_block_is_gone(bench: Bench) -> None:
    bench.write(1)
    assert not bench.cache.do(DiskWork(reads=(), deletions=(name(1), name(9)), writes=())).failed
    assert list(bench.directory.iterdir()) == [] and bench.read(1) is None


@pytest.mark.parametrize("place", [0, 10, 30, 50, 70, HEADER_SIZE_BYTES, HEADER_SIZE_BYTES + BLOCK_SIZE_BYTES - 1])
def test_a_file_of_which_a_byte_is_wrong_is_never_used(bench: Bench, place: int) -> None:
    bench.write(1)
    content = bytearray(bench.path(1).read_bytes())
    content[place] ^= 1
    bench.path(1).write_bytes(content)
    assert bench.read(1) is None
    assert bench.cache.num_bad_files == 1 and not bench.path(1).exists()


@pytest.mark.parametrize(
    "size", [0, HEADER_SIZE_BYTES - 1, HEADER_SIZE_BYTES, HEADER_SIZE_BYTES + BLOCK_SIZE_BYTES - 1]
)
def test_a_file_that_ends_too_early_is_never_used(bench: Bench, size: int) -> None:
    bench.write(1)
    bench.path(1).write_bytes(bench.path(1).read_bytes()[:size])
    assert bench.read(1) is None and bench.cache.num_bad_files == 1
    bench.write(2)
    bench.path(2).write_bytes(bench.path(2).read_bytes()[:size])
    again = Bench(bench.directory)
    assert again.cache.scan(10) == () and again.cache.num_bad_files == 1
    assert list(bench.directory.iterdir()) == []


def test_files_of_another_model_or_name_or_of_nobody_are_removed(bench: Bench) -> None:
    bench.write(1)
    bench.write(2)
    bench.path(2).rename(bench.path(5))
    (bench.directory / "notes.txt").write_text("rubbish")
    (bench.directory / f"{name(3).hex()}.partial").write_bytes(b"half")
    assert bench.read(5) is None
    again = Bench(bench.directory)
    assert again.cache.scan(10) == ((name(1), name(0)),)
    assert again.cache.num_bad_files == 2
    other = Bench(bench.directory, "another model, layout")
    assert other.read(1) is None
    assert other.cache.scan(10) == ()


def test_no_more_files_are_taken_over_than_fit(bench: Bench) -> None:
    for number in range(1, 6):
        bench.write(number)
    found = Bench(bench.directory).cache.scan(2)
    assert len(found) == len(list(bench.directory.iterdir())) == 2


def test_a_directory_that_is_gone_costs_the_cache_and_nothing_else(bench: Bench) -> None:
    bench.write(1)
    bench.path(1).unlink()
    bench.directory.rmdir()
    assert bench.read(1) is None
    assert not bench.write(2)
