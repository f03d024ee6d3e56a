"""`baton generate` as a process: Ctrl-C, a reader that leaves, and a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.v1 import inference_pb2
from tests.support.cli_scripted import ScriptedFront, serving

TIMEOUT_S = 20.0


@dataclass
class Endless:
    """Writes until its client has gone."""

    cancelled: threading.Event = field(default_factory=threading.Event)

    def __call__(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        context.add_callback(self.cancelled.set)
        while not self.cancelled.wait(0.002):
            yield inference_pb2.GenerateResponse(request_id="r", token_ids=[1], text="word ")


def start(address: str, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "generate", "--prompt", "a", "-a", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "XDG_CACHE_HOME": str(home)},
    )


def test_ctrl_c_cancels_the_request(tmp_path: Path) -> None:
    script = Endless()
    with serving(ScriptedFront(script)) as address, start(address, tmp_path) as process:
        assert process.stdout is not None and process.stdout.read(5) == "word "
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130
        assert stderr.strip() == "baton: interrupted"
        assert script.cancelled.wait(TIMEOUT_S)


def test_a_reader_that_leaves_ends_the_request_quietly(tmp_path: Path) -> None:
    script = Endless()
    with serving(ScriptedFront(script)) as address, start(address, tmp_path) as process:
        assert process.stdout is not None and process.stdout.read(5) == "word "
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 141
        assert process.stderr is not None and process.stderr.read() == ""
        assert script.cancelled.wait(TIMEOUT_S)


def test_on_a_terminal_the_complaint_gets_a_line_of_its_own(tmp_path: Path) -> None:
    def failing(request: object, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(request_id="r", token_ids=[1], text="Hel")
        context.abort(grpc.StatusCode.ABORTED, "worker_lost: attempts used up")

    terminal, process_end = pty.openpty()
    try:
        with serving(ScriptedFront(failing)) as address:
            done = subprocess.run(
                [sys.executable, "-m", "cluster.cli", "generate", "--prompt", "a", "-a", address],
                stdout=process_end,
                stderr=process_end,
                env={**os.environ, "PYTHONPATH": ":".join(sys.path), "XDG_CACHE_HOME": str(tmp_path)},
                timeout=TIMEOUT_S,
                check=False,
            )
        assert done.returncode == 1
        assert os.read(terminal, 4096).decode().splitlines() == [
            "Hel",
            "baton: worker lost: attempts used up (request r)",
        ]
    finally:
        os.close(terminal)
        os.close(process_end)
