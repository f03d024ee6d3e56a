"""What prefill draws and what decode draws agree, whatever the parameters: the real sampler in two toy workers.

The logits of a token are a function of the KV of all tokens before it, as read from the pool. A request is run with a
push and without one, in one attempt and after a failure, beside another request and alone; each time it must give the
tokens, ends and log-probabilities of a plain loop that knows no worker, block or step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.ids import Outcome
from cluster.core.token_messages import PROMPT_CHOICE, TokenInfo
from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.request import RequestBody, Sibling
from engine.core.sampling import SamplingParams
from engine.core.step import SampledToken, ScoredToken, SequenceStep
from engine.model.sampler import Sampler, score
from tests.support.engine_model import make_step
from tests.support.toy_engine import ToyRunner, folds_of
from tests.support.worker_pair import BLOCK_SIZE, NUM_LAYERS, World, answer_name, delivered_of

VOCABULARY_SIZE = 40
EOS = (3, 8)
SAMPLER = Sampler(EOS, TorchReferenceBackend().argmax)

ids = st.integers(0, VOCABULARY_SIZE - 1)
parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.5, 0.5]),
        "max_tokens": st.integers(1, 10),
        "min_tokens": st.integers(0, 10),
        "stop_token_ids": st.lists(ids, max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 0, 2]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, 2.0, 5.0]), max_size=3).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        "seed": st.integers(0, 2**64 - 1),
    }
)
prompts = st.lists(st.integers(0, 5), min_size=1, max_size=20)


def logits_after(folds: list[int]) -> torch.Tensor:
    rows = [np.random.default_rng(fold & (2**63 - 1)).normal(0, 2, VOCABULARY_SIZE) for fold in folds]
    return torch.from_numpy(np.array(rows, dtype=np.float32))


class SamplingRunner(ToyRunner):
    """Computes logits from the KV in the pool, and samples from them as a worker does."""

    def _sample(self, fold: int, step: SequenceStep) -> tuple[SampledToken, ...]:
        return SAMPLER.sample(logits_after([fold]), [step])[0]

    def _score(self, folds: list[int], step: SequenceStep) -> list[ScoredToken]:
        assert step.sampling.prompt_logprobs is not None
        return score(logits_after(folds), step.scored_ids, step.sampling.prompt_logprobs)


def alone(body: RequestBody, choice: int, delivered: tuple[int, ...]) -> tuple[list[TokenInfo], Outcome]:
    """The answer's tokens after those delivered, and how it ends: one token after the other, and no cluster."""
    params, output, tokens = body.sampling, list(delivered), []
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    while True:
        logits = logits_after(folds_of([*body.prompt_ids, *output])[-1:])
        step = make_step(
            [0],
            0,
            [0],
            sampling=params,
            choice=choice,
            position=len(output),
            prompt_ids=body.prompt_ids,
            output_ids=output,
        )
        ((drawn,),) = SAMPLER.sample(logits, [step])
        output.append(drawn.token_id)
        tokens.append(TokenInfo(token_id=drawn.token_id, logprob=drawn.logprob, top=drawn.top))
        if drawn.token_id in stops and len(output) > params.min_tokens:
            return tokens, Outcome.STOP
        if len(output) == params.max_tokens:
            return tokens, Outcome.LENGTH


def scores_alone(body: RequestBody) -> list[TokenInfo]:
    num_top, prompt = body.sampling.prompt_logprobs, list(body.prompt_ids)
    if num_top is None or len(prompt) == 1:
        return []
    rows = logits_after(folds_of(prompt[:-1])).double().log_softmax(-1).tolist()
    expected = []
    for row, token_id in zip(rows, prompt[1:], strict=True):
        likeliest = sorted(range(VOCABULARY_SIZE), key=lambda other: -row[other])[:num_top]
        expected.append(TokenInfo(token_id=token_id, logprob=row[token_id], top=tuple((i, row[i]) for i in likeliest)))
    return expected


def make_world() -> World:
    world = World(eos_token_ids=frozenset(EOS))
    for host in world.hosts():
        host.runner = SamplingRunner(host.state.pool, BLOCK_SIZE, num_layers=NUM_LAYERS)
    return world


