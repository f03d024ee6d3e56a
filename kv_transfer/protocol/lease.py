"""What both halves of a push share: how a lease is shown, and a bounded memory of what has ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kv_transfer.protocol.messages import PeerId, PushKey

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """One lease as `baton leases` shows it. `side` is "held" at the sender and "reserved" at the receiver."""

    lease_id: int
    key: PushKey
    peer: PeerId
    side: str
    num_blocks: int
    age_ns: int
    remaining_ns: int
    state: str


class Recent(Generic[K, V]):
    """Remembers the `capacity` most recently added keys, each with a value."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, V] = OrderedDict()

    def add(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        return self._entries.get(key)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """The oldest first."""
        return iter(self._entries)
