"""The hashes by which workers may have cached what an attempt reads: of the prompt, and of what was delivered since."""

from __future__ import annotations

from cluster.front.request_spec import RequestSpec
from engine.core.block_hash import HASH_SIZE_BYTES, ROOT_HASH, block_hash
from engine.core.request import RequestBody


def hashes_of(spec: RequestSpec, body: RequestBody) -> bytes:
    """Of the full blocks of the body's prompt and of what was delivered of its leading answer, in order, packed.

    Those of the prompt were computed when the request came. A decode worker that dies has told of the blocks that it
    filled since, and whoever else has written the same (another request's answer, say) has them as well.
    """
    hashes, size = bytearray(spec.block_hashes), spec.block_size
    if not size:
        return bytes(hashes)
    token_ids = body.prompt_ids + body.delivered_ids
    for start in range(len(hashes) // HASH_SIZE_BYTES * size, len(token_ids) // size * size, size):
        parent = bytes(hashes[-HASH_SIZE_BYTES:]) or ROOT_HASH
        hashes += block_hash(parent, token_ids[start : start + size], spec.extra_key)
    return bytes(hashes)
