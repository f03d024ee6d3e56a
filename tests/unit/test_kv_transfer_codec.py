"""Push messages as bytes: fixed vectors, round trips, and damage that must not pass."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.protocol.codec import MAX_REASON_BYTES, VERSION, MalformedMessageError, decode, encode
from kv_transfer.protocol.messages import (
    BlockGrant,
    FirstToken,
    LeaseRenew,
    PushAbort,
    PushChunk,
    PushCommitted,
    PushEnd,
    PushKey,
    PushMessage,
    PushMissing,
    PushStats,
    PushStop,
)

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.builds(PushKey, st.text(max_size=40), U32)
REASONS = st.text(max_size=60)
BLOCKS = st.lists(st.builds(BlockGrant, U32, U32, U64), max_size=5).map(tuple)
HEAD = {"key": KEYS, "lease_id": U64}
CHUNKS = st.builds(
    PushChunk,
    **HEAD,
    rank=U16,
    chunk=U32,
    blocks=BLOCKS,
    first_layer=U16,
    num_layers=st.integers(1, 2**16 - 1),
    round=U16,
)


@st.composite
def summed_chunks(draw: st.DrawFn) -> PushChunk:
    """Any of its blocks have sums."""
    chunk = draw(CHUNKS)
    summed = tuple(position for position in range(len(chunk.blocks)) if draw(st.booleans()))
    num_pieces = draw(st.integers(0, 3))
    sums = tuple(draw(U64) for _ in range(len(summed) * num_pieces))
    return replace(chunk, summed=summed, num_pieces=num_pieces, checksums=sums)


LOGPROBS = st.floats(max_value=0, allow_nan=False)
FIRST_TOKENS = st.builds(
    FirstToken,
    choice=U16,
    position=U32,
    token_id=U32,
    logprob=st.none() | LOGPROBS,
    top=st.lists(st.tuples(U32, LOGPROBS), max_size=3).map(tuple),
)
MESSAGES: st.SearchStrategy[PushMessage] = st.one_of(
    CHUNKS,
    summed_chunks(),
    st.builds(
        PushEnd,
        **HEAD,
        rank=U16,
        num_chunks=U32,
        num_blocks=U32,
        num_tokens=U32,
        first_tokens=st.lists(FIRST_TOKENS, max_size=3).map(tuple),
        stats=st.builds(PushStats, size_bytes=U64, early_bytes=U64, duration_ns=U64),
        round=U16,
    ),
    st.builds(PushAbort, **HEAD, stopped=st.booleans(), reason=REASONS),
    st.builds(PushStop, **HEAD, reason=REASONS),
    st.builds(PushMissing, **HEAD, chunks=st.lists(U32, max_size=5).map(tuple), round=U16),
    st.builds(PushCommitted, **HEAD),
    st.builds(LeaseRenew, lease_ids=st.lists(U64, max_size=5).map(tuple), sent_ns=U64, is_reply=st.booleans()),
)
KEY = PushKey("r1", 2)
CHUNK = PushChunk(key=KEY, lease_id=3, rank=0, chunk=1, blocks=(BlockGrant(0, 7, 9),), first_layer=5, num_layers=2)
SAMPLED = replace(CHUNK, blocks=tuple(BlockGrant(i, 7 + i, 9) for i in range(3)), summed=(0, 2), num_pieces=2)


@given(MESSAGES)
@settings(max_examples=200, deadline=None)
def test_decode_undoes_encode(message: PushMessage) -> None:
    assert decode(encode(message)) == message


@given(MESSAGES, st.data())
@settings(max_examples=200, deadline=None)
def test_damage_is_never_taken_for_another_message(message: PushMessage, data: st.DataObject) -> None:
    """Checksums at the tail are not covered: they fail against their block."""
    payload = bytearray(encode(message))
    tail_size = 8 * len(message.checksums) if isinstance(message, PushChunk) else 0
    bit = data.draw(st.integers(0, 8 * (len(payload) - tail_size) - 1))
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedMessageError):
        decode(bytes(payload))


@given(MESSAGES, st.data())
@settings(max_examples=100, deadline=None)
def test_cut_or_padded_bytes_are_refused(message: PushMessage, data: st.DataObject) -> None:
    payload = encode(message)
    length = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(MalformedMessageError):
        decode(payload[:length])
    with pytest.raises(MalformedMessageError):
        decode(payload + b"\0")


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(payload)


def test_transport_appends_the_checksums() -> None:
    posted = encode(SAMPLED)
    sums = [value.to_bytes(8, "little") for value in (11, 12, 13, 14)]
    assert decode(posted + b"".join(sums)) == replace(SAMPLED, checksums=(11, 12, 13, 14))
    for number in (0, 1, 3):
        with pytest.raises(MalformedMessageError, match="cut short"):
            decode(posted + b"".join(sums[:number]))
    with pytest.raises(MalformedMessageError, match="8 bytes too many"):
        decode(posted + b"".join(sums) + sums[0])


@pytest.mark.parametrize(
    "summed", [(0, 3), (65_535,), (1, 1), (2, 0), (0, 1, 2, 2)], ids=["beyond", "far", "twice", "descending", "last"]
)
def test_chunk_that_names_no_such_positions_is_refused(summed: tuple[int, ...]) -> None:
    """Whole, undamaged and with as many sums as it says, but of a sender that does not keep to the protocol."""
    with pytest.raises(ValueError, match="summed"):
        encode(replace(SAMPLED, summed=summed))
    body = encode(replace(SAMPLED, summed=()))[6:-2]
    body += struct.pack(f"<H{len(summed)}H", len(summed), *summed)
    with pytest.raises(MalformedMessageError, match="with the sums of"):
        decode(sealed(body) + bytes(8 * len(summed) * SAMPLED.num_pieces))


def sealed(body: bytes) -> bytes:
    """A PushChunk's body with a right header."""
    return struct.pack("<BBI", VERSION, 1, zlib.crc32(body, zlib.crc32(bytes((VERSION, 1))))) + body


