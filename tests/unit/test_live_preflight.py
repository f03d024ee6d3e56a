"""What a cluster file asks for against what this machine has, before anything is started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from cluster.core.errors import ConfigError
from cluster.live import model_check, preflight
from cluster.live.config_file import ClusterFile, parse_cluster_text
from cluster.live.plan import journal_dir_of, make_plan
from cluster.live.preflight import (
    CONTROL_PLANE_BYTES,
    WORKER_BYTES,
    ModelFacts,
    check_cores,
    check_journal,
    check_memory,
    check_model,
    check_ports,
    check_transport,
    memory_need,
)
from engine.model.config import ModelConfig
from tests.support.engine_model import tensor_shapes, write_safetensors

CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FILE = """\
version: 1
model:
  path: model
pools:
  - {name: p, role: prefill, kv_blocks: 64}
  - {name: d, role: decode, kv_blocks: 128, replicas: 2}
front:
  port: 0
"""
GPU_FILE = """\
version: 1
model:
  path: model
  dtype: bfloat16
pools:
  - {name: g, role: decode, device: cuda, kv_memory: 64GiB, replicas: 2}
  - {name: d, role: decode, kv_blocks: 128}
"""
TENSORS = {
    name: torch.zeros(shape, dtype=torch.bfloat16)
    for name, shape in tensor_shapes(ModelConfig.from_dict(CONFIG_JSON)).items()
}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, head_dim, float32


@pytest.fixture(autouse=True)
def checks_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each takes seconds to import torch. One test has it."""
    monkeypatch.setattr(preflight, "why_not_loadable", lambda directory: model_check.fault_of(directory) or None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG_JSON))
    write_safetensors(model / "model.safetensors", TENSORS)
    Tokenizer(BPE()).save(str(model / "tokenizer.json"))
    return tmp_path


def read(folder: Path, text: str = FILE) -> ClusterFile:
    return parse_cluster_text(text, "cluster.yaml", folder=folder)


def with_front(front: str) -> str:
    return FILE.replace("front:\n  port: 0", f"front: {{{front}}}")


def facts_of(folder: Path, text: str = FILE) -> ModelFacts:
    return check_model(read(folder, text), folder / "models")


def test_the_models_shape_is_read(folder: Path) -> None:
    facts = facts_of(folder)
    assert facts.directory == folder / "model"
    num_parameters = 128 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    assert facts.weights_bytes == num_parameters * 4, "bfloat16 on disk, float32 in memory"
    assert facts.block_bytes == BLOCK_BYTES
    assert facts.max_model_tokens == 512


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_is_refused(folder: Path, missing: str) -> None:
    (folder / "model" / missing).unlink()
    with pytest.raises(
        ConfigError, match=r"cluster.yaml:3: model.path: .*" + missing.replace("model.", r"\*?.?")
    ) as caught:
        facts_of(folder)
    assert caught.value.line == 3


def test_a_model_that_is_not_there_is_said_in_a_sentence(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"found /\S+/model, which has no config.json, expected a Hugging Face model"):
        facts_of(folder)
    with pytest.raises(ConfigError, match=r"found /nope, which does not exist, expected a Hugging Face model dir"):
        facts_of(folder, FILE.replace("path: model", "path: /nope"))


def test_a_model_that_cannot_be_served_says_why(folder: Path) -> None:
    (folder / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"found a model that cannot be used \(.+\), expected one that Baton can"):
        facts_of(folder)


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in TENSORS.items() if key != name}


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (without(Q_PROJ), rf"tensor {Q_PROJ}, of shape \(64, 64\), is missing"),
        (TENSORS | {Q_PROJ: torch.zeros(63, 64)}, rf"{Q_PROJ} in .* has shape \(63, 64\), expected \(64, 64\)"),
        (TENSORS | {Q_PROJ: torch.zeros((64, 64), dtype=torch.uint8)}, rf"{Q_PROJ} in .* has dtype U8; supported: F32"),
        ({}, "tensor model.embed_tokens.weight, of .* is missing"),
    ],
)
def test_weights_that_cannot_be_loaded_are_found_by_their_headers(
    folder: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    write_safetensors(folder / "model" / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=rf"cluster.yaml:3: .* a model that cannot be loaded \(.*{reason}"):
        facts_of(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 1000, b"\xff" * 7, (5).to_bytes(8, "little") + b"{{{{{"])
