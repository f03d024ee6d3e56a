"""`baton generate`: one request from the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from baton.v1 import inference_pb2
from cluster.cli.errors import INVALID, CommandError, fail
from cluster.cli.failures import NUMBERS, OPTIONS
from cluster.cli.requests import Answer, Client, RequestFailed
from cluster.cli.tables import format_bytes
from cluster.core.limits import MAX_CHOICES
from cluster.wire.channels import MAX_DEADLINE_S, MESSAGE_LIMIT_BYTES
from cluster.wire.codec import outcome_from_wire
from engine.core.sampling import MAX_LOGPROBS, SEED_LIMIT

MAX_TOKEN_ID: Final = 2**32 - 1
MAX_COUNT: Final = 2**32 - 1
FROM_STDIN: Final = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """As given on the command line; None leaves the choice to the cluster."""

    prompt: str | None = None
    chat: str | None = None
    token_ids: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    num_choices: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: str | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tenant: str | None = None
    priority: int | None = None
    max_latency_ms: int | None = None
    as_json: bool = False


RANGES: Final = {
    "max_tokens": (1, MAX_COUNT),
    "min_tokens": (0, MAX_COUNT),
    "num_choices": (1, MAX_CHOICES),
    "top_k": (0, MAX_COUNT),
    "seed": (0, SEED_LIMIT - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
"""Of the whole numbers: others may not even fit the message in which the cluster would be asked."""


def build_request(options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises CommandError where no request can be made of the options; the cluster checks the rest."""
    request = inference_pb2.GenerateRequest()
    _fill_prompt(request, options)
    for name, option in NUMBERS.items():
        value = getattr(options, name)
        if value is None:
            continue
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if value < low or value > high:
            fail(f"{option}: must be between {low} and {high}, got {value}", INVALID)
        setattr(request.sampling, name, value)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(options, name) is not None and not options.as_json:
            fail(f"{NUMBERS[name]}: only --json shows log-probabilities", INVALID)
    request.sampling.ignore_eos = options.ignore_eos
    if options.stop_token_ids is not None:
        request.sampling.stop_token_ids.extend(_parse_token_ids("--stop-token-ids", options.stop_token_ids))
    for bias in options.logit_bias:
        token_id, value = _parse_bias(bias)
        request.sampling.logit_bias[token_id] = value
    with _naming("--stop"):
        request.stop.extend(options.stop)
    for name in ("tenant", "priority", "max_latency_ms"):
        value = getattr(options, name)
        if value is not None:
            with _naming(OPTIONS[name]):
                setattr(request, name, value)
    return request


