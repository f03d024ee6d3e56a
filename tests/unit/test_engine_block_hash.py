"""Block hashes are a wire contract, and a collision would serve one tenant another's KV: vectors, and attacks.

The vectors in tests/reference come from the documented encoding and a BLAKE2b written out from its RFC, so neither
this code nor hashlib had a part in them.
"""

from __future__ import annotations

import itertools
import json
import struct
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.block_hash import HASH_SIZE_BYTES, ROOT_HASH, block_hash, extra_key, hash_blocks
from engine.core.sampling import SamplingParams
from engine.core.sequence import Sequence as EngineSequence
from engine.core.sequence import SequenceMode, SequenceSpec
from engine.core.step import SequenceKey
from tests.support.blake2b import blake2b

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "reference" / "block_hash_vectors.json").read_text(encoding="utf-8")
)
EXTRA = bytes.fromhex("24acd16b0c1b61f12dfb398e2eb444d0")
MAX_TOKEN_ID = 2**32 - 1

token_ids = st.lists(st.one_of(st.integers(0, MAX_TOKEN_ID), st.sampled_from((0, 1, 255, 256, 2**16))), max_size=20)
# Letters that meet each other's encodings: lengths and zeros as characters, and two spellings of one letter.
texts = st.text(st.sampled_from(("a", "e", "\x00", "\x01", "\x04", "é", "\u0301", "\U0001f9ea", "\u200d")), max_size=6)


def encoded_block(parent: bytes, ids: Sequence[int], extra: bytes) -> bytes:
    """The bytes that are hashed, as documented, without the struct module's formats."""
    return b"".join([parent, len(extra).to_bytes(4, "little"), extra, *(i.to_bytes(4, "little") for i in ids)])


def decoded_block(data: bytes) -> tuple[bytes, list[int], bytes]:
    """Reads `encoded_block` back: that this can be done says that no two blocks have the same bytes."""
    length = int.from_bytes(data[16:20], "little")
    extra, tail = data[20 : 20 + length], data[20 + length :]
    assert len(tail) % 4 == 0
    return data[:16], [int.from_bytes(tail[at : at + 4], "little") for at in range(0, len(tail), 4)], extra


def encoded_extra(*fields: str) -> bytes:
    encoded = [field.encode("utf-8") for field in fields]
    return b"".join(part for field in encoded for part in (len(field).to_bytes(4, "little"), field))


def decoded_extra(data: bytes) -> list[str]:
    fields = []
    while data:
        length = int.from_bytes(data[:4], "little")
        fields.append(data[4 : 4 + length].decode("utf-8"))
        data = data[4 + length :]
    return fields


# The contract


def test_the_reference_is_blake2b() -> None:
    """The digest of "abc" in RFC 7693, appendix A."""
    assert blake2b(b"abc", digest_size=64).hex() == (
        "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
        "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923"
    )


@pytest.mark.parametrize("vector", VECTORS["extra_keys"], ids=lambda vector: vector["extra_key"][:8])
def test_extra_key_vectors(vector: dict[str, str]) -> None:
    fields = (vector["model_fingerprint"], vector["adapter"], vector["cache_salt"])
    assert extra_key(*fields).hex() == vector["extra_key"]
    reference = blake2b(encoded_extra(*fields), digest_size=16, person=b"baton-extra-1")
    assert reference.hex() == vector["extra_key"]


@pytest.mark.parametrize("vector", VECTORS["blocks"], ids=lambda vector: vector["hash"][:8])
def test_block_hash_vectors(vector: dict[str, Any]) -> None:
    parent, ids, extra = bytes.fromhex(vector["parent"]), vector["token_ids"], bytes.fromhex(vector["extra"])
    assert block_hash(parent, ids, extra).hex() == vector["hash"]
    reference = blake2b(encoded_block(parent, ids, extra), digest_size=16, person=b"baton-block-1")
    assert reference.hex() == vector["hash"]


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["hashes"][0][:8])
def test_chain_vectors(vector: dict[str, Any]) -> None:
    extra = extra_key(vector["model_fingerprint"], vector["adapter"], vector["cache_salt"])
    hashes = hash_blocks(vector["token_ids"], vector["block_size"], extra)
    assert [each.hex() for each in hashes] == vector["hashes"]


