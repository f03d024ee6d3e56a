"""The simulator's own machinery: time, processes, streams."""

from __future__ import annotations

import pytest

from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS, HangError, Kernel
from cluster.sim.network import MAX_CUT_DETECTION_NS, Network, StreamEnd
from cluster.sim.process import Alarm, Process
from cluster.sim.trace import Trace


def make_kernel(seed: int = 1, max_events: int = 10_000) -> Kernel:
    return Kernel(seed, max_events=max_events, trace=Trace())


def test_events_run_by_time_and_then_in_order_of_scheduling() -> None:
    kernel, seen = make_kernel(), []
    kernel.at(20, lambda: seen.append("late"))
    kernel.at(10, lambda: seen.append("first"))
    kernel.at(10, lambda: seen.append("second"))
    kernel.at(15, lambda: seen.append("cancelled")).cancel()
    kernel.run_until(100)
    assert seen == ["first", "second", "late"]
    assert kernel.now_ns == 100


def test_the_past_is_run_now() -> None:
    kernel, seen = make_kernel(), []
    kernel.run_until(50)
    kernel.at(10, lambda: seen.append(kernel.now_ns))
    kernel.run_until(60)
    assert seen == [50]


def test_a_history_without_rest_is_a_hang() -> None:
    kernel = make_kernel(max_events=100)

    def again() -> None:
        kernel.after(0, again)

    again()
    with pytest.raises(HangError):
        kernel.run_until(1)


def test_random_streams_are_seeded_and_independent() -> None:
    first, second = make_kernel(7), make_kernel(7)
    first.stream("a").random()
    assert first.stream("b").random() == second.stream("b").random()
    assert first.stream("b").random() != first.stream("a").random()
    assert make_kernel(8).stream("b").random() != second.stream("b").random()


def test_a_stopped_process_gets_everything_late_and_in_order() -> None:
    kernel, seen = make_kernel(), []
    process = Process(kernel, "p")
    process.after(10, lambda: seen.append(("a", kernel.now_ns)))
    process.after(20, lambda: seen.append(("b", kernel.now_ns)))
    process.pause()
    kernel.at(50, process.resume)
    kernel.run_until(100)
    assert seen == [("a", 50), ("b", 50)]


def test_a_killed_process_gets_nothing_also_if_it_was_stopped() -> None:
    kernel, seen, exits = make_kernel(), [], []
    process = Process(kernel, "p")
    process.on_exit(exits.append)
    process.after(10, lambda: seen.append("never"))
    process.pause()
    kernel.at(20, lambda: process.exit("killed"))
    kernel.at(30, process.resume)
    kernel.run_until(100)
    assert not seen
    assert exits == ["killed"]


def test_an_alarm_follows_its_deadline_and_the_clock() -> None:
    kernel, rings = make_kernel(), []
    process = Process(kernel, "p", clock_offset_ns=1000)
    alarm = Alarm(process, lambda: rings.append(kernel.now_ns))
    alarm.set(1050)
    alarm.set(1080)  # later: the timer stays and finds that it is early
    kernel.run_until(60)
    assert rings == []
    kernel.run_until(90)
    assert rings == [80]
    alarm.set(2000)
    kernel.at(100, lambda: process.jump_clock(5000))
    kernel.run_until(101)
    assert rings == [80, 100]
    alarm.set(None)
    kernel.run_until(SECOND_NS)
    assert rings == [80, 100]


class Pair:
    """A server and a client with a stream between them, and what each heard."""

    def __init__(self, seed: int = 1) -> None:
        self.kernel = make_kernel(seed)
        self.network = Network(self.kernel)
        self.server, self.client = Process(self.kernel, "server"), Process(self.kernel, "client")
        self.heard: list[object] = []
        self.near: StreamEnd | None = None
        self.far: StreamEnd | None = None
        self.failures: list[str] = []
        self.network.listen("address", self.server, self._accept)

    def dial(self) -> None:
        self.network.dial(self.client, "address", self._opened, self.failures.append)

    def _accept(self, end: StreamEnd) -> None:
        self.far = end
        end.on_message = self.heard.append
        end.on_closed = lambda reason: self.heard.append(f"closed: {reason}")

    def _opened(self, end: StreamEnd) -> None:
        self.near = end
        end.on_closed = lambda reason: self.failures.append(reason)

    def run(self, duration_ns: int = 20 * MILLISECOND_NS) -> None:
        self.kernel.run_until(self.kernel.now_ns + duration_ns)


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_keeps_order_and_ends_after_what_was_sent(seed: int) -> None:
    pair = Pair(seed)
    pair.dial()
    pair.run()
    assert pair.near is not None
    for number in range(10):
        pair.near.send(number)
    pair.near.close()
    pair.run()
    assert pair.heard == [*range(10), "closed: closed by peer"]


def test_a_stream_ends_with_its_process() -> None:
    pair = Pair()
    pair.dial()
    pair.run()
    pair.server.exit("crashed")
    pair.run()
    assert pair.failures == ["closed by peer"]
    pair.dial()
    pair.run()
    assert pair.failures == ["closed by peer", "connection refused"]


def test_a_cut_stream_loses_what_is_in_flight_and_each_side_finds_out() -> None:
    pair = Pair()
    pair.dial()
    pair.run()
    assert pair.near is not None and pair.far is not None
    pair.near.send("lost")
    pair.network.cut("server", "client")
    pair.near.send("lost as well")
    pair.run(MAX_CUT_DETECTION_NS)
    assert pair.heard == ["closed: keepalive failed"]
    assert pair.failures == ["keepalive failed"]
    pair.dial()
    pair.run()
    pair.near.send("again")
    pair.run()
    assert pair.heard[-1] == "again"


def test_a_partition_refuses_streams_until_it_heals() -> None:
    pair = Pair()
    pair.network.partition("client", "server")
    pair.dial()
    pair.run(SECOND_NS)
    assert pair.failures == ["timed out"]
    pair.network.heal("server", "client")
    pair.dial()
    pair.run()
    assert pair.near is not None


def test_a_stalled_stream_delivers_late_and_in_order() -> None:
    pair = Pair()
    pair.dial()
    pair.run()
    assert pair.near is not None
    pair.near.send(1)
    pair.network.stall("client", "server", SECOND_NS)
    pair.near.send(2)
    pair.near.send(3)
    pair.run()
    assert pair.heard == [1]
    pair.run(SECOND_NS)
    assert pair.heard == [1, 2, 3]


def test_a_message_is_taken_when_a_stopped_reader_continues() -> None:
    pair, taken = Pair(), []
    pair.dial()
    pair.run()
    assert pair.near is not None
    pair.server.pause()
    pair.near.send("hello", lambda: taken.append(pair.kernel.now_ns))
    pair.run(SECOND_NS)
    assert not taken and not pair.heard
    pair.server.resume()
    assert pair.heard == ["hello"] and len(taken) == 1
