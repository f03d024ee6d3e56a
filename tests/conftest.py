"""For all tests."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has Ctrl-C ignored, which all processes that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
