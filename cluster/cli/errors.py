"""What the command line says when something goes wrong, and with which exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn, ParamSpec

import typer

from cluster.core.errors import BatonError, ConfigError, StartupError, UnreachableError
from cluster.live.run_processes import LeftoverError

OK: Final = 0
FAILED: Final = 1
INVALID: Final = 2
NOT_FOUND: Final = 3
TRY_LATER: Final = 4
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

_EXIT_TEXTS: Final = {
    OK: "done",
    FAILED: "the cluster or the request failed",
    INVALID: "wrong usage or invalid input; nothing was started or changed",
    NOT_FOUND: "no cluster is running, it cannot be reached, or there is no such thing",
    TRY_LATER: "refused for now, as the cluster is full, or the deadline passed; try again",
    INTERRUPTED: "interrupted by Ctrl-C; what was started has been taken down",
}

ParamsT = ParamSpec("ParamsT")


class CommandError(Exception):
    """Ends a command: one line for the user, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)

    def as_json(self) -> dict[str, Any]:
        """What a command with `--json` prints of it."""
        return {"error": str(self)}


def fail(message: str, exit_code: int) -> NoReturn:
    raise CommandError(message, exit_code)


def exit_codes(codes: Mapping[int, str | None] | None = None) -> str:
    """The end of a command's help: which exit codes it can give, in the usual words where the mapping has None.

    Without a mapping, all of them. Every command can be done (0), misused (2) or interrupted (130).
    """
    texts = _EXIT_TEXTS if codes is None else {OK: None, INVALID: None, INTERRUPTED: None, **codes}
    lines = [f"  {code:<4} {texts[code] or _EXIT_TEXTS[code]}" for code in sorted(texts)]
    return "\n".join(("\b", "Exit codes:", *lines))


@contextlib.contextmanager
def errors_as_json(wanted: bool) -> Iterator[None]:
    """Where the user asked for JSON, what a command raises goes to stdout as an object too."""
    try:
        yield
    except CommandError as error:
        if wanted:
            print(json.dumps(error.as_json(), ensure_ascii=False))
        raise


def exit_code_of(error: BatonError) -> int:
    if isinstance(error, ConfigError):
        return INVALID
    if isinstance(error, UnreachableError):
        return NOT_FOUND
    assert isinstance(error, StartupError), f"{type(error).__name__} is not raised on this side of the wire"
    return FAILED


def reports_errors(command: Callable[ParamsT, None]) -> Callable[ParamsT, None]:
    """Turns what a command raises into one line on stderr and an exit code. Bugs keep their traceback."""

    @functools.wraps(command)
    def guarded(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except CommandError as error:
            say_error(str(error))
            raise typer.Exit(error.exit_code) from error
        except BatonError as error:
            say_error(str(error))
            raise typer.Exit(exit_code_of(error)) from error
        except LeftoverError as error:
            say_error(str(error))
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as interrupt:
            say_error("interrupted")
            raise typer.Exit(INTERRUPTED) from interrupt
        except BrokenPipeError as error:
            # The reader of our output has left, as `head` does. Nothing must be flushed to it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from error

    return guarded


def say_error(message: str) -> None:
    print(f"baton: {message}", file=sys.stderr, flush=True)
