"""The journal's records: what is written is what is read, and nothing else is."""

from __future__ import annotations

import pickle
import zlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core import effects, events
from cluster.core.config import ClusterConfig, ModelConfig, PoolConfig
from cluster.core.ids import FrontId, Role, WorkerId
from cluster.core.messages import FrontHello, FrontMessage, WorkerMessage
from cluster.core.state import ClusterState
from cluster.wire.journal import (
    Header,
    JournalError,
    decode_entry,
    decode_header,
    decode_snapshot,
    encode_effects,
    encode_entry,
    encode_header,
    encode_snapshot,
)
from tests.support.messages import strategy_of

FRONT = FrontId("f", 1)
WORKER = WorkerId("w", 2)


def make_state() -> ClusterState:
    pool = PoolConfig(name="d", role=Role.DECODE)
    return ClusterState(ClusterConfig(name="c", model=ModelConfig(preset="p"), pools=(pool,)), epoch=7)


def all_events() -> st.SearchStrategy[Any]:
    from_fronts = strategy_of(*get_args(FrontMessage)).map(lambda m: events.FromFront(front=FRONT, message=m))
    from_workers = strategy_of(*get_args(WorkerMessage)).map(lambda m: events.FromWorker(worker=WORKER, message=m))
    return st.one_of(
        from_fronts, from_workers, strategy_of(events.FrontGone, events.WorkerGone, events.DrainAsked, events.Tick)
    )


@settings(max_examples=300, deadline=None)
@given(all_events(), st.integers(0, 2**62))
def test_entries_are_read_as_they_were_written(event: events.Event, now_ns: int) -> None:
    done = [effects.DropBody(request_id="r"), effects.GiveUpWorker(worker=WORKER, reason='a "reason"\n')]
    entry = decode_entry(encode_entry(now_ns, event, done))
    assert (entry.now_ns, entry.event, entry.effects) == (now_ns, event, encode_effects(done))


def test_effects_of_different_kinds_never_look_alike() -> None:
    """Else a replay could be called the same where it is not."""
    same_fields = {"request_id": "r"}
    drop = encode_effects([effects.DropBody(**same_fields)])
    assert b"DropBody" in drop
    front = events.FrontGone(front=FRONT)
    assert b"FrontGone" in encode_entry(0, front, ())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[1]",
        b'[1,["Tick","",{}]]',
        b'["1",["Tick","",{}],[]]',
        b'[1,["Boom","",{}],[]]',
        b'[1,["FromFront","Boom",{"front":["f",1],"message":{}}],[]]',
        b'[1,["FromFront","FrontHello",{"front":["f"],"message":{"front":1}}],[]]',
        b'[1,["FromFront","FrontHello",{}],[]]',
    ],
)
def test_what_is_no_entry_is_refused(text: bytes) -> None:
    """The cases are JSON, to be read; an entry has the same shape in MessagePack."""
    with pytest.raises(JournalError):
        decode_entry(text)
    if text:
        with pytest.raises(JournalError):
            decode_entry(msgspec.msgpack.encode(msgspec.json.decode(text)))


def test_header_and_snapshot_come_back() -> None:
    state = make_state()
    state.handle(5, events.FromFront(front=FRONT, message=FrontHello(front=FRONT, address="a:1")))
    header = Header(release="1", epoch=7, number=0, wall_ns=3, now_ns=5, snapshot=encode_snapshot(state))
    assert decode_header(encode_header(header)) == header
    copy = decode_snapshot(header.snapshot)
    copy.check_invariants()
    assert copy.status(6) == state.status(6) and copy.status(6).fronts == (FRONT,)


def test_a_header_of_another_format_is_refused() -> None:
    header = Header(release="1", epoch=7, number=0, wall_ns=3, now_ns=5, snapshot=b"", format=1)
    with pytest.raises(JournalError, match="format 1, expected 2"):
        decode_header(encode_header(header))
    with pytest.raises(JournalError, match="not the first record"):
        decode_header(msgspec.msgpack.encode({"release": 1}))


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


@pytest.mark.parametrize("content", [Intruder(), FRONT, {"a": 1}, WORKER], ids=lambda content: type(content).__name__)
def test_a_snapshot_makes_nothing_but_a_state(content: Any, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = zlib.compress(pickle.dumps(content))
    with pytest.raises(JournalError, match=r"snapshot (is of|cannot be read)"):
        decode_snapshot(snapshot)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("snapshot", [b"", b"!", zlib.compress(b"x")])
def test_a_broken_snapshot_is_refused(snapshot: bytes) -> None:
    with pytest.raises(JournalError):
        decode_snapshot(snapshot)