def test_a_file_of_weights_that_is_none_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model" / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(/.*/model\.safetensors is .*"):
        facts_of(folder)


def test_a_truncated_file_of_weights_is_refused(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.norm\.weight in .* does not fit: truncated"):
        facts_of(folder)


def test_the_model_is_looked_at_in_a_process_of_its_own(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    assert model_check.why_not_loadable(folder / "model") is None
    path.write_bytes(path.read_bytes()[:-1])
    assert "does not fit: truncated" in str(model_check.why_not_loadable(folder / "model"))


def test_shards_are_those_of_the_index(folder: Path) -> None:
    model = folder / "model"
    (model / "model.safetensors").rename(model / "part-1.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "part-1.safetensors")}))
    facts_of(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "part-2.safetensors")}))
    with pytest.raises(ConfigError, match=r"names the file 'part-2\.safetensors', which is not in"):
        facts_of(folder)
    index.write_text("[]")
    with pytest.raises(ConfigError, match="is not a safetensors index"):
        facts_of(folder)
    index.unlink()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor"):
        facts_of(folder)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer.json", "", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "the chat template in .* is malformed"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template in tokenizer_config.json must be text"),
        ("chat_template.jinja", "{{", r"the chat template in .*chat_template\.jinja is malformed"),
        ("chat_template.jinja", "\udcff", r"chat_template\.jinja is not valid UTF-8"),
    ],
)
def test_a_tokenizer_or_template_that_cannot_be_used_is_refused(
    folder: Path, name: str, content: str, reason: str
) -> None:
    (folder / "model" / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"cluster.yaml:3: .* cannot be loaded \(.*{reason}"):
        facts_of(folder)


def test_a_preset_that_was_not_imported_says_how_to(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.yaml:3: model.preset: .*baton model import"):
        facts_of(folder, FILE.replace("path: model", "preset: smollm2-135m-instruct"))


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    text = FILE.replace("path: model", "{path: model, max_model_tokens: 513}").replace("model:\n  {", "model: {")
    with pytest.raises(ConfigError, match=r"max_model_tokens: found 513, expected at most the model's own 512"):
        facts_of(folder, text)


def test_a_pool_that_cannot_hold_one_sequence_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cluster.yaml:5: pools\[0\].kv_blocks: found a pool of 31 blocks, expected at least 32"
    ):
        facts_of(folder, FILE.replace("kv_blocks: 64", "kv_blocks: 31"))


def test_memory_is_counted_by_worker(folder: Path) -> None:
    facts = facts_of(folder)
    need = memory_need(read(folder).config, facts)
    assert (
        need.total_bytes
        == CONTROL_PLANE_BYTES + 3 * (WORKER_BYTES + facts.weights_bytes) + (64 + 2 * 128) * BLOCK_BYTES
    )


def test_memory_that_suffices_is_enough_and_a_byte_less_is_not(folder: Path) -> None:
    facts = facts_of(folder)
    total = memory_need(read(folder).config, facts).total_bytes
    check_memory(read(folder), facts, available_bytes=total)
    with pytest.raises(ConfigError, match="pools: found workers that need"):
        check_memory(read(folder), facts, available_bytes=total - 1)


def test_what_would_fit_fits(folder: Path) -> None:
    large = FILE.replace("kv_blocks: 64", "kv_memory: 64GiB").replace("kv_blocks: 128", "kv_memory: 64GiB")
    facts = facts_of(folder, large)
    available = 8 * 2**30
    with pytest.raises(ConfigError) as caught:
        check_memory(read(folder, large), facts, available_bytes=available)
    size = caught.value.hint.removeprefix("kv_memory: ").removesuffix(" in every pool would fit")
    check_memory(read(folder, large.replace("64GiB", size)), facts, available_bytes=available)


def test_fewer_workers_are_proposed_where_no_pool_size_helps(folder: Path) -> None:
    many = FILE.replace("replicas: 2", "replicas: 50")
    with pytest.raises(ConfigError) as caught:
        check_memory(read(folder, many), facts_of(folder, many), available_bytes=4 * 2**30)
    assert caught.value.hint.startswith("at most 4 workers would fit")


def test_a_hopeless_machine_is_told_so(folder: Path) -> None:
    with pytest.raises(ConfigError, match="too small"):
        check_memory(read(folder), facts_of(folder), available_bytes=2**30)


