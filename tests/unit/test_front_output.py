"""What waits for a client, and what waits for a stream."""

from __future__ import annotations

from cluster.core.token_messages import TokenInfo
from cluster.front.client_output import MAX_WAITING_TOKENS, ClientOutput


def _tokens(*ids: int) -> list[TokenInfo]:
    return [TokenInfo(token_id=token_id, logprob=-1.0, top=((token_id, -1.0),)) for token_id in ids]


def test_what_came_since_the_last_write_goes_out_in_one_message() -> None:
    output = ClientOutput("r", with_logprobs=True)
    assert output.take() is None
    output.add(_tokens(1), "a")
    output.add(_tokens(2, 3), "")
    output.add([], "b")
    message = output.take()
    assert message is not None
    assert (message.request_id, message.position, list(message.token_ids), message.text) == ("r", 0, [1, 2, 3], "ab")
    assert [entry.top[0].token_id for entry in message.logprobs] == [1, 2, 3]
    assert output.take() is None
    output.add(_tokens(4), "")
    message = output.take()
    assert message is not None and (message.position, list(message.token_ids)) == (3, [4])


def test_log_probabilities_are_sent_only_if_asked_for() -> None:
    output = ClientOutput("r", with_logprobs=False)
    output.add(_tokens(1), "a")
    message = output.take()
    assert message is not None and not message.logprobs


def test_a_client_that_does_not_read_is_noticed() -> None:
    output = ClientOutput("r", with_logprobs=False)
    output.add(_tokens(*[7] * MAX_WAITING_TOKENS), "")
    assert not output.is_overflowing
    output.add(_tokens(7), "")
    assert output.is_overflowing
    output.take()
    assert not output.is_overflowing
