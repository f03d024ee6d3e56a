"""`python -m decode_worker`: a decode worker as a plain process."""

from __future__ import annotations

from cluster.agent.main import run_process
from decode_worker.profile import PROFILE

if __name__ == "__main__":
    run_process(PROFILE)
