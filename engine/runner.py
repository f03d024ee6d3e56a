"""Runs the plans of the scheduler on the model: StepPlan in, StepResult out."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention.base import Backend, LayerWritten
from engine.attention.cpu import NativeCpuBackend
from engine.attention.cuda_select import open_cuda
from engine.attention.kv_cache import KVCache, KVLayout, PoolBuffer
from engine.attention.select import DeviceUnavailableError, select_backend, select_device
from engine.core.sampling import SamplingParams
from engine.core.step import ScoredToken, SequenceKey, SequenceStep, StepPlan, StepResult
from engine.core.tiers import BlockCopy
from engine.host_cache import HostCache
from engine.model.config import ModelConfig, kv_block_size_bytes, resolve_dtype
from engine.model.decoder import DecoderModel
from engine.model.device_sampler import DeviceSampler
from engine.model.placement import on_device
from engine.model.safetensors_file import ModelWeightsError
from engine.model.sampler import Drawn, Sampler, is_greedy_only, score
from engine.model.select import read_model
from engine.model.transformers_config import TransformersConfig
from engine.model.transformers_model import TransformersModel, load_transformers_model
from engine.model.weights import LoadProgress, load_weights
from engine.step_tensors import StepTensorBuilder

__all__ = ["Runner", "kv_block_size_bytes"]

NOT_FINITE = "what the model computes for it is not finite"


class Runner:
    """The model, its block pool and the sampler. Not thread-safe: the engine thread's own.

    The number of threads of torch itself is the process's business (`torch.set_num_threads`, once, at its entry).
    """

    def __init__(self, model: DecoderModel | TransformersModel, num_host_blocks: int = 0) -> None:
        """`num_host_blocks`: slots of the host tier below the pool."""
        self.config = model.config
        self.cache = model.cache
        self.host_cache = HostCache(model.cache, num_host_blocks) if num_host_blocks else None
        self._model = model
        self._sampler: Sampler | DeviceSampler
        if model.cache.pool_BLKCSD.device.type == "cpu":
            self._sampler = Sampler(model.config.eos_token_ids, model.backend.argmax)
        else:
            self._sampler = DeviceSampler(model.config.eos_token_ids)
        self._is_torch_free = (
            isinstance(model, DecoderModel)
            and isinstance(model.backend, NativeCpuBackend)
            and model.config.experts is None
        )
        layout = model.cache.layout
        self._builder = StepTensorBuilder(
            vocab_size=model.config.vocab_size,
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
            max_positions=min(model.config.max_position_embeddings, layout.num_blocks * layout.block_size),
        )

    @classmethod
    def from_directory(
        cls,
        model_dir: Path | str,
        dtype: str,
        num_blocks: int,
        block_size: int,
        num_threads: int,
        buffer: PoolBuffer | None = None,
        progress: LoadProgress | None = None,
        device: str = "cpu",
        num_host_blocks: int = 0,
    ) -> Runner:
        """Load a Hugging Face directory.

        Args:
            dtype: "float32", "bfloat16", or "auto" for the checkpoint's own; of weights, activations and pool.
            num_blocks, block_size: the pool, of `num_blocks * kv_block_size_bytes(...)` bytes.
            num_threads: threads of the native kernels.
            buffer: writable memory for the pool, which must outlive the runner; allocated here if not given. It is the
                host's, so that the device can only be the CPU.
            progress: called with the bytes of weights read so far, and in all.
            device: what computes: "cpu", "cuda", or "auto" for a GPU if there is one that can serve the model.
            num_host_blocks: slots of the host tier below the pool.

        Raises:
            FileNotFoundError: there is no config.json.
            ModelWeightsError: the weights are missing, damaged or do not fit the configuration.
            UnsupportedModelError: neither Baton's own code nor that of transformers can compute the model.
            DeviceUnavailableError: the device is "cuda", and cannot serve the model.
            ValueError: a field of the configuration is malformed, or an argument is out of range.
        """
        config = read_model(model_dir)
        dtype_name = resolve_dtype(dtype, config)
        layout = KVLayout.for_model(config, dtype=dtype_name, num_blocks=num_blocks, block_size=block_size)
        cache, backend = _pool_and_backend(config, layout, device, buffer, num_threads)
        if isinstance(config, TransformersConfig):
            return cls(load_transformers_model(Path(model_dir), config, dtype_name, backend, cache), num_host_blocks)
        with torch.inference_mode():
            weights = load_weights(Path(model_dir), config, dtype_name, progress)
            weights = on_device(weights, cache.pool_BLKCSD.device)
            return cls(DecoderModel(config, dtype_name, weights, backend, cache), num_host_blocks)

    def run(self, plan: StepPlan, on_layer_written: LayerWritten | None = None) -> StepResult:
        """One forward pass: makes the plan's copies, writes the KV of all its tokens, draws tokens where a sequence
        samples, and computes the log-probabilities of prompt tokens where they are wanted.

        `on_layer_written` is called with each layer's index as soon as the step's KV of that layer is in the pool.

        A sequence for which the model's output is not finite fails alone (StepResult.failures): no row of a step
        depends on another.
        """
        if not plan.sequences:
            return StepResult(step_id=plan.step_id)
        if plan.copies:
            self.copy_blocks(plan.copies)
        if self._is_torch_free and all(map(is_greedy_only, plan.sequences)):
            # Then torch computes nothing, and its mode need not be set: what it takes to set it has left the caches
            # since the last step, and comes back from memory for half as long as all else of Python's part.
            return self._run(plan, on_layer_written)
        with torch.inference_mode():
            return self._run(plan, on_layer_written)

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        """Between the pool and the host tier, in this order. Also on another thread than the engine's, if the running
        step uses neither these blocks nor these slots."""
        assert self.host_cache is not None, "there is no host tier to copy to"
        with torch.inference_mode():
            self.host_cache.copy(copies)

    def _run(self, plan: StepPlan, on_layer_written: LayerWritten | None) -> StepResult:
        logits_RV = self._model.forward(self._builder.build(plan), on_layer_written)
        scores: dict[int, list[ScoredToken] | None] = {}
        if any(sequence.scored_ids for sequence in plan.sequences):
            scores, logits_RV = _take_scores(plan, logits_RV)
        sampling = [sequence for sequence in plan.sequences if sequence.sample]
        drawn = self._sampler.sample(logits_RV, sampling) if sampling else []
        if len(drawn) < len(plan.sequences):
            in_order = iter(drawn)
            drawn = [next(in_order) if sequence.sample else () for sequence in plan.sequences]
        return _result(plan, drawn, scores)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """As `run`, but returns the float32 logits [S, V] after every sequence's last token and draws nothing.

        For tests that force the tokens and compare distributions.
        """
        return self._model.forward(self._builder.build(plan, every_sequence=True)).clone()

    def warm_up(self, max_num_tokens: int, max_num_rows: int) -> None:
        """Run a step of `max_num_tokens` and one of a single token, so that no request waits for memory to be taken.

        On a GPU this compiles kernels and records decode batches too. `max_num_rows` is how many sequences may sample
        in one step: the logits' buffer is made for them, since what is recorded goes with it when it grows.

        Overwrites block 0 of the pool: call it before the pool holds anything.

        Raises ModelWeightsError if the model's output is not finite.
        """
        for step_id, num_tokens in enumerate((max_num_tokens, 1)):
            sequences = [_warm_up_sequence(choice, sample=choice < max_num_rows) for choice in range(num_tokens)]
            if self.run(StepPlan(step_id=step_id, sequences=sequences)).failures:
                dtype = self.cache.layout.dtype
                raise ModelWeightsError(
                    f"the model's output is not finite: look for NaN and infinity in its weights, and whether what it "
                    f"computes is within the range of {dtype}"
                )


def _pool_and_backend(
    config: ModelConfig | TransformersConfig,
    layout: KVLayout,
    device: str,
    buffer: PoolBuffer | None,
    num_threads: int,
) -> tuple[KVCache, Backend]:
    """The pool in the memory of the device that computes."""
    if device == "cuda" and buffer is not None:
        raise DeviceUnavailableError("device: cuda keeps keys and values in its own memory, not in one it is given")
    if device == "cuda" and isinstance(config, TransformersConfig):
        raise DeviceUnavailableError("device: cuda serves Baton's own model families, not those of transformers")
    serves_from_host = buffer is not None or isinstance(config, TransformersConfig)
    if not serves_from_host and select_device(device, layout) == "cuda":
        return open_cuda(layout, config.max_position_embeddings)
    cache = KVCache.allocate(layout) if buffer is None else KVCache.from_buffer(buffer, layout)
    return cache, select_backend(num_threads)


def _result(plan: StepPlan, drawn: list[Drawn], scores: dict[int, list[ScoredToken] | None]) -> StepResult:
    """`drawn`: of each sequence of the plan, () where none was to be drawn."""
    if all(tokens is not None for tokens in drawn) and all(found is not None for found in scores.values()):
        failures: dict[int, str] = {}
    else:
        failed = [index for index, tokens in enumerate(drawn) if tokens is None or scores.get(index, ()) is None]
        failures = dict.fromkeys(failed, NOT_FINITE)
    return StepResult(
        step_id=plan.step_id,
        tokens=[() if tokens is None or index in failures else tokens for index, tokens in enumerate(drawn)],
        scores={index: found for index, found in scores.items() if found is not None and index not in failures},
        failures=failures,
    )


def _take_scores(plan: StepPlan, logits_RV: torch.Tensor) -> tuple[dict[int, list[ScoredToken] | None], torch.Tensor]:
    """The log-probabilities of prompt tokens, by index in the plan (None where one is not finite), and the rows left to
    sample from.

    `logits_RV` has the rows that `StepTensorBuilder.build` asks for, in its order.
    """
    scores: dict[int, list[ScoredToken] | None] = {}
    sampled_rows: list[int] = []
    row = 0
    for index, sequence in enumerate(plan.sequences):
        num_rows = len(sequence.scored_ids)
        if num_rows:
            num_top = sequence.sampling.prompt_logprobs
            assert num_top is not None, f"{sequence.key} asked for no prompt log-probabilities"
            scores[index] = score(logits_RV[row : row + num_rows].cpu(), sequence.scored_ids, num_top)
            row += num_rows
        if sequence.sample:
            sampled_rows.append(row)
            row += 1
    return scores, logits_RV[sampled_rows]


def _warm_up_sequence(choice: int, sample: bool) -> SequenceStep:
    """One token in slot 0 of block 0, which all sequences of the warm-up share."""
    return SequenceStep(
        key=SequenceKey(request_id="warm-up", attempt=0, choice=choice),
        token_ids=[0],
        start=0,
        block_table=[0],
        sample=sample,
        sampling=SamplingParams(),
        position=0,
        prompt_ids=[],
        output_ids=[],
    )
