"""Workers and links as policies see them, made of nothing but numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWorker:
    """An idle worker that has measured nothing."""

    id: WorkerId
    pool_name: str = "p"
    num_total_blocks: int = 100
    block_size_bytes: int = 1_000_000
    num_promised_blocks: int = 0
    num_sequences: int = 0
    max_running: int = 8
    chunk_tokens: int = 64
    backlog_tokens: int = 0
    num_given_tokens: int = 0
    ms_per_token: float = 0.0
    decode_base_ms: float = 0.0
    decode_context_token_ms: float = 0.0
    chunk_token_ms: float = 0.0
    reading_share: float = 0.0
    num_writing: int = 0
    num_writing_blocks: int = 0


def make_worker(name: str, **values: float) -> FakeWorker:
    return FakeWorker(id=WorkerId(name, 1), **values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class FakeLinks:
    """Bandwidths in bytes a second, by the names of writer and peer."""

    known: dict[tuple[str, str], int] = field(default_factory=dict)

    def bandwidth_bytes_per_s(self, writer: WorkerId, peer: WorkerId, pools: tuple[str, str]) -> int:
        return self.known.get((writer.name, peer.name), 0)
