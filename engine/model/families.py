"""The families of decoders, each as a description of what tells it from the others.

They share one forward pass (`engine.model.decoder`) and one loader (`engine.model.weights`). A description holds the
values that a config.json leaves out (the defaults of the family's configuration class in transformers, which writes
files without them), and which of the optional parts of a layer there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.model.config_fields import UnsupportedModelError, flag, non_negative_int, positive_float, positive_int
from engine.model.rope_config import LayerType, RopeConfig, parse_rope, parse_ropes_by_layer_type

ActivationName = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, ActivationName] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
        window: a token sees itself and the window - 1 positions before it; 0: all.
        is_routed: whether the layer's MLP is a set of experts.
    """

    window: int
    rope: RopeConfig
    is_routed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Routed experts (Shazeer et al. 2017): each token goes to the `num_per_token` that the router favours.

    Attributes:
        normalises: whether the weights of a token's experts are scaled to sum to 1.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalises: bool


Fields = dict[str, Any]
LayerRule = Callable[[Fields, int], bool]
"""Says something of the layer of an index, from the fields of config.json."""


def _no_layer(fields: Fields, index: int) -> bool:
    return False


def _every_layer(fields: Fields, index: int) -> bool:
    return True


def _windowed_everywhere(fields: Fields, index: int) -> bool:
    return fields.get("sliding_window") is not None


def _windowed_if_switched_on(fields: Fields, index: int) -> bool:
    return flag(fields, "use_sliding_window") and _windowed_everywhere(fields, index)


def _windowed_in_late_layers(fields: Fields, index: int) -> bool:
    if fields.get("layer_types") is None:
        return _windowed_if_switched_on(fields, index) and index >= non_negative_int(fields, "max_window_layers")
    is_windowed = _layer_type(fields, index) == "sliding_attention"
    if is_windowed and not _windowed_if_switched_on(fields, index):
        raise ValueError("layer_types in config.json asks for sliding_attention, but use_sliding_window is false")
    return is_windowed


def _windowed_by_pattern(fields: Fields, index: int) -> bool:
    if fields.get("layer_types") is None:
        return (index + 1) % positive_int(fields, "sliding_window_pattern") != 0
    return _layer_type(fields, index) == "sliding_attention"


def _routed_at_sparse_steps(fields: Fields, index: int) -> bool:
    dense_layers = fields.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise ValueError(f"mlp_only_layers in config.json must be a list, got {dense_layers!r}")
    return index not in dense_layers and (index + 1) % positive_int(fields, "decoder_sparse_step") == 0


