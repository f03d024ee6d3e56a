"""`python -m prefill_worker`: a prefill worker as a plain process."""

from __future__ import annotations

import sys

from cluster.agent.main import main
from prefill_worker.profile import PROFILE

if __name__ == "__main__":
    sys.exit(main(PROFILE))
