"""Handshakes come from strangers: whatever they say, it is a message or the transport's own error."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from kv_transfer.transport import nccl_wire, nixl_wire, shm_wire
from kv_transfer.transport.base import TransportError

DEEP = b"[" * 100_000
WIRES = (shm_wire, nixl_wire, nccl_wire)


@pytest.mark.parametrize("data", [DEEP, b"7", b"{", b"{}", b"\xff", b'{"version": 2}'])
def test_what_is_no_endpoint_is_refused(data: bytes) -> None:
    for wire, error in zip(
        WIRES, (shm_wire.ShmProtocolError, nixl_wire.NixlProtocolError, nccl_wire.NcclProtocolError), strict=True
    ):
        with pytest.raises(error):
            wire.decode_endpoint(data)


@pytest.mark.parametrize("version", ["2", "\ud800", "é" * 30_000, [[[]]], {"a": 1}, 10**4000, -1, None, 2.5, True])
def test_a_version_of_any_kind_is_refused_with_a_short_word_that_can_be_sent(version: object) -> None:
    data = json.dumps({"version": version}, ensure_ascii=False).encode(errors="surrogatepass")
    ascii_data = json.dumps({"version": version}).encode()
    for said in (data, ascii_data):
        with pytest.raises(TransportError) as refused:
            nixl_wire.decode_handshake(nixl_wire.HELLO, said)
        assert len(str(refused.value).encode()) < 200
        with pytest.raises(TransportError):
            shm_wire.decode_frame(bytes([shm_wire.HELLO]) + said)
        with pytest.raises(TransportError):
            nccl_wire.decode_handshake(bytes([nccl_wire.HELLO]) + said)


@pytest.mark.parametrize(
    ("name", "value"), [("port", 65_536), ("port", -1), ("port", True), ("host", 7), ("token", "\ud800")]
)
def test_fields_are_of_their_type_and_range(name: str, value: object) -> None:
    endpoint = nixl_wire.Endpoint(host="10.0.0.1", port=65_535, token="t")
    assert nixl_wire.decode_endpoint(nixl_wire.encode_endpoint(endpoint)) == endpoint
    damaged = json.dumps({"transport": "nixl", **asdict(endpoint), name: value}).encode()
    with pytest.raises(nixl_wire.NixlProtocolError, match=f"damaged handshake: {name}"):
        nixl_wire.decode_endpoint(damaged)
