"""The disk tier's bytes: one file a block, in a directory that belongs to one worker alone.

    file    header, then the block's bytes as they lie in the pool
    header  magic (8), layout (16), block hash (16), parent's hash (16), BLAKE2b-128 of the block's bytes (16)

`layout` stands for the model's fingerprint and for how a block's bytes are arranged: files of another one, of another
size, or whose sum does not hold are removed and counted. A file gets its name when it is whole; what a crash of the
machine leaves of it is found by the sum.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from engine.core.disk_tier import DiskBlock, DiskResult, DiskWork

logger = logging.getLogger(__name__)

MAGIC = b"BATONKV1"
DIGEST_SIZE_BYTES = 16
HEADER_SIZE_BYTES = len(MAGIC) + 4 * DIGEST_SIZE_BYTES
SUFFIX = ".kv"
PARTIAL_SUFFIX = ".partial"
MAX_REPORTED_ERRORS = 10
"""Failures that are written to the log; all are counted."""

SlotBytes = Callable[[int], memoryview]
"""The bytes of a slot of the host tier."""


class DiskCache:
    """Reads and writes what a DiskWork asks for; on one thread at a time, beside everything else.

    `num_bad_files` counts files that were removed because they could not be used, `written_bytes` and `read_bytes` what
    was moved.
    """

    def __init__(self, directory: Path, layout: str, slot_bytes: SlotBytes, block_size_bytes: int) -> None:
        """Makes the directory. Raises OSError if that cannot be done."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._layout = hashlib.blake2b(layout.encode(), digest_size=DIGEST_SIZE_BYTES).digest()
        self._slot_bytes = slot_bytes
        self._block_size_bytes = block_size_bytes
        self._num_errors = 0
        self.num_bad_files = 0
        self.written_bytes = 0
        self.read_bytes = 0

    def scan(self, max_blocks: int) -> tuple[tuple[bytes, bytes], ...]:
        """(hash, parent's hash) of the files that an earlier life left, the oldest first; others, and the oldest beyond
        `max_blocks`, are removed."""
        found: list[tuple[int, bytes, bytes]] = []
        for path in sorted(self._directory.iterdir()):
            header = self._header_of(path)
            if header is None:
                self._remove_bad(path)
            else:
                found.append((path.stat().st_mtime_ns, *header))
        found.sort()
        for _, block_hash, _ in found[: max(0, len(found) - max_blocks)]:
            self._path(block_hash).unlink(missing_ok=True)
        return tuple((block_hash, parent_hash) for _, block_hash, parent_hash in found[-max_blocks:])

    def do(self, work: DiskWork) -> DiskResult:
        """All of it; what fails is named in the result and, up to a limit, in the log."""
        failed = [block.block_hash for block in work.reads if not self._try(self._read, block)]
        for block_hash in work.deletions:
            self._path(block_hash).unlink(missing_ok=True)
        failed += [block.block_hash for block in work.writes if not self._try(self._write, block)]
        return DiskResult(work=work, failed=frozenset(failed))

    def _try(self, action: Callable[[DiskBlock], bool], block: DiskBlock) -> bool:
        try:
            return action(block)
        except OSError as error:
            self._num_errors += 1
            if self._num_errors <= MAX_REPORTED_ERRORS:
                logger.warning("prefix cache: %s: %s", self._directory, error)
            return False

    def _read(self, block: DiskBlock) -> bool:
        path, target = self._path(block.block_hash), self._slot_bytes(block.slot)
        with path.open("rb", buffering=0) as file:
            header = file.read(HEADER_SIZE_BYTES)
            size_bytes = file.readinto(target)
        expected = self._header(block, _digest(target))
        if size_bytes != len(target) or header != expected:
            self._remove_bad(path)
            return False
        self.read_bytes += size_bytes
        return True

    def _write(self, block: DiskBlock) -> bool:
        path, source = self._path(block.block_hash), self._slot_bytes(block.slot)
        partial = path.with_suffix(PARTIAL_SUFFIX)
        with partial.open("wb") as file:
            file.write(self._header(block, _digest(source)))
            file.write(source)
        os.replace(partial, path)
        self.written_bytes += len(source)
        return True

    def _header(self, block: DiskBlock, digest: bytes) -> bytes:
        return MAGIC + self._layout + block.block_hash + block.parent_hash + digest

    def _header_of(self, path: Path) -> tuple[bytes, bytes] | None:
        """The hash and the parent's of a file that may be used, as far as can be told without its content."""
        if not path.is_file() or path.stat().st_size != HEADER_SIZE_BYTES + self._block_size_bytes:
            return None
        with path.open("rb", buffering=0) as file:
            header = file.read(HEADER_SIZE_BYTES)
        start = len(MAGIC) + DIGEST_SIZE_BYTES
        block_hash = header[start : start + DIGEST_SIZE_BYTES]
        if header[:start] != MAGIC + self._layout or path != self._path(block_hash):
            return None
        return block_hash, header[start + DIGEST_SIZE_BYTES : start + 2 * DIGEST_SIZE_BYTES]

    def _remove_bad(self, path: Path) -> None:
        self.num_bad_files += 1
        if path.is_file():
            path.unlink()

    def _path(self, block_hash: bytes) -> Path:
        return self._directory / f"{block_hash.hex()}{SUFFIX}"


def _digest(content: memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_SIZE_BYTES).digest()
