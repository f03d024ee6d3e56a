"""What of a client's message would be lost in parsing is refused instead."""

from __future__ import annotations

import pytest

from baton.v1 import inference_pb2 as pb
from cluster.core.errors import InvalidRequestError
from cluster.front.wire_input import read_generate


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of an encoded message."""
    assert number < 1 << 12 and len(content) < 128
    key = number << 3 | 2
    return (bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])) + bytes([len(content)]) + content


def _varint(number: int, value: int) -> bytes:
    assert number < 1 << 12 and value < 128
    key = number << 3
    return (bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])) + bytes([value])


PROMPT = _field(3, b"x")


@pytest.mark.bad_day(24)
@pytest.mark.parametrize(
    ("data", "path"),
    [
        (PROMPT + _field(40, b"root ::= [0-9]+"), "field 40"),
        (_varint(14, 1) + PROMPT, "field 14"),
        (PROMPT + _field(6, _field(60, b"{}")), "sampling.field 60"),
        (_field(5, _field(1, _field(1, b"user") + _field(2, b"hi") + _field(9, b"image"))), "chat.messages.field 9"),
    ],
)
def test_what_a_later_version_can_ask_for_is_refused_not_ignored(data: bytes, path: str) -> None:
    """A grammar that nobody heeds gives an answer that looks right and is not."""
    error = read_generate(data)
    assert isinstance(error, InvalidRequestError)
    assert str(error).startswith(f"{path}: ") and "does not know" in str(error)


def test_a_message_in_which_everything_is_known_is_read() -> None:
    request = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")]),
        sampling=pb.SamplingParams(temperature=1.0, logit_bias={3: 1.0}, stop_token_ids=[1, 2]),
        stop=["a", "b"],
    )
    assert read_generate(request.SerializeToString()) == request
