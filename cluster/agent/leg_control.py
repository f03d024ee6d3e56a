"""What happens to each attempt's leg: reserved, computed, pushed, taken over, finished, failed, cancelled, released.

The one place where legs, scheduler, pushes and token records change together; what of it is about pushes is in
HandOvers (of attempts) and PrefixFetches (of what is cached). A leg goes only when nothing is held of it: neither by
the scheduler (or its running step) nor by a push, here or, as far as a write of ours may still land, at the receiver.
"""

from __future__ import annotations

from cluster.agent.disk_waits import DiskWaits
from cluster.agent.hand_overs import HandOverError, HandOvers
from cluster.agent.leg_output import LegOutput
from cluster.agent.legs import Leg, LegKind, LegTable, Phase, push_key_of
from cluster.agent.limits import WorkerStateConfig
from cluster.agent.outbox import Outbox
from cluster.agent.peer_links import PeerLinks
from cluster.agent.prefix_fetches import PrefixFetches
from cluster.agent.pushes import Pushes
from cluster.agent.step_limits import StepLimits
from cluster.agent.stepper import Stepper
from cluster.agent.translation import matchable_hashes, peer_of, sequence_spec
from cluster.agent.trials import Trials
from cluster.core.commands import Prefill, Reserve, RunLocal
from cluster.core.ids import AttemptId, Blame, Outcome, WorkerId
from cluster.core.messages import (
    Finished,
    LegFailed,
    LegReleased,
    LegSurvived,
    PeerFenced,
    ReserveRefused,
    WorkerMessage,
)
from engine.core.block_pool import BlockPool
from engine.core.errors import SchedulerFullError
from engine.core.outcome import EmittedToken, PrefillProgress, StepOutcome
from engine.core.request import RequestBody
from engine.core.sequence import SequenceMode
from engine.core.step import SequenceKey, StepPlan
from kv_transfer.protocol.lease import Recent
from kv_transfer.protocol.messages import PushArrived
from kv_transfer.transport.base import PeerId

RAN_ALREADY = "an attempt of that number has run here"
"""Numbers do not come twice; should one do, the tokens of the two must not be mixed."""


