"""Ordered, reliable streams between processes, as TCP gives them: with latency, cuts, stalls and partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.core.brief import brief
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS, Kernel
from cluster.sim.process import Process

MIN_LATENCY_NS = 100_000
MAX_LATENCY_NS = 1_500_000
MAX_CUT_DETECTION_NS = 4 * SECOND_NS
"""Keepalive finds a cut connection within this time; each side on its own."""
DIAL_TIMEOUT_NS = 500 * MILLISECOND_NS

Accept = Callable[["StreamEnd"], None]
Message = Any
"""Streams carry whatever their two ends agree on; the ends are typed, the pipe is not."""


class Wire:
    """What the two ends of a stream share."""

    __slots__ = ("is_cut",)

    def __init__(self) -> None:
        self.is_cut = False


class StreamEnd:
    """One side's view of a stream. The owner sets `on_message` and `on_closed` before anything can arrive."""

    __slots__ = ("_last_arrival_ns", "_network", "is_open", "on_closed", "on_message", "peer", "process", "wire")

    def __init__(self, network: Network, process: Process, wire: Wire) -> None:
        self._network = network
        self.process = process
        self.wire = wire
        self.peer: StreamEnd = self
        self.is_open = True
        self.on_message: Callable[[Message], None] = _ignore
        self.on_closed: Callable[[str], None] = _ignore
        self._last_arrival_ns = 0

    def send(self, message: Message, taken: Callable[[], None] | None = None) -> None:
        """Sends; a stream that has ended swallows the message. `taken` is called here once the other side read it."""
        if self.is_open:
            self._network.transmit(self, message, taken)

    def close(self) -> None:
        """Ends the stream; the other side reads what was sent and then sees the end."""
        if self.is_open:
            self.is_open = False
            self._network.transmit_end(self, "closed by peer")

    # The network's side of it.

    def arrival_ns(self, delay_ns: int) -> int:
        """When something sent from here now arrives: never before what was sent earlier."""
        self._last_arrival_ns = max(self._last_arrival_ns, self._network.kernel.now_ns + delay_ns)
        return self._last_arrival_ns

    def lose(self, reason: str) -> None:
        """The stream ends under its owner."""
        if self.is_open:
            self.is_open = False
            self.on_closed(reason)


def _ignore(_: Any) -> None:
    pass


class Network:
    """All streams and listeners, the links between hosts (one a process name), and what is wrong with them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._random = kernel.stream("network")
        self._listeners: dict[str, tuple[Process, Accept]] = {}
        self._streams: list[tuple[StreamEnd, StreamEnd]] = []
        self._partitions: dict[tuple[str, str], int] = {}
        self._stalled_until_ns: dict[tuple[str, str], int] = {}

    # ---- what processes use -----------------------------------------------------------------------------------

    def listen(self, address: str, process: Process, accept: Accept) -> None:
        self._listeners[address] = (process, accept)
        process.on_exit(lambda _reason: self._stop_listening(address, process))

    def dial(
        self, process: Process, address: str, opened: Callable[[StreamEnd], None], failed: Callable[[str], None]
    ) -> None:
        """Opens a stream to whoever listens at `address`; one of the two callbacks follows."""
        self.kernel.after(self._latency_ns(), lambda: self._accept(process, address, opened, failed))

    def _accept(
        self, process: Process, address: str, opened: Callable[[StreamEnd], None], failed: Callable[[str], None]
    ) -> None:
        listener = self._listeners.get(address)
        if not process.alive:
            return
        if listener is None:
            process.after(self._latency_ns(), lambda: failed("connection refused"))
            return
        server, accept = listener
        if self.is_partitioned(process.name, server.name):
            process.after(DIAL_TIMEOUT_NS, lambda: failed("timed out"))
            return
        wire = Wire()
        near, far = StreamEnd(self, process, wire), StreamEnd(self, server, wire)
        near.peer, far.peer = far, near
        self._streams.append((near, far))
        process.on_exit(lambda _reason: near.close())
        server.on_exit(lambda _reason: far.close())
        arrival_ns = far.arrival_ns(self._latency_ns())
        server.deliver(lambda: accept(far))
        self.kernel.at(arrival_ns, lambda: process.deliver(lambda: opened(near)))

    def _stop_listening(self, address: str, process: Process) -> None:
        listener = self._listeners.get(address)
        if listener is not None and listener[0] is process:
            del self._listeners[address]

    # ---- what streams use -------------------------------------------------------------------------------------

    def transmit(self, end: StreamEnd, message: Message, taken: Callable[[], None] | None) -> None:
        far = end.peer

        def arrive() -> None:
            if end.wire.is_cut or not far.is_open:
                return
            if self.kernel.trace.enabled:
                self.kernel.trace.note(self.kernel.now_ns, f"{end.process} -> {far.process}: {brief(message)}")
            if taken is not None and end.is_open:
                end.process.deliver(taken)
            far.on_message(message)

        self.kernel.at(end.arrival_ns(self._delay_ns(end)), lambda: far.process.deliver(arrive))

    def transmit_end(self, end: StreamEnd, reason: str) -> None:
        """After everything sent before it. On a cut stream nothing arrives: keepalive finds out."""
        far = end.peer

        def arrive() -> None:
            if not end.wire.is_cut:
                far.lose(reason)

        self.kernel.at(end.arrival_ns(self._delay_ns(end)), lambda: far.process.deliver(arrive))

    def _latency_ns(self) -> int:
        return MIN_LATENCY_NS + int(self._random.random() * (MAX_LATENCY_NS - MIN_LATENCY_NS))

    def _delay_ns(self, end: StreamEnd) -> int:
        latency_ns = self._latency_ns()
        if self._stalled_until_ns:
            stalled_until_ns = self._stalled_until_ns.get(_link(end.process.name, end.peer.process.name), 0)
            latency_ns += max(0, stalled_until_ns - self.kernel.now_ns)
        return latency_ns

    # ---- faults -----------------------------------------------------------------------------------------------

    def cut(self, name: str, other: str) -> None:
        """Breaks every stream between the two: what is in flight is lost, each side finds out in its own time."""
        self._streams = [pair for pair in self._streams if pair[0].is_open or pair[1].is_open]
        for near, far in self._streams:
            if not near.wire.is_cut and _link(near.process.name, far.process.name) == _link(name, other):
                near.wire.is_cut = True
                self._lose_later(near)
                self._lose_later(far)

    def _lose_later(self, end: StreamEnd) -> None:
        delay_ns = int(self._random.random() * MAX_CUT_DETECTION_NS)
        self.kernel.after(delay_ns, lambda: end.process.deliver(lambda: end.lose("keepalive failed")))

    def partition(self, name: str, other: str) -> None:
        """Nothing passes between the two until `heal`; may be nested."""
        link = _link(name, other)
        self._partitions[link] = self._partitions.get(link, 0) + 1
        self.cut(name, other)

    def heal(self, name: str, other: str) -> None:
        link = _link(name, other)
        self._partitions[link] -= 1
        if not self._partitions[link]:
            del self._partitions[link]

    def is_partitioned(self, name: str, other: str) -> bool:
        return bool(self._partitions) and _link(name, other) in self._partitions

    def stall(self, name: str, other: str, duration_ns: int) -> None:
        """Delays what is sent between the two from now on until the time is over; order is kept."""
        self._stalled_until_ns[_link(name, other)] = self.kernel.now_ns + duration_ns


def _link(name: str, other: str) -> tuple[str, str]:
    return (name, other) if name < other else (other, name)
