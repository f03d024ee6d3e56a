"""Drains: what an operator orders, and what coordinator and worker say to each other of it.

To drain a worker is to rid it of its work in order: nothing new is placed on it, what it has ends or goes on elsewhere,
and then this life of it ends. What follows is part of the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AfterDrain(Enum):
    """What becomes of a drained worker. STOP: it ends and is not replaced. RESTART: a fresh life in its pool. FLIP: a
    fresh life in a pool of the other role."""

    STOP = "stop"
    RESTART = "restart"
    FLIP = "flip"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder:
    """Attributes:
    worker: its name; whichever life of it is there is drained.
    pool: that its next life joins; empty for none, or (in a flip as an operator orders it) where it is open.
    migrate: running answers go on elsewhere at once, and do not end here.
    deadline_ms: time left until whatever is left goes on elsewhere, None for as long as it takes.
    """

    worker: str
    then: AfterDrain = AfterDrain.STOP
    pool: str = ""
    migrate: bool = False
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRefusal:
    """Why an order is not taken; nothing has changed. `is_unknown`: no such worker or pool."""

    reason: str
    is_unknown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDrain:
    """To a worker: it is being drained. It keeps the order, and tells it to a coordinator that starts anew."""

    order: DrainOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """To a worker that has been drained: its life is over. Whoever runs it is told what is to follow."""

    then: AfterDrain
    pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    """From a worker that was told to leave: its last word."""
