"""The backends that reach other processes, by name. Each is imported when it is used: their libraries are optional."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kv_transfer.transport.base import PeerId, Transport, TransportError
from kv_transfer.transport.shm_pool import PoolMemory


class BackendUnavailableError(TransportError):
    """The backend does not exist, or what it needs is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where a backend's class is, and which libraries it needs: one of `libraries`, if any is named.

    `extra` is the optional dependency of this package that installs it. `takes_host`: it listens on the network.
    """

    name: str
    module: str
    class_name: str
    extra: str = ""
    libraries: tuple[str, ...] = ()
    takes_host: bool = False


LOOPBACK = "127.0.0.1"
PREFERENCE = ("shm", "nixl", "ucx")
"""The order in which `auto` tries them for a pair of workers."""

_log = logging.getLogger(__name__)
_BACKENDS = {
    "shm": Backend(name="shm", module="kv_transfer.transport.shm", class_name="ShmTransport"),
    "nixl": Backend(
        name="nixl",
        module="kv_transfer.transport.nixl",
        class_name="NixlTransport",
        extra="nixl",
        libraries=("nixl_cu12", "nixl_cu13"),
        takes_host=True,
    ),
    "ucx": Backend(
        name="ucx",
        module="kv_transfer.transport.ucx",
        class_name="UcxTransport",
        extra="ucx",
        libraries=("ucxx",),
        takes_host=True,
    ),
}


def why_unavailable(name: str) -> str | None:
    """None if the backend's module and library are there, which nothing is imported to find out; else what to do."""
    backend = _BACKENDS.get(name)
    if backend is None:
        return f"there is no transport {name!r}; there are {', '.join(_BACKENDS)}"
    if importlib.util.find_spec(backend.module) is None:
        return f"transport {name} is not part of this installation"
    if backend.libraries and not any(importlib.util.find_spec(library) for library in backend.libraries):
        return f"transport {name} needs {backend.libraries[0]}: pip install 'baton-cluster[{backend.extra}]'"
    return None


def open_backend(name: str, me: PeerId, pool: PoolMemory, *, host: str = LOOPBACK) -> Transport:
    """Makes the backend's transport for one worker life over its pool.

    Args:
        host: the address of this machine that peers reach it at, for a backend that needs one.

    Raises: BackendUnavailableError, which says what to install, also if its library is there but cannot be loaded;
        and what the backend raises: TransportError, OSError or ValueError for the host.
    """
    reason = why_unavailable(name)
    if reason is not None:
        raise BackendUnavailableError(reason)
    backend = _BACKENDS[name]
    try:
        module = importlib.import_module(backend.module)
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(f"transport {name} cannot be loaded: {error}") from error
    options = {"host": host} if backend.takes_host else {}
    return cast(Transport, getattr(module, backend.class_name)(me, pool, **options))


def open_backends(me: PeerId, pool: PoolMemory, names: Sequence[str], *, host: str = LOOPBACK) -> dict[str, Transport]:
    """Transports of those of the named backends that can be used, in that order. The others are logged, with reasons.

    Raises: TransportError if there is none, with all reasons.
    """
    opened: dict[str, Transport] = {}
    reasons = []
    for name in names:
        try:
            opened[name] = open_backend(name, me, pool, host=host)
        except (TransportError, OSError, ValueError) as error:
            _log.info("transport %s is not used: %s", name, error)
            reasons.append(str(error))
    if not opened:
        raise TransportError("; ".join(reasons))
    return opened
