"""Which workers hold the KV of which blocks, as far as their events have told: what a prompt can hit, and where.

The map is a hint. It lags behind the workers by the interval of their events and may lack what exceeds its limit; the
worker's own answer to Reserve, and its own look at its pool, decide what is used.

A block's hash covers all blocks before it, so hashes form a forest, and mostly long chains without a branch. The map
keeps these in *runs*, as a radix tree does: consecutive hashes, packed, that the same workers hold, with the set of
these, a whole number with one bit for each holder. A run is cut where its holders begin to differ. Whatever is told,
looked up or evicted costs O(runs) therefore, not O(blocks), and a comparison of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cluster.core.ids import Role, WorkerId
from cluster.core.limits import MAX_KNOWN_BLOCKS
from cluster.core.messages import BLOCK_HASH_BYTES, BlockEvents

HASH: Final = BLOCK_HASH_BYTES


@dataclass(slots=True, eq=False)
class _Run:
    """Packed hashes of blocks that follow each other, at least one; `holders` have all of them."""

    hashes: bytes
    holders: int


@dataclass(slots=True, kw_only=True)
class _Holder:
    """Who holds blocks: a worker's life, or in its name a prompt that it is to read. `bit` stands for it in sets of
    holders. No block is in two of its runs; `runs` has them by their last hash."""

    worker: WorkerId
    role: Role
    slot: int
    bit: int
    runs: dict[bytes, _Run] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Life:
    """One worker's life. `expected` are the prompts that it is to read, by slot; `bits` are those of all holders."""

    told: _Holder
    bits: int
    expected: dict[int, _Holder] = field(default_factory=dict)
    sequence_number: int | None = None
    is_stale: bool = False