@settings(max_examples=60, deadline=None)
@given(parent=st.binary(min_size=16, max_size=16), ids=token_ids, extra=st.binary(max_size=40))
def test_any_block_is_hashed_as_documented_and_no_other_has_its_bytes(
    parent: bytes, ids: list[int], extra: bytes
) -> None:
    data = encoded_block(parent, ids, extra)
    assert block_hash(parent, ids, extra) == blake2b(data, digest_size=16, person=b"baton-block-1")
    assert decoded_block(data) == (parent, ids, extra)


@settings(max_examples=60, deadline=None)
@given(fields=st.tuples(texts, texts, texts))
def test_any_extra_key_is_hashed_as_documented_and_no_other_has_its_bytes(fields: tuple[str, str, str]) -> None:
    data = encoded_extra(*fields)
    assert extra_key(*fields) == blake2b(data, digest_size=16, person=b"baton-extra-1")
    assert decoded_extra(data) == list(fields)


def test_only_full_blocks_are_hashed_and_they_form_a_chain() -> None:
    ids = list(range(100, 150))
    hashes = hash_blocks(ids, 16, EXTRA)
    assert len(hashes) == 3
    assert hashes[0] == block_hash(ROOT_HASH, ids[:16], EXTRA)
    assert hashes[2] == block_hash(hashes[1], ids[32:48], EXTRA)
    assert hash_blocks(ids[:15], 16, EXTRA) == []
    assert len(hash_blocks(ids[:16], 16, EXTRA)) == 1


