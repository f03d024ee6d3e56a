"""Effects of WorkerState: what its owner is to do, in order.

Four of them are the push protocol's own (`SendMessage`, `WriteBlocks`, `CancelWrite`, `VerifyBlocks`) and pass
through unchanged; so does `FencePeer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.drain_orders import Leave
from cluster.core.ids import FrontId
from cluster.core.messages import RankEndpoint, WorkerMessage
from cluster.core.token_messages import TokenRun
from engine.core.disk_tier import DiskWork
from engine.core.step import StepPlan
from engine.core.tiers import BlockCopy
from kv_transfer.protocol.messages import CancelWrite, FencePeer, SendMessage, VerifyBlocks, WriteBlocks
from kv_transfer.transport.base import PeerId

__all__ = [
    "CancelWrite",
    "ConnectPeer",
    "CopyBlocks",
    "Effect",
    "DoDiskWork",
    "FencePeer",
    "RefuseFront",
    "RunStep",
    "SendMessage",
    "SendRuns",
    "Shutdown",
    "ToCoordinator",
    "VerifyBlocks",
    "WriteBlocks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToCoordinator:
    """Send on the control stream; dropped if that has just ended (the next hello carries an inventory)."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBlocks:
    """Copy between the pool and the host tier, in this order, before the effects that follow. A step may be running: it
    uses neither these blocks nor these slots."""

    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoDiskWork:
    """Read and write files of the prefix cache, after what was asked for before; answered by exactly one DiskWorkDone.
    Until then nothing else writes to the slots that it names."""

    work: DiskWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Run the plan; answered by exactly one StepDone or StepFailed. At most one is outstanding.

    As soon as as many layers as a mark says have been written, LayersWritten is wanted. The step does not wait for what
    is made of it.
    """

    plan: StepPlan
    layer_marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRuns:
    """Send one TokenBatch to the front; answered by RunsWritten, or by FrontDisconnected for all of them."""

    front: FrontId
    runs: tuple[TokenRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseFront:
    """End the stream that this front has just opened: there are too many. Nothing more is said of it."""

    front: FrontId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectPeer:
    """Connect to the peer by whichever of its endpoints (one a rank) this side's transport understands."""

    peer: PeerId
    endpoints: tuple[RankEndpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """This life of the worker ends: close everything and exit. `leave`: as a drained worker was told to, in order."""

    reason: str
    leave: Leave | None = None


Effect = (
    ToCoordinator
    | CopyBlocks
    | DoDiskWork
    | RunStep
    | SendRuns
    | RefuseFront
    | ConnectPeer
    | SendMessage
    | WriteBlocks
    | CancelWrite
    | VerifyBlocks
    | FencePeer
    | Shutdown
)
