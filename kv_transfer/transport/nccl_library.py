"""All that the nccl backend asks of NCCL and CUDA: two protocols, and what implements them through nccl4py.

Everything above this file decides, and is tested over a double of these two protocols; everything in here needs a GPU.

What NCCL asks of its callers, and how it is met:

* A communicator is made non-blocking, for a blocking one cannot be given up. After every call it may be "in progress",
  and until it is not (`is_ready`) nothing else may be called on it and nothing recorded on its stream: an event
  recorded too early would report a receive that has not even been launched as done.
* There is no time limit, neither for making a communicator nor for an operation: whoever calls counts, and aborts.
* `abort` blocks until the communicator's threads have ended, so it runs in a thread of its own; nothing else is called
  on the communicator from then on. It may return before the kernel has left the stream (always, if both ranks belong
  to one process), so the communicator is quiet only when the stream is empty as well.
* The pool is never registered with a communicator (`register_buffer`, `register_window`). Then a peer's GPU or network
  card writes into buffers of NCCL's own, and only the receive kernel of *this* GPU writes into the pool. That is what
  makes an abort a fence: when the kernel has ended, nothing can land. One-sided calls (`put_signal`) and registered
  receives let the peer write into the pool itself, and no call on our side would stop it. Hence neither is used.
* `revoke` and `shrink` keep the healthy ranks of a communicator together. A pair without one of two is no pair.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from kv_transfer.checksum import Memory
from kv_transfer.transport.base import TransportError

if TYPE_CHECKING:
    import torch

NUM_RANKS = 2
RECEIVER_RANK = 0
WRITER_RANK = 1
PROBE_BYTES = 16
"""What is sent at first, to make NCCL connect the ranks."""
MAX_CTAS = 8
"""Blocks of threads that one communicator's kernel may occupy: so that all kernels that wait for their peers fit into a
GPU beside each other and beside the model's."""
_EXTRA = "pip install baton-cluster[nccl]"
_SUCCESS = 0
_IN_PROGRESS = 7
"""ncclResult_t, of which the binding exports no names outside of its private parts."""

_log = logging.getLogger(__name__)

Range = tuple[int, int]
"""(offset, size) in bytes of the pool."""


class NcclError(TransportError):
    """NCCL or CUDA refused a call, or reports that the communicator has failed."""


class NcclUnavailableError(TransportError):
    """This machine lacks nccl4py, libnccl or a GPU."""


class Completion(Protocol):
    """A mark in the order of a communicator's operations."""

    def is_done(self) -> bool:
        """Whether all operations before the mark have ended. Raises: NcclError."""


class NcclCommunicator(Protocol):
    """One end of a communicator of two ranks. All calls come from one thread and return at once.

    `send`, `receive`, `probe` and `completion` may be called only while `is_ready`. Operations run in the order in
    which they were posted, and each needs its counterpart at the other end, with the same sizes in the same order.
    """

    def is_ready(self) -> bool:
        """Whether the last call has settled (at first: whether the other rank has joined). Raises: NcclError."""

    def send(self, ranges: Sequence[Range]) -> None:
        """Posts one group. Raises: NcclError."""

    def receive(self, ranges: Sequence[Range]) -> None:
        """Posts one group. Raises: NcclError."""

    def probe(self) -> None:
        """Posts the exchange of PROBE_BYTES outside of the pool, from writer to receiver. Raises: NcclError."""

    def completion(self) -> Completion:
        """Marks the end of all that has been posted. Raises: NcclError."""

    def abort(self) -> None:
        """Starts to end the communicator and all its operations, in any state. Idempotent."""

    def is_quiet(self) -> bool:
        """After abort: whether nothing of it can touch the pool any more. Never again false."""


class NcclLibrary(Protocol):
    """NCCL, and the pool that its communicators read and write."""

    version: str
    """Of libnccl. Both ends of a communicator must have the same."""
    size_bytes: int
    """Of the pool."""
    host_memory: Memory | None
    """The pool if the processor can read it, as in tests; None if it is in a GPU's memory."""

    def unique_id(self) -> bytes:
        """Names a communicator that is to be made. Raises: NcclError."""

    def communicator(self, unique_id: bytes, rank: int) -> NcclCommunicator:
        """Starts to make this end of one. Raises: NcclError."""


