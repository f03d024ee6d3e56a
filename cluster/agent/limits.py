"""WorkerState's configuration, and every limit of the worker's own, by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from cluster.core.commands import Prefill, Reserve, RunLocal
from cluster.core.limits import NS_PER_S
from cluster.core.messages import WorkerHello
from engine.core.scheduler import SchedulerConfig
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.sampling import Checksums

NUM_LAYER_GROUPS = 6
"""In about so many groups of layers the blocks of a prompt's last chunk are pushed while it is computed. More of them
leave less to push after the last layer, but make smaller copies."""

Work = Reserve | Prefill | RunLocal
"""The commands that start a leg."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """Bounds on what a worker holds and waits for. All values are positive."""

    coordinator_grace_ns: int = 30 * NS_PER_S
    """Without a control stream for longer, the worker ends."""
    max_batches_in_flight: int = 8
    """Batches handed to a front's stream and not yet taken by it; further tokens wait in their records."""
    max_tokens_per_batch: int = 4_096
    max_stalled_tokens: int = 16_384
    """Tokens drawn for a front since its stream last took a batch. Above it the front does not read, and its requests
    here are cancelled."""
    max_fronts: int = 256
    max_finished_records: int = 4_096
    """One for each answer."""
    finished_record_ttl_ns: int = 60 * NS_PER_S
    """A finished attempt's tokens are kept so long for a front that has to reconnect; Forget ends it sooner."""
    max_early_watches: int = 4_096
    early_watch_ttl_ns: int = 10 * NS_PER_S
    """How long a watch may come before the command it belongs to."""
    max_cancelled_attempts: int = 4_096
    """Attempts cancelled here that are remembered, so that a late command for one is refused."""
    max_legs: int = 1_024
    block_events_interval_ns: int = 50_000_000
    """Changes of the prefix cache are told to the coordinator together, this far apart. It uses them as hints."""
    max_hashes_per_block_events: int = 4_096
    max_fetch_wait_ns: int = NS_PER_S
    """So long a prompt waits for its beginning from another worker; what has not come by then is computed."""
    max_disk_wait_ns: int = 100_000_000
    """So long a prompt waits for blocks that are read from files; what has not come by then is computed."""
    max_step_failures: int = 3
    """Steps that may fail in a row before the worker gives itself up."""
    max_failed_sequences: int = 16
    """Sequences for which the engine may compute nothing usable, one after the other, with no sound one among them.
    After so many it is the engine that is taken for damaged, and the worker gives itself up."""
    max_step_ns: int = 120 * NS_PER_S
    """A step that has not ended by then never will: the worker gives itself up. The coordinator gives it up sooner
    (MAX_STEP_NS), if there is one."""
    num_trial_steps: int = 4
    """An attempt on trial has survived at decode once so many steps have drawn a token of it. More than one, since what
    was drawn last before a worker died may not have reached the client."""

    leave_notice_ns: int = 200_000_000
    """A worker that is asked to stop stays so long without a push: what was placed on it meanwhile arrives within, and
    the coordinator hears that the last one was taken over."""
    max_leave_ns: int = 3 * NS_PER_S
    """And so long at most; pushes that have not ended by then are computed again elsewhere."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise ValueError(f"{limit.name}: must be at least 1, is {getattr(self, limit.name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStateConfig:
    """What one life of a worker is.

    Attributes:
        hello: what the worker says of itself when it registers; load and inventory are filled in each time.
        num_blocks: size of the KV pool. num_host_blocks: of the tier in host memory below it.
        num_disk_blocks: of that in files. on_disk: (hash, parent's hash) of what an earlier life left there.
        num_layers: of a block. model_fingerprint: part of every block hash.
        accepts: the kinds of work that the worker's role takes; any other is refused.
        max_reserved_blocks: watermark on reserved plus quarantined blocks, None for the pool's default.
        checksums: which pushed blocks are summed and verified.
    """

    hello: WorkerHello
    scheduler: SchedulerConfig
    num_blocks: int
    num_layers: int
    model_fingerprint: str
    accepts: tuple[type[Work], ...] = (Reserve, Prefill, RunLocal)
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    on_disk: tuple[tuple[bytes, bytes], ...] = ()
    max_reserved_blocks: int | None = None
    checksums: Checksums = Checksums.FULL
    push_limits: PushLimits = field(default_factory=PushLimits)
    limits: AgentLimits = field(default_factory=AgentLimits)
