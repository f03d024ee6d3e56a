"""Which workers hold the KV of which blocks, as far as their events have told: what a prompt can hit, and where.

The map is a hint. It lags behind the workers by the interval of their events and may lack what exceeds its limit; the
worker's own answer to Reserve, and its own look at its pool, decide what is used.

Each hash maps to the set of its holders, a whole number with one bit for each worker. Walking down a prompt's chain of
hashes keeps the set of workers that hold everything so far, so a look-up costs O(blocks held), however many workers
there are, and never looks at one that holds nothing.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from dataclasses import dataclass, field
from typing import Final

from cluster.core.ids import Role, WorkerId
from cluster.core.limits import MAX_KNOWN_BLOCKS
from cluster.core.messages import BlockEvents

BLOCK_HASH_BYTES: Final = 16
"""Length of a block's hash, which is part of the wire contract."""


def pack_chain(block_hashes: Sequence[bytes], max_blocks: int) -> bytes:
    """A prompt's first `max_blocks` hashes in one piece, which takes a quarter of their memory.

    Hashes of another length than they have would match nothing, and do no other harm.
    """
    return b"".join(block_hashes[:max_blocks])


@dataclass(slots=True, kw_only=True)
class _Life:
    """One worker's life. `bit` stands for it in sets of holders; `hashes` are what it holds, `expected` what it is to
    compute besides."""

    slot: int
    bit: int
    role: Role
    hashes: dict[bytes, None] = field(default_factory=dict)
    expected: dict[bytes, None] = field(default_factory=dict)
    sequence_number: int | None = None
    is_stale: bool = False