def received(world: World, request_id: str, choice: int) -> list[TokenInfo]:
    """Each position once, whoever sent it; what two workers sent is the same in everything."""
    tokens: dict[int, TokenInfo] = {}
    for run in world.front.runs:
        if run.attempt.request_id == request_id and run.choice == choice:
            for position, token in enumerate(run.tokens, start=run.position):
                assert tokens.setdefault(position, token) == token, f"position {position} of {choice} was sent twice"
    return [tokens[position] for position in sorted(tokens)]


def check(world: World, request_id: str, body: RequestBody) -> None:
    for choice, delivered in delivered_of(body).items():
        tokens, outcome = alone(body, choice, delivered)
        assert received(world, request_id, choice) == tokens, f"choice {choice}"
        assert world.front.finishes[answer_name(request_id, choice)] is outcome
    found, expected = received(world, request_id, PROMPT_CHOICE), scores_alone(body)
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    for token, right in zip(found, expected, strict=True):
        assert token.logprob is not None and right.logprob is not None
        assert abs(token.logprob - right.logprob) < 1e-4
        assert [token_id for token_id, _ in token.top] == [token_id for token_id, _ in right.top]


@settings(max_examples=150, deadline=None)
@given(
    values=parameters,
    prompt=prompts,
    num_choices=st.integers(1, 4),
    num_delivered=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    local=st.booleans(),
    other=st.none() | st.tuples(parameters, prompts),
)
def test_a_request_gives_what_it_gives_alone(
    values: dict[str, Any],
    prompt: list[int],
    num_choices: int,
    num_delivered: list[int],
    local: bool,
    other: tuple[dict[str, Any], list[int]] | None,
) -> None:
    params = SamplingParams(**{**values, "min_tokens": min(values["min_tokens"], values["max_tokens"])})
    first = RequestBody(
        prompt_ids=tuple(prompt),
        sampling=params,
        siblings=tuple(Sibling(choice=choice) for choice in range(1, num_choices)),
    )
    world = make_world()
    if other is not None:
        beside = SamplingParams(**{**other[0], "min_tokens": 0})
        world.submit("beside", RequestBody(prompt_ids=tuple(other[1]), sampling=beside))
        world.prefill.advance_once()
    world.submit("first", first, local=local)
    second = second_attempt(first, num_delivered)
    if second is not None:
        world.submit("second", second, attempt=2, local=not local)
    world.settle()
    check(world, "first", first)
    if second is not None:
        check(world, "second", second)
    if other is not None:
        check(world, "beside", RequestBody(prompt_ids=tuple(other[1]), sampling=beside))


def second_attempt(body: RequestBody, num_delivered: list[int]) -> RequestBody | None:
    """After some tokens of each answer were delivered; what had ended by then is left out. None if all had."""
    going_on: list[Sibling] = []
    for choice, count in zip(body.choices, num_delivered, strict=False):
        tokens, _ = alone(body, choice, ())
        if count < len(tokens):
            delivered = tuple(token.token_id for token in tokens[:count])
            going_on.append(Sibling(choice=choice, delivered_ids=delivered))
    if not going_on:
        return None
    lead = min(going_on, key=lambda answer: len(answer.delivered_ids))
    return RequestBody(
        prompt_ids=body.prompt_ids,
        sampling=body.sampling,
        choice=lead.choice,
        delivered_ids=lead.delivered_ids,
        siblings=tuple(answer for answer in going_on if answer is not lead),
    )


def test_an_answer_continues_in_a_second_attempt_as_it_would_have_in_the_first() -> None:
    """Penalties count what was delivered, and the random numbers go on where they were."""
    params = SamplingParams(
        temperature=2.0, seed=9, max_tokens=8, ignore_eos=True, presence_penalty=2.0, repetition_penalty=1.5
    )
    body = RequestBody(prompt_ids=(1, 2, 3), sampling=params, siblings=(Sibling(choice=1), Sibling(choice=2)))
    whole = [[token.token_id for token in alone(body, choice, ())[0]] for choice in range(3)]
    for counts in ([2, 5, 2], [7, 7, 7], [0, 7, 3]):
        second = second_attempt(body, counts)
        assert second is not None
        world = make_world()
        world.submit("r", second, attempt=2)
        world.settle()
        for choice, delivered in delivered_of(second).items():
            assert [*delivered, *world.front.token_ids("r", choice)] == whole[choice]
