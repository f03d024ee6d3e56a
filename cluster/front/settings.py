"""How a front is started, and what it knows of the model it speaks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cluster.core.ids import FrontId
from cluster.front.request_spec import RequestLimits
from cluster.front.tokenizer import TextTokenizer
from cluster.wire.channels import LOOPBACK
from engine.core.block_hash import extra_key, hash_blocks
from engine.model.config import model_fingerprint, resolve_dtype
from engine.model.select import read_model

DEFAULT_MAX_TOKENS = 256
"""Length of an answer whose request does not say, if the context allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """How to start a front.

    Attributes:
        coordinator_address: host:port. model_dir: a Hugging Face directory; no weights are read.
        model: the name that clients use; the directory's name if empty.
        name, incarnation: this life of the front; the incarnation rises with every start.
        host, port: where clients connect; port 0 takes any free one.
        max_model_tokens: longest prompt plus output; None takes the model's own context length.
        dtype: what the workers compute in, for GetModelInfo; "auto" is the checkpoint's own.
        block_size, revision: the cluster's; they enter the block hashes.
        limits: how long requests wait for others.
    """

    coordinator_address: str
    model_dir: Path
    model: str = ""
    name: str = "front"
    incarnation: int
    host: str = LOOPBACK
    port: int = 0
    max_model_tokens: int | None = None
    dtype: str = "auto"
    block_size: int = 16
    revision: str = ""
    limits: RequestLimits = field(default_factory=RequestLimits)

    @property
    def front(self) -> FrontId:
        return FrontId(self.name, self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it. `max_model_tokens` bounds prompt plus output."""

    name: str
    fingerprint: str
    dtype: str
    max_model_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    tokenizer: TextTokenizer

    def hash_prompt(self, prompt_ids: tuple[int, ...], adapter: str, cache_salt: str) -> bytes:
        """Packed names of the prompt's full blocks, by which workers may have them cached."""
        return b"".join(hash_blocks(prompt_ids, self.block_size, self.extra_key(adapter, cache_salt)))

    def extra_key(self, adapter: str, cache_salt: str) -> bytes:
        """What the name of a block depends on besides the tokens up to its end."""
        return extra_key(self.fingerprint, adapter, cache_salt)


def load_model(settings: FrontSettings) -> ServedModel:
    """Reads the model's configuration and tokenizer, which takes a fraction of a second.

    Raises:
        FileNotFoundError: the directory lacks a file.
        ValueError: a file or a setting cannot be used; the message says which.
    """
    config = read_model(settings.model_dir)
    max_model_tokens = settings.max_model_tokens or config.max_position_embeddings
    if not 2 <= max_model_tokens <= config.max_position_embeddings:
        raise ValueError(
            f"max_model_tokens must be between 2 and the model's {config.max_position_embeddings}, "
            f"got {max_model_tokens}"
        )
    return ServedModel(
        name=settings.model or settings.model_dir.name,
        fingerprint=model_fingerprint(settings.model_dir, settings.revision),
        dtype=resolve_dtype(settings.dtype, config),
        max_model_tokens=max_model_tokens,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        block_size=settings.block_size,
        tokenizer=TextTokenizer.from_directory(settings.model_dir),
    )
