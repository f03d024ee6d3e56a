"""`python -m cluster.cli`: the same as `baton`."""

from __future__ import annotations

from cluster.cli.main import main

if __name__ == "__main__":
    main()
