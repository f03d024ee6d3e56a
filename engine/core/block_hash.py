"""Names blocks by their content, so that equal prefixes are found on any worker.

A block's name covers everything that its KV depends on: all tokens before it (through the parent's hash), its own
tokens, and the extra key (model, adapter, cache salt). It is cryptographic because a crafted collision would serve
one tenant's KV to another. The encoding is fixed, little-endian, the same on every machine and Python version, and
one to one: every field has a fixed or a stated length, so no two inputs hash the same bytes.

    extra key   BLAKE2b-128(person "baton-extra-1",  for each field: u32 length in bytes, UTF-8 bytes)
    block hash  BLAKE2b-128(person "baton-block-1",  parent (16 bytes), u32 length of extra, extra, u32 per token id)

tests/reference/block_hash_vectors.json holds test vectors: a change to this encoding is a change to the wire contract.
The number of tokens is not part of it, as it follows from the input's length; neither is the block size, on which all
workers of a cluster agree. A hash is no secret and proves nothing: whoever acts on one computes it from the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_SIZE_BYTES = 16
ROOT_HASH = b"\0" * HASH_SIZE_BYTES
"""The parent of a sequence's first block."""

_EXTRA_PERSON = b"baton-extra-1"
_BLOCK_PERSON = b"baton-block-1"


def extra_key(model_fingerprint: str, adapter: str = "", cache_salt: str = "") -> bytes:
    """What a block's KV depends on besides tokens, as 16 bytes. Different (model, adapter, salt) never share blocks.

    Texts differ if their code points do: "é" in its two spellings is two salts. An empty text is an absent one.

    Raises:
        ValueError: a text has a code point that UTF-8 cannot hold (half of a surrogate pair).
    """
    digest = blake2b(digest_size=HASH_SIZE_BYTES, person=_EXTRA_PERSON)
    fields = {"model_fingerprint": model_fingerprint, "adapter": adapter, "cache_salt": cache_salt}
    for name, text in fields.items():
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is no valid Unicode text: {error}") from error
        digest.update(struct.pack("<I", len(encoded)))
        digest.update(encoded)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    """The 16-byte name of the block that holds `token_ids` after the blocks that `parent` names.

    Raises:
        ValueError: `parent` is not 16 bytes, or a token id does not fit 32 bits.
    """
    if len(parent) != HASH_SIZE_BYTES:
        raise ValueError(f"parent must be {HASH_SIZE_BYTES} bytes, got {len(parent)}")
    try:
        tail = struct.pack(f"<I{len(extra)}s{len(token_ids)}I", len(extra), extra, *token_ids)
    except struct.error as error:
        raise ValueError(f"token_ids must each be between 0 and 2**32 - 1: {error}") from error
    return blake2b(parent + tail, digest_size=HASH_SIZE_BYTES, person=_BLOCK_PERSON).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, extra: bytes) -> list[bytes]:
    """Names of all full blocks of a sequence, in order; the partly filled last block has none."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    hashes: list[bytes] = []
    parent = ROOT_HASH
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size], extra)
        hashes.append(parent)
    return hashes
