"""Helpers of the engine's numeric tests: step plans by hand, a greedy loop, tiny random models, the real model."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from engine.core.step import SequenceKey, SequenceStep, StepPlan
from engine.model.config import ModelConfig
from engine.model.importer import import_model
from engine.model.packaged_models import GEMMA3, SMOLLM2, ModelImportError, PackagedModel
from engine.runner import Runner

MODEL_CACHE_DIR = Path.home() / ".cache" / "baton" / "models"
REFERENCE_FILES = {SMOLLM2: "smollm2_float32_greedy.json", GEMMA3: "gemma3_float32_greedy.json"}
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "dtype": "float32",
}


@functools.cache
def real_model_dir(model: PackagedModel = SMOLLM2) -> tuple[Path | None, str]:
    """The imported model, or None and why it cannot be imported here."""
    try:
        return import_model(model.name, MODEL_CACHE_DIR), ""
    except ModelImportError as error:
        return None, str(error)


def reference_path(model: PackagedModel) -> Path:
    return Path(__file__).parents[1] / "reference" / REFERENCE_FILES[model]


@functools.cache
def reference(model: PackagedModel = SMOLLM2) -> dict[str, Any]:
    """What transformers generates greedily in float32, made by `tests.reference.make_reference`."""
    content: dict[str, Any] = json.loads(reference_path(model).read_text(encoding="utf-8"))
    return content


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of a checkpoint of the Llama family without biases."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough that a tiny model's greedy tokens vary."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = torch.randn(shape, generator=generator) * 0.3
        tensors[name] = values + 1.0 if "norm" in name else values
    return tensors


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The file format, written out: length, JSON header, data."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        data += raw
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_tiny_model(directory: Path, seed: int = 0, **changes: Any) -> ModelConfig:
    """A random Llama in `directory`: TINY_CONFIG with `changes`."""
    raw = {**TINY_CONFIG, **changes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_dict(raw)
    write_safetensors(directory / "model.safetensors", random_tensors(config, seed))
    return config


def make_step(
    token_ids: Sequence[int],
    start: int,
    block_table: Sequence[int],
    *,
    sample: bool = True,
    sampling: SamplingParams | None = None,
    request_id: str = "r",
    choice: int = 0,
    position: int = 0,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    twins: Sequence[int] = (),
    scored_ids: Sequence[int] = (),
) -> SequenceStep:
    return SequenceStep(
        key=SequenceKey(request_id, 1, choice),
        token_ids=list(token_ids),
        start=start,
        block_table=list(block_table),
        sample=sample,
        sampling=sampling or SamplingParams(),
        position=position,
        prompt_ids=list(prompt_ids),
        output_ids=list(output_ids),
        twins=tuple(twins),
        scored_ids=list(scored_ids),
    )


def engine_alone(model: Path, context_tokens: int = 1024) -> Callable[[RequestBody], list[int]]:
    """What the engine alone draws, one sequence at a time and without chunks."""
    block_size = 16
    num_blocks = context_tokens // block_size
    runner = Runner.from_directory(model, "float32", num_blocks, block_size, 1)
    table = list(range(num_blocks))

    def draw(body: RequestBody) -> list[int]:
        output: list[int] = []
        tokens, start = list(body.prompt_ids), 0
        while len(output) < body.sampling.max_tokens:
            step = make_step(
                tokens,
                start,
                table,
                sampling=body.sampling,
                position=len(output),
                prompt_ids=body.prompt_ids,
                output_ids=output,
            )
            ((drawn,),) = runner.run(StepPlan(step_id=0, sequences=[step])).tokens
            output.append(drawn.token_id)
            tokens, start = [drawn.token_id], start + len(tokens)
        return output

    return draw


class GreedyLoop:
    """Generates for several prompts at once with a runner: chunks of prompts beside decoding sequences.

    Each sequence takes the blocks it needs from a shared list when it starts and gives them back when it ends.
    """

    def __init__(self, runner: Runner, *, chunk_size: int, max_running: int) -> None:
        self._runner = runner
        self._chunk_size = chunk_size
        self._max_running = max_running
        self._free_blocks = list(reversed(range(runner.cache.layout.num_blocks)))
        self.max_batch = 0

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting = list(range(len(prompts)))
        running: dict[int, tuple[list[int], int]] = {}  # index -> (block table, tokens in the pool)
        step_id = 0
        while waiting or running:
            while waiting and len(running) < self._max_running:
                table = self._take_blocks(len(prompts[waiting[0]]) + max_tokens)
                if table is None:
                    break
                running[waiting.pop(0)] = (table, 0)
            assert running, "the pool is too small for one sequence"
            self._step(step_id, prompts, outputs, running, max_tokens)
            step_id += 1
        return outputs

    def _step(
        self,
        step_id: int,
        prompts: Sequence[Sequence[int]],
        outputs: list[list[int]],
        running: dict[int, tuple[list[int], int]],
        max_tokens: int,
    ) -> None:
        steps = []
        budget = self._chunk_size
        scheduled = []
        for index in sorted(running, key=lambda i: len(outputs[i]) == 0):
            table, start = running[index]
            ids = [*prompts[index], *outputs[index]]
            count = min(len(ids) - start, budget)
            if count == 0:
                continue
            budget -= count
            steps.append(
                make_step(
                    ids[start : start + count],
                    start,
                    table,
                    sample=start + count == len(ids),
                    request_id=str(index),
                    position=len(outputs[index]),
                )
            )
            scheduled.append((index, start + count))
        self.max_batch = max(self.max_batch, len(steps))
        result = self._runner.run(StepPlan(step_id=step_id, sequences=steps))
        assert result.step_id == step_id
        for (index, in_pool), step, tokens in zip(scheduled, steps, result.tokens, strict=True):
            table, _ = running[index]
            running[index] = (table, in_pool)
            assert len(tokens) == step.sample
            for token in tokens:
                outputs[index].append(token.token_id)
                if token.token_id in self._runner.config.eos_token_ids or len(outputs[index]) == max_tokens:
                    self._free_blocks += running.pop(index)[0]

    def _take_blocks(self, num_tokens: int) -> list[int] | None:
        count = -(-num_tokens // self._runner.cache.layout.block_size)
        if count > len(self._free_blocks):
            return None
        return [self._free_blocks.pop() for _ in range(count)]