class CudaNccl:
    """NCCL over a pool in the memory of one NVIDIA GPU."""

    host_memory: Memory | None = None

    def __init__(self, pool: torch.Tensor) -> None:
        """`pool`: contiguous, of any type, on a CUDA device. It must stay alive as long as this object.

        Raises: NcclUnavailableError, ValueError for another kind of tensor.
        """
        self._nccl, self._cuda, torch = _load()
        if pool.device.type != "cuda" or not pool.is_contiguous():
            raise ValueError(f"pool: must be a contiguous CUDA tensor, is on {pool.device}")
        self._bytes = pool.view(-1).view(torch.uint8)
        self.size_bytes = self._bytes.numel()
        self._device = self._cuda.Device(pool.device.index)
        # One for what is sent and one for what arrives, shared by all communicators: nobody reads them.
        self._scratch = [torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=pool.device) for _ in range(NUM_RANKS)]
        self.version = str(self._nccl.get_version().libnccl.version)

    def unique_id(self) -> bytes:
        with _translated():
            return bytes(self._nccl.get_unique_id())

    def communicator(self, unique_id: bytes, rank: int) -> NcclCommunicator:
        with _translated():
            self._device.set_current()
            # Sends have a higher priority: a send's kernel must not wait behind receives that wait for their peers,
            # or two workers that write to each other could wait for ever.
            options = self._cuda.StreamOptions(nonblocking=True, priority=-1 if rank == WRITER_RANK else 0)
            stream = self._device.create_stream(options=options)
            config = self._nccl.NCCLConfig(blocking=False, max_ctas=MAX_CTAS)
            name = self._nccl.UniqueId.from_bytes(unique_id)
            communicator = self._nccl.Communicator.init(NUM_RANKS, rank, name, config)
        return CudaCommunicator(self._nccl, communicator, rank, self._device, stream, self._bytes, self._scratch[rank])


class CudaCommunicator:
    """One end of an NCCL communicator, with a stream of its own."""

    def __init__(
        self,
        nccl: Any,
        communicator: Any,
        rank: int,
        device: Any,
        stream: Any,
        pool: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._rank = rank
        self._device = device
        self._stream = stream
        self._pool = pool
        self._scratch = scratch
        self._aborting: threading.Thread | None = None
        self._last_mark: Any = None
        """Recorded when the abort has returned; done when the stream is empty."""

    def is_ready(self) -> bool:
        with _translated():
            state = int(self._communicator.get_async_error())
            if state not in (_SUCCESS, _IN_PROGRESS):
                reason = self._nccl.get_error_string(state)
                raise NcclError(f"NCCL: {reason}: {self._communicator.get_last_error()}")
        return state == _SUCCESS

    def send(self, ranges: Sequence[Range]) -> None:
        with _translated(), self._nccl.group():
            for offset, size in ranges:
                self._communicator.send(self._pool[offset : offset + size], RECEIVER_RANK, stream=self._stream)

    def receive(self, ranges: Sequence[Range]) -> None:
        with _translated(), self._nccl.group():
            for offset, size in ranges:
                self._communicator.recv(self._pool[offset : offset + size], WRITER_RANK, stream=self._stream)

    def probe(self) -> None:
        with _translated(), self._nccl.group():
            if self._rank == WRITER_RANK:
                self._communicator.send(self._scratch, RECEIVER_RANK, stream=self._stream)
            else:
                self._communicator.recv(self._scratch, WRITER_RANK, stream=self._stream)

    def completion(self) -> Completion:
        with _translated():
            return CudaCompletion(self._stream.record())

    def abort(self) -> None:
        if self._aborting is None:
            self._aborting = threading.Thread(target=self._abort, name="kv-nccl-abort", daemon=True)
            self._aborting.start()

    def is_quiet(self) -> bool:
        if self._aborting is None or self._aborting.is_alive() or self._last_mark is None:
            return False
        with _translated():
            return bool(self._last_mark.is_done)

    def _abort(self) -> None:
        try:
            with _translated():
                self._device.set_current()
                self._communicator.abort()
                self._last_mark = self._stream.record()
        except NcclError:
            # Never quiet then, so no fence over it completes and its blocks are not given to anybody.
            _log.exception("an NCCL communicator could not be aborted")


class CudaCompletion:
    """A CUDA event."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_done(self) -> bool:
        with _translated():
            return bool(self._event.is_done)


def why_not_nccl() -> str | None:
    """Why this machine cannot move KV with NCCL; None if it can."""
    try:
        _load()
    except NcclUnavailableError as error:
        return str(error)
    return None


def _load() -> tuple[Any, Any, Any]:
    """The modules nccl.core, cuda.core and torch. Raises: NcclUnavailableError."""
    try:
        nccl, cuda, torch = (importlib.import_module(name) for name in ("nccl.core", "cuda.core", "torch"))
    except (ImportError, OSError, RuntimeError) as error:
        raise NcclUnavailableError(f"nccl4py cannot be imported ({error}): {_EXTRA}") from error
    if not torch.cuda.is_available():
        raise NcclUnavailableError(
            f"torch {torch.__version__} finds no NVIDIA GPU, and the nccl transport needs one: "
            f"install a torch with CUDA, and {_EXTRA}"
        )
    if nccl.get_version().libnccl is None:
        raise NcclUnavailableError(f"libnccl is not installed: {_EXTRA}, beside a torch with CUDA, which brings it")
    return nccl, cuda, torch


@contextmanager
def _translated() -> Iterator[None]:
    """Whatever nccl4py, cuda.core and torch raise becomes NcclError."""
    try:
        yield
    except NcclError:
        raise
    except Exception as error:  # they have no root in common, and cuda.core's own is not public
        raise NcclError(f"{type(error).__name__}: {error}") from error
