"""Plain messages (cluster.core.messages) to protobuf (baton.v1) and back. Everything that decodes raises WireError.

Control messages go through `cluster.wire.mirror`. The body of a request and a batch of tokens are converted by hand:
the one is long, the other is sent at every step.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError, Message

from baton.v1 import control_pb2, inference_pb2, tokens_pb2
from cluster.core import commands, drain_orders, messages, token_messages
from cluster.core.ids import AttemptId, Outcome, WorkerId
from cluster.wire.mirror import WireError, from_message, to_message
from engine.core.request import RequestBody, Sibling
from engine.core.sampling import SamplingParams

_FRONT: dict[str, type] = {
    "front_hello": messages.FrontHello,
    "submit": messages.Submit,
    "cancel_request": messages.CancelRequest,
    "resubmit": messages.Resubmit,
    "stream_lost": messages.StreamLost,
    "request_done": messages.RequestDone,
}
_TO_FRONT: dict[str, type] = {
    "front_welcome": messages.FrontWelcome,
    "refused": messages.Refused,
    "placed": messages.Placed,
    "attempt_failed": messages.AttemptFailed,
    "end_request": messages.EndRequest,
}
_WORKER: dict[str, type] = {
    "worker_hello": messages.WorkerHello,
    "heartbeat": messages.Heartbeat,
    "reserve_granted": messages.ReserveGranted,
    "reserve_refused": messages.ReserveRefused,
    "prefill_done": messages.PrefillDone,
    "committed": messages.Committed,
    "finished": messages.Finished,
    "leg_failed": messages.LegFailed,
    "leg_released": messages.LegReleased,
    "peer_fenced": messages.PeerFenced,
    "block_events": messages.BlockEvents,
    "leg_survived": messages.LegSurvived,
    "worker_left": drain_orders.WorkerLeft,
}
_COMMAND: dict[str, type] = {
    "worker_welcome": commands.WorkerWelcome,
    "worker_refused": commands.WorkerRefused,
    "reserve": commands.Reserve,
    "prefill": commands.Prefill,
    "run_local": commands.RunLocal,
    "cancel_leg": commands.CancelLeg,
    "sender_stopped": commands.SenderStopped,
    "peer_lost": commands.PeerLost,
    "send_block_snapshot": commands.SendBlockSnapshot,
    "start_drain": drain_orders.StartDrain,
    "leave": drain_orders.Leave,
}
_TOKEN_REQUEST: dict[str, type] = {
    "stream_hello": token_messages.StreamHello,
    "watch": token_messages.Watch,
    "forget": token_messages.Forget,
}
_FIELD_OF: dict[type, str] = {
    cls: name for table in (_FRONT, _TO_FRONT, _WORKER, _COMMAND, _TOKEN_REQUEST) for name, cls in table.items()
}

_OUTCOME_NUMBERS = {outcome: number for number, outcome in enumerate(Outcome, start=1)}
_OUTCOMES = {number: outcome for outcome, number in _OUTCOME_NUMBERS.items()}


def outcome_to_wire(outcome: Outcome) -> inference_pb2.Outcome.ValueType:
    return inference_pb2.Outcome.ValueType(_OUTCOME_NUMBERS[outcome])


def outcome_from_wire(number: int) -> Outcome:
    outcome = _OUTCOMES.get(number)
    if outcome is None:
        raise WireError(f"unknown Outcome {number}")
    return outcome


def encode_front(message: messages.FrontMessage, body: bytes | None = None) -> control_pb2.FrontEnvelope:
    """`body`, encoded, goes with Submit and Resubmit."""
    envelope = control_pb2.FrontEnvelope()
    _fill(message, envelope)
    if body is not None:
        envelope.body = body
    return envelope


def decode_front(envelope: control_pb2.FrontEnvelope) -> messages.FrontMessage:
    return _read(_FRONT, "message", envelope)  # type: ignore[no-any-return]


def encode_to_front(message: messages.ToFrontMessage) -> control_pb2.ToFrontEnvelope:
    envelope = control_pb2.ToFrontEnvelope()
    _fill(message, envelope)
    return envelope


def decode_to_front(envelope: control_pb2.ToFrontEnvelope) -> messages.ToFrontMessage:
    return _read(_TO_FRONT, "message", envelope)  # type: ignore[no-any-return]


def encode_worker(message: messages.WorkerMessage) -> control_pb2.WorkerEnvelope:
    envelope = control_pb2.WorkerEnvelope()
    _fill(message, envelope)
    return envelope


def decode_worker(envelope: control_pb2.WorkerEnvelope) -> messages.WorkerMessage:
    return _read(_WORKER, "message", envelope)  # type: ignore[no-any-return]


def encode_command(command: commands.Command, body: bytes | None = None) -> control_pb2.Command:
    """`body`, encoded, goes with Reserve, Prefill and RunLocal."""
    envelope = control_pb2.Command(epoch=command.epoch)
    to_message(command.worker, envelope.worker)
    _fill(command.body, envelope)
    if body is not None:
        envelope.body = body
    return envelope


def decode_command(envelope: control_pb2.Command) -> tuple[commands.Command, RequestBody | None]:
    """Raises: WireError also where a command that needs a body comes without one."""
    content = _read(_COMMAND, "command", envelope)
    if not envelope.HasField("worker"):
        raise WireError("Command lacks worker")
    command = commands.Command(epoch=envelope.epoch, worker=from_message(WorkerId, envelope.worker), body=content)
    if isinstance(content, commands.Reserve | commands.Prefill | commands.RunLocal):
        if not envelope.HasField("body"):
            raise WireError(f"{type(content).__name__} lacks its body")
        return command, decode_body(envelope.body)
    return command, None


def encode_token_request(message: token_messages.TokenRequest) -> tokens_pb2.TokenEnvelope:
    envelope = tokens_pb2.TokenEnvelope()
    _fill(message, envelope)
    return envelope


def decode_token_request(envelope: tokens_pb2.TokenEnvelope) -> token_messages.TokenRequest:
    return _read(_TOKEN_REQUEST, "message", envelope)  # type: ignore[no-any-return]


def encode_body(body: RequestBody) -> bytes:
    message = control_pb2.RequestBody(
        prompt_ids=body.prompt_ids,
        delivered_ids=body.delivered_ids,
        adapter=body.adapter,
        cache_salt=body.cache_salt,
        priority=body.priority,
        choice=body.choice,
    )
    for sibling in body.siblings:
        message.siblings.add(choice=sibling.choice, delivered_ids=sibling.delivered_ids)
    sampling = body.sampling
    message.sampling.CopyFrom(
        inference_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            logit_bias=dict(sampling.logit_bias),
        )
    )
    return message.SerializeToString()


def check_body(body: bytes) -> None:
    """Raises: WireError where `decode_body` would, at a fraction of its cost."""
    _parse_body(body)


def _parse_body(body: bytes) -> tuple[control_pb2.RequestBody, SamplingParams]:
    try:
        message = control_pb2.RequestBody.FromString(body)
    except DecodeError as error:
        raise WireError(f"RequestBody: {error}") from error
    sampling = _decode_sampling(message.sampling)
    if not message.prompt_ids:
        raise WireError("RequestBody lacks prompt_ids")
    return message, sampling


def _decode_sampling(wire: inference_pb2.SamplingParams) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=wire.temperature,
            top_k=wire.top_k,
            top_p=wire.top_p,
            min_p=wire.min_p,
            presence_penalty=wire.presence_penalty,
            frequency_penalty=wire.frequency_penalty,
            repetition_penalty=wire.repetition_penalty,
            seed=wire.seed,
            max_tokens=wire.max_tokens,
            min_tokens=wire.min_tokens,
            stop_token_ids=tuple(wire.stop_token_ids),
            ignore_eos=wire.ignore_eos,
            logprobs=wire.logprobs if wire.HasField("logprobs") else None,
            prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
            logit_bias=tuple(sorted(wire.logit_bias.items())),
        )
    except ValueError as error:
        raise WireError(f"RequestBody.sampling: {error}") from error


def decode_body(body: bytes) -> RequestBody:
    """Raises: WireError (an out-of-range parameter included: the front has checked them, so this is a fault)."""
    message, sampling = _parse_body(body)
    return RequestBody(
        prompt_ids=tuple(message.prompt_ids),
        sampling=sampling,
        choice=message.choice,
        delivered_ids=tuple(message.delivered_ids),
        siblings=tuple(
            Sibling(choice=sibling.choice, delivered_ids=tuple(sibling.delivered_ids)) for sibling in message.siblings
        ),
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        priority=message.priority,
    )


def encode_batch(batch: token_messages.TokenBatch) -> tokens_pb2.TokenBatch:
    message = tokens_pb2.TokenBatch()
    message.worker.name = batch.worker.name
    message.worker.incarnation = batch.worker.incarnation
    for run in batch.runs:
        target = message.runs.add(choice=run.choice, position=run.position, leg_done=run.leg_done)
        target.attempt.request_id = run.attempt.request_id
        target.attempt.attempt = run.attempt.attempt
        for token in run.tokens:
            item = target.tokens.add(token_id=token.token_id)
            if token.logprob is not None:
                item.logprob = token.logprob
                for token_id, logprob in token.top:
                    item.top.add(token_id=token_id, logprob=logprob)
        if run.finish is not None:
            target.finish = outcome_to_wire(run.finish)
        if run.timeline is not None:
            to_message(run.timeline, target.timeline)
    return message


def decode_batch(message: tokens_pb2.TokenBatch) -> token_messages.TokenBatch:
    return token_messages.TokenBatch(
        worker=WorkerId(message.worker.name, message.worker.incarnation),
        runs=tuple(_decode_run(run) for run in message.runs),
    )


def _decode_run(run: tokens_pb2.TokenRun) -> token_messages.TokenRun:
    return token_messages.TokenRun(
        attempt=AttemptId(run.attempt.request_id, run.attempt.attempt),
        choice=run.choice,
        position=run.position,
        tokens=tuple(
            token_messages.TokenInfo(
                token_id=token.token_id,
                logprob=token.logprob if token.HasField("logprob") else None,
                top=tuple((top.token_id, top.logprob) for top in token.top),
            )
            for token in run.tokens
        ),
        finish=outcome_from_wire(run.finish) if run.HasField("finish") else None,
        leg_done=run.leg_done,
        timeline=from_message(messages.LegTimeline, run.timeline) if run.HasField("timeline") else None,
    )


def _fill(value: Any, envelope: Message) -> None:
    target = getattr(envelope, _FIELD_OF[type(value)])
    target.SetInParent()
    to_message(value, target)


def _read(table: dict[str, type], oneof: str, envelope: Message) -> Any:
    field = envelope.WhichOneof(oneof)
    if field is None:
        raise WireError(f"{envelope.DESCRIPTOR.full_name} is empty")
    return from_message(table[field], getattr(envelope, field))
