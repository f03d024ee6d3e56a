"""The rules of ARCHITECTURE.md that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tidy import stubs

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "engine", "kv_transfer", "prefill_worker", "decode_worker", "benchmarks")
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 80
# The modules that the import rules call pure, from the one list of them.
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PURE = tuple(name for contract in CONTRACTS for name in contract.get("source_modules", ()))


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _pure_sources() -> list[Path]:
    paths = [ROOT / name.replace(".", "/") for name in PURE]
    return [
        source for path in paths for source in (_sources(str(path)) if path.is_dir() else [path.with_suffix(".py")])
    ]


def _run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_style() -> None:
    _run("ruff", "check", ".")


def test_format() -> None:
    _run("ruff", "format", "--check", ".")


@pytest.mark.timeout(600)
def test_types() -> None:
    _run("mypy")


def test_import_rules() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_stubs_are_current(tmp_path: Path) -> None:
    fresh = stubs.generate(tmp_path)
    committed = sorted(path.relative_to(stubs.PROTO_ROOT) for path in stubs.PROTO_ROOT.glob("baton/v1/*_pb2*.py*"))
    assert fresh == committed
    for path in fresh:
        assert (tmp_path / path).read_text() == (stubs.PROTO_ROOT / path).read_text(), f"{path}: run `make stubs`"


@pytest.mark.parametrize("path", _sources(*PACKAGES), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", _sources(*PACKAGES), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_say_what_they_are_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "a module without a docstring"


@pytest.mark.parametrize("path", _sources(*PACKAGES, "tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_exception_is_passed_over_in_silence(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(part, ast.Pass) for part in node.body):
            pytest.fail(f"line {node.lineno}: use contextlib.suppress with a reason, or handle it")


@pytest.mark.parametrize("path", _pure_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_import_only_the_standard_library_and_each_other(path: Path) -> None:
    own = {"cluster", "engine", "kv_transfer"}
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            assert top in own or top in sys.stdlib_module_names, f"line {node.lineno} imports {name}"


def test_no_text_names_a_machine_path_or_registry_host() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # Spelt apart so that this file does not find itself.
    forbidden = re.compile("|".join(("/wo" + "rk/", "/ro" + r"ot/\.", "pypi" + r"\.org", "files\\.python" + "hosted")))
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".png", ".so"} or not path.is_file():
            continue
        match = forbidden.search(path.read_text(errors="replace"))
        assert match is None, f"{name} mentions {match.group(0)}"
