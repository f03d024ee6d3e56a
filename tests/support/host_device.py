"""The host in the place of a GPU: what `engine.attention.cuda_device` offers, as strict as the real one can be.

A recording holds operations and the addresses of their tensors, as a CUDA graph does: what Python decided while it was
recorded is frozen, and a tensor that has moved since is not found. Recording computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What waits for the device fails while a graph is recorded.
_WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}


class HostDevice:
    """Stands in for `CudaDevice`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.num_captures = 0
        self.num_replays = 0
        self.num_synchronizations = 0
        self._recording: list[Callable[[], None]] | None = None
        self._unmarked_copies = False

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def staging(self, num_elements: int) -> torch.Tensor:
        return torch.empty(num_elements, dtype=torch.int64)

    def queue_copy(self) -> None:
        """Somebody copies from host memory that is used again in the next step."""
        assert not self.is_recording
        self._unmarked_copies = True

    def mark_copies(self) -> None:
        self._unmarked_copies = False

    def wait_for_copies(self) -> None:
        assert not self._unmarked_copies, "copies were queued that nobody waits for"

    def synchronize(self) -> None:
        assert not self.is_recording, "waiting cannot be recorded"
        self._unmarked_copies = False
        self.num_synchronizations += 1

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        recorded: list[Callable[[], None]] = []
        self._recording = recorded
        try:
            with _Recorder(recorded):
                body()
        finally:
            self._recording = None
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            for launch in recorded:
                launch()

        return replay

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run a stand-in for a library's kernel, or record it. It may look at tensors' values; a recording must not."""
        if self._recording is not None:
            self._recording.append(kernel)
        else:
            kernel()

    def wide_product(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, out_NO: torch.Tensor) -> None:
        assert x_NI.dtype == weight_OI.dtype and x_NI.dtype.itemsize == 2 and out_NO.dtype == torch.float32
        torch.mm(x_NI.float(), weight_OI.float().t(), out=out_NO)


class _Recorder(TorchDispatchMode):
    def __init__(self, recorded: list[Callable[[], None]]) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func._schema.name not in _WAITING, f"{func} waits for the device, which cannot be recorded"
        if func._schema.is_mutable:
            self._recorded.append(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        inputs = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(_storage(leaf) not in inputs for leaf in results):
            # Not a view: its memory stays, and is filled anew by each replay.
            self._recorded.append(lambda: _refill(results, func(*args, **kwargs)))
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _refill(targets: list[torch.Tensor], result: Any) -> None:
    sources = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
