"""Events of WorkerState: everything its owner (the worker's process, or the simulator) can tell it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.commands import Command
from cluster.core.ids import FrontId
from cluster.core.token_messages import Forget, Watch
from engine.core.disk_tier import DiskResult
from engine.core.request import RequestBody
from engine.core.step import StepResult
from kv_transfer.protocol.messages import PushKey, PushMessage
from kv_transfer.transport.base import PeerId

# ---- coordinator ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConnected:
    """The control stream is open: the worker introduces itself on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLost:
    """The control stream has ended, or could not be opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReceived:
    """`body` is set where the command carries one."""

    command: Command
    body: RequestBody | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """Somebody has asked the worker to stop. It takes its time (AgentLimits) for the pushes that it has."""


# ---- engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The plan of the last RunStep has run; `duration_ns` is the runner's own time."""

    result: StepResult
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersWritten:
    """The KV of all of the running step's tokens lies in the pool for the first `num_layers` layers.

    Comes for RunStep's `layer_marks`, in order, before the step's end. Layers that none has told of are written when
    StepDone comes.
    """

    step_id: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """The runner raised: nothing of the plan can be trusted."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWorkDone:
    """Answers DoDiskWork."""

    result: DiskResult


# ---- data connection ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected:
    """`transport` is what connects us. `bandwidth_bytes_per_s` was measured, None where only the peer writes."""

    peer: PeerId
    transport: str = ""
    bandwidth_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnectFailed:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceDone:
    """No write of that life of the peer can land here any more."""

    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReceived:
    peer: PeerId
    message: PushMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDone:
    write_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBroken:
    """`quiesced`: no byte of the write can land later."""

    write_id: int
    quiesced: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Answers VerifyBlocks: `bad_block_ids` are those whose sums differ."""

    key: PushKey
    chunk: int
    bad_block_ids: tuple[int, ...] = ()


# ---- token streams --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConnected:
    """A stream of this front is open. An older one of the same life is replaced by it and not reported again."""

    front: FrontId


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDisconnected:
    front: FrontId


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequestReceived:
    front: FrontId
    request: Watch | Forget


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsWritten:
    """The oldest outstanding SendRuns to this front has been taken by its stream (flow control let it through)."""

    front: FrontId


# ---- time -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; the owner sends one at WorkerState.next_deadline_ns() at the latest."""


Event = (
    CoordinatorConnected
    | CoordinatorLost
    | CommandReceived
    | LeaveRequested
    | LayersWritten
    | StepDone
    | StepFailed
    | DiskWorkDone
    | PeerConnected
    | PeerConnectFailed
    | PeerGone
    | FenceDone
    | PushReceived
    | WriteDone
    | WriteBroken
    | Verified
    | FrontConnected
    | FrontDisconnected
    | TokenRequestReceived
    | RunsWritten
    | Tick
)
