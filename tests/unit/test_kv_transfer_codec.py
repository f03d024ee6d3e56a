"""Push messages as bytes: fixed vectors, round trips, and damage that must not pass."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.protocol.codec import MAX_REASON_BYTES, MalformedMessageError, decode, encode
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
SUMMED = CHUNKS.flatmap(
    lambda chunk: st.lists(U64, min_size=len(chunk.blocks), max_size=len(chunk.blocks)).map(
        lambda sums: replace(chunk, checksums=tuple(sums))
    )
)
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
    SUMMED,
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
    without_tail = len(payload) - (8 * len(message.checksums) if isinstance(message, PushChunk) else 0)
    length = data.draw(st.integers(0, len(payload) - 1).filter(lambda size: size != without_tail))
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
    chunk = replace(CHUNK, blocks=(BlockGrant(0, 7, 9), BlockGrant(1, 8, 9)))
    appended = encode(chunk) + (11).to_bytes(8, "little") + (12).to_bytes(8, "little")
    decoded = decode(appended)
    assert isinstance(decoded, PushChunk) and decoded.checksums == (11, 12) and decoded.blocks == chunk.blocks


def test_encoding_is_fixed() -> None:
    """Workers of two releases may meet: a change of these bytes needs a new version."""
    assert encode(PushCommitted(key=KEY, lease_id=3)).hex() == "02069bec01f102007231020000000300000000000000"
    renew = LeaseRenew(lease_ids=(5, 6), sent_ns=7, is_reply=True)
    assert encode(renew).hex() == "0207f1fd87750700000000000000010200" + "0500000000000000" + "0600000000000000"
    head = "02011f47900b" + "0200723102000000" + "0300000000000000"
    body = "0000010000000000" + "05000200" + "0100" + "0100" + "00000000070000000900000000000000"
    assert encode(CHUNK).hex() == head + body


def test_chunk_without_layers_is_refused() -> None:
    """Whole and undamaged, but of a sender that does not keep to the protocol."""
    body = encode(CHUNK)[6:].replace(struct.pack("<HH", 5, 2), struct.pack("<HH", 5, 0))
    crc = zlib.crc32(body, zlib.crc32(bytes((2, 1))))
    with pytest.raises(MalformedMessageError, match="without layers"):
        decode(struct.pack("<BBI", 2, 1, crc) + body)


def test_other_version_is_named() -> None:
    with pytest.raises(MalformedMessageError, match="version 1"):
        decode(b"\x01" + encode(PushCommitted(key=KEY, lease_id=3))[1:])


def test_long_reason_is_cut_at_a_character() -> None:
    decoded = decode(encode(PushStop(key=KEY, lease_id=3, reason="ü" * 400)))
    assert isinstance(decoded, PushStop) and decoded.reason == "ü" * (MAX_REASON_BYTES // 2)


@pytest.mark.parametrize(
    "message",
    [
        PushCommitted(key=KEY, lease_id=-1),
        PushCommitted(key=PushKey("x" * 300, 1), lease_id=1),
        LeaseRenew(lease_ids=(0,) * 70_000),
        replace(CHUNK, checksums=(1, 2)),
        replace(CHUNK, num_layers=0),
        replace(CHUNK, first_layer=-1),
        replace(CHUNK, first_layer=70_000),
    ],
    ids=["negative", "long id", "too many", "checksums", "no layer", "negative layer", "too many layers"],
)
def test_what_has_no_encoding_raises(message: PushMessage) -> None:
    with pytest.raises(ValueError):
        encode(message)
