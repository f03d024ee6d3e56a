"""Text to token ids: the model's own tokenizer and chat template, read from its directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from cluster.front.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    role: str
    content: str


class ChatTemplateError(ValueError):
    """The model's chat template does not take this conversation."""


class TextTokenizer:
    """Encodes prompts and makes detokenizers. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None, special_tokens: dict[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = special_tokens
        added = tokenizer.get_added_tokens_decoder()
        self._skipped_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._longest_token_characters = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def from_directory(cls, model_dir: Path) -> TextTokenizer:
        """Reads tokenizer.json, and tokenizer_config.json and chat_template.jinja where they exist.

        Raises:
            FileNotFoundError: there is no tokenizer.json.
            ValueError: a file cannot be understood.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: {model_dir} has no tokenizer")
        try:
            tokenizer = Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        config = _read_config(model_dir / "tokenizer_config.json")
        return cls(tokenizer, _read_template(model_dir, config), _special_tokens(config))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def can_fit(self, text: str, num_tokens: int) -> bool:
        """False where the text is so long that it cannot be `num_tokens` or fewer; spares tokenising it."""
        return len(text) <= num_tokens * self._longest_token_characters

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text. Special tokens spelt out in it are recognised."""
        # encode_batch, unlike encode, lets other threads run meanwhile.
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def render_chat(self, turns: Sequence[ChatTurn]) -> str:
        """The conversation as the model was trained to read it, with the beginning of the assistant's turn.

        To be encoded without adding special tokens: the template has written them.

        Raises:
            ChatTemplateError: there is no template, or it refuses the conversation.
        """
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; send a plain prompt")
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, TypeError) as error:
            raise ChatTemplateError(f"the model's chat template refuses the conversation: {error}") from error

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, self._skipped_ids)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return config


def _read_template(model_dir: Path, config: dict[str, Any]) -> Template | None:
    """Newer directories keep the template in a file of its own, older ones in tokenizer_config.json."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            source: str | None = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not valid UTF-8: {error}") from error
    else:
        path = model_dir / "tokenizer_config.json"
        source = _configured_template(config)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template in {path} is malformed: {error}") from error


def _configured_template(config: dict[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError("chat_template in tokenizer_config.json must be text")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which templates refer to."""
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _to_json(value: Any, indent: int | None = None) -> str:
    """As chat templates expect it: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
