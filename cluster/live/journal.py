"""Writes the coordinator's journal (`cluster.wire.journal`) to files of bounded size and number."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from cluster.core.effects import Effect
from cluster.core.events import Event
from cluster.core.state import ClusterState
from cluster.wire.journal import Header, encode_entry, encode_header, encode_snapshot, write_record

logger = logging.getLogger(__name__)

SUFFIX: Final = ".journal"
_BUFFER_BYTES: Final = 256 * 1024
PRIVATE: Final = 0o700
"""What the directory allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """Attributes:
    directory: made if need be, for this user alone.
    file_size_bytes: at which a file is ended and the next one begun.
    max_files: in the directory; the oldest ones beyond are removed. At least 1.
    release: of Baton.
    """

    directory: Path
    file_size_bytes: int
    max_files: int
    release: str


class Journal:
    """One life of the coordinator. What cannot be written ends the journal, with an error in the log, and nothing else.

    Args:
        state: as it is before the first entry; read again at each new file.
        clock_ns: that of the entries.
    """

    def __init__(self, settings: JournalSettings, state: ClusterState, epoch: int, clock_ns: Callable[[], int]) -> None:
        self._settings = settings
        self._state = state
        self._epoch = epoch
        self._clock_ns = clock_ns
        self._num_files = 0
        self._file: BinaryIO | None = None
        self._size_bytes = 0
        try:
            settings.directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            self._begin_file()
        except OSError as error:
            self._give_up(error)

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, now_ns: int, event: Event, effects: Iterable[Effect]) -> None:
        """Called after the state has handled the event."""
        if self._file is None:
            return
        entry = encode_entry(now_ns, event, effects)
        try:
            self._size_bytes += write_record(self._file, entry)
            if self._size_bytes >= self._settings.file_size_bytes:
                self._begin_file()
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Hands what has been written to the operating system."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Idempotent."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_file(self) -> None:
        if self._file is not None:
            self._file.close()
        path = self._settings.directory / f"{self._epoch:012d}-{self._num_files:06d}{SUFFIX}"
        header = Header(
            release=self._settings.release,
            epoch=self._epoch,
            number=self._num_files,
            wall_ns=time.time_ns(),
            now_ns=self._clock_ns(),
            snapshot=encode_snapshot(self._state),
        )
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        write_record(self._file, encode_header(header))
        self._file.flush()  # A life that is killed right after its start must leave no file without a beginning.
        self._size_bytes = 0  # A snapshot of many requests must not end the file that it begins.
        self._num_files += 1
        for old in journal_files(self._settings.directory)[: -self._settings.max_files]:
            old.unlink()

    def _give_up(self, error: OSError) -> None:
        logger.error("the journal in %s has ended: %s", self._settings.directory, error)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as close_error:
                logger.debug("and its file: %s", close_error)


def journal_files(directory: Path) -> list[Path]:
    """In the order in which they were begun."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def latest_epoch(directory: Path) -> int:
    """Of the lives that have written a journal there, 0 if there is none."""
    epochs = (path.name.partition("-")[0] for path in journal_files(directory))
    return max((int(epoch) for epoch in epochs if epoch.isdecimal()), default=0)
