"""What waits for a client, and what waits for a stream."""

from __future__ import annotations

import pytest

from baton.v1 import inference_pb2
from cluster.core.ids import Outcome
from cluster.core.token_messages import TokenInfo
from cluster.front.client_output import MAX_SCORES_PER_MESSAGE, MAX_WAITING_TOKENS, ClientOutput
from engine.core.sampling import MAX_LOGPROBS

GRPC_DEFAULT_LIMIT_BYTES = 4 * 2**20


def _tokens(*ids: int) -> list[TokenInfo]:
    return [TokenInfo(token_id=token_id, logprob=-1.0, top=((token_id, -1.0),)) for token_id in ids]


def _output(*choices: int, with_logprobs: bool = False) -> ClientOutput:
    return ClientOutput("r", choices=choices or (0,), with_logprobs=with_logprobs)


def test_what_came_since_the_last_write_goes_out_in_one_message() -> None:
    output = _output(with_logprobs=True)
    assert output.take() == []
    output.add(0, _tokens(1), "a")
    output.add(0, _tokens(2, 3), "")
    output.add(0, [], "b")
    (message,) = output.take()
    assert (message.request_id, message.position, list(message.token_ids), message.text) == ("r", 0, [1, 2, 3], "ab")
    assert [entry.top[0].token_id for entry in message.logprobs] == [1, 2, 3]
    assert output.take() == []
    output.add(0, _tokens(4), "")
    (message,) = output.take()
    assert (message.position, list(message.token_ids)) == (3, [4])


def test_each_answer_has_messages_of_its_own_and_ends_with_one() -> None:
    output = _output(0, 1, 2)
    output.add(2, _tokens(7, 8), "x")
    output.add(0, _tokens(1), "a")
    assert [(m.choice, m.position, list(m.token_ids), m.text) for m in output.take()] == [
        (0, 0, [1], "a"),
        (2, 0, [7, 8], "x"),
    ]
    output.add(2, _tokens(9), "y")
    output.end_choice(2, Outcome.STOP)
    output.end_choice(1, Outcome.LENGTH)
    ended, last = output.take()
    assert (ended.choice, list(ended.token_ids), ended.finish) == (1, [], inference_pb2.OUTCOME_LENGTH)
    assert (last.choice, last.position, list(last.token_ids)) == (2, 2, [9])
    assert last.finish == inference_pb2.OUTCOME_STOP
    with pytest.raises(AssertionError):
        output.end_choice(0, Outcome.STOP)
        output.end_choice(0, Outcome.STOP)


def test_log_probabilities_are_sent_only_if_asked_for() -> None:
    output = _output()
    output.add(0, _tokens(1), "a")
    (message,) = output.take()
    assert not message.logprobs


def test_log_probabilities_of_a_prompt_come_first_and_in_parts() -> None:
    output = _output()
    output.add_scores(_tokens(5, 6))
    (message,) = output.take()
    assert (message.prompt_logprobs.position, list(message.prompt_logprobs.token_ids)) == (1, [5, 6])
    top = tuple((token_id, -1.0) for token_id in range(150_000, 150_000 + MAX_LOGPROBS))
    output.add_scores([TokenInfo(token_id=150_000, logprob=-1.0, top=top)] * (2 * MAX_SCORES_PER_MESSAGE + 1))
    output.add(0, _tokens(1), "a")
    *parts, last = output.take()
    assert [part.prompt_logprobs.position for part in parts] == [3, 3 + 512, 3 + 1024]
    assert [len(part.prompt_logprobs.logprobs) for part in parts] == [512, 512, 1]
    assert max(part.ByteSize() for part in parts) < GRPC_DEFAULT_LIMIT_BYTES / 10
    assert list(last.token_ids) == [1] and not last.HasField("prompt_logprobs")


def test_a_client_that_does_not_read_is_noticed() -> None:
    output = _output(0, 1)
    output.add_scores(_tokens(*[7] * 2 * MAX_WAITING_TOKENS))
    output.add(0, _tokens(*[7] * (MAX_WAITING_TOKENS // 2)), "")
    output.add(1, _tokens(*[7] * (MAX_WAITING_TOKENS // 2)), "")
    assert not output.is_overflowing
    output.add(1, _tokens(7), "")
    assert output.is_overflowing
    output.take()
    assert not output.is_overflowing
