"""Parameters of rotary embeddings, as config.json spells them: now and in older files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.model.config_fields import UnsupportedModelError, positive_float, positive_int

LayerType = Literal["full_attention", "sliding_attention"]
_SUPPORTED_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021, "RoFormer"), and how it is stretched beyond the trained context.

    Attributes:
        kind: "linear" divides all positions by `factor`; "llama3" divides low frequencies by `factor`, keeps high
            ones, and blends in between, by the wavelength relative to `original_max_position`; "yarn" (Peng et al.
            2023) blends along the frequencies' index, between those that turn `beta_slow` and `beta_fast` times
            within `original_max_position`.
        attention_factor: cosines and sines are multiplied by it.
        truncate: whether yarn's two indices are rounded, outwards.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def parse_rope(raw: dict[str, Any], default_theta: float) -> RopeConfig:
    """The one rotary embedding of all layers: from `rope_parameters` (newer), or `rope_theta` and `rope_scaling`."""
    scaling = _scaling(raw, "rope_scaling") or _scaling(raw, "rope_parameters") or {}
    if not scaling.keys().isdisjoint(get_args(LayerType)):
        raise UnsupportedModelError("rope_parameters by layer type in config.json are not supported for this family")
    return _parse(raw, scaling, _theta(scaling, raw.get("rope_theta"), default_theta))


def parse_ropes_by_layer_type(
    raw: dict[str, Any], default_thetas: Mapping[LayerType, float]
) -> dict[LayerType, RopeConfig]:
    """One rotary embedding a layer type: from nested `rope_parameters` (newer), or from `rope_theta` and
    `rope_scaling` for full and `rope_local_base_freq` for sliding attention.
    """
    nested = _scaling(raw, "rope_parameters") or {}
    full = {**(_scaling(nested, "full_attention") or {}), **(_scaling(raw, "rope_scaling") or {})}
    sliding = _scaling(nested, "sliding_attention") or {}
    full_theta = _theta(full, raw.get("rope_theta"), default_thetas["full_attention"])
    sliding_theta = _theta(sliding, raw.get("rope_local_base_freq"), default_thetas["sliding_attention"])
    return {
        "full_attention": _parse(raw, full, full_theta),
        "sliding_attention": _parse(raw, sliding, sliding_theta),
    }


def _scaling(raw: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} in config.json must be an object, got {value!r}")
    return value


def _theta(scaling: dict[str, Any], outer: object, default: float) -> float:
    return positive_float({"rope_theta": scaling.get("rope_theta", outer)}, "rope_theta", default)


def _parse(raw: dict[str, Any], scaling: dict[str, Any], theta: float) -> RopeConfig:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str):
        raise ValueError(f"rope_type in config.json must be a name, got {kind!r}")
    if kind not in _SUPPORTED_KINDS:
        raise UnsupportedModelError(
            f"rope_type {kind!r} in config.json is not supported; supported: {', '.join(_SUPPORTED_KINDS)}"
        )
    for source in (scaling, raw):
        if source.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise UnsupportedModelError("partial_rotary_factor in config.json is not supported")
    if kind in ("default", "dynamic"):
        # Dynamic stretching begins beyond max_position_embeddings, where no sequence of this engine comes.
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=positive_float(scaling, "factor"))
    max_position = positive_int(raw, "max_position_embeddings")
    if raw.get("original_max_position_embeddings") is not None:
        scaling = {**scaling, "original_max_position_embeddings": raw["original_max_position_embeddings"]}
    original_max_position = positive_int(scaling, "original_max_position_embeddings", max_position)
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=positive_float(scaling, "factor"),
            low_freq_factor=positive_float(scaling, "low_freq_factor"),
            high_freq_factor=positive_float(scaling, "high_freq_factor"),
            original_max_position=original_max_position,
        )
    factor = positive_float(scaling, "factor", max_position / original_max_position)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original_max_position,
        attention_factor=_yarn_attention_factor(scaling, factor),
        beta_fast=positive_float(scaling, "beta_fast", 32.0),
        beta_slow=positive_float(scaling, "beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return positive_float(scaling, "attention_factor")
    log_factor = 0.1 * math.log(factor) if factor > 1 else 0.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        over, under = positive_float(scaling, "mscale"), positive_float(scaling, "mscale_all_dim")
        return (over * log_factor + 1.0) / (under * log_factor + 1.0)
    return log_factor + 1.0
