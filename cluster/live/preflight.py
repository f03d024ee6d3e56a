"""What can be found wrong with a cluster file before anything is started: model, memory, ports, cores, transport."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from cluster.core.config import ClusterConfig, ModelConfig, PoolConfig
from cluster.live.config_file import ClusterFile
from cluster.live.journal import PRIVATE
from cluster.live.model_check import why_not_loadable
from engine.model.config import resolve_dtype
from engine.model.importer import is_complete
from engine.model.packaged_models import PACKAGED_MODELS
from engine.model.select import read_model
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.transport.backends import why_unavailable

WORKER_BYTES: Final = 700 * 10**6
"""What a worker uses at most besides its weights and its pool."""
CONTROL_PLANE_BYTES: Final = 1_200 * 10**6
"""Ray's own processes, the coordinator and one front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Attributes:
    directory: of the model's files.
    weights_bytes: size of the weights once loaded in the configured dtype.
    block_bytes: size of one KV block.
    max_model_tokens: the longest sequence to be served.
    """

    directory: Path
    weights_bytes: int
    block_bytes: int
    max_model_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What the workers of one machine need: of each pool (replicas, bytes of one worker)."""

    fixed_bytes: int
    pools: tuple[tuple[PoolConfig, int], ...]

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + sum(pool.replicas * worker_bytes for pool, worker_bytes in self.pools)


def model_directory(model: ModelConfig, folder: Path, models_dir: Path) -> Path:
    """Where the model's files should be; relative paths start at `folder`."""
    if model.preset is not None:
        return models_dir / PACKAGED_MODELS[model.preset].directory_name
    assert model.path is not None
    return folder / Path(model.path).expanduser()


def check_journal(file: ClusterFile, directory: Path | None) -> None:
    """Makes the journal's directory, on the coordinator's machine. Raises ConfigError where it cannot be used."""
    if directory is None:
        return
    key = ("journal", "directory")
    try:
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise file.error(key, f"{directory} ({error.strerror})", "a directory that can be made") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise file.error(key, f"{directory}, which cannot be written to", "a directory that can be")


def check_model(file: ClusterFile, models_dir: Path) -> ModelFacts:
    """Reads the model's shape. Raises ConfigError where it is missing, unreadable, or does not fit the file."""
    model = file.config.model
    directory = model_directory(model, file.folder, models_dir)
    if model.preset is not None and not is_complete(directory):
        raise file.error(
            ("model", "preset"),
            f"{model.preset}, which is not at {directory}",
            "an imported model",
            hint=f"import it once with: baton model import {model.preset}",
        )
    key = ("model", "path") if model.path is not None else ("model", "preset")
    if not (directory / "config.json").is_file():
        missing = "has no config.json" if directory.is_dir() else "does not exist"
        raise file.error(key, f"{directory}, which {missing}", "a Hugging Face model directory")
    try:
        shape = read_model(directory)
    except (OSError, ValueError) as error:
        raise file.error(key, f"a model that cannot be used ({error})", "one that Baton can serve") from error
    if not any(directory.glob("*.safetensors")):
        raise file.error(key, f"no *.safetensors in {directory}", "a model directory with its weights")
    if not (directory / "tokenizer.json").is_file():
        raise file.error(key, f"no tokenizer.json in {directory}", "a model directory with its tokenizer")
    reason = why_not_loadable(directory)
    if reason is not None:
        raise file.error(key, f"a model that cannot be loaded ({reason})", "one with all its weights and its tokenizer")
    layout = KVLayout(
        groups=(LayerGroup(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim),),
        block_size=file.config.kv.block_size,
        dtype=model.dtype,
    )
    facts = ModelFacts(
        directory=directory,
        weights_bytes=shape.weights_size_bytes(resolve_dtype(model.dtype, shape)),
        block_bytes=layout.block_size_bytes,
        max_model_tokens=model.max_model_tokens or shape.max_position_embeddings,
    )
    _check_context(file, facts, shape.max_position_embeddings)
    return facts


def num_kv_blocks(pool: PoolConfig, block_bytes: int) -> int:
    """Blocks of one worker's pool."""
    if pool.kv_blocks is not None:
        return pool.kv_blocks
    assert pool.kv_bytes is not None
    return pool.kv_bytes // block_bytes


def check_memory(file: ClusterFile, facts: ModelFacts, available_bytes: int | None = None) -> None:
    """Raises ConfigError where this machine cannot hold all workers; the message says what would fit.

    Args:
        available_bytes: None asks the system.
    """
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    need = memory_need(file.config, facts)
    if need.total_bytes <= available:
        return
    parts = ", ".join(f"{pool.replicas} x {_gib(worker_bytes)} in {pool.name}" for pool, worker_bytes in need.pools)
    raise file.error(
        ("pools",),
        f"workers that need {_gib(need.total_bytes)} ({parts}, {_gib(need.fixed_bytes)} for the rest)",
        f"at most {_gib(available)}, which this machine has available",
        hint=what_fits(file.config, facts, available),
    )