def test_a_port_in_use_is_refused_with_its_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = FILE.replace("port: 0", f"port: {taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"cluster.yaml:8: front.port: .*in use"):
            check_ports(read(folder, text))
    check_ports(read(folder, text))


def test_a_metrics_port_of_any_worker_that_is_taken_is_refused(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = FILE + f"metrics: {{port: {taken.getsockname()[1] - 2}}}\n"
        with pytest.raises(ConfigError, match=r"cluster.yaml:9: metrics.port: .*in use"):
            check_ports(read(folder, text))
    with pytest.raises(ConfigError, match=r"metrics.port: found 9402, which is a front's"):
        check_ports(read(folder, with_front("port: 9402") + "metrics: {port: 9400}\n"))


@pytest.mark.bad_day(30)
def test_workers_take_metrics_ports_in_a_row_or_any(folder: Path) -> None:
    fixed = make_plan(read(folder, FILE + "metrics: {port: 9400}\n"), facts_of(folder))
    assert [worker.metrics_port for worker in fixed.workers] == [9400, 9401, 9402]
    assert {worker.metrics_port for worker in make_plan(read(folder, FILE), facts_of(folder)).workers} == {0}


def test_an_address_that_is_not_ours_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"front\.port"):
        check_ports(read(folder, with_front("host: 203.0.113.7, port: 9")))


def test_a_core_that_is_not_there_is_refused(folder: Path) -> None:
    file = read(folder, FILE.replace("kv_blocks: 64", "kv_blocks: 64, cores: [[0, 7]]"))
    check_cores(file, frozenset(range(8)))
    with pytest.raises(
        ConfigError, match=r"pools\[0\].cores\[0\]: found core 7, expected cores of this machine: 0-3, 6"
    ):
        check_cores(file, frozenset([0, 1, 2, 3, 6]))


def test_a_transport_that_is_not_installed_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "why_unavailable", {"shm": None, "nixl": "transport nixl needs nixl"}.__getitem__)
    for kind in ("auto", "shm"):
        check_transport(read(folder, FILE + f"transport: {{kind: {kind}}}\n"))
    with pytest.raises(ConfigError, match=r"transport\.kind: found nixl, which cannot be used .*needs nixl"):
        check_transport(read(folder, FILE + "transport: {kind: nixl}\n"))


@pytest.mark.bad_day(30)
def test_the_plan_names_everything_and_takes_free_ports(folder: Path) -> None:
    file = read(folder, with_front("port: 0, replicas: 2"))
    plan = make_plan(file, facts_of(folder))
    assert [worker.name for worker in plan.workers] == ["p-0", "d-0", "d-1"]
    assert [worker.num_blocks for worker in plan.workers] == [64, 128, 128]
    assert [front.name for front in plan.fronts] == ["front-0", "front-1"]
    ports = {plan.coordinator_port, *(front.port for front in plan.fronts)}
    assert len(ports) == 3 and 0 not in ports


def test_several_fronts_take_ports_in_a_row(folder: Path) -> None:
    file = read(folder, with_front("port: 8700, replicas: 2"))
    assert [front.port for front in make_plan(file, facts_of(folder)).fronts] == [8700, 8701]


def test_a_gpus_pool_takes_no_memory_of_the_machine_and_a_gpu_for_each_worker(folder: Path) -> None:
    facts = facts_of(folder, GPU_FILE)
    (_, on_gpu_bytes), (_, on_host_bytes) = memory_need(read(folder, GPU_FILE).config, facts).pools
    assert on_host_bytes - on_gpu_bytes == 128 * facts.block_bytes
    assert [worker.num_gpus for worker in make_plan(read(folder, GPU_FILE), facts).workers] == [1, 1, 0]


def test_a_journal_directory_that_cannot_be_used_is_refused(folder: Path) -> None:
    (folder / "a-file").write_text("")
    file = read(folder, FILE + f"journal: {{directory: {folder}/a-file/journal}}\n")
    with pytest.raises(ConfigError, match=r"journal.directory: found .*a-file/journal \(Not a directory\)"):
        check_journal(file, journal_dir_of(file.config, None))
    check_journal(file, None)
    check_journal(file, folder / "made")
    assert (folder / "made").is_dir()
