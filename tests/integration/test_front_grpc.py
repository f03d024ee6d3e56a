"""The front through gRPC, with scripted peers behind it."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

from baton.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from cluster.core.ids import AttemptId, Outcome, RefusalCause
from cluster.core.messages import (
    CancelRequest,
    EndRequest,
    FrontHello,
    Refused,
    RequestDone,
    Resubmit,
    StreamLost,
    Submit,
)
from cluster.core.token_messages import Forget, Watch
from cluster.front.inference import INLINE_PROMPT_LENGTH
from cluster.front.request_spec import RequestLimits
from engine.core.block_hash import extra_key, hash_blocks
from engine.core.request import Sibling
from engine.core.sampling import SamplingParams
from tests.integration.front_peers import MAX_MODEL_TOKENS, TIMEOUT_S, Script, ScriptedCluster, make_model_dir

Request = inference_pb2.GenerateRequest
Sampling = inference_pb2.SamplingParams
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def cluster(model_dir: Path, tokenizer: Tokenizer) -> Iterator[ScriptedCluster]:
    with ScriptedCluster(model_dir) as cluster:
        cluster.default_script = Script(token_ids=tuple(tokenizer.encode("hello world").ids))
        yield cluster


def _generate(cluster: ScriptedCluster, request: Request, timeout_s: float = TIMEOUT_S) -> list[Any]:
    return list(cluster.inference.Generate(request, timeout=timeout_s))


def _cut(cluster: ScriptedCluster, request: Request) -> tuple[list[Any], Any]:
    """What came before the error, and the error."""
    replies = []
    try:
        for reply in cluster.inference.Generate(request, timeout=TIMEOUT_S):
            replies.append(reply)
    except grpc.RpcError as error:
        return replies, error
    raise AssertionError("the call ended well")


def _text(replies: list[Any]) -> str:
    return "".join(reply.text for reply in replies)


def _token_ids(replies: list[Any]) -> list[int]:
    """Checks the positions on the way."""
    ids: list[int] = []
    for reply in replies:
        assert reply.position == len(ids)
        ids.extend(reply.token_ids)
    return ids


def _fails(cluster: ScriptedCluster, request: Request | bytes, method: str = "Generate") -> Any:
    """The error of a call; a request of bytes is sent as it is."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    path = f"/baton.v1.Inference/{method}"
    with pytest.raises(grpc.RpcError) as raised:
        if method == "Generate":
            list(cluster.channel.unary_stream(path)(data, timeout=TIMEOUT_S))
        else:
            cluster.channel.unary_unary(path)(data, timeout=TIMEOUT_S)
    return raised.value


# ---- answers --------------------------------------------------------------------------------------------------------


def test_an_answer_with_everything_that_belongs_to_it(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello wörld 👩‍👩‍👧 the answer").ids
    cluster.scripts["whole"] = Script(token_ids=tuple(ids))
    replies = _generate(cluster, Request(request_id="whole", prompt="hello the answer is", tenant="t", priority=2))
    assert _token_ids(replies) == ids
    assert _text(replies) == tokenizer.decode(ids)
    assert all("\ufffd" not in reply.text for reply in replies)
    assert {reply.request_id for reply in replies} == {"whole"}
    assert [reply.HasField("done") for reply in replies] == [False] * (len(replies) - 1) + [True]
    done = replies[-1].done
    prompt_ids = tokenizer.encode("hello the answer is").ids
    assert done.outcome == inference_pb2.OUTCOME_LENGTH
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt_ids), len(ids))
    assert (done.usage.cached_tokens, done.num_attempts) == (1, 1)
    assert (done.prefill_worker, done.decode_worker) == ("p", "d")
    assert (done.kv.bytes, done.kv.early_bytes, done.kv.transport) == (100, 70, "shm")
    timeline = done.timeline
    assert (timeline.queued_ms, timeline.reserved_ms, timeline.prefill_ms, timeline.push_ms) == (1.5, 2.5, 3.5, 4.5)
    assert timeline.first_token_ms > 0 and timeline.HasField("decode_ms") and timeline.HasField("handover_gap_ms")
    (submit,) = cluster.sent(Submit, "whole")
    assert (submit.tenant, submit.priority, submit.num_prompt_tokens) == ("t", 2, len(prompt_ids))
    body = cluster.seen.bodies["whole"]
    assert body.prompt_ids == tuple(prompt_ids) and body.sampling.seed == done.seed
    cluster.wait_for(lambda: cluster.sent(RequestDone, "whole"))
    assert cluster.sent(RequestDone, "whole")[0].num_output_tokens == len(ids)
    attempts = [(name, request) for name, request in cluster.seen.requests if isinstance(request, Watch)]
    assert {name for name, watch in attempts if watch.attempt.request_id == "whole"} == {"p", "d"}


