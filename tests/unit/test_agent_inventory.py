"""What a worker tells a coordinator that has just started of fetches."""

from __future__ import annotations

import pytest

from cluster.agent.inventory import inventory_of
from cluster.agent.legs import Leg, LegKind, LegTable, Phase
from cluster.agent.limits import AgentLimits
from cluster.agent.outbox import Outbox
from cluster.core.ids import AttemptId, LegStage, Role, WorkerId
from cluster.core.reports import HeldLeg
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from kv_transfer.transport.base import PeerId

ATTEMPT = AttemptId("r", 5)


@pytest.mark.bad_day(7)
@pytest.mark.parametrize("is_unsettled", [True, False])
def test_a_fetch_is_told_of_only_where_a_write_of_it_may_still_land(is_unsettled: bool) -> None:
    """It has no lease any more, and waits to hear of its receiver's end: from whom, if the coordinator knew nothing?"""
    body = RequestBody(prompt_ids=(1, 2, 3), sampling=SamplingParams())
    leg = Leg(attempt=ATTEMPT, kind=LegKind.PREFIX_SOURCE, phase=Phase.CLOSING, body=body, created_ns=0)
    leg.peer, leg.is_unsettled = PeerId("p9", 1), is_unsettled
    legs = LegTable(8)
    legs.add(leg)
    told = inventory_of(legs, Outbox(AgentLimits()), (), Role.DECODE)
    held = HeldLeg(attempt=ATTEMPT, half=Role.PREFILL, stage=LegStage.CLOSING, peer=WorkerId("p9", 1))
    assert told == ((held,) if is_unsettled else ())
