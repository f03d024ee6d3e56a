"""How to install what is missing, for error messages."""

from __future__ import annotations

import shlex
import sys


def how_to_install(*arguments: str) -> str:
    """A command for the very Python that runs, which need not be the one whose `pip` comes first on the PATH."""
    return shlex.join((sys.executable or "python", "-m", "pip", "install", *arguments))
