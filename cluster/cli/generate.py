"""`baton generate`: one request from the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from baton.v1 import inference_pb2
from cluster.cli.errors import INVALID, CommandError, fail
from cluster.cli.requests import Answer, Client, RequestFailed
from cluster.cli.tables import format_bytes
from cluster.wire.channels import MESSAGE_LIMIT_BYTES
from cluster.wire.codec import outcome_from_wire

MAX_TOKEN_ID: Final = 2**32 - 1
FROM_STDIN: Final = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """As given on the command line; None leaves the choice to the cluster."""

    prompt: str | None = None
    chat: str | None = None
    token_ids: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


def build_request(options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises CommandError where no request can be made of the options; the cluster checks the rest."""
    given = [name for name in ("prompt", "chat", "token_ids") if getattr(options, name) is not None]
    if len(given) != 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        fail(f"give exactly one of --prompt, --chat and --token-ids{f', not {names}' if names else ''}", INVALID)
    request = inference_pb2.GenerateRequest()
    with _naming_the_option(given[0]):
        if options.prompt is not None:
            request.prompt = _text_of("--prompt", options.prompt)
        elif options.chat is not None:
            request.chat.messages.add(role="user", content=_text_of("--chat", options.chat))
        else:
            assert options.token_ids is not None
            request.token_ids.ids.extend(_parse_token_ids(options.token_ids))
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
        value = getattr(options, name)
        if value is not None:
            with _naming_the_option(name):
                setattr(request.sampling, name, value)
    request.sampling.ignore_eos = options.ignore_eos
    with _naming_the_option("stop"):
        request.stop.extend(options.stop)
    return request


def run_generate(
    client: Client, request: inference_pb2.GenerateRequest, timeout_s: float | None, *, as_json: bool
) -> None:
    """Streams the text to stdout and sums up on stderr, or prints one JSON object."""
    if timeout_s is not None and not timeout_s > 0:
        fail(f"--timeout: {timeout_s:g} is not a positive number of seconds", INVALID)
    if as_json:
        answer = client.generate(request, timeout_s, lambda text: None)
        assert answer.done is not None
        print(json.dumps(answer.as_json(outcome_from_wire(answer.done.outcome)), ensure_ascii=False))
        return
    try:
        answer = client.generate(request, timeout_s, _print_piece)
    except RequestFailed as error:
        if error.answer.text and sys.stdout.isatty():
            # The complaint that follows gets a line of its own.
            print(flush=True)
        raise
    print(flush=True)
    print(summary(answer), file=sys.stderr)


def summary(answer: Answer) -> str:
    """One line: how it ended, how long it was, who served it, what moved."""
    assert answer.done is not None
    done = answer.done
    usage = done.usage
    ending = outcome_from_wire(done.outcome).value
    parts = [
        f"{ending} after {done.num_attempts} attempts" if done.num_attempts > 1 else ending,
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} written",
        f"{done.prefill_worker} -> {done.decode_worker}" if done.prefill_worker else done.decode_worker,
    ]
    if done.kv.bytes:
        parts.append(f"{format_bytes(done.kv.bytes)} of KV over {done.kv.transport}")
    if done.timeline.HasField("first_token_ms"):
        parts.append(f"first token after {done.timeline.first_token_ms:.0f} ms")
    if done.timeline.HasField("decode_ms") and usage.completion_tokens > 1 and done.timeline.decode_ms > 0:
        parts.append(f"{(usage.completion_tokens - 1) * 1e3 / done.timeline.decode_ms:.1f} tokens/s")
    return "; ".join(parts)


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _text_of(option: str, given: str) -> str:
    """The text itself, or what stdin says where `-` is given: without the line break that ends it, as in `$(...)`."""
    if given != FROM_STDIN:
        return given
    content = sys.stdin.buffer.read(MESSAGE_LIMIT_BYTES + 1)
    if len(content) > MESSAGE_LIMIT_BYTES:
        fail(f"{option}: stdin has more than {MESSAGE_LIMIT_BYTES} bytes", INVALID)
    return content.decode("utf-8").removesuffix("\n").removesuffix("\r")


def _parse_token_ids(text: str) -> list[int]:
    ids = []
    for part in text.split(","):
        part = part.strip()
        if not part.isascii() or not part.isdigit() or int(part) > MAX_TOKEN_ID:
            fail(f"--token-ids: {part!r} is not a token id; expected numbers such as 1,2,3", INVALID)
        ids.append(int(part))
    return ids


@contextlib.contextmanager
def _naming_the_option(name: str) -> Iterator[None]:
    """Protobuf's complaints about a value do not say which option it came from."""
    try:
        yield
    except ValueError as error:
        message = "the text is not valid UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise CommandError(f"--{name.replace('_', '-')}: {message}", INVALID) from error
