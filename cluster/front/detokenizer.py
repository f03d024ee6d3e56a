"""Token ids to text as they come, so that the pieces together are exactly what decoding all ids at once gives."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16
"""So many tokens may wait for the end of a character; with more, what is there is garbage and is shown as such."""

MAX_PENDING_CHARACTERS = 3
"""An unfinished UTF-8 character is at most three bytes, shown as at most so many replacement characters."""


class Detokenizer:
    """Decodes one sequence.

    How a token reads depends on its neighbours: several tokens may make up one character, and spaces belong to a merge
    of two. So a short window is decoded: the tokens of the piece emitted last, as context, and all tokens since; what
    goes beyond the text already emitted is new. (The method of two offsets, as text-generation-inference and vLLM use
    it; each token is decoded a bounded number of times.) A window that ends in a replacement character may end inside
    a character and is held back, up to MAX_HELD_TOKENS.

    Ids of special tokens, and ids that the tokenizer does not know, have no text.
    """

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._window: list[int] = []
        self._num_context_tokens = 0  # tokens of the window whose text has been emitted in full
        self._num_emitted = 0  # characters of the window's text that have been emitted

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that becomes certain with these tokens; may be empty."""
        pieces: list[str] = []
        # One by one: the result cannot depend on how they came, and the window stays short.
        for token_id in token_ids:
            if self._has_text(token_id):
                self._window.append(token_id)
                pieces.append(self._advance())
        return "".join(pieces)

    def flush(self) -> str:
        """What is held back: after the last token an unfinished character is garbage."""
        text = self._decode(self._window)[self._num_emitted :]
        self._window = []
        self._num_context_tokens = 0
        self._num_emitted = 0
        return text

    def check_invariants(self) -> None:
        """Raises AssertionError if the window contradicts itself."""
        assert 0 <= self._num_context_tokens <= len(self._window)
        context = self._decode(self._window[: self._num_context_tokens])
        assert len(context) <= self._num_emitted or context.endswith(REPLACEMENT)
        assert not self._window or self._num_emitted <= len(self._decode(self._window))

    def _advance(self) -> str:
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            new = text[self._num_emitted :]
            if new:
                self._window = self._window[self._num_context_tokens :]
                self._num_context_tokens = len(self._window)
                self._num_emitted = len(self._decode(self._window))
            return new
        if len(self._window) - self._num_context_tokens <= MAX_HELD_TOKENS:
            return ""
        num_pending = min(MAX_PENDING_CHARACTERS, len(text) - len(text.rstrip(REPLACEMENT)))
        end = max(self._num_emitted, len(text) - num_pending)
        new = text[self._num_emitted : end]
        self._num_emitted = end
        self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Drops the front of a window full of garbage, at a place where the text splits between two tokens.

        The text splits there for whatever follows, because bytes that follow only change the unfinished character at
        the end. Without such a place among the last tokens the window stays.
        """
        for cut in range(len(self._window) - 1, max(0, len(self._window) - MAX_HELD_TOKENS), -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if head + tail == text and len(head) <= self._num_emitted:
                self._window = self._window[cut:]
                self._num_context_tokens = 0
                self._num_emitted -= len(head)
                return

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped_ids and self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
