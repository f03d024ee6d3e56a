"""`baton model import`."""

from __future__ import annotations

from pathlib import Path

from cluster.cli.errors import FAILED, CommandError
from cluster.cli.progress import MovingLine
from engine.model.importer import ModelImportError, import_smollm2


def import_model(models_dir: Path) -> Path:
    """Converts the demo model unless it is there; returns its directory. Raises CommandError."""
    line = MovingLine()
    try:
        return import_smollm2(models_dir, progress=line.show)
    except (ModelImportError, OSError) as error:
        raise CommandError(str(error), FAILED) from error
    finally:
        line.end()
