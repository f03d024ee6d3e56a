"""What a worker tells a coordinator when it registers: every leg it has, and every answer it keeps for a front.

A coordinator that has just started learns from it what runs, so that it need not be stopped.
"""

from __future__ import annotations

from typing import Final

from cluster.agent.legs import Leg, LegKind, LegTable, Phase
from cluster.agent.outbox import Outbox
from cluster.core.ids import LegStage, Role, WorkerId
from cluster.core.reports import HeldLeg, LeaseInfo

_STAGES: Final = {
    Phase.RESERVED: LegStage.RESERVED,
    Phase.PUSHING: LegStage.PUSHING,
    Phase.CLOSING: LegStage.CLOSING,
}


def inventory_of(legs: LegTable, outbox: Outbox, leases: tuple[LeaseInfo, ...], role: Role) -> tuple[HeldLeg, ...]:
    """At most as much as the worker's limits on legs and on finished records allow. `role` is the worker's. Of fetches
    only those of which a write may still land: they have no lease any more, and wait for the end of their receiver."""
    by_attempt = {lease.attempt: lease for lease in leases}
    finished = dict.fromkeys(outbox.finished())
    held = []
    for leg in legs:
        if leg.kind.is_fetch and not leg.is_unsettled:
            continue  # Nobody needs one; whoever does not know its lease has it cancelled.
        lease = by_attempt.get(leg.attempt)
        held.append(
            HeldLeg(
                attempt=leg.attempt,
                half=Role.PREFILL if leg.kind in (LegKind.PREFILL, LegKind.PREFIX_SOURCE) else Role.DECODE,
                stage=LegStage.FINISHED if leg.attempt in finished else _stage_of(leg),
                peer=None if leg.peer is None else WorkerId(leg.peer.name, leg.peer.incarnation),
                lease_id=0 if lease is None else lease.lease_id,
                num_blocks=0 if lease is None else lease.num_blocks,
            )
        )
    alone = [attempt for attempt in finished if legs.get(attempt) is None]
    return (*held, *(HeldLeg(attempt=attempt, half=role, stage=LegStage.FINISHED) for attempt in alone))


def _stage_of(leg: Leg) -> LegStage:
    if leg.phase is Phase.RUNNING:
        return LegStage.READING if leg.kind is LegKind.PREFILL else LegStage.RUNNING
    return _STAGES[leg.phase]
