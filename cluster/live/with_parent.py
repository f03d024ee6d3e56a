"""Runs a module as a process that does not outlive its parent: `python -m cluster.live.with_parent PID MODULE ...`.

The kernel kills it when the parent ends, however that ends. PID names the parent, which may have ended before the
kernel could be asked.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    parent_pid, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        return
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