def _fill_prompt(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    given = [name for name in ("prompt", "chat", "token_ids") if getattr(options, name) is not None]
    if len(given) != 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        fail(f"give exactly one of --prompt, --chat and --token-ids{f', not {names}' if names else ''}", INVALID)
    with _naming(f"--{given[0].replace('_', '-')}"):
        if options.prompt is not None:
            request.prompt = _text_of("--prompt", options.prompt)
        elif options.chat is not None:
            request.chat.messages.add(role="user", content=_text_of("--chat", options.chat))
        else:
            assert options.token_ids is not None
            request.token_ids.ids.extend(_parse_token_ids("--token-ids", options.token_ids))


def check_timeout(timeout_s: float | None) -> None:
    """Raises CommandError for what cannot be a call's deadline."""
    if timeout_s is not None and not 0 < timeout_s <= MAX_DEADLINE_S:
        expected = f"above 0 and at most {MAX_DEADLINE_S:.0f} (30 days)"
        fail(f"--timeout: {timeout_s:g} is not a number of seconds {expected}; without it there is no limit", INVALID)


def run_generate(
    client: Client, request: inference_pb2.GenerateRequest, timeout_s: float | None, *, as_json: bool
) -> None:
    """Prints the text to stdout as it comes and sums up on stderr, or prints one JSON object."""
    if as_json:
        answer = client.generate(request, timeout_s, lambda reply: None)
        assert answer.done is not None
        print(json.dumps(answer.as_json(outcome_from_wire(answer.done.outcome)), ensure_ascii=False))
        return
    printer = _Printer(is_single=request.sampling.num_choices <= 1)
    try:
        answer = client.generate(request, timeout_s, printer.take)
    except RequestFailed:
        printer.fail()
        raise
    printer.finish()
    print(summary(answer), file=sys.stderr)


class _Printer:
    """A single answer is printed as it comes; of several each when it is complete, under its number."""

    def __init__(self, *, is_single: bool) -> None:
        self._is_single = is_single
        self._texts: dict[int, str] = {}  # that are not printed, or not in whole

    def take(self, reply: inference_pb2.GenerateResponse) -> None:
        self._texts[reply.choice] = self._texts.get(reply.choice, "") + reply.text
        if self._is_single:
            print(reply.text, end="", flush=True)
        elif reply.finish:
            self._print(reply.choice, outcome_from_wire(reply.finish).value)

    def finish(self) -> None:
        if self._is_single:
            print(flush=True)

    def fail(self) -> None:
        """Nothing more comes; a complaint follows."""
        if not self._is_single:
            for choice in sorted(self._texts):
                self._print(choice, "unfinished")
        elif any(self._texts.values()) and sys.stdout.isatty():
            print(flush=True)  # the complaint gets a line of its own

    def _print(self, choice: int, ending: str) -> None:
        print(f"--- answer {choice + 1}: {ending}\n{self._texts.pop(choice)}", flush=True)


def summary(answer: Answer) -> str:
    """One line: how it ended, how long it was, who served it, what moved, and its id."""
    assert answer.done is not None
    done = answer.done
    usage = done.usage
    ending = outcome_from_wire(done.outcome).value
    parts = [
        f"{ending} after {done.num_attempts} attempts" if done.num_attempts > 1 else ending,
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} written",
        f"{done.prefill_worker} -> {done.decode_worker}" if done.prefill_worker else _alone(done),
    ]
    if done.kv.bytes:
        parts.append(f"{format_bytes(done.kv.bytes)} of KV over {done.kv.transport}")
    if done.timeline.HasField("first_token_ms"):
        parts.append(f"first token after {done.timeline.first_token_ms:.0f} ms")
    if done.timeline.HasField("decode_ms") and usage.completion_tokens > 1 and done.timeline.decode_ms > 0:
        parts.append(f"{(usage.completion_tokens - 1) * 1e3 / done.timeline.decode_ms:.1f} tokens/s")
    parts.append(f"request {answer.request_id}")
    return "; ".join(parts)


def _alone(done: inference_pb2.Done) -> str:
    """One worker did everything."""
    return f"{done.decode_worker} ({done.route})" if done.route else done.decode_worker


def _text_of(option: str, given: str) -> str:
    """The text itself, or what stdin says where `-` is given: without the line break that ends it, as in `$(...)`."""
    text = given
    if given == FROM_STDIN:
        content = sys.stdin.buffer.read(MESSAGE_LIMIT_BYTES + 1)
        if len(content) > MESSAGE_LIMIT_BYTES:
            fail(f"{option}: stdin has more than {MESSAGE_LIMIT_BYTES} bytes", INVALID)
        text = content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    if not text:
        fail(f"{option}: must not be empty", INVALID)
    return text


def _parse_token_ids(option: str, text: str) -> list[int]:
    return [_parse_token_id(option, part.strip(), "numbers such as 1,2,3") for part in text.split(",")]


def _parse_token_id(option: str, text: str, expected: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MAX_TOKEN_ID:
        fail(f"{option}: {text!r} is not a token id; expected {expected}", INVALID)
    return int(text)


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    expected = "an id and a number such as 13=-2.5"
    try:
        return _parse_token_id("--logit-bias", token_id.strip(), expected), float(bias)
    except ValueError as error:
        raise CommandError(f"--logit-bias: {bias!r} is not a number; expected {expected}", INVALID) from error


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    """Protobuf's complaints about a value do not say which option it came from."""
    try:
        yield
    except ValueError as error:
        message = "the text is not valid UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise CommandError(f"{option}: {message}", INVALID) from error
