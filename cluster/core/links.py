"""The links over which workers push KV to each other, and which of them are slow beside the others of their pools."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.ids import WorkerId
from cluster.core.limits import SLOW_LINK_FRACTION
from cluster.core.reports import LinkReport

PoolPair = tuple[str, str]
"""The writer's pool and the peer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection that `writer` writes to `peer` over, and the median bandwidth between their pools.

    The median says what these pools' hosts can do; a link far below it has most likely fallen back to a slower way.
    """

    writer: WorkerId
    peer: WorkerId
    transport: str
    bandwidth_bytes_per_s: int
    median_bytes_per_s: int

    def __str__(self) -> str:
        return slow_link_text(
            str(self.writer), str(self.peer), self.transport, self.bandwidth_bytes_per_s, self.median_bytes_per_s
        )

    @property
    def is_slow(self) -> bool:
        return self.bandwidth_bytes_per_s < self.median_bytes_per_s * SLOW_LINK_FRACTION


def slow_link_text(writer: str, peer: str, transport: str, bandwidth_bytes_per_s: int, median_bytes_per_s: int) -> str:
    """What operators are told of a slow link, in the coordinator's log and by `baton status`."""
    return (
        f"{writer} pushes to {peer} over {transport} at {bandwidth_bytes_per_s / 1e9:.2f} GB/s; "
        f"the median between their pools is {median_bytes_per_s / 1e9:.2f} GB/s"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    pools: PoolPair
    report: LinkReport


class LinkTable:
    """What writers last reported. Costs O(links of the writer) a report, and little more where one has changed."""

    def __init__(self) -> None:
        self._links: dict[WorkerId, dict[WorkerId, _Entry]] = {}
        self._by_pools: dict[PoolPair, list[tuple[int, WorkerId, WorkerId]]] = {}
        """(bandwidth, writer, peer) of the links between two pools, in order."""
        self._told: dict[tuple[WorkerId, WorkerId], None] = {}
        """Slow links that have been returned by `report`."""

    def __len__(self) -> int:
        return sum(len(links) for links in self._links.values())

    def report(self, writer: WorkerId, pool: str, links: Sequence[tuple[str, LinkReport]]) -> list[Link]:
        """Takes all links of a writer, each with the pool of its peer. Returns those that turn out slow by it, once."""
        wanted = {report.peer: _Entry(pools=(pool, peer_pool), report=report) for peer_pool, report in links}
        known = self._links.get(writer, {})
        if wanted == known:
            return []
        changed = dict.fromkeys(entry.pools for entry in (*known.values(), *wanted.values()))
        for peer, entry in known.items():
            if wanted.get(peer) != entry:
                self._remove(writer, entry)
        for peer, entry in wanted.items():
            if known.get(peer) != entry:
                insort(self._by_pools.setdefault(entry.pools, []), _key(writer, entry))
        if wanted:
            self._links[writer] = wanted
        else:
            del self._links[writer]
        return [link for pools in changed for link in self._newly_slow(pools)]

    def forget(self, writer: WorkerId) -> None:
        for entry in self._links.pop(writer, {}).values():
            self._remove(writer, entry)

    def writers(self) -> list[WorkerId]:
        return list(self._links)

    def bandwidth_bytes_per_s(self, writer: WorkerId, peer: WorkerId, pools: PoolPair) -> int:
        """Of the link, or else the median between the two pools; 0 if nothing is known."""
        if pools not in self._by_pools:
            return 0
        entry = self._links.get(writer, {}).get(peer)
        return self._median(pools) if entry is None else entry.report.bandwidth_bytes_per_s

    def all(self) -> tuple[Link, ...]:
        """By writer and peer."""
        links = [self._link(writer, entry) for writer, entries in self._links.items() for entry in entries.values()]
        return tuple(sorted(links, key=lambda link: (link.writer, link.peer)))

    def check_invariants(self) -> None:
        keys = [_key(writer, entry) for writer, entries in self._links.items() for entry in entries.values()]
        assert sorted(keys) == sorted(key for bucket in self._by_pools.values() for key in bucket)
        assert all(bucket and bucket == sorted(bucket) for bucket in self._by_pools.values())
        assert all(peer in self._links.get(writer, {}) for writer, peer in self._told), "a link that is gone"

    def _newly_slow(self, pools: PoolPair) -> list[Link]:
        found = []
        for _, writer, peer in self._by_pools.get(pools, ()):
            link = self._link(writer, self._links[writer][peer])
            if not link.is_slow:
                break
            if (writer, peer) not in self._told:
                self._told[writer, peer] = None
                found.append(link)
        return found

    def _link(self, writer: WorkerId, entry: _Entry) -> Link:
        return Link(
            writer=writer,
            peer=entry.report.peer,
            transport=entry.report.transport,
            bandwidth_bytes_per_s=entry.report.bandwidth_bytes_per_s,
            median_bytes_per_s=self._median(entry.pools),
        )

    def _median(self, pools: PoolPair) -> int:
        ordered = self._by_pools[pools]
        middle = len(ordered) // 2
        return ordered[middle][0] if len(ordered) % 2 else (ordered[middle - 1][0] + ordered[middle][0]) // 2

    def _remove(self, writer: WorkerId, entry: _Entry) -> None:
        bucket = self._by_pools[entry.pools]
        del bucket[bisect_left(bucket, _key(writer, entry))]
        if not bucket:
            del self._by_pools[entry.pools]
        self._told.pop((writer, entry.report.peer), None)


def _key(writer: WorkerId, entry: _Entry) -> tuple[int, WorkerId, WorkerId]:
    return entry.report.bandwidth_bytes_per_s, writer, entry.report.peer
