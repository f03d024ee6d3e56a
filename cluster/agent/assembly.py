"""Puts a worker together: its model on its pool, the pool's transport, and the state machine's configuration."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import socket

from cluster.agent.limits import AgentLimits, WorkerStateConfig
from cluster.agent.pool import TransportPool, open_pool
from cluster.agent.settings import RoleProfile, WorkerSettings
from cluster.core.commands import RunLocal
from cluster.core.ids import Role
from cluster.core.limits import NS_PER_S
from cluster.core.messages import RankEndpoint, WorkerHello, WorkerLoad, WorkerRef
from engine.attention.base import LayerWritten
from engine.core.disk_tier import DiskResult, DiskWork
from engine.core.scheduler import SchedulerConfig
from engine.core.step import StepPlan, StepResult
from engine.core.tiers import BlockCopy
from engine.disk_cache import DiskCache
from engine.model.config import ModelShape, model_fingerprint
from engine.model.select import read_model
from engine.runner import Runner
from kv_transfer.checksum import Memory, checksums
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.transport.auto import AutoTransport

logger = logging.getLogger(__name__)

COMPATIBILITY_SIZE_BYTES = 16


class Engine:
    """A model on its pool, and what the rest of the worker needs to know of it.

    Attributes:
        transport: registered on the pool's memory. fingerprint, name: of the model; the name is for people.
        computed_by: what computes the model, as `baton status` shows it.
        disk_cache: the files of the prefix cache, None for none. on_disk: what an earlier life left in them.
    """

    def __init__(
        self,
        runner: Runner,
        pool: TransportPool,
        *,
        scheduler: SchedulerConfig,
        layout: KVLayout,
        fingerprint: str,
        name: str,
        computed_by: str,
        disk_cache: DiskCache | None = None,
        on_disk: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self._runner: Runner | None = runner
        self._pool = pool
        self._memory: Memory | None = pool.memory
        self.scheduler = scheduler
        self.layout = layout
        self.fingerprint = fingerprint
        self.name = name
        self.computed_by = computed_by
        self.disk_cache = disk_cache
        self.on_disk = on_disk

    @property
    def transport(self) -> AutoTransport:
        return self._pool.transport

    def run(self, plan: StepPlan, on_layer_written: LayerWritten | None = None) -> StepResult:
        """One step; on the engine thread only, which is also where `on_layer_written` is called."""
        assert self._runner is not None, "the engine is closed"
        return self._runner.run(plan, on_layer_written)

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        """Between the pool and the host tier, of blocks and slots that no running step uses; on any thread."""
        assert self._runner is not None, "the engine is closed"
        self._runner.copy_blocks(copies)

    def do_disk_work(self, work: DiskWork) -> DiskResult:
        """Between the host tier and files; on one thread at a time."""
        assert self._runner is not None and self.disk_cache is not None, "the engine is closed, or has no files"
        return self.disk_cache.do(work)

    def checksums(self, block_ids: tuple[int, ...], layers: range) -> list[int]:
        """Of these layers of blocks as they are in the pool; on any thread."""
        assert self._memory is not None, "the engine is closed"
        return checksums(self._memory, [self.layout.layers_slice(block_id, layers) for block_id in block_ids])

    def close(self) -> None:
        """Gives model and pool back. Nothing may be running."""
        self._runner = None
        self.disk_cache = None
        self._memory = None
        self._pool.close()


def load_engine(settings: WorkerSettings, profile: RoleProfile) -> Engine:
    """Makes the pool, loads the model onto it and warms it up. Takes seconds.

    Raises: FileNotFoundError, ValueError, ModelWeightsError, TransportError.
    """
    config = read_model(settings.model_dir)
    layout = KVLayout(
        groups=(LayerGroup(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim),),
        block_size=settings.block_size,
        dtype=settings.dtype,
    )
    scheduler = _scheduler_config(settings, profile, config)
    takes_pushes = settings.device == "cpu"
    if not takes_pushes and settings.role is Role.PREFILL:
        raise ValueError(
            f"device: a {settings.role.value} worker pushes KV, and {settings.device} memory is not pushed yet"
        )
    # The transport is registered on host memory, of which a GPU's pool has none: a page that nobody is told of.
    pool = open_pool(settings, layout.pool_size_bytes(settings.num_blocks) if takes_pushes else mmap.PAGESIZE)
    try:
        runner = Runner.from_directory(
            settings.model_dir,
            settings.dtype,
            settings.num_blocks,
            settings.block_size,
            settings.threads,
            buffer=pool.buffer if takes_pushes else None,
            device=settings.device,
            num_host_blocks=settings.num_host_blocks,
        )
        runner.warm_up(settings.max_step_tokens, settings.max_running)
        fingerprint = model_fingerprint(settings.model_dir, settings.revision)
        disk_cache = _open_disk_cache(settings, runner, f"{fingerprint} {layout.compatibility()}")
    except BaseException:
        pool.close()
        raise
    return Engine(
        runner,
        pool,
        scheduler=scheduler,
        layout=layout,
        fingerprint=fingerprint,
        name=settings.model_dir.name,
        computed_by=config.engine,
        disk_cache=disk_cache,
        on_disk=() if disk_cache is None else disk_cache.scan(settings.num_disk_blocks),
    )


def _open_disk_cache(settings: WorkerSettings, runner: Runner, layout: str) -> DiskCache | None:
    """In a directory of the worker's own name, which it alone uses."""
    if settings.disk_cache_dir is None or not settings.num_disk_blocks:
        return None
    if runner.host_cache is None:
        raise ValueError("disk_cache: blocks go to disk by way of host memory, which needs host_cache as well")
    slot_bytes = runner.host_cache.slot_bytes
    return DiskCache(settings.disk_cache_dir / settings.worker.name, layout, slot_bytes, len(slot_bytes(0)))


