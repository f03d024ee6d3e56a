"""`baton demo`: one prefill and one decode worker, several questions at once, and what became of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Final

from baton.v1 import inference_pb2
from cluster.cli.address import Target
from cluster.cli.clusters import interrupt_on_sigterm
from cluster.cli.errors import FAILED, CommandError, fail
from cluster.cli.models import import_with_progress
from cluster.cli.progress import say
from cluster.cli.requests import TIMELINE_PARTS, Answer, Client
from cluster.cli.tables import format_bytes, format_ms, format_table
from cluster.live.config_file import ClusterFile, parse_cluster_text
from cluster.live.environment import Environment
from cluster.live.launcher import start_cluster, stop_cluster, uninterrupted
from cluster.wire.codec import outcome_from_wire

MAX_TOKENS: Final = 80
REQUEST_TIMEOUT_S: Final = 120.0
_PASSAGE: Final = (
    "The lighthouse stood on a narrow rock, an hour by boat from the village. Its keeper had lived there for thirty "
    "years and wrote down every ship that passed: its flag, its sails, the hour, and the weather. In the evenings he "
    "read the entries of the keepers before him, some of them a century old, and the sea had hardly changed. "
)
QUESTIONS: Final = (
    "What is the capital of France? Answer briefly.",
    "What color is the sky?",
    "Write one sentence about the sea.",
    f"{_PASSAGE * 6}\nHow long had the keeper lived there?",
)
"""The small model has short answers to these; the last is long enough for its KV to be pushed in several chunks."""


@dataclass(slots=True)
class Asked:
    """One question on its way. `pieces` ends with None; `answer` or `error` is set by then."""

    question: str
    pieces: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    answer: Answer | None = None
    error: CommandError | None = None


def run_demo(environment: Environment) -> None:
    """Raises CommandError where a request fails, and what start_cluster raises."""
    interrupt_on_sigterm()
    say("preparing the model")
    file = demo_file()
    preset = file.config.model.preset
    assert preset is not None
    say(f"the model is at {import_with_progress(preset, environment.models_dir)}")
    record = start_cluster(file, environment, say)
    try:
        with Client(Target(address=record.address, cluster=record.name)) as client:
            client.connect()
            asked = ask_all(client, QUESTIONS)
            for question in asked:
                _print_answer(question)
        print()
        print(report([question.answer for question in asked if question.answer is not None]))
        failed = [question.error for question in asked if question.error is not None]
        if failed:
            fail(f"{len(failed)} of {len(asked)} requests failed: {failed[0]}", FAILED)
    finally:
        with uninterrupted():
            stop_cluster(record.name, environment, say)


def demo_file() -> ClusterFile:
    text = resources.files("cluster.cli").joinpath("demo.yaml").read_text(encoding="utf-8")
    return parse_cluster_text(text, "demo.yaml", folder=Path())


def ask_all(client: Client, questions: tuple[str, ...]) -> list[Asked]:
    """Sends all questions at once; the answers stream in while they are printed one after the other."""
    asked = [Asked(question) for question in questions]
    for item in asked:
        threading.Thread(target=_ask, args=(client, item), daemon=True).start()
    return asked


def report(answers: list[Answer]) -> str:
    """Where each request's time went, who served it, and what moved."""
    header = ("REQUEST", *(f"{part.upper().replace('_', ' ')} MS" for part in TIMELINE_PARTS))
    times = [(str(i), *_timeline_cells(answer)) for i, answer in enumerate(answers, start=1)]
    served = [(str(i), *_served_cells(answer)) for i, answer in enumerate(answers, start=1)]
    served_header = ("REQUEST", "OUTCOME", "PROMPT", "WRITTEN", "PREFILL", "DECODE", "KV MOVED", "OVER", "EARLY")
    return f"{format_table(header, times)}\n\n{format_table(served_header, served)}"


def _ask(client: Client, asked: Asked) -> None:
    request = inference_pb2.GenerateRequest()
    request.chat.messages.add(role="user", content=asked.question)
    request.sampling.max_tokens = MAX_TOKENS
    try:
        asked.answer = client.generate(request, REQUEST_TIMEOUT_S, lambda reply: asked.pieces.put(reply.text))
    except CommandError as error:
        asked.error = error
    finally:
        asked.pieces.put(None)


def _print_answer(asked: Asked) -> None:
    shown = asked.question if len(asked.question) < 80 else f"{asked.question[:48]} ... {asked.question[-52:]}"
    print(f"\n> {' '.join(shown.split())}")
    for piece in _pieces(asked):
        print(piece, end="", flush=True)
    print(ending(asked), flush=True)


def ending(asked: Asked) -> str:
    """What is to be seen after a text that is not a whole answer."""
    if asked.error is not None:
        return f" [failed: {asked.error}]"
    assert asked.answer is not None and asked.answer.done is not None
    is_cut = asked.answer.done.outcome == inference_pb2.OUTCOME_LENGTH
    return f" …(cut at {asked.answer.done.usage.completion_tokens} tokens)" if is_cut else ""


def _pieces(asked: Asked) -> Iterator[str]:
    while (piece := asked.pieces.get()) is not None:
        yield piece


def _timeline_cells(answer: Answer) -> tuple[str, ...]:
    assert answer.done is not None
    timeline = answer.done.timeline
    values = {part: getattr(timeline, f"{part}_ms") for part in TIMELINE_PARTS}
    present = {field_.name for field_, _ in timeline.ListFields()}
    return tuple(format_ms(value if f"{part}_ms" in present else None) for part, value in values.items())


def _served_cells(answer: Answer) -> tuple[str, ...]:
    assert answer.done is not None
    done = answer.done
    early = f"{done.kv.early_bytes / done.kv.bytes:.0%}" if done.kv.bytes else "-"
    return (
        outcome_from_wire(done.outcome).value,
        str(done.usage.prompt_tokens),
        str(done.usage.completion_tokens),
        done.prefill_worker or "-",
        done.decode_worker,
        format_bytes(done.kv.bytes),
        done.kv.transport or "-",
        early,
    )
