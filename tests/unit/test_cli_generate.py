"""`baton generate` against a front that the test plays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2
from tests.support.cli_scripted import ScriptedFront, answer, baton, serving


def without_id(complaint: str) -> str:
    return re.sub(r" \(request \w+\)", "", complaint)


def test_the_answer_goes_to_stdout_and_the_summary_to_stderr(tmp_path: Path) -> None:
    with serving(ScriptedFront(answer)) as address:
        said = baton("generate", "--chat", "Hi", "--address", address, home=tmp_path)
    assert (said.exit_code, said.stdout) == (0, "Hello world\n")
    assert said.stderr == (
        "stop; 20 prompt tokens (16 cached), 3 written; prefill-0 -> decode-0; 3.0 MiB of KV over shm; "
        "first token after 40 ms; 20.0 tokens/s; request r1\n"
    )


def test_json_is_one_object_with_everything(tmp_path: Path) -> None:
    with serving(ScriptedFront(answer)) as address:
        said = baton("generate", "--prompt", "Hi", "--json", "-a", address, home=tmp_path)
    assert (said.exit_code, said.stderr) == (0, "")
    assert json.loads(said.stdout) == {
        "request_id": "r1",
        "text": "Hello world",
        "token_ids": [11, 12, 13],
        "outcome": "stop",
        "seed": 7,
        "num_attempts": 1,
        "usage": {"prompt_tokens": 20, "cached_tokens": 16, "completion_tokens": 3},
        "workers": {"prefill": "prefill-0", "decode": "decode-0"},
        "kv": {"bytes": 3 * 2**20, "transport": "shm"},
        "route": {"taken": None, "reason": None},
        "timeline_ms": {
            "queued": 0.5,
            "reserved": 1.5,
            "prefill": 30.0,
            "push": 2.0,
            "first_token": 40.0,
            "decode": 100.0,
        },
    }


def test_what_did_not_happen_is_null(tmp_path: Path) -> None:
    def local(request: inference_pb2.GenerateRequest, context: object) -> Iterator[inference_pb2.GenerateResponse]:
        done = inference_pb2.Done(
            outcome=inference_pb2.OUTCOME_LENGTH,
            decode_worker="decode-0",
            timeline=inference_pb2.Timeline(queued_ms=0.0, first_token_ms=5.0),
        )
        yield inference_pb2.GenerateResponse(request_id="r", token_ids=[3], text="x", done=done)

    with serving(ScriptedFront(local)) as address:
        said = json.loads(baton("generate", "--prompt", "Hi", "--json", "-a", address, home=tmp_path).stdout)
    assert said["outcome"] == "length"
    assert said["workers"] == {"prefill": None, "decode": "decode-0"}
    assert said["kv"] == {"bytes": None, "transport": None}
    assert said["usage"] == {"prompt_tokens": None, "cached_tokens": None, "completion_tokens": 1}
    assert said["timeline_ms"] == {
        "queued": 0.0,
        "reserved": None,
        "prefill": None,
        "push": None,
        "first_token": 5.0,
        "decode": None,
    }


def test_options_reach_the_request(tmp_path: Path) -> None:
    front = ScriptedFront(answer)
    options = [
        "--max-tokens",
        "9",
        "--temperature",
        "0.5",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
        "--seed",
        "18446744073709551615",
        "--ignore-eos",
        "--tenant",
        "a",
        "--priority",
        "-3",
        "--max-latency",
        "700",
    ]
    with serving(front) as address:
        baton("generate", "--chat", "Hi", *options, "--stop", "a", "--stop", "b", "-a", address, home=tmp_path)
        baton("generate", "--token-ids", "1, 2,3", "-a", address, home=tmp_path)
    first, second = front.requests
    assert [(message.role, message.content) for message in first.chat.messages] == [("user", "Hi")]
    sampling = first.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed, sampling.ignore_eos) == (9, 40, 2**64 - 1, True)
    assert (sampling.temperature, round(sampling.top_p, 6)) == (0.5, 0.9)
    assert list(first.stop) == ["a", "b"]
    assert (first.tenant, first.priority, first.max_latency_ms) == ("a", -3, 700)
    assert list(second.token_ids.ids) == [1, 2, 3]
    assert not second.sampling.HasField("max_tokens") and not second.sampling.HasField("seed")


def test_every_sampling_parameter_has_an_option(tmp_path: Path) -> None:
    front = ScriptedFront(answer)
    options = {
        "--min-tokens": "3",
        "--choices": "2",
        "--min-p": "0.25",
        "--presence-penalty": "-1.5",
        "--frequency-penalty": "0.5",
        "--repetition-penalty": "1.25",
        "--stop-token-ids": "7, 9",
        "--logprobs": "0",
        "--prompt-logprobs": "5",
        "--max-tokens": "9",
        "--temperature": "0.5",
        "--top-k": "40",
        "--top-p": "0.75",
        "--seed": "1",
    }
    arguments = [part for option in options.items() for part in option]
    biases = ["--logit-bias", "13=-2.5", "--logit-bias", "4=100", "--ignore-eos"]
    with serving(front) as address:
        baton("generate", "-p", "Hi", *arguments, *biases, "--json", "-a", address, home=tmp_path)
    sampling = front.requests[0].sampling
    assert sampling == inference_pb2.SamplingParams(
        min_tokens=3,
        num_choices=2,
        min_p=0.25,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        stop_token_ids=[7, 9],
        logprobs=0,
        prompt_logprobs=5,
        logit_bias={13: -2.5, 4: 100.0},
        max_tokens=9,
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        seed=1,
        ignore_eos=True,
    )
    assert sorted(field.name for field, _ in sampling.ListFields()) == sorted(sampling.DESCRIPTOR.fields_by_name)


def three(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    """The second of three answers is complete first; all have log-probabilities, and so has the prompt."""
    Reply, entry = inference_pb2.GenerateResponse, inference_pb2.TokenLogprobs
    top = [inference_pb2.TopLogprob(token_id=1, logprob=-0.25)]
    scores = inference_pb2.PromptLogprobs(position=1, token_ids=[5, 6], logprobs=[entry(logprob=-4), entry(top=top)])
    yield Reply(request_id="r", prompt_logprobs=scores)
    yield Reply(request_id="r", token_ids=[1], text="one ", logprobs=[entry(logprob=-0.25, top=top)])
    yield Reply(choice=1, token_ids=[2, 3], text="two", finish=inference_pb2.OUTCOME_STOP)
    yield Reply(choice=2, token_ids=[9], text="th")
    if request.sampling.seed:
        context.abort(grpc.StatusCode.ABORTED, "worker_lost: attempts used up")
    yield Reply(position=1, token_ids=[4], text="more", finish=inference_pb2.OUTCOME_LENGTH)
    done = inference_pb2.Done(outcome=inference_pb2.OUTCOME_LENGTH, decode_worker="decode-0")
    yield Reply(choice=2, position=1, text="ree", finish=inference_pb2.OUTCOME_STOP, done=done)


def test_several_answers_are_printed_as_they_are_completed(tmp_path: Path) -> None:
    arguments = ("generate", "-p", "Hi", "--choices", "3")
    with serving(ScriptedFront(three)) as address:
        said = baton(*arguments, "-a", address, home=tmp_path)
        failed = baton(*arguments, "--seed", "1", "-a", address, home=tmp_path)
    assert said.stdout == "--- answer 2: stop\ntwo\n--- answer 1: length\none more\n--- answer 3: stop\nthree\n"
    assert said.exit_code == 0 and said.stderr.startswith("length; ")
    assert failed.stdout == "--- answer 2: stop\ntwo\n--- answer 1: unfinished\none \n--- answer 3: unfinished\nth\n"
    assert failed.exit_code == 1 and without_id(failed.stderr) == "baton: worker lost: attempts used up\n"


def test_json_has_all_answers_and_log_probabilities(tmp_path: Path) -> None:
    with serving(ScriptedFront(three)) as address:
        said = baton("generate", "-p", "Hi", "--choices", "3", "--json", "-a", address, home=tmp_path)
    told = json.loads(said.stdout)
    top = [{"token_id": 1, "logprob": -0.25}]
    assert (told["text"], told["token_ids"], told["outcome"]) == ("one more", [1, 4], "length")
    assert [choice["text"] for choice in told["choices"]] == ["one more", "two", "three"]
    assert [choice["outcome"] for choice in told["choices"]] == ["length", "stop", "stop"]
    assert told["choices"][1] == {"text": "two", "token_ids": [2, 3], "outcome": "stop"}
    assert told["logprobs"] == [{"token_id": 1, "logprob": -0.25, "top": top}]
    assert told["prompt_logprobs"] == [
        {"token_id": 5, "logprob": -4.0, "top": []},
        {"token_id": 6, "logprob": 0.0, "top": top},
    ]
    assert told["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give exactly one of --prompt, --chat and --token-ids"),
        (["--prompt", "a", "--chat", "b"], "not --prompt and --chat"),
        (["--token-ids", "1,x"], "--token-ids: 'x' is not a token id"),
        (["--token-ids", "4294967296"], "--token-ids: '4294967296' is not a token id"),
        (["--token-ids", ""], "--token-ids: '' is not a token id"),
        (["--prompt", ""], "--prompt: must not be empty"),
        (["--chat", ""], "--chat: must not be empty"),
        (["--chat", "-"], "--chat: must not be empty"),
        (["--prompt", "a", "--seed", "-1"], "--seed: must be between 0 and 18446744073709551615, got -1"),
        (["--prompt", "a", "--seed", str(2**64)], "--seed: must be between 0 and 18446744073709551615, got 184467440"),
        (["--prompt", "a", "--choices", "-1"], "--choices: must be between 1 and 16, got -1"),
        (["--prompt", "a", "--choices", "17"], "--choices: must be between 1 and 16, got 17"),
        (["--prompt", "a", "--min-tokens", "-1"], "--min-tokens: must be between 0 and 4294967295, got -1"),
        (["--prompt", "a", "--logprobs", "21", "--json"], "--logprobs: must be between 0 and 20, got 21"),
        (["--prompt", "a", "--stop-token-ids", "1;2"], "--stop-token-ids: '1;2' is not a token id"),
        (["--prompt", "a", "--logit-bias", "x=1"], "--logit-bias: 'x' is not a token id"),
        (["--prompt", "a", "--logit-bias", "5"], "--logit-bias: '' is not a number; expected an id and a number"),
        (["--prompt", "a", "--logprobs", "2"], "--logprobs: only --json shows log-probabilities"),
        (["--prompt", "a", "--prompt-logprobs", "2"], "--prompt-logprobs: only --json"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens: must be between 1 and 4294967295, got 0"),
        (["--prompt", "a", "--top-k", "-1"], "--top-k: must be between 0 and 4294967295, got -1"),
        (["--prompt", "a\udcff"], "--prompt: the text is not valid UTF-8"),
        (["--chat", "a\udcff"], "--chat: the text is not valid UTF-8"),
        (["--prompt", "a", "--temperature", "warm"], "--temperature"),
        (["--prompt", "a", "--timeout", "0"], "--timeout: 0 is not a number of seconds above 0 and at most 2592000"),
        (["--prompt", "a", "--timeout", "-1"], "--timeout: -1 is not"),
        (["--prompt", "a", "--timeout", "nan"], "--timeout: nan is not"),
        (["--prompt", "a", "--timeout", "inf"], "--timeout: inf is not"),
        (["--prompt", "a", "--timeout", "2592001"], "--timeout: 2.592e+06 is not"),
        (["--prompt", "a", "--timeout", "1e10"], "--timeout: 1e+10 is not"),
        (["--prompt", "a", "--timeout", "1e300"], "--timeout: 1e+300 is not"),
        (["--prompt", "a", "--frobnicate"], "--frobnicate"),
    ],
)
def test_invalid_input_is_refused_before_anyone_is_asked(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    front = ScriptedFront(answer)
    with serving(front) as address:
        said = baton("generate", *arguments, "-a", address, home=tmp_path)
    assert said.exit_code == 2
    assert complaint in said.stderr and "Traceback" not in said.stderr
    assert not front.requests and bool(said.stdout) == ("--json" in arguments)


@pytest.mark.parametrize(
    ("code", "exit_code", "outcome"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2, "rejected_invalid"),
        (grpc.StatusCode.NOT_FOUND, 3, None),
        (grpc.StatusCode.UNAVAILABLE, 3, None),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 4, "rejected_overload"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 4, "deadline_exceeded"),
        (grpc.StatusCode.ABORTED, 1, "worker_lost"),
        (grpc.StatusCode.INTERNAL, 1, "internal"),
        (grpc.StatusCode.CANCELLED, 1, "cancelled"),
    ],
)
def test_a_failed_request_has_its_exit_code(
    tmp_path: Path, code: grpc.StatusCode, exit_code: int, outcome: str | None
) -> None:
    def failing(request: object, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(request_id="r1", token_ids=[11], text="Hel")
        context.set_trailing_metadata((("baton-retry-after-ms", "250"),))
        context.abort(code, "for a reason")

    with serving(ScriptedFront(failing)) as address:
        said = baton("generate", "--prompt", "a", "-a", address, home=tmp_path)
        with_json = baton("generate", "--prompt", "a", "--json", "-a", address, home=tmp_path)
    assert said.exit_code == with_json.exit_code == exit_code
    assert said.stdout == "Hel" and without_id(said.stderr).endswith("for a reason (try again in 250 ms)\n")
    assert json.loads(with_json.stdout) == {
        "request_id": "r1",
        "text": "Hel",
        "token_ids": [11],
        "outcome": outcome,
        "seed": None,
        "num_attempts": None,
        "usage": {"prompt_tokens": None, "cached_tokens": None, "completion_tokens": 1},
        "workers": {"prefill": None, "decode": None},
        "kv": {"bytes": None, "transport": None},
        "route": {"taken": None, "reason": None},
        "timeline_ms": {
            "queued": None,
            "reserved": None,
            "prefill": None,
            "push": None,
            "first_token": None,
            "decode": None,
        },
        "error": without_id(said.stderr).removeprefix("baton: ").rstrip("\n"),
    }


@pytest.mark.parametrize(
    ("code", "details", "told"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "the deadline passed"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)", "the deadline passed"),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "deadline_exceeded: the client's deadline was reached",
            "the client's deadline was reached",
        ),
        (grpc.StatusCode.ABORTED, "worker_lost: attempts used up", "worker lost: attempts used up"),
        (grpc.StatusCode.ABORTED, "transfer_failed: attempts used up", "transfer failed: attempts used up"),
        (grpc.StatusCode.UNAVAILABLE, "this front is shutting down", "unavailable: this front is shutting down"),
        (grpc.StatusCode.INVALID_ARGUMENT, "rejected_invalid: too long", "rejected invalid: too long"),
        (grpc.StatusCode.INVALID_ARGUMENT, "cache_salt: too long", "invalid argument: cache_salt: too long"),
        (grpc.StatusCode.INVALID_ARGUMENT, "priority: too high", "--priority: too high"),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.temperature: must be in [0, 100], got -1.0",
            "--temperature: must be in [0, 100], got -1.0",
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "sampling.num_choices: must be", "--choices: must be"),
        (grpc.StatusCode.INVALID_ARGUMENT, "stop[1]: must have 1", "--stop (number 2): must have 1"),
        (grpc.StatusCode.INVALID_ARGUMENT, "stop: has 17 texts", "--stop: has 17 texts"),
        (grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids[0]: token id", "--token-ids (number 1): token id"),
        (grpc.StatusCode.INVALID_ARGUMENT, "sampling.logit_bias[300]: must", "--logit-bias (token 300): must"),
        (grpc.StatusCode.INVALID_ARGUMENT, "chat: this model has no", "--chat: this model has no"),
    ],
)
def test_what_failed_is_said_once(tmp_path: Path, code: grpc.StatusCode, details: str, told: str) -> None:
    def failing(request: object, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        context.abort(code, details)
        yield inference_pb2.GenerateResponse()

    with serving(ScriptedFront(failing)) as address:
        said = baton("generate", "--prompt", "a", "-a", address, home=tmp_path).stderr
    assert without_id(said) == f"baton: {told}\n"
    was_taken = code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED)
    assert ("(request " in said) is was_taken, "what a journal can explain is said with its id"


def test_json_has_the_outcome_that_the_front_names(tmp_path: Path) -> None:
    def failing(request: object, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        context.abort(grpc.StatusCode.ABORTED, "transfer_failed: attempts used up")
        yield inference_pb2.GenerateResponse()

    with serving(ScriptedFront(failing)) as address:
        told = json.loads(baton("generate", "--prompt", "a", "--json", "-a", address, home=tmp_path).stdout)
    assert (told["outcome"], told["text"]) == ("transfer_failed", "")
    assert re.fullmatch("[0-9a-f]{32}", told["request_id"]), "the client's own, as the front has said nothing else"


def test_a_refusal_of_the_options_is_json_too(tmp_path: Path) -> None:
    said = baton("generate", "--json", "--token-ids", "x", "-a", "127.0.0.1:1", home=tmp_path)
    assert said.exit_code == 2 and list(json.loads(said.stdout)) == ["error"]


def test_attempts_are_mentioned_where_one_was_not_enough(tmp_path: Path) -> None:
    def second_time(
        request: inference_pb2.GenerateRequest, context: object
    ) -> Iterator[inference_pb2.GenerateResponse]:
        done = inference_pb2.Done(outcome=inference_pb2.OUTCOME_STOP, decode_worker="decode-0", num_attempts=2)
        yield inference_pb2.GenerateResponse(request_id="r", token_ids=[3], text="x", done=done)

    with serving(ScriptedFront(second_time)) as address:
        said = baton("generate", "--prompt", "a", "-a", address, home=tmp_path)
    assert said.stderr.startswith("stop after 2 attempts; ")


@pytest.mark.parametrize(
    ("stdin", "text"), [(b"Hi\n", "Hi"), (b"Hi\r\n", "Hi"), (b"\nHi \n\n", "\nHi \n"), ("é".encode(), "é")]
)
def test_a_dash_reads_stdin(tmp_path: Path, stdin: bytes, text: str) -> None:
    front = ScriptedFront(answer)
    with serving(front) as address:
        baton("generate", "--prompt", "-", "-a", address, home=tmp_path, stdin=stdin)
        baton("generate", "--chat", "-", "-a", address, home=tmp_path, stdin=stdin)
    prompt, chat = front.requests
    assert prompt.prompt == text and prompt.WhichOneof("input") == "prompt"
    assert [message.content for message in chat.chat.messages] == [text]


def test_stdin_that_is_no_text_or_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.generate.MESSAGE_LIMIT_BYTES", 4)
    binary = baton("generate", "--prompt", "-", home=tmp_path, stdin=b"\xff")
    assert binary.exit_code == 2 and "--prompt: the text is not valid UTF-8" in binary.stderr
    long = baton("generate", "--chat", "-", home=tmp_path, stdin=b"12345")
    assert long.exit_code == 2 and "--chat: stdin has more than 4 bytes" in long.stderr


def test_json_of_a_cut_answer_has_what_the_front_knew(tmp_path: Path) -> None:
    def cut(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        done = inference_pb2.Done(
            outcome=inference_pb2.OUTCOME_DEADLINE_EXCEEDED,
            usage=inference_pb2.Usage(prompt_tokens=20, cached_tokens=0, completion_tokens=1),
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            kv=inference_pb2.KvUsage(transport="shm"),
            timeline=inference_pb2.Timeline(queued_ms=0.5),
            seed=9,
            num_attempts=2,
        )
        yield inference_pb2.GenerateResponse(request_id="r1", token_ids=[11], text="Hel", done=done)
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded: the client's deadline was reached")

    with serving(ScriptedFront(cut)) as address:
        said = baton("generate", "--prompt", "a", "--json", "--timeout", "2", "-a", address, home=tmp_path)
    told = json.loads(said.stdout)
    assert said.exit_code == 4 and told["error"] == "the client's deadline was reached"
    assert (told["text"], told["outcome"], told["seed"], told["num_attempts"]) == ("Hel", "deadline_exceeded", 9, 2)
    assert told["usage"] == {"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": 1}
    assert told["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    assert told["kv"] == {"bytes": None, "transport": "shm"}
    assert (told["timeline_ms"]["queued"], told["timeline_ms"]["push"]) == (0.5, None)


def test_a_timeout_is_the_requests_and_leaves_the_call_time_for_the_last_message(tmp_path: Path) -> None:
    def waiting(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        assert request.timeout_ms == 201 and 1.0 < context.time_remaining() < 5.0
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        yield inference_pb2.GenerateResponse()

    with serving(ScriptedFront(waiting)) as address:
        assert baton("generate", "--prompt", "a", "--timeout", "0.2005", "-a", address, home=tmp_path).exit_code == 4


def test_the_longest_timeout_is_none_that_has_passed(tmp_path: Path) -> None:
    with serving(ScriptedFront(answer)) as address:
        said = baton("generate", "--prompt", "a", "--timeout", "2592000", "-a", address, home=tmp_path)
    assert (said.exit_code, said.stdout) == (0, "Hello world\n")


def test_an_answer_without_its_end_is_a_failure(tmp_path: Path) -> None:
    def cut(request: object, context: object) -> Iterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(request_id="r1", token_ids=[11], text="Hel")

    with serving(ScriptedFront(cut)) as address:
        said = baton("generate", "--prompt", "a", "-a", address, home=tmp_path)
    assert said.exit_code == 1 and "without its last message" in said.stderr
