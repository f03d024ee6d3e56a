"""One attempt at connecting to a peer: which backend is being tried, how far its self-test is, why others failed.

The self-test writes the probe area of our pool to the peer's a few times. A probe's time ends with the peer's answer,
since a sender's own "done" need not mean that anything has arrived; the best of them counts, as the first one is
also the one that warms up mappings and connections.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from kv_transfer.transport.auto_wire import PROBE, PROBED, AutoEndpoint, encode_number
from kv_transfer.transport.base import PeerId

PROBE_BYTES = 4 << 20
"""Size of the probe area at the end of a pool, and of one probe."""
NUM_PROBES = 3
CONNECT_TIMEOUT_S = 5.0
"""A backend that has not connected by then is given up for this attempt."""
SELF_TEST_TIMEOUT_S = 5.0
"""Likewise one whose probes have not all been answered, counted from its connection."""
NS_PER_S = 1_000_000_000


class Stage(Enum):
    CONNECTING = auto()
    PROBING = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Dial:
    """See the module docstring.

    Attributes:
        untried: backends that both sides have, the preferred one first. backend: the one being tried.
        deadline_ns: when this stage is given up. failures: of backends given up, one sentence each.
        probe_number: of the probe under way, counted through all backends, so that a late answer is told apart.
        probe_handle: its write.
    """

    peer: PeerId
    endpoint: AutoEndpoint
    untried: deque[str]
    backend: str = ""
    stage: Stage = Stage.CONNECTING
    deadline_ns: int = 0
    failures: list[str] = field(default_factory=list)
    probe_number: int = 0
    probe_handle: int | None = None
    probe_started_ns: int = 0
    num_answered: int = 0
    best_bytes_per_s: float = 0.0

    def next_backend(self, now_ns: int) -> str | None:
        """Turns to the next backend; None if all have been tried."""
        if not self.untried:
            return None
        self.backend = self.untried.popleft()
        self.stage = Stage.CONNECTING
        self.deadline_ns = now_ns + int(CONNECT_TIMEOUT_S * NS_PER_S)
        self.probe_handle = None
        self.num_answered = 0
        self.best_bytes_per_s = 0.0
        return self.backend

    def give_up(self, reason: str) -> None:
        """The backend being tried has failed."""
        self.failures.append(f"{self.backend}: {reason}")

    def begin_self_test(self, now_ns: int) -> None:
        self.stage = Stage.PROBING
        self.deadline_ns = now_ns + int(SELF_TEST_TIMEOUT_S * NS_PER_S)

    @property
    def probe_size_bytes(self) -> int:
        return min(PROBE_BYTES, self.endpoint.probe_size_bytes)

    def next_probe(self, now_ns: int) -> bytes:
        """The notification of a probe that is posted now."""
        self.probe_number += 1
        self.probe_started_ns = now_ns
        return encode_number(PROBE, self.probe_number)

    def probe_answered(self, message: bytes, now_ns: int) -> bool:
        """Whether `message` answers the probe under way."""
        if self.stage is not Stage.PROBING or message != encode_number(PROBED, self.probe_number):
            return False
        self.num_answered += 1
        elapsed_ns = max(1, now_ns - self.probe_started_ns)
        self.best_bytes_per_s = max(self.best_bytes_per_s, self.probe_size_bytes * NS_PER_S / elapsed_ns)
        return True

    def timeout_reason(self) -> str:
        if self.stage is Stage.CONNECTING:
            return f"no connection within {CONNECT_TIMEOUT_S:g} s"
        return f"the self-test did not end within {SELF_TEST_TIMEOUT_S:g} s"
