"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="HOST:PORT",
        help="The cluster to talk to. Default: BATON_ADDRESS, else the only cluster that was started here.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
