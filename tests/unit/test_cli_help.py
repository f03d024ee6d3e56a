"""The help teaches, and costs nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.cli_scripted import baton

COMMANDS = ["up", "down", "status", "leases", "drain", "flip", "generate", "demo", "model import"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_exit_codes(tmp_path: Path, command: str) -> None:
    said = baton(*command.split(), "-h", home=tmp_path)
    assert said.exit_code == 0
    assert "Examples:" in said.stdout and f"baton {command}" in said.stdout
    assert "Exit codes:" in said.stdout and "130" in said.stdout
    assert said.stdout == baton(*command.split(), "--help", home=tmp_path).stdout


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        ("up", [0, 1, 2, 3, 130]),
        ("down", [0, 1, 2, 3, 130]),
        ("status", [0, 1, 2, 3, 4, 130]),
        ("drain", [0, 1, 2, 3, 4, 130]),
        ("flip", [0, 1, 2, 3, 4, 130]),
        ("generate", [0, 1, 2, 3, 4, 130]),
        ("demo", [0, 1, 2, 3, 130]),
        ("model import", [0, 1, 2, 3, 130]),
    ],
)
def test_only_exit_codes_that_the_command_can_give_are_listed(tmp_path: Path, command: str, codes: list[int]) -> None:
    listed = baton(*command.split(), "-h", home=tmp_path).stdout.split("Exit codes:")[1]
    assert [int(line.split()[0]) for line in listed.strip().splitlines()] == codes


def test_what_an_interruption_does_is_what_that_command_does(tmp_path: Path) -> None:
    said = baton("generate", "-h", home=tmp_path).stdout
    assert "the request has been cancelled" in said and "taken down" not in said
    assert "taken down" in baton("up", "-h", home=tmp_path).stdout


@pytest.mark.parametrize("command", ["down", "model import"])
def test_an_argument_that_may_be_left_out_is_in_brackets_once(tmp_path: Path, command: str) -> None:
    assert baton(*command.split(), "-h", home=tmp_path).stdout.splitlines()[0].endswith("[OPTIONS] [NAME]")


def test_the_import_does_not_speak_of_clusters(tmp_path: Path) -> None:
    assert "cluster is" not in baton("model", "import", "-h", home=tmp_path).stdout


def test_the_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    said = baton("--version", home=tmp_path)
    assert (said.exit_code, said.stdout) == (0, f"baton {metadata.version('baton-cluster')}\n")


def test_the_overview_lists_every_command(tmp_path: Path) -> None:
    said = baton("-h", home=tmp_path)
    assert said.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command.split()[0]} " in said.stdout
    assert "...\n" not in said.stdout.split("Commands:")[1], "no summary is cut short"


def test_an_unknown_command_is_wrong_usage(tmp_path: Path) -> None:
    said = baton("serve", home=tmp_path)
    assert said.exit_code == 2 and "serve" in said.stderr


def test_the_command_line_does_not_load_what_only_workers_need() -> None:
    code = (
        "import sys; import cluster.cli.main, cluster.cli.clusters, cluster.cli.generate, cluster.cli.requests; "
        "print([name for name in ('torch', 'ray', 'transformers', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "[]"
