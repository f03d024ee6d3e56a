"""What serving benchmarks and end-to-end tests share: a cluster of plain processes, and a client that keeps times."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from baton.v1 import inference_pb2, inference_pb2_grpc
from cluster.core.config import ClusterConfig
from cluster.live.config_file import parse_cluster_text
from cluster.live.environment import Environment, read_environment
from cluster.live.local_processes import ClusterHandle, local_cluster
from cluster.wire.channels import make_channel

DEMO_MODEL = "smollm2-135m-instruct"


@dataclass(slots=True)
class Trace:
    """One request as its client saw it. Times are monotonic seconds; `arrivals_s[i]` is when token i came."""

    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    text: str = ""
    done: inference_pb2.Done | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


def cluster_config(pools: Sequence[dict[str, Any]], *, dtype: str = "bfloat16", **sections: Any) -> ClusterConfig:
    """A cluster of the demo model with these pools, on free ports; `sections` are further parts of the file.

    Everything is pushed that can be, unless the section `disaggregation` says otherwise: what takes which way should
    not depend on the day's measurements.
    """
    sections.setdefault("disaggregation", {"local_prefill": "never", "stay": "never"})
    model = {"preset": DEMO_MODEL, "dtype": dtype, **sections.pop("model", {})}
    data = {"version": 1, "name": "local", "model": model, "pools": list(pools), "front": {"port": 0}, **sections}
    return parse_cluster_text(yaml.safe_dump(data), "generated.yaml", folder=Path.cwd()).config


@contextmanager
def serving_cluster(config: ClusterConfig, environment: Environment | None = None) -> Iterator[ClusterHandle]:
    """See cluster.live.local_processes.local_cluster."""
    with local_cluster(config, environment or read_environment(os.environ)) as handle:
        yield handle


class Client:
    """An asyncio gRPC client of one front."""

    def __init__(self, address: str) -> None:
        self.channel = make_channel(address)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        trace: Trace | None = None,
        request_id: str = "",
        cache_salt: str = "",
        tenant: str = "",
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Trace:
        """Runs one request to its end. `trace` may be given to be watched while it grows."""
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=inference_pb2.TokenIds(ids=prompt_ids),
            sampling=inference_pb2.SamplingParams(**sampling),
            cache_salt=cache_salt,
            tenant=tenant,
            stop=stop,
        )
        trace = trace or Trace(sent_s=time.monotonic())
        async for reply in self.inference.Generate(request):
            now_s = time.monotonic()
            trace.text += reply.text
            for offset, token_id in enumerate(reply.token_ids):
                trace.token_ids.append(token_id)
                trace.positions.append(reply.position + offset)
                trace.arrivals_s.append(now_s)
            if reply.HasField("done"):
                trace.done = reply.done
        return trace

    async def generate_all(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Trace]:
        """All at once."""
        return list(await asyncio.gather(*(self.generate(prompt, **options) for prompt in prompts)))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 10**6) - 1))]
