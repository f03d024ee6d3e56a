"""A step's per-token numbers on the device, brought there by one copy."""

from __future__ import annotations

import torch

from engine.attention.batch import StepBatch
from engine.attention.cuda_device import CudaDevice

_NUM_COLUMNS = 5


class StepInputs:
    """int64 views on the device, each of as many elements as the step has tokens (T), or selected rows (R).

    A step of so many tokens finds its numbers at the same addresses every time, which recorded kernels rely on.

    Attributes:
        ids_T, positions_T, rows_R: as in `StepBatch`.
        blocks_T, offsets_T: a token's slot, taken apart: its block, and the slot within.
    """

    def __init__(self, device: CudaDevice, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._staging = device.staging(_NUM_COLUMNS * max_tokens)
        self._device = torch.zeros(_NUM_COLUMNS * max_tokens, dtype=torch.int64, device=device.device)
        self._assign(0, 0)

    def load(self, batch: StepBatch, block_size: int) -> None:
        """Queue the copy. The one before must be done (`CudaDevice.wait_for_copies`)."""
        num_tokens, num_selected = batch.num_tokens, batch.num_selected
        size = _NUM_COLUMNS * num_tokens
        ids_T, positions_T, blocks_T, offsets_T, rows_T = self._staging[:size].view(_NUM_COLUMNS, num_tokens)
        ids_T.copy_(batch.ids_T)
        positions_T.copy_(batch.positions_T)
        torch.div(batch.slots_T, block_size, rounding_mode="floor", out=blocks_T)
        torch.remainder(batch.slots_T, block_size, out=offsets_T)
        rows_T[:num_selected].copy_(batch.rows_R)
        self._device[:size].copy_(self._staging[:size], non_blocking=True)
        self._assign(num_tokens, num_selected)

    def _assign(self, num_tokens: int, num_selected: int) -> None:
        columns = self._device[: _NUM_COLUMNS * num_tokens].view(_NUM_COLUMNS, num_tokens)
        self.ids_T, self.positions_T, self.blocks_T, self.offsets_T, rows_T = columns
        self.rows_R = rows_T[:num_selected]
