"""A recorded sequence of native operations: what `NativeCpuBackend.compile` makes of a model's forward pass.

The whole of it is one array of C structs, so that a step is one call into the library. It is cut only where Python has
work of its own: at `call`, and at the layers' marks if somebody waits for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.attention.base import LayerWritten, Rows
from engine.attention.batch import StepBatch
from engine.attention.native_structs import OpKind, OpStruct

RunOps = Callable[["ctypes.Array[OpStruct]", int, int], None]
"""Runs operations begin .. end - 1 of the array."""


class _Mark(NamedTuple):
    """Python's turn, before operation `position`: a function to call, or a layer whose keys and values are written."""

    position: int
    function: Callable[[StepBatch], None] | None
    layer: int


@dataclass(slots=True)
class Recording:
    """What the body has asked for so far."""

    kinds: list[OpKind] = field(default_factory=list)
    args: list[ctypes.Structure] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """What the structs point into: it must live as long as they do."""
    marks: list[_Mark] = field(default_factory=list)
    stop: tuple[int, int] | None = None
    """Numbers of operations and of marks before the place where a step without selected rows ends."""
    max_rows: dict[Rows, int] = field(default_factory=dict)
    """The rows that all buffers have room for."""

    def add(self, kind: OpKind, args: ctypes.Structure, tensors: tuple[torch.Tensor | None, ...]) -> None:
        self.kinds.append(kind)
        self.args.append(args)
        self.tensors.extend(tensor for tensor in tensors if tensor is not None)

    def add_call(self, function: Callable[[StepBatch], None]) -> None:
        self.marks.append(_Mark(len(self.kinds), function, -1))

    def add_layer(self, layer: int) -> None:
        self.marks.append(_Mark(len(self.kinds), None, layer))

    def stop_without_rows(self) -> None:
        assert self.stop is None, "a sequence has one place to stop at"
        self.stop = (len(self.kinds), len(self.marks))

    def limit_rows(self, rows: Rows, num_rows: int) -> None:
        assert rows is not Rows.ALL, "a recorded operation works on the step's rows"
        self.max_rows[rows] = min(num_rows, self.max_rows.get(rows, num_rows))


class RecordedStep:
    """Implements `CompiledStep`.

    Args:
        bind: takes in the step's batch, before anything runs.
        run_ops: runs a part of the operations.
    """

    def __init__(self, recording: Recording, bind: Callable[[StepBatch], None], run_ops: RunOps) -> None:
        self._recording = recording
        self._bind = bind
        self._run_ops = run_ops
        self._ops = (OpStruct * len(recording.kinds))()
        for op, kind, args in zip(self._ops, recording.kinds, recording.args, strict=True):
            op.kind = kind
            op.args = ctypes.addressof(args)
        num_ops, num_marks = recording.stop or (len(recording.kinds), len(recording.marks))
        self._whole = (len(recording.kinds), recording.marks)
        self._without_rows = (num_ops, recording.marks[:num_marks])

    def run(self, batch: StepBatch, on_layer_written: LayerWritten | None = None) -> None:
        num_selected = batch.num_selected
        max_rows = self._recording.max_rows
        # The kernels write where they are told to: too many rows would overwrite memory at large.
        assert batch.num_tokens <= max_rows.get(Rows.TOKENS, batch.num_tokens), "more tokens than the buffers hold"
        assert num_selected <= max_rows.get(Rows.SELECTED, num_selected), "more rows than the buffers hold"
        self._bind(batch)
        end, marks = self._whole if num_selected > 0 else self._without_rows
        begin = 0
        for position, function, layer in marks:
            if function is None and on_layer_written is None:
                continue
            if begin < position:
                self._run_ops(self._ops, begin, position)
                begin = position
            if function is not None:
                function(batch)
            elif on_layer_written is not None:
                on_layer_written(layer)
        if begin < end:
            self._run_ops(self._ops, begin, end)
