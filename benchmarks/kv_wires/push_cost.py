"""What one request's push costs beside its bytes, and what its prompt's prefill takes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_peers.prompts import PromptSource
from benchmarks.engine_peers.worker_process import Side, Worker
from benchmarks.kv_wires.push_end import PushEnd
from benchmarks.kv_wires.remote import Remote
from benchmarks.kv_wires.transport_end import RECEIVER, SENDER
from kv_transfer.protocol.sampling import Checksums

PROMPT_TOKENS = 512
KV_BYTES = 256 << 20
NUM_WARM_UP_PUSHES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCost:
    """Seconds, medians: `whole` of a push of one block, `reserve` of its reservation, `copy` of its bytes."""

    whole: float
    reserve: float
    copy: float

    @property
    def fixed(self) -> float:
        return self.whole + self.reserve - self.copy


def measure_push_cost(cores: Sequence[int], num_pushes: int, checksums: Checksums) -> PushCost:
    """One push after the other, each of one block, over a connection that is there. Raises: RemoteFailedError."""
    with ExitStack() as stack:
        receiver = stack.enter_context(Remote(partial(PushEnd, RECEIVER, checksums), cores[-1:], "push receiver"))
        sender = stack.enter_context(Remote(partial(PushEnd, SENDER, checksums), cores[:1], "push sender"))
        endpoint = receiver.call("endpoint")
        whole_s, reserve_s = [], []
        for number in range(NUM_WARM_UP_PUSHES + num_pushes):
            grant, reserving_s = receiver.call("reserve", number, 1)
            receiver.begin("serve")
            pushing_s = sender.call("push", grant, endpoint)
            receiver.interrupt()
            if number >= NUM_WARM_UP_PUSHES:
                whole_s.append(pushing_s)
                reserve_s.append(reserving_s)
        # The only block of its chunk, so summed wherever some are.
        copy_s = sender.call("copy_times", 1, num_pushes, checksums is not Checksums.OFF)
    return PushCost(whole=median(whole_s), reserve=median(reserve_s), copy=median(copy_s))


def measure_prefill(model_dir: Path, cores: Sequence[int], num_rounds: int, seed: int) -> float:
    """Median seconds of a new prompt's prefill by the real engine on one core, after one that warms up."""
    prompts = PromptSource(model_dir, seed)
    limits: dict[str, Any] = {"max-model-tokens": 2 * PROMPT_TOKENS, "max-running": 1, "kv-bytes": KV_BYTES}
    command = [sys.executable, "-m", "benchmarks.engine_peers.baton_worker", "--model", str(model_dir)]
    for name, value in limits.items():
        command += [f"--{name}", str(value)]
    with tempfile.TemporaryDirectory(prefix="kv_push-") as folder:
        log_path = Path(folder) / "engine.log"
        with Worker(Side(name="Baton", command=command), cores[:1], log_path) as worker:
            worker.read_answer()
            answers = [
                worker.call("prefill", prompt=prompts.draw(PROMPT_TOKENS))["seconds"] for _ in range(1 + num_rounds)
            ]
    return median(answers[1:])
