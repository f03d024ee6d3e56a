"""The text of one answer: tokens in, text out, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.front.detokenizer import Detokenizer
from cluster.front.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """`num_tokens`: how many of the pushed tokens count; fewer than pushed if a stop string was complete before."""

    text: str
    num_tokens: int
    is_stopped: bool


class OutputText:
    """Detokenises as tokens come; what might be the beginning of a stop string is held back."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        # The token that completes a stop string must be known, so tokens are then read one by one.
        self._has_stops = bool(stops)

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        if not self._has_stops:
            return TextPiece(text=self._detokenizer.push(token_ids), num_tokens=len(token_ids), is_stopped=False)
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            text, is_stopped = self._matcher.push(self._detokenizer.push((token_id,)))
            pieces.append(text)
            if is_stopped:
                return TextPiece(text="".join(pieces), num_tokens=index + 1, is_stopped=True)
        return TextPiece(text="".join(pieces), num_tokens=len(token_ids), is_stopped=False)

    def finish(self) -> TextPiece:
        """The rest, after the last token. Held-back bytes can still complete a stop string."""
        text, is_stopped = self._matcher.push(self._detokenizer.flush())
        if not is_stopped:
            text += self._matcher.flush()
        return TextPiece(text=text, num_tokens=0, is_stopped=is_stopped)
