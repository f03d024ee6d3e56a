"""The ucxx library by itself moving the same descriptors, a message each.

Its receives are posted when the sender says that it begins, as in a push, which nobody knows of before; or, which is a
line of its own, before the time is taken. Endpoints have error handling, as Baton's must (a dead peer would not be
noticed without).
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

import numpy as np

from benchmarks.kv_wires.plans import LIMITS, Load, Stopwatch, Timing, make_pool, piece_sums, scattered_writes
from benchmarks.kv_wires.remote import IsCalled
from kv_transfer.checksum import Memory
from kv_transfer.protocol.plan import Copy
from kv_transfer.protocol.sampling import Checksums

HOST = "127.0.0.1"
DONE_TAG = 1 << 40
BEGIN_TAG = DONE_TAG + 1


class BareUcxEnd:
    """A worker over a pool like Baton's. The receiver listens, the sender connects."""

    def __init__(self, is_sender: bool, posts_early: bool, is_called: IsCalled) -> None:
        """With `posts_early` the receives are posted by `prepare`. Raises ImportError where the library is missing."""
        before = dict(os.environ)
        import ucxx._lib.libucxx as ucx
        from ucxx._lib.arr import Array

        # The variables that the import sets (such as one rail for what is large) cut its speed to a third here.
        os.environ.clear()
        os.environ.update(before)
        self._ucx, self._array = ucx, Array
        self._posts_early = posts_early
        self._is_called = is_called
        self._pause_s = 0.0
        self._pool, memory = make_pool(1 if is_sender else 2)
        self._memory: Memory | None = memory
        self._word = np.zeros(8, dtype=np.uint8)
        context = ucx.UCXContext(feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker: Any = ucx.UCXWorker(context)
        self._listener: Any = None
        self._endpoint: Any = None
        self._expected: list[Copy] = []
        self._begins: Any = None
        self._receives: list[Any] = []

    def endpoint(self) -> int:
        """The port of a listener."""
        self._listener = self._ucx.UCXListener.create(worker=self._worker, port=0, cb_func=self._on_request)
        return int(self._listener.port)

    def connect(self, port: int) -> None:
        self._endpoint = self._ucx.UCXEndpoint.create(self._worker, HOST, port, endpoint_error_handling=True)
        # What has not spoken is not connected yet.
        self._wait([self._endpoint.tag_send(self._array(self._word), tag=self._ucx.UCXXTag(DONE_TAG))])

    def set_pause(self, seconds: float) -> None:
        """How long it sleeps between two looks at what moves; 0 keeps it looking."""
        self._pause_s = seconds

    def serve(self) -> None:
        """Takes part until the next call comes; the first time, hears the sender's first word."""
        request = None
        while not self._is_called():
            self._look()
            if request is None and self._endpoint is not None and not self._receives:
                request = self._endpoint.tag_recv(self._array(self._word), tag=self._ucx.UCXXTag(DONE_TAG))
        if request is not None:
            self._wait([request])

    def prepare(self, load: Load, seed: int) -> int:
        """Plans the move. Returns the number of writes."""
        writes = scattered_writes(load, seed)
        if self._listener is not None:
            self._expected = [copy for write in writes for copy in write]
            self._begins = self._endpoint.tag_recv(self._array(self._word), tag=self._ucx.UCXXTag(BEGIN_TAG))
            if self._posts_early:
                self._post_receives()
        return len(writes)

    def _post_receives(self) -> None:
        assert self._memory is not None
        for number, copy in enumerate(self._expected):
            piece = self._memory[copy.target_bytes : copy.target_bytes + copy.size_bytes]
            self._receives.append(self._endpoint.tag_recv(self._array(piece), tag=self._ucx.UCXXTag(number)))

    def receive(self, num_writes: int) -> None:
        self._wait([self._begins])
        if not self._posts_early:
            self._post_receives()
        self._wait(self._receives)
        self._wait([self._endpoint.tag_send(self._array(self._word), tag=self._ucx.UCXXTag(DONE_TAG))])
        self.serve()
        self._receives = []

    def send(self, load: Load, seed: int, checksums: Checksums) -> Timing:
        assert checksums is Checksums.OFF, "the library does not sum"
        assert self._memory is not None
        copies = [copy for write in scattered_writes(load, seed) for copy in write]
        max_in_flight = LIMITS.max_inflight_writes * LIMITS.blocks_per_write(load.size_bytes)
        in_flight: deque[Any] = deque()
        num_posted = 0
        watch = Stopwatch()
        done = self._endpoint.tag_recv(self._array(self._word), tag=self._ucx.UCXXTag(DONE_TAG))
        begin = self._endpoint.tag_send(self._array(np.zeros(8, dtype=np.uint8)), tag=self._ucx.UCXXTag(BEGIN_TAG))
        while not (done.completed and begin.completed):
            while num_posted < len(copies) and len(in_flight) < max_in_flight:
                copy = copies[num_posted]
                piece = self._memory[copy.source_bytes : copy.source_bytes + copy.size_bytes]
                in_flight.append(self._endpoint.tag_send(self._array(piece), tag=self._ucx.UCXXTag(num_posted)))
                num_posted += 1
            self._look()
            while in_flight and in_flight[0].completed:
                in_flight.popleft()
        return watch.stop()

    def sums(self, load: Load, seed: int, at_target: bool) -> list[int]:
        """Of the pieces as they lie here."""
        assert self._memory is not None
        return piece_sums(self._memory, load, seed, at_target=at_target)

    def close(self) -> None:
        self._receives = []
        if self._endpoint is not None:
            self._endpoint.close_blocking()
        self._memory = None

    def _on_request(self, request: Any) -> None:
        self._endpoint = self._listener.create_endpoint_from_conn_request(request, endpoint_error_handling=True)

    def _look(self) -> None:
        self._worker.progress()
        if self._pause_s:
            time.sleep(self._pause_s)

    def _wait(self, requests: list[Any]) -> None:
        for request in requests:
            while not request.completed:
                self._look()
            request.check_error()
