"""The wires that are measured: two processes each, the sender on one core and the receiver on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.kv_wires.bare_nixl import FENCEABLE, RECEIVER_NAME, SENDER_NAME, BareNixlEnd
from benchmarks.kv_wires.bare_ucx import BareUcxEnd
from benchmarks.kv_wires.plans import Load, Timing
from benchmarks.kv_wires.remote import IsCalled, Remote, RemoteFailedError
from benchmarks.kv_wires.transport_end import RECEIVER, SENDER, TransportEnd
from kv_transfer.protocol.sampling import Checksums

MEMCPY, SHM, NIXL, UCX = "memcpy", "shm", "nixl", "ucx"
BARE_NIXL, BARE_NIXL_CMA = "nixl library", "nixl library with CMA"
BARE_UCX, BARE_UCX_EARLY = "ucxx library", "ucxx library, receives posted before"
BARE = {NIXL: BARE_NIXL, UCX: BARE_UCX}
BARE_NAMES = (BARE_NIXL, BARE_NIXL_CMA, BARE_UCX, BARE_UCX_EARLY)
PAUSE_S = 50e-6

Make = Callable[[IsCalled], object]
ENDS: dict[str, tuple[Make, Make]] = {
    SHM: (partial(TransportEnd, SHM, SENDER), partial(TransportEnd, SHM, RECEIVER)),
    BARE_NIXL: (partial(BareNixlEnd, SENDER_NAME, FENCEABLE), partial(BareNixlEnd, RECEIVER_NAME, FENCEABLE)),
    BARE_NIXL_CMA: (partial(BareNixlEnd, SENDER_NAME, ""), partial(BareNixlEnd, RECEIVER_NAME, "")),
    NIXL: (partial(TransportEnd, NIXL, SENDER), partial(TransportEnd, NIXL, RECEIVER)),
    BARE_UCX: (partial(BareUcxEnd, True, False), partial(BareUcxEnd, False, False)),
    BARE_UCX_EARLY: (partial(BareUcxEnd, True, True), partial(BareUcxEnd, False, True)),
    UCX: (partial(TransportEnd, UCX, SENDER), partial(TransportEnd, UCX, RECEIVER)),
}


class Wire:
    """Connected ends. Between moves neither uses its core."""

    def __init__(self, name: str, cores: Sequence[int], stack: ExitStack) -> None:
        """Raises: RemoteFailedError where it cannot be had."""
        make_sender, make_receiver = ENDS[name]
        self.name = name
        self._receiver = stack.enter_context(Remote(make_receiver, cores[-1:], f"{name} receiver"))
        self._sender = stack.enter_context(Remote(make_sender, cores[:1], f"{name} sender"))
        endpoint = self._receiver.call("endpoint")
        if name in (BARE_NIXL, BARE_NIXL_CMA):  # its agents must know each other both ways
            self._receiver.call("connect", self._sender.call("endpoint"))
        self._receiver.begin("serve")
        self._sender.call("connect", endpoint)
        if name == SHM:
            self._sender.call("map_peer", endpoint)
        self._receiver.interrupt()

    def move(self, load: Load, seed: int, checksums: Checksums = Checksums.OFF) -> Timing:
        """The faster of two runs. The ends of a bare library never stop looking in the first, which is best where each
        has a core for itself, and sleep a little between looks in the second, which is best where it has not.

        Raises: RemoteFailedError.
        """
        timings = []
        for pause_s in (0.0, PAUSE_S):
            if self.name in BARE_NAMES:
                self._sender.call("set_pause", pause_s)
                self._receiver.call("set_pause", pause_s)
            timings.append(self._move(load, seed, checksums))
        return faster(timings)

    def _move(self, load: Load, seed: int, checksums: Checksums) -> Timing:
        self._sender.call("prepare", load, seed)
        num_writes = self._receiver.call("prepare", load, seed)
        self._receiver.begin("receive", num_writes)
        timing: Timing = self._sender.call("send", load, seed, checksums)
        self._receiver.interrupt()
        return timing

    def check(self, load: Load, seed: int) -> None:
        """That what was moved last has arrived as it was. Raises: RemoteFailedError."""
        sent, arrived = self._sender.call("sums", load, seed, False), self._receiver.call("sums", load, seed, True)
        if sent != arrived:
            raise RemoteFailedError(f"{self.name}: pieces did not arrive as they were sent")

    def memcpy(self, load: Load) -> Timing:
        """Of shm alone: one call over as many bytes, between the same memory; the faster of two runs."""
        return faster([self._sender.call("memcpy", load) for _ in range(2)])


def faster(timings: Sequence[Timing]) -> Timing:
    return min(timings, key=lambda timing: timing.seconds)


def open_wires(cores: Sequence[int], stack: ExitStack, missing: dict[str, str]) -> dict[str, Wire]:
    """Those that can be had, by name; of the others, why not."""
    wires = {}
    for name in ENDS:
        with ExitStack() as own:
            try:
                wires[name] = Wire(name, cores, own)
            except RemoteFailedError as error:
                missing[name] = str(error)
            else:
                stack.enter_context(own.pop_all())
    return wires
