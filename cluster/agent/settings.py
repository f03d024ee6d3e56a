"""What a worker is started with, and what its role makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.agent.limits import Work
from cluster.core.ids import Role, WorkerId
from cluster.wire.channels import LOOPBACK
from kv_transfer.protocol.sampling import Checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One life of a worker, as whoever starts it describes it.

    Attributes:
        worker: its name, and an incarnation higher than that of any earlier life of the name.
        coordinator_address: host:port of the control stream.
        model_dir: a Hugging Face directory. revision: tells checkpoints of one shape apart.
        num_blocks: size of the KV pool, in blocks of `block_size` tokens.
        num_host_blocks: of evicted blocks that are kept in host memory, at most. num_disk_blocks: and in files, in a
            directory of the worker's name in `disk_cache_dir`.
        max_model_tokens: longest sequence, None for the model's own context.
        device: what it computes with; on `cuda` its KV pool is the GPU's memory, and it takes no pushes.
        threads: CPU threads to compute with. cores: core ids it is pinned to, None for none.
        host: address that the token stream listens on and is advertised at; the port is any free one.
        max_step_tokens, prefill_chunk_tokens, max_running: see SchedulerConfig; None takes the role's.
        transport: how KV is pushed; `auto` takes what fits. checksums: which pushed blocks are verified.
        coordinator_grace_s: without a coordinator for longer, the worker ends.
        metrics_host, metrics_port: where the Prometheus page is served; port 0 takes any free one.
    """

    worker: WorkerId
    pool: str
    role: Role
    coordinator_address: str
    model_dir: Path
    dtype: str
    num_blocks: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    disk_cache_dir: Path | None = None
    block_size: int = 16
    max_model_tokens: int | None = None
    revision: str = ""
    device: str = "cpu"
    threads: int = 1
    cores: tuple[int, ...] | None = None
    host: str = LOOPBACK
    max_step_tokens: int = 512
    prefill_chunk_tokens: int | None = None
    max_running: int = 64
    transport: str = "auto"
    checksums: Checksums = Checksums.FULL
    coordinator_grace_s: float = 30.0
    metrics_host: str = LOOPBACK
    metrics_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleProfile:
    """What makes a worker a prefill or a decode worker; the engine and the protocols are the same.

    Attributes:
        accepts: the kinds of work it takes.
        prefill_chunk_tokens: of a step, the most that go to prompts, unless its settings say otherwise.
    """

    role: Role
    accepts: tuple[type[Work], ...]
    prefill_chunk_tokens: int
