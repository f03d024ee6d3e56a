"""Brings loaded weights to the device that computes with them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch

_Weights = TypeVar("_Weights")


def on_device(weights: _Weights, device: torch.device) -> _Weights:
    """A copy of a tree of dataclasses and tuples with its tensors on `device`; what is shared stays shared.

    The host's copies are given up as soon as the caller drops the tree.
    """
    moved: _Weights = _Mover(device).move(weights)
    return moved


class _Mover:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, torch.Tensor] = {}

    def move(self, node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            # An output head that is the embedding would be held twice.
            if id(node) not in self._moved:
                self._moved[id(node)] = node.to(self._device)
            return self._moved[id(node)]
        if isinstance(node, tuple):
            return tuple(self.move(part) for part in node)
        if is_dataclass(node) and not isinstance(node, type):
            return type(node)(**{field.name: self.move(getattr(node, field.name)) for field in fields(node)})
        assert node is None, f"weights do not hold {type(node).__name__}"
        return None
