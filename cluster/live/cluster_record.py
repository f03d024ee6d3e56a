"""The record of a cluster that was started from this account: one small JSON file each, in the user's cache.

It is written before the first process is started and removed after the last one has ended, so that whatever happens
in between, `baton down` knows what to look for.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

MAX_RECORDS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """Attributes:
    name: of the cluster; run_id: of this start of it, carried by its processes in their environment.
    phase: `starting` or `serving`.
    launcher_pid, launcher_started_s: the process that starts it (creation time in seconds since the epoch, against
        reuse of the pid).
    ray_address: host:port, empty until Ray runs. ray_owned: whether Ray was started for this cluster alone.
    ray_temp_dir: Ray's folder if it was.
    address: of the first front, empty until it serves. coordinator_address: likewise.
    config_path: the cluster file as the user named it.
    journal_dir: where the coordinator's journal is, on its machine; empty for nowhere.
    """

    name: str
    run_id: str
    phase: str
    launcher_pid: int
    launcher_started_s: float
    ray_owned: bool
    ray_temp_dir: str = ""
    ray_address: str = ""
    address: str = ""
    coordinator_address: str = ""
    config_path: str = ""
    journal_dir: str = ""

    @property
    def ray_namespace(self) -> str:
        return f"baton-{self.name}"


class ClusterRecords:
    """The records of one user. Every write is atomic."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def create(self, record: ClusterRecord) -> None:
        """Raises FileExistsError if there is a record of that name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        staged = self._stage(record)
        try:
            # A link fails where the name is taken, which a rename does not.
            os.link(staged, self.path_of(record.name))
        finally:
            staged.unlink()

    def update(self, record: ClusterRecord) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stage(record).replace(self.path_of(record.name))

    def read(self, name: str) -> ClusterRecord | None:
        """None if there is none, or if the file is not a record (nothing this program wrote)."""
        try:
            data = json.loads(self.path_of(name).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return _from_json(data)

    def all(self) -> list[ClusterRecord]:
        """All records, by name."""
        paths = sorted(self._folder.glob("*.json"))[:MAX_RECORDS]
        records = [self.read(path.stem) for path in paths]
        return [record for record in records if record is not None]

    def remove(self, name: str) -> None:
        self.path_of(name).unlink(missing_ok=True)

    def _stage(self, record: ClusterRecord) -> Path:
        descriptor, staged = tempfile.mkstemp(prefix=f".{record.name}-", dir=self._folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file, indent=2)
            file.write("\n")
        return Path(staged)


def _from_json(data: Any) -> ClusterRecord | None:
    if not isinstance(data, dict):
        return None
    kinds = {"launcher_pid": int, "launcher_started_s": (int, float), "ray_owned": bool}
    values: dict[str, Any] = {}
    for field in fields(ClusterRecord):
        if field.name in data:
            if not isinstance(data[field.name], kinds.get(field.name, str)):  # type: ignore[arg-type]
                return None
            values[field.name] = data[field.name]
    try:
        return ClusterRecord(**values)
    except TypeError:
        return None