@settings(max_examples=50, deadline=None)
@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=20), block_size=st.integers(1, 5), data=st.data())
def test_a_sequence_names_its_blocks_as_whoever_hashes_its_tokens(
    prompt: list[int], block_size: int, data: st.DataObject
) -> None:
    """What the engine indexes, block by block as it fills them, is what fronts ask for: prompt and output alike."""
    output = data.draw(st.lists(st.integers(0, 9), max_size=10))
    spec = SequenceSpec(
        key=SequenceKey("r", 1),
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=99),
        mode=SequenceMode.LOCAL,
        extra_key=EXTRA,
    )
    sequence = EngineSequence(spec, arrival=0, max_model_tokens=99, eos_token_ids=frozenset())
    sequence.block_hashes(len(prompt) // block_size, block_size)
    sequence.output_ids.extend(output)
    expected = hash_blocks(prompt + output, block_size, EXTRA)
    assert sequence.block_hashes(len(expected), block_size) == expected


# Attacks on the extra key


def test_no_text_can_be_moved_from_one_field_to_another() -> None:
    """All ways to cut one text into model, adapter and salt, and all places that a text alone can take."""
    text = "model/adapter\x00salt"
    cuts = itertools.combinations_with_replacement(range(len(text) + 1), 2)
    keys = [extra_key(text[:first], text[first:second], text[second:]) for first, second in cuts]
    assert len(set(keys)) == len(keys)


def test_a_field_cannot_imitate_the_encoding_of_the_fields_after_it() -> None:
    forged = struct.pack("<I", 1).decode() + "b"  # what "b" looks like as a field of its own
    keys = {
        extra_key("m", "a", "b"),
        extra_key("m", "a" + forged),
        extra_key("m", "a", forged),
        extra_key("m" + struct.pack("<I", 1).decode() + "a", "b"),
        extra_key("m", "a\x00b"),
        extra_key("m", "a", "b\x00"),
    }
    assert len(keys) == 6


@pytest.mark.parametrize("text", ["é", "Å", "ﬁ", "한", "ß"])
def test_texts_are_told_apart_by_their_code_points(text: str) -> None:
    """Nothing is normalised or folded: two tenants whose salts merely look alike share nothing."""
    spellings = {unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD")}
    spellings |= {text.lower(), text.upper(), text + "\u200b", text + " ", text.casefold()}
    keys = {extra_key("m", cache_salt=spelling) for spelling in spellings}
    assert len(keys) == len(spellings) > 1


def test_an_empty_text_is_an_absent_one() -> None:
    assert extra_key("m") == extra_key("m", "", "")
    assert len({extra_key("m"), extra_key("m", cache_salt="\x00"), extra_key("m", adapter="\x00")}) == 3


@pytest.mark.parametrize("field", ["model_fingerprint", "adapter", "cache_salt"])
def test_a_text_that_is_no_unicode_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        extra_key(**{"model_fingerprint": "m", field: "\ud800"})


# Attacks on the block


def test_tokens_and_extra_key_do_not_run_into_each_other() -> None:
    as_bytes = struct.pack("<I", 7)
    names = [
        block_hash(ROOT_HASH, [7, 8], b""),
        block_hash(ROOT_HASH, [8], as_bytes),
        block_hash(ROOT_HASH, [], as_bytes + struct.pack("<I", 8)),
        block_hash(ROOT_HASH, [4, 7, 8], b""),
        block_hash(ROOT_HASH, [0, 7, 8], b""),
    ]
    assert len(set(names)) == len(names)


def test_every_token_id_has_its_own_four_bytes() -> None:
    """Neither width nor order nor place can be traded, and no id is cut to fewer bits."""
    blocks: list[list[int]] = [
        [1], [1, 0], [0, 1], [256], [2**16], [2**24], [2**16 + 1], [2**32 - 1], [255, 255], [0], [0, 0], [],
    ]  # fmt: skip
    names = [block_hash(ROOT_HASH, ids, EXTRA) for ids in blocks]
    assert len(set(names)) == len(names)


def test_a_block_is_bound_to_its_place_and_to_all_before_it() -> None:
    """No suffix can be grafted onto another prefix, and no boundary can be moved."""
    ids = list(range(1, 33))
    base = hash_blocks(ids, 8, EXTRA)
    for position in range(len(ids)):
        changed = hash_blocks([*ids[:position], 99, *ids[position + 1 :]], 8, EXTRA)
        same = position // 8
        assert changed[:same] == base[:same]
        assert not set(changed[same:]) & set(base)
    repeated = hash_blocks([5] * 32, 8, EXTRA)
    assert len(set(repeated)) == 4
    assert not set(hash_blocks(ids[8:], 8, EXTRA)) & set(base)
    sizes = [hash_blocks(ids, block_size, EXTRA) for block_size in (4, 8, 16, 32)]
    names = [name for hashes in sizes for name in hashes]
    assert len(set(names)) == len(names)


def test_a_hash_extends_neither_a_block_nor_an_extra_key() -> None:
    """A child is no continuation of its parent's input, and the two kinds of input never give one digest."""
    first = block_hash(ROOT_HASH, [1, 2], EXTRA)
    assert block_hash(first, [3, 4], EXTRA) != block_hash(ROOT_HASH, [1, 2, 3, 4], EXTRA)
    data = encoded_block(ROOT_HASH, [3, 4], EXTRA)
    assert blake2b(data, digest_size=16, person=b"baton-extra-1") != block_hash(ROOT_HASH, [3, 4], EXTRA)
    # A shorter BLAKE2b digest is no prefix of a longer one: the length is part of what is hashed.
    assert not blake2b(data, digest_size=32, person=b"baton-block-1").startswith(block_hash(ROOT_HASH, [3, 4], EXTRA))


@settings(max_examples=300, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=2, max_size=6),
    keys=st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=4),
    block_size=st.integers(1, 3),
)
def test_two_blocks_have_one_name_only_if_everything_before_their_end_is_equal(
    prompts: list[list[int]], keys: list[tuple[str, str, str]], block_size: int
) -> None:
    meaning: dict[bytes, tuple[tuple[str, str, str], tuple[int, ...]]] = {}
    for prompt, key in itertools.product(prompts, keys):
        for index, name in enumerate(hash_blocks(prompt, block_size, extra_key(*key))):
            what = (key, tuple(prompt[: (index + 1) * block_size]))
            assert meaning.setdefault(name, what) == what
            assert len(name) == HASH_SIZE_BYTES and name != ROOT_HASH


def test_a_hundred_thousand_near_neighbours_do_not_collide() -> None:
    """Inputs that differ in a bit or two, in every field: a mistake such as hashing less than all would show."""
    names = set()
    for bit in range(128):
        parent = (1 << bit).to_bytes(16, "little")
        names.update(block_hash(parent, [token], EXTRA) for token in range(400))
    for bit in range(128):
        extra = (1 << bit).to_bytes(16, "little")
        names.update(block_hash(ROOT_HASH, [token], extra) for token in range(400))
    assert len(names) == 2 * 128 * 400


# Callers' mistakes


@pytest.mark.parametrize("token_id", [-1, 2**32, 1.0, None, "1"])
def test_a_token_id_that_is_none_is_refused(token_id: Any) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        block_hash(ROOT_HASH, [token_id], EXTRA)


def test_bad_arguments_are_refused() -> None:
    for parent in (b"", b"short", ROOT_HASH + b"\0"):
        with pytest.raises(ValueError, match="parent"):
            block_hash(parent, [1], EXTRA)
    with pytest.raises(ValueError, match="block_size"):
        hash_blocks([1, 2], 0, EXTRA)