class LegControl:
    """See the module docstring. Messages for the coordinator are collected until `take_messages`."""

    def __init__(
        self,
        config: WorkerStateConfig,
        *,
        pool: BlockPool,
        stepper: Stepper,
        pushes: Pushes,
        outbox: Outbox,
        legs: LegTable,
        links: PeerLinks,
        disk_waits: DiskWaits,
    ) -> None:
        self._config = config
        self._block_size = config.scheduler.block_size
        self._fingerprint = config.model_fingerprint
        self._pool = pool
        self._stepper = stepper
        self._pushes = pushes
        self._outbox = outbox
        self._output = LegOutput(outbox)
        self._legs = legs
        self._disk_waits = disk_waits
        self._hand_overs = HandOvers(
            config,
            pool=pool,
            pushes=pushes,
            legs=legs,
            scheduler=stepper.scheduler,
            output=self._output,
            links=links,
        )
        self.fetches = PrefixFetches(config, pool=pool, pushes=pushes, legs=legs, scheduler=stepper.scheduler)
        self._unstarted: dict[SequenceKey, Leg] = {}
        self._step_limits = StepLimits()
        self._trials = Trials(legs, config.limits.num_trial_steps)
        self._lost_peers: Recent[PeerId | None, None] = Recent(config.push_limits.max_fenced_lives)
        self._messages: list[WorkerMessage] = []

    def take_messages(self) -> list[WorkerMessage]:
        messages, self._messages = self._messages, []
        return messages

    # ---- commands --------------------------------------------------------------------------------------------

    def reserve(self, now_ns: int, command: Reserve, body: RequestBody) -> None:
        """Decode: holds what is needed of the pool until the KV has come, or refuses and holds nothing."""
        if self._legs.get(command.attempt) is not None:
            return
        if command.num_prefix_blocks:
            self._reserve_prefix(now_ns, command, body)
            return
        refusal = self._refusal(command.attempt)
        if refusal is not None:
            _, reason = refusal
            self._messages.append(ReserveRefused(attempt=command.attempt, reason=reason))
            return
        self._messages += self._hand_overs.reserve(now_ns, command, body)
        if command.is_trial and self._legs.get(command.attempt) is not None:
            self._trials.begin(command.attempt)

    def _reserve_prefix(self, now_ns: int, command: Reserve, body: RequestBody) -> None:
        if self._legs.is_forbidden(command.attempt) or len(self._legs) >= self._config.limits.max_legs:
            reason = "cancelled before it came, or too many attempts are here"
            self._messages.append(ReserveRefused(attempt=command.attempt, reason=reason))
        else:
            self._messages.append(self.fetches.reserve(now_ns, command, body))

    def prefill(self, now_ns: int, command: Prefill, body: RequestBody) -> None:
        """Prefill: starts the push (and with it the renewal of its lease) and queues the prompt."""
        if not self._may_start(command.attempt):
            return
        if command.num_prefix_blocks:
            refusal = self.fetches.send(now_ns, command, body)
            if refusal is not None:
                self.refuse(command.attempt, Outcome.TRANSFER_FAILED, refusal)
            return
        leg = self._add_leg(now_ns, command.attempt, LegKind.PREFILL, Phase.RUNNING, body)
        try:
            self._hand_overs.open(now_ns, leg, command)
        except HandOverError as error:
            self.fail(now_ns, leg, Outcome.INTERNAL, str(error), retryable=True)
            return
        self._start(now_ns, leg, SequenceMode.PREFILL_ONLY)

    def run_local(self, now_ns: int, command: RunLocal, body: RequestBody) -> None:
        """Prompt and answer are computed here, without a push."""
        if self._may_start(command.attempt):
            leg = self._add_leg(now_ns, command.attempt, LegKind.LOCAL, Phase.RUNNING, body)
            if command.step_limit_ms > 0:
                self._step_limits.add(leg.lead_key, command.step_limit_ms)
            if command.is_trial:
                self._trials.begin(leg.attempt)
            self._start(now_ns, leg, SequenceMode.LOCAL)

    def refuse(self, attempt: AttemptId, outcome: Outcome, reason: str) -> None:
        """The attempt cannot start here: it has failed, and nothing of it is held that has to be waited for."""
        self._messages.append(LegFailed(attempt=attempt, outcome=outcome, reason=reason, retryable=True))
        self._messages.append(LegReleased(attempt=attempt))

    def cancel(self, now_ns: int, attempt: AttemptId, reason: str) -> None:
        """Stops the leg in whatever phase it is; LegReleased follows once nothing is held, for an unknown one now."""
        leg = self._legs.get(attempt)
        if leg is not None:
            self._abandon(now_ns, leg, reason)
            self._pushes.cancel(now_ns, leg.push_key, reason)  # that of a leg that is closing already may go on
            return
        self._legs.forbid(attempt)
        self._outbox.drop(attempt)
        self._pushes.cancel(now_ns, push_key_of(attempt), reason)
        self._messages.append(LegReleased(attempt=attempt))

    def stop_choice(self, now_ns: int, attempt: AttemptId, choice: int) -> None:
        """The front has found the end of that answer in its text: nothing more of it is computed."""
        leg = self._legs.get(attempt)
        if leg is None or leg.kind is LegKind.PREFILL or choice not in leg.running:
            return
        if leg.phase is Phase.RESERVED:
            leg.unwanted[choice] = None
        elif leg.phase is Phase.RUNNING and leg.first_token_ns is not None:  # before that there is no text
            self._stop_sequence(now_ns, leg, choice)
            if not leg.running:
                self._finish(now_ns, leg)

    def peer_lost(self, now_ns: int, worker: WorkerId) -> None:
        """Gives that life of a peer up; PeerFenced follows, at once if it is fenced already."""
        if self._pushes.peer_lost(now_ns, peer_of(worker)):
            self._messages.append(PeerFenced(peer=worker))
        self._lost_peers.add(peer_of(worker), None)
        for leg in self._legs.leaving():
            if leg.peer == peer_of(worker):
                leg.is_unsettled = False

    def fenced(self, now_ns: int, peer: PeerId) -> None:
        self._pushes.fenced(now_ns, peer)
        self._messages.append(PeerFenced(peer=WorkerId(peer.name, peer.incarnation)))

    # ---- steps -----------------------------------------------------------------------------------------------

    def step_limit_ms(self) -> float | None:
        """How long the next step may take if it writes answers; None for no limit."""
        return self._step_limits.tightest_ms

    def step_started(self, now_ns: int, plan: StepPlan) -> tuple[int, ...]:
        """Returns the numbers of layers after which `layers_written` is wanted."""
        if self._unstarted:
            for sequence in plan.sequences:
                leg = self._unstarted.pop(sequence.key, None)
                if leg is not None:
                    leg.started_ns = now_ns
        return self._hand_overs.step_started(plan)

    def layers_written(self, now_ns: int, num_layers: int) -> None:
        """By the running step."""
        self._hand_overs.layers_written(now_ns, num_layers)

    def step_done(self, now_ns: int, outcome: StepOutcome) -> None:
        for key in outcome.preempted:
            leg = self._legs.of_sequence(key)
            if leg is not None:
                leg.num_preemptions += 1
        for progress in outcome.progress:
            self._on_progress(now_ns, self._leg_of(progress.key), progress)
        for part in outcome.scored:
            self._output.scored(self._leg_of(part.key), part)
        first_tokens: dict[AttemptId, list[EmittedToken]] = {}
        for emitted in outcome.emitted:
            leg = self._leg_of(emitted.key)
            if leg.first_token_ns is None:
                self._step_limits.remove(leg.lead_key)
            self._output.emitted(now_ns, leg, emitted)
            if leg.kind is LegKind.PREFILL:
                first_tokens.setdefault(leg.attempt, []).append(emitted)
            elif not leg.running:
                self._finish(now_ns, leg)
        for tokens in first_tokens.values():
            self._messages.append(self._hand_overs.finish(now_ns, self._leg_of(tokens[0].key), tokens))
        for failed in outcome.failed:
            self._fail_in_engine(now_ns, self._leg_of(failed.key), failed.reason, Blame.OWN)
        survived = self._trials.step_done(emitted.key for emitted in outcome.emitted)
        self._messages += [LegSurvived(attempt=attempt) for attempt in survived]

    def step_failed(self, now_ns: int, keys: list[SequenceKey], reason: str) -> None:
        for key in keys:
            self._fail_in_engine(now_ns, self._leg_of(key), f"the engine failed: {reason}", Blame.SHARED)

    # ---- settling --------------------------------------------------------------------------------------------

    def settle(self, now_ns: int) -> None:
        """Acts on what has become of pushes and fronts, then releases the legs of which nothing is held."""
        self._settle_pushes(now_ns)
        for attempt in self._outbox.stalled():
            leg = self._legs.get(attempt)
            if leg is not None:
                self.fail(now_ns, leg, Outcome.CANCELLED, "the front does not read its tokens", retryable=False)
        for late in self.fetches.settle(now_ns):
            self.fail(now_ns, late, Outcome.TRANSFER_FAILED, "the prefix did not come in time", retryable=True)
        self._settle_pushes(now_ns)
        for leg in self._legs.leaving():
            if not (leg.is_unsettled or self._holds_sequences(leg) or self._pushes.holds(leg.push_key)):
                self._legs.remove(leg)
                self._messages.append(LegReleased(attempt=leg.attempt))

    def _settle_pushes(self, now_ns: int) -> None:
        while (notices := self._pushes.take_notices()) is not None:
            for key in notices.unsettled:
                leg = self._legs.of_push(key)
                assert leg is not None
                leg.is_unsettled = leg.peer not in self._lost_peers
            for failed in notices.failed:
                leg = self._legs.of_push(failed.key)
                if leg is not None:
                    self.fail(now_ns, leg, Outcome.TRANSFER_FAILED, failed.reason, retryable=True)
            for arrived in notices.arrived:
                self._on_arrived(now_ns, arrived)

    def fail(
        self,
        now_ns: int,
        leg: Leg,
        outcome: Outcome,
        reason: str,
        *,
        retryable: bool,
        blame: Blame = Blame.NOBODY,
    ) -> None:
        if leg.phase is Phase.CLOSING:
            return
        self._abandon(now_ns, leg, reason)
        self._messages.append(
            LegFailed(attempt=leg.attempt, outcome=outcome, reason=reason, retryable=retryable, blame=blame)
        )

    # ---- inside ----------------------------------------------------------------------------------------------

    def _fail_in_engine(self, now_ns: int, leg: Leg, reason: str, blame: Blame) -> None:
        self.fail(now_ns, leg, Outcome.INTERNAL, reason, retryable=True, blame=blame)

    def _add_leg(self, now_ns: int, attempt: AttemptId, kind: LegKind, phase: Phase, body: RequestBody) -> Leg:
        leg = Leg(attempt=attempt, kind=kind, phase=phase, body=body, created_ns=now_ns)
        self._legs.add(leg)
        self._output.open(leg)
        return leg

    def _start(self, now_ns: int, leg: Leg, mode: SequenceMode) -> None:
        try:
            self._stepper.scheduler.add(sequence_spec(leg, mode, self._fingerprint))
        except ValueError as error:
            self.fail(now_ns, leg, Outcome.REJECTED_INVALID, str(error), retryable=False)
        except SchedulerFullError as error:
            self.fail(now_ns, leg, Outcome.REJECTED_OVERLOAD, str(error), retryable=True)
        else:
            self._unstarted[leg.lead_key] = leg
            if not leg.scores_prompt and (self.fetches.is_expecting or self._config.num_disk_blocks):
                hashes = matchable_hashes(leg.body, self._block_size, self._fingerprint)
                if not self.fetches.added(now_ns, leg.lead_key, hashes):
                    self._disk_waits.added(now_ns, leg.lead_key, hashes)

    def _may_start(self, attempt: AttemptId) -> bool:
        if self._legs.get(attempt) is not None:
            return False
        refusal = self._refusal(attempt)
        if refusal is not None:
            self.refuse(attempt, *refusal)
        return refusal is None

    def _refusal(self, attempt: AttemptId) -> tuple[Outcome, str] | None:
        """Why an attempt that is new here may not start; None if it may."""
        if self._legs.is_forbidden(attempt):
            return Outcome.CANCELLED, "cancelled before it came"
        if self._outbox.has(attempt):
            return Outcome.INTERNAL, RAN_ALREADY
        if len(self._legs) >= self._config.limits.max_legs:
            return Outcome.REJECTED_OVERLOAD, f"{len(self._legs)} attempts are here, which is the limit"
        return None

    def _holds_sequences(self, leg: Leg) -> bool:
        return any(self._stepper.holds(key) for key in leg.sequence_keys)

    def _leg_of(self, key: SequenceKey) -> Leg:
        leg = self._legs.of_sequence(key)
        assert leg is not None, f"the scheduler runs {key}, which nobody asked for"
        return leg

    def _on_progress(self, now_ns: int, leg: Leg, progress: PrefillProgress) -> None:
        if leg.kind is LegKind.DECODE or progress.key != leg.lead_key:
            return
        if leg.num_preemptions == 0:
            leg.num_cached_tokens = progress.num_cached_tokens
        if leg.kind is LegKind.PREFILL:
            self._hand_overs.progress(now_ns, leg, progress)

    def _on_arrived(self, now_ns: int, arrived: PushArrived) -> None:
        """Decode: takes the KV over, or fails closed."""
        leg = self._legs.of_push(arrived.key)
        assert leg is not None and leg.phase is Phase.RESERVED, f"a push arrived for {arrived.key}, which does not wait"
        if leg.kind is LegKind.PREFIX_SINK:
            self._messages += self.fetches.arrived(now_ns, leg, arrived)
            return
        try:
            committed = self._hand_overs.take_over(now_ns, leg, arrived)
        except HandOverError as error:
            self.fail(now_ns, leg, Outcome.INTERNAL, str(error), retryable=False)
            return
        if committed is None:
            return
        self._messages.append(committed)
        for choice in leg.unwanted:
            if choice in leg.running:
                self._stop_sequence(now_ns, leg, choice)
        if not leg.running:
            self._finish(now_ns, leg)

    def _stop_sequence(self, now_ns: int, leg: Leg, choice: int) -> None:
        self._stepper.abort(leg.key_of(choice))
        num_tokens = self._outbox.end_position(leg.attempt, choice)
        self._output.end(now_ns, leg, choice, Outcome.STOP, num_tokens=num_tokens)

    def _finish(self, now_ns: int, leg: Leg) -> None:
        """All answers have ended."""
        assert leg.outcome is not None
        self._messages.append(
            Finished(
                attempt=leg.attempt,
                outcome=leg.outcome,
                num_output_tokens=leg.num_output_tokens,
                timeline=leg.timeline(now_ns),
            )
        )
        self._legs.remove(leg)

    def _abandon(self, now_ns: int, leg: Leg, reason: str) -> None:
        """Nothing of the leg is wanted any more: it closes, and what it holds goes as soon as it may."""
        if leg.phase is Phase.CLOSING:
            return
        self._unstarted.pop(leg.lead_key, None)
        self._step_limits.remove(leg.lead_key)
        self._hand_overs.abandon(leg)
        pinned, leg.pinned_blocks = leg.pinned_blocks, []
        self._legs.leave(leg, Phase.CLOSING)
        self._output.drop(leg)
        for key in leg.sequence_keys:
            self._stepper.abort(key)
        self._pool.release(pinned)
        if leg.kind is not LegKind.LOCAL:
            self._pushes.cancel(now_ns, leg.push_key, reason)

    def check_invariants(self) -> None:
        self._hand_overs.check_invariants()
        for key in self._step_limits.limited():
            limited = self._legs.of_sequence(key)
            assert limited is not None and limited.phase is Phase.RUNNING and limited.first_token_ns is None
        self._trials.check_invariants()
        self.fetches.check_invariants()
        for key, leg in self._unstarted.items():
            assert leg.lead_key == key and self._legs.get(leg.attempt) is leg and leg.phase is Phase.RUNNING
        for leg in self._legs:
            holds = self._holds_sequences(leg), self._pushes.holds(leg.push_key)
            expected = {Phase.RESERVED: (False, True), Phase.PUSHING: (False, True)}.get(leg.phase)
            assert expected in (None, holds), f"{leg.attempt} is {leg.phase.value}, held by {holds}"
            if leg.phase is Phase.RUNNING:
                running = [choice for choice in leg.running if self._stepper.scheduler.has(leg.key_of(choice))]
                # Until the leading sequence's input is computed, the others are known to it alone.
                is_whole = running == list(leg.running) or running == [leg.body.choice]
                assert running and is_whole, f"{leg.attempt} runs {running} of {list(leg.running)}"
            if leg.phase is Phase.CLOSING:
                assert leg.is_unsettled or any(holds), f"{leg.attempt} holds nothing and was not released"
        for push_key in self._pushes.open_keys():
            assert self._legs.of_push(push_key) is not None, f"a push of {push_key} without a leg"
