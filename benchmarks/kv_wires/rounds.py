"""Interleaved rounds: every side in turn, so that what disturbs the machine for a while disturbs all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.engine_peers.figures import Figure, figure, ratios
from benchmarks.kv_wires.plans import Load, Timing
from benchmarks.kv_wires.remote import RemoteFailedError
from benchmarks.kv_wires.wires import BARE_NAMES, MEMCPY, SHM, Wire

FULL = ", full checksums"
GIB = float(1 << 30)

Side = Callable[[int], Timing]
"""Moves a load; the number is the round's."""


@dataclass(slots=True)
class Samples:
    """Of one load: each side's timings, round by round."""

    load: Load
    timings: dict[str, list[Timing]] = field(default_factory=dict)

    def speeds(self, side: str) -> list[float]:
        """GB/s."""
        return [self.load.moved_bytes / timing.seconds / 1e9 for timing in self.timings[side]]

    def cpu_seconds_per_gib(self, side: str) -> list[float]:
        return [timing.cpu_seconds * GIB / self.load.moved_bytes for timing in self.timings[side]]

    def speed_ratio(self, side: str, other: str) -> Figure:
        return figure(ratios(self.speeds(side), self.speeds(other)))

    def cpu_ratio(self, side: str, other: str) -> Figure:
        return figure(ratios(self.cpu_seconds_per_gib(side), self.cpu_seconds_per_gib(other)))


def run_rounds(
    wires: Mapping[str, Wire], load: Load, num_rounds: int, missing: dict[str, str], *, has_full: bool
) -> Samples:
    """`num_rounds` after one that warms up, in which the bytes are compared as well.

    A side that fails is left out, its reason told in `missing`.
    """
    sides = _sides(wires, load, has_full=has_full)
    samples = Samples(load, {name: [] for name in sides})
    for number in range(num_rounds + 1):
        for name, side in list(sides.items()):
            try:
                timing = side(number)
            except RemoteFailedError as error:
                missing[name] = str(error)
                del sides[name], samples.timings[name]
                continue
            if number > 0:
                samples.timings[name].append(timing)
    print(f"measured: {load.num_pieces} pieces of {load.size_bytes >> 10} KiB", file=sys.stderr, flush=True)
    return samples


def _sides(wires: Mapping[str, Wire], load: Load, *, has_full: bool) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    if SHM in wires:
        sides[MEMCPY] = lambda number: wires[SHM].memcpy(load)
    for name, wire in wires.items():
        sides[name] = _mover(wire, load, checksum=False)
        if has_full and name not in BARE_NAMES:
            sides[name + FULL] = _mover(wire, load, checksum=True)
    return sides


def _mover(wire: Wire, load: Load, *, checksum: bool) -> Side:
    def move(number: int) -> Timing:
        timing = wire.move(load, number, checksum=checksum)
        if number == 0:
            wire.check(load, number)
        return timing

    return move
