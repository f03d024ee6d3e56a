"""The file of measured points, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.goodput_parts.attainment import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class PointKey:
    """What was measured. `rate` is None for requests one at a time."""

    mix: str
    side: str
    rate: float | None
    num_requests: int
    seed: int


class PointFile:
    """JSON lines, one a point, each written whole before the next is measured."""

    def __init__(self, path: Path) -> None:
        """Takes up what is there already; half a line at its end, of a run that was killed, is removed."""
        self.path = path
        self._points: dict[PointKey, list[Served]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            data = json.loads(line)
            times = zip(data.pop("ttft_s"), data.pop("tpot_s"), strict=True)
            self._points[PointKey(**data)] = [Served(ttft_s=ttft_s, tpot_s=tpot_s) for ttft_s, tpot_s in times]

    def __len__(self) -> int:
        return len(self._points)

    def get(self, key: PointKey) -> list[Served] | None:
        return self._points.get(key)

    def rates(self, mix: str, side: str, num_requests: int, seed: int) -> Iterator[tuple[float, list[Served]]]:
        """What has been measured over the rate, by rate."""
        found = {
            key.rate: served
            for key, served in self._points.items()
            if key.rate is not None
            and (key.mix, key.side, key.num_requests, key.seed) == (mix, side, num_requests, seed)
        }
        yield from sorted(found.items())

    def add(self, key: PointKey, served: Sequence[Served]) -> None:
        data = asdict(key)
        data["ttft_s"] = [one.ttft_s for one in served]
        data["tpot_s"] = [one.tpot_s for one in served]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._points[key] = list(served)