class PrefixMap:
    """Follows the BlockEvents of every registered life.

    A gap in a life's numbers makes what is known of it stale until a snapshot begins it anew, which is asked for once.
    What was known stays in use meanwhile. Who is to read a prompt counts as a holder of its blocks at once, so that
    prompts with the same beginning that come together are read by one worker, which computes it once.
    """

    def __init__(self, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        """At most `max_blocks` are remembered, however many hold them; further ones are passed over."""
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._runs: dict[bytes, _Run] = {}
        """By their first hash. A block is in two runs only while some of its holders lack the block before it."""
        self._lives: dict[WorkerId, _Life] = {}
        self._slots: list[_Holder | None] = []
        self._free_slots: list[int] = []
        self._role_bits = dict.fromkeys(Role, 0)

    def join(self, worker: WorkerId, role: Role) -> None:
        """That life is registered; nothing is known of it yet."""
        assert worker not in self._lives
        told = self._add_holder(worker, role)
        self._lives[worker] = _Life(told=told, bits=told.bit)

    def leave(self, worker: WorkerId) -> None:
        """That life is over. Costs O(runs it held)."""
        life = self._lives.pop(worker)
        for holder in (life.told, *life.expected.values()):
            self._remove_holder(holder)

    def hear(self, worker: WorkerId, events: BlockEvents) -> bool:
        """Takes a registered life's events in. True if a snapshot is to be asked for."""
        life = self._lives[worker]
        expected = None if life.sequence_number is None else life.sequence_number + 1
        life.sequence_number = events.sequence_number
        if events.is_snapshot:
            self._clear(life.told)
            life.is_stale = False
        elif life.is_stale:
            return False
        elif events.sequence_number != expected:
            life.is_stale = True
            return True
        for hashes in events.evicted:
            self._evict(life.told, hashes)
        for run in events.stored:
            self._store(life.told, run.hashes)
        return False

    def expect(self, worker: WorkerId, chain: bytes) -> int:
        """A registered life is to read that prompt. Returns what stands for this in `expect_no_more`."""
        life = self._lives[worker]
        holder = self._add_holder(worker, life.told.role)
        life.expected[holder.slot] = holder
        life.bits |= holder.bit
        self._store(holder, chain)
        return holder.slot

    def expect_no_more(self, worker: WorkerId, expectation: int) -> None:
        """The registered life has read that prompt and told of it, or never may."""
        life = self._lives[worker]
        holder = life.expected.pop(expectation)
        life.bits ^= holder.bit
        self._remove_holder(holder)

    def expectations_of(self, worker: WorkerId) -> list[int]:
        """What `expect` has returned for a registered life, as far as it is still expected."""
        return list(self._lives[worker].expected)

    def lives(self) -> list[WorkerId]:
        """The registered lives, in order."""
        return sorted(self._lives)

    def num_blocks_of(self, worker: WorkerId) -> int:
        """Blocks that a registered life has told that it holds. Costs O(their runs)."""
        return sum(len(run.hashes) for run in self._lives[worker].told.runs.values()) // HASH

    def look_up(self, chain: bytes) -> HeldPrefixes:
        """Who holds how much of a prompt, given the packed hashes of its blocks. Costs O(runs of the longest held)."""
        return HeldPrefixes(self, self._walk(chain))

    def bits_of(self, worker: WorkerId) -> int:
        """What stands for a registered life in a set of holders."""
        return self._lives[worker].bits

    def told_bit_of(self, worker: WorkerId) -> int:
        """The same, less what it is only expected to hold."""
        return self._lives[worker].told.bit

    def holders_in(self, role: Role, bits: int) -> Iterator[WorkerId]:
        """Workers of that role in a set of holders, in the order of their slots; one may come twice."""
        return (holder.worker for holder in self._holders_of(bits & self._role_bits[role]))

    def check_invariants(self) -> None:
        held: dict[int, int] = {}
        holders = [holder for life in self._lives.values() for holder in (life.told, *life.expected.values())]
        for holder in holders:
            assert self._slots[holder.slot] is holder and holder.bit == 1 << holder.slot
            hashes = [
                run.hashes[at : at + HASH] for run in holder.runs.values() for at in range(0, len(run.hashes), HASH)
            ]
            assert len(hashes) == len(set(hashes)), "a block is held twice"
            for last, run in holder.runs.items():
                assert run.hashes[-HASH:] == last
                held[id(run)] = held.get(id(run), 0) | holder.bit
        for first, run in self._runs.items():
            assert run.hashes[:HASH] == first and len(run.hashes) % HASH == 0
            assert run.holders and held.pop(id(run)) == run.holders, "runs and holders disagree"
        assert not held, "a run that cannot be found"
        num_blocks = sum(len(run.hashes) for run in self._runs.values()) // HASH
        assert self._num_blocks == num_blocks <= self._max_blocks
        assert sorted(self._free_slots) == [slot for slot, holder in enumerate(self._slots) if holder is None]
        assert len(holders) + len(self._free_slots) == len(self._slots)
        for life in self._lives.values():
            assert life.bits == life.told.bit | sum(holder.bit for holder in life.expected.values())
        for role, bits in self._role_bits.items():
            assert bits == sum(holder.bit for holder in holders if holder.role is role)

    # ---- holders ----

    def _add_holder(self, worker: WorkerId, role: Role) -> _Holder:
        if not self._free_slots:
            self._free_slots.append(len(self._slots))
            self._slots.append(None)
        slot = self._free_slots.pop()
        holder = self._slots[slot] = _Holder(worker=worker, role=role, slot=slot, bit=1 << slot)
        self._role_bits[role] |= holder.bit
        return holder

    def _remove_holder(self, holder: _Holder) -> None:
        self._clear(holder)
        self._slots[holder.slot] = None
        self._free_slots.append(holder.slot)
        self._role_bits[holder.role] ^= holder.bit

    def _clear(self, holder: _Holder) -> None:
        for run in holder.runs.values():
            self._let_go(holder, run)
        holder.runs.clear()

    def _holders_of(self, bits: int) -> Iterator[_Holder]:
        while bits:
            lowest = bits & -bits
            holder = self._slots[lowest.bit_length() - 1]
            assert holder is not None
            yield holder
            bits ^= lowest

    # ---- runs ----

    def _walk(self, chain: bytes) -> list[tuple[int, int]]:
        """Number of blocks, and the set of holders that hold just so many; longest first."""
        groups: list[tuple[int, int]] = []
        holders, at = -1, 0  # all, so far
        while at < len(chain):
            run = self._runs.get(chain[at : at + HASH])
            staying = 0 if run is None else run.holders & holders
            if staying != holders:
                if at:
                    groups.append((at // HASH, holders & ~staying))
                holders = staying
            if run is None or not holders:
                break
            size = _common_size(run.hashes, chain, at)
            at += size
            if size < len(run.hashes):
                break
        if at and holders:
            groups.append((at // HASH, holders))
        groups.reverse()
        return groups

    def _store(self, holder: _Holder, hashes: bytes) -> None:
        """The holder has these blocks now, which follow each other, and of which it had none."""
        at, end = 0, len(hashes) - len(hashes) % HASH
        while at < end:
            run = self._runs.get(hashes[at : at + HASH])
            if run is None:
                room = min(end - at, (self._max_blocks - self._num_blocks) * HASH)
                if not room:
                    return
                run = self._make_run(hashes[at : at + room], 0)
            else:
                size = _common_size(run.hashes, hashes, at)
                if size < len(run.hashes):
                    self._cut(run, size)
            run.holders |= holder.bit
            holder.runs[run.hashes[-HASH:]] = run
            at += len(run.hashes)

    def _evict(self, holder: _Holder, hashes: bytes) -> None:
        """The holder has none of these blocks any more, which follow each other; from the last one to the first."""
        hashes = hashes[len(hashes) % HASH :]
        while hashes:
            run = self._run_up_to(holder, hashes[-HASH:])
            if run is None:
                hashes = self._known_part(holder, hashes)
                continue
            if len(run.hashes) > len(hashes):
                self._cut(run, len(run.hashes) - len(hashes))
                run = holder.runs[hashes[-HASH:]]
            del holder.runs[hashes[-HASH:]]
            self._let_go(holder, run)
            hashes = hashes[: -len(run.hashes)]

    def _run_up_to(self, holder: _Holder, block_hash: bytes) -> _Run | None:
        """The holder's run that ends with that block. Makes it one if it goes on: then a block was evicted before those
        that follow it, which happens rarely, and it is looked for in all of the holder's runs."""
        run = holder.runs.get(block_hash)
        if run is not None:
            return run
        found = self._find(holder, block_hash)
        if found is None:
            return None
        self._cut(*found)
        return found[0]

    def _find(self, holder: _Holder, block_hash: bytes) -> tuple[_Run, int] | None:
        """The holder's run with that block, and the bytes up to the block's end."""
        for run in holder.runs.values():
            size = _size_up_to(run.hashes, block_hash)
            if size:
                return run, size
        return None

    def _known_part(self, holder: _Holder, hashes: bytes) -> bytes:
        """Less the blocks at the end that were passed over, of which the last is one, as the map was full."""
        low, high = 0, len(hashes) // HASH - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._find(holder, hashes[(middle - 1) * HASH : middle * HASH]) is None:
                high = middle - 1
            else:
                low = middle
        return hashes[: low * HASH]

    def _make_run(self, hashes: bytes, holders: int) -> _Run:
        run = self._runs[hashes[:HASH]] = _Run(hashes, holders)
        self._num_blocks += len(hashes) // HASH
        return run

    def _cut(self, run: _Run, size: int) -> None:
        """The run ends after so many bytes, and the rest is another one, or several where there are such already."""
        rest = run.hashes[size:]
        run.hashes = run.hashes[:size]
        self._num_blocks -= len(rest) // HASH
        if rest[:HASH] in self._runs:
            for holder in self._holders_of(run.holders):
                del holder.runs[rest[-HASH:]]
                holder.runs[run.hashes[-HASH:]] = run
                self._store(holder, rest)
            return
        tail = self._make_run(rest, run.holders)
        for holder in self._holders_of(run.holders):
            holder.runs[run.hashes[-HASH:]] = run
            holder.runs[rest[-HASH:]] = tail

    def _let_go(self, holder: _Holder, run: _Run) -> None:
        """Takes the holder off a run, which is forgotten with its last one."""
        run.holders ^= holder.bit
        if not run.holders:
            del self._runs[run.hashes[:HASH]]
            self._num_blocks -= len(run.hashes) // HASH


def _common_size(hashes: bytes, chain: bytes, at: int) -> int:
    """Bytes of the blocks that `hashes` begins with and `chain` has from `at` on; the first block is the same."""
    if chain.startswith(hashes, at):
        return len(hashes)
    low, high = 1, min(len(hashes), len(chain) - at) // HASH
    while low < high:
        middle = (low + high + 1) // 2
        if chain.startswith(hashes[: middle * HASH], at):
            low = middle
        else:
            high = middle - 1
    return low * HASH


def _size_up_to(hashes: bytes, block_hash: bytes) -> int:
    """Bytes up to the end of that block, 0 if it is not there."""
    at = hashes.find(block_hash)
    while at % HASH:  # found across two blocks, or (-1) not at all
        if at < 0:
            return 0
        at = hashes.find(block_hash, at + 1)
    return at + HASH


class HeldPrefixes:
    """How much of one prompt each worker holds; valid until the map changes."""

    __slots__ = ("_groups", "_map")

    def __init__(self, prefix_map: PrefixMap, groups: list[tuple[int, int]]) -> None:
        """`groups`: number of blocks, and the set of those that hold just so many; longest first."""
        self._map = prefix_map
        self._groups = groups

    def num_blocks_of(self, worker: WorkerId) -> int:
        """Blocks of the prompt that a registered life holds."""
        return self.num_blocks_by_worker([worker]).get(worker, 0)

    def num_blocks_by_worker(self, workers: Sequence[WorkerId]) -> dict[WorkerId, int]:
        """The same of several, for those that hold any."""
        found: dict[WorkerId, int] = {}
        if not self._groups:
            return found
        for worker in workers:
            bits = self._map.bits_of(worker)
            for num_blocks, holders in self._groups:
                if holders & bits:
                    found[worker] = num_blocks
                    break
        return found

    def num_told_blocks_of(self, worker: WorkerId) -> int:
        """Blocks of the prompt that a registered life has told that it holds; not what it is only expected to."""
        bit = self._map.told_bit_of(worker)
        return next((num_blocks for num_blocks, holders in self._groups if holders & bit), 0)

    def longest(self, role: Role, limit: int) -> dict[WorkerId, int]:
        """Blocks held, of at most `limit` workers of that role: those that hold most, longest first."""
        found: dict[WorkerId, int] = {}
        if not limit:
            return found
        for num_blocks, bits in self._groups:
            for worker in self._map.holders_in(role, bits):
                if worker not in found:
                    found[worker] = num_blocks
                    if len(found) == limit:
                        return found
        return found