class PrefixMap:
    """Follows the BlockEvents of every registered life.

    A gap in a life's numbers makes what is known of it stale until a snapshot begins it anew, which is asked for once.
    What was known stays in use meanwhile. Who is to read a prompt counts as a holder of its blocks at once, so that
    prompts with the same beginning that come together are read by one worker, which computes it once.
    """

    def __init__(self, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        """At most `max_blocks` are remembered, each counted once for every holder; further ones are passed over."""
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._holders: dict[bytes, int] = {}
        self._lives: dict[WorkerId, _Life] = {}
        self._slots: list[WorkerId | None] = []
        self._free_slots: list[int] = []
        self._role_bits = dict.fromkeys(Role, 0)
        self._last: tuple[bytes, HeldPrefixes] | None = None
        """The last chain looked up, until the map changes: a request that waits is looked up again at every event."""

    def join(self, worker: WorkerId, role: Role) -> None:
        """That life is registered; nothing is known of it yet."""
        assert worker not in self._lives
        self._last = None
        if not self._free_slots:
            self._free_slots.append(len(self._slots))
            self._slots.append(None)
        slot = self._free_slots.pop()
        self._slots[slot] = worker
        life = _Life(slot=slot, bit=1 << slot, role=role)
        self._lives[worker] = life
        self._role_bits[role] |= life.bit

    def leave(self, worker: WorkerId) -> None:
        """That life is over. Costs O(blocks it held)."""
        life = self._lives.pop(worker)
        self._last = None
        self._clear(life)
        self._drop(life, life.expected, tuple(life.expected))
        self._slots[life.slot] = None
        self._free_slots.append(life.slot)
        self._role_bits[life.role] &= ~life.bit

    def hear(self, worker: WorkerId, events: BlockEvents) -> bool:
        """Takes a registered life's events in. True if a snapshot is to be asked for."""
        life = self._lives[worker]
        self._last = None
        expected = None if life.sequence_number is None else life.sequence_number + 1
        life.sequence_number = events.sequence_number
        if events.is_snapshot:
            self._clear(life)
            life.is_stale = False
        elif life.is_stale:
            return False
        elif events.sequence_number != expected:
            life.is_stale = True
            return True
        self._drop(life, life.hashes, events.evicted)
        for run in events.stored:
            self._store(life, run.hashes)
        return False

    def expect(self, worker: WorkerId, chain: bytes) -> tuple[bytes, ...]:
        """A registered life is to read that prompt. Returns the hashes that this is the first word of."""
        life = self._lives[worker]
        self._last = None
        hashes = [chain[start : start + BLOCK_HASH_BYTES] for start in range(0, len(chain), BLOCK_HASH_BYTES)]
        news = tuple(h for h in hashes if h not in life.hashes and h not in life.expected)
        self._add(life, life.expected, news)
        return news

    def expect_no_more(self, worker: WorkerId, hashes: tuple[bytes, ...]) -> None:
        """What `expect` returned: of these, what the registered life has not told of by now it may never compute."""
        life = self._lives[worker]
        self._last = None
        self._drop(life, life.expected, hashes)

    def expected_of(self, worker: WorkerId) -> KeysView[bytes]:
        """What a registered life is to compute and has not told of."""
        return self._lives[worker].expected.keys()

    def lives(self) -> list[WorkerId]:
        """The registered lives, in order."""
        return sorted(self._lives)

    def num_blocks_of(self, worker: WorkerId) -> int:
        """Blocks that a registered life is known to hold."""
        return len(self._lives[worker].hashes)

    def look_up(self, chain: bytes) -> HeldPrefixes:
        """Who holds how much of a prompt, given the packed hashes of its blocks. Costs O(longest prefix held)."""
        if self._last is None or self._last[0] != chain:
            self._last = chain, HeldPrefixes(self, self._walk(chain))
        return self._last[1]

    def bit_of(self, worker: WorkerId) -> int:
        """What stands for a registered life in a set of holders."""
        return self._lives[worker].bit

    def holders_in(self, role: Role, bits: int, limit: int) -> list[WorkerId]:
        """Workers of that role in a set of holders, at most `limit`, in the order of their slots."""
        bits &= self._role_bits[role]
        found: list[WorkerId] = []
        while bits and len(found) < limit:
            lowest = bits & -bits
            worker = self._slots[lowest.bit_length() - 1]
            assert worker is not None
            found.append(worker)
            bits ^= lowest
        return found

    def check_invariants(self) -> None:
        holders: dict[bytes, int] = {}
        for worker, life in self._lives.items():
            assert self._slots[life.slot] == worker and life.bit == 1 << life.slot
            assert not life.hashes.keys() & life.expected.keys()
            for block_hash in (*life.hashes, *life.expected):
                holders[block_hash] = holders.get(block_hash, 0) | life.bit
        assert holders == self._holders, "holders and lives disagree"
        num_blocks = sum(len(life.hashes) + len(life.expected) for life in self._lives.values())
        assert self._num_blocks == num_blocks <= self._max_blocks
        assert sorted(self._free_slots) == [slot for slot, worker in enumerate(self._slots) if worker is None]
        assert len(self._lives) + len(self._free_slots) == len(self._slots)
        for role, bits in self._role_bits.items():
            assert bits == sum(life.bit for life in self._lives.values() if life.role is role)

    def _walk(self, chain: bytes) -> tuple[tuple[int, int], ...]:
        """Number of blocks, and the set of the workers that hold just so many; longest first."""
        groups: list[tuple[int, int]] = []
        holders, num_blocks = 0, 0
        holders_of = self._holders.get
        for start in range(0, len(chain), BLOCK_HASH_BYTES):
            of_block = holders_of(chain[start : start + BLOCK_HASH_BYTES], 0)
            staying = of_block & holders if start else of_block
            if staying != holders:
                if num_blocks:
                    groups.append((num_blocks, holders & ~staying))
                holders = staying
            if not holders:
                break
            num_blocks += 1
        if holders:
            groups.append((num_blocks, holders))
        groups.reverse()
        return tuple(groups)

    def _store(self, life: _Life, hashes: tuple[bytes, ...]) -> None:
        if life.expected:
            for block_hash in hashes:
                if block_hash in life.expected:
                    del life.expected[block_hash]
                    life.hashes[block_hash] = None
        self._add(life, life.hashes, hashes)

    def _add(self, life: _Life, held: dict[bytes, None], hashes: tuple[bytes, ...]) -> None:
        """The life becomes a holder of these, where it is none. `held`: which of its tables they are kept in."""
        holders, bit = self._holders, life.bit
        num_left = num_room = self._max_blocks - self._num_blocks
        for block_hash in hashes:
            if block_hash in held:
                continue
            if not num_left:
                break
            num_left -= 1
            held[block_hash] = None
            others = holders.get(block_hash)
            # A sole holder's set is one object for all its blocks: most blocks have one holder.
            holders[block_hash] = bit if others is None else others | bit
        self._num_blocks += num_room - num_left

    def _clear(self, life: _Life) -> None:
        self._drop(life, life.hashes, tuple(life.hashes))

    def _drop(self, life: _Life, held: dict[bytes, None], hashes: tuple[bytes, ...]) -> None:
        """The life is no holder of these any more, as far as they are in `held`, one of its tables."""
        holders, bit = self._holders, life.bit
        num_before = len(held)
        for block_hash in hashes:
            if block_hash in held:
                del held[block_hash]
                others = holders[block_hash] ^ bit
                if others:
                    holders[block_hash] = others
                else:
                    del holders[block_hash]
        self._num_blocks -= num_before - len(held)


class HeldPrefixes:
    """How much of one prompt each worker holds; valid until the map changes."""

    __slots__ = ("_groups", "_map")

    def __init__(self, prefix_map: PrefixMap, groups: tuple[tuple[int, int], ...]) -> None:
        """`groups`: number of blocks, and the set of the workers that hold just so many; longest first."""
        self._map = prefix_map
        self._groups = groups

    def num_blocks_of(self, worker: WorkerId) -> int:
        """Blocks of the prompt that a registered life holds."""
        bit = self._map.bit_of(worker)
        for num_blocks, bits in self._groups:
            if bits & bit:
                return num_blocks
        return 0

    def longest(self, role: Role, limit: int) -> dict[WorkerId, int]:
        """Blocks held, of at most `limit` workers of that role: those that hold most, longest first."""
        found: dict[WorkerId, int] = {}
        for num_blocks, bits in self._groups:
            found.update(dict.fromkeys(self._map.holders_in(role, bits, limit - len(found)), num_blocks))
            if len(found) == limit:
                break
        return found
