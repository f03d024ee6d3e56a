"""Workers come, are heard of, and are lost."""

from __future__ import annotations

from cluster.core.attempts import LegState
from cluster.core.commands import CancelLeg, PeerLost, SendBlockSnapshot, WorkerRefused, WorkerWelcome
from cluster.core.handlers import draining, rebuilding
from cluster.core.handlers.ending import attempt_timer, fail_attempt, is_needed, retire_if_over, withdraw_attempt
from cluster.core.handlers.fetching import abandon
from cluster.core.handlers.suspecting import condemn, culprit_of_loss, poison_reason
from cluster.core.ids import AttemptId, Outcome, WorkerId
from cluster.core.limits import (
    HEARTBEATS_PER_TIMEOUT,
    MAX_HEARTBEAT_MS,
    MAX_LATE_TICK_NS,
    MAX_STEP_FACTOR,
    MAX_STEP_NS,
    MS_PER_S,
    NS_PER_MS,
    RELEASE_TIMEOUT_NS,
    UNKNOWN_ATTEMPT,
)
from cluster.core.messages import BlockEvents, Heartbeat, PeerFenced, WorkerHello
from cluster.core.parts import Parts
from cluster.core.reports import LinkReport
from cluster.core.requests import Failure, Phase
from cluster.core.timers import TimerKey, TimerKind
from cluster.core.workers import Worker


def on_worker_hello(parts: Parts, now_ns: int, sender: WorkerId, message: WorkerHello) -> None:
    """Registers the worker, or refuses it for good. A later life of a name ends the one before it."""
    assert message.ref.worker == sender, "the driver names the worker by its hello"
    reason = parts.workers.refusal(message)
    if reason is not None:
        parts.outbox.to_worker(sender, WorkerRefused(reason=reason))
        return
    present = parts.workers.named(sender.name)
    if present is not None and present.id != sender:
        lose_worker(parts, now_ns, present.id, f"{sender} has taken its place")
        present = None
    if message.epoch:
        parts.outbox.raise_epoch(message.epoch + 1)  # never this life's: a worker registers with it once
        rebuilding.on_earlier_life(parts, now_ns)
    worker = None
    if present is None:
        worker = parts.workers.add(message, now_ns)
        parts.prefixes.join(sender, message.role)
        parts.timers.set(_silence_timer(sender), now_ns + parts.heartbeat_timeout_ns)
    heartbeat_ms = parts.heartbeat_timeout_ns // NS_PER_MS // HEARTBEATS_PER_TIMEOUT
    parts.outbox.to_worker(sender, WorkerWelcome(heartbeat_ms=max(1, min(heartbeat_ms, MAX_HEARTBEAT_MS))))
    if worker is not None:
        draining.on_registered(parts, now_ns, worker, message.drain)
    for peer in message.fenced:
        lose_worker(parts, now_ns, peer, f"{sender} has fenced it")
    rebuilding.on_inventory(parts, now_ns, sender, message.inventory)


def on_heartbeat(parts: Parts, now_ns: int, sender: Worker, message: Heartbeat) -> None:
    """Takes the worker's numbers. Whatever it keeps for an attempt that is not known here is to be released, unless
    somebody may still claim it. A worker whose engine does not come back from a step is given up."""
    sender.hear(now_ns, message.load)
    if message.load.step_age_ms > _max_step_ms(sender):
        reason = f"a step of its engine has been running for {message.load.step_age_ms / MS_PER_S:.0f} s"
        lose_worker(parts, now_ns, sender.id, reason)
        return
    parts.leases.report(sender.id, message.leases)
    _hear_of_links(parts, sender, message.links)
    if message.is_leaving:
        parts.workers.retire(sender)
    for info in message.leases:
        if info.attempt in sender.legs:
            continue
        if not parts.rebuild.is_open:
            parts.outbox.to_worker(sender.id, CancelLeg(attempt=info.attempt, reason=UNKNOWN_ATTEMPT))
        if parts.workers.is_lost(info.peer):
            parts.outbox.to_worker(sender.id, PeerLost(peer=info.peer))


def on_block_events(parts: Parts, sender: Worker, message: BlockEvents) -> None:
    """Follows what prompts can hit at that worker. Where something was missed, it tells everything again."""
    if parts.prefixes.hear(sender.id, message):
        parts.outbox.to_worker(sender.id, SendBlockSnapshot())


def on_peer_fenced(parts: Parts, now_ns: int, sender: WorkerId, message: PeerFenced) -> None:
    """The sender has cut that life of the peer off, told to or because a lease expired: it is given up everywhere, and
    refused if it has yet to register with this life of the coordinator."""
    parts.leases.close_reserved_from(sender, message.peer)
    lose_worker(parts, now_ns, message.peer, f"{sender} has fenced it")


