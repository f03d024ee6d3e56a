"""The public API: Generate, Abort, GetModelInfo."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.v1 import inference_pb2
from cluster.core.errors import (
    BatonError,
    DuplicateRequestError,
    InvalidRequestError,
    RequestEndedError,
    UnreachableError,
    status_of,
)
from cluster.core.ids import Outcome, RefusalCause
from cluster.core.limits import NS_PER_MS, NS_PER_S
from cluster.front.client_output import ClientOutput
from cluster.front.output_text import OutputText
from cluster.front.request_effects import End
from cluster.front.request_spec import RequestSpec
from cluster.front.request_timeline import RequestReport
from cluster.front.sessions import Sessions
from cluster.front.settings import ServedModel
from cluster.front.validate import CheckedRequest, check_request
from cluster.front.wire_input import read_generate, reader
from cluster.wire.channels import MAX_DEADLINE_S, REFUSAL_CAUSE_TRAILER, RETRY_AFTER_TRAILER
from cluster.wire.codec import outcome_to_wire
from engine.core.request import RequestBody
from engine.core.sampling import SEED_LIMIT

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

MAX_OPEN_REQUESTS = 8192
MAX_DETAILS_CHARACTERS = 512
"""Error messages quote what the client sent. A character takes up to 12 bytes in a trailer, and clients take trailers
of up to 8 KiB: of a longer message they would not even get the status."""

RETRY_WHEN_FULL_MS = 1000
NUM_TOKENISER_THREADS = 2
INLINE_PROMPT_LENGTH = 1024
"""Prompts up to so many characters or token ids are prepared on the event loop, which takes less than a millisecond."""

_Context = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
_AnyContext = grpc.aio.ServicerContext[Any, Any]
_Prepared = tuple[RequestBody, bytes]


class InferenceService:
    """Checks and prepares what clients ask for, gives it to `sessions`, and writes the answers."""

    def __init__(self, model: ServedModel, sessions: Sessions) -> None:
        self._model = model
        self._sessions = sessions
        self._opening: dict[str, bool] = {}  # ids whose prompts are being prepared, and whether they were aborted
        self._threads = ThreadPoolExecutor(NUM_TOKENISER_THREADS, thread_name_prefix="tokenise")
        self._is_closing = False

    def close(self) -> None:
        """Ends every running request; its client learns that it may try elsewhere."""
        self._is_closing = True
        self._sessions.cancel_all("this front is shutting down")
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- Generate ----------------------------------------------------------------------------------------------

    async def generate(self, request: inference_pb2.GenerateRequest | InvalidRequestError, context: _Context) -> None:
        try:
            spec, output = await self._open(request, context)
        except BatonError as error:
            await _abort(context, error)
        try:
            end = await self._write_answer(spec, output, context)
        finally:
            # The call was cancelled: by the client, its connection, or its deadline. (Once a request has ended, its id
            # may be another's.)
            if output.end is None:
                self._sessions.cancel(spec.request_id, "the client cancelled the call or went away")
        if end.outcome not in (Outcome.STOP, Outcome.LENGTH):
            await _abort(context, self._error(end))

    async def _write_answer(self, spec: RequestSpec, output: ClientOutput, context: _Context) -> End:
        while True:
            await output.wait()
            end = output.end
            messages = output.take() if end is None else output.take_last()
            if end is not None:
                messages[-1].done.CopyFrom(_done(spec, end))
            for message in messages:
                await context.write(message)
            if end is not None:
                return end

    async def _open(
        self, request: inference_pb2.GenerateRequest | InvalidRequestError, context: _Context
    ) -> tuple[RequestSpec, ClientOutput]:
        """Checks and starts the request. Raises a BatonError where it cannot be started; nothing is left then."""
        if isinstance(request, InvalidRequestError):
            raise request
        if self._is_closing:
            raise UnreachableError("this front is shutting down")
        if len(self._sessions) + len(self._opening) >= MAX_OPEN_REQUESTS:
            reason = f"this front serves {MAX_OPEN_REQUESTS} requests, its limit"
            raise RequestEndedError(
                Outcome.REJECTED_OVERLOAD, reason, retry_after_ms=RETRY_WHEN_FULL_MS, cause=RefusalCause.TOO_MANY
            )
        checked = check_request(request, self._model, secrets.randbelow(SEED_LIMIT))
        request_id = checked.request_id or uuid.uuid4().hex
        deadline_ns = self._deadline_ns(context, checked.timeout_ms)
        body, block_hashes = await self._prepare(request_id, checked)
        spec = RequestSpec(
            request_id=request_id,
            body=body,
            block_hashes=block_hashes,
            block_size=self._model.block_size,
            extra_key=self._model.extra_key(body.adapter, body.cache_salt),
            tenant=checked.tenant,
            deadline_ns=deadline_ns,
            max_latency_ms=checked.max_latency_ms,
            has_stop_strings=bool(checked.stop),
        )
        return spec, self._sessions.open(spec, lambda: OutputText(self._model.tokenizer.detokenizer(), checked.stop))

    def _deadline_ns(self, context: _Context, timeout_ms: int | None) -> int | None:
        """The earlier one of the call's and the request's own."""
        now_ns, remaining_s = self._sessions.now_ns(), context.time_remaining()
        deadlines_ns = [] if timeout_ms is None else [now_ns + timeout_ms * NS_PER_MS]
        if remaining_s is not None and remaining_s <= MAX_DEADLINE_S:
            deadlines_ns.append(now_ns + int(remaining_s * NS_PER_S))
        return min(deadlines_ns, default=None)

    async def _prepare(self, request_id: str, checked: CheckedRequest) -> _Prepared:
        """Tokenises and hashes the prompt; a long one in a thread. The id is taken meanwhile."""
        if request_id in self._opening or request_id in self._sessions:
            raise DuplicateRequestError(f"request_id: a request {request_id!r} is running already")
        length = max(len(checked.text), len(checked.prompt_ids or ()))
        if length <= INLINE_PROMPT_LENGTH:
            return self._prepare_now(checked)
        self._opening[request_id] = False
        try:
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(self._threads, self._prepare_now, checked)
        finally:
            was_aborted = self._opening.pop(request_id)
        if was_aborted:
            raise RequestEndedError(Outcome.CANCELLED, "aborted")
        return prepared

    def _prepare_now(self, checked: CheckedRequest) -> _Prepared:
        body = checked.body(checked.tokenise(self._model), self._model)
        return body, self._model.hash_prompt(body.prompt_ids, body.adapter, body.cache_salt)

    def _error(self, end: End) -> BatonError:
        if self._is_closing:
            return UnreachableError("this front is shutting down")
        if end.is_duplicate:
            return DuplicateRequestError(f"request_id: {end.reason}")
        if end.outcome is Outcome.WORKER_LOST and not self._sessions.link.is_up:
            return UnreachableError(end.reason)
        return RequestEndedError(end.outcome, end.reason, retry_after_ms=end.retry_after_ms, cause=end.cause)

    # ---- the others --------------------------------------------------------------------------------------------

    async def abort(
        self, request: inference_pb2.AbortRequest | InvalidRequestError, context: _AnyContext
    ) -> inference_pb2.AbortResponse:
        if isinstance(request, InvalidRequestError):
            await _abort(context, request)
        if not request.request_id:
            await _abort(context, InvalidRequestError("request_id", "must not be empty"))
        is_opening = request.request_id in self._opening
        if is_opening:
            self._opening[request.request_id] = True
        return inference_pb2.AbortResponse(found=self._sessions.cancel(request.request_id, "aborted") or is_opening)

    async def get_model_info(
        self, request: inference_pb2.GetModelInfoRequest | InvalidRequestError, context: _AnyContext
    ) -> inference_pb2.GetModelInfoResponse:
        if isinstance(request, InvalidRequestError):
            await _abort(context, request)
        model = self._model
        return inference_pb2.GetModelInfoResponse(
            model=model.name,
            fingerprint=model.fingerprint,
            max_model_tokens=model.max_model_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            block_size=model.block_size,
            has_chat_template=model.tokenizer.has_chat_template,
        )

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """To be added to a server. Made by hand because a malformed message must reach the methods above."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate,
                    request_deserializer=read_generate,
                    response_serializer=inference_pb2.GenerateResponse.SerializeToString,
                ),
                "Abort": grpc.unary_unary_rpc_method_handler(
                    self.abort,
                    request_deserializer=reader(inference_pb2.AbortRequest),
                    response_serializer=inference_pb2.AbortResponse.SerializeToString,
                ),
                "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                    self.get_model_info,
                    request_deserializer=reader(inference_pb2.GetModelInfoRequest),
                    response_serializer=inference_pb2.GetModelInfoResponse.SerializeToString,
                ),
            },
        )


