"""The part of torch.cuda that the FlashInfer backend stands on; a test can put the host in its place.

Nothing here has been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaDevice:
    """One GPU, and this thread's current stream on it. Not thread-safe."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graph_memory = torch.cuda.graph_pool_handle()

    def staging(self, num_elements: int) -> torch.Tensor:
        """Host memory (int64) that the device copies from while the host goes on."""
        return torch.empty(num_elements, dtype=torch.int64, pin_memory=True)

    def mark_copies(self) -> None:
        """All copies from staging memory that are under way so far belong to the step at hand."""
        self._copied.record()

    def wait_for_copies(self) -> None:
        """Wait until the copies marked last are done: only then may their source change."""
        self._copied.synchronize()

    def synchronize(self) -> None:
        """Wait until everything queued so far is done."""
        torch.cuda.current_stream(self.device).synchronize()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Record what `body` launches, without running it; returns what launches it all again, at once.

        The kernels keep the addresses that they were recorded with. Whatever compiles or allocates for good at its
        first call must have run before. All recordings share one pool of memory for what `body` allocates, so they
        must not overlap.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            body()
        return graph.replay

    def wide_product(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, out_NO: torch.Tensor) -> None:
        """out = x weight^T, float32 of 16-bit factors: a product that torch has on CUDA devices alone."""
        torch.mm(x_NI, weight_OI.t(), out_dtype=torch.float32, out=out_NO)
