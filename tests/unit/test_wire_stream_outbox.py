"""The box between a state machine and a stream: in order, bounded, and never waiting."""

from __future__ import annotations

import asyncio

from cluster.wire.stream_outbox import MAX_WAITING_MESSAGES, StreamOutbox


def _drained(outbox: StreamOutbox[int]) -> list[int]:
    async def drain() -> list[int]:
        return [message async for message in outbox.messages()]

    return asyncio.run(drain())


def test_messages_leave_in_order_and_closing_comes_after_them() -> None:
    outbox = StreamOutbox[int]()
    for number in range(3):
        outbox.send(number)
    outbox.close()
    outbox.send(99)
    assert _drained(outbox) == [0, 1, 2]
    assert not outbox.has_overflowed


def test_a_full_box_gives_its_stream_up_once() -> None:
    cancelled: list[bool] = []
    outbox = StreamOutbox[int]()
    outbox.cancel = lambda: cancelled.append(True)
    for number in range(MAX_WAITING_MESSAGES):
        outbox.send(number)
    assert not cancelled and not outbox.has_overflowed and not outbox.is_closed
    outbox.send(-1)
    outbox.send(-2)
    assert cancelled == [True] and outbox.has_overflowed and outbox.is_closed
    assert _drained(outbox) == list(range(MAX_WAITING_MESSAGES))
