"""Two WorkerStates under random work and faults: right tokens or none, and nothing left."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.agent import events as ev
from cluster.core.ids import AttemptId, Outcome
from cluster.core.token_messages import PROMPT_CHOICE
from engine.core.request import RequestBody, Sibling
from engine.core.sampling import SamplingParams
from tests.support.toy_engine import Undisturbed, scores_of, undisturbed
from tests.support.worker_pair import FRONT, MILLISECOND_NS, Host, Request, World, answer_name, delivered_of

MAX_REQUESTS = 12
picks = st.integers(0, 10**6)

# Prompts share beginnings, so that both prefix caches have work to do.
bodies = st.builds(
    lambda family, num_shared, tail, max_tokens, stop, num_delivered, seed, siblings, scored: _body(
        (family,) * num_shared + tuple(tail), max_tokens, stop, num_delivered, seed, siblings, scored
    ),
    st.integers(0, 1),
    st.integers(0, 30),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from([(), (5, 7, 11)]),
    st.integers(0, 3),
    st.integers(0, 3),
    # Of each other answer: how many of the leading one's delivered tokens it has, and which follow these.
    st.lists(st.tuples(st.sampled_from([9, 9, 1]), st.lists(st.integers(20, 24), max_size=5)), max_size=3),
    st.sampled_from([None, None, 0]),
)


def _body(
    prompt: tuple[int, ...],
    max_tokens: int,
    stop: tuple[int, ...],
    num_delivered: int,
    seed: int,
    siblings: list[tuple[int, list[int]]],
    scored: int | None,
) -> RequestBody:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, seed=seed, prompt_logprobs=scored)
    whole = undisturbed(list(prompt), sampling, choice=seed).token_ids
    # At least one token is left to draw.
    delivered = tuple(whole[: len(whole) - 1][:num_delivered])
    return RequestBody(
        prompt_ids=prompt,
        sampling=sampling,
        choice=seed,
        delivered_ids=delivered,
        siblings=tuple(
            Sibling(choice=number, delivered_ids=(*delivered[:num_shared], *tail)[: max_tokens - 1])
            for number, (num_shared, tail) in enumerate(siblings, start=seed + 1)
        ),
    )


def _undisturbed(request: Request, choice: int) -> Undisturbed:
    body = request.body
    delivered = list(delivered_of(body)[choice])
    return undisturbed(list(body.prompt_ids), body.sampling, forced_ids=delivered, choice=choice)


class WorkerPairMachine(RuleBasedStateMachine):
    """Rules are single events at either worker; what the toy coordinator answers follows at once."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(num_blocks=26)
        self.requests: list[Request] = []
        self.stopped: set[tuple[AttemptId, int]] = set()

    # ---- work ----

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(body=bodies, local=st.sampled_from([False, False, True]))
    def submit(self, body: RequestBody, local: bool) -> None:
        request = self.world.submit(f"r{len(self.requests)}", body, local=local)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        self.world.cancel(self.requests[pick % len(self.requests)])

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def watch_again(self, pick: int) -> None:
        request = self.requests[pick % len(self.requests)]
        for host in self.world.hosts():
            host.handle(ev.FrontDisconnected(front=FRONT))
            host.unwritten_batches = 0
            host.handle(ev.FrontConnected(front=FRONT))
            for other in self.requests:
                for choice, delivered_ids in delivered_of(other.body).items():
                    num_known = len(self.world.front.token_ids(other.attempt.request_id, choice))
                    position = len(delivered_ids) + (num_known if other is request else 0)
                    self.world.watch(host, other, choice, position)
                self.world.watch(host, other, PROMPT_CHOICE, 1)
        self._react()

    @precondition(lambda self: self.requests)
    @rule(pick=picks, pick_choice=picks)
    def stop_choice(self, pick: int, pick_choice: int) -> None:
        """The front stops an answer of which it has been told something by this attempt."""
        request = self.requests[pick % len(self.requests)]
        choices = request.body.choices
        choice = choices[pick_choice % len(choices)]
        if len(choices) > 1 and self.world.front.token_ids(request.attempt.request_id, choice):
            self.stopped.add((request.attempt, choice))
            self.world.stop_choice(request, choice)
            self._react()

    # ---- the engine ----

    @rule(on_decode=st.booleans())
    def end_step(self, on_decode: bool) -> None:
        host = self._host(on_decode)
        if host.plan is not None:
            host.end_step()
            self._react()

    @precondition(lambda self: self.world.prefill.layer_marks)
    @rule()
    def write_layers(self) -> None:
        self.world.prefill.write_layers()
        self._react()

    @rule(on_decode=st.booleans(), odds=st.integers(0, 9))
    def fail_step(self, on_decode: bool, odds: int) -> None:
        host = self._host(on_decode)
        # Several in a row end a worker, which has a test of its own.
        if host.plan is not None and odds == 0 and host.state._stepper.num_failed_in_a_row == 0:
            host.fail_step()
            self._react()

    # ---- the link ----

    @rule(on_decode=st.booleans(), pick=picks, fate=st.sampled_from(["arrives", "arrives", "arrives", "twice", "lost"]))
    def message(self, on_decode: bool, pick: int, fate: str) -> None:
        host = self._host(on_decode)
        if not host.inbox:
            return
        index = pick % len(host.inbox)
        if fate == "lost":
            del host.inbox[index]
        else:
            host.receive(index, keeps=fate == "twice")
        self._react()

    @precondition(lambda self: self.world.prefill.writes)
    @rule(pick=picks, fate=st.sampled_from(["lands", "lands", "lands", "corrupt", "unannounced", "broken", "unknown"]))
    def write(self, pick: int, fate: str) -> None:
        host = self.world.prefill
        index = pick % len(host.writes)
        if fate in ("broken", "unknown"):
            host.break_write(index, quiesced=fate == "broken")
        else:
            host.land_write(index, is_corrupt=fate == "corrupt", loses_notification=fate == "unannounced")
        self._react()

    @precondition(lambda self: self.world.prefill.connecting)
    @rule(odds=st.integers(0, 5))
    def connect(self, odds: int) -> None:
        self.world.prefill.connect(fails=odds == 0)
        self._react()

    @precondition(lambda self: self.world.decode.verifications)
    @rule(pick=picks)
    def verify(self, pick: int) -> None:
        self.world.decode.verify(pick % len(self.world.decode.verifications))
        self._react()

    # ---- time and lives ----

    @rule(on_decode=st.booleans(), num_events=st.integers(1, 12))
    def go_on(self, on_decode: bool, num_events: int) -> None:
        """A stretch without faults, so that requests come far."""
        for _ in range(num_events):
            self._host(on_decode).advance_once()
            self._react()

    @rule(milliseconds=st.sampled_from([1, 1, 1, 50, 100, 600, 3_000, 11_000]))
    def pass_time(self, milliseconds: int) -> None:
        self.world.advance(milliseconds * MILLISECOND_NS)

    @precondition(lambda self: self.requests)
    @rule(odds=st.integers(0, 9))
    def kill_prefill(self, odds: int) -> None:
        if odds == 0:
            self.world.lose_prefill()
            self._react()

    # ---- what must hold ----

    @invariant()
    def answers_are_right_so_far(self) -> None:
        for request in self.requests:
            request_id, prompt = request.attempt.request_id, list(request.body.prompt_ids)
            for choice in request.body.choices:
                tokens = self.world.front.tokens.get(answer_name(request_id, choice), {})
                whole = _undisturbed(request, choice).token_ids
                for position, token_id in tokens.items():
                    assert token_id == whole[position], f"{request.attempt}: position {position} of {choice}"
            for position, (token_id, logprob) in self.world.front.scores.get(request_id, {}).items():
                assert (token_id, logprob) == (prompt[position], scores_of(prompt)[position - 1])

    def teardown(self) -> None:
        """Without further faults everything ends within the protocol's own limits, and nothing is left."""
        for _ in range(80):
            self.world.settle()
            self.world.advance(1_000 * MILLISECOND_NS)
        for request in self.requests:
            assert request.is_over or _ended_on_prefill(request), f"{request.attempt} never ended"
            assert request.legs == {}, f"{request.attempt} was not released"
            if request.finished is not None and not request.is_cancelled:
                self._check_whole(request)
            self.world.forget(request)
        self.world.check_nothing_left()

    def _check_whole(self, request: Request) -> None:
        front, request_id = self.world.front, request.attempt.request_id
        for choice, delivered_ids in delivered_of(request.body).items():
            if (request.attempt, choice) in self.stopped:
                continue
            whole = _undisturbed(request, choice)
            assert front.token_ids(request_id, choice) == whole.token_ids[len(delivered_ids) :]
            assert front.finishes[answer_name(request_id, choice)] is Outcome(whole.finish_reason)
        assert len(front.scores.get(request_id, {})) == request.body.num_scores

    def _host(self, on_decode: bool) -> Host:
        return self.world.decode if on_decode else self.world.prefill

    def _react(self) -> None:
        self.world.run_later()


def _ended_on_prefill(request: Request) -> bool:
    return request.prefill_done is not None and request.prefill_done.outcome is not None


TestWorkerPair = WorkerPairMachine.TestCase
TestWorkerPair.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
