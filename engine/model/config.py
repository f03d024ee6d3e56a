"""Model configuration, read from a Hugging Face directory without loading torch or any weights.

The front needs the vocabulary, the context length and the end-of-sequence ids; the workers need the shapes.
Anything this engine would compute wrongly is refused here, by the name of the field in config.json.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

DtypeName = Literal["float32", "bfloat16"]
DTYPE_SIZE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2}

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
FINGERPRINT_SIZE_BYTES = 16
MAX_SAFETENSORS_HEADER_SIZE_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters (Su et al. 2021, "RoFormer").

    `kind` "linear" divides all positions by `factor`; "llama3" divides low frequencies by `factor`, keeps high
    ones, and blends in between, by the wavelength relative to `original_max_position`.
    """

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-family decoder. Sizes are numbers of elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: DtypeName
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_directory(cls, model_dir: Path | str) -> ModelConfig:
        """Read config.json and, if there, generation_config.json.

        Raises:
            FileNotFoundError: there is no config.json.
            ValueError: a field is missing, malformed or asks for something this engine cannot compute.
        """
        directory = Path(model_dir)
        config_path = directory / "config.json"
        if not config_path.is_file():
            raise FileNotFoundError(f"{config_path} does not exist: {directory} is not a Hugging Face model directory")
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(_read_json(config_path), generation)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """Parse the content of config.json and generation_config.json; raises ValueError naming the field."""
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        hidden_size = _positive_int(raw, "hidden_size")
        num_heads = _positive_int(raw, "num_attention_heads")
        num_kv_heads = _positive_int(raw, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads ({num_kv_heads}) must divide num_attention_heads ({num_heads}) in config.json"
            )
        if raw.get("head_dim") is None and hidden_size % num_heads:
            raise ValueError(
                f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) in config.json"
            )
        head_dim = _positive_int(raw, "head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim} in config.json")
        vocab_size = _positive_int(raw, "vocab_size")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_positive_int(raw, "intermediate_size"),
            num_layers=_positive_int(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_positive_int(raw, "max_position_embeddings", default=2048),
            rms_norm_eps=_positive_float(raw, "rms_norm_eps", default=1e-6),
            rope=_parse_rope(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            dtype=_dtype(raw),
            bos_token_id=_optional_token_id(raw, "bos_token_id", vocab_size),
            eos_token_ids=_eos_token_ids(raw, generation or {}, vocab_size),
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied output head counts once."""
        query_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query_size + 2 * kv_size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def weights_size_bytes(self, dtype: DtypeName) -> int:
        return self.num_parameters * DTYPE_SIZE_BYTES[dtype]


def resolve_dtype(requested: str, config: ModelConfig) -> DtypeName:
    """The dtype to compute in: `requested`, or the checkpoint's own where it is "auto"."""
    if requested == "auto":
        return config.dtype
    for name in get_args(DtypeName):
        if requested == name:
            return name  # type: ignore[no-any-return]
    raise ValueError(f"dtype must be auto, float32 or bfloat16, got {requested!r}")


def kv_block_size_bytes(config: ModelConfig, dtype: DtypeName, block_size: int) -> int:
    """Bytes of one block: keys and values of `block_size` tokens, all layers and KV heads."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    elements = config.num_layers * config.num_kv_heads * 2 * block_size * config.head_dim
    return elements * DTYPE_SIZE_BYTES[dtype]


def model_fingerprint(model_dir: Path | str, revision: str = "") -> str:
    """BLAKE2b-128, in hexadecimal, of config.json, every safetensors header (with its file's name) and `revision`.

    The weights' bytes are not read: two checkpoints of one shape are told apart by `revision`.

    Raises:
        FileNotFoundError: config.json or every safetensors file is missing.
        ValueError: a safetensors file is truncated or its header is not plausible.
    """
    directory = Path(model_dir)
    digest = hashlib.blake2b(digest_size=FINGERPRINT_SIZE_BYTES)
    _update_with_length(digest, (directory / "config.json").read_bytes())
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{directory} holds no *.safetensors file")
    for shard in shards:
        _update_with_length(digest, shard.name.encode())
        _update_with_length(digest, read_safetensors_header(shard))
    _update_with_length(digest, revision.encode())
    return digest.hexdigest()


def read_safetensors_header(path: Path) -> bytes:
    """The JSON header of a safetensors file: an 8-byte little-endian length, then so many bytes of JSON."""
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) != 8:
            raise ValueError(f"{path} is truncated: it has no safetensors header")
        (size_bytes,) = struct.unpack("<Q", prefix)
        if size_bytes > MAX_SAFETENSORS_HEADER_SIZE_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header claims {size_bytes} bytes")
        header = file.read(size_bytes)
    if len(header) != size_bytes:
        raise ValueError(f"{path} is truncated: header of {size_bytes} bytes, {len(header)} present")
    return header


def _update_with_length(digest: hashlib.blake2b, data: bytes) -> None:
    """Length first, so that no two different lists of parts hash alike."""
    digest.update(struct.pack("<Q", len(data)))
    digest.update(data)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ValueError("architectures is missing from config.json")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise ValueError(f"architectures {names} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise ValueError(f"{name} = true in config.json is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} in config.json is not supported; supported: silu")
    if raw.get("quantization_config"):
        raise ValueError("quantization_config in config.json is not supported: save the model unquantized")
    if raw.get("sliding_window"):
        raise ValueError("sliding_window in config.json is not supported")


def _parse_rope(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (newer) and `rope_theta` with `rope_scaling` (older)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"rope_scaling in config.json must be an object, got {scaling!r}")
    theta = _positive_float({"rope_theta": scaling.get("rope_theta", raw.get("rope_theta"))}, "rope_theta", 10_000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=_positive_float(scaling, "factor"))
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=_positive_float(scaling, "factor"),
            low_freq_factor=_positive_float(scaling, "low_freq_factor"),
            high_freq_factor=_positive_float(scaling, "high_freq_factor"),
            original_max_position=_positive_int(scaling, "original_max_position_embeddings"),
        )
    raise ValueError(f"rope_type {kind!r} in config.json is not supported; supported: default, linear, llama3")


def _dtype(raw: dict[str, Any]) -> DtypeName:
    """float16 checkpoints are computed in float32: every float16 value fits, whereas bfloat16 would lose bits."""
    name = raw.get("dtype", raw.get("torch_dtype")) or "float32"
    if name in ("float32", "float16"):
        return "float32"
    if name == "bfloat16":
        return "bfloat16"
    raise ValueError(f"dtype {name!r} in config.json is not supported; supported: float32, bfloat16, float16")


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """generation_config.json decides where it has them; else config.json. Ids are sorted and without repeats."""
    for source in (generation, raw):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        return tuple(sorted({_token_id(token_id, "eos_token_id", vocab_size) for token_id in ids}))
    return ()


def _optional_token_id(raw: dict[str, Any], name: str, vocab_size: int) -> int | None:
    value = raw.get(name)
    return None if value is None else _token_id(value, name, vocab_size)


def _token_id(value: object, name: str, vocab_size: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise ValueError(f"{name} must be a token id between 0 and {vocab_size - 1}, got {value!r}")
    return value


def _positive_int(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name} is missing from config.json")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer in config.json, got {value!r}")
    return value


def _positive_float(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name} is missing from config.json")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number in config.json, got {value!r}")
    return float(value)