async def _abort(context: _AnyContext, error: BatonError) -> NoReturn:
    """Ends the call with the error's status and its message; if it was refused, why, and when to try again."""
    trailers = []
    if isinstance(error, RequestEndedError):
        if error.retry_after_ms is not None:
            trailers.append((RETRY_AFTER_TRAILER, str(error.retry_after_ms)))
        if error.cause is not None:
            trailers.append((REFUSAL_CAUSE_TRAILER, error.cause.value))
    await context.abort(grpc.StatusCode[status_of(error).grpc], str(error)[:MAX_DETAILS_CHARACTERS], tuple(trailers))
    raise AssertionError("abort returned")


def _done(spec: RequestSpec, end: End) -> inference_pb2.Done:
    report = end.report
    return inference_pb2.Done(
        outcome=outcome_to_wire(end.outcome),
        usage=inference_pb2.Usage(
            prompt_tokens=len(spec.body.prompt_ids),
            cached_tokens=report.num_cached_tokens,
            completion_tokens=report.num_output_tokens,
        ),
        prefill_worker=report.prefill_worker,
        decode_worker=report.decode_worker,
        kv=inference_pb2.KvUsage(
            bytes=report.kv_bytes, early_bytes=report.kv_early_bytes, transport=report.kv_transport
        ),
        timeline=_timeline(report),
        seed=spec.body.sampling.seed,
        num_attempts=report.num_attempts,
        route=report.route,
        route_reason=report.route_reason,
    )


def _timeline(report: RequestReport) -> inference_pb2.Timeline:
    """Parts that are None stay unset."""
    return inference_pb2.Timeline(
        queued_ms=report.queued_ms,
        reserved_ms=report.reserved_ms,
        prefill_ms=report.prefill_ms,
        push_ms=report.push_ms,
        first_token_ms=report.first_token_ms,
        decode_ms=report.decode_ms,
        handover_gap_ms=report.handover_gap_ms,
    )
