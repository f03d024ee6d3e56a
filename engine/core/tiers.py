"""The tier below the pool: blocks that were evicted from it, by content, in slots of a store in host memory.

Only bookkeeping: which content lies in which slot, and which copies have to be made. A block evicted from the pool is
spilled, a hit is loaded into a block of the pool that was allocated for it. What was loaded stays in the store as well,
so that evicting it again costs no copy. The least recently evicted or loaded content makes room.

Copies are made by whoever owns the bytes, in the order in which they were asked for. Some go with a step, which may
make them at any time until it ends; the others are made before anything else is done. So that the two cannot get into
each other's way, a slot that a step's copies use is not given away until the step is over, and what a step is to spill
cannot be loaded before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BlockName = tuple[bytes, bytes]
"""A block's hash, and its parent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """One block's bytes, from `block_id` of the pool to `slot` of the store, or the other way if `is_load`."""

    block_id: int
    slot: int
    is_load: bool


@dataclass(slots=True, kw_only=True)
class _Entry:
    slot: int
    parent_hash: bytes


class HostTier:
    """Content by block hash in slots 0 .. num_slots - 1; with no slots, nothing is ever kept.

    Costs are O(1) a block, and O(slots in a step's hands) where one has to make room.
    """

    __slots__ = (
        "_copies",
        "_entries",
        "_free",
        "_held",
        "_landed",
        "_pinned",
        "_spills",
        "_step_slots",
        "_step_spills",
        "num_slots",
    )

    def __init__(self, num_slots: int = 0) -> None:
        """Raises ValueError if `num_slots` is negative."""
        if num_slots < 0:
            raise ValueError(f"num_slots must not be negative, got {num_slots}")
        self.num_slots = num_slots
        self._entries: dict[bytes, _Entry] = {}  # by hash, the least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._copies: list[BlockCopy] = []
        self._spills: dict[bytes, int] = {}  # hash -> slot, of the spills among `_copies`
        self._pinned: dict[int, None] = {}  # slots that are about to be loaded from
        self._held: dict[int, None] = {}  # slots that files are read into or written from
        self._landed: dict[bytes, None] = {}  # spilled, and copied, since `take_landed`
        self._step_slots: dict[int, None] = {}
        self._step_spills: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def names(self) -> Iterable[tuple[bytes, bytes]]:
        """(hash, parent's hash) of all that is kept."""
        return ((block_hash, entry.parent_hash) for block_hash, entry in self._entries.items())

    def num_loadable(self, hashes: Sequence[bytes]) -> int:
        """How many of the first of these can be loaded now."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._entries or block_hash in self._step_spills:
                return index
        return len(hashes)

    def spill(self, block_id: int, block_hash: bytes, parent_hash: bytes) -> BlockName | None:
        """The pool has given that block away: its content is kept, if there is room or room can be made.

        Returns the name of what had to go for it. Afterwards `block_hash in self` says whether it is kept.
        """
        entry = self._entries.pop(block_hash, None)
        if entry is not None:
            self._entries[block_hash] = entry  # the newest now; its bytes are there
            return None
        dropped = None
        if not self._free:
            dropped = self._make_room()
            if dropped is None:
                return None
        entry = _Entry(slot=self._free.pop(), parent_hash=parent_hash)
        self._entries[block_hash] = entry
        self._spills[block_hash] = entry.slot
        self._copies.append(BlockCopy(block_id=block_id, slot=entry.slot, is_load=False))
        return dropped

    def forget(self, block_hash: bytes) -> BlockName | None:
        """That content is not trusted. Stays if it is being copied just now. Returns its name if it went."""
        entry = self._entries.get(block_hash)
        if entry is None or block_hash in self._spills or self._is_busy(entry.slot):
            return None
        del self._entries[block_hash]
        self._landed.pop(block_hash, None)
        self._free.append(entry.slot)
        return block_hash, entry.parent_hash

    def pin(self, hashes: Sequence[bytes]) -> None:
        """These, which can be loaded, will be: nothing makes room at their cost until `load`."""
        for block_hash in hashes:
            self._pinned[self._entries[block_hash].slot] = None

    def load(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """The pinned content goes into these blocks of the pool, one each."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            slot = self._entries[block_hash].slot
            self._copies.append(BlockCopy(block_id=block_id, slot=slot, is_load=True))
            del self._pinned[slot]
        for block_hash in reversed(hashes):  # a sequence's tail counts as used longer ago than its head
            self._entries[block_hash] = self._entries.pop(block_hash)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """What is to be copied before anything else is done, in this order."""
        self._landed.update(dict.fromkeys(self._spills))
        return self._drain()

    def _drain(self) -> tuple[BlockCopy, ...]:
        copies, self._copies, self._spills = tuple(self._copies), [], {}
        return copies

    def start_step(self) -> tuple[BlockCopy, ...]:
        """As `take_copies`, but the copies may be made at any time until `end_step`, in this order."""
        assert not self._step_slots, "the last step is not over"
        self._step_spills = self._spills
        copies = self._drain()
        self._step_slots = {copy.slot: None for copy in copies}
        return copies

    def end_step(self, *, is_failed: bool) -> tuple[BlockName, ...]:
        """The step is over. If it failed, it may not have made its copies: what it was to spill is forgotten.

        Returns the names of what is forgotten.
        """
        forgotten: list[BlockName] = []
        for block_hash in self._step_spills if is_failed else ():
            entry = self._entries.pop(block_hash)
            self._free.append(entry.slot)
            forgotten.append((block_hash, entry.parent_hash))
        if not is_failed:
            self._landed.update(dict.fromkeys(self._step_spills))
        self._step_slots = {}
        self._step_spills = {}
        return tuple(forgotten)

    # ---- for the tier below ----

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take_landed(self) -> list[tuple[bytes, bytes, int]]:
        """Hash, parent's hash and slot of what has been spilled since the last call, and is still here."""
        landed, self._landed = self._landed, {}
        entries = ((block_hash, self._entries.get(block_hash)) for block_hash in landed)
        return [(block_hash, entry.parent_hash, entry.slot) for block_hash, entry in entries if entry is not None]

    def touch(self, hashes: Sequence[bytes]) -> None:
        """A prompt is to come for these: as far as they are here, they count as used just now."""
        for block_hash in reversed(hashes):
            entry = self._entries.pop(block_hash, None)
            if entry is not None:
                self._entries[block_hash] = entry

    def hold(self, slot: int) -> None:
        """That slot's content stays until `let_go`."""
        assert slot not in self._held
        self._held[slot] = None

    def let_go(self, slot: int) -> None:
        del self._held[slot]

    def take_slot(self) -> tuple[int | None, BlockName | None]:
        """A slot without content, held until `fill_slot`, and the name of what had to go for it; each None if there is
        none."""
        dropped = None if self._free else self._make_room()
        if not self._free:
            return None, None
        slot = self._free.pop()
        self.hold(slot)
        return slot, dropped

    def fill_slot(self, slot: int, block_hash: bytes | None, parent_hash: bytes) -> None:
        """That content lies in the slot now; None: there was none after all."""
        self.let_go(slot)
        if block_hash is None or block_hash in self._entries:
            self._free.append(slot)
        else:
            self._entries[block_hash] = _Entry(slot=slot, parent_hash=parent_hash)

    def _make_room(self) -> BlockName | None:
        """Frees the slot of the least recently used content that may go, and returns its name; None if none may."""
        for block_hash, entry in self._entries.items():
            if not self._is_busy(entry.slot):
                del self._entries[block_hash]
                self._spills.pop(block_hash, None)
                self._free.append(entry.slot)
                return block_hash, entry.parent_hash
        return None

    def _is_busy(self, slot: int) -> bool:
        return slot in self._step_slots or slot in self._pinned or slot in self._held

    def check_invariants(self) -> None:
        slots = [entry.slot for entry in self._entries.values()]
        assert not set(self._held) & set(self._free), "a held slot is free"
        reading = sorted(set(self._held) - set(slots))
        assert sorted(slots + self._free + reading) == list(range(self.num_slots)), "slots are lost or used twice"
        assert not self._pinned, "content was pinned and not loaded"
        for block_hash, slot in self._step_spills.items():
            assert self._entries[block_hash].slot == slot and slot in self._step_slots, "a spill under way was given up"
        assert not set(self._step_slots) & set(self._free), "a slot that a step uses is free"
