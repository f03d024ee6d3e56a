"""The nccl backend's calls into nccl4py and CUDA, against doubles with the real signatures: no GPU, so no more than
that the calls exist, take these arguments, and come in the right order."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from kv_transfer.transport import nccl_library
from kv_transfer.transport.nccl_library import (
    PROBE_BYTES,
    RECEIVER_RANK,
    WRITER_RANK,
    CudaNccl,
    NcclCommunicator,
    NcclError,
    NcclLibrary,
    NcclUnavailableError,
    why_not_nccl,
)

POOL_BYTES = 4096
UNIQUE_ID = bytes(range(128))
TIMEOUT_S = 30.0


class Doubles:
    """nccl.core, cuda.core and torch, as far as they are used. `calls` is what was called, in order."""

    def __init__(self) -> None:
        nccl = pytest.importorskip("nccl.core", reason="nccl4py is not installed")
        cuda = importlib.import_module("cuda.core")
        self.calls: list[str] = []
        self.abort_may_return = threading.Event()
        self.communicator: Any = create_autospec(nccl.Communicator, instance=True)
        self.communicator.get_async_error.return_value = 0
        self.communicator.get_last_error.return_value = "no route"
        for name in ("send", "recv"):
            getattr(self.communicator, name).side_effect = lambda *_, name=name, **__: self.calls.append(name)
        self.communicator.abort.side_effect = lambda: self.abort_may_return.wait(TIMEOUT_S)
        communicators = create_autospec(nccl.Communicator)
        communicators.init.return_value = self.communicator
        self.nccl = SimpleNamespace(
            Communicator=communicators,
            NCCLConfig=nccl.NCCLConfig,
            UniqueId=nccl.UniqueId,
            get_error_string=lambda result: f"error {int(result)}",
            get_unique_id=lambda: nccl.UniqueId.from_bytes(UNIQUE_ID),
            get_version=lambda: SimpleNamespace(libnccl=SimpleNamespace(version="2.99.0")),
            group=self._group,
        )
        self.event: Any = SimpleNamespace(is_done=False)
        self.stream: Any = create_autospec(cuda.Stream, instance=True)
        self.stream.record.side_effect = lambda: (self.calls.append("record"), self.event)[1]
        self.device: Any = create_autospec(cuda.Device, instance=True)
        self.device.create_stream.return_value = self.stream
        self.cuda = SimpleNamespace(Device=lambda index: self.device, StreamOptions=cuda.StreamOptions)
        self.torch = SimpleNamespace(
            uint8=torch.uint8, zeros=lambda size, dtype, device: torch.zeros(size, dtype=dtype)
        )
        self.pool = torch.arange(POOL_BYTES // 2, dtype=torch.int16)

    def library(self) -> CudaNccl:
        pool: Any = SimpleNamespace(
            device=torch.device("cuda", 1), is_contiguous=lambda: True, view=lambda *shape: self.pool.view(*shape)
        )
        return CudaNccl(pool)

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        self.calls.append("group start")
        yield
        self.calls.append("group end")

    def buffers(self, name: str) -> list[tuple[int, int, int]]:
        """(address within the pool, bytes, peer) of each call of that name."""
        calls = getattr(self.communicator, name).call_args_list
        assert all(call.kwargs == {"stream": self.stream} for call in calls)
        found = [(call.args[0], call.args[1]) for call in calls]
        assert all(buffer.dtype == torch.uint8 for buffer, _ in found)
        return [(buffer.data_ptr() - self.pool.data_ptr(), buffer.numel(), peer) for buffer, peer in found]


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> Doubles:
    doubles = Doubles()
    monkeypatch.setattr(nccl_library, "_load", lambda: (doubles.nccl, doubles.cuda, doubles.torch))
    return doubles


def test_ranges_become_grouped_buffers_of_the_pool(doubles: Doubles) -> None:
    library: NcclLibrary = doubles.library()
    assert (library.size_bytes, library.version, library.host_memory) == (POOL_BYTES, "2.99.0", None)
    assert library.unique_id() == UNIQUE_ID
    writer: NcclCommunicator = library.communicator(UNIQUE_ID, WRITER_RANK)
    writer.send([(16, 32), (1000, 7)])
    assert doubles.calls == ["group start", "send", "send", "group end"]
    assert doubles.buffers("send") == [(16, 32, RECEIVER_RANK), (1000, 7, RECEIVER_RANK)]
    receiver = library.communicator(UNIQUE_ID, RECEIVER_RANK)
    receiver.receive([(0, POOL_BYTES)])
    assert doubles.buffers("recv") == [(0, POOL_BYTES, WRITER_RANK)]


def test_communicators_do_not_block_and_have_streams_of_their_own(doubles: Doubles) -> None:
    library = doubles.library()
    for rank in (RECEIVER_RANK, WRITER_RANK):
        library.communicator(UNIQUE_ID, rank)
        num_ranks, its_rank, name, config = doubles.nccl.Communicator.init.call_args.args
        assert (num_ranks, its_rank, bytes(name), config.blocking) == (2, rank, UNIQUE_ID, False)
    doubles.device.set_current.assert_called()
    receiver, writer = (call.kwargs["options"] for call in doubles.device.create_stream.call_args_list)
    assert receiver.nonblocking and writer.nonblocking
    assert writer.priority < receiver.priority, "a send never waits behind a receive"


def test_probe_touches_no_byte_of_the_pool(doubles: Doubles) -> None:
    library = doubles.library()
    for rank, name in ((RECEIVER_RANK, "recv"), (WRITER_RANK, "send")):
        library.communicator(UNIQUE_ID, rank).probe()
        ((address, size_bytes, peer),) = doubles.buffers(name)
        assert size_bytes == PROBE_BYTES and peer == 1 - rank
        assert address + size_bytes <= 0 or address >= POOL_BYTES


def test_state_is_what_nccl_says(doubles: Doubles) -> None:
    communicator = doubles.library().communicator(UNIQUE_ID, WRITER_RANK)
    assert communicator.is_ready()
    doubles.communicator.get_async_error.return_value = 7
    assert not communicator.is_ready()
    doubles.communicator.get_async_error.return_value = 6
    with pytest.raises(NcclError, match="error 6: no route"):
        communicator.is_ready()


def test_completion_is_an_event_on_the_communicators_stream(doubles: Doubles) -> None:
    communicator = doubles.library().communicator(UNIQUE_ID, RECEIVER_RANK)
    communicator.receive([(0, 8)])
    completion = communicator.completion()
    assert doubles.calls == ["group start", "recv", "group end", "record"] and not completion.is_done()
    doubles.event.is_done = True
    assert completion.is_done()


def test_quiet_when_the_abort_has_returned_and_the_stream_is_empty(doubles: Doubles) -> None:
    communicator = doubles.library().communicator(UNIQUE_ID, RECEIVER_RANK)
    assert not communicator.is_quiet()
    communicator.abort()
    communicator.abort()
    doubles.event.is_done = True
    assert not communicator.is_quiet(), "it has not returned"
    doubles.event.is_done = False
    doubles.abort_may_return.set()
    communicator._aborting.join(TIMEOUT_S)  # type: ignore[attr-defined]
    assert doubles.calls == ["record"] and not communicator.is_quiet(), "the kernel may not have left"
    doubles.event.is_done = True
    assert communicator.is_quiet()
    doubles.communicator.abort.assert_called_once()


def test_abort_that_fails_is_never_quiet(doubles: Doubles) -> None:
    doubles.communicator.abort.side_effect = RuntimeError("lost")
    communicator = doubles.library().communicator(UNIQUE_ID, RECEIVER_RANK)
    communicator.abort()
    communicator._aborting.join(TIMEOUT_S)  # type: ignore[attr-defined]
    doubles.event.is_done = True
    assert not communicator.is_quiet()


def test_whatever_the_libraries_raise_is_an_nccl_error(doubles: Doubles) -> None:
    library = doubles.library()
    doubles.communicator.recv.side_effect = KeyError("x")
    with pytest.raises(NcclError, match="KeyError"):
        library.communicator(UNIQUE_ID, RECEIVER_RANK).receive([(0, 8)])
    doubles.nccl.Communicator.init.side_effect = RuntimeError("out of memory")
    with pytest.raises(NcclError, match="out of memory"):
        library.communicator(UNIQUE_ID, RECEIVER_RANK)


def test_pool_must_be_contiguous_memory_of_a_gpu(doubles: Doubles) -> None:
    with pytest.raises(ValueError, match=r"pool: .* cpu"):
        CudaNccl(torch.zeros(8))


def test_missing_parts_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        def find(wanted: str) -> ModuleType:
            if wanted == name:
                raise ImportError(f"No module named {wanted!r}")
            return real(wanted)

        real = importlib.import_module
        return find

    with monkeypatch.context() as patch:
        patch.setattr(nccl_library.importlib, "import_module", without("nccl.core"))  # type: ignore[attr-defined]
        reason = why_not_nccl()
        assert reason is not None and "nccl4py" in reason and "pip install baton-cluster[nccl]" in reason
        with pytest.raises(NcclUnavailableError, match=r"baton-cluster\[nccl\]"):
            CudaNccl(torch.zeros(8))
    pytest.importorskip("nccl.core", reason="nccl4py is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = why_not_nccl()
    assert reason is not None and "no NVIDIA GPU" in reason and "baton-cluster[nccl]" in reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    nccl = importlib.import_module("nccl.core")
    monkeypatch.setattr(nccl, "get_version", lambda: SimpleNamespace(libnccl=None))
    reason = why_not_nccl()
    assert reason is not None and "libnccl" in reason and "baton-cluster[nccl]" in reason
