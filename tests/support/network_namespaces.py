"""Two hosts and a router between them, as network namespaces of this machine: addresses of their own, and a link that
can be cut without either end losing its carrier. Needs the right to administer the network.

    left 10.213.1.2 --- 10.213.1.1 router 10.213.2.1 --- 10.213.2.2 right

What runs on the router goes on reaching both hosts while their link is cut.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
MS_REC = 0x4000
MS_SLAVE = 0x80000
MNT_DETACH = 2
PREFIX = f"baton-test-{os.getpid()}"
NAME_HOST = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'

P = ParamSpec("P")
T = TypeVar("T")


class NoNamespacesError(Exception):
    """This machine does not let us make network namespaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    namespace: str
    address: str

    @property
    def within(self) -> tuple[str, ...]:
        """Runs the command that is put behind it on this host, which then has a name of its own, too."""
        return ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", NAME_HOST, self.namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHosts:
    left: Host
    right: Host
    router: Host

    def cut(self) -> None:
        """From here on packets between the hosts are dropped in silence."""
        self._forward("0")

    def mend(self) -> None:
        self._forward("1")

    def num_bytes_from_left(self) -> int:
        """All that has come to the router from there so far, as one on the router sees it."""
        return int(Path("/sys/class/net/side1/statistics/rx_bytes").read_text())

    def _forward(self, value: str) -> None:
        """In a thread of its own, which is gone again before much can happen on the link."""

        def write() -> None:
            _join(self.router.namespace)
            Path("/proc/sys/net/ipv4/ip_forward").write_text(value)

        with ThreadPoolExecutor(1) as executor:
            executor.submit(write).result()


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Raises: NoNamespacesError."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            raise NoNamespacesError(f"there is no program `{program}`")
    left, right, router = (f"{PREFIX}-{name}" for name in ("left", "right", "router"))
    try:
        for namespace in (left, right, router):
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        for number, namespace in ((1, left), (2, right)):
            near, far = f"host{number}", f"side{number}"
            _run("ip", "link", "add", near, "netns", namespace, "type", "veth", "peer", "name", far, "netns", router)
            _run("ip", "-n", namespace, "address", "add", f"10.213.{number}.2/24", "dev", near)
            _run("ip", "-n", router, "address", "add", f"10.213.{number}.1/24", "dev", far)
            _run("ip", "-n", namespace, "link", "set", near, "up")
            _run("ip", "-n", router, "link", "set", far, "up")
            _run("ip", "-n", namespace, "route", "add", "default", "via", f"10.213.{number}.1")
        hosts = TwoHosts(
            left=Host(namespace=left, address="10.213.1.2"),
            right=Host(namespace=right, address="10.213.2.2"),
            router=Host(namespace=router, address="10.213.1.1"),
        )
        hosts.mend()
        yield hosts
    finally:
        for namespace in (left, right, router):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def call_on(host: Host, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function of a module in a process of its own on that host; returns or raises what it does."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=enter, initargs=(host.namespace,)) as executor:
        return executor.submit(function, *args, **kwargs).result()


def enter(namespace: str) -> None:
    """Moves the calling thread, and those that it starts from here on, into a namespace. Raises: OSError."""
    _join(namespace)
    # /sys/class/net, where libraries look for devices, shows those of the namespace in which it was mounted.
    _libc("unshare", CLONE_NEWNS)
    _libc("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    _libc("umount2", b"/sys", MNT_DETACH)
    _libc("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)


def _join(namespace: str) -> None:
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _libc("setns", fd, CLONE_NEWNET)
    finally:
        os.close(fd)


def _libc(name: str, *args: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")
