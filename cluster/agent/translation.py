"""Between what the cluster, the engine and the transfer call things: the three do not know each other."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from cluster.agent.legs import Leg
from cluster.core.ids import WorkerId
from cluster.core.messages import GRANTED_BLOCK_BYTES
from engine.core.block_hash import extra_key, hash_blocks
from engine.core.outcome import EmittedToken
from engine.core.request import RequestBody
from engine.core.sequence import SequenceMode, SequenceSpec, num_blocks_for
from kv_transfer.protocol.messages import BlockGrant, FirstToken, PushArrived
from kv_transfer.transport.base import PeerId

_GRANTED_BLOCK: Final = struct.Struct("<IIQ")
assert _GRANTED_BLOCK.size == GRANTED_BLOCK_BYTES


def peer_of(worker: WorkerId) -> PeerId:
    return PeerId(worker.name, worker.incarnation)


def pack_grants(blocks: Iterable[BlockGrant]) -> bytes:
    """As they travel in ReserveGranted and Prefill: index and block id in 4 bytes each, generation in 8."""
    return b"".join(_GRANTED_BLOCK.pack(block.index, block.block_id, block.generation) for block in blocks)


def block_grants(packed: bytes) -> tuple[BlockGrant, ...]:
    """Raises: ValueError for a part of a block."""
    if len(packed) % GRANTED_BLOCK_BYTES:
        raise ValueError(f"{len(packed)} bytes of granted blocks, of which each has {GRANTED_BLOCK_BYTES}")
    return tuple(BlockGrant(*fields) for fields in _GRANTED_BLOCK.iter_unpack(packed))


def sequence_spec(leg: Leg, mode: SequenceMode, fingerprint: str) -> SequenceSpec:
    """What the scheduler is asked for. Prefill draws for those that draw together; decode starts the others."""
    body = leg.body
    return SequenceSpec(
        key=leg.lead_key,
        prompt_ids=list(body.prompt_ids),
        forced_output_ids=list(body.delivered_ids),
        siblings=body.twins if mode is SequenceMode.PREFILL_ONLY else body.siblings,
        sampling=body.sampling,
        mode=mode,
        extra_key=extra_key(fingerprint, body.adapter, body.cache_salt),
        priority=body.priority,
    )


def matchable_hashes(body: RequestBody, block_size: int, fingerprint: str) -> list[bytes]:
    """Of all full blocks but one that holds the last token: at least one token is left to compute."""
    token_ids = body.prompt_ids + body.delivered_ids
    extra = extra_key(fingerprint, body.adapter, body.cache_salt)
    return hash_blocks(token_ids[: len(token_ids) - 1], block_size, extra)


def first_token(emitted: EmittedToken) -> FirstToken:
    return FirstToken(
        choice=emitted.key.choice,
        position=emitted.position,
        token_id=emitted.token_id,
        logprob=emitted.logprob,
        top=emitted.top,
    )


def mismatch_of(leg: Leg, arrived: PushArrived, block_size: int) -> str | None:
    """Why what arrived is not what this leg waits for; None if it is."""
    body = leg.body
    if arrived.num_tokens != body.num_input_tokens:
        return f"KV of {arrived.num_tokens} tokens arrived, {body.num_input_tokens} are expected"
    num_blocks = num_blocks_for(arrived.num_tokens, block_size)
    if arrived.num_blocks != num_blocks:  # the receiver has checked that as many came whole, and no more
        return f"{arrived.num_blocks} blocks of KV arrived, {num_blocks} are expected"
    found = [(token.choice, token.position) for token in arrived.first_tokens]
    choices = (body.choice, *(twin.choice for twin in body.twins))
    expected = [(choice, len(body.delivered_ids)) for choice in choices]
    if found != expected:
        return f"first tokens {found} (choice, position) arrived, {expected} are expected"
    return None
