"""Every limit of the nixl transport, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlLimits:
    """How long is waited for what. All values are positive."""

    connect_timeout_s: float = 10.0
    """From dialling to the answer to the probe, agents made on both sides included."""
    heartbeat_interval_s: float = 1.0
    silence_timeout_s: float = 4.5
    """A peer that says nothing for so long is gone: stopped, or cut off. That is noticed within 5 s."""
    transfer_timeout_s: float = 5.0
    """A transfer of at most MAX_TRANSFER_BYTES that does not land within it ends the connection: the peer talks, but
    the way for its data is broken."""
    leave_timeout_s: float = 1.0
    """How long one who leaves waits for the other end to let go."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name}: must be above 0, is {getattr(self, field.name)}")


MAX_CONNECTIONS = 256
"""In both directions, those being made included. Each costs a thread, 2.5 MiB and 8 descriptors (over TCP)."""
MAX_STRANGERS = 64
"""Of these, accepted ones that have not been admitted; beyond it the oldest is closed."""
MAX_QUEUED = 4096
"""Writes and notifications that wait on one connection, on either side; one more ends it."""
MAX_TRANSFER_BYTES = 32 << 20
"""Posted at once, per connection: what a cancel cannot stop any more."""
SUM_SLICE_BYTES = 1 << 20
"""Summed between two looks at the transfer under way."""
HANDSHAKE_POLL_S = 0.001
PROBE = b"baton"
"""What the writer sends the way that data go, so that a way that is closed shows before anything is promised."""
