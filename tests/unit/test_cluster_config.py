"""The cluster file: what is accepted, and that every refusal names file, line, key, what was found and expected."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cluster.agent.limits import AgentLimits
from cluster.core.config import (
    CHECKSUMS,
    CHUNK_TOKENS,
    DEFAULT_KV_BYTES,
    LOCAL_CHUNK_TOKENS,
    MAX_RUNNING,
    ClusterConfig,
    parse_cluster_config,
)
from cluster.core.config_reader import KeyPath
from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.errors import ConfigError
from cluster.core.ids import Role
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.sampling import Checksums

MINIMAL: dict[str, Any] = {
    "version": 1,
    "model": {"preset": "smollm2-135m-instruct"},
    "pools": [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}],
}


def _no_lines(path: KeyPath) -> int | None:
    return None


def _parse(data: object) -> ClusterConfig:
    return parse_cluster_config(data, "cluster.yaml", _no_lines)


def _refusal(**changes: Any) -> ConfigError:
    data = copy.deepcopy(MINIMAL)
    data.update(changes)
    with pytest.raises(ConfigError) as caught:
        _parse(data)
    return caught.value


def _pools(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", **changes}]


def test_minimal_file_takes_defaults() -> None:
    config = _parse(MINIMAL)
    assert config.name == "baton"
    assert config.model.preset == "smollm2-135m-instruct" and config.model.path is None
    assert [pool.role for pool in config.pools] == [Role.PREFILL, Role.DECODE]
    assert config.pools[0].kv_bytes == DEFAULT_KV_BYTES and config.pools[0].kv_blocks is None
    assert config.kv.block_size == 16
    assert config.pool("decode") is config.pools[1] and config.pool("absent") is None


def test_every_option_is_read() -> None:
    config = _parse(
        {
            "version": 1,
            "name": "full",
            "model": {"path": "/models/m", "dtype": "bfloat16", "max_model_tokens": 2048, "revision": "r1"},
            "pools": [
                {
                    "name": "only",
                    "role": "decode",
                    "replicas": 2,
                    "device": "cuda",
                    "threads": 3,
                    "cores": [[0, 1], [2]],
                    "kv_blocks": 128,
                    "max_step_tokens": 100,
                    "prefill_chunk_tokens": 50,
                    "max_running": 7,
                }
            ],
            "kv": {"block_size": 32},
            "transport": {"kind": "shm", "checksum": "off"},
            "front": {"host": "0.0.0.0", "port": 0, "replicas": 2},
            "metrics": {"host": "0.0.0.0", "port": 9400},
            "coordinator": {
                "queue_limit": 5,
                "queue_timeout_s": 1,
                "heartbeat_timeout_s": 2.5,
                "max_attempts": 4,
                "lease_ttl_s": 3,
            },
        }
    )
    pool = config.pools[0]
    assert (pool.replicas, pool.threads, pool.cores, pool.kv_blocks, pool.kv_bytes) == (2, 3, ((0, 1), (2,)), 128, None)
    assert (pool.device, pool.max_step_tokens, pool.prefill_chunk_tokens, pool.max_running) == ("cuda", 100, 50, 7)
    assert config.model.path == "/models/m" and config.model.max_model_tokens == 2048
    assert config.model.dtype == "bfloat16" and config.model.revision == "r1"
    assert config.kv.block_size == 32 and (config.transport.kind, config.transport.checksum) == ("shm", "off")
    assert (config.front.host, config.front.port, config.front.replicas) == ("0.0.0.0", 0, 2)
    assert (config.metrics.host, config.metrics.port) == ("0.0.0.0", 9400)
    assert config.coordinator.queue_timeout_s == 1.0 and config.coordinator.max_attempts == 4


def test_a_gpu_is_for_requests_that_one_worker_runs_and_for_bfloat16() -> None:
    assert [pool.device for pool in _parse(MINIMAL).pools] == ["cpu", "cpu"]
    model = {"preset": "smollm2-135m-instruct", "dtype": "bfloat16"}
    error = _refusal(model=model, pools=_pools(device="cuda"))
    assert error.path == "pools[1].device" and "prefill" in error.found and "not pushed" in error.hint
    error = _refusal(pools=_pools(device="cuda")[1:])
    assert error.path == "pools[0].device" and "float32" in error.found and "bfloat16" in error.expected
    assert _parse({**MINIMAL, "model": model, "pools": _pools(device="cuda")[1:]}).pools[0].device == "cuda"


def test_short_steps_leave_room_for_prompts_beside_the_answers() -> None:
    pool = _parse({**MINIMAL, "pools": _pools(max_step_tokens=64)}).pools[1]
    assert (pool.max_running, pool.prefill_chunk_tokens) == (48, 64)


def test_decode_reads_prompts_in_small_chunks_where_it_is_not_its_work() -> None:
    beside, alone = _parse({**MINIMAL, "pools": _pools()}), _parse({**MINIMAL, "pools": _pools()[1:]})
    assert [pool.prefill_chunk_tokens for pool in beside.pools] == [CHUNK_TOKENS, LOCAL_CHUNK_TOKENS]
    assert alone.pools[0].prefill_chunk_tokens == CHUNK_TOKENS
    assert _parse({**MINIMAL, "pools": _pools(prefill_chunk_tokens=96)}).pools[1].prefill_chunk_tokens == 96


def test_the_file_may_ask_for_every_kind_of_checksums_that_workers_know() -> None:
    assert sorted(CHECKSUMS) == sorted(checksums.value for checksums in Checksums)
    for checksum in CHECKSUMS:
        assert _parse({**MINIMAL, "transport": {"checksum": checksum}}).transport.checksum == checksum
    assert _parse(MINIMAL).transport.checksum == "full"


def test_a_worker_takes_as_many_requests_as_the_file_may_say() -> None:
    assert min(AgentLimits().max_legs, PushLimits().max_pushes) >= MAX_RUNNING


def test_host_cache_is_off_unless_it_is_asked_for() -> None:
    assert [pool.host_cache_bytes for pool in _parse({**MINIMAL, "pools": _pools()}).pools] == [0, 0]
    assert _parse({**MINIMAL, "pools": _pools(host_cache="3GiB")}).pools[1].host_cache_bytes == 3 * 2**30
    on_disk = _pools(host_cache="1GiB", disk_cache="9GiB", disk_cache_directory="/var/kv")
    pool = _parse({**MINIMAL, "pools": on_disk}).pools[1]
    assert (pool.disk_cache_bytes, pool.disk_cache_directory) == (9 * 2**30, "/var/kv")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("512MiB", 2**29), ("1.5 GiB", 3 * 2**29), ("2GB", 2 * 10**9), (2**21, 2**21), ("1048576B", 2**20)],
)
def test_kv_memory_sizes(text: object, size_bytes: int) -> None:
    data = {**MINIMAL, "pools": _pools(kv_memory=text)}
    assert _parse(data).pools[1].kv_bytes == size_bytes


def test_unknown_key_suggests_the_nearest() -> None:
    error = _refusal(pools=_pools(replica=2))
    assert error.path == "pools[1].replica"
    assert "'replica'" in error.found and "'replicas'" in error.hint and "kv_blocks" in error.expected


def test_unknown_key_of_another_type() -> None:
    error = _refusal(front={1: 2})
    assert error.path == "front" and "unknown key 1" in error.found


@pytest.mark.parametrize(
    ("changes", "path", "found", "expected"),
    [
        ({"pools": _pools(replicas="two")}, "pools[1].replicas", "'two' (text)", "integer from 1"),
        ({"pools": _pools(replicas=True)}, "pools[1].replicas", "true/false", "integer"),
        ({"pools": _pools(replicas=0)}, "pools[1].replicas", "0 (integer)", "integer from 1"),
        ({"pools": _pools(replicas=-3)}, "pools[1].replicas", "-3", "integer from 1"),
        ({"pools": _pools(disk_cache="1GiB", disk_cache_directory="/kv")}, "pools[1].disk_cache", "host_cache", "both"),
        ({"pools": _pools(host_cache="1GiB", disk_cache="1GiB")}, "pools[1].disk_cache", "directory", "the path"),
        ({"pools": _pools(disk_cache_directory="kv")}, "pools[1].disk_cache_directory", "'kv'", "absolute"),
        ({"pools": _pools(kv_memory="lots")}, "pools[1].kv_memory", "'lots'", "size such as 512MiB"),
        ({"pools": _pools(kv_memory="0MiB")}, "pools[1].kv_memory", "'0MiB'", "from 1MiB"),
        ({"pools": _pools(kv_memory=["1"])}, "pools[1].kv_memory", "a list", "size"),
        ({"pools": _pools(kv_memory="1GiB", kv_blocks=4)}, "pools[1].kv_memory", "together", "one of the two"),
        ({"pools": _pools(cores=[[0]], replicas=2)}, "pools[1].cores", "1 lists", "2, one for each"),
        ({"pools": _pools(cores=[0])}, "pools[1].cores[0]", "0 (integer)", "list of integers"),
        ({"pools": _pools(cores=[["a"]])}, "pools[1].cores[0][0]", "'a'", "integer from 0"),
        ({"pools": _pools(cores=3)}, "pools[1].cores", "3", "list of lists"),
        ({"pools": _pools(max_step_tokens=8, max_running=9)}, "pools[1].max_running", "9", "at most one"),
        ({"pools": _pools(max_step_tokens=8, prefill_chunk_tokens=9)}, "pools[1].prefill_chunk_tokens", "9", "to 8"),
        ({"pools": _pools(max_step_tokens=64, max_running=49)}, "pools[1].max_step_tokens", "64", "at least"),
        ({"pools": _pools(max_step_tokens=16)}, "pools[1].max_step_tokens", "16", "max_running + one block = 17"),
        ({"pools": _pools(prefill_chunk_tokens=15)}, "pools[1].prefill_chunk_tokens", "15", "one block, 16"),
        ({"pools": _pools(role="encode")}, "pools[1].role", "'encode'", "prefill, decode"),
        ({"pools": _pools(name="Not A Name")}, "pools[1].name", "'Not A Name'", "lower-case"),
        ({"pools": [{"role": "decode"}]}, "pools[0].name", "nothing", "name"),
        ({"pools": [{"name": "x"}]}, "pools[0].role", "nothing", "prefill, decode"),
        ({"pools": []}, "pools", "a list of 0", "at least one"),
        ({"pools": {"a": 1}}, "pools", "a mapping", "a list"),
        ({"pools": ["a"]}, "pools[0]", "'a'", "a mapping"),
        ({"pools": [{"name": "p", "role": "prefill"}]}, "pools", "no pool with role decode", "at least one"),
        ({"pools": _pools(name="p")}, "pools[1].name", "'p' a second time", "its own"),
        ({"version": 2}, "version", "2", "version 1"),
        ({"version": "1"}, "version", "'1'", "integer"),
        ({"version": None}, "version", "nothing", "integer"),
        ({"model": {}}, "model", "neither", "one of the two"),
        ({"model": {"path": "a", "preset": "smollm2-135m-instruct"}}, "model", "both", "one of the two"),
        ({"model": {"preset": "smollm2"}}, "model.preset", "'smollm2'", "smollm2-135m-instruct"),
        ({"model": {"path": 5}}, "model.path", "5", "path of a model"),
        ({"model": {"path": "a", "dtype": "int8"}}, "model.dtype", "'int8'", "float32, bfloat16"),
        ({"model": "a"}, "model", "'a'", "a mapping"),
        ({"transport": {"kind": "pigeon"}}, "transport.kind", "'pigeon'", "auto"),
        ({"transport": {"checksum": "some"}}, "transport.checksum", "'some'", "full, sampled, off"),
        ({"transport": {"checksum": False}}, "transport.checksum", "true/false", "full, sampled, off"),
        ({"front": {"port": 70000}}, "front.port", "70000", "to 65535"),
        ({"metrics": {"port": 65535}}, "metrics.port", "65535", "at most 65534, to leave a port for each of 2 workers"),
        ({"coordinator": {"queue_timeout_s": "soon"}}, "coordinator.queue_timeout_s", "'soon'", "number from"),
        ({"coordinator": {"lease_ttl_s": float("nan")}}, "coordinator.lease_ttl_s", "nan", "number from"),
        ({"kv": {"block_size": 0}}, "kv.block_size", "0", "from 1"),
        ({"name": 7}, "name", "7", "a name"),
    ],
)
def test_refusals_say_what_was_found_and_expected(
    changes: dict[str, Any], path: str, found: str, expected: str
) -> None:
    error = _refusal(**changes)
    assert error.path == path
    assert found in error.found
    assert expected in error.expected
    assert str(error).startswith("cluster.yaml: ")


def test_transports_are_chosen_by_name_and_nccl_is_not_among_them() -> None:
    for kind in ("auto", "shm", "nixl", "ucx"):
        assert _parse({**MINIMAL, "transport": {"kind": kind}}).transport.kind == kind
    assert str(_refusal(transport={"kind": "nccl"})).endswith("one of auto, shm, nixl, ucx (nccl is not offered yet)")


def test_a_pool_must_hold_one_longest_sequence() -> None:
    error = _refusal(model={"preset": "smollm2-135m-instruct", "max_model_tokens": 1025}, pools=_pools(kv_blocks=64))
    assert error.path == "pools[1].kv_blocks" and "at least 65 blocks" in error.expected


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_a_file_that_is_no_mapping(data: object) -> None:
    with pytest.raises(ConfigError, match="a mapping of keys to values"):
        _parse(data)


def test_line_of_the_key_or_of_what_is_around_it() -> None:
    lines: dict[KeyPath, int] = {(): 1, ("pools",): 4, ("pools", 1): 7, ("pools", 1, "replicas"): 9}
    with pytest.raises(ConfigError) as wrong:
        parse_cluster_config({**MINIMAL, "pools": _pools(replicas=0)}, "c.yaml", lines.get)
    assert wrong.value.line == 9 and str(wrong.value).startswith("c.yaml:9: pools[1].replicas: found 0")
    with pytest.raises(ConfigError) as missing:
        parse_cluster_config({**MINIMAL, "pools": [*_pools()[:1], {"name": "d"}]}, "c.yaml", lines.get)
    assert missing.value.line == 7 and missing.value.path == "pools[1].role"


@pytest.mark.parametrize("seconds", [1e300, float("inf"), float("nan"), 10**400, 3600.5, 0])
def test_seconds_are_as_many_as_can_be_waited_for(seconds: float) -> None:
    for key in ("queue_timeout_s", "heartbeat_timeout_s", "lease_ttl_s"):
        error = _refusal(coordinator={key: seconds})
        assert error.path == f"coordinator.{key}" and error.expected.endswith("to 3600")


# ---- disaggregation -------------------------------------------------------------------------------------------


def test_the_break_even_decides_unless_the_file_does() -> None:
    assert _parse(MINIMAL).disaggregation == DisaggregationConfig(max_local_tokens=None, may_stay=True)
    never = {"local_prefill": "never", "stay": "never"}
    assert _parse({**MINIMAL, "disaggregation": never}).disaggregation == ALWAYS_PUSHED
    fixed = {"local_prefill": 64, "stay": "auto", "max_tpot_ms": 40}
    expected = DisaggregationConfig(max_local_tokens=64, may_stay=True, max_tpot_ms=40.0)
    assert _parse({**MINIMAL, "disaggregation": fixed}).disaggregation == expected


@pytest.mark.parametrize(
    ("section", "path", "found", "expected", "hint"),
    [
        (
            {"local_prefill": "nevr"},
            "local_prefill",
            "'nevr' (text)",
            "one of auto, never, or an integer from 1 to",
            "never",
        ),
        ({"local_prefill": 0}, "local_prefill", "0 (integer)", "one of auto, never, or an integer from 1 to", ""),
        ({"local_prefill": True}, "local_prefill", "True (true/false)", "one of auto, never, or an integer", ""),
        ({"stay": "always"}, "stay", "'always' (text)", "one of auto, never", ""),
        ({"max_tpot_ms": 0}, "max_tpot_ms", "0 (integer)", "a number from 0.01 to 60000", ""),
        (
            {"max_tpot": 30},
            "max_tpot",
            "the unknown key 'max_tpot'",
            "one of local_prefill, stay, max_tpot_ms",
            "max_tpot_ms",
        ),
    ],
)
def test_what_the_section_does_not_take(
    section: dict[str, Any], path: str, found: str, expected: str, hint: str
) -> None:
    error = _refusal(disaggregation=section)
    assert error.path == f"disaggregation.{path}"
    assert error.found == found and expected in error.expected and hint in error.hint


def test_the_coordinators_metrics_have_a_port_of_their_own() -> None:
    assert _parse({**MINIMAL, "metrics": {"port": 9000, "coordinator_port": 9002}}).metrics.coordinator_port == 9002
    error = _refusal(metrics={"port": 9000, "coordinator_port": 9001})
    assert error.path == "metrics.coordinator_port" and "9001, which is a worker's" in error.found
