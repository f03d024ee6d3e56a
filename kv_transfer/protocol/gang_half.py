"""What GangReceiver and GangSender have in common: a machine for each rank of the other gang, and pushes in parts.

Whatever a machine has to say goes through `absorb`: it tells what that comes to for the owner of the whole push,
cancels the other parts when one fails, and forgets a push that every part has let go of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from kv_transfer.protocol.gang_push import SourceEffect, TargetEffect
from kv_transfer.protocol.lease import LeaseView, Recent
from kv_transfer.protocol.messages import CancelWrite, Grant, PeerId, PushEffect, PushKey, PushMessage, WriteBlocks
from kv_transfer.protocol.ranks import MAX_RANKS, rank_of


class Machine(Protocol):
    """PushReceiver or PushSender."""

    num_ignored_messages: int

    def cancel(self, now_ns: int, key: PushKey, reason: str) -> list[PushEffect]: ...

    def on_connected(self, now_ns: int, peer: PeerId) -> list[PushEffect]: ...

    def on_peer_gone(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]: ...

    def on_message(self, now_ns: int, peer: PeerId, message: PushMessage) -> list[PushEffect]: ...

    def on_tick(self, now_ns: int) -> list[PushEffect]: ...

    def next_deadline_ns(self) -> int | None: ...

    def refusal(self, grant: Grant) -> str | None: ...

    def leases(self, now_ns: int) -> list[LeaseView]: ...

    def check_invariants(self) -> None: ...


class Parts(Protocol):
    """IncomingParts or OutgoingParts."""

    failure: str | None

    @property
    def key(self) -> PushKey: ...

    @property
    def is_released(self) -> bool: ...

    def living_parts(self) -> list[int]: ...

    def take(self, part: int, effect: Any) -> list[PushEffect]: ...


MachineT = TypeVar("MachineT", bound=Machine)
PartsT = TypeVar("PartsT", bound=Parts)


class GangHalf(Generic[MachineT, PartsT]):
    """`machines` by the other gang's rank, `pushes` those that are open, `ended` those that were or will be refused."""

    def __init__(self, make: Callable[[int], MachineT], max_tombstones: int) -> None:
        """`make` makes the machine for a rank."""
        self._make = make
        self.machines: dict[int, MachineT] = {}
        self.pushes: dict[PushKey, PartsT] = {}
        self.ended: Recent[PushKey, None] = Recent(max_tombstones)
        self._num_strangers = 0

    def machine(self, rank: int) -> MachineT:
        """It is made when it is first asked for: most ranks never meet."""
        if rank not in self.machines:
            self.machines[rank] = self._make(rank)
        return self.machines[rank]

    def rank_of(self, peer: PeerId) -> int | None:
        """None, and counted, for a peer that is no rank of a gang."""
        try:
            return rank_of(peer)
        except ValueError:
            self._num_strangers += 1
            return None

    def refusal(self, parts: Mapping[int, Grant]) -> str | None:
        """Why the push cannot be opened: no part is where one would be refused."""
        for rank, part in parts.items():
            refusal = "it has ended already" if part.key in self.ended else self.machine(rank).refusal(part)
            if refusal is not None:
                return refusal
        return None

    # ---- events ----------------------------------------------------------------------------------------------

    def on_connected(self, now_ns: int, peer: PeerId) -> list[PushEffect]:
        rank = self.rank_of(peer)
        return [] if rank is None else self.absorb(now_ns, rank, self.machine(rank).on_connected(now_ns, peer))

    def on_peer_gone(self, now_ns: int, peer: PeerId, reason: str) -> list[PushEffect]:
        rank = self.rank_of(peer)
        return [] if rank is None else self.absorb(now_ns, rank, self.machine(rank).on_peer_gone(now_ns, peer, reason))

    def on_message(self, now_ns: int, peer: PeerId, message: PushMessage) -> list[PushEffect]:
        rank = self.rank_of(peer)
        return [] if rank is None else self.absorb(now_ns, rank, self.machine(rank).on_message(now_ns, peer, message))

    def on_tick(self, now_ns: int) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for rank, machine in self.machines.items():
            effects += self.absorb(now_ns, rank, machine.on_tick(now_ns))
        return effects

    def absorb(self, now_ns: int, rank: int, effects: list[PushEffect]) -> list[PushEffect]:
        """What one machine's effects come to for the owner."""
        result: list[PushEffect] = []
        touched: dict[PushKey, PartsT] = {}
        failed: list[PartsT] = []
        for effect in effects:
            if isinstance(effect, WriteBlocks | CancelWrite):  # each machine counts its own
                result.append(replace(effect, write_id=effect.write_id * MAX_RANKS + rank))
                continue
            if not isinstance(effect, TargetEffect | SourceEffect):
                result.append(effect)
                continue
            push = touched[effect.key] = self.pushes[effect.key]
            had_failed = push.failure is not None
            result += push.take(rank, effect)
            if push.failure is not None and not had_failed:
                failed.append(push)
        # Only now, because the others' words must not come between two of this part's.
        for push in failed:
            assert push.failure is not None
            result += self.cancel_parts(now_ns, push, push.failure)
        for key, push in touched.items():
            if push.is_released and self.pushes.get(key) is push:
                self.forget(key)
        return result

    def cancel_parts(self, now_ns: int, push: PartsT, reason: str) -> list[PushEffect]:
        effects: list[PushEffect] = []
        for rank in push.living_parts():
            effects += self.absorb(now_ns, rank, self.machines[rank].cancel(now_ns, push.key, reason))
        return effects

    def forget(self, key: PushKey) -> None:
        del self.pushes[key]
        self.ended.add(key, None)

    # ---- views -----------------------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        deadlines = (machine.next_deadline_ns() for machine in self.machines.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def num_ignored_messages(self) -> int:
        return self._num_strangers + sum(machine.num_ignored_messages for machine in self.machines.values())

    def views(self, now_ns: int) -> dict[tuple[int, PushKey], LeaseView]:
        """The leases of all parts, by rank and push."""
        return {(rank, view.key): view for rank, part in self.machines.items() for view in part.leases(now_ns)}

    def check_invariants(self) -> None:
        for machine in self.machines.values():
            machine.check_invariants()
        for key, push in self.pushes.items():
            assert push.key == key and not push.is_released, "what nobody holds is forgotten"
