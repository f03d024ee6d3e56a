"""Interleaved rounds: every side in turn, so that what disturbs the machine for a while disturbs all of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from benchmarks.engine_peers.figures import Figure, figure, ratios
from benchmarks.kv_wires.plans import Load, Timing
from benchmarks.kv_wires.remote import RemoteFailedError
from benchmarks.kv_wires.wires import BARE_NAMES, MEMCPY, SHM, Wire
from kv_transfer.protocol.sampling import Checksums

SAMPLED = ", sampled checksums"
FULL = ", full checksums"
MODES = {"": Checksums.OFF, SAMPLED: Checksums.SAMPLED, FULL: Checksums.FULL}
"""What a wire's name is followed by."""
GIB = float(1 << 30)


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
    wires: dict[str, Wire], load: Load, num_rounds: int, missing: dict[str, str], *, has_sums: bool
) -> Samples:
    """`num_rounds` after one that warms up, in which the bytes are compared as well.

    A wire that fails is taken out of `wires` with all its sides, its reason told in `missing`.
    """
    samples = Samples(load)
    for number in range(num_rounds + 1):
        for name, wire in list(wires.items()):
            try:
                timings = _take_turn(wire, load, number, has_sums=has_sums)
            except RemoteFailedError as error:
                missing[name] = str(error)
                del wires[name]
                for side in _sides_of(name, has_sums=has_sums):
                    samples.timings.pop(side, None)
                continue
            if number > 0:
                for side, timing in timings.items():
                    samples.timings.setdefault(side, []).append(timing)
    print(f"measured: {load.num_pieces} pieces of {load.size_bytes >> 10} KiB", file=sys.stderr, flush=True)
    return samples


def _sides_of(name: str, *, has_sums: bool) -> list[str]:
    sides = [MEMCPY] if name == SHM else []
    return sides + [name + label for label in MODES if not label or (has_sums and name not in BARE_NAMES)]


def _take_turn(wire: Wire, load: Load, number: int, *, has_sums: bool) -> dict[str, Timing]:
    """Raises: RemoteFailedError."""
    timings = {}
    for side in _sides_of(wire.name, has_sums=has_sums):
        if side == MEMCPY:
            timings[side] = wire.memcpy(load)
            continue
        timings[side] = wire.move(load, number, MODES[side.removeprefix(wire.name)])
        if number == 0:
            wire.check(load, number)
    return timings
