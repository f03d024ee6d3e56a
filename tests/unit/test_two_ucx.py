"""The libraries of nixl and ucx each bring a UCX, of different versions: one process uses one of them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kv_transfer.transport import nixl_agent, ucx_library


def test_the_second_to_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", ModuleType("ucxx"))
    with pytest.raises(nixl_agent.NixlError, match="another UCX"):
        nixl_agent.load_library()
    monkeypatch.delitem(sys.modules, "ucxx")
    monkeypatch.setitem(sys.modules, "nixl_cu12", ModuleType("nixl_cu12"))
    with pytest.raises(ucx_library.UcxLibraryError, match="another UCX"):
        ucx_library.load.__wrapped__()
