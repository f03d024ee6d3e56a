"""`baton generate` whose connection breaks in the middle of the answer."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from baton.v1 import inference_pb2
from tests.support.cli_scripted import ScriptedFront, baton, serving

TIMEOUT_S = 20.0


@contextlib.contextmanager
def relay(address: str, last: bytes) -> Iterator[str]:
    """An address that leads to `address`, until `last` has passed: then connections end and it takes no more."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = [listener]
    cut = threading.Event()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)
                if last in data:
                    cut.set()
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    def end() -> None:
        cut.wait(TIMEOUT_S)
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    threading.Thread(target=accept, daemon=True).start()
    ending = threading.Thread(target=end)
    ending.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        cut.set()
        ending.join()


def test_a_connection_that_breaks_is_told_in_plain_words(tmp_path: Path) -> None:
    gone = threading.Event()

    def cut_off(request: object, context: object) -> Iterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(request_id="r", token_ids=[11, 12], text="Hello")
        gone.wait(TIMEOUT_S)

    with serving(ScriptedFront(cut_off)) as address, relay(address, last=b"Hello") as relayed:
        said = baton("generate", "--prompt", "a", "--json", "-a", relayed, home=tmp_path)
        gone.set()
    lost = f"the connection to the cluster at {relayed} was lost before the answer was complete"
    assert (said.exit_code, said.stderr) == (3, f"baton: {lost}\n")
    told = json.loads(said.stdout)
    assert (told["error"], told["outcome"], told["request_id"], told["text"]) == (lost, None, "r", "Hello")
