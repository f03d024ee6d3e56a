"""The cluster file: lines of what is refused, and files that are not what they seem."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError
from cluster.live.config_file import (
    MAX_FILE_BYTES,
    ClusterFile,
    parse_cluster_text,
    read_cluster_file,
    render_cluster_config,
)

GOOD = """\
version: 1
name: test
model:
  path: ./model
pools:
  - name: p
    role: prefill
    cores: [[0], [1]]
    replicas: 2
  - name: d
    role: decode
    kv_blocks: 512
front:
  port: 0
"""
EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


def parse(text: str) -> ClusterFile:
    return parse_cluster_text(text, "cluster.yaml", folder=Path("/somewhere"))


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


def test_a_good_file_reads() -> None:
    config = parse(GOOD).config
    assert config.name == "test"
    assert [pool.name for pool in config.pools] == ["p", "d"]
    assert config.pools[0].cores == ((0,), (1,))


@pytest.mark.parametrize("text", ["off", "'off'", "sampled", "full"])
def test_what_is_verified_may_be_written_with_and_without_quotes(text: str) -> None:
    config = parse(GOOD + f"transport: {{checksum: {text}}}").config
    assert config.transport.checksum == text.strip("'")
    assert parse(render_cluster_config(config)).config.transport == config.transport


def test_what_may_be_verified_is_told() -> None:
    found = refusal(GOOD + "transport:\n  checksum: sample")
    assert "cluster.yaml:16: transport.checksum: found 'sample' (text), expected one of full, sampled, off" in found
    assert "'sampled'" in found
    assert "found 'no' (text)" in refusal(GOOD + "transport:\n  checksum: no")
    assert "found False (true/false)" in refusal(GOOD + "transport:\n  checksum: false")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("role: decode", "rolle: decode", "cluster.yaml:10: pools[1].role:"),
        ("replicas: 2", "replicas: two", "cluster.yaml:9: pools[0].replicas: found 'two' (text)"),
        ("replicas: 2", "replicas: -1", "cluster.yaml:9: pools[0].replicas: found -1 (integer)"),
        ("port: 0", "port: 70000", "cluster.yaml:14: front.port:"),
        ("port: 0", "prot: 0", "cluster.yaml:14: front.prot: found the unknown key 'prot'"),
        ("kv_blocks: 512", "kv_memory: 3 parsecs", "cluster.yaml:12: pools[1].kv_memory:"),
        ("version: 1", "version: 2", "cluster.yaml:1: version:"),
    ],
)
def test_what_is_refused_is_named_with_its_line(old: str, new: str, where: str) -> None:
    assert old in GOOD
    assert refusal(GOOD.replace(old, new)).startswith(where)


def test_a_missing_key_stands_on_the_line_of_its_section() -> None:
    assert refusal(GOOD.replace("  path: ./model\n", "  dtype: float32\n")).startswith("cluster.yaml:3: model:")


def test_a_key_written_twice_is_refused_where_it_stands_again() -> None:
    assert (
        refusal(GOOD + "name: other\n") == "cluster.yaml:15: name: found the key a second time, expected every key once"
    )


def test_a_syntax_error_has_its_line() -> None:
    assert refusal(GOOD + "pools: [\n").startswith("cluster.yaml:16: found a text that is not YAML")


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "just text", "version: 1\n", "? [a]\n: b\n", "a: !!python/object:os.x {}\n"]
)
def test_other_things_than_a_cluster_file_are_refused(text: str) -> None:
    assert refusal(text).startswith("cluster.yaml")


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="not YAML"):
        parse_cluster_text(b"\xff\xfe\x00name: \xc3\x28", "cluster.yaml", folder=Path())


def test_aliases_cannot_blow_a_small_file_up() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "values" in refusal("\n".join(lines))


def test_an_alias_cycle_ends() -> None:
    assert "levels" in refusal("a: &a [*a]\n")


def test_a_deep_file_is_refused() -> None:
    assert "levels" in refusal("a: " + "[" * 50 + "]" * 50)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no readable file"):
        read_cluster_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="no readable file"):
        read_cluster_file(tmp_path)


def test_an_oversized_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_text("#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="a larger file"):
        read_cluster_file(path)


def test_later_checks_can_point_at_a_line_too() -> None:
    error = parse(GOOD).error(("front", "port"), "a port in use", "a free port")
    assert str(error) == "cluster.yaml:14: front.port: found a port in use, expected a free port"
    absent = parse(GOOD).error(("model", "preset"), "x", "y")
    assert absent.line == 3


def test_a_rendered_configuration_reads_as_itself() -> None:
    config = parse(GOOD).config
    assert parse(render_cluster_config(config)).config == config


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_read(path: Path) -> None:
    file = read_cluster_file(path)
    assert isinstance(file.config, ClusterConfig)
    assert file.folder == EXAMPLES


def test_tenants_and_the_limit_on_first_tokens_are_written_as_they_were_read() -> None:
    tenants = "slo: {ttft_ms: 900}\ntenants:\n  - {name: a, weight: 2, tokens_per_s: 5}\n  - {name: b}\n"
    config = parse(GOOD + tenants + "default_tenant: {tokens_per_s: 7, burst_tokens: 9}\n").config
    assert parse(render_cluster_config(config)).config == config
    assert "cluster.yaml:17: tenants[0].weigth: " in refusal(GOOD + "slo: {}\ntenants:\n  - {name: a, weigth: 2}")
