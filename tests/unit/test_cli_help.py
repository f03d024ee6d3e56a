"""The help teaches, and costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_scripted import baton

COMMANDS = ["up", "down", "status", "leases", "generate", "demo", "model import"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_exit_codes(tmp_path: Path, command: str) -> None:
    said = baton(*command.split(), "-h", home=tmp_path)
    assert said.exit_code == 0
    assert "Examples:" in said.stdout and f"baton {command}" in said.stdout
    assert "Exit codes:" in said.stdout and "130" in said.stdout
    assert said.stdout == baton(*command.split(), "--help", home=tmp_path).stdout


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