def test_encoding_is_fixed() -> None:
    """Workers of two releases may meet: a change of these bytes needs a new version."""
    assert encode(PushCommitted(key=KEY, lease_id=3)).hex() == "03067a5a531e02007231020000000300000000000000"
    renew = LeaseRenew(lease_ids=(5, 6), sent_ns=7, is_reply=True)
    assert (
        encode(renew).hex() == "0307d5248016" + "070000000000000001" + "0200" + "0500000000000000" + "0600000000000000"
    )
    head = "0200723102000000" + "0300000000000000"
    body = "0000010000000000" + "05000200" + "0100" + "0100" + "00000000070000000900000000000000" + "0000"
    assert encode(CHUNK).hex() == "0301cf3ff70d" + head + body
    blocks = "".join(f"0{i}0000000{7 + i}0000000900000000000000" for i in range(3))
    body = "0000010000000000" + "05000200" + "0200" + "0300" + blocks + "0200" + "0000" + "0200"
    tail = "".join(f"0{i}00000000000000" for i in (1, 2, 3, 4))
    assert encode(replace(SAMPLED, checksums=(1, 2, 3, 4))).hex() == "0301169978ee" + head + body + tail


def test_chunk_without_layers_is_refused() -> None:
    """Whole and undamaged, but of a sender that does not keep to the protocol."""
    body = encode(CHUNK)[6:].replace(struct.pack("<HH", 5, 2), struct.pack("<HH", 5, 0))
    with pytest.raises(MalformedMessageError, match="without layers"):
        decode(sealed(body))


def test_other_version_is_named() -> None:
    with pytest.raises(MalformedMessageError, match="version 2"):
        decode(b"\x02" + encode(PushCommitted(key=KEY, lease_id=3))[1:])


def test_long_reason_is_cut_at_a_character() -> None:
    decoded = decode(encode(PushStop(key=KEY, lease_id=3, reason="ü" * 400)))
    assert isinstance(decoded, PushStop) and decoded.reason == "ü" * (MAX_REASON_BYTES // 2)


@pytest.mark.parametrize(
    "message",
    [
        PushCommitted(key=KEY, lease_id=-1),
        PushCommitted(key=PushKey("x" * 300, 1), lease_id=1),
        LeaseRenew(lease_ids=(0,) * 70_000),
        replace(CHUNK, summed=(0,), checksums=(1, 2)),
        replace(CHUNK, checksums=(1,)),
        replace(CHUNK, summed=(1,), checksums=(1,)),
        replace(CHUNK, summed=(-1,), checksums=(1,)),
        replace(CHUNK, num_layers=0),
        replace(CHUNK, first_layer=-1),
        replace(CHUNK, first_layer=70_000),
    ],
    ids=[
        "negative",
        "long id",
        "too many",
        "checksums",
        "nobody's checksum",
        "beyond",
        "before",
        "no layer",
        "negative layer",
        "too many layers",
    ],
)
def test_what_has_no_encoding_raises(message: PushMessage) -> None:
    with pytest.raises(ValueError):
        encode(message)
