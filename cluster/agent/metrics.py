"""What a worker's Prometheus page says. Every sample is labelled with the worker's name, its pool and its role."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from cluster.agent.settings import WorkerSettings
from cluster.agent.state import WorkerState
from engine.core.prefix_counters import PrefixCounters
from engine.disk_cache import DiskCache

_LABELS = ("worker", "pool", "role")


class WorkerMetrics:
    """Reads one WorkerState; must be called where it is changed, on the event loop's thread."""

    def __init__(
        self, settings: WorkerSettings, state: WorkerState, block_size_bytes: int, disk: DiskCache | None
    ) -> None:
        """`block_size_bytes`: of a block's KV. `disk`: the files of the prefix cache, if there are any."""
        self._disk = disk
        self._block_size_bytes = block_size_bytes
        self._labels = (settings.worker.name, settings.pool, settings.role.value)
        self._state = state

    def measure(self) -> Iterator[Metric]:
        yield from self._prefix_cache()
        yield self._blocks()
        load = self._state.load()
        sequences = GaugeMetricFamily(
            "baton_sequences", "Sequences on this worker by state.", labels=(*_LABELS, "state")
        )
        sequences.add_metric((*self._labels, "running"), load.num_running)
        sequences.add_metric((*self._labels, "waiting"), load.num_waiting)
        yield sequences
        yield self._counter("baton_steps", "Steps that the engine has run.", load.num_steps)
        yield self._links()

    def _prefix_cache(self) -> Iterator[Metric]:
        counters = self._state.pool.prefix_counters()
        yield self._counter(
            "baton_prefix_cache_query_tokens",
            "Tokens of prompts that were looked up in the prefix cache.",
            counters.num_query_tokens,
        )
        yield self._counter(
            "baton_prefix_cache_hit_tokens",
            "Of these, tokens that were found and not computed.",
            counters.num_hit_tokens,
        )
        yield self._counter(
            "baton_prefix_cache_stored_blocks",
            "Blocks that have become findable by content.",
            counters.num_stored_blocks,
        )
        yield self._counter(
            "baton_prefix_cache_evicted_blocks",
            "Blocks that were findable and were given to something else.",
            counters.num_evicted_blocks,
        )
        yield from self._host_tier(counters)
        blocks = GaugeMetricFamily(
            "baton_prefix_cache_blocks", "Blocks that prompts can hit, in use or not.", labels=_LABELS
        )
        blocks.add_metric(self._labels, self._state.pool.num_indexed)
        yield blocks

    def _host_tier(self, counters: PrefixCounters) -> Iterator[Metric]:
        hits = CounterMetricFamily(
            "baton_prefix_cache_tier_hit_tokens",
            "Tokens that were found in the prefix cache, by where they lay.",
            labels=(*_LABELS, "tier"),
        )
        num_pool_tokens = counters.num_hit_tokens - counters.num_host_hit_tokens
        hits.add_metric((*self._labels, "pool"), num_pool_tokens)
        hits.add_metric((*self._labels, "host"), counters.num_host_hit_tokens)
        yield hits
        yield self._counter(
            "baton_prefix_cache_spilled_bytes",
            "Copied from the KV pool to host memory when blocks were evicted.",
            counters.num_spilled_blocks * self._block_size_bytes,
        )
        yield self._counter(
            "baton_prefix_cache_loaded_bytes",
            "Copied back to the KV pool for prompts that hit them.",
            counters.num_loaded_blocks * self._block_size_bytes,
        )
        yield self._counter(
            "baton_prefix_cache_fetched_blocks",
            "Blocks that were fetched from other workers.",
            self._state.num_fetched_blocks(),
        )
        blocks = GaugeMetricFamily(
            "baton_prefix_cache_tier_blocks", "Blocks kept in lower tiers.", labels=(*_LABELS, "tier")
        )
        blocks.add_metric((*self._labels, "host"), self._state.pool.num_host_blocks)
        blocks.add_metric((*self._labels, "disk"), self._state.pool.num_disk_blocks)
        yield blocks
        if self._disk is not None:
            yield self._counter("baton_prefix_cache_disk_written_bytes", "Written to files.", self._disk.written_bytes)
            yield self._counter("baton_prefix_cache_disk_read_bytes", "Read from files.", self._disk.read_bytes)
            yield self._counter(
                "baton_prefix_cache_disk_bad_files", "Removed because they were of no use.", self._disk.num_bad_files
            )

    def _blocks(self) -> Metric:
        counts = self._state.pool.counts()
        family = GaugeMetricFamily("baton_kv_blocks", "Blocks of the KV pool by state.", labels=(*_LABELS, "state"))
        for state in ("free", "active", "cached", "reserved", "quarantined"):
            family.add_metric((*self._labels, state), getattr(counts, state))
        return family

    def _links(self) -> Metric:
        family = GaugeMetricFamily(
            "baton_kv_link_bandwidth_bytes_per_second",
            "What was measured when the connection over which this worker pushes KV to the peer was made.",
            labels=(*_LABELS, "peer", "transport"),
        )
        # Of two lives of one name, the later one: a page has every combination of labels once.
        by_name = {link.peer.name: link for link in self._state.links()}
        for name, link in by_name.items():
            family.add_metric((*self._labels, name, link.transport), link.bandwidth_bytes_per_s)
        return family

    def _counter(self, name: str, documentation: str, value: int) -> Metric:
        """Prometheus's `_total` is added to the name."""
        family = CounterMetricFamily(name, documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family
