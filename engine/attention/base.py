"""The operations that models are made of, and what a backend is: one implementation of them for a device or library.

A model's forward pass is a fixed sequence of these operations over buffers that are made once (`engine.model.decoder`).
The sequence is handed to `Backend.compile`, which may record it and replay it at each step: as one call into the native
kernels, or as a CUDA graph. So an operation's arguments are whole buffers with room for many rows; how many of them
count is a property of the step (`Rows`), known only when it runs.

Axes: T tokens of the step, R rows whose logits are wanted, N rows of either kind, H query heads, K key/value heads,
D head dimension, E hidden size, F intermediate size, X a fused output, V vocabulary, I inputs, O outputs; a layer of
the pool is a view [B, K, C, S, D] as in `engine.attention.kv_cache`. Activations have the model's dtype unless said
otherwise. Weights of norms and biases are float32: they are small, and nothing is lost where a family scales by 1 + w.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, Protocol

import torch

from engine.attention.batch import StepBatch

Activation = Literal["silu", "gelu_tanh"]

LayerWritten = Callable[[int], None]
"""Called with a layer's index when the step's keys and values of that layer are in the pool."""


class Rows(Enum):
    """Which rows of its buffers an operation works on."""

    TOKENS = "tokens"
    """The first T: one for each token of the step."""
    SELECTED = "selected"
    """The first R: one for each token whose logits are wanted (`StepBatch.rows_R`), after `select_rows`."""
    ALL = "all"
    """As many as the tensor has; not for recorded sequences."""


class CompiledStep(Protocol):
    """A sequence of operations that can be run again and again."""

    def run(self, batch: StepBatch, on_layer_written: LayerWritten | None = None) -> None:
        """Run it over the rows of `batch`. `on_layer_written` is called where the sequence says `layer_written`."""


class Backend(Protocol):
    """One implementation. Not thread-safe: one engine thread a backend.

    Every product and every row of every operation is computed alike whatever the other rows of the step are: a row's
    bits depend on that row alone (the native kernels keep this in every dtype, the others in none by promise).
    """

    @property
    def name(self) -> str: ...

    def compile(self, body: Callable[[], None]) -> CompiledStep:
        """Make `body`, which calls this backend's operations, repeatable.

        `body` may be called once, now, or at each run; the buffers it uses must outlive the result. Work that is not
        an operation of this backend goes through `call`.
        """

    def call(self, function: Callable[[StepBatch], None]) -> None:
        """Run a Python function at this place of the sequence (of routed experts, say), with the step's batch."""

    def layer_written(self, layer: int) -> None:
        """Mark the place where all keys and values of `layer` are in the pool."""

    def stop_without_rows(self) -> None:
        """End the sequence here if no logits are wanted (R = 0): the rest would compute nothing that is used."""

    def embed(self, table_VE: torch.Tensor, scale: float, residual_NE: torch.Tensor) -> None:
        """residual = table[ids] * scale, in float32, for all the tokens; `scale` is a number of the table's dtype."""

    def select_rows(self, source_NX: torch.Tensor, target_NX: torch.Tensor) -> None:
        """target[r] = source[rows_R[r]], for r < R; any dtype, the same of both. They must not overlap."""

    def place_rows(self, source_NX: torch.Tensor, target_NX: torch.Tensor) -> None:
        """target[rows_R[r]] = source[r], for r < R: the reverse of `select_rows`."""

    def add_norm(
        self,
        x_NE: torch.Tensor | None,
        x_norm_E: torch.Tensor | None,
        residual_NE: torch.Tensor,
        norm_E: torch.Tensor,
        eps: float,
        out_NE: torch.Tensor,
        rows: Rows,
    ) -> None:
        """RMS norm with the residual sum (Zhang and Sennrich 2019): out = residual / rms(residual) * norm.

        Before that x is added to the residual in place, if given; as it is, or as x / rms(x) * x_norm if x_norm is
        given (families that normalise a block's output too). The residual is float32 whatever the dtype of the others:
        it is what every layer adds to, and would be rounded twice a layer.
        """

    def linear(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_NO: torch.Tensor, rows: Rows
    ) -> None:
        """out = x weight^T + bias, summed in float32. `out` is of the model's dtype, or float32.

        Logits and router scores are asked for in float32: bfloat16 numbers of about 20 are 1/8 apart, so that the
        largest logits would often tie.
        """

    def gated_linear(
        self,
        x_NI: torch.Tensor,
        weight_XI: torch.Tensor,
        bias_X: torch.Tensor | None,
        activation: Activation,
        out_NF: torch.Tensor,
        rows: Rows,
    ) -> None:
        """out = activation(gate) * up, where x weight^T + bias is [N, 2F]: gate, then up.

        In one operation, so that the native kernels need not write and read what is between: they compute all of it in
        float32, and round once.
        """

    def rotary_write(
        self,
        qkv_NX: torch.Tensor,
        cos_sin_PD: torch.Tensor | None,
        q_norm_D: torch.Tensor | None,
        k_norm_D: torch.Tensor | None,
        eps: float,
        layer_BKCSD: torch.Tensor,
    ) -> None:
        """Rotate the queries in place, and write rotated keys and values to the pool at the step's slots.

        qkv is [N, (H + 2K) * D]: queries, keys, values. cos_sin is float32, a row a position: D/2 cosines, then D/2
        sines; without it nothing is rotated. Each head of queries or keys is first divided by its own rms and scaled
        by q_norm or k_norm, where given.
        """

    def attend(
        self,
        qkv_NX: torch.Tensor,
        layer_BKCSD: torch.Tensor,
        scale: float,
        window: int,
        out_NX: torch.Tensor,
        rows: Rows = Rows.TOKENS,
    ) -> None:
        """Causal attention of the (rotated) queries in qkv over the pool, into out [N, H * D]: a row a token.

        A token sees itself and the window - 1 positions before it; all before it if window is 0. The step's own keys
        and values must lie in the pool already. With Rows.SELECTED only the rows rows_R of out are wanted: what stands
        in the others afterwards is undefined, as the queries of their tokens may be.
        """

    def argmax(self, logits_RV: torch.Tensor) -> tuple[list[int], list[float]]:
        """For each row of contiguous float32 [R, V]: the index of the largest element, the lowest if several, and it.

        The element is NaN where the row holds a NaN.
        """
