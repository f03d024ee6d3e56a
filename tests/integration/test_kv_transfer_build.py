"""Building the native copy kernel from its sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.build import NativeBuildError, build, library_path
from kv_transfer.checksum import as_memory, checksums
from kv_transfer.native_library import NativeLibrary


def test_library_is_named_after_its_sources_and_replaces_others(tmp_path: Path) -> None:
    stale = tmp_path / "libbaton_copy-0000000000000000.so"
    stale.touch()
    try:
        built = build(tmp_path)
    except NativeBuildError as error:
        pytest.skip(str(error))
    assert built == library_path(tmp_path) and list(tmp_path.iterdir()) == [built]
    assert checksums(as_memory(b"Baton"), [(0, 5)], NativeLibrary(str(built))) == [0xA35461050A15ACC6]