def _layer_type(fields: Fields, index: int) -> LayerType:
    types, num_layers = fields["layer_types"], fields["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"layer_types in config.json must be a list of {num_layers} names, got {types!r}")
    for known in get_args(LayerType):
        if types[index] == known:
            return known  # type: ignore[no-any-return]
    raise UnsupportedModelError(f"layer_types {types[index]!r} in config.json is not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A description. Switches are True, False, or the name of the field of config.json that says so.

    Attributes:
        defaults: values of fields that config.json leaves out.
        normalises_heads: whether each head of queries and keys is normalised before it is rotated.
        normalises_outputs: whether the outputs of attention and MLP are normalised before they are added.
        norm_offset: what is added to the weights of all norms.
        scales_embedding: whether embeddings are multiplied by the square root of the hidden size.
        is_windowed: whether a layer's attention is windowed.
        default_thetas: base of the rotary embedding; of each layer type, if those have their own.
        is_routed: whether a layer's MLP is a set of experts.
        experts_size_field: the field with their intermediate size.
        normalises_experts: whether the weights of a token's experts are scaled to sum to 1.
        refused: fields that must be absent, null or false, since what they ask for is not computed.
    """

    defaults: Mapping[str, Any]
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    normalises_heads: bool = False
    normalises_outputs: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False
    is_windowed: LayerRule = _no_layer
    default_thetas: float | Mapping[LayerType, float] = 10_000.0
    is_routed: LayerRule = _no_layer
    experts_size_field: str = "intermediate_size"
    normalises_experts: bool | str = "norm_topk_prob"
    refused: tuple[str, ...] = ()


_LLAMA = Family(
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    refused=("sliding_window",),
)
_MISTRAL = Family(
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    is_windowed=_windowed_everywhere,
)
_QWEN2 = Family(
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias=True,
    is_windowed=_windowed_in_late_layers,
)
_QWEN3 = Family(
    defaults={**_QWEN2.defaults, "head_dim": 128},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    normalises_heads=True,
    is_windowed=_windowed_in_late_layers,
)
_GEMMA3 = Family(
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    normalises_heads=True,
    normalises_outputs=True,
    norm_offset=1.0,
    scales_embedding=True,
    is_windowed=_windowed_by_pattern,
    default_thetas={"full_attention": 1_000_000.0, "sliding_attention": 10_000.0},
    refused=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
)
_MIXTRAL = Family(
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    is_windowed=_windowed_everywhere,
    default_thetas=1_000_000.0,
    is_routed=_every_layer,
    normalises_experts=True,
)
_QWEN3_MOE = Family(
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_local_experts": 128,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    normalises_heads=True,
    is_windowed=_windowed_if_switched_on,
    is_routed=_routed_at_sparse_steps,
    experts_size_field="moe_intermediate_size",
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
}
"""By the name that stands under `architectures`. Of Gemma3ForConditionalGeneration, the text part alone."""


def family_fields(architecture: str, raw: dict[str, Any]) -> Fields:
    """The fields that describe the text decoder, with the family's defaults where config.json says nothing.

    Raises ValueError or UnsupportedModelError, naming the field, where the family cannot do what is asked for.
    """
    text = raw.get("text_config", {})
    if not isinstance(text, dict):
        raise ValueError(f"text_config in config.json must be an object, got {text!r}")
    family = FAMILIES[architecture]
    fields = {**family.defaults, **raw, **text}
    # The number of experts has two names, both in use.
    if fields.get("num_experts") is not None:
        fields["num_local_experts"] = fields["num_experts"]
    for name in family.refused:
        if fields.get(name):
            raise UnsupportedModelError(f"{name} = {fields[name]!r} in config.json is not supported for {architecture}")
    if fields.get("quantization_config"):
        raise UnsupportedModelError("quantization_config in config.json is not supported: save the model unquantized")
    return fields


def parse_activation(fields: Fields) -> ActivationName:
    name = "hidden_activation" if fields.get("hidden_activation") else "hidden_act"
    activation = fields.get(name, "silu")
    if not isinstance(activation, str):
        raise ValueError(f"{name} in config.json must be the name of an activation, got {activation!r}")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{name} {activation!r} in config.json is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[activation]


def parse_switch(value: bool | str, fields: Fields) -> bool:
    return value if isinstance(value, bool) else flag(fields, value)


def parse_attention_scale(fields: Fields, head_dim: int) -> float:
    return float(positive_float(fields, "query_pre_attn_scalar", head_dim) ** -0.5)


def parse_experts(family: Family, fields: Fields) -> ExpertsConfig | None:
    if family.is_routed is _no_layer:
        return None
    num_experts, num_per_token = (positive_int(fields, name) for name in ("num_local_experts", "num_experts_per_tok"))
    if num_per_token > num_experts:
        raise ValueError(
            f"num_experts_per_tok ({num_per_token}) must be at most num_local_experts ({num_experts}) in config.json"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=positive_int(fields, family.experts_size_field),
        normalises=parse_switch(family.normalises_experts, fields),
    )


def parse_layers(family: Family, fields: Fields) -> tuple[LayerConfig, ...]:
    thetas = family.default_thetas
    if isinstance(thetas, Mapping):
        ropes = parse_ropes_by_layer_type(fields, thetas)
    else:
        rope = parse_rope(fields, thetas)
        ropes = {"full_attention": rope, "sliding_attention": rope}
    layers = []
    for index in range(positive_int(fields, "num_hidden_layers")):
        is_windowed = family.is_windowed(fields, index)
        layers.append(
            LayerConfig(
                window=positive_int(fields, "sliding_window") if is_windowed else 0,
                rope=ropes["sliding_attention" if is_windowed else "full_attention"],
                is_routed=family.is_routed(fields, index),
            )
        )
    return tuple(layers)
