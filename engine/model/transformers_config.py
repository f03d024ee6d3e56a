"""The shape of a model that has no family of Baton's own, as transformers reads it from the same config.json.

Nothing here loads torch code or weights of the model. What can be told from the configuration that Baton's paged
attention would compute wrongly is refused here; what cannot is found by a trial when the model is loaded
(`engine.model.transformers_model`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.config import (
    DTYPE_SIZE_BYTES,
    GENERATION_FILE,
    SUPPORTED_ARCHITECTURES,
    DtypeName,
    read_safetensors_header,
)
from engine.model.config_fields import UnsupportedModelError, token_ids
from engine.model.installing import how_to_install

EXTRA = "baton-cluster[transformers]"
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Their rotation of a position depends on how long the longest sequence of the step is.
_ROPES_BY_LENGTH = ("dynamic", "longrope")
_ALIBI_MODEL_TYPES = ("bloom", "mpt")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Attributes:
    architecture: the name of the model's class in transformers.
    num_parameters: elements of all weights in the checkpoint.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    num_parameters: int
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_directory(cls, model_dir: Path | str) -> TransformersConfig:
        """Read config.json and generation_config.json, and the headers of the safetensors files.

        Raises:
            UnsupportedModelError: transformers is missing or has no such model, or the model asks for something that
                paged attention does not compute.
            ValueError: a field is missing or malformed.
        """
        directory = Path(model_dir)
        transformers = import_transformers()
        config, architecture = _read_config(transformers, directory)
        text = config.get_text_config(decoder=True)
        _refuse_unsupported(config, text, architecture)
        vocab_size = _positive_int(text, "vocab_size", architecture)
        num_heads = _positive_int(text, "num_attention_heads", architecture)
        generation = _read_generation_config(directory)
        fields = {"eos_token_id": getattr(text, "eos_token_id", None)}
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            num_layers=_positive_int(text, "num_hidden_layers", architecture),
            num_kv_heads=_num_kv_heads(text, num_heads, architecture),
            head_dim=_head_dim(text, num_heads, architecture),
            max_position_embeddings=_positive_int(text, "max_position_embeddings", architecture),
            num_parameters=_count_parameters(directory),
            dtype="bfloat16" if "bfloat16" in str(getattr(text, "dtype", None)) else "float32",
            eos_token_ids=token_ids(generation, "eos_token_id", vocab_size, GENERATION_FILE)
            or token_ids(fields, "eos_token_id", vocab_size),
        )

    @property
    def engine(self) -> str:
        return f"transformers ({self.architecture})"

    def weights_size_bytes(self, dtype: DtypeName) -> int:
        return self.num_parameters * DTYPE_SIZE_BYTES[dtype]


def import_transformers() -> Any:
    """Raises UnsupportedModelError where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModelError(
            f"transformers, which runs models that Baton has no code of its own for, is not installed: "
            f"{how_to_install(EXTRA)}"
        )
    return importlib.import_module("transformers")


def _read_config(transformers: Any, directory: Path) -> tuple[Any, str]:
    """The configuration, and the name of the class of causal language models that is made from it."""
    try:
        # Code that comes with a checkpoint is never run.
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (KeyError, OSError, TypeError, ValueError, _strict_errors()) as error:
        raise UnsupportedModelError(f"transformers {transformers.__version__} cannot read it: {error}") from error
    if config.is_encoder_decoder:
        raise _unsupported(type(config).__name__, "is an encoder-decoder")
    names = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model_type = str(config.model_type)
    if model_type not in names:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no causal language model for model_type {model_type!r}"
        )
    return config, str(names[model_type])


def _strict_errors() -> type[Exception]:
    """What transformers raises where a field is of another type than its configuration class says."""
    return importlib.import_module("huggingface_hub.errors").StrictDataclassError  # type: ignore[no-any-return]


def _refuse_unsupported(config: Any, text: Any, architecture: str) -> None:
    """What the configuration says plainly."""
    if getattr(config, "quantization_config", None):
        raise _unsupported(architecture, "is quantized (quantization_config in config.json): save it unquantized")
    if getattr(text, "alibi", False) or config.model_type in _ALIBI_MODEL_TYPES:
        raise _unsupported(architecture, "has ALiBi attention, which adds a bias for the distance of each key")
    if getattr(text, "attn_logit_softcapping", None):
        raise _unsupported(architecture, "caps its attention's logits (attn_logit_softcapping in config.json)")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if others:
        raise _unsupported(architecture, f"has layers that are neither full nor sliding attention: {', '.join(others)}")
    if getattr(text, "attn_temperature_tuning", False) and 0 in (getattr(text, "no_rope_layers", None) or ()):
        # The code numbers them itself, from the step's first token on, where others take the positions they are given.
        raise _unsupported(architecture, "scales queries by their position (attn_temperature_tuning in config.json)")
    if architecture in SUPPORTED_ARCHITECTURES:
        _refuse_unknown_names(text, architecture)
    for rope_type in _rope_types(getattr(text, "rope_parameters", None)):
        if rope_type in _ROPES_BY_LENGTH:
            raise _unsupported(
                architecture, f"has rope_type {rope_type!r}, which rotates by the step's longest sequence"
            )


def _refuse_unknown_names(text: Any, architecture: str) -> None:
    """Names that a model's code looks up when it is made, of which a bare KeyError would come. Other architectures than
    those that are known here may have names of their own.
    """
    activations = sorted(importlib.import_module("transformers.activations").ACT2FN)
    for name in ("hidden_act", "hidden_activation"):
        value = getattr(text, name, None)
        if value is not None and value not in activations:
            raise _unsupported(architecture, f"has {name} {value!r} in config.json; known: {', '.join(activations)}")
    functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    rope_types = sorted({"default", *functions} - set(_ROPES_BY_LENGTH))
    for value in _rope_types(getattr(text, "rope_parameters", None)):
        if value not in (*rope_types, *_ROPES_BY_LENGTH):
            raise _unsupported(architecture, f"has rope_type {value!r} in config.json; known: {', '.join(rope_types)}")


def _unsupported(architecture: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{architecture} {why}")


def _rope_types(parameters: Any) -> list[str]:
    """Of one set of parameters, or of one for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(each.get("rope_type", "default")) for each in (parameters, *nested)]


def _num_kv_heads(text: Any, num_heads: int, architecture: str) -> int:
    if getattr(text, "multi_query", False):
        return 1
    if getattr(text, "num_key_value_heads", None) is None:
        return num_heads
    return _positive_int(text, "num_key_value_heads", architecture)


def _head_dim(text: Any, num_heads: int, architecture: str) -> int:
    if getattr(text, "head_dim", None) is None:
        return _positive_int(text, "hidden_size", architecture) // num_heads
    return _positive_int(text, "head_dim", architecture)


def _positive_int(text: Any, name: str, architecture: str) -> int:
    value = getattr(text, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unsupported(architecture, f"has {name} {value!r} in its configuration: not one positive number")
    return value


def _read_generation_config(directory: Path) -> dict[str, Any]:
    path = directory / GENERATION_FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _count_parameters(directory: Path) -> int:
    num_parameters = 0
    for path in sorted(directory.glob("*.safetensors")):
        try:
            shard = json.loads(read_safetensors_header(path))
            tensors = [tensor for name, tensor in shard.items() if name != "__metadata__"]
            num_parameters += sum(math.prod(each["shape"]) for each in tensors if each["dtype"] in _FLOAT_DTYPES)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error!r}") from error
    return num_parameters
