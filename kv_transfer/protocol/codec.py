"""The push messages as bytes, little-endian:

    version u8 | kind u8 | crc32 u32 of version, kind and body | body | tail

Only PushChunk has a tail: one u64 a summed block (or a piece of one), the checksums, which the transport appends when
it sums the blocks in the same pass as it copies them (Transport.write). The body says which blocks those are, so a tail
of another length is refused. The CRC covers everything but the tail; a checksum that was damaged on its way fails
against its block, and the chunk is written again.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

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
    are_positions,
)

VERSION = 3
MAX_REQUEST_ID_BYTES = 256
MAX_REASON_BYTES = 300
"""Longer reasons are cut."""
MAX_ITEMS = 65_535
"""Blocks, chunks, leases or tokens in one message."""

_HEADER = struct.Struct("<BBI")
_LENGTH = struct.Struct("<H")
_ATTEMPT_LEASE = struct.Struct("<IQ")
_CHUNK = struct.Struct("<HIHHHH")
_BLOCK = struct.Struct("<IIQ")
_POSITION = struct.Struct("<H")
_END = struct.Struct("<HIIIHQQQ")
_TOKEN = struct.Struct("<HII?d")
_ALTERNATIVE = struct.Struct("<Id")
_FLAG = struct.Struct("<?")
_ROUND = struct.Struct("<H")
_NUMBER = struct.Struct("<I")
_RENEW = struct.Struct("<Q?")
_LEASE = struct.Struct("<Q")


class MalformedMessageError(Exception):
    """These bytes are not a push message of this version."""


def encode(message: PushMessage) -> bytes:
    """Raises ValueError for a message that has no encoding: a number out of range, too many items, a long id.

    A PushChunk without its checksums is encoded as it is given to the transport, which appends them.
    """
    kind = _KINDS.get(type(message))
    if kind is None:
        raise ValueError(f"message: {type(message).__name__} is not a push message")
    tail = b""
    try:
        body = b"".join(_ENCODERS[kind](message))
        if isinstance(message, PushChunk):
            tail = struct.pack(f"<{len(message.checksums)}Q", *message.checksums)
    except struct.error as error:
        raise ValueError(f"message: {error} in {message}") from error
    return _HEADER.pack(VERSION, kind, _crc(kind, body)) + body + tail


def decode(payload: bytes) -> PushMessage:
    """Raises MalformedMessageError."""
    try:
        version, kind, crc = _HEADER.unpack_from(payload)
        if version != VERSION:
            raise MalformedMessageError(f"version {version}, where this worker speaks {VERSION}")
        decoder = _DECODERS.get(kind)
        if decoder is None:
            raise MalformedMessageError(f"unknown kind {kind}")
        reader = _Reader(payload, _HEADER.size)
        message = decoder(reader)
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"cut short or damaged: {error}") from error
    if crc != _crc(kind, payload[_HEADER.size : reader.body_end]):
        raise MalformedMessageError("the CRC does not match")
    if reader.offset != len(payload):
        raise MalformedMessageError(f"{len(payload) - reader.offset} bytes too many")
    return message


def _crc(kind: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(bytes((VERSION, kind))))


class _Reader:
    """Takes values off the front of a payload; struct.error where it ends too early."""

    def __init__(self, payload: bytes, offset: int) -> None:
        self._payload = payload
        self.offset = offset
        self._body_end: int | None = None

    @property
    def body_end(self) -> int:
        return self.offset if self._body_end is None else self._body_end

    def take(self, fields: struct.Struct) -> tuple[Any, ...]:
        values = fields.unpack_from(self._payload, self.offset)
        self.offset += fields.size
        return values

    def take_text(self) -> str:
        (length,) = self.take(_LENGTH)
        return str(self.take(struct.Struct(f"{length}s"))[0], "utf-8")

    def take_items(self, fields: struct.Struct) -> list[tuple[Any, ...]]:
        (count,) = self.take(_LENGTH)
        return [self.take(fields) for _ in range(count)]

    def take_tail(self, count: int) -> tuple[int, ...]:
        self._body_end = self.offset
        return self.take(struct.Struct(f"<{count}Q"))


# ---- parts ---------------------------------------------------------------------------------------------------


def _text(text: str, max_bytes: int) -> bytes:
    data = text.encode("utf-8", "replace")[:max_bytes]
    data = data.decode("utf-8", "ignore").encode()  # not cut within a character
    return _LENGTH.pack(len(data)) + data


def _head(key: PushKey, lease_id: int) -> bytes:
    if len(key.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise ValueError(f"request_id: longer than {MAX_REQUEST_ID_BYTES} bytes")
    return _text(key.request_id, MAX_REQUEST_ID_BYTES) + _ATTEMPT_LEASE.pack(key.attempt, lease_id)


def _read_head(reader: _Reader) -> tuple[PushKey, int]:
    request_id = reader.take_text()
    attempt, lease_id = reader.take(_ATTEMPT_LEASE)
    return PushKey(request_id, attempt), lease_id


def _items(fields: struct.Struct, items: Sequence[tuple[float, ...]]) -> bytes:
    if len(items) > MAX_ITEMS:
        raise ValueError(f"message: {len(items)} items, at most {MAX_ITEMS}")
    return _LENGTH.pack(len(items)) + b"".join(fields.pack(*item) for item in items)


# ---- one pair a message --------------------------------------------------------------------------------------


def _encode_chunk(message: PushChunk) -> list[bytes]:
    if message.checksums and len(message.checksums) != message.num_checksums:
        raise ValueError(
            f"checksums: {len(message.checksums)} for {len(message.summed)} blocks of {message.num_pieces} pieces"
        )
    if not are_positions(message.summed, len(message.blocks)):
        raise ValueError(f"summed: {message.summed} of {len(message.blocks)} blocks")
    if message.num_layers < 1:
        raise ValueError(f"num_layers: must be at least 1, is {message.num_layers}")
    blocks = [(block.index, block.block_id, block.generation) for block in message.blocks]
    fields = _CHUNK.pack(
        message.rank, message.chunk, message.round, message.first_layer, message.num_layers, message.num_pieces
    )
    summed = _items(_POSITION, [(position,) for position in message.summed])
    return [_head(message.key, message.lease_id), fields, _items(_BLOCK, blocks), summed]


def _decode_chunk(reader: _Reader) -> PushChunk:
    key, lease_id = _read_head(reader)
    rank, chunk, round_, first_layer, num_layers, num_pieces = reader.take(_CHUNK)
    if num_layers == 0:
        raise MalformedMessageError("a chunk without layers")
    blocks = tuple(BlockGrant(*block) for block in reader.take_items(_BLOCK))
    summed = tuple(position for (position,) in reader.take_items(_POSITION))
    if not are_positions(summed, len(blocks)):
        raise MalformedMessageError(f"a chunk of {len(blocks)} blocks with the sums of {summed}")
    checksums = reader.take_tail(len(summed) * num_pieces)
    return PushChunk(
        key=key,
        lease_id=lease_id,
        rank=rank,
        chunk=chunk,
        blocks=blocks,
        first_layer=first_layer,
        num_layers=num_layers,
        summed=summed,
        checksums=checksums,
        round=round_,
        num_pieces=num_pieces,
    )


def _encode_end(message: PushEnd) -> list[bytes]:
    fields = _END.pack(
        message.rank,
        message.num_chunks,
        message.num_blocks,
        message.num_tokens,
        message.round,
        message.stats.size_bytes,
        message.stats.early_bytes,
        message.stats.duration_ns,
    )
    parts = [_head(message.key, message.lease_id), fields, _LENGTH.pack(len(message.first_tokens))]
    for token in message.first_tokens:
        is_known = token.logprob is not None
        parts.append(_TOKEN.pack(token.choice, token.position, token.token_id, is_known, token.logprob or 0.0))
        parts.append(_items(_ALTERNATIVE, token.top))
    return parts


def _read_first_token(reader: _Reader) -> FirstToken:
    choice, position, token_id, is_known, logprob = reader.take(_TOKEN)
    top = tuple((token, value) for token, value in reader.take_items(_ALTERNATIVE))
    return FirstToken(
        choice=choice, position=position, token_id=token_id, logprob=logprob if is_known else None, top=top
    )


def _decode_end(reader: _Reader) -> PushEnd:
    key, lease_id = _read_head(reader)
    rank, num_chunks, num_blocks, num_tokens, round_, size_bytes, early_bytes, duration_ns = reader.take(_END)
    (num_first_tokens,) = reader.take(_LENGTH)
    first_tokens = tuple(_read_first_token(reader) for _ in range(num_first_tokens))
    return PushEnd(
        key=key,
        lease_id=lease_id,
        rank=rank,
        num_chunks=num_chunks,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        first_tokens=first_tokens,
        stats=PushStats(size_bytes=size_bytes, early_bytes=early_bytes, duration_ns=duration_ns),
        round=round_,
    )


def _encode_abort(message: PushAbort) -> list[bytes]:
    head = _head(message.key, message.lease_id)
    return [head, _FLAG.pack(message.stopped), _text(message.reason, MAX_REASON_BYTES)]


def _decode_abort(reader: _Reader) -> PushAbort:
    key, lease_id = _read_head(reader)
    (stopped,) = reader.take(_FLAG)
    return PushAbort(key=key, lease_id=lease_id, stopped=stopped, reason=reader.take_text())


def _encode_stop(message: PushStop) -> list[bytes]:
    return [_head(message.key, message.lease_id), _text(message.reason, MAX_REASON_BYTES)]


def _decode_stop(reader: _Reader) -> PushStop:
    key, lease_id = _read_head(reader)
    return PushStop(key=key, lease_id=lease_id, reason=reader.take_text())


def _encode_missing(message: PushMissing) -> list[bytes]:
    chunks = _items(_NUMBER, [(chunk,) for chunk in message.chunks])
    return [_head(message.key, message.lease_id), _ROUND.pack(message.round), chunks]


def _decode_missing(reader: _Reader) -> PushMissing:
    key, lease_id = _read_head(reader)
    (round_,) = reader.take(_ROUND)
    chunks = tuple(chunk for (chunk,) in reader.take_items(_NUMBER))
    return PushMissing(key=key, lease_id=lease_id, chunks=chunks, round=round_)


def _encode_committed(message: PushCommitted) -> list[bytes]:
    return [_head(message.key, message.lease_id)]


def _decode_committed(reader: _Reader) -> PushCommitted:
    key, lease_id = _read_head(reader)
    return PushCommitted(key=key, lease_id=lease_id)


def _encode_renew(message: LeaseRenew) -> list[bytes]:
    leases = _items(_LEASE, [(lease_id,) for lease_id in message.lease_ids])
    return [_RENEW.pack(message.sent_ns, message.is_reply), leases]


def _decode_renew(reader: _Reader) -> LeaseRenew:
    sent_ns, is_reply = reader.take(_RENEW)
    lease_ids = tuple(lease_id for (lease_id,) in reader.take_items(_LEASE))
    return LeaseRenew(lease_ids=lease_ids, sent_ns=sent_ns, is_reply=is_reply)


_KINDS: dict[type, int] = {
    PushChunk: 1,
    PushEnd: 2,
    PushAbort: 3,
    PushStop: 4,
    PushMissing: 5,
    PushCommitted: 6,
    LeaseRenew: 7,
}
"""Numbers are never reused."""
_ENCODERS: dict[int, Callable[[Any], list[bytes]]] = {
    1: _encode_chunk,
    2: _encode_end,
    3: _encode_abort,
    4: _encode_stop,
    5: _encode_missing,
    6: _encode_committed,
    7: _encode_renew,
}
_DECODERS: dict[int, Callable[[_Reader], PushMessage]] = {
    1: _decode_chunk,
    2: _decode_end,
    3: _decode_abort,
    4: _decode_stop,
    5: _decode_missing,
    6: _decode_committed,
    7: _decode_renew,
}
