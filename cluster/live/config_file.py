"""Reads the cluster file: YAML with the line of every key, so that what is refused can be found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.core.config import VERSION, ClusterConfig, parse_cluster_config
from cluster.core.config_reader import KeyPath, format_path
from cluster.core.disaggregation import disaggregation_section
from cluster.core.errors import ConfigError
from cluster.core.tenant_config import TenantConfig

BOOLEAN_TAG: Final = "tag:yaml.org,2002:bool"
MAX_FILE_BYTES: Final = 2**20
MAX_DEPTH: Final = 16
MAX_NODES: Final = 100_000
"""Aliases let a small file stand for a huge one; more values than this are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A cluster file as read.

    Attributes:
        source: its name, as the user gave it. folder: where relative paths in it start.
        lines: the line of each key.
    """

    config: ClusterConfig
    source: str
    folder: Path
    lines: Mapping[KeyPath, int]

    def error(self, path: KeyPath, found: str, expected: str, hint: str = "") -> ConfigError:
        """What is wrong with a key for reasons outside the file; a missing key stands on its section's line."""
        known = [self.lines[path[:length]] for length in range(len(path), -1, -1) if path[:length] in self.lines]
        return ConfigError(
            source=self.source,
            line=known[0] if known else None,
            path=format_path(path),
            found=found,
            expected=expected,
            hint=hint,
        )


def read_cluster_file(path: Path) -> ClusterFile:
    """Reads and checks the file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something that is not expected.
    """
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            source=source, line=None, path="", found=f"no readable file ({reason})", expected="a cluster file in YAML"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            source=source, line=None, path="", found="a larger file", expected=f"at most {MAX_FILE_BYTES} bytes"
        )
    return parse_cluster_text(content, source, folder=path.absolute().parent)


def parse_cluster_text(content: bytes | str, source: str, folder: Path) -> ClusterFile:
    """The same for a text. Raises ConfigError."""
    lines: dict[KeyPath, int] = {}
    data = _Reader(source, lines).read(_compose(content, source), ())
    config = parse_cluster_config(data, source, lines.get)
    return ClusterFile(config=config, source=source, folder=folder, lines=lines)


def render_cluster_config(config: ClusterConfig) -> str:
    """A cluster file that reads as this configuration."""
    pools = [_without_absent({**asdict(pool), "role": pool.role.value}) for pool in config.pools]
    for pool in pools:
        if "kv_bytes" in pool:
            pool["kv_memory"] = pool.pop("kv_bytes")
        pool["host_cache"] = pool.pop("host_cache_bytes")
        pool["disk_cache"] = pool.pop("disk_cache_bytes")
        if "cores" in pool:
            pool["cores"] = [list(cores) for cores in pool["cores"]]
    data = {
        "version": VERSION,
        "name": config.name,
        "model": _without_absent(asdict(config.model)),
        "pools": pools,
        "kv": asdict(config.kv),
        "transport": asdict(config.transport),
        "front": asdict(config.front),
        "metrics": asdict(config.metrics),
        "coordinator": asdict(config.coordinator),
        "disaggregation": disaggregation_section(config.disaggregation),
        "journal": _without_absent(
            {
                "enabled": config.journal.is_on,
                "directory": config.journal.directory,
                "file_size": config.journal.file_size_bytes,
                "max_files": config.journal.max_files,
            }
        ),
        "slo": _without_absent(asdict(config.slo)),
        "default_tenant": _tenant(config.tenants.others),
    }
    if config.tenants.named:
        data["tenants"] = [{"name": tenant.name, **_tenant(tenant.config)} for tenant in config.tenants.named]
    return yaml.safe_dump(data, sort_keys=False)


def _tenant(tenant: TenantConfig) -> dict[str, Any]:
    return {"weight": tenant.weight, **({} if tenant.quota is None else asdict(tenant.quota))}


def _without_absent(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None and value != ""}


def _compose(content: bytes | str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        found = f"a text that is not YAML ({error.problem or error.context or 'syntax error'})"
        raise ConfigError(source=source, line=line, path="", found=found, expected="a cluster file in YAML") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        summary = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            source=source,
            line=None,
            path="",
            found=f"a text that is not YAML ({summary})",
            expected="a cluster file in YAML",
        ) from error


class _Reader:
    """Turns composed nodes into plain data and notes the line of each path.

    Works on nodes because the data alone has no lines, and because a key that is written twice is silently the last one
    in the data.
    """

    def __init__(self, source: str, lines: dict[KeyPath, int]) -> None:
        self._source = source
        self._lines = lines
        self._scalars = yaml.SafeLoader("")
        self._num_nodes = 0

    def read(self, node: yaml.Node | None, path: KeyPath) -> object:
        if node is None:
            return None
        self._lines.setdefault(path, node.start_mark.line + 1)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise self._error(node, path, f"more than {MAX_NODES} values", "a smaller file")
        if len(path) > MAX_DEPTH:
            raise self._error(node, path, f"more than {MAX_DEPTH} levels", "a flatter file")
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
        if node.tag == BOOLEAN_TAG and node.value.lower() not in ("true", "false"):
            return node.value  # YAML 1.1 takes a bare on, off, yes or no for a boolean, and `off` is a value of ours
        try:
            return self._scalars.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            raise self._error(node, path, f"the value {node.value!r}", "a plain YAML value") from error

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[object, object]:
        data: dict[object, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, "a key that is a list or a mapping", "a name")
            key: str = key_node.value
            key_path = (*path, key)
            if key in data:
                raise self._error(key_node, key_path, "the key a second time", "every key once")
            self._lines[key_path] = key_node.start_mark.line + 1
            data[key] = self.read(value_node, key_path)
        return data

    def _error(self, node: yaml.Node, path: KeyPath, found: str, expected: str) -> ConfigError:
        return ConfigError(
            source=self._source, line=node.start_mark.line + 1, path=format_path(path), found=found, expected=expected
        )
