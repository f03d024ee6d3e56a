"""`python -m decode_worker`: a decode worker as a plain process."""

from __future__ import annotations

import sys

from cluster.agent.main import main
from decode_worker.profile import PROFILE

if __name__ == "__main__":
    sys.exit(main(PROFILE))