def _scheduler_config(settings: WorkerSettings, profile: RoleProfile, model: ModelShape) -> SchedulerConfig:
    max_model_tokens = settings.max_model_tokens or model.max_position_embeddings
    if max_model_tokens > model.max_position_embeddings:
        raise ValueError(f"max_model_tokens: {max_model_tokens}, the model takes {model.max_position_embeddings}")
    return SchedulerConfig(
        block_size=settings.block_size,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        prefill_chunk_tokens=settings.prefill_chunk_tokens or profile.prefill_chunk_tokens,
        max_model_tokens=max_model_tokens,
        eos_token_ids=frozenset(model.eos_token_ids),
    )


def state_config(
    settings: WorkerSettings, profile: RoleProfile, engine: Engine, token_address: str, metrics_address: str
) -> WorkerStateConfig:
    """What WorkerState is told of this life."""
    details = f"model={engine.fingerprint} {engine.layout.compatibility()} engine={engine.computed_by}"
    endpoint = RankEndpoint(rank=0, transport=engine.transport.name, endpoint=engine.transport.endpoint())
    hello = WorkerHello(
        ref=WorkerRef(worker=settings.worker, token_address=token_address, endpoints=(endpoint,)),
        pool=settings.pool,
        role=settings.role,
        host=socket.gethostname(),
        pid=os.getpid(),
        model=engine.name,
        engine=engine.computed_by,
        compatibility=hashlib.blake2b(details.encode(), digest_size=COMPATIBILITY_SIZE_BYTES).hexdigest(),
        compatibility_details=details,
        block_size=settings.block_size,
        block_size_bytes=engine.layout.block_size_bytes,
        max_model_tokens=engine.scheduler.max_model_tokens,
        load=WorkerLoad(),
        metrics_address=metrics_address,
    )
    # A pool in a GPU's memory is out of its peers' reach.
    accepts = profile.accepts if settings.device == "cpu" else (RunLocal,)
    return WorkerStateConfig(
        hello=hello,
        scheduler=engine.scheduler,
        num_blocks=settings.num_blocks,
        num_host_blocks=settings.num_host_blocks,
        num_disk_blocks=0 if engine.disk_cache is None else settings.num_disk_blocks,
        on_disk=engine.on_disk,
        num_layers=engine.layout.num_layers,
        model_fingerprint=engine.fingerprint,
        accepts=accepts,
        checksums=settings.checksums,
        limits=AgentLimits(coordinator_grace_ns=int(settings.coordinator_grace_s * NS_PER_S)),
    )
