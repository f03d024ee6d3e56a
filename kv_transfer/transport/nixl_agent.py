"""The nixl library as this transport uses it: one agent a connection, over host memory, progressed by its owner alone.

No progress thread of the library: it would burn a core. Whoever owns an agent calls `progress` or `is_done` while
something is in flight; nothing moves otherwise. An agent belongs to one thread; the strict mode guards it besides.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.protocol.plan import Copy
from kv_transfer.transport.base import TransportError

LIBRARIES = ("nixl_cu12", "nixl_cu13")
BACKEND = "UCX"
MEMORY = "DRAM"
LOOPBACK = "127.0.0.1"

# With cross-memory attach (cma) the writer's kernel writes into our pages and no act of ours stops it; all else ends
# with the agent. UCX's other ways through shared memory would pass the fence, but they take 4 MiB of /dev/shm and as
# much System V memory for every agent, are no faster than TCP over the loopback device, and for lives on one host there
# is the shm transport. So none of them ("sm") is used.
_NO_SHARED_MEMORY = "TLS=^sm"
_CONNECT_ATTEMPTS = "TCP_SYN_CNT=2"
_LOOPBACK_ONLY = "NET_DEVICES=lo"
_WITH_CMA = frozenset(("all", "cma", "sm", "shm"))
"""Names of UCX for sets of its transports in which cma is."""


class NixlError(TransportError):
    """The library is missing, refuses, or reports a failure."""


def load_library() -> Any:
    """The nixl module. Raises: NixlError, which says how to install it, or why it cannot be used here."""
    if "ucxx" in sys.modules:
        raise NixlError("ucxx is loaded in this process, and has another UCX: they crash together when a peer dies")
    for name in LIBRARIES:
        try:
            library = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise NixlError(f"{name} cannot be loaded: {error}") from error
            continue
        except ImportError as error:
            raise NixlError(f"{name} cannot be loaded: {error}") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of every agent, on stdout
        return library
    raise NixlError("the nixl transport needs the nixl library: pip install 'baton-cluster[nixl]'")


def check_environment() -> None:
    """Raises: NixlError if UCX_TLS, which overrides what we tell the library, lets a writer bypass the fence."""
    names = os.environ.get("UCX_TLS")
    if names is None:
        return
    listed = {name.strip().lower() for name in names.removeprefix("^").split(",")}
    if bool(listed & _WITH_CMA) == names.startswith("^"):
        return
    raise NixlError(f"UCX_TLS={names} allows cma, which no fence can stop: unset it, or set it to ^cma")


class Transfer:
    """One posted write: few descriptors, all in flight."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def is_done(self) -> bool:
        """Whether every byte is in the peer's memory; moves it on. Raises: NixlError."""
        if self._state == "PROC":
            self._state = _call(self._agent.check_xfer_state, self._handle)
        if self._state == "DONE":
            return True
        if self._state != "PROC":
            raise NixlError("the transfer failed")
        return False

    def release(self) -> None:
        """Does not stop what is in flight. Raises: NixlError."""
        handle, self._handle, self._agent = self._handle, None, None
        _call(handle.release)


class NixlAgent:
    """See the module docstring. `memory` is the pool; peers address it from `base_address` on."""

    def __init__(self, name: str, memory: Memory, host: str, silence_timeout_s: float) -> None:
        """Takes some 20 ms, the first in a process half a second. Data for a host that acknowledges nothing for
        `silence_timeout_s` fail. Raises: NixlError."""
        check_environment()
        library = load_library()
        self.base_address = int(memory.ctypes.data)
        self._memory = memory
        config = library.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        engine_config = [_NO_SHARED_MEMORY, _CONNECT_ATTEMPTS, f"TCP_USER_TIMEOUT={silence_timeout_s * 1e3:.0f}ms"]
        if host == LOOPBACK:
            engine_config.append(_LOOPBACK_ONLY)
        self._agent = _call(library.nixl_agent, name, config)
        _call(self._agent.create_backend, BACKEND, {"engine_config": ",".join(engine_config)})
        _call(self._agent.register_memory, [(self.base_address, memory.size, 0, "")], MEMORY)

    def metadata(self) -> bytes:
        return bytes(_call(self._agent.get_agent_metadata))

    def add_peer(self, metadata: bytes) -> str:
        """Returns the peer agent's name. Blocks for up to minutes if its host cannot be reached. Raises: NixlError."""
        name = _call(self._agent.add_remote_agent, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def probe(self, peer: str, word: bytes) -> None:
        """Sends a word the way that data go. Raises: NixlError."""
        _call(self._agent.send_notif, peer, word)

    def post(self, peer: str, copies: Sequence[Copy], peer_base_address: int) -> Transfer:
        """Starts writing. May block while the way is full. Raises: NixlError."""
        ours = np.array([(self.base_address + c.source_bytes, c.size_bytes, 0) for c in copies], dtype=np.uint64)
        theirs = np.array([(peer_base_address + c.target_bytes, c.size_bytes, 0) for c in copies], dtype=np.uint64)
        agent = self._agent
        handle = _call(
            agent.initialize_xfer,
            "WRITE",
            agent.get_xfer_descs(ours, MEMORY),
            agent.get_xfer_descs(theirs, MEMORY),
            peer,
        )
        return Transfer(agent, handle, _call(agent.transfer, handle))

    def progress(self) -> list[bytes]:
        """Lets arrive what peers write to us; returns the words of probes. Raises: NixlError."""
        words = _call(self._agent.get_new_notifs)
        return [word for name in words for word in words[name]]

    def close(self) -> None:
        """Destroys the agent, in some milliseconds: from the return on, nothing lands through it.

        The library has no call for it, so its object must die here: no transfer and no exception may hold on to it."""
        dying = weakref.ref(self._agent.agent)
        self._agent = None
        assert dying() is None, "a nixl agent is still referenced, so what it was told to write may land"


def _call(function: Any, *args: Any) -> Any:
    """The library raises types that have only Exception in common, and OSError or RuntimeError from below."""
    try:
        return function(*args)
    except Exception as error:
        raise NixlError(f"nixl {getattr(function, '__name__', function)}: {error or type(error).__name__}") from error