def test_the_front_makes_an_id_and_a_seed(cluster: ScriptedCluster) -> None:
    first, second = (_generate(cluster, Request(prompt="hi"))[-1] for _ in range(2))
    assert len(first.request_id) == 32 and first.request_id != second.request_id
    assert first.done.seed != second.done.seed
    seeded = _generate(cluster, Request(prompt="hi", sampling=Sampling(seed=2**64 - 1)))[-1]
    assert seeded.done.seed == 2**64 - 1


def test_token_ids_go_as_they_are(cluster: ScriptedCluster) -> None:
    _generate(cluster, Request(request_id="ids", token_ids=inference_pb2.TokenIds(ids=[5, 0, 7])))
    assert cluster.seen.bodies["ids"].prompt_ids == (5, 0, 7)


def test_chat_is_rendered_with_the_models_template(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    chat = inference_pb2.ChatMessages(
        messages=[
            inference_pb2.ChatMessage(role="system", content="hello"),
            inference_pb2.ChatMessage(role="user", content="the answer?"),
        ]
    )
    _generate(cluster, Request(request_id="chat", chat=chat))
    rendered = "<|system|>hello<|end|><|user|>the answer?<|end|><|assistant|>"
    expected = tokenizer.encode(rendered, add_special_tokens=False).ids
    assert cluster.seen.bodies["chat"].prompt_ids == tuple(expected)


def test_a_long_prompt_is_hashed_block_by_block(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    prompt = "hello world the answer is four " * 48
    assert len(prompt) > INLINE_PROMPT_LENGTH
    _generate(cluster, Request(request_id="long", prompt=prompt, cache_salt="s"))
    ids = tokenizer.encode(prompt).ids
    fingerprint = cluster.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()).fingerprint
    (submit,) = cluster.sent(Submit, "long")
    assert submit.block_hashes == b"".join(hash_blocks(ids, 16, extra_key(fingerprint, "", "s")))
    assert submit.max_tokens == min(256, MAX_MODEL_TOKENS - len(ids))


def test_max_tokens_is_cut_to_the_context(cluster: ScriptedCluster) -> None:
    ids = inference_pb2.TokenIds(ids=[5] * (MAX_MODEL_TOKENS - 3))
    _generate(cluster, Request(request_id="cut", token_ids=ids, sampling=Sampling(max_tokens=100, min_tokens=50)))
    sampling = cluster.seen.bodies["cut"].sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (3, 3)
    _generate(cluster, Request(request_id="default", prompt="x"))
    assert cluster.seen.bodies["default"].sampling.max_tokens == 256


def test_every_sampling_parameter_reaches_the_workers(cluster: ScriptedCluster) -> None:
    asked = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "seed": 2**64 - 1,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": (4, 5),
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 20,
        "logit_bias": {3: 1.5, 7: -2.0},
        "num_choices": 2,
    }
    assert sorted(asked) == sorted(Sampling.DESCRIPTOR.fields_by_name), "one is not tried"
    cluster.scripts["all"] = Script(token_ids=(9, 10), others=((11, 12),))
    _generate(cluster, Request(request_id="all", prompt="hello world", sampling=Sampling(**asked)))
    body = cluster.seen.bodies["all"]
    del asked["num_choices"]
    assert body.sampling == SamplingParams(**{**asked, "logit_bias": ((3, 1.5), (7, -2.0))})  # type: ignore[arg-type]
    assert body.siblings == (Sibling(choice=1),)


