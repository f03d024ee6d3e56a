"""What can go wrong in the engine's core while it operates.

    EngineCoreError
    |-- OutOfBlocksError        the pool cannot give so many blocks now; free some or wait
    |-- StaleGenerationError    a commit named a block that has been given to somebody else since
    `-- SchedulerFullError      too many sequences wait already; place the request elsewhere

A caller's mistake is a ValueError or KeyError, a bug an AssertionError.
"""

from __future__ import annotations


class EngineCoreError(Exception):
    """Base of everything the engine's core raises in operation."""


class OutOfBlocksError(EngineCoreError):
    """Not enough free and evictable blocks, or the reservation watermark is reached. Nothing was taken."""


class StaleGenerationError(EngineCoreError):
    """A block is not reserved under the generation named. Nothing was committed."""


class SchedulerFullError(EngineCoreError):
    """The waiting queue is at its limit. The sequence was not added."""
