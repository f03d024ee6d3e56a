"""Which device serves a model, what is said where it cannot, and the runner on a GPU that is none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine import runner as runner_module
from engine.attention import flashinfer_attention, select
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.kv_cache import KVCache, KVLayout
from engine.attention.select import DeviceUnavailableError, select_device
from engine.core.step import StepPlan
from engine.model.device_sampler import DeviceSampler
from engine.model.placement import on_device
from engine.model.weights import ModelWeights
from engine.runner import Runner
from tests.support.engine_model import GreedyLoop, make_step, write_tiny_model
from tests.support.fake_flashinfer import FakeFlashInfer
from tests.support.host_device import HostDevice

BLOCK_SIZE = 8


def layout(**changes: Any) -> KVLayout:
    values = {
        "num_blocks": 40,
        "num_layers": 1,
        "num_kv_heads": 2,
        "block_size": BLOCK_SIZE,
        "head_dim": 64,
        "dtype": "bfloat16",
    }
    return KVLayout(**{**values, **changes})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that it has a GPU, and FlashInfer can be imported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    set_library(monkeypatch, lambda: ModuleType("flashinfer"))


def set_library(monkeypatch: pytest.MonkeyPatch, make: Callable[[], ModuleType]) -> None:
    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: make() if name == "flashinfer" else original(name))


def fail() -> ModuleType:
    raise ImportError("no module of that name")


@pytest.mark.usefixtures("gpu")
def test_a_gpu_serves_what_it_can() -> None:
    assert select_device("cuda", layout()) == "cuda"
    assert select_device("auto", layout()) == "cuda"
    assert select_device("cpu", layout()) == "cpu"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"dtype": "float32"}, "bfloat16, not in float32"), ({"head_dim": 80}, "64, 128, 256 elements, not of 80")],
)
def test_what_it_cannot_is_served_from_the_cpu_or_refused(changes: dict[str, Any], reason: str) -> None:
    assert select_device("auto", layout(**changes)) == "cpu"
    with pytest.raises(DeviceUnavailableError, match=rf"device: cuda .*{reason}"):
        select_device("cuda", layout(**changes))


@pytest.mark.usefixtures("gpu")
def test_an_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert select_device("auto", layout()) == "cpu"
    with pytest.raises(DeviceUnavailableError, match=r"capability 7\.5, 8\.0 is needed"):
        select_device("cuda", layout())


@pytest.mark.usefixtures("gpu")
def test_what_is_missing_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_library(monkeypatch, fail)
    assert select_device("auto", layout()) == "cpu"
    with pytest.raises(DeviceUnavailableError, match=r"no module of that name.*install baton-cluster\[cuda\]"):
        select_device("cuda", layout())


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto", layout()) == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DeviceUnavailableError, match="torch finds no GPU"):
        select_device("cuda", layout())
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceUnavailableError, match=r"without CUDA: .*baton-cluster\[cuda\]"):
        select_device("cuda", layout())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_tiny_model(
        tmp_path / "model", head_dim=64, num_attention_heads=3, num_key_value_heads=1, dtype="bfloat16", vocab_size=64
    )
    return tmp_path / "model"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """The runner is given the host for a GPU."""
    device = HostDevice()

    def open_host(layout: KVLayout, max_sequence_tokens: int) -> tuple[KVCache, FlashInferBackend]:
        cache = KVCache.allocate(layout, device.device, num_scratch_blocks=1)
        backend = FlashInferBackend(
            FakeFlashInfer(device),
            device,  # type: ignore[arg-type]
            block_size=layout.block_size,
            scratch_block=layout.num_blocks,
            max_blocks_per_sequence=-(-max_sequence_tokens // layout.block_size),
        )
        return cache, backend

    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE_SIZE_BYTES", 4096)
    monkeypatch.setattr(select, "why_not_cuda", lambda layout: None)
    monkeypatch.setattr(runner_module, "open_cuda", open_host)
    return device


def test_a_model_answers_as_it_does_on_the_cpu(model_dir: Path, device: HostDevice) -> None:
    """Every token is the likeliest in the eyes of the CPU's engine too, or as good as that in bfloat16."""
    runner = Runner.from_directory(model_dir, "bfloat16", 60, BLOCK_SIZE, 1, device="cuda")
    runner._sampler = DeviceSampler(runner.config.eos_token_ids)  # the host's would be chosen for the host's memory
    runner.warm_up(16, 5)
    prompts = [[3, 9, 4, 1, 5] * 3, [7], [11, 12, 13, 60], [8] * 9, [5, 6]]
    outputs = GreedyLoop(runner, chunk_size=16, max_running=5).generate(prompts, max_tokens=12)
    assert device.num_replays > 8 and all(outputs)
    reference = Runner.from_directory(model_dir, "bfloat16", 60, BLOCK_SIZE, 1)
    for prompt, output in zip(prompts, outputs, strict=True):
        for position, token in enumerate(output):
            ids = [*prompt, *output[:position]]
            plan = StepPlan(step_id=0, sequences=[make_step(ids, 0, range(-(-len(ids) // BLOCK_SIZE)))])
            logits = reference.logits(plan)[0]
            assert logits[token] >= logits.max() - 0.03 * logits.abs().max()


def test_a_pool_in_given_memory_is_the_hosts(model_dir: Path, device: HostDevice) -> None:
    size_bytes = 20 * 3 * 1 * 2 * BLOCK_SIZE * 64 * 2
    buffer = bytearray(size_bytes)
    runner = Runner.from_directory(model_dir, "bfloat16", 20, BLOCK_SIZE, 1, buffer=buffer, device="auto")
    runner.run(StepPlan(step_id=0, sequences=[make_step([1, 2], 0, [0])]))
    assert device.num_replays == 0
    with pytest.raises(DeviceUnavailableError, match="device: cuda keeps keys and values in its own memory"):
        Runner.from_directory(model_dir, "bfloat16", 20, BLOCK_SIZE, 1, buffer=buffer, device="cuda")


def test_weights_that_are_shared_stay_shared() -> None:
    table = torch.zeros(4, 2)
    moved = on_device(
        ModelWeights(embedding_VE=table, layers=(), final_norm_E=torch.ones(2), head_VE=table), torch.device("meta")
    )
    assert moved.embedding_VE is moved.head_VE and moved.embedding_VE.device.type == "meta"
    assert moved.final_norm_E.device.type == "meta" and moved.layers == ()


def test_scratch_blocks_belong_to_the_layers_and_to_nobody_else() -> None:
    cache = KVCache.allocate(layout(num_layers=2), num_scratch_blocks=1)
    assert cache.pool_BLKCSD.shape == cache.layout.shape_BLKCSD
    assert len(cache.layer_BKCSD(1)) == cache.layout.num_blocks + 1
    cache.layer_BKCSD(1)[-1] = 1.0
    assert not cache.pool_BLKCSD.any()
