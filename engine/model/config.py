"""Model configuration, read from a Hugging Face directory without loading torch or any weights.

The front needs the vocabulary, the context length and the end-of-sequence ids; the workers need the shapes.
Anything this engine would compute wrongly is refused here, by the name of the field in config.json.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from engine.model.config_fields import (
    UnsupportedModelError as UnsupportedModelError,
)
from engine.model.config_fields import (
    flag,
    optional_token_id,
    positive_float,
    positive_int,
    token_ids,
)
from engine.model.families import (
    FAMILIES,
    ActivationName,
    ExpertsConfig,
    LayerConfig,
    family_fields,
    parse_activation,
    parse_attention_scale,
    parse_experts,
    parse_layers,
    parse_switch,
)

DtypeName = Literal["float32", "bfloat16"]
DTYPE_SIZE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2}

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
GENERATION_FILE = "generation_config.json"
FINGERPRINT_SIZE_BYTES = 16
MAX_SAFETENSORS_HEADER_SIZE_BYTES = 100_000_000


class ModelShape(Protocol):
    """What the rest of Baton needs to know of a model, whatever computes it."""

    @property
    def engine(self) -> str:
        """What computes it, for people to read."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def dtype(self) -> DtypeName:
        """The checkpoint's own."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def weights_size_bytes(self, dtype: DtypeName) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. Sizes are numbers of elements.

    Attributes:
        layers: what differs from layer to layer.
        experts: of the layers that are routed; None if none is.
        qkv_bias, output_bias, mlp_bias: which products of a layer add a bias.
        normalises_heads: whether each head of queries and keys is normalised before it is rotated.
        normalises_outputs: whether the outputs of attention and MLP are normalised before they are added.
        norm_offset: what is added to the weights of all norms.
        embedding_scale: factor of the embeddings, to be rounded to the dtype that they are in.
        attention_scale: factor of the products of queries and keys.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    experts: ExpertsConfig | None
    activation: ActivationName
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    normalises_heads: bool
    normalises_outputs: bool
    norm_offset: float
    embedding_scale: float
    attention_scale: float
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: DtypeName
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_directory(cls, model_dir: Path | str) -> ModelConfig:
        """Read config.json and, if there, generation_config.json.

        Raises:
            FileNotFoundError: there is no config.json.
            UnsupportedModelError: the model is none of the families, or asks for more than they compute.
            ValueError: a field is missing or malformed.
        """
        directory = Path(model_dir)
        config_path = directory / "config.json"
        if not config_path.is_file():
            raise FileNotFoundError(f"{config_path} does not exist: {directory} is not a Hugging Face model directory")
        generation_path = directory / GENERATION_FILE
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(_read_json(config_path), generation)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """Parse the content of config.json and generation_config.json; raises as `from_directory`."""
        architecture = _architecture(raw)
        family, fields = FAMILIES[architecture], family_fields(architecture, raw)
        hidden_size, vocab_size = positive_int(fields, "hidden_size"), positive_int(fields, "vocab_size")
        num_heads, num_kv_heads, head_dim = _head_shape(fields, hidden_size)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=positive_int(fields, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layers=parse_layers(family, fields),
            experts=parse_experts(family, fields),
            activation=parse_activation(fields),
            qkv_bias=parse_switch(family.qkv_bias, fields),
            output_bias=parse_switch(family.output_bias, fields),
            mlp_bias=parse_switch(family.mlp_bias, fields),
            normalises_heads=family.normalises_heads,
            normalises_outputs=family.normalises_outputs,
            norm_offset=family.norm_offset,
            embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
            attention_scale=parse_attention_scale(fields, head_dim),
            max_position_embeddings=positive_int(fields, "max_position_embeddings"),
            rms_norm_eps=positive_float(fields, "rms_norm_eps"),
            tie_word_embeddings=flag(fields, "tie_word_embeddings"),
            dtype=_dtype(fields),
            bos_token_id=optional_token_id(fields, "bos_token_id", vocab_size),
            eos_token_ids=_eos_token_ids(fields, generation or {}, vocab_size),
        )

    @property
    def engine(self) -> str:
        return "native"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied output head counts once."""
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (2 * query + 2 * kv)
        attention += self.qkv_bias * (query + 2 * kv) + self.output_bias * hidden
        norms = (4 if self.normalises_outputs else 2) * hidden + 2 * self.normalises_heads * self.head_dim
        dense = 3 * hidden * self.intermediate_size + self.mlp_bias * (2 * self.intermediate_size + hidden)
        experts = self.experts
        routed = experts.num_experts * hidden * (3 * experts.intermediate_size + 1) if experts else 0
        mlps = sum(routed if layer.is_routed else dense for layer in self.layers)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + norms) + mlps + embeddings + hidden

    def weights_size_bytes(self, dtype: DtypeName) -> int:
        return self.num_parameters * DTYPE_SIZE_BYTES[dtype]


def resolve_dtype(requested: str, config: ModelShape) -> DtypeName:
    """The dtype to compute in: `requested`, or the checkpoint's own where it is "auto"."""
    if requested == "auto":
        return config.dtype
    for name in get_args(DtypeName):
        if requested == name:
            return name  # type: ignore[no-any-return]
    raise ValueError(f"dtype must be auto, float32 or bfloat16, got {requested!r}")


def kv_block_size_bytes(config: ModelShape, dtype: DtypeName, block_size: int) -> int:
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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ValueError("architectures is missing from config.json")
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of names in config.json, got {names!r}")
    for name in names:
        if name in FAMILIES:
            return str(name)
    raise UnsupportedModelError(f"architectures {names} is not supported; supported: {', '.join(FAMILIES)}")


def _head_shape(fields: dict[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Query heads, key/value heads and their dimension."""
    num_heads = positive_int(fields, "num_attention_heads")
    num_kv_heads = positive_int(fields, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads ({num_kv_heads}) must divide num_attention_heads ({num_heads}) in config.json"
        )
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) in config.json"
        )
    head_dim = positive_int(fields, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim} in config.json")
    return num_heads, num_kv_heads, head_dim


def _eos_token_ids(fields: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """generation_config.json decides where it has them; config.json has to be sound all the same."""
    configured = token_ids(fields, "eos_token_id", vocab_size)
    return token_ids(generation, "eos_token_id", vocab_size, GENERATION_FILE) or configured


def _dtype(fields: dict[str, Any]) -> DtypeName:
    """float16 checkpoints are computed in float32: every float16 value fits, whereas bfloat16 would lose bits."""
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if name in ("float32", "float16"):
        return "float32"
    if name == "bfloat16":
        return "bfloat16"
    raise ValueError(f"dtype {name!r} in config.json is not supported; supported: float32, bfloat16, float16")
