"""The configurations that the real machines get in a history, made from its scenario."""

from __future__ import annotations

from cluster.agent.limits import WorkerStateConfig
from cluster.core.config import ClusterConfig, CoordinatorConfig, FrontConfig, KVConfig, ModelConfig, PoolConfig
from cluster.core.ids import Role, WorkerId
from cluster.core.messages import RankEndpoint, WorkerHello, WorkerLoad, WorkerRef
from cluster.core.tenant_config import SloConfig
from cluster.sim.engine_model import EOS_TOKEN_ID
from cluster.sim.kernel import SECOND_NS
from cluster.sim.kv_memory import kv_layout
from cluster.sim.scenario import Scenario
from engine.core.scheduler import SchedulerConfig

MODEL_FINGERPRINT = "simulated"


def cluster_config(scenario: Scenario) -> ClusterConfig:
    """What the coordinator is given."""
    pools = [_pool(scenario, Role.DECODE, scenario.num_decode)]
    if scenario.num_prefill:
        pools.insert(0, _pool(scenario, Role.PREFILL, scenario.num_prefill))
    return ClusterConfig(
        name="sim",
        model=ModelConfig(path=MODEL_FINGERPRINT, max_model_tokens=scenario.max_model_tokens),
        pools=tuple(pools),
        front=FrontConfig(replicas=scenario.num_fronts),
        kv=KVConfig(block_size=scenario.block_size),
        disaggregation=scenario.disaggregation,
        coordinator=CoordinatorConfig(
            queue_limit=scenario.queue_limit,
            queue_timeout_s=scenario.queue_timeout_s,
            heartbeat_timeout_s=scenario.heartbeat_timeout_s,
            max_attempts=scenario.max_attempts,
            fetch_prefixes=scenario.fetch_prefixes,
            lease_ttl_s=scenario.push_limits.lease_ttl_ns / SECOND_NS,
        ),
        slo=SloConfig(ttft_ms=scenario.slo_ttft_ms),
        tenants=scenario.tenants,
    )


def _pool(scenario: Scenario, role: Role, replicas: int) -> PoolConfig:
    return PoolConfig(
        name=role.value,
        role=role,
        replicas=replicas,
        kv_blocks=scenario.num_blocks,
        kv_bytes=None,
        max_step_tokens=scenario.max_step_tokens,
        prefill_chunk_tokens=scenario.chunk_tokens(role),
        max_running=scenario.max_running,
    )


def role_of(scenario: Scenario, name: str) -> Role:
    """That a worker has until it is flipped. Names of prefill workers begin with `p`."""
    return Role.PREFILL if name in scenario.prefill_names else Role.DECODE


def worker_config(scenario: Scenario, worker: WorkerId, *, role: Role, token_address: str) -> WorkerStateConfig:
    """What one life of a worker is given."""
    endpoint = RankEndpoint(rank=0, transport="sim", endpoint=str(worker).encode())
    hello = WorkerHello(
        ref=WorkerRef(worker=worker, token_address=token_address, endpoints=(endpoint,)),
        pool=role.value,
        role=role,
        host=worker.name,
        pid=worker.incarnation,
        model=MODEL_FINGERPRINT,
        compatibility="sim",
        compatibility_details="sim",
        block_size=scenario.block_size,
        block_size_bytes=kv_layout(scenario.num_layers, scenario.block_size).block_size_bytes,
        max_model_tokens=scenario.max_model_tokens,
        load=WorkerLoad(),
    )
    return WorkerStateConfig(
        hello=hello,
        scheduler=SchedulerConfig(
            block_size=scenario.block_size,
            max_step_tokens=scenario.max_step_tokens,
            max_running=scenario.max_running,
            prefill_chunk_tokens=scenario.chunk_tokens(role),
            max_model_tokens=scenario.max_model_tokens,
            eos_token_ids=frozenset((EOS_TOKEN_ID,)),
        ),
        num_blocks=scenario.num_blocks,
        num_host_blocks=scenario.num_host_blocks,
        num_disk_blocks=scenario.num_disk_blocks,
        num_layers=scenario.num_layers,
        model_fingerprint=MODEL_FINGERPRINT,
        checksums=scenario.checksums,
        push_limits=scenario.push_limits,
        limits=scenario.agent_limits,
    )
