"""What may be asked for: every field of a GenerateRequest is checked here, before anything is reserved anywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from baton.v1 import inference_pb2
from cluster.core.errors import InvalidRequestError, NotFoundError
from cluster.core.limits import MAX_CHOICES
from cluster.front.settings import DEFAULT_MAX_TOKENS, ServedModel
from cluster.front.tokenizer import ChatTemplateError, ChatTurn
from cluster.wire.channels import MAX_DEADLINE_S
from engine.core.request import RequestBody, Sibling
from engine.core.sampling import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_PRIORITY = 100
MAX_TIMEOUT_MS = int(MAX_DEADLINE_S * 1000)
MAX_NAME_CHARACTERS = 128
MAX_CHAT_MESSAGES = 1024
CHAT_ROLES = ("system", "user", "assistant")
PROMPT_FIELDS = ("prompt", "token_ids", "chat")

_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_NAME_CHARACTERS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request of which everything but the prompt's length is known to be right.

    Attributes:
        request_id: empty if the client gave none.
        prompt_field: the field that held the prompt, for messages.
        prompt_ids: set if the client sent token ids; otherwise `text` is to be encoded, with the tokenizer's special
            tokens if `add_special_tokens`.
    """

    request_id: str
    prompt_field: str
    prompt_ids: tuple[int, ...] | None
    text: str
    add_special_tokens: bool
    sampling: SamplingParams
    num_choices: int
    stop: tuple[str, ...]
    priority: int
    tenant: str
    cache_salt: str
    max_latency_ms: int | None
    timeout_ms: int | None

    def tokenise(self, model: ServedModel) -> tuple[int, ...]:
        """The prompt's ids. Takes about 1 ms for 1,000 tokens of text.

        Raises: InvalidRequestError where the prompt and one token of output do not fit the context.
        """
        if self.prompt_ids is not None:
            ids: tuple[int, ...] = self.prompt_ids
        elif not model.tokenizer.can_fit(self.text, model.max_model_tokens):
            raise InvalidRequestError(self.prompt_field, f"{len(self.text)} characters cannot {_fit(model)}")
        else:
            ids = tuple(model.tokenizer.encode(self.text, add_special_tokens=self.add_special_tokens))
        if not ids:
            raise InvalidRequestError(self.prompt_field, "must not be empty: it has no token")
        if len(ids) + 1 > model.max_model_tokens:
            raise InvalidRequestError(self.prompt_field, f"{len(ids)} tokens do not {_fit(model)}")
        return ids

    def body(self, prompt_ids: tuple[int, ...], model: ServedModel) -> RequestBody:
        """What the engine gets: `max_tokens` is cut to what the context has room for."""
        max_tokens = min(self.sampling.max_tokens, model.max_model_tokens - len(prompt_ids))
        sampling = replace(self.sampling, max_tokens=max_tokens, min_tokens=min(self.sampling.min_tokens, max_tokens))
        return RequestBody(
            prompt_ids=prompt_ids,
            sampling=sampling,
            siblings=tuple(Sibling(choice=choice) for choice in range(1, self.num_choices)),
            cache_salt=self.cache_salt,
            priority=self.priority,
        )


def check_request(request: inference_pb2.GenerateRequest, model: ServedModel, seed: int) -> CheckedRequest:
    """Checks everything that needs no tokenizer. `seed` is used if the client gave none.

    Raises:
        InvalidRequestError: names the field.
        NotFoundError: another model was asked for.
    """
    if request.model not in ("", model.name):
        raise NotFoundError(f"model: {request.model!r} is not served here; this is {model.name!r}")
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidRequestError("request_id", f"must be at most {MAX_NAME_CHARACTERS} characters of [A-Za-z0-9._:-]")
    if request.adapter:
        raise InvalidRequestError("adapter", f"{request.adapter!r} is not served here: this cluster has no adapters")
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            "priority", f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {request.priority}"
        )
    if request.timeout_ms > MAX_TIMEOUT_MS:
        raise InvalidRequestError("timeout_ms", f"must be at most {MAX_TIMEOUT_MS} (30 days), got {request.timeout_ms}")
    for field in ("tenant", "cache_salt"):
        length = len(getattr(request, field))
        if length > MAX_NAME_CHARACTERS:
            raise InvalidRequestError(field, f"has {length} characters, at most {MAX_NAME_CHARACTERS} are allowed")
    field, prompt_ids, text = _prompt(request, model)
    return CheckedRequest(
        request_id=request.request_id,
        prompt_field=field,
        prompt_ids=prompt_ids,
        text=text,
        add_special_tokens=field == "prompt",
        sampling=_sampling(request.sampling, model, seed),
        num_choices=_num_choices(request.sampling),
        stop=_stop_strings(request),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        max_latency_ms=request.max_latency_ms or None,
        timeout_ms=request.timeout_ms or None,
    )