def test_log_probabilities(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the answer").ids
    cluster.scripts["logprobs"] = Script(token_ids=tuple(ids), logprob=-0.5)
    replies = _generate(cluster, Request(request_id="logprobs", prompt="x", sampling=Sampling(logprobs=2)))
    entries = [entry for reply in replies for entry in reply.logprobs]
    assert [entry.logprob for entry in entries] == [-0.5] * len(ids)
    assert [entry.top[0].token_id for entry in entries] == ids
    assert [entry.top[1].logprob for entry in entries] == [-9.0] * len(ids)


def test_special_tokens_have_no_text(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("four").ids, 0]
    cluster.scripts["eos"] = Script(token_ids=tuple(ids), finish=Outcome.STOP)
    replies = _generate(cluster, Request(request_id="eos", prompt="x"))
    assert _text(replies) == "four" and _token_ids(replies) == ids
    assert replies[-1].done.outcome == inference_pb2.OUTCOME_STOP


def test_the_first_token_may_be_the_last(cluster: ScriptedCluster) -> None:
    cluster.scripts["one"] = Script(token_ids=(0,), finish=Outcome.STOP)
    replies = _generate(cluster, Request(request_id="one", prompt="x"))
    assert _token_ids(replies) == [0] and _text(replies) == ""
    assert replies[-1].done.outcome == inference_pb2.OUTCOME_STOP
    cluster.wait_for(lambda: cluster.sent(RequestDone, "one"))


def test_decode_may_read_the_prompt_itself(cluster: ScriptedCluster) -> None:
    cluster.scripts["local"] = Script(token_ids=(9, 10), has_prefill=False)
    done = _generate(cluster, Request(request_id="local", prompt="x"))[-1].done
    assert (done.prefill_worker, done.decode_worker) == ("", "d")


# ---- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stop", "shown"),
    [
        ("across", "world th", "hello "),
        ("first", "h", ""),
        ("at-the-end", "four", "hello world the answer is "),
        ("never", "fourteen", "hello world the answer is four"),
    ],
)
def test_stop_strings(cluster: ScriptedCluster, tokenizer: Tokenizer, name: str, stop: str, shown: str) -> None:
    request_id = f"stop-{name}"
    ids = tokenizer.encode("hello world the answer is four").ids
    cluster.scripts[request_id] = Script(token_ids=tuple(ids))
    replies = _generate(cluster, Request(request_id=request_id, prompt="x", stop=["unseen", stop]))
    assert _text(replies) == shown
    is_matched = name != "never"
    done = replies[-1].done
    assert done.outcome == (inference_pb2.OUTCOME_STOP if is_matched else inference_pb2.OUTCOME_LENGTH)
    delivered = _token_ids(replies)
    assert delivered == ids[: len(delivered)] and done.usage.completion_tokens == len(delivered)
    assert (done.usage.prompt_tokens, done.num_attempts, done.decode_worker) == (1, 1, "d")
    if name in ("across", "at-the-end"):
        # Decode has said what it took over when it began: the end of its leg is not waited for.
        assert (done.kv.bytes, done.kv.early_bytes, done.kv.transport) == (100, 70, "shm")
        assert (done.timeline.prefill_ms, done.timeline.push_ms, done.usage.cached_tokens) == (3.5, 4.5, 1)
    if is_matched:
        assert stop in tokenizer.decode(delivered) and stop not in tokenizer.decode(delivered[:-1])
    cluster.wait_for(lambda: cluster.sent(RequestDone, request_id))
    told = cluster.sent(RequestDone, request_id)
    assert [message.outcome for message in told] == [Outcome.STOP if is_matched else Outcome.LENGTH]


# ---- several answers ------------------------------------------------------------------------------------------------


def _of_choice(replies: list[Any], choice: int) -> list[Any]:
    return [reply for reply in replies if reply.choice == choice]


