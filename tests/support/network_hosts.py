"""Hosts of a test's own: network namespaces with addresses of their own, joined by a router whose links can be cut.

Needs root and iproute2. A process enters a host by `enter`, before it starts any thread.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAMESPACE_DIR = Path("/run/netns")
CLONE_NEWNET = 0x40000000
COMMAND_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkHost:
    """`namespace` is the name that `ip netns` knows it by, `address` where the other hosts reach it."""

    namespace: str
    address: str


def why_no_hosts() -> str | None:
    """Why this machine cannot make any; None if it can."""
    if shutil.which("ip") is None:
        return "there is no iproute2 (`ip`) to make network namespaces with"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"baton-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"
    _ip("netns", "delete", probe)
    return None


def enter(namespace: str) -> None:
    """Moves the calling thread, and all that it starts from now on, into that host's network."""
    descriptor = os.open(NAMESPACE_DIR / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)


class Network:
    """A router in the middle and hosts around it. `close` removes them all, also those half made."""

    def __init__(self, num_hosts: int) -> None:
        self._prefix = f"baton-{os.getpid()}"
        self._router = f"{self._prefix}-router"
        self._made: list[str] = []
        self.hosts: list[NetworkHost] = []
        try:
            self._add_namespace(self._router)
            for index in range(num_hosts):
                self._add_host(index)
            self.mend()
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """From now on no packet gets from one host to another, and nobody is told."""
        self._forward(False)

    def mend(self) -> None:
        self._forward(True)

    def close(self) -> None:
        while self._made:
            _ip("netns", "delete", self._made.pop())

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _add_host(self, index: int) -> None:
        name = f"{self._prefix}-host{index}"
        self._add_namespace(name)
        address, gateway = f"10.77.{index}.2", f"10.77.{index}.1"
        port = f"port{index}"
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._router)
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", self._router, "address", "add", f"{gateway}/24", "dev", port)
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", self._router, "link", "set", port, "up")
        _ip("-n", name, "route", "add", "default", "via", gateway)
        self.hosts.append(NetworkHost(namespace=name, address=address))

    def _forward(self, is_forwarding: bool) -> None:
        setting = f"echo {int(is_forwarding)} > /proc/sys/net/ipv4/ip_forward"
        _ip("netns", "exec", self._router, "sh", "-c", setting)


def _ip(*arguments: str) -> None:
    command: Sequence[str] = ("ip", *arguments)
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
