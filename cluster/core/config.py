"""The cluster file (`version: 1`) as frozen dataclasses, and the validator that makes them from plain data.

Reading YAML with line numbers happens elsewhere; here comes the parsed data and a function that knows the lines. All
defaults live here. A cluster whose pools are all decode pools runs every request in one worker (local prefill).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cluster.core.config_reader import Locate, Section
from cluster.core.disaggregation import DisaggregationConfig, parse_disaggregation
from cluster.core.ids import Role
from cluster.core.tenant_config import SloConfig, TenantsConfig, parse_slo, parse_tenants

VERSION: Final = 1
MODEL_PRESETS: Final = ("smollm2-135m-instruct", "gemma-3-270m")
DTYPES: Final = ("float32", "bfloat16")
TRANSPORTS: Final = ("auto", "shm", "nixl", "ucx")
NO_NCCL_HINT: Final = "nccl is not offered yet"
DEVICES: Final = ("cpu", "cuda")
CHECKSUMS: Final = ("full", "sampled", "off")

MAX_POOLS: Final = 64
MAX_REPLICAS: Final = 512
MAX_THREADS: Final = 1024
MAX_CORE_ID: Final = 65535
MAX_MODEL_TOKENS: Final = 16 * 2**20
MAX_STEP_TOKENS: Final = 2**20
MAX_RUNNING: Final = 1024
"""No more than a worker takes attempts and pushes at once (AgentLimits.max_legs, PushLimits.max_pushes)."""
MAX_KV_BLOCKS: Final = 2**32
MIN_KV_BYTES: Final = 2**20
MAX_KV_BYTES: Final = 2**43
MAX_BLOCK_SIZE: Final = 256
MAX_PORT: Final = 65535
MAX_QUEUE: Final = 1_000_000
MAX_SECONDS: Final = 3600.0
MIN_JOURNAL_BYTES: Final = 64 * 2**10
MAX_JOURNAL_BYTES: Final = 2**40
DEFAULT_JOURNAL_BYTES: Final = 64 * 2**20
MAX_JOURNAL_FILES: Final = 10_000
DEFAULT_KV_BYTES: Final = 512 * 2**20
CHUNK_TOKENS: Final = 256
LOCAL_CHUNK_TOKENS: Final = 64

_NAME_PATTERN: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DIRECTORY_EXPECTED: Final = "the path of a directory"
_NAME_EXPECTED: Final = "a name of lower-case letters, digits and inner hyphens, at most 63 characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Exactly one of `path` (a Hugging Face directory) and `preset` is set.

    `max_model_tokens` caps prompt plus answer; None takes the model's own context length.
    """

    path: str | None = None
    preset: str | None = None
    dtype: str = "float32"
    max_model_tokens: int | None = None
    revision: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Workers of one kind. Exactly one of `kv_blocks` and `kv_bytes` is set.

    Attributes:
        device: what a worker computes with; `cuda` is one GPU, whose memory holds the KV pool.
        threads: CPU threads a worker computes with.
        cores: for each replica the core ids it is pinned to; None pins nothing.
        kv_blocks, kv_bytes: size of one worker's KV pool. host_cache_bytes: of what it keeps in host memory of the
            blocks that are evicted from it; 0 keeps none. disk_cache_bytes: in files, in a directory of the worker's
            name below `disk_cache_directory`.
        max_step_tokens: tokens of one step, decode and prefill together.
        prefill_chunk_tokens: of these, the most that go to prompts.
        max_running: sequences that may run at once.
    """

    name: str
    role: Role
    replicas: int = 1
    device: str = "cpu"
    threads: int = 1
    cores: tuple[tuple[int, ...], ...] | None = None
    kv_blocks: int | None = None
    kv_bytes: int | None = DEFAULT_KV_BYTES
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    disk_cache_directory: str | None = None
    max_step_tokens: int = 512
    prefill_chunk_tokens: int = CHUNK_TOKENS
    max_running: int = 64

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Of its replicas, in order."""
        return tuple(f"{self.name}-{i}" for i in range(self.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """`block_size`: tokens in a block, the same in all pools."""

    block_size: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How KV is pushed. `kind`: one backend for all, or `auto` for the best of them that connects each pair of workers.
    `checksum`: on arrival, `full` verifies every block, `sampled` a few of each write, `off` none."""

    kind: str = "auto"
    checksum: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Where clients connect; port 0 takes any free one."""

    host: str = "127.0.0.1"
    port: int = 50051
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where workers and the coordinator serve their Prometheus pages.

    `port` is the first worker's; the others take the ones after it, in the order of the file. With 0, each takes any
    free one. `coordinator_port` is the coordinator's, 0 for any free one.
    """

    host: str = "127.0.0.1"
    port: int = 0
    coordinator_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Limits of the control plane.

    Attributes:
        queue_limit: requests waiting for a place; above it they are refused.
        queue_timeout_s: longest wait in the queue before a request is refused.
        heartbeat_timeout_s: silence after which a worker is given up.
        max_attempts: runs of one request, the first included, before it fails.
        lease_ttl_s: how long a lease lasts without renewal.
        fetch_prefixes: whether who reads a prompt may fetch its beginning from a worker that holds it.
    """

    queue_limit: int = 1024
    queue_timeout_s: float = 30.0
    heartbeat_timeout_s: float = 10.0
    max_attempts: int = 3
    lease_ttl_s: float = 10.0
    fetch_prefixes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """What the coordinator writes down of its decisions, for `baton replay`.

    Attributes:
        is_on: whether it does. directory: where to, on the coordinator's host; None: `journals/NAME` in the cache.
        file_size_bytes: at which the next file is begun. max_files: of which the oldest are removed.
    """

    is_on: bool = True
    directory: str | None = None
    file_size_bytes: int = DEFAULT_JOURNAL_BYTES
    max_files: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    name: str
    model: ModelConfig
    pools: tuple[PoolConfig, ...]
    kv: KVConfig = field(default_factory=KVConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    front: FrontConfig = field(default_factory=FrontConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    tenants: TenantsConfig = field(default_factory=TenantsConfig)

    def pool(self, name: str) -> PoolConfig | None:
        """The pool of that name, None if there is none."""
        return next((pool for pool in self.pools if pool.name == name), None)


def parse_cluster_config(data: object, source: str, locate: Locate) -> ClusterConfig:
    """Makes the configuration of plain data (nested dicts, lists and scalars, as a YAML file holds them).

    Args:
        data: the file's content. source: its name, for messages.
        locate: the line of a key, such as `("pools", 1, "name")`; `()` is the whole file. None where unknown.

    Raises:
        ConfigError: for the first thing that is wrong.
    """
    root = Section(data, source=source, locate=locate)
    _check_version(root)
    kv = _parse_kv(root.section("kv"))
    model = _parse_model(root.section("model"))
    pools = _parse_pools(root, model, kv)
    slo = parse_slo(root.section("slo"))
    config = ClusterConfig(
        name=root.text("name", default="baton", pattern=_NAME_PATTERN, expected=_NAME_EXPECTED),
        model=model,
        pools=pools,
        kv=kv,
        transport=_parse_transport(root.section("transport")),
        front=_parse_front(root.section("front")),
        metrics=_parse_metrics(root.section("metrics"), sum(pool.replicas for pool in pools)),
        coordinator=_parse_coordinator(root.section("coordinator")),
        journal=_parse_journal(root.section("journal")),
        disaggregation=parse_disaggregation(root.section("disaggregation"), slo.tpot_ms),
        slo=slo,
        tenants=parse_tenants(root),
    )
    root.finish()
    return config


def _check_version(root: Section) -> None:
    version = root.integer("version", minimum=0, maximum=2**31)
    if version != VERSION:
        root.refuse("version", str(version), f"version {VERSION}", hint="this release reads no other version")


def _parse_model(section: Section) -> ModelConfig:
    path = section.text("path", default="", expected="the path of a model directory")
    preset = section.choice("preset", MODEL_PRESETS) if section.has("preset") else section.text("preset", default="")
    if bool(path) == bool(preset):
        found = "both path and preset" if path else "neither path nor preset"
        section.refuse(None, found, "one of the two", hint=f"presets: {', '.join(MODEL_PRESETS)}")
    model = ModelConfig(
        path=path or None,
        preset=preset or None,
        dtype=section.choice("dtype", DTYPES, default="float32"),
        max_model_tokens=section.optional_integer("max_model_tokens", minimum=2, maximum=MAX_MODEL_TOKENS),
        revision=section.text("revision", default=""),
    )
    section.finish()
    return model


def _parse_kv(section: Section) -> KVConfig:
    block_size = section.integer("block_size", default=16, minimum=1, maximum=MAX_BLOCK_SIZE)
    section.finish()
    return KVConfig(block_size=block_size)


def _parse_pools(root: Section, model: ModelConfig, kv: KVConfig) -> tuple[PoolConfig, ...]:
    sections = root.sections("pools")
    if len(sections) > MAX_POOLS:
        root.refuse("pools", f"{len(sections)} pools", f"at most {MAX_POOLS}")
    roles = [Role(section.choice("role", tuple(role.value for role in Role))) for section in sections]
    pools: list[PoolConfig] = []
    for section, role in zip(sections, roles, strict=True):
        # Beside prefill workers, decode reads a prompt only in need: in small chunks, since each one holds up
        # everybody's next token.
        is_local = role is Role.DECODE and Role.PREFILL in roles
        pool = _parse_pool(section, role, LOCAL_CHUNK_TOKENS if is_local else CHUNK_TOKENS, model, kv)
        if any(other.name == pool.name for other in pools):
            section.refuse("name", f"{pool.name!r} a second time", "a name of its own for every pool")
        if pool.device == "cuda":
            _check_cuda(section, model, has_prefill=Role.PREFILL in roles)
        pools.append(pool)
    if not any(pool.role is Role.DECODE for pool in pools):
        root.refuse("pools", "no pool with role decode", "at least one", hint="decode workers write the answers")
    return tuple(pools)


def _parse_pool(section: Section, role: Role, chunk_tokens: int, model: ModelConfig, kv: KVConfig) -> PoolConfig:
    """`chunk_tokens`: the default for prefill_chunk_tokens, where max_step_tokens allows it."""
    name = section.text("name", pattern=_NAME_PATTERN, expected=_NAME_EXPECTED)
    replicas = section.integer("replicas", default=1, minimum=1, maximum=MAX_REPLICAS)
    kv_blocks = section.optional_integer("kv_blocks", minimum=1, maximum=MAX_KV_BLOCKS)
    kv_bytes = section.optional_size_bytes("kv_memory", minimum=MIN_KV_BYTES, maximum=MAX_KV_BYTES)
    if kv_blocks is not None and kv_bytes is not None:
        section.refuse("kv_memory", "kv_blocks and kv_memory together", "one of the two")
    if kv_blocks is None and kv_bytes is None:
        kv_bytes = DEFAULT_KV_BYTES
    max_step_tokens = section.integer("max_step_tokens", default=512, minimum=1, maximum=MAX_STEP_TOKENS)
    pool = PoolConfig(
        name=name,
        role=role,
        replicas=replicas,
        device=section.choice("device", DEVICES, default="cpu"),
        threads=section.integer("threads", default=1, minimum=1, maximum=MAX_THREADS),
        cores=_parse_cores(section, replicas),
        kv_blocks=kv_blocks,
        kv_bytes=kv_bytes,
        host_cache_bytes=section.optional_size_bytes("host_cache", minimum=0, maximum=MAX_KV_BYTES) or 0,
        disk_cache_bytes=section.optional_size_bytes("disk_cache", minimum=0, maximum=MAX_KV_BYTES) or 0,
        disk_cache_directory=section.text("disk_cache_directory", default="", expected=_DIRECTORY_EXPECTED) or None,
        max_step_tokens=max_step_tokens,
        prefill_chunk_tokens=section.integer(
            "prefill_chunk_tokens",
            default=min(max(chunk_tokens, kv.block_size), max_step_tokens),
            minimum=1,
            maximum=max_step_tokens,
        ),
        max_running=section.integer(
            "max_running", default=max(1, min(64, max_step_tokens - kv.block_size)), minimum=1, maximum=MAX_RUNNING
        ),
    )
    section.finish()
    _check_disk_cache(section, pool)
    _check_pool_sizes(section, pool, model, kv)
    return pool


def _parse_cores(section: Section, replicas: int) -> tuple[tuple[int, ...], ...] | None:
    cores = section.optional_integer_lists("cores", maximum=MAX_CORE_ID)
    if cores is not None and len(cores) != replicas:
        section.refuse("cores", f"{len(cores)} lists", f"{replicas}, one for each replica")
    return cores


def _check_cuda(section: Section, model: ModelConfig, *, has_prefill: bool) -> None:
    if has_prefill:
        hint = "keys and values are not pushed to or from the memory of a GPU yet"
        section.refuse("device", "cuda beside a prefill pool", "decode pools only, or cpu", hint=hint)
    if model.dtype == "float32":
        section.refuse("device", "cuda with model.dtype float32", "model.dtype bfloat16, or cpu")


def _check_disk_cache(section: Section, pool: PoolConfig) -> None:
    directory = pool.disk_cache_directory
    if directory is not None and not directory.startswith("/"):
        section.refuse("disk_cache_directory", repr(directory), "an absolute path, on each worker's host")
    if pool.disk_cache_bytes and directory is None:
        section.refuse("disk_cache", "no disk_cache_directory", "the path of a directory beside it")
    if pool.disk_cache_bytes and not pool.host_cache_bytes:
        section.refuse("disk_cache", "no host_cache", "both", hint="blocks go to disk by way of host memory")


def _check_pool_sizes(section: Section, pool: PoolConfig, model: ModelConfig, kv: KVConfig) -> None:
    if pool.max_running > pool.max_step_tokens:
        found = f"{pool.max_running}, more than max_step_tokens ({pool.max_step_tokens})"
        section.refuse("max_running", found, "at most one running sequence a token of a step")
    if pool.max_running + kv.block_size > pool.max_step_tokens:
        expected = f"at least max_running + one block = {pool.max_running + kv.block_size}"
        hint = "prompts go on beside answers, a block at a time"
        section.refuse("max_step_tokens", str(pool.max_step_tokens), expected, hint=hint)
    if pool.prefill_chunk_tokens < kv.block_size:
        section.refuse("prefill_chunk_tokens", str(pool.prefill_chunk_tokens), f"at least one block, {kv.block_size}")
    if pool.kv_blocks is None or model.max_model_tokens is None:
        return
    needed = -(-model.max_model_tokens // kv.block_size)
    if pool.kv_blocks < needed:
        expected = f"at least {needed} blocks, to hold one sequence of {model.max_model_tokens} tokens"
        section.refuse("kv_blocks", f"{pool.kv_blocks} blocks of {kv.block_size} tokens", expected)


def _parse_transport(section: Section) -> TransportConfig:
    transport = TransportConfig(
        kind=section.choice("kind", TRANSPORTS, default="auto", hints={"nccl": NO_NCCL_HINT}),
        checksum=section.choice("checksum", CHECKSUMS, default="full"),
    )
    section.finish()
    return transport


def _parse_front(section: Section) -> FrontConfig:
    front = FrontConfig(
        host=section.text("host", default="127.0.0.1", expected="a host name or address"),
        port=section.integer("port", default=50051, minimum=0, maximum=MAX_PORT),
        replicas=section.integer("replicas", default=1, minimum=1, maximum=MAX_REPLICAS),
    )
    section.finish()
    return front


def _parse_metrics(section: Section, num_workers: int) -> MetricsConfig:
    metrics = MetricsConfig(
        host=section.text("host", default="127.0.0.1", expected="a host name or address"),
        port=section.integer("port", default=0, minimum=0, maximum=MAX_PORT),
        coordinator_port=section.integer("coordinator_port", default=0, minimum=0, maximum=MAX_PORT),
    )
    section.finish()
    if metrics.port and metrics.port <= metrics.coordinator_port < metrics.port + num_workers:
        expected = f"one outside {metrics.port} to {metrics.port + num_workers - 1}"
        section.refuse("coordinator_port", f"{metrics.coordinator_port}, which is a worker's", expected)
    if metrics.port + num_workers - 1 > MAX_PORT:
        expected = f"at most {MAX_PORT - num_workers + 1}, to leave a port for each of {num_workers} workers"
        section.refuse("port", str(metrics.port), expected)
    return metrics


def _parse_coordinator(section: Section) -> CoordinatorConfig:
    coordinator = CoordinatorConfig(
        queue_limit=section.integer("queue_limit", default=1024, minimum=1, maximum=MAX_QUEUE),
        queue_timeout_s=section.number("queue_timeout_s", default=30.0, minimum=0.01, maximum=MAX_SECONDS),
        heartbeat_timeout_s=section.number("heartbeat_timeout_s", default=10.0, minimum=0.1, maximum=MAX_SECONDS),
        max_attempts=section.integer("max_attempts", default=3, minimum=1, maximum=100),
        lease_ttl_s=section.number("lease_ttl_s", default=10.0, minimum=0.1, maximum=MAX_SECONDS),
        fetch_prefixes=section.boolean("fetch_prefixes", default=True),
    )
    section.finish()
    return coordinator


def _parse_journal(section: Section) -> JournalConfig:
    directory = section.text("directory", default="", expected="the path of a directory")
    if directory and not directory.startswith("/"):
        section.refuse("directory", repr(directory), "an absolute path, as the coordinator may run elsewhere")
    file_size_bytes = section.optional_size_bytes("file_size", minimum=MIN_JOURNAL_BYTES, maximum=MAX_JOURNAL_BYTES)
    journal = JournalConfig(
        is_on=section.boolean("enabled", default=True),
        directory=directory or None,
        file_size_bytes=DEFAULT_JOURNAL_BYTES if file_size_bytes is None else file_size_bytes,
        max_files=section.integer("max_files", default=8, minimum=1, maximum=MAX_JOURNAL_FILES),
    )
    section.finish()
    return journal
