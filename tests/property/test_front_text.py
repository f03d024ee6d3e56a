"""Detokenisation and stop strings: however the ids are cut, the result is that of doing it all at once."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.front.detokenizer import Detokenizer
from cluster.front.output_text import OutputText
from cluster.front.stop_strings import StopMatcher
from cluster.live.environment import read_environment
from engine.model.importer import import_model
from engine.model.packaged_models import SMOLLM2

SAMPLES = (
    "Hello world, don't stop. The quick brown fox jumps over the lazy dog!",
    "你好，世界。こんにちは世界。안녕하세요 세계",
    "Привет, мир! مرحبا بالعالم שלום עולם नमस्ते दुनिया",
    "e\u0301 a\u0308 \u1112\u1161\u11ab n\u0303 Z\u0351\u036b\u0343\u036a",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 😀😁😂 🇩🇪",
    "def f(x):\n    return {'a': [1, 2]}\t# tabs\r\n  \u00a0\u200b",
)
SPECIAL = ("<|start|>", "<|end|>")


def _byte_level() -> Tokenizer:
    """Byte-level BPE, as SmolLM2 and Llama 3 have it: a character may be spread over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return tokenizer


def _sentencepiece_like() -> Tokenizer:
    """Spaces as part of words, a space stripped at the very beginning, bytes for unknown characters: as Llama 2."""
    words = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "\u2581the", "\u2581a", "the", "a", "b", ".", ",", "n", "'", "t", "\u2581cat", "\u4f60", "\n"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = _byte_level()
SENTENCEPIECE = _sentencepiece_like()
NUM_SPECIAL = len(SPECIAL)


def _detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    added = tokenizer.get_added_tokens_decoder()
    return Detokenizer(tokenizer, frozenset(token_id for token_id, token in added.items() if token.special))


def _incrementally(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    detokenizer = _detokenizer(tokenizer)
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        pieces.append(detokenizer.push(ids[start:stop]))
        detokenizer.check_invariants()
    return [*pieces, detokenizer.flush()]


CUTS = st.lists(st.integers(0, 60), max_size=40)
TEXT = st.text(max_size=40) | st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=3).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXT, cuts=CUTS)
def test_text_comes_back_whole(text: str, cuts: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    pieces = _incrementally(BYTE_LEVEL, ids, cuts)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces), "half a character was shown"


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=80), cuts=CUTS)
@example(ids=[NUM_SPECIAL + 200] * 80, cuts=list(range(60)))
def test_any_ids_give_what_decoding_at_once_gives(ids: list[int], cuts: list[int]) -> None:
    """Also ids that are no valid UTF-8, special ones, and ids beyond the vocabulary."""
    assert "".join(_incrementally(BYTE_LEVEL, ids, cuts)) == BYTE_LEVEL.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["\u2581", "\u2581the", "\u2581a", "the", "a", "b", ".", "n", "'", "t", *SPECIAL])
        | st.characters(codec="utf-8", exclude_characters="\ufffd"),
        max_size=30,
    ),
    cuts=CUTS,
)
def test_spaces_and_byte_tokens(parts: list[str], cuts: list[int]) -> None:
    ids: list[int] = []
    for part in parts:
        known = SENTENCEPIECE.token_to_id(part)
        spelt = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in part.encode()]
        ids.extend([known] if known is not None else [token_id for token_id in spelt if token_id is not None])
    pieces = _incrementally(SENTENCEPIECE, ids, cuts)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


@functools.cache
def _smollm2() -> Tokenizer:
    directory = import_model(SMOLLM2.name, read_environment(os.environ).models_dir)  # it is there already, most times
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@settings(max_examples=60, deadline=None)
@given(text=TEXT, noise=st.lists(st.integers(0, 49_151), max_size=20), cuts=CUTS)
def test_the_demo_models_tokenizer(text: str, noise: list[int], cuts: list[int]) -> None:
    tokenizer = _smollm2()
    for ids in (tokenizer.encode(text).ids, noise):
        assert "".join(_incrementally(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("byte", [0x80, 0xE4, 0xF0, 0xFF])
def test_garbage_is_shown_and_costs_no_more_than_text(tokenizer: Tokenizer, byte: int) -> None:
    """A model may emit bytes that are no UTF-8 for ever: neither may the output stall nor the window grow."""
    token_id = tokenizer.token_to_id(f"<0x{byte:02X}>")
    if token_id is None:
        token_id = tokenizer.token_to_id(_byte_characters()[byte])
    assert token_id is not None
    detokenizer = _detokenizer(tokenizer)
    shown = 0
    for _ in range(1000):
        shown += len(detokenizer.push([token_id]))
        assert len(detokenizer._window) <= 40
    assert shown > 900
    assert shown + len(detokenizer.flush()) == len(tokenizer.decode([token_id] * 1000)) == 1000


def _byte_characters() -> dict[int, str]:
    """How byte-level BPE spells each byte: printable ones as themselves, the others shifted up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


# ---- stop strings ---------------------------------------------------------------------------------------------------

ALPHABET = st.text("ab.", max_size=12)


def _first_match(text: str, stops: Sequence[str]) -> int | None:
    """By definition: read on until the text ends with a stop string; where does the longest such begin?"""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(ALPHABET, max_size=8), stops=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4))
def test_stop_strings_do_not_depend_on_the_cuts(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = "".join(pieces)
    start = _first_match(text, stops)
    shown, stopped = "", False
    for piece in pieces:
        new, stopped = matcher.push(piece)
        shown += new
        assert text.startswith(shown) and (start is None or len(shown) <= start), "part of a stop string was shown"
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    assert stopped == (start is not None)
    assert shown == text[:start]


@settings(max_examples=200, deadline=None)
@given(text=TEXT, stop_at=st.integers(0, 30), stop_length=st.integers(1, 6), cuts=CUTS)
def test_output_ends_before_the_stop_string_at_its_token(
    text: str, stop_at: int, stop_length: int, cuts: list[int]
) -> None:
    stop = text[stop_at : stop_at + stop_length]
    ids = BYTE_LEVEL.encode(text).ids
    if not stop:
        return
    results = []
    for bounds in (list(range(1, len(ids))), sorted(cut for cut in cuts if cut <= len(ids))):
        output = OutputText(_detokenizer(BYTE_LEVEL), [stop])
        shown, num_tokens, is_stopped = "", 0, False
        edges = [0, *bounds, len(ids)]
        for start, end in itertools.pairwise(edges):
            piece = output.push(ids[start:end])
            shown, num_tokens, is_stopped = shown + piece.text, num_tokens + piece.num_tokens, piece.is_stopped
            if is_stopped:
                break
        if not is_stopped:
            piece = output.finish()
            shown, is_stopped = shown + piece.text, piece.is_stopped
        assert is_stopped and shown == text[: text.find(stop)]
        results.append(num_tokens)
    assert results[0] == results[1], "the token that completes the stop string depends on the cuts"
