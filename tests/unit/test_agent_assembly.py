"""What a worker on a GPU is told to take: whole requests, since no peer reaches its pool."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.agent.assembly import load_engine, state_config
from cluster.agent.main import main
from cluster.agent.settings import WorkerSettings
from cluster.core.commands import Prefill, Reserve, RunLocal
from cluster.core.ids import Role, WorkerId
from decode_worker.profile import PROFILE as DECODE
from engine.core.scheduler import SchedulerConfig
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from prefill_worker.profile import PROFILE as PREFILL
from tests.support.engine_model import write_tiny_model

SETTINGS = WorkerSettings(
    worker=WorkerId("d0", 1),
    pool="decode",
    role=Role.DECODE,
    coordinator_address="127.0.0.1:1",
    model_dir=Path("absent"),
    dtype="bfloat16",
    num_blocks=64,
)


def engine() -> Any:
    return SimpleNamespace(
        disk_cache=None,
        on_disk=(),
        transport=SimpleNamespace(name="shm", endpoint=lambda: b""),
        scheduler=SchedulerConfig(
            block_size=16,
            max_step_tokens=64,
            max_running=8,
            prefill_chunk_tokens=32,
            max_model_tokens=256,
            eos_token_ids=frozenset(),
        ),
        layout=KVLayout(
            groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=64),), block_size=16, dtype="bfloat16"
        ),
        fingerprint="f" * 32,
        name="tiny",
        computed_by="native",
    )


@pytest.mark.parametrize(("device", "accepts"), [("cpu", (Reserve, RunLocal, Prefill)), ("cuda", (RunLocal,))])
def test_pushes_are_for_host_memory(device: str, accepts: tuple[type, ...]) -> None:
    config = state_config(dataclasses.replace(SETTINGS, device=device), DECODE, engine(), "127.0.0.1:2", "127.0.0.1:3")
    assert config.accepts == accepts


def test_a_prefill_worker_has_to_push(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, dtype="bfloat16")
    settings = dataclasses.replace(SETTINGS, role=Role.PREFILL, model_dir=tmp_path, device="cuda")
    with pytest.raises(ValueError, match="device: a prefill worker pushes KV"):
        load_engine(settings, PREFILL)


@pytest.mark.parametrize("seconds", ["1e300", "inf", "nan", "0", "3600.5"])
def test_a_grace_that_cannot_be_waited_for_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--coordinator", "127.0.0.1:1", "--model", "absent", "--kv-blocks", "1", "--name", "d0"]
    with pytest.raises(SystemExit) as ended:
        main(DECODE, [*needed, "--coordinator-grace", seconds])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"--coordinator-grace: {seconds} is not above 0 and at most 3600" in told
