"""How many random histories the default run plays: BATON_SIM_HISTORIES, for longer soaks."""

from __future__ import annotations

import os

NUM_HISTORIES = int(os.environ.get("BATON_SIM_HISTORIES", "1500"))
NUM_BATCHES = 12


def pytest_generate_tests(metafunc) -> None:  # type: ignore[no-untyped-def]
    """Gives `seeds` parameters consecutive ranges of seeds."""
    if "seeds" in metafunc.fixturenames:
        size = max(1, NUM_HISTORIES // NUM_BATCHES)
        batches = [range(start, start + size) for start in range(0, size * NUM_BATCHES, size)]
        metafunc.parametrize("seeds", batches, ids=[f"{batch.start}-{batch.stop - 1}" for batch in batches])