def test_several_answers(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    answers = [tuple(tokenizer.encode(text).ids) for text in ("hello world", "the answer is four", "four")]
    cluster.scripts["three"] = Script(token_ids=answers[0], others=tuple(answers[1:]), logprob=-0.5)
    request = Request(request_id="three", prompt="x", sampling=Sampling(num_choices=3, logprobs=1))
    replies = _generate(cluster, request)
    for choice, ids in enumerate(answers):
        mine = _of_choice(replies, choice)
        assert _token_ids(mine) == list(ids) and _text(mine) == tokenizer.decode(ids)
        assert sum(len(reply.logprobs) for reply in mine) == len(ids)
        assert [reply.finish for reply in mine] == [0] * (len(mine) - 1) + [inference_pb2.OUTCOME_LENGTH]
    assert [reply.HasField("done") for reply in replies] == [False] * (len(replies) - 1) + [True]
    num_tokens = sum(map(len, answers))
    assert replies[-1].done.usage.completion_tokens == num_tokens
    (submit,) = cluster.sent(Submit, "three")
    assert submit.num_choices == 3 and cluster.seen.bodies["three"].choices == (0, 1, 2)
    cluster.wait_for(lambda: cluster.sent(RequestDone, "three"))
    assert cluster.sent(RequestDone, "three")[0].num_output_tokens == num_tokens


def test_a_stop_string_ends_one_of_several_answers(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    """Decode is told of that one, so that it need not go on with it while the others run."""
    stopped = tuple(tokenizer.encode("the answer stop here now " * 8).ids)
    other = tuple(tokenizer.encode("hello world " * 8).ids)
    cluster.scripts["one-stops"] = Script(token_ids=stopped, others=(other,), pause_s=0.01)
    request = Request(request_id="one-stops", prompt="x", stop=["here"], sampling=Sampling(num_choices=2))
    replies = _generate(cluster, request)
    assert _text(_of_choice(replies, 0)) == "the answer stop "
    assert _of_choice(replies, 0)[-1].finish == inference_pb2.OUTCOME_STOP
    assert _text(_of_choice(replies, 1)) == "hello world " * 8
    assert _of_choice(replies, 1)[-1].finish == replies[-1].done.outcome == inference_pb2.OUTCOME_LENGTH
    forget = Forget(attempt=AttemptId("one-stops", 1), choice=0)
    cluster.wait_for(lambda: ("d", forget) in cluster.seen.requests)


def test_failed_attempts_of_several_answers_are_not_seen(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    answers = [tuple(tokenizer.encode(text).ids) for text in ("hello world the answer is four", "the answer is four")]
    cluster.scripts["two-retried"] = Script(token_ids=answers[0], others=(answers[1],), hold_after=3, fail_attempts=1)
    replies = _generate(cluster, Request(request_id="two-retried", prompt="x", sampling=Sampling(num_choices=2)))
    for choice, ids in enumerate(answers):
        assert _token_ids(_of_choice(replies, choice)) == list(ids)
    (resubmit,) = cluster.sent(Resubmit, "two-retried")
    assert (resubmit.num_choices, resubmit.num_delivered) == (2, 3)
    assert replies[-1].done.num_attempts == 2


def test_log_probabilities_of_the_prompt_come_before_its_answer(cluster: ScriptedCluster) -> None:
    prompt = [5 + index % 200 for index in range(400)]
    cluster.scripts["scored"] = Script(token_ids=(7, 8, 9))
    replies = _generate(
        cluster,
        Request(
            request_id="scored",
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=Sampling(prompt_logprobs=2, num_choices=1),
        ),
    )
    parts = [reply.prompt_logprobs for reply in replies if reply.HasField("prompt_logprobs")]
    assert all(reply.HasField("prompt_logprobs") for reply in replies[: len(parts)])
    assert [token_id for part in parts for token_id in part.token_ids] == prompt[1:]
    assert parts[0].position == 1
    entries = [entry for part in parts for entry in part.logprobs]
    assert [entry.logprob for entry in entries] == [-token_id / 8 for token_id in prompt[1:]]
    assert all(entry.top[1].token_id == 1 for entry in entries)
    assert _token_ids(replies[len(parts) :]) == [7, 8, 9]


def test_the_prompt_of_one_token_has_no_log_probabilities(cluster: ScriptedCluster) -> None:
    request = Request(token_ids=inference_pb2.TokenIds(ids=[5]), sampling=Sampling(prompt_logprobs=0))
    replies = _generate(cluster, request)
    assert not any(reply.HasField("prompt_logprobs") for reply in replies) and replies[-1].HasField("done")


# ---- failures behind the front --------------------------------------------------------------------------------------


def test_failed_attempts_are_not_seen(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world the answer is four").ids
    cluster.scripts["retry"] = Script(token_ids=tuple(ids), hold_after=3, fail_attempts=1)
    replies = _generate(cluster, Request(request_id="retry", prompt="x"))
    assert _token_ids(replies) == ids and _text(replies) == tokenizer.decode(ids)
    assert replies[-1].done.num_attempts == 2
    (resubmit,) = cluster.sent(Resubmit, "retry")
    assert (resubmit.failed_attempt, resubmit.num_delivered) == (1, 3)
    assert cluster.seen.bodies["retry"].delivered_ids == tuple(ids[:3])


def test_a_cut_stream_is_resumed_at_the_next_position(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world the answer is four").ids
    cluster.scripts["cut-stream"] = Script(token_ids=tuple(ids), cut_stream_after=4, pause_s=0.005)
    replies = _generate(cluster, Request(request_id="cut-stream", prompt="x"))
    assert _token_ids(replies) == ids
    assert cluster.sent(StreamLost, "cut-stream") == [] and replies[-1].done.num_attempts == 1
    watches = [
        request.next_position
        for name, request in cluster.seen.requests
        if name == "d" and isinstance(request, Watch) and request.attempt.request_id == "cut-stream"
    ]
    assert watches[0] == 0 and watches[-1] == 4


def test_a_worker_out_of_reach_is_reported(model_dir: Path) -> None:
    limits = RequestLimits(stream_lost_ns=200_000_000)
    with socket.socket() as unused, ScriptedCluster(model_dir, limits) as cluster:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        cluster.scripts["lost"] = Script(token_ids=(9, 10, 11), hold_after=0, decode_address=address)
        call = cluster.inference.Generate(Request(request_id="lost", prompt="x"), timeout=TIMEOUT_S)
        cluster.wait_for(lambda: cluster.sent(StreamLost, "lost"))
        assert cluster.sent(StreamLost, "lost")[0].worker.name == "d"
        call.cancel()


def test_a_coordinator_that_comes_back(model_dir: Path, tokenizer: Tokenizer) -> None:
    """What runs goes on without it; what waits asks again; the front says that it does not serve meanwhile."""
    ids = tuple(tokenizer.encode("hello world the answer is four").ids)
    with ScriptedCluster(model_dir) as cluster:
        health = health_pb2_grpc.HealthStub(cluster.channel)
        check = health_pb2.HealthCheckRequest(service="baton.v1.Inference")
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(check).status == serving
        cluster.scripts["running"] = Script(token_ids=ids, pause_s=0.03)
        cluster.scripts["waiting"] = Script(token_ids=ids, is_ignored=True)
        running = cluster.inference.Generate(Request(request_id="running", prompt="x"), timeout=TIMEOUT_S)
        replies = [next(running)]
        waiting = cluster.inference.Generate(Request(request_id="waiting", prompt="x"), timeout=TIMEOUT_S)
        cluster.wait_for(lambda: cluster.sent(Submit, "waiting"))
        cluster.call(cluster.stop_coordinator())
        cluster.wait_for(lambda: health.Check(check).status != serving)
        replies.extend(running)
        assert _token_ids(replies) == list(ids)
        cluster.scripts["waiting"] = Script(token_ids=ids)
        cluster.epoch = 2
        cluster.call(cluster.start_coordinator())
        assert _token_ids(list(waiting)) == list(ids)
        hellos = [message for message in cluster.seen.messages if isinstance(message, FrontHello)]
        assert len(hellos) == 2 and hellos[-1].live == (), "what has never been placed is not announced"
        assert len(cluster.sent(Submit, "waiting")) == 2, "but submitted again"
        assert health.Check(check).status == serving


def test_a_coordinator_that_stays_away(model_dir: Path) -> None:
    with ScriptedCluster(model_dir, RequestLimits(coordinator_lost_ns=100_000_000)) as cluster:
        cluster.call(cluster.stop_coordinator())
        error = _fails(cluster, Request(prompt="x"))
        assert error.code() is Code.UNAVAILABLE and "coordinator" in error.details()
        cluster.call(cluster.start_coordinator())


@pytest.mark.parametrize("outcome", [Outcome.WORKER_LOST, Outcome.TRANSFER_FAILED, Outcome.INTERNAL])
def test_what_the_coordinator_ends(cluster: ScriptedCluster, outcome: Outcome) -> None:
    request_id = f"ends-{outcome.value}"
    end = EndRequest(epoch=1, request_id=request_id, outcome=outcome, reason="attempts used up")
    cluster.scripts[request_id] = Script(refuse=end)
    error = _fails(cluster, Request(request_id=request_id, prompt="x"))
    assert error.code() is (Code.INTERNAL if outcome is Outcome.INTERNAL else Code.ABORTED)
    assert error.details() == f"{outcome.value}: attempts used up"


def test_refusals(cluster: ScriptedCluster) -> None:
    for name, outcome, code, retry_after_ms, cause in (
        ("full", Outcome.REJECTED_OVERLOAD, Code.RESOURCE_EXHAUSTED, 250, RefusalCause.QUOTA),
        ("never", Outcome.REJECTED_INVALID, Code.INVALID_ARGUMENT, None, RefusalCause.INVALID),
        ("elsewhere", Outcome.REJECTED_OVERLOAD, Code.RESOURCE_EXHAUSTED, 250, None),
    ):
        refused = Refused(
            request_id=name, outcome=outcome, reason="because", retry_after_ms=retry_after_ms, cause=cause
        )
        cluster.scripts[name] = Script(refuse=refused)
        error = _fails(cluster, Request(request_id=name, prompt="x"))
        assert error.code() is code and "because" in error.details()
        trailers = dict(error.trailing_metadata())
        assert trailers.get("baton-retry-after-ms") == (None if retry_after_ms is None else str(retry_after_ms))
        assert trailers.get("baton-refusal-cause") == (None if cause is None else cause.value)


# ---- ends that clients bring about ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_client_that_leaves(cluster: ScriptedCluster, phase: str) -> None:
    request_id = f"leaves-{phase}"
    script = Script(token_ids=(9,) * 200, pause_s=0.02)
    if phase == "queued":
        script = Script(is_ignored=True)
    if phase == "prefill":
        script = Script(token_ids=(9,) * 200, hold_after=0, has_prefill=False)
    cluster.scripts[request_id] = script
    call = cluster.inference.Generate(Request(request_id=request_id, prompt="x"), timeout=TIMEOUT_S)
    if phase == "decode":
        next(call)
    else:
        cluster.wait_for(lambda: cluster.sent(Submit, request_id))
    call.cancel()
    cluster.wait_for(lambda: cluster.sent(CancelRequest, request_id))
    assert cluster.sent(CancelRequest, request_id)[0].outcome is Outcome.CANCELLED
    if phase == "decode":
        cluster.wait_for(lambda: _forgotten(cluster, request_id) == {"p", "d"})


def _forgotten(cluster: ScriptedCluster, request_id: str) -> set[str]:
    return {
        name
        for name, request in cluster.seen.requests
        if isinstance(request, Forget) and request.attempt.request_id == request_id
    }


def test_a_deadline_ends_the_request_everywhere(cluster: ScriptedCluster) -> None:
    cluster.scripts["deadline"] = Script(token_ids=(9,) * 200, pause_s=0.02)
    with pytest.raises(grpc.RpcError) as raised:
        _generate(cluster, Request(request_id="deadline", prompt="x"), timeout_s=0.3)
    assert raised.value.code() is Code.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    cluster.wait_for(lambda: cluster.sent(CancelRequest, "deadline"))
    (submit,) = cluster.sent(Submit, "deadline")
    assert submit.deadline_ms is not None and 0 < submit.deadline_ms <= 300


def test_a_timeout_ends_the_request_with_all_that_is_known(cluster: ScriptedCluster) -> None:
    cluster.scripts["timeout"] = Script(token_ids=(9,) * 200, pause_s=0.02)
    replies, error = _cut(cluster, Request(request_id="timeout", prompt="x", timeout_ms=300))
    assert error.code() is Code.DEADLINE_EXCEEDED
    assert [reply.HasField("done") for reply in replies] == [False] * (len(replies) - 1) + [True]
    done, ids = replies[-1].done, _token_ids(replies)
    assert done.outcome == inference_pb2.OUTCOME_DEADLINE_EXCEEDED
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (1, len(ids))
    assert (done.prefill_worker, done.decode_worker, done.num_attempts) == ("p", "d", 1)
    assert done.seed == cluster.seen.bodies["timeout"].sampling.seed
    assert (done.timeline.queued_ms, done.timeline.reserved_ms, done.timeline.prefill_ms) == (1.5, 2.5, 3.5)
    assert done.timeline.HasField("first_token_ms") and done.kv.bytes == 100
    (submit,) = cluster.sent(Submit, "timeout")
    assert submit.deadline_ms is not None and 0 < submit.deadline_ms <= 300


def test_what_was_never_placed_has_no_numbers_of_workers(cluster: ScriptedCluster) -> None:
    cluster.scripts["unplaced"] = Script(is_ignored=True)
    replies, error = _cut(cluster, Request(request_id="unplaced", prompt="x", timeout_ms=50))
    assert error.code() is Code.DEADLINE_EXCEEDED
    (last,) = replies
    assert (last.request_id, last.done.outcome) == ("unplaced", inference_pb2.OUTCOME_DEADLINE_EXCEEDED)
    assert (last.done.usage.prompt_tokens, last.done.num_attempts, last.done.decode_worker) == (1, 0, "")
    assert not last.done.usage.HasField("cached_tokens") and not last.done.kv.HasField("bytes")
    assert not last.done.timeline.ListFields()


def test_a_deadline_in_a_lifetime_is_none(cluster: ScriptedCluster) -> None:
    """Some clients set one that is meant as no limit, and the coordinator is told of deadlines in 32 bits."""
    for number, timeout_s in enumerate((2.0**32 / 1000, 1e9)):
        request_id = f"lifetime-{number}"
        replies = _generate(cluster, Request(request_id=request_id, prompt="hi"), timeout_s=timeout_s)
        assert replies[-1].HasField("done")
        assert cluster.sent(Submit, request_id)[0].deadline_ms is None


def test_max_latency_ends_a_request_that_waits(cluster: ScriptedCluster) -> None:
    cluster.scripts["latency"] = Script(is_ignored=True)
    error = _fails(cluster, Request(request_id="latency", prompt="x", max_latency_ms=50))
    assert error.code() is Code.RESOURCE_EXHAUSTED and "max_latency_ms" in error.details()
    cluster.wait_for(lambda: cluster.sent(CancelRequest, "latency"))


def test_abort(cluster: ScriptedCluster) -> None:
    cluster.scripts["abort"] = Script(token_ids=(9,) * 200, pause_s=0.02)
    call = cluster.inference.Generate(Request(request_id="abort", prompt="x"), timeout=TIMEOUT_S)
    next(call)
    assert cluster.inference.Abort(inference_pb2.AbortRequest(request_id="abort")).found
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    assert raised.value.code() is Code.CANCELLED  # type: ignore[attr-defined]
    assert "aborted" in raised.value.details()  # type: ignore[attr-defined]
    assert not cluster.inference.Abort(inference_pb2.AbortRequest(request_id="abort")).found


def test_an_id_is_used_once_at_a_time(cluster: ScriptedCluster) -> None:
    cluster.scripts["same"] = Script(token_ids=(9,) * 200, pause_s=0.02)
    call = cluster.inference.Generate(Request(request_id="same", prompt="x"), timeout=TIMEOUT_S)
    next(call)
    error = _fails(cluster, Request(request_id="same", prompt="y"))
    assert error.code() is Code.ALREADY_EXISTS and "'same'" in error.details()
    assert next(call).request_id == "same", "the first one goes on"
    call.cancel()
    cluster.wait_for(lambda: cluster.sent(CancelRequest, "same"))
    cluster.scripts["same"] = Script(token_ids=(9, 10))
    assert _token_ids(_generate(cluster, Request(request_id="same", prompt="x"))) == [9, 10]


def test_a_client_that_does_not_read(cluster: ScriptedCluster) -> None:
    """What waits for it is bounded, and it holds up nobody else."""
    cluster.scripts["deaf"] = Script(token_ids=(9,) * 12_000, logprob=-0.5)
    request = Request(request_id="deaf", prompt="x", sampling=Sampling(logprobs=2))
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**14))
    with grpc.insecure_channel(cluster.address, options=narrow) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=TIMEOUT_S)
        cluster.wait_for(lambda: cluster.sent(CancelRequest, "deaf"))
        assert "tokens behind" in cluster.sent(CancelRequest, "deaf")[0].reason
        assert _generate(cluster, Request(prompt="x"))
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.code() is Code.CANCELLED  # type: ignore[attr-defined]


def test_many_at_once(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world the answer is four").ids
    results: list[list[int]] = []

    def run(index: int) -> None:
        cluster.scripts[f"many-{index}"] = Script(token_ids=tuple(ids), pause_s=0.001)
        results.append(_token_ids(_generate(cluster, Request(request_id=f"many-{index}", prompt="x"))))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert results == [ids] * 32


def test_a_front_that_stops_sends_its_clients_elsewhere(model_dir: Path) -> None:
    with ScriptedCluster(model_dir) as cluster:
        cluster.scripts["open"] = Script(token_ids=(9,) * 200, pause_s=0.02)
        call = cluster.inference.Generate(Request(request_id="open", prompt="x"), timeout=TIMEOUT_S)
        next(call)
        cluster.call(cluster.stop_front())
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.code() is Code.UNAVAILABLE  # type: ignore[attr-defined]
        cluster.wait_for(lambda: cluster.sent(CancelRequest, "open"))


# ---- bad input ------------------------------------------------------------------------------------------------------


def _chat(role: str, content: str = "x") -> inference_pb2.ChatMessages:
    return inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role=role, content=content)])


