"""Takes connections in from a listener that is polled, also in a process that has no descriptor left."""

from __future__ import annotations

import errno
import logging
import os
import socket

_log = logging.getLogger(__name__)


class Doorway:
    """Holds one descriptor in reserve. Who cannot be let in for want of another is turned away with its help: as long
    as they waited, the listener would be readable, and whoever polls it would never sleep."""

    def __init__(self, listener: socket.socket) -> None:
        """`listener` does not block, and stays its owner's. Raises: OSError."""
        self._listener = listener
        self._reserve_fd = _open_reserve()

    def accept(self) -> socket.socket | None:
        """The next one who waits; None if nobody does."""
        while True:
            try:
                return self._listener.accept()[0]
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return None  # nobody is waiting, or the one who was has left
                if not self._turn_away(error):
                    return None

    def close(self) -> None:
        """Idempotent."""
        if self._reserve_fd >= 0:
            os.close(self._reserve_fd)
            self._reserve_fd = -1

    def _turn_away(self, reason: OSError) -> bool:
        """Whether somebody was."""
        self.close()
        try:
            self._listener.accept()[0].close()
        except OSError as error:
            _log.debug("nobody could be turned away: %s", error)
            return False
        finally:
            self._reserve_fd = _open_reserve()
        _log.warning("turned a connection away: %s", reason)
        return True


def _open_reserve() -> int:
    """-1 if there is none to be had."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _log.debug("no descriptor in reserve: %s", error)
        return -1
