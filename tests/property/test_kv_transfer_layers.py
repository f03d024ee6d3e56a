"""PushReceiver and pushes in groups of layers, some of which contradict themselves: a commit needs every layer once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from kv_transfer.protocol.limits import SECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    Grant,
    PeerId,
    PushArrived,
    PushChunk,
    PushEffect,
    PushEnd,
    PushFailed,
    PushKey,
    PushMissing,
    SendMessage,
    VerifyBlocks,
)
from kv_transfer.protocol.receiver import PushReceiver
from kv_transfer.protocol.sampling import Checksums

KEY = PushKey("r", 1)
SENDER, RECEIVER = PeerId("p", 1), PeerId("d", 1)
NUM_LAYERS = 5
NUM_GRANTED = 4
BLOCKS = tuple(BlockGrant(2 + offset, 30 + offset, 7) for offset in range(NUM_GRANTED))
GRANT = Grant(key=KEY, lease_id=1, receiver=RECEIVER, sender=SENDER, blocks=BLOCKS, ttl_ns=SECOND_NS)
ABRIDGED, DAMAGED, LOST, ONCE, TWICE, WIDENED = "abridged", "damaged", "lost", "once", "twice", "widened"
HARMLESS = (ONCE, ONCE, ONCE, TWICE, LOST, DAMAGED)


@st.composite
def pushes(draw: st.DrawFn) -> list[PushChunk]:
    """The chunks of a right push: the blocks in some runs, the layers of each run in some groups, in any order."""
    num_blocks = draw(st.integers(1, NUM_GRANTED))
    pieces: list[tuple[tuple[BlockGrant, ...], range]] = []
    for start, stop in _cut(draw, num_blocks):
        pieces += [(BLOCKS[start:stop], range(*group)) for group in _cut(draw, NUM_LAYERS)]
    return [
        PushChunk(
            key=KEY,
            lease_id=1,
            rank=0,
            chunk=number,
            blocks=blocks,
            first_layer=layers.start,
            num_layers=len(layers),
            summed=tuple(range(len(blocks))),
            checksums=(9,) * len(blocks),
        )
        for number, (blocks, layers) in enumerate(draw(st.permutations(pieces)))
    ]


def _cut(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    return list(zip([0, *cuts], [*cuts, length], strict=True))


def is_whole(chunks: Sequence[PushChunk]) -> bool:
    """Whether they hold each layer of the granted blocks up to the last one that they name, once."""
    held = Counter((block.index, layer) for chunk in chunks for block in chunk.blocks for layer in chunk.layers)
    indices = range(BLOCKS[0].index, max(index for index, _ in held) + 1)
    return held == Counter((index, layer) for index in indices for layer in range(NUM_LAYERS))


class Link:
    """Brings messages to a receiver and plays its owner and its sender."""

    def __init__(self, chunks: list[PushChunk]) -> None:
        self.receiver = PushReceiver(PushLimits(), Checksums.FULL, num_layers=NUM_LAYERS)
        self.chunks = chunks
        self.damaged: set[int] = set()
        self.has_arrived = self.has_failed = False
        self.receiver.open(0, GRANT)
        self.receiver.on_connected(0, SENDER)

    def bring(self, message: PushChunk | PushEnd) -> None:
        self._perform(self.receiver.on_message(1, SENDER, message))

    def end(self, round_: int = 0) -> None:
        num_blocks = max(block.index for chunk in self.chunks for block in chunk.blocks) + 1
        counts = {"num_chunks": len(self.chunks), "num_blocks": num_blocks, "num_tokens": 1}
        self.bring(PushEnd(key=KEY, lease_id=1, rank=0, first_tokens=(), round=round_, **counts))

    def _perform(self, effects: list[PushEffect]) -> None:
        self.receiver.check_invariants()
        for effect in effects:
            match effect:
                case VerifyBlocks(chunk=chunk, block_ids=block_ids):
                    bad = block_ids[:1] if chunk in self.damaged else ()
                    self.damaged.discard(chunk)
                    self._perform(self.receiver.on_verified(2, KEY, chunk, bad))
                case SendMessage(message=PushMissing(chunks=missing, round=round_)):
                    for number in missing:
                        self.bring(replace(self.chunks[number], round=round_))
                    self.end(round_)
                case PushArrived():
                    self.has_arrived = True
                case PushFailed():
                    self.has_failed = True


@given(pushes(), st.data())
@settings(max_examples=200, deadline=None)
def test_right_push_arrives_whatever_the_link_does(chunks: list[PushChunk], data: st.DataObject) -> None:
    link = Link(chunks)
    for chunk in data.draw(st.permutations(chunks)):
        fate = data.draw(st.sampled_from(HARMLESS))
        if fate == DAMAGED:
            link.damaged.add(chunk.chunk)
        for _ in range({LOST: 0, TWICE: 2}.get(fate, 1)):
            link.bring(chunk)
    link.end()
    assert link.has_arrived and not link.has_failed


@given(pushes(), st.data())
@settings(max_examples=300, deadline=None)
def test_push_arrives_only_if_it_holds_every_layer_once(chunks: list[PushChunk], data: st.DataObject) -> None:
    """The sender believes in chunks of which one holds more or fewer layers than it should, or that are too few."""
    number = data.draw(st.integers(0, len(chunks) - 1))
    wrong, layers = list(chunks), chunks[number].layers
    fate = data.draw(st.sampled_from((LOST, ABRIDGED, WIDENED)))
    if fate == ABRIDGED and len(layers) > 1:
        wrong[number] = replace(chunks[number], num_layers=len(layers) - 1)
    elif fate == WIDENED:
        first = data.draw(st.integers(max(0, layers.start - 1), layers.start))
        stop = data.draw(st.integers(layers.stop, layers.stop + 1))
        wrong[number] = replace(chunks[number], first_layer=first, num_layers=stop - first)
    elif len(chunks) > 1:
        del wrong[number]
        wrong = [replace(chunk, chunk=position) for position, chunk in enumerate(wrong)]
    link = Link(wrong)
    for chunk in data.draw(st.permutations(wrong)):
        if data.draw(st.sampled_from(HARMLESS)) != LOST:
            link.bring(chunk)
    link.end()
    # It may be right all the same: unchanged, or without its last blocks.
    event(f"{fate}: {'right' if is_whole(wrong) else 'wrong'}")
    assert link.has_arrived == is_whole(wrong)
    assert link.has_failed != link.has_arrived
