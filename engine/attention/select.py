"""Chooses the device that a model is served from, and the backend of this machine's processor."""

from __future__ import annotations

import logging
from typing import Literal

from engine.attention.base import Backend
from engine.attention.cpu import NativeCpuBackend
from engine.attention.cuda_select import why_not_cuda
from engine.attention.kv_cache import KVLayout
from engine.attention.native_library import KernelsUnavailableError
from engine.attention.torch_reference import TorchReferenceBackend

_logger = logging.getLogger(__name__)


class DeviceUnavailableError(ValueError):
    """The device that was asked for is not here, or cannot serve the model."""


def select_device(requested: str, layout: KVLayout) -> Literal["cpu", "cuda"]:
    """The device for a model with such a pool: as requested, and with "auto" a GPU if one can serve it.

    Raises:
        DeviceUnavailableError: "cuda" is requested and is not to be had; the message says why.
        ValueError: something else is requested than auto, cpu or cuda.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {requested!r}")
    if requested == "cpu":
        return "cpu"
    reason = why_not_cuda(layout)
    if reason is None:
        return "cuda"
    if requested == "cuda":
        raise DeviceUnavailableError(f"device: cuda cannot serve this model: {reason}")
    _logger.info("served from the CPU, not from a GPU: %s", reason)
    return "cpu"


def select_backend(num_threads: int) -> Backend:
    """For the CPU: the native kernels where they are built; else the torch reference, with a warning."""
    try:
        return NativeCpuBackend(num_threads)
    except KernelsUnavailableError as error:
        _logger.warning("falling back to the slow torch reference: %s", error)
        return TorchReferenceBackend()
