"""Drives one FrontRequest by hand."""

from __future__ import annotations

from cluster.core.ids import AttemptId, Outcome, WorkerId
from cluster.core.messages import AttemptFailed, LegTimeline, Placed, WorkerRef
from cluster.core.token_messages import TokenInfo, TokenRun, Watch
from cluster.front import request_events as events
from cluster.front.request import FrontRequest
from cluster.front.request_effects import Deliver, Effect, End, ToCoordinator
from cluster.front.request_spec import RequestLimits, RequestSpec
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams

MS = 1_000_000
P = WorkerRef(worker=WorkerId("p", 1), token_address="p:1")
D = WorkerRef(worker=WorkerId("d", 1), token_address="d:1")
BODY = RequestBody(prompt_ids=tuple(range(40)), sampling=SamplingParams(max_tokens=8), priority=3, cache_salt="s")
HASHES = b"h" * 16


class Driver:
    """Feeds one FrontRequest and checks it after every step."""

    def __init__(
        self,
        *,
        deadline_ns: int | None = None,
        max_latency_ms: int | None = None,
        has_stop_strings: bool = False,
        body: RequestBody = BODY,
    ) -> None:
        spec = RequestSpec(
            request_id="r",
            body=body,
            block_hashes=HASHES,
            tenant="t",
            deadline_ns=deadline_ns,
            max_latency_ms=max_latency_ms,
            has_stop_strings=has_stop_strings,
        )
        limits = RequestLimits(stream_lost_ns=50 * MS, coordinator_lost_ns=100 * MS)
        self.request = FrontRequest(spec, limits)
        self.now_ns = 0

    def handle(self, event: events.Event, at_ms: float | None = None) -> list[Effect]:
        if at_ms is not None:
            self.now_ns = int(at_ms * MS)
        effects = self.request.handle(self.now_ns, event)
        self.request.check_invariants()
        return effects

    def start(self) -> list[Effect]:
        return self.handle(events.Start())

    def place(self, attempt: int = 1, *, prefill: WorkerRef | None = P, epoch: int = 1) -> list[Effect]:
        placed = Placed(
            epoch=epoch,
            attempt=AttemptId("r", attempt),
            prefill=prefill,
            decode=D,
            queued_ms=1.0,
            reserved_ms=2.0,
        )
        return self.handle(events.FromCoordinator(message=placed))

    def fail(self, attempt: int, *, epoch: int = 1) -> list[Effect]:
        failed = AttemptFailed(epoch=epoch, attempt=AttemptId("r", attempt), reason="lost")
        return self.handle(events.FromCoordinator(message=failed))

    def run(
        self,
        ref: WorkerRef,
        position: int,
        *ids: int,
        attempt: int = 1,
        choice: int = 0,
        finish: Outcome | None = None,
        leg_done: bool = False,
        timeline: LegTimeline | None = None,
        at_ms: float | None = None,
    ) -> list[Effect]:
        run = TokenRun(
            attempt=AttemptId("r", attempt),
            choice=choice,
            position=position,
            tokens=tuple(TokenInfo(token_id=token_id) for token_id in ids),
            finish=finish,
            leg_done=leg_done,
            timeline=timeline,
        )
        return self.handle(events.RunReceived(worker=ref.worker, run=run), at_ms)


def delivered(effects: list[Effect]) -> list[tuple[int, tuple[int, ...]]]:
    """Position and ids, of whichever answers."""
    return [
        (effect.position, tuple(token.token_id for token in effect.tokens))
        for effect in effects
        if isinstance(effect, Deliver)
    ]


def sent(effects: list[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, ToCoordinator)]


def end(effects: list[Effect]) -> End:
    assert isinstance(effects[-1], End)
    return effects[-1]


def watch(position: int, attempt: int = 1, choice: int = 0) -> Watch:
    return Watch(attempt=AttemptId("r", attempt), choice=choice, next_position=position)