def memory_need(config: ClusterConfig, facts: ModelFacts) -> MemoryNeed:
    fixed_worker_bytes = facts.weights_bytes + WORKER_BYTES
    return MemoryNeed(
        fixed_bytes=CONTROL_PLANE_BYTES,
        pools=tuple((pool, fixed_worker_bytes + _host_kv_bytes(pool, facts)) for pool in config.pools),
    )


def _host_kv_bytes(pool: PoolConfig, facts: ModelFacts) -> int:
    """One worker's host tier and its KV pool, as far as that takes memory of the machine and not of a GPU."""
    pool_bytes = num_kv_blocks(pool, facts.block_bytes) * facts.block_bytes if pool.device == "cpu" else 0
    return pool_bytes + pool.host_cache_bytes // facts.block_bytes * facts.block_bytes


def what_fits(config: ClusterConfig, facts: ModelFacts, available_bytes: int) -> str:
    """A sentence: the pool size that would fit with as many workers, or the workers that would fit."""
    num_workers = sum(pool.replicas for pool in config.pools)
    left_bytes = available_bytes - CONTROL_PLANE_BYTES
    per_worker_bytes = left_bytes // num_workers - facts.weights_bytes - WORKER_BYTES
    least_bytes = _least_blocks(facts, config.kv.block_size) * facts.block_bytes
    if per_worker_bytes >= least_bytes:
        return f"kv_memory: {per_worker_bytes // 2**20}MiB in every pool would fit"
    fitting = max(0, left_bytes) // (facts.weights_bytes + WORKER_BYTES + least_bytes)
    if fitting >= 2:
        return f"at most {fitting} workers would fit, with kv_memory: {-(-least_bytes // 2**20)}MiB each"
    return "this machine is too small for one prefill and one decode worker of this model"


def check_ports(file: ClusterFile) -> None:
    """Raises ConfigError where a port of a front or of a worker's metrics cannot be listened on, or is both's."""
    config = file.config
    front, metrics = config.front, config.metrics
    num_workers = sum(pool.replicas for pool in config.pools)
    front_ports = range(front.port, front.port + front.replicas) if front.port else range(0)
    metrics_ports = range(metrics.port, metrics.port + num_workers) if metrics.port else range(0)
    for port in metrics_ports:
        if port in front_ports:
            raise file.error(("metrics", "port"), f"{port}, which is a front's", "ports of their own")
    if metrics.coordinator_port and metrics.coordinator_port in front_ports:
        found = f"{metrics.coordinator_port}, which is a front's"
        raise file.error(("metrics", "coordinator_port"), found, "a port of its own")
    wanted = [(("front", "port"), front.host, port) for port in front_ports]
    wanted += [(("metrics", "port"), metrics.host, port) for port in metrics_ports]
    if metrics.coordinator_port:
        wanted.append((("metrics", "coordinator_port"), metrics.host, metrics.coordinator_port))
    for path, host, port in wanted:
        reason = _why_not_bindable(host, port)
        if reason is not None:
            raise file.error(
                path,
                f"{host}:{port}, where nothing can listen ({reason})",
                "a free port",
                hint="0 takes any free one",
            )


def check_cores(file: ClusterFile, allowed: frozenset[int] | None = None) -> None:
    """Raises ConfigError where a worker is to be pinned to a core that this machine does not have."""
    present = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    for i, pool in enumerate(file.config.pools):
        for j, cores in enumerate(pool.cores or ()):
            missing = [core for core in cores if core not in present]
            if missing:
                raise file.error(
                    ("pools", i, "cores", j), f"core {missing[0]}", f"cores of this machine: {_ranges(sorted(present))}"
                )


def check_transport(file: ClusterFile) -> None:
    """Raises ConfigError where the one transport asked for is not installed on this machine."""
    kind = file.config.transport.kind
    reason = None if kind == "auto" else why_unavailable(kind)
    if reason is not None:
        raise file.error(
            ("transport", "kind"), f"{kind}, which cannot be used ({reason})", "a transport that is installed"
        )


def _check_context(file: ClusterFile, facts: ModelFacts, model_limit: int) -> None:
    if facts.max_model_tokens > model_limit:
        raise file.error(
            ("model", "max_model_tokens"), str(facts.max_model_tokens), f"at most the model's own {model_limit}"
        )
    needed = _least_blocks(facts, file.config.kv.block_size)
    for i, pool in enumerate(file.config.pools):
        blocks = num_kv_blocks(pool, facts.block_bytes)
        if blocks < needed:
            key = "kv_blocks" if pool.kv_blocks is not None else "kv_memory"
            needed_mib = -(-needed * facts.block_bytes // 2**20)
            raise file.error(
                ("pools", i, key),
                f"a pool of {blocks} blocks",
                f"at least {needed} ({needed_mib}MiB), to hold one sequence of {facts.max_model_tokens} tokens",
                hint="or a smaller model.max_model_tokens",
            )


def _least_blocks(facts: ModelFacts, block_size: int) -> int:
    return -(-facts.max_model_tokens // block_size)


def _why_not_bindable(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # Another process may be bound without listening yet, or listen with address reuse: listening settles it.
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}GiB"


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