def _sampled(**fields: Any) -> Request:
    return Request(prompt="x", sampling=Sampling(**fields))


BAD_REQUESTS = {
    "no prompt": (Request(), "prompt: one of prompt, token_ids and chat"),
    "empty prompt": (Request(prompt=""), "prompt: must not be empty"),
    "no token ids": (Request(token_ids=inference_pb2.TokenIds()), "token_ids: must not be empty"),
    "no chat": (Request(chat=inference_pb2.ChatMessages()), "chat.messages: must not be empty"),
    "unknown role": (Request(chat=_chat("robot")), "chat.messages[0].role: must be one of"),
    "refused by the template": (Request(chat=_chat("assistant")), "the assistant cannot speak first"),
    "too many token ids": (
        Request(token_ids=inference_pb2.TokenIds(ids=[5] * MAX_MODEL_TOKENS)),
        f"token_ids: {MAX_MODEL_TOKENS} tokens do not fit the model's context of {MAX_MODEL_TOKENS}",
    ),
    "too long prompt": (Request(prompt="xy " * 600), "tokens do not fit the model's context"),
    "far too long prompt": (Request(prompt="x" * 1_000_000), "characters cannot fit the model's context"),
    "too long chat": (Request(chat=_chat("user", "xy " * 600)), "chat: "),
    "token id out of the vocabulary": (
        Request(token_ids=inference_pb2.TokenIds(ids=[5, 300])),
        "token_ids.ids[1]: token id 300 is outside the vocabulary (0..299)",
    ),
    "huge token id": (Request(token_ids=inference_pb2.TokenIds(ids=[2**32 - 1])), "outside the vocabulary"),
    "negative temperature": (_sampled(temperature=-1.0), "sampling.temperature: must be in [0, 100], got -1"),
    "NaN temperature": (_sampled(temperature=math.nan), "sampling.temperature: must be in [0, 100], got nan"),
    "infinite temperature": (_sampled(temperature=math.inf), "sampling.temperature"),
    "top_p of nothing": (_sampled(top_p=0.0), "sampling.top_p: must be in (0, 1]"),
    "NaN top_p": (_sampled(top_p=math.nan), "sampling.top_p"),
    "negative min_p": (_sampled(min_p=-0.5), "sampling.min_p"),
    "presence_penalty": (_sampled(presence_penalty=3.0), "sampling.presence_penalty"),
    "frequency_penalty": (_sampled(frequency_penalty=-math.inf), "sampling.frequency_penalty"),
    "repetition_penalty": (_sampled(repetition_penalty=0.0), "sampling.repetition_penalty"),
    "no tokens at all": (_sampled(max_tokens=0), "sampling.max_tokens: must be at least 1"),
    "min_tokens": (_sampled(max_tokens=2, min_tokens=3), "sampling.min_tokens"),
    "logprobs": (_sampled(logprobs=21), "sampling.logprobs"),
    "num_choices": (_sampled(num_choices=17), "sampling.num_choices: must be between 1 and 16, got 17"),
    "no choice": (_sampled(num_choices=0), "sampling.num_choices"),
    "prompt_logprobs": (_sampled(prompt_logprobs=21), "sampling.prompt_logprobs: must be between 0 and 20, got 21"),
    "stop_token_ids": (_sampled(stop_token_ids=[300]), "sampling.stop_token_ids: token id 300"),
    "many stop_token_ids": (_sampled(stop_token_ids=[1] * 65), "sampling.stop_token_ids: holds 65 ids"),
    "logit_bias": (_sampled(logit_bias={300: 1.0}), "sampling.logit_bias: token id 300"),
    "NaN logit_bias": (_sampled(logit_bias={3: math.nan}), "sampling.logit_bias[3]"),
    "empty stop": (Request(prompt="x", stop=["a", ""]), "stop[1]: must have 1 to 256 characters"),
    "long stop": (Request(prompt="x", stop=["a" * 257]), "stop[0]"),
    "many stops": (Request(prompt="x", stop=["a"] * 17), "stop: has 17 texts"),
    "request_id": (Request(request_id="a b", prompt="x"), "request_id: "),
    "long request_id": (Request(request_id="a" * 129, prompt="x"), "request_id: "),
    "timeout_ms": (Request(prompt="x", timeout_ms=2**32 - 1), "timeout_ms: must be at most 2592000000 (30 days)"),
    "priority": (Request(prompt="x", priority=101), "priority: must be between"),
    "tenant": (Request(prompt="x", tenant="t" * 129), "tenant: has 129 characters"),
    "cache_salt": (Request(prompt="x", cache_salt="t" * 129), "cache_salt: has 129 characters"),
    "adapter": (Request(prompt="x", adapter="lora"), "adapter: 'lora'"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_input_is_refused_before_anything_happens(cluster: ScriptedCluster, name: str) -> None:
    request, message = BAD_REQUESTS[name]
    before = len(cluster.seen.messages)
    error = _fails(cluster, request)
    assert error.code() is Code.INVALID_ARGUMENT, error.details()
    assert message in error.details()
    assert not [item for item in cluster.seen.messages[before:] if isinstance(item, Submit)]


def test_another_model_is_not_found(cluster: ScriptedCluster) -> None:
    error = _fails(cluster, Request(model="other", prompt="x"))
    assert error.code() is Code.NOT_FOUND and "'other'" in error.details() and "'tiny'" in error.details()
    assert _generate(cluster, Request(model="tiny", prompt="x"))
    assert _fails(cluster, Request(model="x" * 100_000, prompt="x")).code() is Code.NOT_FOUND


def test_an_error_that_quotes_much_keeps_its_status(cluster: ScriptedCluster) -> None:
    error = _fails(cluster, Request(model="😀" * 5000, prompt="hi"))
    assert error.code() is Code.NOT_FOUND and "😀" * 100 in error.details()


def _field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


NOT_UTF8 = b"abc\xff\xfe"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_field(3, NOT_UTF8), "prompt: is not valid UTF-8"),
        (_field(1, NOT_UTF8) + _field(3, b"x"), "request_id: is not valid UTF-8"),
        (_field(3, b"x") + _field(7, b"ok") + _field(7, NOT_UTF8), "stop: is not valid UTF-8"),
        (_field(5, _field(1, _field(1, b"user") + _field(2, NOT_UTF8))), "chat.messages.content: is not valid UTF-8"),
        (_field(3, "\ud800".encode("utf-8", "surrogatepass")), "prompt: is not valid UTF-8"),
        (_field(3, b"x")[:-1], "request: is not a baton.v1.GenerateRequest message"),
        (b"\xff\xff\xff", "request: is not a baton.v1.GenerateRequest message"),
        (_field(3, b"x") + _field(4, b"\x0a\x01\x05"), "exactly one of prompt, token_ids, chat must be set"),
        (_field(5, b"") + _field(3, b"x"), "got prompt and chat"),
    ],
)
def test_malformed_messages(cluster: ScriptedCluster, data: bytes, message: str) -> None:
    error = _fails(cluster, data)
    assert error.code() is Code.INVALID_ARGUMENT, error.details()
    assert message in error.details()


