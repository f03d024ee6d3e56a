"""What `kv_transfer.transport.base` promises, of every backend: the same tests for all.

Backends that cross processes are tested between processes, the loopback on its hub. A backend whose library is not
installed is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kv_transfer.checksum import checksum
from kv_transfer.transport.backends import PREFERENCE, why_unavailable
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from tests.support.transport_wires import (
    AUTO,
    BLOCK_BYTES,
    POOL_BYTES,
    TIMEOUT_S,
    Life,
    ProcessWire,
    Wire,
    connect,
    content,
    make_wire,
    payloads,
)

WIRES = ("loopback", AUTO, *PREFERENCE)
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)
MAX_ENDPOINT_BYTES = 4096
QUIET_S = 0.05
"""How long nothing must happen to be called quiet."""

Start = Callable[..., Life]


@pytest.fixture(scope="module", params=WIRES)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    backend = str(request.param)
    reason = why_unavailable(backend) if backend in PREFERENCE else None
    if reason is not None:
        pytest.skip(reason)
    wire = make_wire(backend)
    yield wire
    wire.close()


@pytest.fixture
def start(wire: Wire) -> Iterator[Start]:
    yield wire.start
    wire.end_test()


@pytest.fixture
def pair(start: Start) -> tuple[Life, Life]:
    """A writer whose pool is filled, connected to a target whose pool is empty."""
    target, writer = start(DECODE), start(PREFILL, seed=1)
    connect(writer, target)
    return writer, target


def next_life(peer: PeerId) -> PeerId:
    return PeerId(peer.name, peer.incarnation + 1)


def expect_marker(writer: Life, target: Life, marker: bytes = b"marker") -> None:
    """Everything that the writer posted before must have arrived when this returns."""
    writer.call("write", target.me, [], marker)
    while payloads(target, 1) != [marker]:
        continue


# ---- connecting -----------------------------------------------------------------------------------------------


def test_endpoint_is_small_and_stays_the_same(start: Start) -> None:
    life = start(DECODE)
    assert 0 < len(life.endpoint) <= MAX_ENDPOINT_BYTES
    assert life.call("endpoint") == life.endpoint


def test_both_sides_are_told_of_a_connection(start: Start) -> None:
    target, writer = start(DECODE), start(PREFILL)
    writer.call("connect", target.me, target.endpoint)
    assert writer.wait_for(Connected) == Connected(peer=DECODE)
    assert target.wait_for(Connected) == Connected(peer=PREFILL)


def test_connecting_twice_is_a_no_op(start: Start) -> None:
    target, writer = start(DECODE), start(PREFILL, seed=1)
    writer.call("connect", target.me, target.endpoint)
    writer.call("connect", target.me, target.endpoint)
    writer.wait_for(Connected)
    target.wait_for(Connected)
    writer.call("connect", target.me, target.endpoint)
    writer.call("write", DECODE, [Copy(0, 0, BLOCK_BYTES)], b"once")
    assert target.wait_for(Notified) == Notified(peer=PREFILL, payload=b"once")
    writer.wait_for(WriteCompleted)
    assert (writer.events, target.events) == ([], [])


def test_two_lives_may_connect_to_each_other_at_once(start: Start) -> None:
    one, other = start(DECODE, seed=1), start(PREFILL, seed=2)
    one.call("connect", other.me, other.endpoint)
    other.call("connect", one.me, one.endpoint)
    for writer, target, seed in ((one, other, 1), (other, one, 2)):
        for _ in range(2):  # as the one that dialled, and as the one that was dialled
            writer.wait_for(Connected)
            if _writes(writer, target):
                break
        assert target.wait_for(Notified) == Notified(peer=writer.me, payload=b"hello")
        assert target.read(BLOCK_BYTES, BLOCK_BYTES) == content(seed)[:BLOCK_BYTES]


def _writes(writer: Life, target: Life) -> bool:
    """Posts a write, if the writer's own connection is made already and not only the other's."""
    try:
        writer.call("write", target.me, [Copy(0, BLOCK_BYTES, BLOCK_BYTES)], b"hello")
    except UnknownPeerError:
        return False
    return True


@pytest.mark.parametrize("endpoint", [b"", b"nonsense", b"{}", b'{"transport":"none","version":1}', bytes(range(256))])
def test_garbage_endpoints_fail(start: Start, endpoint: bytes) -> None:
    writer = start(PREFILL)
    writer.call("connect", DECODE, endpoint)
    failed = writer.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and failed.peer == DECODE and failed.reason


@pytest.mark.parametrize("other", [PeerId("decode-0", 2), PeerId("decode-0", 4), PeerId("decode-1", 3)])
def test_another_life_than_the_endpoints_fails(start: Start, other: PeerId) -> None:
    target, writer = start(DECODE), start(PREFILL)
    writer.call("connect", other, target.endpoint)
    failed = writer.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and failed.peer == other and failed.reason
    with pytest.raises(UnknownPeerError):
        writer.call("write", other, [], b"")
    connect(writer, target)  # and does not stand in the way of the right one
    assert target.events == []


def test_an_endpoint_whose_life_has_ended_fails(start: Start) -> None:
    target, writer = start(DECODE), start(PREFILL)
    target.close()
    writer.call("connect", DECODE, target.endpoint)
    failed = writer.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and failed.peer == DECODE


# ---- writing --------------------------------------------------------------------------------------------------


def test_exactly_the_bytes_are_written_and_then_told_of(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    copies = [
        Copy(3 * BLOCK_BYTES, 7 * BLOCK_BYTES, BLOCK_BYTES),
        Copy(0, 2 * BLOCK_BYTES, BLOCK_BYTES),
        Copy(100, BLOCK_BYTES + 8, 1000),
        Copy(5, 13, 1),
        Copy(POOL_BYTES - 3, POOL_BYTES - 3, 3),
    ]
    source, expected = content(1), bytearray(POOL_BYTES)
    for copy in copies:
        piece = source[copy.source_bytes : copy.source_bytes + copy.size_bytes]
        expected[copy.target_bytes : copy.target_bytes + copy.size_bytes] = piece
    handle = writer.call("write", target.me, copies, b"chunk")
    assert target.wait_for(Notified) == Notified(peer=PREFILL, payload=b"chunk")
    assert target.read(0, POOL_BYTES) == bytes(expected)
    assert writer.wait_for(WriteCompleted, WriteFailed) == WriteCompleted(handle=handle)
    assert writer.read(0, POOL_BYTES) == source


def test_sums_are_appended_one_a_copy(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    # The first two are neighbours on both sides: a backend may move them as one, but sums each of them.
    copies = [Copy(0, 0, BLOCK_BYTES), Copy(BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES), Copy(9, 3 * BLOCK_BYTES, 1001)]
    writer.call("write", target.me, copies, b"sums", num_sums=len(copies))
    source = content(1)
    sums = [checksum(source[copy.source_bytes : copy.source_bytes + copy.size_bytes]) for copy in copies]
    expected = b"sums" + b"".join(value.to_bytes(8, "little") for value in sums)
    assert target.wait_for(Notified) == Notified(peer=PREFILL, payload=expected)
    assert target.read(3 * BLOCK_BYTES, 1001) == source[9:1010]


def test_only_so_many_copies_are_summed_as_are_asked_for(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    copies = [Copy(block * BLOCK_BYTES, (3 - block) * BLOCK_BYTES, BLOCK_BYTES) for block in range(3)]
    source = content(1)
    for num_sums in range(4):
        writer.call("write", target.me, copies, b"sums", num_sums=num_sums)
        sums = [checksum(source[copy.source_bytes :][:BLOCK_BYTES]) for copy in copies[:num_sums]]
        expected = b"sums" + b"".join(value.to_bytes(8, "little") for value in sums)
        assert target.wait_for(Notified) == Notified(peer=PREFILL, payload=expected)
        for copy in copies:
            assert target.read(copy.target_bytes, BLOCK_BYTES) == source[copy.source_bytes :][:BLOCK_BYTES]


def test_a_notification_may_come_alone_and_be_answered(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    handle = writer.call("write", target.me, [], b"")
    assert writer.wait_for(WriteCompleted, WriteFailed) == WriteCompleted(handle=handle)
    assert target.wait_for(Notified) == Notified(peer=PREFILL, payload=b"")
    handle = target.call("write", writer.me, [], b"committed")
    assert target.wait_for(WriteCompleted, WriteFailed) == WriteCompleted(handle=handle)
    assert writer.wait_for(Notified) == Notified(peer=DECODE, payload=b"committed")
    assert target.read(0, POOL_BYTES) == bytes(POOL_BYTES)


def test_a_notification_may_be_large(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    large = bytes(range(256)) * 64
    writer.call("write", target.me, [], large)
    writer.call("write", target.me, [Copy(0, 0, 8)], large)
    assert payloads(target, 2) == [large, large]


def test_notifications_arrive_in_order_each_after_its_bytes(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    source = content(1)
    for number in range(60):  # more than a kernel queues
        copies = [Copy(number % 16 * BLOCK_BYTES, number % 16 * BLOCK_BYTES, BLOCK_BYTES)] if number % 3 else []
        writer.call("write", target.me, copies, number.to_bytes(2, "little"))
    for number in range(60):
        assert payloads(target, 1) == [number.to_bytes(2, "little")]
        if number % 3:
            start_bytes = number % 16 * BLOCK_BYTES
            assert target.read(start_bytes, BLOCK_BYTES) == source[start_bytes : start_bytes + BLOCK_BYTES]


def test_handles_are_unique_and_each_ends_once(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    copies = [[Copy(0, 0, BLOCK_BYTES)] if number % 2 else [] for number in range(40)]
    handles = [writer.call("write", target.me, some, b"") for some in copies]
    assert len(set(handles)) == 40
    ended = [writer.wait_for(WriteCompleted, WriteFailed) for _ in handles]
    assert {event.handle for event in ended if isinstance(event, WriteCompleted)} == set(handles)
    expect_marker(writer, target)
    writer.wait_for(WriteCompleted)
    assert writer.events == []


def test_ranges_outside_of_a_pool_are_refused_before_anything_is_written(pair: tuple[Life, Life], wire: Wire) -> None:
    writer, target = pair
    end = wire.pool_bytes
    good = Copy(0, 0, BLOCK_BYTES)
    for bad in (Copy(end - 1, 0, 2), Copy(0, end - 1, 2), Copy(-1, 0, 1), Copy(0, -8, 8), Copy(end + 8, 0, 8)):
        with pytest.raises(ValueError, match="copies"):
            writer.call("write", target.me, [good, bad], b"refused")
    expect_marker(writer, target)
    assert target.read(0, POOL_BYTES) == bytes(POOL_BYTES)
    writer.wait_for(WriteCompleted)
    assert (writer.events, target.events) == ([], [])


def test_unknown_peers_are_refused(start: Start) -> None:
    target, writer = start(DECODE), start(PREFILL)
    with pytest.raises(UnknownPeerError):
        writer.call("write", target.me, [], b"")
    connect(writer, target)
    for stranger in (next_life(DECODE), PeerId("decode-1", 3)):
        for copies in ([], [Copy(0, 0, 8)]):
            with pytest.raises(UnknownPeerError):
                writer.call("write", stranger, copies, b"")
    writer.call("disconnect", target.me)
    with pytest.raises(UnknownPeerError):
        writer.call("write", target.me, [], b"")


def test_cancelled_writes_end_once_and_tell_of_nothing_that_is_not_there(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    handles = [writer.call("write", target.me, [Copy(0, 0, POOL_BYTES)], b"%d" % number) for number in range(20)]
    for handle in handles[1:]:
        writer.call("cancel", handle)
    ended = [writer.wait_for(WriteCompleted, WriteFailed) for _ in handles]
    completed = [event.handle for event in ended if isinstance(event, WriteCompleted)]
    failed = [event.handle for event in ended if isinstance(event, WriteFailed)]
    assert sorted(completed + failed) == sorted(handles) and handles[0] in completed
    writer.call("cancel", handles[0])  # has ended
    writer.call("cancel", max(handles) + 1)  # never was
    writer.call("write", target.me, [], b"last")
    arrived = payloads(target, len(completed) + 1)
    assert arrived == [b"%d" % handles.index(handle) for handle in sorted(completed)] + [b"last"]
    assert target.events == []


# ---- leaving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["writer", "target"])
def test_a_disconnected_peer_is_told(pair: tuple[Life, Life], who: str) -> None:
    one, other = pair if who == "writer" else (pair[1], pair[0])
    one.call("disconnect", other.me)
    gone = other.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and gone.peer == one.me and gone.reason
    for life, peer in ((one, other.me), (other, one.me)):
        with pytest.raises(UnknownPeerError):
            life.call("write", peer, [], b"")
    one.call("disconnect", other.me)  # again


@pytest.mark.parametrize("who", ["writer", "target"])
def test_a_peer_that_closes_is_gone(pair: tuple[Life, Life], who: str) -> None:
    one, other = pair if who == "writer" else (pair[1], pair[0])
    one.close()
    gone = other.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and gone.peer == one.me


def test_a_target_that_is_killed_is_gone(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    target.kill()
    gone = writer.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and gone.peer == DECODE
    with pytest.raises(UnknownPeerError):
        writer.call("write", DECODE, [], b"")


def test_a_connection_can_be_made_again(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    writer.call("disconnect", target.me)
    target.wait_for(PeerGone)
    connect(writer, target)
    writer.call("write", target.me, [Copy(0, 0, BLOCK_BYTES)], b"again")
    assert payloads(target, 1) == [b"again"]
    assert target.read(0, BLOCK_BYTES) == content(1)[:BLOCK_BYTES]


@pytest.mark.bad_day(5)
@pytest.mark.parametrize("ends", ["close", "kill"])
def test_a_writer_starts_again_under_its_name(start: Start, ends: str) -> None:
    target, old = start(DECODE), start(PREFILL, seed=1)
    connect(old, target)
    getattr(old, ends)()
    new = start(next_life(PREFILL), seed=2)
    connect(new, target)
    new.call("write", DECODE, [Copy(0, 0, BLOCK_BYTES)], b"new")
    assert target.wait_for(Notified) == Notified(peer=new.me, payload=b"new")
    assert target.read(0, BLOCK_BYTES) == content(2)[:BLOCK_BYTES]


@pytest.mark.bad_day(5)
def test_a_target_starts_again_under_its_name(start: Start) -> None:
    old, writer = start(DECODE), start(PREFILL, seed=1)
    connect(writer, old)
    old.close()
    writer.wait_for(PeerGone)
    new = start(next_life(DECODE))
    writer.call("connect", new.me, old.endpoint)  # what it still knows of the old life leads nowhere
    assert isinstance(writer.wait_for(ConnectFailed), ConnectFailed)
    connect(writer, new)
    writer.call("write", new.me, [Copy(0, 0, BLOCK_BYTES)], b"new")
    assert new.wait_for(Notified) == Notified(peer=PREFILL, payload=b"new")
    assert new.read(0, BLOCK_BYTES) == content(1)[:BLOCK_BYTES]


# ---- fences ---------------------------------------------------------------------------------------------------


def expect_nothing_lands(wire: Wire, target: Life) -> None:
    target.clear()
    wire.settle()
    assert target.read(0, POOL_BYTES) == bytes(POOL_BYTES)


def test_a_fence_ends_a_writer_in_full_flight(pair: tuple[Life, Life], wire: Wire) -> None:
    writer, target = pair
    writer.flood(target.me)
    target.wait_for(Notified)
    target.call("fence", PREFILL)
    assert target.wait_for(Fenced) == Fenced(peer=PREFILL)
    expect_nothing_lands(wire, target)
    with pytest.raises(UnknownPeerError):
        target.call("write", PREFILL, [], b"")


def test_a_fence_holds_against_a_stopped_writer_that_wakes(pair: tuple[Life, Life], wire: Wire) -> None:
    writer, target = pair
    writer.flood(target.me)
    target.wait_for(Notified)
    writer.stop()
    target.call("fence", PREFILL)
    assert target.wait_for(Fenced) == Fenced(peer=PREFILL)
    target.clear()
    writer.wake()
    expect_nothing_lands(wire, target)


def test_a_fence_of_a_killed_writer_completes(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    writer.kill()
    target.call("fence", PREFILL)
    assert target.wait_for(Fenced) == Fenced(peer=PREFILL)


def test_a_life_that_never_connected_is_fenced_once_and_refused(start: Start, wire: Wire) -> None:
    target = start(DECODE)
    target.call("fence", PREFILL)
    target.call("fence", PREFILL)
    assert target.wait_for(Fenced) == Fenced(peer=PREFILL)
    writer = start(PREFILL, seed=1)
    writer.call("connect", DECODE, target.endpoint)
    failed = writer.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and failed.peer == DECODE
    assert writer.read(0, 8) == content(1)[:8], "who was never let in is left alone"
    wire.settle()
    assert target.call("endpoint") == target.endpoint
    assert target.events == []


def test_a_fenced_life_is_refused_and_its_next_one_welcome(pair: tuple[Life, Life], start: Start) -> None:
    writer, target = pair
    target.call("fence", PREFILL)
    assert target.wait_for(Fenced) == Fenced(peer=PREFILL)
    new = start(next_life(PREFILL), seed=2)
    connect(new, target)
    new.call("write", DECODE, [Copy(0, 0, BLOCK_BYTES)], b"new")
    assert target.wait_for(Notified) == Notified(peer=new.me, payload=b"new")
    assert target.read(0, BLOCK_BYTES) == content(2)[:BLOCK_BYTES]
    fenced = start(PREFILL) if has_been_killed(writer) else writer
    fenced.events.clear()
    fenced.call("connect", DECODE, target.endpoint)
    failed = fenced.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and failed.peer == DECODE


def has_been_killed(life: Life) -> bool:
    """Some backends' fence is the writer's death."""
    try:
        life.call("endpoint")
    except (EOFError, OSError):
        return True
    return False


def test_a_fence_leaves_other_peers_alone(start: Start) -> None:
    target, good, bad = start(DECODE), start(PeerId("prefill-1", 1), seed=1), start(PREFILL, seed=2)
    connect(good, target)
    connect(bad, target)
    good.call("write", DECODE, [Copy(0, 0, BLOCK_BYTES)], b"before")
    target.call("fence", PREFILL)
    good.call("write", DECODE, [Copy(0, BLOCK_BYTES, BLOCK_BYTES)], b"during")
    assert target.wait_for(Fenced) == Fenced(peer=PREFILL)
    good.call("write", DECODE, [Copy(0, 2 * BLOCK_BYTES, BLOCK_BYTES)], b"after")
    assert payloads(target, 3) == [b"before", b"during", b"after"]
    assert target.read(0, 3 * BLOCK_BYTES) == content(1)[:BLOCK_BYTES] * 3
    target.call("write", good.me, [], b"well done")
    assert payloads(good, 1) == [b"well done"]


# ---- many, and the end ----------------------------------------------------------------------------------------


def test_several_peers_write_at_once(start: Start) -> None:
    targets = [start(PeerId("decode", number)) for number in range(2)]
    writers = [start(PeerId("prefill", number), seed=number + 1) for number in range(3)]
    for writer in writers:
        for target in targets:
            connect(writer, target)
    for number in range(4):
        for place, writer in enumerate(writers):
            start_bytes = (place * 4 + number) * BLOCK_BYTES
            for target in targets:
                writer.call("write", target.me, [Copy(start_bytes, start_bytes, BLOCK_BYTES)], b"%d" % number)
    for target in targets:
        arrived: dict[PeerId, list[bytes]] = {}
        for _ in range(12):
            notified = target.wait_for(Notified)
            assert isinstance(notified, Notified)
            arrived.setdefault(notified.peer, []).append(notified.payload)
        assert arrived == {writer.me: [b"0", b"1", b"2", b"3"] for writer in writers}
        for place in range(3):
            first, last = place * 4 * BLOCK_BYTES, (place + 1) * 4 * BLOCK_BYTES
            assert target.read(first, last - first) == content(place + 1)[first:last]
        assert target.read(12 * BLOCK_BYTES, 4 * BLOCK_BYTES) == bytes(4 * BLOCK_BYTES)


def test_fileno_is_readable_when_there_is_something_to_poll(pair: tuple[Life, Life]) -> None:
    writer, target = pair
    expect_marker(writer, target)
    target.hold()
    assert not become_quiet(target), "events where nothing was done"
    writer.call("write", target.me, [Copy(0, 0, BLOCK_BYTES)], b"news")
    assert poll_for(target, Notified) == [Notified(peer=PREFILL, payload=b"news")]
    assert not become_quiet(target)
    target.call("write", PREFILL, [], b"answer")
    assert [type(event) for event in poll_for(target, WriteCompleted)] == [WriteCompleted]
    target.call("fence", PeerId("nobody", 1))
    assert poll_for(target, Fenced) == [Fenced(peer=PeerId("nobody", 1))]
    assert not become_quiet(target)
    writer.call("disconnect", target.me)
    assert [type(event) for event in poll_for(target, PeerGone)] == [PeerGone]


def become_quiet(life: Life) -> list[object]:
    """Polls until `fileno` stays unreadable for QUIET_S; returns what has happened meanwhile."""
    found: list[object] = []
    for _ in range(100):
        if not life.is_readable(QUIET_S):
            return found
        found += life.call("poll")
    pytest.fail("fileno is readable all the time")


def poll_for(life: Life, kind: type[object]) -> list[object]:
    """Polls when `fileno` says so, until something of that kind has come; returns all that has."""
    found: list[object] = []
    while not any(isinstance(event, kind) for event in found):
        assert life.is_readable(TIMEOUT_S), f"fileno says nothing, and no {kind.__name__} came, only {found}"
        found += life.call("poll")
    return found


def test_closing_gives_descriptors_and_threads_back(wire: Wire, start: Start) -> None:
    if not isinstance(wire, ProcessWire):
        pytest.skip("all its lives share this process")
    target = start(DECODE)
    life = start(PREFILL, seed=1)
    before = (0, 0)
    for incarnation in range(6, 9):  # in the first round libraries take what they keep for good
        connect(life, target)
        life.call("write", DECODE, [Copy(0, 0, BLOCK_BYTES)], b"x")
        payloads(target, 1)
        life.call("fence", PeerId("somebody", incarnation))
        life.wait_for(Fenced)
        life.close()
        target.wait_for(PeerGone)
        after = life.call("resources")
        assert incarnation == 6 or after == before, "descriptors and threads, after and before"
        before = after
        life.events.clear()
        life.open(PeerId(PREFILL.name, incarnation), 1)
