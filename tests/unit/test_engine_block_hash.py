"""Block hashes are a wire contract: the vectors were computed from the documented encoding, not by this code."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest

from engine.core.block_hash import ROOT_HASH, block_hash, extra_key, hash_blocks

EXTRA = bytes.fromhex("24acd16b0c1b61f12dfb398e2eb444d0")


def test_extra_key_vectors() -> None:
    assert extra_key("m", "a", "s") == EXTRA
    assert extra_key("m").hex() == "2e39f8f0f65f40a679a38d89ba962790"
    assert extra_key("modell-ä", cache_salt="tenant-1").hex() == "59e71cc04c43f78d4229799bc1e4a316"


@pytest.mark.parametrize(
    ("parent", "token_ids", "extra", "expected"),
    [
        (ROOT_HASH, range(16), b"", "d14e2a86323d3eeeab01fb7a69b526ef"),
        (ROOT_HASH, [0] * 16, EXTRA, "078b17326c0077522d47d3f2770e06ca"),
        (bytes(range(16)), [1, 49151, 2**32 - 1, 7], EXTRA, "70f13d18d6fe91c6ff547112cbe85f25"),
    ],
)
def test_block_hash_vectors(parent: bytes, token_ids: list[int], extra: bytes, expected: str) -> None:
    assert block_hash(parent, token_ids, extra).hex() == expected


def test_the_encoding_is_the_documented_one() -> None:
    data = ROOT_HASH + struct.pack("<I", 2) + b"xy" + struct.pack("<3I", 5, 6, 7)
    expected = blake2b(data, digest_size=16, person=b"baton-block-1").digest()
    assert block_hash(ROOT_HASH, [5, 6, 7], b"xy") == expected


def test_fields_of_the_extra_key_do_not_run_into_each_other() -> None:
    keys = [
        extra_key("ab", "c"),
        extra_key("a", "bc"),
        extra_key("abc"),
        extra_key("", "abc"),
        extra_key("", "", "abc"),
    ]
    assert len(set(keys)) == len(keys)


def test_only_full_blocks_are_hashed_and_they_form_a_chain() -> None:
    token_ids = list(range(100, 150))
    hashes = hash_blocks(token_ids, 16, EXTRA)
    assert len(hashes) == 3
    assert hashes[0] == block_hash(ROOT_HASH, token_ids[:16], EXTRA)
    assert hashes[2] == block_hash(hashes[1], token_ids[32:48], EXTRA)
    assert hash_blocks(token_ids[:15], 16, EXTRA) == []
    assert len(hash_blocks(token_ids[:16], 16, EXTRA)) == 1


def test_a_change_anywhere_before_changes_the_hash() -> None:
    token_ids = list(range(32))
    changed = [token_ids[0] + 1, *token_ids[1:]]
    before, after = hash_blocks(token_ids, 16, EXTRA), hash_blocks(changed, 16, EXTRA)
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert hash_blocks(token_ids, 16, b"other")[1] != before[1]


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_out_of_range_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        block_hash(ROOT_HASH, [token_id], EXTRA)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="parent"):
        block_hash(b"short", [1], EXTRA)
    with pytest.raises(ValueError, match="block_size"):
        hash_blocks([1, 2], 0, EXTRA)