def test_malformed_abort(cluster: ScriptedCluster) -> None:
    assert _fails(cluster, _field(1, NOT_UTF8), "Abort").code() is Code.INVALID_ARGUMENT
    error = _fails(cluster, b"", "Abort")
    assert error.code() is Code.INVALID_ARGUMENT and "request_id" in error.details()


# ---- the other services ---------------------------------------------------------------------------------------------


def test_model_info(cluster: ScriptedCluster) -> None:
    info = cluster.inference.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert (info.model, info.max_model_tokens, info.vocab_size, info.block_size) == ("tiny", MAX_MODEL_TOKENS, 300, 16)
    assert (list(info.eos_token_ids), info.dtype, info.has_chat_template) == ([0], "bfloat16", True)
    assert len(info.fingerprint) == 32


def test_admin_is_answered_by_the_coordinator(cluster: ScriptedCluster) -> None:
    assert cluster.admin.GetStatus(admin_pb2.GetStatusRequest()).cluster == "scripted"
    assert cluster.admin.GetLeases(admin_pb2.GetLeasesRequest()).leases[0].lease_id == 5


def test_reflection_lists_the_services(cluster: ScriptedCluster) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in reply.list_services_response.service}
    assert {"baton.v1.Inference", "baton.v1.Admin", "grpc.health.v1.Health"} <= names


def test_a_port_in_use(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ["--coordinator", "127.0.0.1:1", "--model", str(model_dir), "--port", port]
        done = subprocess.run(
            [sys.executable, "-m", "cluster.front", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and "Traceback" not in done.stderr


def test_a_front_needs_no_torch() -> None:
    code = "import sys, cluster.front.server; assert not {'torch', 'ray', 'numpy'} & set(sys.modules), 'too much'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
