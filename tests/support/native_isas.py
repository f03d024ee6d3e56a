"""Which instruction sets the native kernels' tests run on: those of this build and machine."""

from __future__ import annotations

import pytest

from engine.attention.native_library import KernelsUnavailableError, load_kernels, supported_isas


def isas_here() -> list[object]:
    """Parameters for a test of each; one that skips, saying why, where there are no kernels."""
    try:
        return list(supported_isas(load_kernels()))
    except KernelsUnavailableError as error:
        return [pytest.param("none", marks=pytest.mark.skip(reason=str(error)))]
