"""The shape that benchmarks share, and that a reader finds each of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.report import Report, at_least, at_most, finish
from benchmarks.run_all import NOT_BENCHMARKS

ROOT = Path(__file__).parents[2]


def test_a_missed_target_is_told_with_its_unit_if_it_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [at_least("overlap", 0.5, 0.9, "1"), at_most("gap", 30.0, 20.0, "ms"), at_most("fine", 1.0, 2.0, "ms")]
    args = argparse.Namespace(json=tmp_path / "r.json", check=True)
    with pytest.raises(SystemExit) as ended:
        finish(Report(benchmark="b", results=results), args)
    assert ended.value.code == 1
    where, *missed = capsys.readouterr().err.splitlines()
    assert where == f"written to {args.json}"
    assert missed == ["MISSED overlap: 0.5, wanted >= 0.9", "MISSED gap: 30 ms, wanted <= 20"]


def test_the_readme_names_every_benchmark() -> None:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in NOT_BENCHMARKS)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert names and [name for name in names if f"- `{name}`: " not in readme] == []
