"""The transport that picks a backend for each peer: the preferred one that connects and passes a self-test.

It is composed of the backends' own transports, all registered on one pool, whose last bytes are the probe area: what
peers write there in a self-test harms nobody. Whoever connects chooses, and says so to the other end, which reports
the connection only then; a backend that is tried and given up is seen by neither owner. The fence covers every
backend, since a life may have had our pool from more than one.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kv_transfer.protocol.lease import Recent
from kv_transfer.transport.alarms import Alarms
from kv_transfer.transport.auto_dial import NS_PER_S, NUM_PROBES, PROBE_BYTES, Dial, Stage
from kv_transfer.transport.auto_peer import LinkInfo, Peer, Peers
from kv_transfer.transport.auto_wire import (
    CHOSEN,
    PAYLOAD,
    PROBE,
    PROBED,
    AutoProtocolError,
    compose_endpoint,
    decode_endpoint,
)
from kv_transfer.transport.backends import LOOPBACK, PREFERENCE, open_backends
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    Transport,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.shm_pool import PoolMemory

MAX_FENCED_LIVES = 4096

_log = logging.getLogger(__name__)


class AutoTransport:
    """One worker life's end; implements `transport.base.Transport` over its pool.

    Args:
        preference: backends to choose from, the preferred one first.
        host: the address of this machine that peers reach it at.
        backends: transports to use instead of opening those of `preference`.
    """

    name = "auto"

    def __init__(
        self,
        me: PeerId,
        pool: PoolMemory,
        *,
        preference: Sequence[str] = PREFERENCE,
        host: str = LOOPBACK,
        backends: Mapping[str, Transport] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises: TransportError if no backend can be used, ValueError for a pool without room for the probe area."""
        if pool.size_bytes < PROBE_BYTES:
            raise ValueError(f"pool: {pool.size_bytes} bytes do not hold a probe area of {PROBE_BYTES}")
        self.me = me
        self._probe_offset_bytes = pool.size_bytes - PROBE_BYTES
        self._backends = dict(backends or open_backends(me, pool, preference, host=host))
        self._names = tuple(self._backends)
        self._clock_ns = clock_ns
        self._events: deque[TransportEvent] = deque()
        self._peers = Peers()
        self._dials: dict[PeerId, Dial] = {}
        self._own_writes: dict[int, None] = {}
        """Handles of what no owner has posted."""
        self._fencing: dict[PeerId, dict[str, None]] = {}
        """The backends whose fence is not complete."""
        self._fenced: Recent[PeerId, None] = Recent(MAX_FENCED_LIVES)
        self._is_polling = False
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alarms: Alarms[PeerId] = Alarms(self._wake_fd)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._by_fileno: dict[int, str] = {}
        for name, backend in self._backends.items():
            self._by_fileno[backend.fileno()] = name
            self._epoll.register(backend.fileno(), select.EPOLLIN)
        self._endpoint = compose_endpoint(
            self._probe_offset_bytes,
            PROBE_BYTES,
            {name: backend.endpoint() for name, backend in self._backends.items()},
        )

    # ---- Transport -------------------------------------------------------------------------------------------

    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        known = self._peers.get(peer)
        if peer in self._dials or (known is not None and known.outbound is not None):
            return
        try:
            where = decode_endpoint(endpoint)
        except AutoProtocolError as error:
            self._emit(ConnectFailed(peer=peer, reason=str(error)))
            return
        offered = [name for name, _ in where.endpoints]
        common = deque(name for name in self._names if name in offered)
        if not common:
            reason = f"it offers {', '.join(offered) or 'nothing'}, this worker speaks {', '.join(self._names)}"
            self._emit(ConnectFailed(peer=peer, reason=reason))
            return
        dial = Dial(peer=peer, endpoint=where, untried=common)
        self._dials[peer] = dial
        self._try_next(dial)

    def write(
        self,
        peer: PeerId,
        copies: Sequence[Copy],
        notify: bytes,
        *,
        num_sums: int = 0,
    ) -> int:
        """See Transport. Raises: UnknownPeerError, and ValueError as the peer's backend does."""
        known = self._peers.get(peer)
        name = None if known is None else known.backend_for(is_answer=not copies)
        if name is None:
            raise UnknownPeerError(f"not connected to {peer.name} (incarnation {peer.incarnation})")
        backend, message = self._backends[name], PAYLOAD + notify
        return self._outer(name, backend.write(peer, copies, message, num_sums=num_sums))

    def cancel(self, handle: int) -> None:
        inner, place = divmod(handle, len(self._names))
        self._backends[self._names[place]].cancel(inner)

    def poll(self) -> list[TransportEvent]:
        self._is_polling = True
        for fd, _ in self._epoll.poll(0):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                continue
            name = self._by_fileno[fd]
            for event in self._backends[name].poll():
                self._on_event(name, event)
        now_ns = self._clock_ns()
        for dial in [dial for dial in self._dials.values() if now_ns >= dial.deadline_ns]:
            self._give_up(dial, dial.timeout_reason())
        self._is_polling = False
        events = list(self._events)
        self._events.clear()
        return events

    def fence(self, peer: PeerId) -> None:
        if peer in self._fencing or peer in self._fenced:
            return
        self._fencing[peer] = dict.fromkeys(self._names)
        for backend in self._backends.values():
            backend.fence(peer)

    def disconnect(self, peer: PeerId) -> None:
        dial = self._dials.pop(peer, None)
        if dial is not None:
            self._alarms.stop(peer)
        known = self._peers.forget(peer)
        for name in self._names:
            if (known is not None and name in known.linked) or (dial is not None and dial.backend == name):
                self._backends[name].disconnect(peer)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._alarms.close()
        for backend in self._backends.values():
            backend.close()
        self._epoll.close()
        os.close(self._wake_fd)

    # ---- beyond the contract ---------------------------------------------------------------------------------

    def links(self) -> tuple[LinkInfo, ...]:
        """The connections that this side writes over, by peer."""
        return self._peers.links()

    def backend_of(self, peer: PeerId) -> str:
        """What connects us, in whichever direction; empty if nothing does."""
        known = self._peers.get(peer)
        return "" if known is None else known.backend_for(is_answer=True) or ""

    def check_invariants(self) -> None:
        assert set(self._alarms) == set(self._dials), "an attempt that nothing would end"
        self._peers.check_invariants(self._dials)
        assert all(left for left in self._fencing.values())

    # ---- choosing a backend ----------------------------------------------------------------------------------

    def _try_next(self, dial: Dial) -> None:
        now_ns = self._clock_ns()
        name = dial.next_backend(now_ns)
        if name is None:
            self._end_dial(dial)
            self._emit(ConnectFailed(peer=dial.peer, reason="; ".join(dial.failures)))
            return
        self._alarms.set(dial.peer, (dial.deadline_ns - now_ns) / NS_PER_S)
        endpoint = dial.endpoint.of(name)
        assert endpoint is not None
        self._backends[name].connect(dial.peer, endpoint)
        if name in self._peers.of(dial.peer).linked:
            # The peer's own connection may serve both directions, and then nothing more is reported.
            self._begin_self_test(dial)

    def _begin_self_test(self, dial: Dial) -> None:
        now_ns = self._clock_ns()
        if self._post_probe(dial):
            dial.begin_self_test(now_ns)
            self._alarms.set(dial.peer, (dial.deadline_ns - now_ns) / NS_PER_S)

    def _post_probe(self, dial: Dial) -> bool:
        """False if it could not be posted: the connection there is may be the peer's, for its own writes alone."""
        copies = [Copy(self._probe_offset_bytes, dial.endpoint.probe_offset_bytes, dial.probe_size_bytes)]
        message = dial.next_probe(self._clock_ns())
        try:
            dial.probe_handle = self._post_own(dial.backend, dial.peer, copies, message)
        except UnknownPeerError:
            return False
        except ValueError as error:
            self._give_up(dial, f"the self-test failed: {error}")
            return False
        return True

    def _on_probed(self, name: str, peer: PeerId, message: bytes) -> None:
        dial = self._dials.get(peer)
        if dial is None or dial.backend != name or not dial.probe_answered(message, self._clock_ns()):
            return
        if dial.num_answered == NUM_PROBES:
            self._choose(dial)
        elif not self._post_probe(dial) and self._dials.get(peer) is dial and dial.backend == name:
            self._give_up(dial, "the connection ended in the self-test")

    def _choose(self, dial: Dial) -> None:
        try:
            self._post_own(dial.backend, dial.peer, [], CHOSEN)
        except UnknownPeerError:
            self._give_up(dial, "the connection ended after the self-test")
            return
        self._end_dial(dial)
        link = LinkInfo(peer=dial.peer, backend=dial.backend, bandwidth_bytes_per_s=dial.best_bytes_per_s)
        self._peers.of(dial.peer).outbound = link
        if dial.failures:
            _log.warning("%s is reached over %s, since %s", dial.peer.name, dial.backend, "; ".join(dial.failures))
        self._emit(Connected(peer=dial.peer))

    def _give_up(self, dial: Dial, reason: str) -> None:
        """The backend being tried does not work for this peer."""
        dial.give_up(reason)
        known = self._peers.of(dial.peer)
        if known.inbound != dial.backend:
            known.linked.pop(dial.backend, None)
            self._backends[dial.backend].disconnect(dial.peer)
        self._try_next(dial)

    def _end_dial(self, dial: Dial) -> None:
        del self._dials[dial.peer]
        self._alarms.stop(dial.peer)
        self._forget_if_unconnected(dial.peer)

    # ---- what the backends report ----------------------------------------------------------------------------

    def _on_event(self, name: str, event: TransportEvent) -> None:
        match event:
            case Connected(peer=peer):
                self._peers.of(peer).linked[name] = None
                dial = self._dials.get(peer)
                if dial is not None and dial.backend == name and dial.stage is Stage.CONNECTING:
                    self._begin_self_test(dial)
            case ConnectFailed(peer=peer, reason=reason):
                dial = self._dials.get(peer)
                if dial is not None and dial.backend == name and dial.stage is Stage.CONNECTING:
                    self._give_up(dial, reason)
            case WriteCompleted(handle=inner) | WriteFailed(handle=inner):
                self._on_write_ended(replace(event, handle=self._outer(name, inner)))
            case Notified(peer=peer, payload=payload):
                self._on_notified(name, peer, payload)
            case PeerGone(peer=peer, reason=reason):
                self._on_gone(name, peer, reason)
            case Fenced(peer=peer):
                self._on_fenced(name, peer)

    def _on_write_ended(self, event: WriteCompleted | WriteFailed) -> None:
        if event.handle not in self._own_writes:
            self._emit(event)
            return
        del self._own_writes[event.handle]
        if isinstance(event, WriteFailed):
            dial = next((dial for dial in self._dials.values() if dial.probe_handle == event.handle), None)
            if dial is not None:
                self._give_up(dial, f"the self-test failed: {event.reason}")

    def _on_notified(self, name: str, peer: PeerId, message: bytes) -> None:
        known = self._peers.get(peer)
        if known is None or name not in known.linked:
            _log.debug("%s said something over a connection that had been given up", peer.name)
            return
        kind = message[:1]
        if kind == PAYLOAD:
            if not known.is_known:  # CHOSEN was lost
                self._chosen_by_peer(name, peer, known)
            self._emit(Notified(peer=peer, payload=message[1:]))
        elif kind == CHOSEN:
            self._chosen_by_peer(name, peer, known)
        elif kind == PROBE:
            self._answer_probe(name, peer, message)
        elif kind == PROBED:
            self._on_probed(name, peer, message)
        else:
            _log.warning("%s (incarnation %d) sent an unknown notification", peer.name, peer.incarnation)

    def _chosen_by_peer(self, name: str, peer: PeerId, known: Peer) -> None:
        if known.inbound is None:
            known.inbound = name
            self._emit(Connected(peer=peer))

    def _answer_probe(self, name: str, peer: PeerId, message: bytes) -> None:
        try:
            self._post_own(name, peer, [], PROBED + message[1:])
        except UnknownPeerError:
            _log.debug("%s left in the midst of its self-test", peer.name)

    def _on_gone(self, name: str, peer: PeerId, reason: str) -> None:
        """A connection has ended. One that was chosen ends the others with it."""
        known = self._peers.get(peer)
        if known is None:
            return
        known.linked.pop(name, None)
        if (known.outbound is not None and known.outbound.backend == name) or known.inbound == name:
            self._lose(peer, known, reason)
        dial = self._dials.get(peer)
        if dial is not None and dial.backend == name:
            self._give_up(dial, reason)
        self._forget_if_unconnected(peer)

    def _lose(self, peer: PeerId, known: Peer, reason: str) -> None:
        dial = self._dials.get(peer)
        for other in list(known.linked):
            if dial is None or dial.backend != other:
                del known.linked[other]
                self._backends[other].disconnect(peer)
        known.outbound = known.inbound = None
        self._emit(PeerGone(peer=peer, reason=reason))

    def _on_fenced(self, name: str, peer: PeerId) -> None:
        left = self._fencing.get(peer)
        if left is None:
            return
        left.pop(name, None)
        if left:
            return
        del self._fencing[peer]
        self._fenced.add(peer, None)
        known = self._peers.get(peer)
        if known is not None and known.is_known:
            self._lose(peer, known, "fenced")
            self._forget_if_unconnected(peer)
        self._emit(Fenced(peer=peer))

    # ---- inside ----------------------------------------------------------------------------------------------

    def _forget_if_unconnected(self, peer: PeerId) -> None:
        known = self._peers.get(peer)
        if known is not None and not known.linked and peer not in self._dials:
            self._peers.forget(peer)

    def _post_own(self, name: str, peer: PeerId, copies: Sequence[Copy], message: bytes) -> int:
        handle = self._outer(name, self._backends[name].write(peer, copies, message))
        self._own_writes[handle] = None
        return handle

    def _outer(self, name: str, inner: int) -> int:
        """Unique among all backends: `cancel` takes it apart again."""
        return inner * len(self._names) + self._names.index(name)

    def _emit(self, event: TransportEvent) -> None:
        if not (self._events or self._is_polling or self._is_closed):
            os.eventfd_write(self._wake_fd, 1)
        self._events.append(event)
