"""When a prefix is fetched from another worker rather than computed."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.ids import WorkerId
from cluster.policy.costs import StepCosts
from cluster.policy.prefix_fetch import MIN_BLOCKS, PrefixFetch, fetch_of
from tests.support.fake_workers import FakeLinks, make_worker

BLOCK_SIZE = 16
BLOCK_SIZE_BYTES = 100_000
USUAL = StepCosts(ms_per_token=1.0, decode_base_ms=10.0, decode_context_token_ms=0.0, chunk_token_ms=0.0)


READER = make_worker("p0", block_size_bytes=BLOCK_SIZE_BYTES, chunk_tokens=256)
HOLDERS = [replace(READER, id=WorkerId(name, 1)) for name in ("p1", "p2")]


def decide(
    *held: int, own: int = 0, ms_per_token: float = 0.0, links: dict[str, int] | None = None
) -> PrefixFetch | None:
    reader = replace(READER, ms_per_token=ms_per_token)
    known = {(name, READER.id.name): bytes_per_s for name, bytes_per_s in (links or {}).items()}
    pairs = list(zip([*HOLDERS, reader], [*held, own], strict=True))
    return fetch_of(
        reader,
        pairs,
        own,
        BLOCK_SIZE,
        FakeLinks(known),
        USUAL,
    )


def test_the_longest_prefix_is_fetched() -> None:
    fetch = decide(20, 30)
    assert fetch is not None and (fetch.holder, fetch.num_blocks) == (HOLDERS[1].id, 30)
    assert "30 blocks come from p2#1" in fetch.reason


def test_of_equals_the_first_or_the_one_with_the_better_link() -> None:
    fetch = decide(30, 30)
    assert fetch is not None and fetch.holder == HOLDERS[0].id
    fetch = decide(30, 30, links={"p1": 10_000_000, "p2": 1_000_000_000})
    assert fetch is not None and fetch.holder == HOLDERS[1].id


def test_what_the_reader_has_or_nearly_has_is_not_fetched() -> None:
    assert decide(30, 30, own=30) is None
    assert decide(30, 20, own=30 - MIN_BLOCKS + 1) is None
    assert decide(0, 0, own=40) is None


def test_what_is_computed_sooner_is_not_fetched() -> None:
    """A block takes 16 ms to compute; over a link of 5 MB/s, 20 ms to fetch, over one of 20 MB/s 5 ms."""
    assert decide(30, 0, links={"p1": 5_000_000}) is None
    assert decide(30, 0, links={"p1": 20_000_000}) is not None
    assert decide(30, 0, ms_per_token=0.1, links={"p1": 20_000_000}) is None
