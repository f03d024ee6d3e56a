"""Building and choosing the kernels: what happens where there is no compiler, or nothing was built."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.attention import cpu, native_library
from engine.attention.build import KernelBuildError, build, library_name
from engine.attention.native_library import KernelsUnavailableError, load_kernels
from engine.attention.select import select_backend
from engine.attention.torch_reference import TorchReferenceBackend


def test_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler: no-such-compiler"):
        build(tmp_path, compiler="no-such-compiler")
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'unknown flag -O3' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(KernelBuildError, match="unknown flag -O3"):
        build(tmp_path / "out", compiler=str(compiler))
    assert list((tmp_path / "out").iterdir()) == [], "nothing half-built stays"


def test_what_is_built_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / library_name()).touch()
    assert build(tmp_path, compiler="no-such-compiler") == tmp_path / library_name()


def test_an_unbuilt_or_broken_library_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailableError, match=r"python -m engine\.attention\.build"):
        load_kernels(tmp_path)
    (tmp_path / library_name()).write_bytes(b"not a library")
    with pytest.raises(KernelsUnavailableError, match="do not load"):
        load_kernels(tmp_path)


def test_falls_back_to_the_reference_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "load_kernels", lambda: native_library.load_kernels(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert isinstance(select_backend(1), TorchReferenceBackend)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "python -m engine.attention.build" in caplog.text
