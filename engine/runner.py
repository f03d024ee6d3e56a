"""Runs the plans of the scheduler on the model: StepPlan in, StepResult out."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention.kv_cache import KVCache, KVLayout, PoolBuffer
from engine.attention.select import select_backend
from engine.core.sampling import SamplingParams
from engine.core.step import SampledToken, ScoredToken, SequenceKey, SequenceStep, StepPlan, StepResult
from engine.model.config import ModelConfig, kv_block_size_bytes, resolve_dtype
from engine.model.linear import padded_num_rows
from engine.model.llama import LayerWritten, LlamaModel
from engine.model.sampler import Sampler, score
from engine.model.weights import LoadProgress, load_weights
from engine.step_tensors import StepTensorBuilder, StepTensors

__all__ = ["Runner", "kv_block_size_bytes"]

# Batch sizes whose kernels are compiled before the first request; larger ones are compiled when they occur.
_WARM_UP_NUM_TOKENS = 64


class Runner:
    """The model, its block pool and the sampler. Not thread-safe: the engine thread's own.

    The number of threads of torch itself is the process's business (`torch.set_num_threads`, once, at its entry).
    """

    def __init__(self, model: LlamaModel, cache: KVCache) -> None:
        self.config = model.config
        self.cache = cache
        self._model = model
        self._sampler = Sampler(model.config.eos_token_ids)
        self._builder = StepTensorBuilder(
            block_size=cache.layout.block_size,
            num_blocks=cache.layout.num_blocks,
            max_positions=model.config.max_position_embeddings,
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
    ) -> Runner:
        """Load a Hugging Face directory.

        Args:
            dtype: "float32", "bfloat16", or "auto" for the checkpoint's own; of weights, activations and pool.
            num_blocks, block_size: the pool, of `num_blocks * kv_block_size_bytes(...)` bytes.
            num_threads: threads of the native kernels.
            buffer: writable memory for the pool, which must outlive the runner; allocated here if not given.
            progress: called with the bytes of weights read so far, and in all.

        Raises:
            FileNotFoundError: there is no config.json.
            ModelWeightsError: the weights are missing, damaged or do not fit the configuration.
            ValueError: the configuration is not supported, or an argument is out of range.
        """
        config = ModelConfig.from_directory(model_dir)
        dtype_name = resolve_dtype(dtype, config)
        layout = KVLayout.for_model(config, dtype=dtype_name, num_blocks=num_blocks, block_size=block_size)
        cache = KVCache.allocate(layout) if buffer is None else KVCache.from_buffer(buffer, layout)
        backend = select_backend(num_threads)
        with torch.inference_mode():
            weights = load_weights(Path(model_dir), config, dtype_name, progress)
            model = LlamaModel(config, dtype_name, weights, backend)
        return cls(model, cache)

    @torch.inference_mode()
    def run(self, plan: StepPlan, on_layer_written: LayerWritten | None = None) -> StepResult:
        """One forward pass: writes the KV of all the plan's tokens, draws tokens where a sequence samples, and computes
        the log-probabilities of prompt tokens where they are wanted.

        `on_layer_written` is called with each layer's index as soon as the step's KV of that layer is in the pool.

        Raises NonFiniteLogitsError if the model's output is not finite.
        """
        tokens: list[tuple[SampledToken, ...]] = [()] * len(plan.sequences)
        scores: dict[int, list[ScoredToken]] = {}
        if plan.sequences:
            sampling = [index for index, sequence in enumerate(plan.sequences) if sequence.sample]
            tensors = self._builder.build(plan)
            rows_R = torch.cat([tensors.last_rows_S[sampling], _scored_rows(plan, tensors.last_rows_S)])
            logits_RV = self._forward(tensors, rows_R, on_layer_written)
            scores = _scores(plan, logits_RV[len(sampling) :])
            drawn = self._sampler.sample(logits_RV[: len(sampling)], [plan.sequences[index] for index in sampling])
            for index, drawn_tokens in zip(sampling, drawn, strict=True):
                tokens[index] = drawn_tokens
        return StepResult(step_id=plan.step_id, tokens=tokens, scores=scores)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """As `run`, but returns the float32 logits [S, V] after every sequence's last token and draws nothing.

        For tests that force the tokens and compare distributions.
        """
        tensors = self._builder.build(plan)
        return self._forward(tensors, tensors.last_rows_S, None)

    def warm_up(self, max_num_tokens: int) -> None:
        """Run steps of the common sizes, and of `max_num_tokens`, so that no request waits for compilation.

        Overwrites block 0 of the pool: call it before the pool holds anything.
        """
        sizes = {padded_num_rows(count) for count in range(1, min(_WARM_UP_NUM_TOKENS, max_num_tokens) + 1)}
        for step_id, num_tokens in enumerate(sorted(sizes | {max_num_tokens})):
            sample = num_tokens <= _WARM_UP_NUM_TOKENS
            sequences = [_warm_up_sequence(choice, sample) for choice in range(num_tokens)]
            self.run(StepPlan(step_id=step_id, sequences=sequences))

    def _forward(
        self, tensors: StepTensors, rows_R: torch.Tensor, on_layer_written: LayerWritten | None
    ) -> torch.Tensor:
        return self._model.forward(tensors.ids_T, tensors.batch, self.cache, rows_R, on_layer_written)


def _scored_rows(plan: StepPlan, last_rows_S: torch.Tensor) -> torch.Tensor:
    """Rows of the step's tokens after which a prompt token is to be scored, in the plan's order."""
    rows = [torch.empty(0, dtype=torch.int64)]
    for index, sequence in enumerate(plan.sequences):
        if sequence.scored_ids:
            first_row = last_rows_S[index] - len(sequence.token_ids) + 1
            rows.append(first_row + torch.arange(len(sequence.scored_ids)))
    return torch.cat(rows)


def _scores(plan: StepPlan, logits_RV: torch.Tensor) -> dict[int, list[ScoredToken]]:
    """By index in the plan. `logits_RV`: of the rows that `_scored_rows` named."""
    scores: dict[int, list[ScoredToken]] = {}
    row = 0
    for index, sequence in enumerate(plan.sequences):
        num_rows = len(sequence.scored_ids)
        if num_rows:
            num_top = sequence.sampling.prompt_logprobs
            assert num_top is not None, f"{sequence.key} asked for no prompt log-probabilities"
            scores[index] = score(logits_RV[row : row + num_rows], sequence.scored_ids, num_top)
            row += num_rows
    return scores


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
