"""Reads tensors from safetensors files (one, or shards with an index) through a memory map that is given back.

Nothing of a file stays mapped after `close`, and pages that were read are dropped as loading goes on: a worker's
memory holds each weight once, in the layout and dtype that it computes in.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite, prod
from operator import index
from pathlib import Path
from typing import Any

import torch

from engine.model.config import read_safetensors_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class ModelWeightsError(Exception):
    """The directory's weights cannot be used; the message names the file or tensor and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies: `begin` .. `end` bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One mapped file. Raises ModelWeightsError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = dict(_parse_entries(path, *_read_header(path)))
        with path.open("rb") as file:
            # A private writable map, because torch warns about tensors over read-only memory; nothing is written.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read_into(self, name: str, target: torch.Tensor) -> int:
        """Copy a tensor into `target`, converting its dtype; returns the number of bytes read.

        A target on torch's device "meta" has no memory: its shape is checked, and nothing is read.
        """
        entry = self.entries[name]
        if entry.shape != tuple(target.shape):
            raise ModelWeightsError(f"{name} in {self.path} has shape {entry.shape}, expected {tuple(target.shape)}")
        if target.is_meta:
            return entry.end - entry.begin
        source = torch.frombuffer(self._map, dtype=entry.dtype, count=prod(entry.shape), offset=entry.begin)
        target.copy_(source.view(entry.shape))
        del source
        self._drop_pages(entry)
        return entry.end - entry.begin

    def close(self) -> None:
        self._map.close()

    def _drop_pages(self, entry: TensorEntry) -> None:
        begin = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)


class Checkpoint:
    """All tensors of a model directory, by name. Use as a context manager.

    Raises:
        ModelWeightsError: no weights, a missing shard, or a damaged file.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._files: list[SafetensorsFile] = []
        self._file_of_tensor: dict[str, SafetensorsFile] = {}
        try:
            for path, indexed in _shards(model_dir).items():
                file = SafetensorsFile(path)
                self._files.append(file)
                for name in file.entries:
                    # Of a tensor that several files hold, the index says which one counts.
                    if name in indexed or name not in self._file_of_tensor:
                        self._file_of_tensor[name] = file
        except ModelWeightsError:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of_tensor

    @property
    def names(self) -> Iterable[str]:
        return self._file_of_tensor.keys()

    def read_into(self, name: str, target: torch.Tensor) -> int:
        """As SafetensorsFile.read_into; also raises ModelWeightsError if there is no such tensor."""
        file = self._file_of_tensor.get(name)
        if file is None:
            shape = tuple(target.shape)
            raise ModelWeightsError(f"tensor {name}, of shape {shape}, is missing from the weights in {self.model_dir}")
        return file.read_into(name, target)

    def size_bytes(self, name: str) -> int:
        """Bytes of a tensor in its file; 0 if there is none."""
        file = self._file_of_tensor.get(name)
        return 0 if file is None else file.entries[name].end - file.entries[name].begin

    def close(self) -> None:
        for file in self._files:
            file.close()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a non-empty tensor holds neither NaN nor infinity. Reads it once, at the memory's speed.

    A damaged row of the embedding, or a damaged expert, would show only when a token meets it, and then fail all
    requests of that step.
    """
    return all(isfinite(end) for end in torch.stack(torch.aminmax(tensor)).tolist())


def check_files(model_dir: Path) -> None:
    """Raises ModelWeightsError for a file that is missing, truncated or no safetensors file; reads headers alone.

    Of what is in the files nothing is said: another reader may take dtypes that this one does not.
    """
    for path in _shards(model_dir):
        content, data_start = _read_header(path)
        for name, raw in content.items():
            if name != "__metadata__":
                _check_extent(path, name, raw, data_start)


def _shards(model_dir: Path) -> dict[Path, set[str]]:
    """The files, in order of their names, and the tensors that the index places in each."""
    index_path = model_dir / INDEX_FILE
    if not index_path.is_file():
        if not (model_dir / SINGLE_FILE).is_file():
            raise ModelWeightsError(f"{model_dir} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {model_dir / SINGLE_FILE: set()}
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelWeightsError(f"{index_path} is not a safetensors index: {error!r}") from error
    for name in names:
        # The index comes with the model: it must not lead out of the model's directory.
        if not isinstance(name, str) or Path(name).name != name or not (model_dir / name).is_file():
            raise ModelWeightsError(f"{index_path} names the file {name!r}, which is not in {model_dir}")
    shards: dict[Path, set[str]] = {model_dir / name: set() for name in names}
    for tensor, name in weight_map.items():
        shards[model_dir / name].add(tensor)
    return shards


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Its content, and where the data begins."""
    try:
        header = read_safetensors_header(path)
        content = json.loads(header)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelWeightsError(f"{path} is not a readable safetensors file: {error}") from error
    if not isinstance(content, dict):
        raise ModelWeightsError(f"{path} is not a safetensors file: its header is not an object")
    return content, 8 + len(header)


def _parse_entries(path: Path, content: dict[str, Any], data_start: int) -> Iterator[tuple[str, TensorEntry]]:
    """Entries of a header, checked against each other and the file's size."""
    for name, raw in content.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = _DTYPES.get(raw["dtype"]), tuple(map(index, raw["shape"]))
            size = prod(shape) * dtype.itemsize if dtype is not None else 0
        except (KeyError, TypeError, ValueError) as error:
            raise ModelWeightsError(f"the entry of {name} in {path} is malformed: {error!r}") from error
        if dtype is None:
            raise ModelWeightsError(f"{name} in {path} has dtype {raw['dtype']}; supported: {', '.join(_DTYPES)}")
        begin, end = _check_extent(path, name, raw, data_start, size)
        yield name, TensorEntry(dtype=dtype, shape=shape, begin=data_start + begin, end=data_start + end)


def _check_extent(path: Path, name: str, raw: Any, data_start: int, size: int | None = None) -> tuple[int, int]:
    """Begin and end of a tensor's data, of `size` bytes where that is known, and within the file."""
    try:
        begin, end = map(index, raw["data_offsets"])
        fits = 0 <= begin <= end and data_start + end <= path.stat().st_size
    except (KeyError, TypeError, ValueError) as error:
        raise ModelWeightsError(f"the entry of {name} in {path} is malformed: {error!r}") from error
    if not fits or size not in (None, end - begin):
        raise ModelWeightsError(f"{name} in {path} claims bytes {begin} to {end}, which does not fit: truncated?")
    return begin, end
