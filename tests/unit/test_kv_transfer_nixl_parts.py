"""Parts of the nixl transport that need no library: frames, endpoints, how writes are cut, limits."""

from __future__ import annotations

import os
import random

import pytest

from kv_transfer.protocol.plan import Copy
from kv_transfer.transport.handshake import MAX_NUMBER
from kv_transfer.transport.nixl_agent import NixlError, check_environment
from kv_transfer.transport.nixl_limits import NixlLimits
from kv_transfer.transport.nixl_link import open_connection
from kv_transfer.transport.nixl_wire import (
    HEADER,
    MAX_BODY_BYTES,
    MAX_ENDPOINT_BYTES,
    NOTIFY,
    PING,
    Endpoint,
    FrameReader,
    NixlProtocolError,
    Welcome,
    decode_endpoint,
    decode_handshake,
    encode_endpoint,
    encode_frame,
    encode_handshake,
)
from kv_transfer.transport.nixl_write import cut


def test_frames_survive_any_cut_of_the_stream() -> None:
    rng = random.Random(3)
    frames = [(NOTIFY, rng.randbytes(rng.choice((0, 1, 100, MAX_BODY_BYTES)))) for _ in range(20)] + [(PING, b"")]
    stream = b"".join(encode_frame(kind, body) for kind, body in frames)
    reader = FrameReader()
    heard: list[tuple[int, bytes]] = []
    position = 0
    while position < len(stream):
        size = rng.choice((1, 3, 1000, 100_000))
        heard += reader.feed(stream[position : position + size])
        position += size
    assert heard == frames


def test_frame_that_is_too_large_is_refused_before_it_arrives() -> None:
    with pytest.raises(NixlProtocolError, match="limit"):
        FrameReader().feed(HEADER.pack(MAX_BODY_BYTES + 1, NOTIFY))


def test_endpoint_and_handshake_come_back() -> None:
    endpoint = Endpoint(host="10.0.0.1", port=4711, token="t")
    encoded = encode_endpoint(endpoint)
    assert decode_endpoint(encoded) == endpoint and len(encoded) <= MAX_ENDPOINT_BYTES
    welcome = Welcome(base_address=1 << 47, size_bytes=5, metadata=b"\x00\xff".hex())
    (kind, body), *_ = FrameReader().feed(encode_handshake(welcome))
    assert decode_handshake(kind, body) == welcome and welcome.agent_metadata() == b"\x00\xff"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 1}',
        b'{"transport": "shm", "version": 1}',
        b'{"transport": "nixl", "version": 2, "host": "h", "port": 1, "token": "t"}',
        b'{"transport": "nixl", "version": 1, "host": "h", "port": "1", "token": "t"}',
        b'{"transport": "nixl", "version": 1, "host": "h", "port": true, "token": "t"}',
        b'{"transport": "nixl", "version": 1, "host": "h", "port": 1}',
    ],
)
def test_other_endpoints_are_refused(data: bytes) -> None:
    with pytest.raises(NixlProtocolError):
        decode_endpoint(data)


def test_damaged_metadata_are_refused() -> None:
    with pytest.raises(NixlProtocolError, match="metadata"):
        Welcome(base_address=1, size_bytes=1, metadata="x").agent_metadata()


def test_pool_beyond_the_end_of_memory_is_refused() -> None:
    (kind, body), *_ = FrameReader().feed(encode_handshake(Welcome(base_address=MAX_NUMBER, size_bytes=1, metadata="")))
    with pytest.raises(NixlProtocolError, match="base_address"):
        decode_handshake(kind, body)


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "."])
def test_what_can_be_no_host_cannot_be_reached(host: str) -> None:
    wake_fd = os.eventfd(0)
    try:
        with pytest.raises(OSError, match="is no host"):
            open_connection(host, 1, wake_fd, 1.0)
    finally:
        os.close(wake_fd)


def test_writes_are_cut_without_losing_a_byte() -> None:
    rng = random.Random(5)
    for _ in range(200):
        copies = [Copy(rng.randrange(1000), rng.randrange(1000), rng.randrange(1, 30)) for _ in range(rng.randrange(9))]
        max_bytes = rng.randrange(1, 40)
        pieces = list(cut(copies, max_bytes))
        for piece in pieces[:-1]:
            assert sum(copy.size_bytes for copy in piece) == max_bytes
        assert all(copy.size_bytes for piece in pieces for copy in piece) and all(pieces)
        assert sum(copy.size_bytes for copy in pieces[-1] if pieces) <= max_bytes if pieces else not copies
        expected = [(c.source_bytes + i, c.target_bytes + i) for c in copies for i in range(c.size_bytes)]
        moved = [(c.source_bytes + i, c.target_bytes + i) for p in pieces for c in p for i in range(c.size_bytes)]
        assert moved == expected


def test_limits_are_above_zero() -> None:
    with pytest.raises(ValueError, match="silence_timeout_s"):
        NixlLimits(silence_timeout_s=0)


@pytest.mark.parametrize("names", ["tcp", "tcp,self", "^cma", "^sm", "^shm,tcp", "rc,ud"])
def test_environment_without_cma_is_taken(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("UCX_TLS", names)
    check_environment()


@pytest.mark.parametrize("names", ["all", "cma", "tcp,cma", "sm", "shm,tcp", "^tcp", "^rc,ud"])
def test_environment_with_cma_is_refused(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("UCX_TLS", names)
    with pytest.raises(NixlError, match="UCX_TLS"):
        check_environment()
