"""Every message survives the wire, and both enumerations are numbered alike on both sides."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.v1 import control_pb2, inference_pb2, tokens_pb2
from cluster.core import commands, messages, token_messages
from cluster.core.ids import Outcome, RefusalCause, Role, WorkerId
from cluster.wire import codec
from cluster.wire.mirror import WireError
from engine.core.request import RequestBody, Sibling
from engine.core.sampling import SamplingParams
from tests.support.messages import strategy_of


@settings(max_examples=150, deadline=None)
@given(strategy_of(*typing.get_args(messages.FrontMessage)))
def test_front_messages_round_trip(message: messages.FrontMessage) -> None:
    wire = control_pb2.FrontEnvelope.FromString(codec.encode_front(message).SerializeToString())
    assert codec.decode_front(wire) == message


@settings(max_examples=150, deadline=None)
@given(strategy_of(*typing.get_args(messages.ToFrontMessage)))
def test_to_front_messages_round_trip(message: messages.ToFrontMessage) -> None:
    wire = control_pb2.ToFrontEnvelope.FromString(codec.encode_to_front(message).SerializeToString())
    assert codec.decode_to_front(wire) == message


@settings(max_examples=200, deadline=None)
@given(strategy_of(*typing.get_args(messages.WorkerMessage)))
def test_worker_messages_round_trip(message: messages.WorkerMessage) -> None:
    wire = control_pb2.WorkerEnvelope.FromString(codec.encode_worker(message).SerializeToString())
    assert codec.decode_worker(wire) == message


_BODY = RequestBody(
    prompt_ids=(1, 2, 49151),
    sampling=SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=2**64 - 1,
        max_tokens=9,
        logprobs=0,
        prompt_logprobs=20,
        logit_bias=((3, 1.5), (7, -2.0)),
    ),
    choice=2,
    delivered_ids=(5, 6),
    siblings=(Sibling(choice=0), Sibling(choice=7, delivered_ids=(5, 6, 2**31))),
    adapter="a",
    cache_salt="s",
    priority=-3,
)


def test_every_sampling_parameter_is_carried() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        seed=2**64 - 1,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=20,
        logit_bias=((3, 1.5), (7, -2.0)),
    )
    for field in dataclasses.fields(sampling):
        assert getattr(sampling, field.name) != field.default, f"{field.name} is not tried"
    body = dataclasses.replace(_BODY, sampling=sampling)
    assert codec.decode_body(codec.encode_body(body)) == body


@settings(max_examples=200, deadline=None)
@given(strategy_of(*typing.get_args(commands.CommandBody)), st.integers(0, 2**40))
def test_commands_round_trip_with_their_body(content: commands.CommandBody, epoch: int) -> None:
    command = commands.Command(epoch=epoch, worker=WorkerId("p0", 2**50), body=content)
    needs_body = isinstance(content, commands.Reserve | commands.Prefill | commands.RunLocal)
    encoded = codec.encode_command(command, codec.encode_body(_BODY) if needs_body else None)
    wire = control_pb2.Command.FromString(encoded.SerializeToString())
    assert codec.decode_command(wire) == (command, _BODY if needs_body else None)


@settings(max_examples=100, deadline=None)
@given(strategy_of(*typing.get_args(token_messages.TokenRequest)))
def test_token_requests_round_trip(message: token_messages.TokenRequest) -> None:
    wire = tokens_pb2.TokenEnvelope.FromString(codec.encode_token_request(message).SerializeToString())
    assert codec.decode_token_request(wire) == message


_TOKEN = st.builds(
    token_messages.TokenInfo,
    token_id=st.integers(0, 2**31),
    logprob=st.floats(-100, 0, width=32),
    top=st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 0, width=32)), max_size=3).map(tuple),
) | st.builds(token_messages.TokenInfo, token_id=st.integers(0, 2**31))
_RUN = st.builds(
    token_messages.TokenRun,
    attempt=strategy_of(messages.AttemptId),
    choice=st.integers(0, 5),
    position=st.integers(0, 2**20),
    tokens=st.lists(_TOKEN, max_size=3).map(tuple),
    finish=st.none() | st.sampled_from(Outcome),
    leg_done=st.booleans(),
    timeline=st.none() | strategy_of(messages.LegTimeline),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_RUN, max_size=3))
def test_token_batches_round_trip(runs: list[token_messages.TokenRun]) -> None:
    batch = token_messages.TokenBatch(worker=WorkerId("d0", 7), runs=tuple(runs))
    wire = tokens_pb2.TokenBatch.FromString(codec.encode_batch(batch).SerializeToString())
    assert codec.decode_batch(wire) == batch


def test_enumerations_have_the_same_numbers_and_names_on_both_sides() -> None:
    for number, outcome in enumerate(Outcome, start=1):
        assert inference_pb2.Outcome.Name(codec.outcome_to_wire(outcome)) == f"OUTCOME_{outcome.name}"
        assert codec.outcome_from_wire(number) is outcome
    assert len(inference_pb2.Outcome.keys()) == len(Outcome) + 1
    for number, role in enumerate(Role, start=1):
        assert control_pb2.Role.Name(control_pb2.Role.ValueType(number)) == f"ROLE_{role.name}"
    assert len(control_pb2.Role.keys()) == len(Role) + 1
    for number, cause in enumerate(RefusalCause, start=1):
        name = control_pb2.RefusalCause.Name(control_pb2.RefusalCause.ValueType(number))
        assert name == f"REFUSAL_CAUSE_{cause.name}"
    assert len(control_pb2.RefusalCause.keys()) == len(RefusalCause) + 1


def test_every_wire_message_mirrors_its_class_field_by_field() -> None:
    num_checked = 0
    for contract, classes in ((control_pb2, messages), (tokens_pb2, token_messages)):
        for name, message_type in contract.DESCRIPTOR.message_types_by_name.items():
            cls = getattr(classes, name, None)
            if cls is None or name == "Command":
                continue
            assert set(message_type.fields_by_name) == typing.get_type_hints(cls).keys(), name
            num_checked += 1
    assert num_checked > 35


@pytest.mark.parametrize(
    ("wire", "decode", "what"),
    [
        (control_pb2.FrontEnvelope(), codec.decode_front, "FrontEnvelope is empty"),
        (control_pb2.Command(worker=control_pb2.ProcessId(name="d")), codec.decode_command, "Command is empty"),
        (control_pb2.Command(worker_refused={"reason": "x"}), codec.decode_command, "Command lacks worker"),
        (
            control_pb2.Command(worker={"name": "d"}, run_local={"attempt": {"request_id": "r"}}),
            codec.decode_command,
            "RunLocal lacks its body",
        ),
        (control_pb2.WorkerEnvelope(leg_released={}), codec.decode_worker, "LegReleased lacks attempt"),
        (control_pb2.FrontEnvelope(request_done={"request_id": "r"}), codec.decode_front, "unknown Outcome 0"),
        (b"", codec.decode_body, "RequestBody.sampling"),
        (b"\xff", codec.decode_body, "RequestBody: "),
    ],
)
def test_malformed_messages_name_what_is_missing(wire: Any, decode: Any, what: str) -> None:
    with pytest.raises(WireError, match=what):
        decode(wire)
