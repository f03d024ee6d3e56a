"""The tiers below the pool as one: host memory, and files below that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.disk_tier import DiskBlock, DiskResult, DiskTier, DiskWork
from engine.core.tiers import BlockCopy, BlockName, HostTier

HELD_SHARE = 4
"""At most one slot in so many is held for writing, and one for reading: spills find room meanwhile."""


class LowerTiers:
    """See HostTier and DiskTier. Methods that may lose content return its names; some of it may still be found in the
    other tier, or in the pool."""

    __slots__ = ("_disk", "_host")

    def __init__(
        self, num_host_blocks: int = 0, num_disk_blocks: int = 0, on_disk: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Raises ValueError for a negative size, or files without a host tier."""
        if num_disk_blocks and num_host_blocks < HELD_SHARE:
            raise ValueError(f"num_disk_blocks needs at least {HELD_SHARE} num_host_blocks, got {num_host_blocks}")
        self._host = HostTier(num_host_blocks)
        self._disk = DiskTier(num_disk_blocks, on_disk)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._host or block_hash in self._disk

    @property
    def num_host_blocks(self) -> int:
        return len(self._host)

    @property
    def num_disk_blocks(self) -> int:
        return len(self._disk)

    def names(self) -> dict[bytes, bytes]:
        """Hash and parent's hash of all content."""
        return dict((*self._disk.names(), *self._host.names()))

    def num_loadable(self, hashes: Sequence[bytes]) -> int:
        """How many of the first of these can be loaded now: those in host memory."""
        return self._host.num_loadable(hashes)

    def spill(self, block_id: int, block_hash: bytes, parent_hash: bytes) -> tuple[BlockName, ...]:
        dropped = self._host.spill(block_id, block_hash, parent_hash)
        return () if dropped is None else (dropped,)

    def forget(self, block_hash: bytes) -> list[BlockName]:
        """That content is not trusted; what is being copied just now stays."""
        names = (self._host.forget(block_hash), self._disk.forget(block_hash))
        return [name for name in names if name is not None]

    def pin(self, hashes: Sequence[bytes]) -> None:
        self._host.pin(hashes)

    def load(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        self._host.load(block_ids, hashes)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies = self._host.take_copies()
        self._write_landed()
        return copies

    def start_step(self) -> tuple[BlockCopy, ...]:
        return self._host.start_step()

    def end_step(self, *, is_failed: bool) -> tuple[BlockName, ...]:
        forgotten = self._host.end_step(is_failed=is_failed)
        self._write_landed()
        return forgotten

    def read_ahead(self, hashes: Sequence[bytes]) -> tuple[tuple[bytes, ...], tuple[BlockName, ...]]:
        """Begins to read what files have of the first of these.

        Returns the hashes being read, and the names of what had to go for them.
        """
        reading: list[bytes] = []
        dropped: list[BlockName] = []
        self._host.touch(hashes)
        for block_hash in hashes:
            if block_hash in self._host:
                continue
            if not self._disk.is_reading(block_hash):
                if block_hash not in self._disk or not self._disk.can_read():
                    break
                if self._host.num_held >= 2 * (self._host.num_slots // HELD_SHARE):
                    break
                slot, gone = self._host.take_slot()
                if gone is not None:
                    dropped.append(gone)
                if slot is None:
                    break
                self._disk.read(block_hash, slot)
            reading.append(block_hash)
        return tuple(reading), tuple(dropped)

    def is_reading(self, block_hash: bytes) -> bool:
        return self._disk.is_reading(block_hash)

    def take_disk_work(self) -> DiskWork | None:
        """To be done after the copies that were taken before."""
        return self._disk.take_work()

    def disk_done(self, result: DiskResult) -> tuple[BlockName, ...]:
        for block in result.work.reads:
            is_read = block.block_hash not in result.failed
            self._host.fill_slot(block.slot, block.block_hash if is_read else None, block.parent_hash)
        for block in result.work.writes:
            self._host.let_go(block.slot)
        return self._disk.done(result)

    def _write_landed(self) -> None:
        """What was spilled lies in its slot now: it is written to a file too, from there."""
        for block_hash, parent_hash, slot in self._host.take_landed():
            if self._disk.takes(block_hash, self._host.num_slots // HELD_SHARE):
                self._host.hold(slot)
                self._disk.write(DiskBlock(block_hash=block_hash, parent_hash=parent_hash, slot=slot))

    def check_invariants(self) -> None:
        self._host.check_invariants()
        self._disk.check_invariants()
