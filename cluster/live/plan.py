"""What a cluster file comes to: which processes there will be, under which names, on which ports."""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass
from pathlib import Path

from cluster.core.config import ClusterConfig, PoolConfig
from cluster.live.config_file import ClusterFile
from cluster.live.preflight import ModelFacts, num_kv_blocks
from cluster.wire.channels import LOOPBACK

COORDINATOR_NAME = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker.

    Attributes:
        num_blocks: size of its KV pool. num_host_blocks, num_disk_blocks: of its lower tiers.
        cores: core ids it is pinned to, None for none.
        metrics_port: of its Prometheus page, 0 for any free one.
    """

    name: str
    pool: PoolConfig
    num_blocks: int
    num_host_blocks: int
    num_disk_blocks: int
    cores: tuple[int, ...] | None
    metrics_port: int

    @property
    def num_gpus(self) -> int:
        """GPUs that Ray reserves for it; the process sees no other."""
        return 1 if self.pool.device == "cuda" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPlan:
    name: str
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Attributes:
    model_dir: absolute. max_model_tokens: the longest sequence to be served.
    host: the address that the coordinator listens on. Where it is not loopback, each worker takes its own machine's.
    journal_dir: where the coordinator's journal goes, None for nowhere.
    coordinator_port: fixed, since a coordinator that is started anew must be found where the last one was.
    """

    config: ClusterConfig
    model_dir: Path
    max_model_tokens: int
    host: str
    coordinator_port: int
    workers: tuple[WorkerPlan, ...]
    fronts: tuple[FrontPlan, ...]
    journal_dir: Path | None = None

    @property
    def coordinator_address(self) -> str:
        return f"{self.host}:{self.coordinator_port}"

    def worker_in_pool(self, name: str, pool_name: str) -> WorkerPlan:
        """A worker as one of that pool, where it may have been flipped to, with the cores and the memory it has."""
        worker = next(worker for worker in self.workers if worker.name == name)
        pool = self.config.pool(pool_name)
        assert pool is not None, f"no pool {pool_name}"
        own = worker.pool
        return dataclasses.replace(worker, pool=dataclasses.replace(pool, threads=own.threads, device=own.device))

    @property
    def num_cpus(self) -> int:
        """CPU threads that all workers compute with."""
        return sum(worker.pool.threads for worker in self.workers)


def make_plan(
    file: ClusterFile, facts: ModelFacts, *, host: str = LOOPBACK, journals_dir: Path | None = None
) -> ClusterPlan:
    """Chooses the ports that the file leaves open; nothing is started.

    Args:
        journals_dir: in which the cluster's journal has a directory of its name, unless the file names another. None:
            without one in the file there is no journal.
    """
    config = file.config
    ports = free_ports(1 + (config.front.replicas if config.front.port == 0 else 0))
    front_ports = ports[1:] or [config.front.port + i for i in range(config.front.replicas)]
    metrics_ports = worker_metrics_ports(config)
    return ClusterPlan(
        config=config,
        model_dir=facts.directory.resolve(),
        max_model_tokens=facts.max_model_tokens,
        host=host,
        coordinator_port=ports[0],
        workers=tuple(
            WorkerPlan(
                name=name,
                pool=pool,
                num_blocks=num_kv_blocks(pool, facts.block_bytes),
                num_host_blocks=pool.host_cache_bytes // facts.block_bytes,
                num_disk_blocks=pool.disk_cache_bytes // facts.block_bytes,
                cores=pool.cores[i] if pool.cores else None,
                metrics_port=metrics_ports[name],
            )
            for pool in config.pools
            for i, name in enumerate(pool.worker_names)
        ),
        journal_dir=journal_dir_of(config, journals_dir),
        fronts=tuple(
            FrontPlan(name=f"front-{i}", host=config.front.host, port=port) for i, port in enumerate(front_ports)
        ),
    )


def journal_dir_of(config: ClusterConfig, journals_dir: Path | None) -> Path | None:
    """Where the coordinator's journal goes, None for nowhere. `journals_dir`: as of `make_plan`."""
    if not config.journal.is_on:
        return None
    if config.journal.directory is not None:
        return Path(config.journal.directory)
    return None if journals_dir is None else journals_dir / config.name


def worker_metrics_ports(config: ClusterConfig) -> dict[str, int]:
    """By worker: ports that follow each other, or 0 for all where the file leaves it open."""
    names = [name for pool in config.pools for name in pool.worker_names]
    return {name: config.metrics.port + i if config.metrics.port else 0 for i, name in enumerate(names)}


def free_ports(count: int) -> list[int]:
    """Different ports that were free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