def on_silence(parts: Parts, now_ns: int, worker_id: WorkerId) -> None:
    """The worker's timer: set again for as long as it has been heard since, otherwise the worker is lost."""
    worker = parts.workers.get(worker_id)
    assert worker is not None, "a worker's loss clears its timer"
    deadline_ns = worker.last_heard_ns + parts.heartbeat_timeout_ns
    if now_ns - deadline_ns > MAX_LATE_TICK_NS:
        # The coordinator itself was away (stopped, or its host slept): what was said meanwhile is still to be read.
        deadline_ns = now_ns + parts.heartbeat_timeout_ns
        worker.last_heard_ns = now_ns
    if deadline_ns > now_ns:
        parts.timers.set(_silence_timer(worker_id), deadline_ns)
        return
    silent_s = parts.config.coordinator.heartbeat_timeout_s
    lose_worker(parts, now_ns, worker_id, f"nothing was heard of it for {silent_s:g} s", may_be_away=True)


def on_unreleased(parts: Parts, now_ns: int, attempt_id: AttemptId) -> None:
    """A cancelled leg is overdue: its worker is given up. Prefill first, since decode may be waiting for it."""
    attempt = parts.attempts.get(attempt_id)
    assert attempt is not None, "a retired attempt clears its timer"
    for leg in attempt.legs:
        if leg.state is LegState.CLOSING:
            # Set before the loss, which may retire the attempt and clear it.
            parts.timers.set(attempt_timer(attempt), now_ns + RELEASE_TIMEOUT_NS)
            reason = f"it did not release {attempt.attempt_id}"
            lose_worker(parts, now_ns, leg.worker, reason, may_be_away=True)
            return


def lose_worker(parts: Parts, now_ns: int, worker_id: WorkerId, reason: str, *, may_be_away: bool = False) -> None:
    """That life is lost for good: whoever shared a lease with it is told, and what needed it fails. It may be that what
    was computed there was its end, unless it `may_be_away` for another reason."""
    worker = parts.workers.lose(worker_id)
    if worker is None:
        return
    parts.timers.set(_silence_timer(worker_id), None)
    order = draining.on_lost(parts, now_ns, worker_id)
    if order is None:
        parts.outbox.give_up(worker_id, reason)
    else:
        parts.outbox.retire(worker_id, order, reason)
    parts.leases.forget_holder(worker_id)
    parts.links.forget(worker_id)
    parts.rebuild.forget_worker(worker_id)
    parts.prefixes.leave(worker_id)
    for partner in parts.leases.holders_paired_with(worker_id):
        parts.outbox.to_worker(partner, PeerLost(peer=worker_id))
    culprit = culprit_of_loss(parts, worker, may_be_away=may_be_away)
    for leg in worker.legs.values():
        if not leg.is_released:
            leg.state = LegState.LOST
    failure = Failure(Outcome.WORKER_LOST, f"{worker_id} is lost: {reason}")
    for attempt_id, leg in worker.legs.items():
        attempt = parts.attempts.get(attempt_id)
        assert attempt is not None, "a retired attempt has no legs"
        request = parts.requests.get(attempt_id.request_id) if attempt.is_current else None
        if attempt.num_fetched_blocks:
            abandon(parts, now_ns, attempt, failure.reason)
        elif request is None or not is_needed(request, attempt, leg):
            retire_if_over(parts, attempt)
        elif request is culprit:
            pass  # below: it may be at another attempt already
        elif request.phase is Phase.RESERVING:
            withdraw_attempt(parts, now_ns, request, attempt, failure.reason)
        else:
            fail_attempt(parts, now_ns, request, attempt, failure)
    if culprit is not None:
        condemn(parts, now_ns, culprit, poison_reason(culprit, failure.reason))


def _hear_of_links(parts: Parts, sender: Worker, reports: tuple[LinkReport, ...]) -> None:
    """Keeps what the worker says of links to workers that are registered, and warns of those that are slow."""
    links = []
    for report in reports:
        peer = parts.workers.get(report.peer)
        if peer is not None:
            links.append((peer.pool.name, report))
    for link in parts.links.report(sender.id, sender.pool.name, links):
        parts.outbox.warn_of(link)


def _max_step_ms(worker: Worker) -> float:
    """Longer than this no step takes that will ever end, on a machine that is as busy as may be."""
    return max(MAX_STEP_NS / NS_PER_MS, MAX_STEP_FACTOR * worker.pool.max_step_tokens * worker.load.step_ms_per_token)


def _silence_timer(worker_id: WorkerId) -> TimerKey:
    return TimerKey(TimerKind.WORKER, worker_id.name, worker_id.incarnation)
