"""Pool memory that a peer process can map: an anonymous memory file, so that a crash leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from kv_transfer.transport.base import TransportError

MADV_DONTFORK = 10
MADV_POPULATE_WRITE = 23
"""Linux 5.14. Faults every page in at once: cold pages would cut a copy to a tenth of its speed."""

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4

HEADROOM_BYTES = 64 << 20
"""Left free by create_pool: the process needs some itself."""


class PoolMemoryError(TransportError):
    """The machine cannot hold the pool, or what a peer sent is not one."""


class PoolMemory:
    """A worker's KV pool: `mapping` is the memory, `fd` what peers are given. Not inherited by forked children."""

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self.mapping = mapping
        self.size_bytes = len(mapping)

    @property
    def buffer(self) -> memoryview:
        """For numpy and torch (`frombuffer`). Whoever holds a view must drop it before close."""
        return memoryview(self.mapping)

    def close(self) -> None:
        """Gives the memory back. Idempotent. Raises: BufferError while a view of it is held."""
        self.mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_pool(size_bytes: int) -> PoolMemory:
    """Makes a pool of zeros, with every page present.

    Raises: ValueError for a size below 1, PoolMemoryError if the machine (or the control group) cannot hold it.
    """
    if size_bytes < 1:
        raise ValueError(f"size_bytes: must be at least 1, is {size_bytes}")
    available_bytes = available_memory_bytes()
    if size_bytes + HEADROOM_BYTES > available_bytes:
        raise PoolMemoryError(
            f"a KV pool of {size_bytes >> 20} MiB does not fit: {available_bytes >> 20} MiB of memory are available, "
            f"of which {HEADROOM_BYTES >> 20} MiB are kept free"
        )
    fd = os.memfd_create("baton-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        # A peer that shortened the file would kill everybody who touches it.
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
        return PoolMemory(fd, _map(fd, size_bytes))
    except OSError as error:
        os.close(fd)
        raise PoolMemoryError(f"cannot make a KV pool of {size_bytes >> 20} MiB: {error}") from error


def map_pool(fd: int, size_bytes: int) -> mmap.mmap:
    """Maps a peer's pool. Raises: PoolMemoryError if `fd` is not a pool of that size."""
    try:
        if os.fstat(fd).st_size != size_bytes or size_bytes < 1:
            raise PoolMemoryError(f"the peer's pool has {os.fstat(fd).st_size} bytes, not the {size_bytes} it said")
        if not fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK:
            raise PoolMemoryError("the peer's pool could shrink under its mapping")
        return _map(fd, size_bytes)
    except OSError as error:
        raise PoolMemoryError(f"cannot map the peer's pool: {error}") from error


def available_memory_bytes() -> int:
    """What a new allocation may take without swapping: the machine's, or the control group's if that is less."""
    available = [_machine_available_bytes()]
    available += _cgroup_available_bytes()
    return min(available)


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size_bytes)
    # Attention reads the pool in pieces far apart. Where huge pages of shared memory are off, the advice is refused.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(MADV_DONTFORK)  # else a child of ours could write on after we are fenced
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel faults pages in one by one
            mapping.close()
            raise
    return mapping


def _machine_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PoolMemoryError("/proc/meminfo does not tell MemAvailable")


def _cgroup_available_bytes() -> Iterator[int]:
    """Limit minus use, plus cached files that can go, of our control group, where one is set (v1 or v2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        root, limit_name, usage_name, cached_name = files
        # Within a container the group is mounted at the root, whatever path the host knows it by.
        for folder in (Path(root + path), Path(root)):
            limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
            if limit is not None and usage is not None:
                yield limit - usage + _read_stat(folder / "memory.stat", cached_name)
                break


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
