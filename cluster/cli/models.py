"""`baton model import`."""

from __future__ import annotations

from pathlib import Path

from cluster.cli.clusters import interrupt_on_sigterm
from cluster.cli.errors import FAILED, CommandError
from cluster.cli.progress import MovingLine
from engine.model.importer import import_model
from engine.model.packaged_models import ModelImportError


def import_with_progress(name: str, models_dir: Path) -> Path:
    """Converts the packaged model unless it is there; returns its directory. Raises CommandError."""
    interrupt_on_sigterm()
    line = MovingLine()
    try:
        return import_model(name, models_dir, progress=line.show)
    except (ModelImportError, OSError) as error:
        raise CommandError(str(error), FAILED) from error
    finally:
        line.end()
