"""Drains a worker: nothing new is placed on it, what it has ends or goes on elsewhere, and then it is told to leave.

Prompts that it reads, and pushes to and from it, end by themselves. So do running answers, unless the order says to
migrate them, or its deadline nears: then each gets another attempt, of which the drained worker, which has the answer's
KV, is the prefill worker. It computes at most the last block again and pushes the rest, by the ordinary protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cluster.core.attempts import Attempt, Leg
from cluster.core.drain_orders import AfterDrain, DrainOrder, DrainRefusal, Leave, StartDrain
from cluster.core.drains import Drain
from cluster.core.handlers.ending import current_attempt, is_needed, move_on, withdraw_attempt
from cluster.core.handlers.placing import has_room_elsewhere
from cluster.core.ids import Role, WorkerId
from cluster.core.limits import LEAVE_TIMEOUT_NS, MAX_HAND_OVERS, NEXT_LIFE_NS, NS_PER_MS
from cluster.core.parts import Parts
from cluster.core.requests import Phase, Request
from cluster.core.timers import TimerKey, TimerKind
from cluster.core.workers import Worker

_RUNNING = (Phase.DECODING, Phase.LOCAL)
_LEAVING_FOR = (Phase.WAITING_FRONT, Phase.QUEUED, Phase.RESERVING, Phase.PREFILLING)
"""Phases of a request whose KV is to come from a drained worker, until it has been taken over."""
_WITHOUT = {
    Role.DECODE: "no answer can be written until another one is there",
    Role.PREFILL: "decode workers have to read prompts themselves, which holds up running answers",
}

# ---- orders ---------------------------------------------------------------------------------------------------


def why_refused(parts: Parts, order: DrainOrder, *, force: bool) -> DrainRefusal | None:
    """None if the order is taken: it is new, or says again what is going on."""
    going_on = parts.drains.named(order.worker)
    if going_on is not None:
        if going_on.order.then is order.then and order.pool in ("", going_on.order.pool):
            return None
        return DrainRefusal(reason=f"{order.worker} is being drained already, to {_purpose(going_on.order)}")
    worker = parts.workers.named(order.worker)
    if worker is None:
        return _unknown(parts, order.worker)
    if order.then is AfterDrain.FLIP:
        refusal = _why_not_to_pool(parts, worker, order.pool)
        if refusal is not None:
            return refusal
    is_last = not any(other is not worker for other in parts.workers.with_role(worker.role))
    if is_last and not force:
        role = worker.role.value
        return DrainRefusal(
            reason=f"{order.worker} is the last {role} worker: without it {_WITHOUT[worker.role]}; "
            "use --force to drain it all the same"
        )
    return None


def on_drain_asked(parts: Parts, now_ns: int, order: DrainOrder, *, force: bool) -> None:
    """Begins, or brings a drain that goes on up to what is ordered now. What would be refused does nothing."""
    if why_refused(parts, order, force=force) is not None:
        return
    drain = parts.drains.named(order.worker)
    if drain is None:
        worker = parts.workers.named(order.worker)
        assert worker is not None, "it would have been refused"
        _open(parts, now_ns, worker, replace(order, pool=_next_pool(parts, worker, order)))
        return
    if drain.is_told_to_leave:
        return
    deadline_ms = drain.order.deadline_ms if order.deadline_ms is None else order.deadline_ms
    if order.deadline_ms is None and drain.deadline_ns is not None:
        deadline_ms = max(0, drain.deadline_ns - now_ns) // NS_PER_MS
    drain.order = replace(drain.order, migrate=drain.order.migrate or order.migrate, deadline_ms=deadline_ms)
    drain.schedule(now_ns)
    if drain.life is not None:
        parts.outbox.to_worker(drain.life, StartDrain(order=drain.order))
        _watch(parts, now_ns, drain)


def _unknown(parts: Parts, name: str) -> DrainRefusal:
    what = "has been drained and is gone" if name in parts.drains.gone() else "is not registered"
    names = ", ".join(worker.id.name for worker in parts.workers.all()) or "none"
    return DrainRefusal(reason=f"worker {name!r} {what}; there is: {names}", is_unknown=True)


def _why_not_to_pool(parts: Parts, worker: Worker, pool_name: str) -> DrainRefusal | None:
    pools = [pool.name for pool in parts.config.pools if pool.role is not worker.role]
    listed = ", ".join(pools)
    if not pools:
        other = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
        return DrainRefusal(reason=f"the cluster file has no {other.value} pool that {worker.id.name} could join")
    if pool_name and pool_name not in pools:
        reason = f"{worker.id.name} cannot join pool {pool_name!r}; pools of the other role: {listed}"
        return DrainRefusal(reason=reason, is_unknown=True)
    if not pool_name and len(pools) > 1:
        return DrainRefusal(reason=f"there are several pools that {worker.id.name} could join; name one of: {listed}")
    if worker.pool.device != "cpu":
        return DrainRefusal(
            reason=f"{worker.id.name} computes on {worker.pool.device}, which takes whole requests only"
        )
    return None


def _next_pool(parts: Parts, worker: Worker, order: DrainOrder) -> str:
    match order.then:
        case AfterDrain.STOP:
            return ""
        case AfterDrain.RESTART:
            return worker.pool.name
        case AfterDrain.FLIP:
            return order.pool or next(pool.name for pool in parts.config.pools if pool.role is not worker.role)


def _purpose(order: DrainOrder) -> str:
    match order.then:
        case AfterDrain.STOP:
            return "end"
        case AfterDrain.RESTART:
            return "be started again"
        case AfterDrain.FLIP:
            return f"join pool {order.pool}"


# ---- workers come and go --------------------------------------------------------------------------------------


def on_registered(parts: Parts, now_ns: int, worker: Worker, told: DrainOrder | None) -> None:
    """A life has registered. `told`: the order that an earlier life of the coordinator has given it."""
    name = worker.id.name
    parts.drains.returned(name)
    drain = parts.drains.named(name)
    if drain is None:
        if told is not None:
            _open(parts, now_ns, worker, told)
        return
    assert drain.life is None, "the life before it is lost"
    if drain.order.then is AfterDrain.FLIP and drain.order.pool == worker.pool.name:
        _close(parts, drain)
        return
    drain.life = worker.id
    _begin(parts, now_ns, drain, worker)


def on_left(parts: Parts, worker: WorkerId) -> None:
    """It says that it leaves."""
    drain = parts.drains.of(worker)
    if drain is not None and drain.is_told_to_leave:
        drain.has_left = True


def on_lost(parts: Parts, now_ns: int, worker: WorkerId) -> DrainOrder | None:
    """That life is lost, or has left. Returns the order by which it ends for good or goes to another pool, if any.

    Where it has not said that it leaves, whoever runs it may start it as if it had crashed: its next life is drained
    as well, if it comes within a named time.
    """
    drain = parts.drains.of(worker)
    if drain is None:
        return None
    order = drain.order
    if drain.has_left or order.then is AfterDrain.RESTART:
        _close(parts, drain)
    else:
        drain.life = None
        drain.handing_over.clear()
        drain.is_told_to_leave = False
        parts.timers.set(_timer(drain), now_ns + NEXT_LIFE_NS)
    return None if order.then is AfterDrain.RESTART else order


def is_word_awaited(parts: Parts, name: str) -> bool:
    """Whether the drain's next time is one by which its worker, or that one's next life, is to say something."""
    drain = parts.drains.named(name)
    assert drain is not None, "the end of a drain clears its timer"
    return drain.life is None or drain.is_told_to_leave


def on_due(parts: Parts, now_ns: int, name: str) -> WorkerId | None:
    """A time of the drain has come. Returns the life that was told to leave and is still there, if that is it."""
    drain = parts.drains.named(name)
    assert drain is not None, "the end of a drain clears its timer"
    if drain.life is None:
        _close(parts, drain)
    elif drain.is_told_to_leave:
        return drain.life
    else:
        _watch(parts, now_ns, drain)
    return None


def _open(parts: Parts, now_ns: int, worker: Worker, order: DrainOrder) -> None:
    drain = Drain(order=order, life=worker.id)
    parts.drains.open(drain)
    drain.schedule(now_ns)
    _begin(parts, now_ns, drain, worker)


def _begin(parts: Parts, now_ns: int, drain: Drain, worker: Worker) -> None:
    """Nothing new from here on; what has only been reserved is placed elsewhere, of which no front learns."""
    parts.workers.retire(worker)
    parts.outbox.to_worker(worker.id, StartDrain(order=drain.order))
    for attempt, request, _ in _current(parts, worker):
        if request.phase is Phase.RESERVING:
            withdraw_attempt(parts, now_ns, request, attempt, f"{worker.id} is being drained")
    _watch(parts, now_ns, drain)


def _close(parts: Parts, drain: Drain) -> None:
    parts.timers.set(_timer(drain), None)
    parts.drains.close(drain.order.worker)


def _watch(parts: Parts, now_ns: int, drain: Drain) -> None:
    parts.timers.set(_timer(drain), drain.next_ns(now_ns))


def _timer(drain: Drain) -> TimerKey:
    return TimerKey(TimerKind.DRAIN, drain.order.worker)


# ---- the course of a drain ------------------------------------------------------------------------------------


def settle(parts: Parts, now_ns: int) -> None:
    """After every event: hands over what is to go on elsewhere, and sends away who has nothing left."""
    for drain in parts.drains.all():
        worker = None if drain.life is None else parts.workers.get(drain.life)
        if worker is None or drain.is_told_to_leave:
            continue
        if drain.is_due(now_ns):
            _move_all(parts, now_ns, worker)
        elif drain.is_migrating(now_ns):
            _hand_over(parts, now_ns, drain, worker)
        if _is_empty(parts, now_ns, drain, worker):
            drain.handing_over.clear()
            drain.is_told_to_leave = True
            parts.outbox.to_worker(worker.id, Leave(then=drain.order.then, pool=drain.order.pool))
            parts.timers.set(_timer(drain), now_ns + LEAVE_TIMEOUT_NS)


def _move_all(parts: Parts, now_ns: int, worker: Worker) -> None:
    """The deadline has passed: whatever still needs the worker goes on elsewhere, and is computed again there."""
    for attempt, request, leg in tuple(_current(parts, worker)):
        if not is_needed(request, attempt, leg):
            continue
        if request.phase is Phase.RESERVING:
            withdraw_attempt(parts, now_ns, request, attempt, f"{worker.id} was to be drained by now")
        else:
            move_on(parts, now_ns, request, attempt, f"{worker.id} was to be drained by now")


def _hand_over(parts: Parts, now_ns: int, drain: Drain, worker: Worker) -> None:
    """Running answers, a few at a time, as long as there is room for them elsewhere."""
    _forget_taken_over(parts, drain, worker)
    for attempt, request, leg in tuple(_current(parts, worker)):
        if len(drain.handing_over) >= MAX_HAND_OVERS:
            return
        if leg.half is not Role.DECODE or request.phase not in _RUNNING:
            continue
        if not has_room_elsewhere(parts, now_ns, request):
            return
        move_on(parts, now_ns, request, attempt, f"{worker.id} is being drained", source=worker.id)
        drain.handing_over[request.request_id] = None


def _forget_taken_over(parts: Parts, drain: Drain, worker: Worker) -> None:
    for request_id in tuple(drain.handing_over):
        request = parts.requests.get(request_id)
        if request is None or request.source != worker.id or request.phase not in _LEAVING_FOR:
            del drain.handing_over[request_id]


def _is_empty(parts: Parts, now_ns: int, drain: Drain, worker: Worker) -> bool:
    """Whether nobody needs the worker any more, and nothing is held there or because of it."""
    if worker.num_legs:
        return False
    if drain.is_due(now_ns):
        return True
    _forget_taken_over(parts, drain, worker)
    if drain.handing_over or any(is_needed(request, attempt, leg) for attempt, request, leg in _current(parts, worker)):
        return False
    blocks = worker.load.blocks
    return not (parts.leases.num_of(worker.id) or blocks.reserved or blocks.quarantined)


def _current(parts: Parts, worker: Worker) -> Iterator[tuple[Attempt, Request, Leg]]:
    """Attempts with a leg there that their requests count on. Nothing may change while it is iterated."""
    for attempt_id, leg in worker.legs.items():
        request = parts.requests.get(attempt_id.request_id)
        attempt = None if request is None else current_attempt(parts, request)
        if request is not None and attempt is not None and attempt.attempt_id == attempt_id:
            yield attempt, request, leg


# ---- what operators are shown ---------------------------------------------------------------------------------


def waits_for(parts: Parts, drain: Drain) -> str:
    """In words."""
    worker = None if drain.life is None else parts.workers.get(drain.life)
    if worker is None:
        return "its next life, as it was lost before it had left"
    if drain.is_told_to_leave:
        return "its process to end"
    current = list(_current(parts, worker))
    num_prompts = sum(request.phase is Phase.PREFILLING for _, request, _ in current)
    num_unread = sum(leg.is_released and is_needed(request, attempt, leg) for attempt, request, leg in current)
    num_running = sum(
        leg.half is Role.DECODE and request.phase in _RUNNING and not leg.is_released for _, request, leg in current
    )
    counts = {
        "answer": num_running,
        "prompt or push": num_prompts,
        "end that its front has not confirmed": num_unread,
        "hand-over": len(drain.handing_over),
        "part of work to be released": worker.num_legs - num_running - num_prompts,
        "lease": parts.leases.num_of(worker.id),
        "block that a late write may reach": worker.load.blocks.quarantined,
    }
    parts_of_text = [f"{count} {_plural(name, count)}" for name, count in counts.items() if count > 0]
    return ", ".join(parts_of_text) or "its next heartbeat"


def _plural(name: str, count: int) -> str:
    """Of the first noun."""
    if count == 1:
        return name
    if name == "prompt or push":
        return "prompts or pushes"
    noun, space, rest = name.partition(" ")
    return f"{noun}s{space}{rest}"
