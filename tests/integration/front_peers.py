"""A front over real sockets, between a client and scripted peers: a coordinator and two workers that do as told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.v1 import admin_pb2, admin_pb2_grpc, control_pb2_grpc, inference_pb2_grpc, tokens_pb2_grpc
from cluster.core.ids import AttemptId, Outcome, WorkerId
from cluster.core.messages import (
    AttemptFailed,
    EndRequest,
    FrontHello,
    FrontMessage,
    FrontWelcome,
    LegTimeline,
    Placed,
    Refused,
    Resubmit,
    Submit,
    WorkerRef,
)
from cluster.core.token_messages import (
    PROMPT_CHOICE,
    Forget,
    StreamHello,
    TokenBatch,
    TokenInfo,
    TokenRequest,
    TokenRun,
    Watch,
)
from cluster.front.request_spec import RequestLimits
from cluster.front.server import run_front
from cluster.front.settings import FrontSettings
from cluster.wire.channels import bind, make_server, make_sync_channel
from cluster.wire.codec import (
    decode_body,
    decode_front,
    decode_token_request,
    encode_batch,
    encode_to_front,
)
from engine.core.request import RequestBody
from tests.support.worker_pair import delivered_of

TIMEOUT_S = 10.0
MAX_MODEL_TOKENS = 512
VOCAB_SIZE = 300
"""A little more than the tokenizer has, as in models whose vocabulary was padded."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the assistant cannot speak first') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model_dir(path: Path) -> Path:
    """A model directory as a front reads it: configuration, tokenizer, and weights of which only the header counts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world the answer is four", "stop here now"], trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2 * MAX_MODEL_TOKENS,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"}))
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


@dataclass(kw_only=True)
class Script:
    """What becomes of a request.

    Attributes:
        token_ids: what the workers emit. others: the same of the second answer, and so on.
        pause_s: before each of decode's tokens.
        refuse: the coordinator answers with this. is_ignored: it never answers.
        hold_after: the workers emit so many tokens and then nothing more, in every attempt but the last.
        fail_attempts: so many attempts fail once their tokens up to `hold_after` were sent.
        cut_stream_after: decode's first stream ends after so many tokens.
        has_prefill: False: decode reads the prompt itself.
        decode_address: where the front is told that decode is.
    """

    token_ids: tuple[int, ...] = ()
    others: tuple[tuple[int, ...], ...] = ()
    finish: Outcome = Outcome.LENGTH
    pause_s: float = 0.0
    refuse: Refused | EndRequest | None = None
    is_ignored: bool = False
    hold_after: int | None = None
    fail_attempts: int = 0
    cut_stream_after: int | None = None
    has_prefill: bool = True
    decode_address: str | None = None
    logprob: float | None = None

    def token_ids_of(self, choice: int) -> tuple[int, ...]:
        return (self.token_ids, *self.others)[choice]


@dataclass
class Seen:
    """What the peers were told."""

    messages: list[FrontMessage] = field(default_factory=list)
    bodies: dict[str, RequestBody] = field(default_factory=dict)
    requests: list[tuple[str, TokenRequest]] = field(default_factory=list)


class ScriptedCluster:
    """The peers and the front, on an event loop in a thread of its own. A context manager."""

    def __init__(self, model_dir: Path, limits: RequestLimits | None = None) -> None:
        self._model_dir = model_dir
        self._limits = limits or RequestLimits()
        self.scripts: dict[str, Script] = {}
        self.default_script = Script(token_ids=())
        self.seen = Seen()
        self.address = ""
        self.coordinator_address = ""
        self.epoch = 1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stop: asyncio.Event | None = None
        self._front: asyncio.Task[None] | None = None
        self._servers: list[grpc.aio.Server] = []
        self._coordinator: grpc.aio.Server | None = None
        self.refs: dict[str, WorkerRef] = {}
        self.cuts: set[str] = set()

    # ---- starting and stopping ---------------------------------------------------------------------------------

    def __enter__(self) -> ScriptedCluster:
        self._thread.start()
        self.call(self._start())
        self.channel = make_sync_channel(self.address)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    async def _start(self) -> None:
        for name in ("p", "d"):
            server = make_server()
            tokens_pb2_grpc.add_TokensServicer_to_server(_Worker(self, name), server)
            port = bind(server)
            await server.start()
            self._servers.append(server)
            self.refs[name] = WorkerRef(worker=WorkerId(name, 7), token_address=f"127.0.0.1:{port}")
        await self.start_coordinator()
        await self._start_front()

    async def start_coordinator(self) -> None:
        """At the address it had before, if it has run before."""
        server = make_server()
        control_pb2_grpc.add_CoordinatorServicer_to_server(_Coordinator(self), server)
        admin_pb2_grpc.add_AdminServicer_to_server(_Admin(), server)
        port = bind(server, port=int(self.coordinator_address.rpartition(":")[2] or 0))
        self.coordinator_address = f"127.0.0.1:{port}"
        await server.start()
        self._coordinator = server

    async def stop_coordinator(self) -> None:
        assert self._coordinator is not None
        await self._coordinator.stop(None)

    async def _start_front(self) -> None:
        ready: asyncio.Future[str] = self._loop.create_future()
        self._stop = asyncio.Event()
        settings = FrontSettings(
            coordinator_address=self.coordinator_address,
            model_dir=self._model_dir,
            model="tiny",
            incarnation=3,
            max_model_tokens=MAX_MODEL_TOKENS,
            limits=self._limits,
        )
        self._front = asyncio.create_task(run_front(settings, on_ready=ready.set_result, stop=self._stop))
        await asyncio.wait({self._front, ready}, return_when=asyncio.FIRST_COMPLETED)
        self.address = await ready

    async def stop_front(self) -> None:
        assert self._stop is not None and self._front is not None
        self._stop.set()
        await self._front

    async def _close(self) -> None:
        await self.stop_front()
        for server in (*self._servers, self._coordinator):
            assert server is not None
            await server.stop(None)

    # ---- looking -----------------------------------------------------------------------------------------------

    def sent(self, kind: type, request_id: str) -> list[Any]:
        """What the coordinator was told about the request."""
        return [
            message for message in self.seen.messages if isinstance(message, kind) and _id_of(message) == request_id
        ]

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, "it did not happen in time"
            time.sleep(0.005)

    def script_of(self, request_id: str) -> Script:
        """An id that a client uses again reaches the cluster with a tail of its own."""
        return self.scripts.get(request_id.partition("/")[0], self.default_script)


def _id_of(message: Any) -> str:
    request_id = getattr(message, "request_id", None)
    return request_id if request_id is not None else message.attempt.request_id


class _Coordinator(control_pb2_grpc.CoordinatorServicer):
    def __init__(self, cluster: ScriptedCluster) -> None:
        self._cluster = cluster

    async def ConnectFront(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for envelope in request_iterator:
            message = decode_front(envelope)
            if isinstance(message, FrontHello):
                self._cluster.seen.messages.append(message)
                yield encode_to_front(FrontWelcome(epoch=self._cluster.epoch))
                continue
            if envelope.HasField("body"):
                self._cluster.seen.bodies[_id_of(message)] = decode_body(envelope.body)
            self._cluster.seen.messages.append(message)
            for answer in self._answers(message):
                await asyncio.sleep(0.05 if isinstance(answer, AttemptFailed) else 0)
                yield encode_to_front(answer)

    async def ConnectWorker(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no workers here")
        yield

    def _answers(self, message: FrontMessage) -> list[Any]:
        if not isinstance(message, Submit | Resubmit):
            return []
        script = self._cluster.script_of(message.request_id)
        if script.refuse is not None:
            return [script.refuse]
        if script.is_ignored:
            return []
        attempt = AttemptId(message.request_id, message.failed_attempt + 1 if isinstance(message, Resubmit) else 1)
        decode = self._cluster.refs["d"]
        if script.decode_address is not None:
            decode = WorkerRef(worker=decode.worker, token_address=script.decode_address)
        answers: list[Any] = [
            Placed(
                epoch=self._cluster.epoch,
                attempt=attempt,
                prefill=self._cluster.refs["p"] if script.has_prefill else None,
                decode=decode,
                queued_ms=1.5,
                reserved_ms=2.5,
            )
        ]
        if attempt.attempt <= script.fail_attempts:
            answers.append(AttemptFailed(epoch=self._cluster.epoch, attempt=attempt, reason="as the script says"))
        return answers


class _Worker(tokens_pb2_grpc.TokensServicer):
    def __init__(self, cluster: ScriptedCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name

    async def Stream(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(())
        batches: asyncio.Queue[TokenBatch | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._read(request_iterator, batches))]
        try:
            while (batch := await batches.get()) is not None:
                yield encode_batch(batch)
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, request_iterator: Any, batches: asyncio.Queue[TokenBatch | None]) -> None:
        tasks: dict[tuple[AttemptId, int], asyncio.Task[None]] = {}
        async for envelope in request_iterator:
            request = decode_token_request(envelope)
            self._cluster.seen.requests.append((self._name, request))
            if isinstance(request, Watch):
                task = (
                    self._emit(request, batches) if request.choice != PROMPT_CHOICE else self._score(request, batches)
                )
                tasks[(request.attempt, request.choice)] = asyncio.create_task(task)
            elif isinstance(request, Forget):
                for (attempt, choice), running in tasks.items():
                    if attempt == request.attempt and request.choice in (None, choice):
                        running.cancel()
            else:
                assert isinstance(request, StreamHello)

    async def _score(self, watch: Watch, batches: asyncio.Queue[TokenBatch | None]) -> None:
        """In two runs, so that the front has to put them together."""
        body = self._cluster.seen.bodies[watch.attempt.request_id]
        middle = (watch.next_position + len(body.prompt_ids)) // 2
        for start, stop in ((watch.next_position, middle), (middle, len(body.prompt_ids))):
            tokens = tuple(
                TokenInfo(token_id=token_id, logprob=-token_id / 8, top=((token_id, -token_id / 8), (1, -9.0)))
                for token_id in body.prompt_ids[start:stop]
            )
            run = TokenRun(
                attempt=watch.attempt,
                choice=PROMPT_CHOICE,
                position=start,
                tokens=tokens,
                leg_done=stop == len(body.prompt_ids),
            )
            batches.put_nowait(TokenBatch(worker=self._cluster.refs[self._name].worker, runs=(run,)))

    async def _emit(self, watch: Watch, batches: asyncio.Queue[TokenBatch | None]) -> None:
        request_id = watch.attempt.request_id
        script = self._cluster.script_of(request_id)
        ids = script.token_ids_of(watch.choice)
        start = len(delivered_of(self._cluster.seen.bodies[request_id])[watch.choice])
        if self._name == "p":
            timeline = LegTimeline(prefill_ms=3.5, kv_early_bytes=70, num_cached_tokens=1)
            last = start + 1 == len(ids)
            self._put(batches, script, watch, start, timeline, finish=script.finish if last else None)
            return
        # Its first token is the prefill worker's to send, as what that says of the prompt comes with it.
        first = max(watch.next_position, start + 1) if script.has_prefill else watch.next_position
        limit = len(ids)
        if script.hold_after is not None and watch.attempt.attempt <= max(1, script.fail_attempts):
            limit = script.hold_after
        for position in range(first, limit):
            if script.pause_s:
                await asyncio.sleep(script.pause_s)
            if script.cut_stream_after == position and request_id not in self._cluster.cuts:
                self._cluster.cuts.add(request_id)
                batches.put_nowait(None)
                return
            last = position + 1 == len(ids)
            timeline = None
            if last or position == first:
                timeline = LegTimeline(push_ms=4.5, decode_ms=5.5, kv_bytes=100, kv_transport="shm")
            self._put(batches, script, watch, position, timeline, finish=script.finish if last else None)

    def _put(
        self,
        batches: asyncio.Queue[TokenBatch | None],
        script: Script,
        watch: Watch,
        position: int,
        timeline: LegTimeline | None,
        finish: Outcome | None,
    ) -> None:
        token_id = script.token_ids_of(watch.choice)[position]
        top = () if script.logprob is None else ((token_id, script.logprob), (1, -9.0))
        run = TokenRun(
            attempt=watch.attempt,
            choice=watch.choice,
            position=position,
            tokens=(TokenInfo(token_id=token_id, logprob=script.logprob, top=top),),
            finish=finish,
            leg_done=self._name == "p" or finish is not None,
            timeline=timeline,
        )
        batches.put_nowait(TokenBatch(worker=self._cluster.refs[self._name].worker, runs=(run,)))


class _Admin(admin_pb2_grpc.AdminServicer):
    async def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(cluster="scripted", epoch=1)

    async def GetLeases(self, request: Any, context: Any) -> admin_pb2.GetLeasesResponse:
        return admin_pb2.GetLeasesResponse(leases=[admin_pb2.LeaseStatus(lease_id=5)])
