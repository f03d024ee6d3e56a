"""Prompts of real text, never the same twice: windows of the Python manual's topics, which come with Python."""

from __future__ import annotations

import pydoc_data.topics
import random
from pathlib import Path


class PromptSource:
    """Draws windows at random places. Text, because a model is sure of it, so that a wrong token shows."""

    def __init__(self, model_dir: Path, seed: int) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._token_ids: list[int] = tokenizer.encode("\n\n".join(pydoc_data.topics.topics.values())).ids
        self._random = random.Random(seed)

    def draw(self, num_tokens: int) -> list[int]:
        start = self._random.randrange(len(self._token_ids) - num_tokens)
        return self._token_ids[start : start + num_tokens]

    def draw_many(self, count: int, num_tokens: int) -> list[list[int]]:
        return [self.draw(num_tokens) for _ in range(count)]
