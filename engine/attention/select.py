"""Chooses the backend of this machine."""

from __future__ import annotations

import logging

from engine.attention.base import Backend
from engine.attention.cpu import NativeCpuBackend
from engine.attention.native_library import KernelsUnavailableError
from engine.attention.torch_reference import TorchReferenceBackend

_logger = logging.getLogger(__name__)


def select_backend(num_threads: int) -> Backend:
    """The native kernels where they are built; else the torch reference, with a warning."""
    try:
        return NativeCpuBackend(num_threads)
    except KernelsUnavailableError as error:
        _logger.warning("falling back to the slow torch reference: %s", error)
        return TorchReferenceBackend()