def _prompt(request: inference_pb2.GenerateRequest, model: ServedModel) -> tuple[str, tuple[int, ...] | None, str]:
    """The field in use, and its token ids or its text."""
    field = request.WhichOneof("input")
    if field == "prompt":
        if not request.prompt:
            raise InvalidRequestError("prompt", "must not be empty")
        return field, None, request.prompt
    if field == "token_ids":
        return field, _token_ids(request.token_ids.ids, model), ""
    if field == "chat":
        return field, None, _render(request.chat.messages, model)
    raise InvalidRequestError("prompt", "one of prompt, token_ids and chat must be set")


def _token_ids(ids: object, model: ServedModel) -> tuple[int, ...]:
    token_ids: tuple[int, ...] = tuple(ids)  # type: ignore[arg-type]
    if not token_ids:
        raise InvalidRequestError("token_ids", "must not be empty")
    if max(token_ids) >= model.vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= model.vocab_size)
        raise InvalidRequestError(f"token_ids.ids[{index}]", _outside(token_ids[index], model))
    return token_ids


def _render(messages: object, model: ServedModel) -> str:
    turns = [ChatTurn(role=message.role, content=message.content) for message in messages]  # type: ignore[attr-defined]
    if not turns:
        raise InvalidRequestError("chat.messages", "must not be empty")
    if len(turns) > MAX_CHAT_MESSAGES:
        raise InvalidRequestError(
            "chat.messages", f"has {len(turns)} messages, at most {MAX_CHAT_MESSAGES} are allowed"
        )
    for index, turn in enumerate(turns):
        if turn.role not in CHAT_ROLES:
            raise InvalidRequestError(
                f"chat.messages[{index}].role", f"must be one of {', '.join(CHAT_ROLES)}, got {turn.role!r}"
            )
    try:
        return model.tokenizer.render_chat(turns)
    except ChatTemplateError as error:
        raise InvalidRequestError("chat", str(error)) from error


def _sampling(wire: inference_pb2.SamplingParams, model: ServedModel, seed: int) -> SamplingParams:
    """Fills in the defaults. Ranges are checked by SamplingParams itself, whose messages begin with the field."""
    for name, token_ids in (("stop_token_ids", wire.stop_token_ids), ("logit_bias", wire.logit_bias)):
        for token_id in token_ids:
            if token_id >= model.vocab_size:
                raise InvalidRequestError(f"sampling.{name}", _outside(token_id, model))
    try:
        return SamplingParams(
            temperature=wire.temperature,
            top_k=wire.top_k,
            top_p=wire.top_p if wire.HasField("top_p") else 1.0,
            min_p=wire.min_p,
            presence_penalty=wire.presence_penalty,
            frequency_penalty=wire.frequency_penalty,
            repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
            seed=wire.seed if wire.HasField("seed") else seed,
            max_tokens=wire.max_tokens if wire.HasField("max_tokens") else DEFAULT_MAX_TOKENS,
            min_tokens=wire.min_tokens,
            stop_token_ids=tuple(wire.stop_token_ids),
            ignore_eos=wire.ignore_eos,
            logprobs=wire.logprobs if wire.HasField("logprobs") else None,
            prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
            logit_bias=tuple(sorted(wire.logit_bias.items())),
        )
    except ValueError as error:
        name, _, message = str(error).partition(" ")
        raise InvalidRequestError(f"sampling.{name}", message) from error


def _num_choices(wire: inference_pb2.SamplingParams) -> int:
    if not wire.HasField("num_choices"):
        return 1
    if not 1 <= wire.num_choices <= MAX_CHOICES:
        raise InvalidRequestError(
            "sampling.num_choices", f"must be between 1 and {MAX_CHOICES}, got {wire.num_choices}"
        )
    return wire.num_choices


def _stop_strings(request: inference_pb2.GenerateRequest) -> tuple[str, ...]:
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"has {len(request.stop)} texts, at most {MAX_STOP_STRINGS} are allowed")
    for index, stop in enumerate(request.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(stop)}"
            )
    return tuple(request.stop)


def _fit(model: ServedModel) -> str:
    return f"fit the model's context of {model.max_model_tokens} tokens together with an answer"


def _outside(token_id: int, model: ServedModel) -> str:
    return f"token id {token_id} is outside the vocabulary (0..{model.vocab_size - 1})"
