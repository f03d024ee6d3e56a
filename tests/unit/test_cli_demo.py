"""What the demo shows of an answer."""

from __future__ import annotations

from baton.v1 import inference_pb2
from cluster.cli.demo import Asked, ending
from cluster.cli.errors import FAILED, CommandError
from cluster.cli.requests import Answer


def asked(outcome: inference_pb2.Outcome) -> Asked:
    done = inference_pb2.Done(outcome=outcome, usage=inference_pb2.Usage(completion_tokens=80))
    return Asked("q", answer=Answer(done=done))


def test_a_whole_answer_has_no_mark() -> None:
    assert ending(asked(inference_pb2.OUTCOME_STOP)) == ""


def test_an_answer_that_was_cut_shows_it() -> None:
    assert ending(asked(inference_pb2.OUTCOME_LENGTH)) == " …(cut at 80 tokens)"


def test_a_failure_shows() -> None:
    assert ending(Asked("q", error=CommandError("no room", FAILED))) == " [failed: no room]"
