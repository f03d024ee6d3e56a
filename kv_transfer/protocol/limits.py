"""Every limit of the push protocol, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PushLimits:
    """Bounds on what sender and receiver hold, post, resend and wait for. All values are positive."""

    lease_ttl_ns: int = 10 * SECOND_NS
    """What an owner puts into Grant.ttl_ns; renewed RENEWALS_PER_TTL times within it."""
    first_renewal_ns: int = 50 * MILLISECOND_NS
    """When a push over a connection that is there asks for its lease, all that began since in one message; most short
    prompts' pushes are over by then and never ask."""
    max_pushes: int = 1024
    """Pushes open at once, on either side; one more is refused."""
    max_inflight_writes: int = 4
    """Writes posted and not ended, a peer."""
    max_blocks_per_write: int = 128
    """Half as many cost up to a tenth of the bandwidth for blocks of 360 KiB: between two writes the sender's caches
    hold KV and not its code."""
    max_write_bytes: int = 64 << 20
    """But one block at least. All writes in flight must end within `write_timeout_ns`, over slow networks as well."""
    write_timeout_ns: int = 10 * SECOND_NS
    """A write in flight for longer fails its push; a failed push waits as long again for its writes to end."""
    end_resend_interval_ns: int = 500 * MILLISECOND_NS
    max_end_sends: int = 20
    """PushEnds sent in one round without an answer before the push fails."""
    max_missing_rounds: int = 3
    """Times that the receiver asks for lost or corrupt chunks again."""
    stop_resend_interval_ns: int = 250 * MILLISECOND_NS
    stop_timeout_ns: int = 10 * SECOND_NS
    """How long the receiver waits for the sender to acknowledge a stop before it fences that life."""
    max_quarantined_blocks: int = 4096
    """Above it the receiver takes no new push."""
    max_tombstones: int = 8192
    """Ended pushes remembered, so that a late open or a late message finds them ended."""
    max_fenced_lives: int = 4096

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}: must be at least 1, is {getattr(self, field.name)}")

    def blocks_per_write(self, block_size_bytes: int) -> int:
        """At most so many, of so many bytes each; 0 where the size is not known."""
        num_fitting = self.max_write_bytes // block_size_bytes if block_size_bytes else self.max_blocks_per_write
        return max(1, min(self.max_blocks_per_write, num_fitting))


MAX_CHUNKS = 65_535
"""Of one push."""

MAX_MISSING_CHUNKS = 8_192
"""That can be asked for again: a PushMissing names them all, and has to fit into one notification."""

RENEWALS_PER_TTL = 4
"""Three renewals may be lost before a lease expires."""
