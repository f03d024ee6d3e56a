"""A model that has no family of Baton's own: the code of transformers, with Baton's paged attention and block pool.

On the CPU only; slower than the native engine, and in float32 a row's bits may depend on the other rows of the step,
because matrix products are torch's. What the model computes is checked when it is loaded: a short trial, in chunks and
in company, has to give the logits that transformers gives by itself. So models whose tokens meet elsewhere than in
causal attention over keys and values (recurrent layers, say) are refused, and not served wrongly.

Axes: T tokens of the step, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from engine.attention.base import Backend, LayerWritten
from engine.attention.batch import StepBatch
from engine.attention.kv_cache import TORCH_DTYPES, KVCache
from engine.model.config import DtypeName
from engine.model.config_fields import UnsupportedModelError
from engine.model.safetensors_file import ModelWeightsError, is_finite
from engine.model.transformers_attention import ATTENTION_NAME, KvWritten, PagedForward, register
from engine.model.transformers_config import TransformersConfig, import_transformers
from engine.model.transformers_trial import check_logits, num_trial_blocks, paged_logits, plain_logits, trial_prompts

_logger = logging.getLogger(__name__)

# What the code of an unsuitable model may raise when it is given what it does not expect.
_CODE_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class TransformersModel:
    """Has the face of `engine.model.decoder.DecoderModel`. Not thread-safe: one engine thread a model.

    Args:
        model: of transformers, with paged attention set.
        is_trial: whether the masks that the model makes are to be examined.
    """

    def __init__(
        self, config: TransformersConfig, model: Any, backend: Backend, cache: KVCache, *, is_trial: bool = False
    ) -> None:
        self.config = config
        self.cache = cache
        self.backend = backend
        self._model = model
        self._is_trial = is_trial
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._on_layer_written: LayerWritten | None = None
        self._logits_RV = torch.empty(0, config.vocab_size)
        self._step = backend.compile(lambda: backend.call(self._run))

    def forward(self, batch: StepBatch, on_layer_written: LayerWritten | None = None) -> torch.Tensor:
        """Run the step's tokens, writing their keys and values to the pool; returns float32 logits [R, V].

        `on_layer_written` is called with each layer's index when the step's KV of that layer is in the pool.
        """
        self._on_layer_written = on_layer_written
        self._step.run(batch)
        return self._logits_RV

    def _run(self, batch: StepBatch) -> None:
        paged = PagedForward(self.backend, self.cache, batch, self._on_layer_written, is_trial=self._is_trial)
        self._logits_RV = self._paged_logits(paged, batch)
        if paged.num_layers_run != self.config.num_layers:
            raise UnsupportedModelError(
                f"it calls the attention function {paged.num_layers_run} times for {self.config.num_layers} layers"
            )

    def _paged_logits(self, paged: PagedForward, batch: StepBatch) -> torch.Tensor:
        arguments: dict[str, Any] = {"logits_to_keep": batch.rows_R} if self._selects_rows else {}
        try:
            output = paged.run(
                self._model,
                input_ids=batch.ids_T.unsqueeze(0),
                position_ids=batch.positions_T.unsqueeze(0),
                # Given, so that positions that start anew are not taken for packed sequences to be masked apart.
                attention_mask=torch.ones(1, batch.num_tokens, dtype=torch.int64),
                use_cache=False,
                **arguments,
            )
        except KvWritten:
            return torch.empty(0, self.config.vocab_size)
        logits_NV: torch.Tensor = output.logits[0]
        return (logits_NV if self._selects_rows else logits_NV[batch.rows_R]).float()


def load_transformers_model(
    model_dir: Path, config: TransformersConfig, dtype: DtypeName, backend: Backend, cache: KVCache
) -> TransformersModel:
    """Load the checkpoint with transformers, from local safetensors files alone, and try the model.

    Overwrites the first blocks of the pool: call it before the pool holds anything.

    Raises:
        ModelWeightsError: a file is damaged, a tensor is missing or of another shape, or a weight is not finite.
        UnsupportedModelError: paged attention would not compute the same; names the model and the reason.
        ValueError: the pool is too small.
    """
    if cache.layout.num_blocks < num_trial_blocks(cache.layout):
        raise ValueError(f"num_blocks must be at least {num_trial_blocks(cache.layout)}, got {cache.layout.num_blocks}")
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    register(transformers)
    model = _load(transformers, model_dir, config, dtype)
    try:
        _try(model, config, backend, cache)
    except _CODE_ERRORS as error:
        raise UnsupportedModelError(f"{config.architecture} cannot run with paged attention: {error}") from error
    _logger.warning(
        "Baton has no code of its own for %s: transformers computes it, with paged attention, more slowly",
        config.architecture,
    )
    return TransformersModel(config, model, backend, cache)


def _load(transformers: Any, model_dir: Path, config: TransformersConfig, dtype: DtypeName) -> Any:
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=TORCH_DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise ModelWeightsError(f"{model_dir}: {error}") from error
    except (*_CODE_ERRORS, ImportError, OSError) as error:
        raise UnsupportedModelError(f"transformers cannot load {config.architecture}: {error}") from error
    # transformers would go on with random numbers in their place.
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            names = ", ".join(map(str, sorted(info[what])))
            raise ModelWeightsError(
                f"{model_dir}: {what.replace('_keys', '')} tensors of {config.architecture}: {names}"
            )
    for name, weight in model.named_parameters():
        if weight.numel() and not is_finite(weight.detach()):
            raise ModelWeightsError(f"{name} in {model_dir} holds NaN or infinity as {weight.dtype}")
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def _try(model: Any, config: TransformersConfig, backend: Backend, cache: KVCache) -> None:
    """Leaves the model with paged attention set. Raises as the model's code does, and UnsupportedModelError."""
    prompts = trial_prompts(config.vocab_size)
    plain = plain_logits(model, prompts)
    model.set_attn_implementation(ATTENTION_NAME)
    tried = TransformersModel(config, model, backend, cache, is_trial=True)
    paged = paged_logits(tried.forward, prompts, cache.layout)
    check_logits(paged, plain, cache.pool_BLKCSD.dtype)
