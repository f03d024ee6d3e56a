"""Imports a packaged model: its GGUF file, turned into a Hugging Face directory.

Conversion takes `transformers` (with `accelerate` and `gguf`), which is imported inside it, so that workers never pay
for it. It takes a minute or two and happens once a user: the directory appears by a rename when it is complete,
and is used as it is from then on.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.model.installing import how_to_install
from engine.model.packaged_models import (
    PACKAGED_MODELS,
    ModelImportError,
    PackagedModel,
    assemble_gguf,
    find_gguf_pieces,
)

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


def import_model(name: str, models_dir: Path, progress: ImportProgress | None = None) -> Path:
    """Convert a model of PACKAGED_MODELS to bfloat16 safetensors in `models_dir`, unless it is there already.

    Returns the model's directory. Safe to run from several processes at once: each converts into a directory of
    its own and the first rename wins.

    Raises:
        ModelImportError: a package with the GGUF file, or one that the conversion needs, is not installed; or
            the file is not the one that is expected.
        OSError: `models_dir` cannot be written.
        ValueError: there is no packaged model of that name.
    """
    if name not in PACKAGED_MODELS:
        raise ValueError(f"name must be one of {', '.join(PACKAGED_MODELS)}, got {name!r}")
    model = PACKAGED_MODELS[name]
    report = progress or (lambda step, fraction: None)
    target = Path(models_dir) / model.directory_name
    if is_complete(target):
        report("already imported", 1.0)
        return target
    pieces = find_gguf_pieces(model)
    _require_conversion_packages()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_directory(target) as scratch:
        report("reading packages", 0.0)
        gguf_path = assemble_gguf(model, pieces, scratch)
        converted = scratch / "converted"
        converted.mkdir()
        # The converter draws progress bars of its own on stderr; what goes wrong arrives as an exception.
        with contextlib.redirect_stderr(io.StringIO()):
            _convert(model, gguf_path, converted, report)
        _publish(converted, target)
    report("imported", 1.0)
    return target


def is_complete(model_dir: Path) -> bool:
    """Whether every file of an imported model is there; the final rename makes them appear together."""
    return all((model_dir / name).is_file() for name in REQUIRED_FILES)


@contextlib.contextmanager
def _scratch_directory(target: Path) -> Iterator[Path]:
    """A new folder beside the target, removed at the end, and before it those of imports that were killed.

    A folder is locked while it is in use, which no death of its process survives.
    """
    prefix = f".{target.name}-"
    with _locked(target.parent):
        for left in target.parent.glob(f"{prefix}*"):
            # It is in use, has gone meanwhile, or is somebody else's.
            with contextlib.suppress(OSError), _locked(left, waits=False):
                shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        lock = contextlib.ExitStack()
        lock.enter_context(_locked(scratch))
    with lock:
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, *, waits: bool = True) -> Iterator[None]:
    """Raises OSError where it cannot be opened, or is locked by another and this one does not wait."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _require_conversion_packages() -> None:
    missing = [name for name in CONVERSION_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelImportError(f"converting a model needs {', '.join(missing)}: {how_to_install(*missing)}")


def _convert(model: PackagedModel, gguf_path: Path, directory: Path, report: ImportProgress) -> None:
    """Read the GGUF file with transformers and save weights and tokenizer in `directory`.

    transformers also undoes what GGUF does to weights: it permutes the rows of the query and key weights of Llama
    models, and stores the norms' weights of Gemma models plus one.
    """
    report("loading converter", 0.0)
    import torch

    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf_path.name, "local_files_only": True}
    report("converting tokenizer", 0.1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, **source)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    report("converting weights", 0.25)
    converted = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        dtype=torch.float32,
        # Dequantized, because a model whose weights stay in GGUF blocks cannot be saved.
        quantization_config=transformers.GgufConfig(dequantize=True),
        **source,
    )
    report("saving weights", 0.9)
    converted.to(torch.bfloat16).save_pretrained(directory)
    _finish_config(directory, model)
    _finish_tokenizer(directory, model, tokenizer.chat_template, converted.config.max_position_embeddings)


def _finish_config(directory: Path, model: PackagedModel) -> None:
    """Keep what describes the model, drop what describes its conversion, and check its end-of-sequence id.

    The configuration is part of the model's fingerprint, which must not depend on the converter's version.
    """
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    for key in ("_model_name_or_path", "transformers_version"):
        config.pop(key, None)
    if config.get("eos_token_id") != model.eos_token_id:
        raise ModelImportError(f"expected end-of-sequence id {model.eos_token_id}, got {config.get('eos_token_id')}")
    _write_json(config_path, config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", generation)


def _finish_tokenizer(directory: Path, model: PackagedModel, chat_template: str | None, max_length: int) -> None:
    """Make the tokenizer that of the original checkpoint."""
    tokenizer_path = directory / "tokenizer.json"
    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    model.repair_tokenizer(tokenizer)
    tokenizer_path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")

    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    if chat_template is not None:
        config["chat_template"] = chat_template
    config.update(
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        add_bos_token=model.adds_bos_token,
        # The class that takes tokenizer.json as it is; others make it anew from the vocabulary.
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
