"""`python -m prefill_worker`: a prefill worker as a plain process."""

from __future__ import annotations

from cluster.agent.main import run_process
from prefill_worker.profile import PROFILE

if __name__ == "__main__":
    run_process(PROFILE)
