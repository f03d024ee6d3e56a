"""Every line of docs/bad-days.md has a test that names it, by `@pytest.mark.bad_day(NUMBER, ...)`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def numbers_listed() -> list[int]:
    text = (ROOT / "docs" / "bad-days.md").read_text()
    return [int(number) for number in re.findall(r"^(\d+)\. .+ → .+$", text, re.MULTILINE)]


def numbers_marked() -> dict[int, list[str]]:
    """By number, the tests whose mark names it."""
    marked: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for number in _numbers_of(node):
                    marked.setdefault(number, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return marked


def _numbers_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[int]:
    marks = [mark for mark in node.decorator_list if ast.unparse(mark).startswith("pytest.mark.bad_day")]
    numbers = [ast.literal_eval(number) for mark in marks if isinstance(mark, ast.Call) for number in mark.args]
    assert not marks or numbers, f"{node.name}: its mark names no bad day"
    assert not marks or node.name.startswith(("test_", "Test")), f"{node.name} is marked and is no test"
    return numbers


def test_the_list_is_numbered_without_gaps() -> None:
    assert numbers_listed() == list(range(1, len(numbers_listed()) + 1))


def test_every_bad_day_has_a_test_and_every_mark_a_bad_day() -> None:
    listed, marked = set(numbers_listed()), numbers_marked()
    assert not {number: tests for number, tests in marked.items() if number not in listed}, "marks of unknown lines"
    assert not listed - marked.keys(), "lines without a test"
