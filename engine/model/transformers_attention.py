"""Baton's paged attention as an attention function of transformers.

A model's code calls, for each layer, the function that is registered under its configuration's attention
implementation, with queries, keys and values of the step's tokens; and it makes the layers' masks by the function that
is registered under the same name. The mask that is made here is no tensor but says what it means; each layer hands on
its own, so that the attention function knows the layer's window. See "Attention backends" and "Attention masks" in the
documentation of transformers.

Axes: T tokens of the step, flat over its sequences; H query heads, K key/value heads, D head dimension, X queries,
keys and values of a token side by side; a leading 1 is the batch axis, which the step does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine.attention.base import Backend, LayerWritten
from engine.attention.batch import StepBatch
from engine.attention.kv_cache import KVCache
from engine.model.config_fields import UnsupportedModelError

ATTENTION_NAME: Final = "baton_paged"
"""Not to contain "flash", "sdpa" or "eager", by which transformers recognises implementations of its own."""

# Arguments that say nothing new: positions and lengths are the step's, and the mask says what a window would.
_SAID_ELSEWHERE = frozenset({"sliding_window", "position_ids", "cache_position", "dropout", "is_causal"})


@dataclass(frozen=True, slots=True)
class CausalMask:
    """A token sees itself and the window - 1 positions before it; all before it if window is 0.

    `fault` says why it is not so, if it is not: a model may make a mask for sliding layers that it does not have.
    """

    window: int
    fault: str = ""


class KvWritten(Exception):
    """Ends a forward pass whose logits nobody wants, once the last layer's keys and values are written."""


class PagedForward:
    """One forward pass of a model: takes its layers' calls in order.

    Args:
        is_trial: whether masks are to be examined, which need be done only once.
    """

    def __init__(
        self,
        backend: Backend,
        cache: KVCache,
        batch: StepBatch,
        on_layer_written: LayerWritten | None = None,
        *,
        is_trial: bool = False,
    ) -> None:
        self.num_layers_run = 0
        self._backend = backend
        self._cache = cache
        self._on_layer_written = on_layer_written
        self._stops_after_writing = batch.num_selected == 0
        self._is_trial = is_trial

    def run(self, model: Callable[..., Any], **arguments: Any) -> Any:
        """Call the model. Raises KvWritten, UnsupportedModelError, and whatever the model's code raises."""
        token = _running.set(self)
        try:
            return model(**arguments)
        finally:
            _running.reset(token)

    def make_mask(self, mask_function: Callable[..., Any], window: int, is_plain: bool) -> CausalMask:
        if not is_plain:
            raise UnsupportedModelError("it lays a mask of its own over the causal one")
        return CausalMask(window, _mask_fault(mask_function, window) if self._is_trial else "")

    def attend(
        self,
        module: torch.nn.Module,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        mask: object,
        scaling: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """Returns [1, T, H, D]."""
        _check_arguments(module, mask, others)
        layer = self.num_layers_run
        layout = self._cache.layout
        if layer >= layout.num_layers:
            raise UnsupportedModelError(
                f"it has more attention layers than the {layout.num_layers} of its configuration"
            )
        layer_BKCSD = self._cache.layer_BKCSD(layer)
        _check_shapes(query_1HTD, key_1KTD, value_1KTD, layer_BKCSD)
        _, num_heads, num_tokens, head_dim = query_1HTD.shape
        qkv_TX = torch.cat([query_1HTD[0], key_1KTD[0], value_1KTD[0]]).transpose(0, 1).reshape(num_tokens, -1)
        self._backend.rotary_write(qkv_TX, None, None, None, 0.0, layer_BKCSD)
        self.num_layers_run += 1
        if self._on_layer_written is not None:
            self._on_layer_written(layer)
        if self._stops_after_writing and self.num_layers_run == layout.num_layers:
            raise KvWritten
        out_TX = torch.empty(num_tokens, num_heads * head_dim, dtype=qkv_TX.dtype)
        assert isinstance(mask, CausalMask)
        self._backend.attend(qkv_TX, layer_BKCSD, head_dim**-0.5 if scaling is None else scaling, mask.window, out_TX)
        return out_TX.view(1, num_tokens, num_heads, head_dim)


_running: ContextVar[PagedForward] = ContextVar("running forward pass")


def register(transformers: Any) -> None:
    """Make the functions known to transformers under ATTENTION_NAME; again and again does no harm."""
    transformers.AttentionInterface.register(ATTENTION_NAME, _attention_function)
    transformers.AttentionMaskInterface.register(ATTENTION_NAME, _mask_function)


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    return _running.get().attend(module, query, key, value, attention_mask, scaling, others), None


def _mask_function(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **others: Any,
) -> CausalMask:
    """Whatever is laid over a plain mask forbids leaving it out, or has to be evaluated with vmap."""
    return _running.get().make_mask(mask_function, local_size or 0, allow_is_causal_skip and not use_vmap)


def _check_arguments(module: torch.nn.Module, mask: object, others: dict[str, Any]) -> None:
    """Raises UnsupportedModelError where a layer asks for more than causal attention."""
    if not isinstance(mask, CausalMask):
        raise UnsupportedModelError("it makes its attention mask by itself")
    if mask.fault:
        raise UnsupportedModelError(mask.fault)
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModelError("it has attention that is not causal")
    more = [name for name, value in others.items() if name not in _SAID_ELSEWHERE and value is not None]
    more = [name for name in more if others[name] is not False]
    if more:
        raise UnsupportedModelError(
            f"its attention takes more than queries, keys and values: {', '.join(sorted(more))}"
        )


def _check_shapes(
    query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, layer_BKCSD: torch.Tensor
) -> None:
    _, num_kv_heads, _, _, head_dim = layer_BKCSD.shape
    shapes = {name: tuple(x.shape) for name, x in (("queries", query_1HTD), ("keys", key_1KTD), ("values", value_1KTD))}
    num_tokens = query_1HTD.shape[2]
    expected = (1, num_kv_heads, num_tokens, head_dim)
    is_query = query_1HTD.shape[0] == 1 and query_1HTD.shape[3] == head_dim and query_1HTD.shape[1] % num_kv_heads == 0
    if not is_query or shapes["keys"] != expected or shapes["values"] != expected:
        told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise UnsupportedModelError(
            f"its attention has {told} for {num_tokens} tokens, not the {num_kv_heads} key/value heads of "
            f"{head_dim} numbers, alike in every layer, that its configuration says"
        )


def _mask_fault(mask_function: Callable[..., Any], window: int) -> str:
    """Compare it with the meaning of `window` at some positions, those at the window's edge above all."""
    queries = {0, 1, 5, 100, 2 * window + 3} | {max(0, window + offset) for offset in (-1, 0, 1)}
    for query in sorted(queries):
        keys = {0, 1, query - 1, query, query + 1} | {query - window + offset for offset in (-1, 0, 1)}
        for key in sorted(key for key in keys if key >= 0):
            expected = key <= query and (window == 0 or key > query - window)
            seen = mask_function(*(torch.tensor(index) for index in (0, 0, query, key)))
            if bool(seen) != expected:
                return (
                    f"its mask is not causal{f' with a window of {window}' if window else ''}: position "
                    f"{query} {'sees' if seen else 'does not see'} position {key}"
                )
    return ""
