"""The nixl library by itself moving the same descriptors, as a program would use it that polls for nothing else."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.kv_wires.plans import (
    LIMITS,
    POOL_BYTES,
    Load,
    Stopwatch,
    Timing,
    make_pool,
    piece_sums,
    scattered_writes,
)
from benchmarks.kv_wires.remote import IsCalled
from kv_transfer.checksum import Memory
from kv_transfer.protocol.plan import Copy
from kv_transfer.protocol.sampling import Checksums

SENDER_NAME, RECEIVER_NAME = "sender", "receiver"
DONE = b"done"
FENCEABLE = "TLS=^sm,NET_DEVICES=lo"
"""What Baton's agents are told: TCP here, RDMA between hosts. What the library would choose on one host copies by way
of the kernel (CMA), and no act of the memory's owner can stop such a copy."""


class BareNixlEnd:
    """An agent over a pool like a worker's."""

    def __init__(self, name: str, engine_config: str, is_called: IsCalled) -> None:
        """Without an `engine_config` the library chooses. Raises ImportError where it is missing."""
        from nixl_cu12._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        self._is_called = is_called
        self._pause_s = 0.0
        self._pool, memory = make_pool(1 if name == SENDER_NAME else 2)
        self._memory: Memory | None = memory
        self._address = memory.ctypes.data
        config = nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._agent: Any = nixl_agent(name, config)
        self._agent.create_backend("UCX", {"engine_config": engine_config} if engine_config else {})
        self._agent.register_memory([(self._address, POOL_BYTES, 0, "")], "DRAM")
        self._peer = ""
        self._peer_address = 0

    def endpoint(self) -> tuple[bytes, int]:
        return self._agent.get_agent_metadata(), self._address

    def connect(self, endpoint: tuple[bytes, int]) -> None:
        metadata, self._peer_address = endpoint
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(self._peer)

    def set_pause(self, seconds: float) -> None:
        """How long it sleeps when a look has found nothing; 0 keeps it looking."""
        self._pause_s = seconds

    def serve(self) -> None:
        """Takes part until the next call comes."""
        while not self._is_called():
            self._look()

    def prepare(self, load: Load, seed: int) -> int:
        """Plans the move, so that planning is not timed. Returns the number of writes."""
        return len(scattered_writes(load, seed))

    def receive(self, num_writes: int) -> None:
        num_arrived = 0
        while num_arrived < num_writes:
            num_arrived += self._look()
        self._agent.send_notif(self._peer, DONE)
        self.serve()

    def send(self, load: Load, seed: int, checksums: Checksums) -> Timing:
        assert checksums is Checksums.OFF, "the library does not sum"
        writes = scattered_writes(load, seed)
        num_posted, in_flight, is_done = 0, [], False
        watch = Stopwatch()
        while not is_done:
            while num_posted < len(writes) and len(in_flight) < LIMITS.max_inflight_writes:
                in_flight.append(self._post(writes[num_posted]))
                num_posted += 1
            in_flight = [handle for handle in in_flight if not self._has_ended(handle)]
            is_done = self._look() > 0
        return watch.stop()

    def sums(self, load: Load, seed: int, at_target: bool) -> list[int]:
        """Of the pieces as they lie here."""
        assert self._memory is not None
        return piece_sums(self._memory, load, seed, at_target=at_target)

    def close(self) -> None:
        del self._agent
        self._memory = None
        self._pool.close()

    def _look(self) -> int:
        """How many notifications have arrived."""
        num_arrived = sum(len(notes) for notes in self._agent.get_new_notifs().values())
        if not num_arrived and self._pause_s:
            time.sleep(self._pause_s)
        return num_arrived

    def _post(self, copies: list[Copy]) -> Any:
        table = np.array([(copy.source_bytes, copy.target_bytes, copy.size_bytes) for copy in copies], dtype=np.uint64)
        device = np.zeros(len(copies), dtype=np.uint64)
        local = np.stack([table[:, 0] + np.uint64(self._address), table[:, 2], device], axis=1)
        remote = np.stack([table[:, 1] + np.uint64(self._peer_address), table[:, 2], device], axis=1)
        local_list = self._agent.get_xfer_descs(local, "DRAM")
        remote_list = self._agent.get_xfer_descs(remote, "DRAM")
        handle = self._agent.initialize_xfer("WRITE", local_list, remote_list, self._peer, b"chunk")
        self._agent.transfer(handle)
        return handle

    def _has_ended(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        assert state in ("DONE", "PROC"), f"a transfer ended as {state}"
        if state == "DONE":
            self._agent.release_xfer_handle(handle)
        return bool(state == "DONE")
