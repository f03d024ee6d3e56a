"""The ucxx library as this package uses it: imported when first needed, driven by the thread that owns the worker.

Only its core is used, with explicit progress: the asyncio layer above it costs a hundred times the latency.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.transport.base import TransportError

OPTIONS = {"RNDV_THRESH": "4K"}
"""From this size on a message is announced first, and moved once it has met its receive. Smaller ones fit into one
packet. What UCX would choose for sizes in between, packets without an announcement, leaves a receive that has got the
first of them unfinished for ever when the connection breaks: its fence could never complete."""

FIRST_TAG = 16
"""Of those that `Worker.take_tags` gives out; the ones below have fixed uses."""
_IN_PROGRESS = 1
"""UCX's status of what has not ended; 0 is success."""

_log = logging.getLogger(__name__)


class UcxLibraryError(TransportError):
    """The library is missing, or could not set up its side."""


class UcxEndpointError(TransportError):
    """The endpoint cannot be made or used any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Library:
    api: Any
    array: Callable[[object], Any]
    tag: Callable[[int], Any]
    error: type[Exception]


OTHER_UCX = ("nixl_cu12", "nixl_cu13", "nixl")
"""Modules that bring a UCX of another version. Both work side by side until an endpoint fails."""


@functools.cache
def load() -> _Library:
    """Raises: UcxLibraryError if ucxx is not installed, or cannot be used in this process."""
    if any(name in sys.modules for name in OTHER_UCX):
        raise UcxLibraryError(
            "nixl is loaded in this process, and has another UCX: they crash together when a peer dies"
        )
    before = dict(os.environ)
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
        from ucxx.exceptions import UCXError
        from ucxx.types import Tag
    except ImportError as error:
        raise UcxLibraryError(f"transport ucx needs ucxx ({error}): pip install baton-cluster[ucx]") from error
    finally:
        # Importing it sets UCX_* variables, which every other user of UCX in this process would take for the
        # operator's wish, above its own settings.
        for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
            del os.environ[name]
    return _Library(api=libucxx, array=Array, tag=Tag, error=UCXError)


class Transfer:
    """A posted send or receive. Dropping one that has not ended would cancel it, so whoever posts keeps it."""

    __slots__ = ("_array", "_request", "_status", "size_bytes")

    def __init__(self, request: Any, array: Any) -> None:
        self._request = request
        self._array = array  # holds the memory that UCX works on
        self._status = _IN_PROGRESS
        self.size_bytes: int = array.nbytes

    @property
    def has_ended(self) -> bool:
        if self._status == _IN_PROGRESS:
            self._status = int(self._request.status)
        return self._status != _IN_PROGRESS

    @property
    def has_failed(self) -> bool:
        """Of one that has ended."""
        return self._status != 0


class Endpoint:
    """One end of a connection. Every method but `close` raises UcxEndpointError if UCX refuses the call."""

    def __init__(self, library: _Library, endpoint: Any) -> None:
        self._library = library
        self._endpoint = endpoint
        self._ends: list[bool] = []
        """UCX puts something in when the connection has ended."""
        try:
            endpoint.set_close_callback(self._ends.append, (True,))
        except (library.error, RuntimeError):
            self._ends.append(True)

    @property
    def is_alive(self) -> bool:
        return not self._ends

    def send_stream(self, data: bytes) -> Transfer:
        return self._post(self._endpoint.stream_send, data)

    def receive_stream(self, buffer: Memory) -> Transfer:
        """Ends when the whole of `buffer` is filled."""
        return self._post(self._endpoint.stream_recv, buffer)

    def send_tagged(self, memory: Memory | bytes, tag: int) -> Transfer:
        return self._post(self._endpoint.tag_send, memory, self._library.tag(tag))

    def receive_tagged(self, memory: Memory, tag: int) -> Transfer:
        """Ends, at the latest, some turns after `close`."""
        return self._post(self._endpoint.tag_recv, memory, self._library.tag(tag))

    def close(self) -> None:
        """Breaks the connection: the other end is told, and what is posted here ends as UCX lets go of it.

        If sends or matched receives were under way, ucxx 0.52 keeps this endpoint, and with it the closed worker's
        few descriptors, until the process ends: its list of what it tried to cancel is never cleared.
        """
        self._endpoint.close_blocking()

    def _post(self, call: Callable[..., Any], memory: object, *arguments: Any) -> Transfer:
        array = self._library.array(memory)
        try:
            return Transfer(call(array, *arguments), array)
        except self._library.error as error:
            raise UcxEndpointError(str(error)) from error


class Worker:
    """A UCX context, its worker and its listener, which takes any free port. Used from one thread at a time."""

    def __init__(self) -> None:
        """Raises: UcxLibraryError."""
        self._library = load()
        api = self._library.api
        self._requests: deque[int] = deque()
        self._next_tag = FIRST_TAG
        try:
            features = (api.Feature.TAG, api.Feature.STREAM, api.Feature.WAKEUP)
            # UCX opens a port on every network device. Told to keep to loopback it would move a quarter as much, as it
            # spreads what is large over the devices.
            self._context = api.UCXContext(dict(OPTIONS), features)
            self._worker = api.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self._listener = api.UCXListener.create(self._worker, 0, self._requests.append)
        except self._library.error as error:
            raise UcxLibraryError(f"ucx cannot be set up: {error}") from error
        self.port = int(self._listener.port)

    def fileno(self) -> int:
        """Becomes readable when there is something to progress, once `arm` has returned True."""
        return int(self._worker.epoll_file_descriptor)

    def arm(self) -> bool:
        """False if there is something to progress already."""
        return bool(self._worker.arm())

    def progress(self) -> None:
        """Moves what can be moved, without the GIL."""
        self._worker.progress()

    def connect(self, host: str, port: int) -> Endpoint:
        """Starts connecting; what is sent meanwhile waits. Raises: UcxEndpointError."""
        try:
            endpoint = self._library.api.UCXEndpoint.create(self._worker, host, port, True)
        except self._library.error as error:
            raise UcxEndpointError(str(error)) from error
        return Endpoint(self._library, endpoint)

    def take_tags(self, num_tags: int) -> int:
        """The first of as many tags in a row that nothing else of this worker has or had."""
        first, self._next_tag = self._next_tag, self._next_tag + num_tags
        return first

    def receive_tagged(self, memory: Memory, tag: int) -> Transfer:
        """From whatever connection. Raises: UcxEndpointError."""
        array = self._library.array(memory)
        try:
            return Transfer(self._worker.tag_recv(array, self._library.tag(tag)), array)
        except self._library.error as error:
            raise UcxEndpointError(str(error)) from error

    def accept(self) -> Iterator[Endpoint]:
        """Those that have connected since."""
        while self._requests:
            request = self._requests.popleft()
            try:
                # With error handling: without it the death of a peer would never be noticed.
                endpoint = self._listener.create_endpoint_from_conn_request(request, True)
            except self._library.error as error:
                _log.warning("a ucx connection could not be accepted: %s", error)
                continue
            yield Endpoint(self._library, endpoint)

    def close(self) -> None:
        """Its endpoints must have been dropped before."""
        del self._listener, self._worker, self._context


EMPTY: Memory = np.empty(0, dtype=np.uint8)
