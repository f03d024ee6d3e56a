"""Whole models on a GPU: the tokens of the host's engine, or as good ones where bfloat16 cannot tell."""

from __future__ import annotations

BLOCK_SIZE = 16
