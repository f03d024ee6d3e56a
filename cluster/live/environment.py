"""What the process's environment says, read once at the entry point and handed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "baton-cluster"
"""What Baton is called where Python packages are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Attributes:
    cache_dir: where models and the records of running clusters are kept.
    baton_address: host:port of a front to talk to (`BATON_ADDRESS`), None if not set.
    ray_address: a running Ray to join (`RAY_ADDRESS`), None if not set.
    variables: all of them, to be handed to processes that are started.
    """

    cache_dir: Path
    baton_address: str | None
    ray_address: str | None
    variables: Mapping[str, str]

    @property
    def models_dir(self) -> Path:
        return self.cache_dir / "models"

    @property
    def journals_dir(self) -> Path:
        return self.cache_dir / "journals"

    @property
    def clusters_dir(self) -> Path:
        return self.cache_dir / "clusters"


def read_environment(variables: Mapping[str, str]) -> Environment:
    """XDG_CACHE_HOME is honoured where it is an absolute path, as its specification asks."""
    cache_home = Path(variables.get("XDG_CACHE_HOME", ""))
    if not cache_home.is_absolute():
        cache_home = Path(variables.get("HOME") or Path.home()) / ".cache"
    return Environment(
        cache_dir=cache_home / "baton",
        baton_address=variables.get("BATON_ADDRESS") or None,
        ray_address=variables.get("RAY_ADDRESS") or None,
        variables=dict(variables),
    )
