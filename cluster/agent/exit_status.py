"""What the end of a worker's process says to whoever runs it."""

from __future__ import annotations

from typing import Final

EXIT_LEFT: Final = 0
"""It was asked to stop, or was drained, and nobody is to start it again."""
EXIT_ENDED: Final = 1
"""It ended by itself; the log says why."""
EXIT_AGAIN: Final = 75
"""It was drained to be started again, in the pool that its last line on stdout names after `again `."""
AGAIN: Final = "again "
