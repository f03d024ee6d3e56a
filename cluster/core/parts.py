"""The parts ClusterState is composed of. Handlers are functions that are given all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.attempts import AttemptTable
from cluster.core.config import ClusterConfig
from cluster.core.drains import DrainTable
from cluster.core.ids import FrontId
from cluster.core.leases import LeaseLedger
from cluster.core.limits import NS_PER_S
from cluster.core.links import LinkTable
from cluster.core.outbox import Outbox
from cluster.core.prefix_map import PrefixMap
from cluster.core.queue import RequestQueue
from cluster.core.rebuild import RebuildWindow
from cluster.core.requests import RequestTable
from cluster.core.routes import HandOverCosts, RouteRecord
from cluster.core.tenants import TenantTable
from cluster.core.timers import Timers
from cluster.core.trials import TrialTable
from cluster.core.workers import WorkerRegistry


@dataclass(slots=True, kw_only=True)
class Parts:
    """`fronts` has the connected life of each front, by name."""

    config: ClusterConfig
    outbox: Outbox
    queue: RequestQueue
    workers: WorkerRegistry
    tenants: TenantTable
    requests: RequestTable = field(default_factory=RequestTable)
    attempts: AttemptTable = field(default_factory=AttemptTable)
    leases: LeaseLedger = field(default_factory=LeaseLedger)
    links: LinkTable = field(default_factory=LinkTable)
    routes: RouteRecord = field(default_factory=RouteRecord)
    hand_over: HandOverCosts = field(default_factory=HandOverCosts)
    prefixes: PrefixMap = field(default_factory=PrefixMap)
    timers: Timers = field(default_factory=Timers)
    rebuild: RebuildWindow = field(default_factory=RebuildWindow)
    trials: TrialTable = field(default_factory=TrialTable)
    drains: DrainTable = field(default_factory=DrainTable)
    fronts: dict[str, FrontId] = field(default_factory=dict)
    num_leases_made: int = 0
    num_draws: int = 0

    @staticmethod
    def make(config: ClusterConfig, epoch: int) -> Parts:
        return Parts(
            config=config,
            outbox=Outbox(epoch),
            queue=RequestQueue(config.coordinator.queue_limit),
            workers=WorkerRegistry(config),
            tenants=TenantTable(config.tenants),
        )

    def next_lease_id(self) -> int:
        """Unique among all lives of the coordinator, and rising."""
        self.num_leases_made += 1
        return self.outbox.epoch << 32 | self.num_leases_made

    def next_seed(self) -> int:
        """Another one for each decision that draws workers."""
        self.num_draws += 1
        return self.num_draws

    @property
    def heartbeat_timeout_ns(self) -> int:
        return int(self.config.coordinator.heartbeat_timeout_s * NS_PER_S)

    @property
    def queue_timeout_ns(self) -> int:
        return int(self.config.coordinator.queue_timeout_s * NS_PER_S)

    @property
    def lease_ttl_ms(self) -> int:
        return int(self.config.coordinator.lease_ttl_s * 1000)
