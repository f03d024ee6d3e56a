"""Small parts of the live cluster: the outgoing queue, the hosted loop, records, addresses, the environment."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.errors import StartupError
from cluster.live.cluster_record import ClusterRecord, ClusterRecords
from cluster.live.environment import read_environment
from cluster.live.hosted_loop import HostedLoop, OnReady, Phase, ProgramReport, describe_error
from cluster.live.ray_head import MAX_TEMP_DIR_CHARS, make_temp_dir, remove_temp_dir
from cluster.live.reachability import is_loopback, peer_host_of, split_address, why_unreachable

TIMEOUT_S = 10.0
RECORD = ClusterRecord(
    name="c", run_id="r", phase="starting", launcher_pid=1, launcher_started_s=2.5, ray_owned=True, ray_temp_dir="/t"
)


# ---- the hosted loop ----


class Hosted:
    """A loop and its end, to wait for."""

    def __init__(self, program: object) -> None:
        self.ended = threading.Event()
        self.last: ProgramReport | None = None
        self.loop = HostedLoop("test", program, self._on_end)  # type: ignore[arg-type]

    def _on_end(self, report: ProgramReport) -> None:
        self.last = report
        self.ended.set()

    def wait(self) -> ProgramReport:
        assert self.ended.wait(TIMEOUT_S)
        assert self.last is not None
        return self.last


def test_a_program_serves_and_ends() -> None:
    ready, end = threading.Event(), threading.Event()

    async def program(on_ready: OnReady, stop: asyncio.Event) -> None:
        on_ready("127.0.0.1:7")
        ready.set()
        await asyncio.to_thread(end.wait, TIMEOUT_S)

    hosted = Hosted(program)
    assert ready.wait(TIMEOUT_S)
    assert hosted.loop.report == ProgramReport(phase=Phase.SERVING, address="127.0.0.1:7")
    end.set()
    assert hosted.wait() == ProgramReport(phase=Phase.ENDED, address="127.0.0.1:7")


@pytest.mark.parametrize("error", [StartupError("no model"), MemoryError(), SystemExit("no model")])
def test_what_a_program_dies_of_is_reported(error: BaseException) -> None:
    async def program(on_ready: OnReady, stop: asyncio.Event) -> None:
        raise error

    report = Hosted(program).wait()
    assert report.phase is Phase.FAILED
    assert report.error == ("out of memory" if isinstance(error, MemoryError) else "no model")


def test_errors_are_described_in_one_line() -> None:
    assert describe_error(ValueError("a\n  b")) == "a b"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(RuntimeError()) == "RuntimeError"
    assert describe_error(MemoryError("12 GiB")) == "out of memory: 12 GiB"


# ---- records ----


def test_a_record_reads_as_written(tmp_path: Path) -> None:
    records = ClusterRecords(tmp_path / "clusters")
    assert records.all() == [] and records.read("c") is None
    records.create(RECORD)
    with pytest.raises(FileExistsError):
        records.create(RECORD)
    serving = replace(RECORD, phase="serving", address="a:1")
    records.update(serving)
    assert records.read("c") == serving and records.all() == [serving]
    records.remove("c")
    records.remove("c")
    assert records.all() == []
    assert list((tmp_path / "clusters").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}", '{"name": 3}', '{"name": "c", "launcher_pid": "x"}'])
def test_a_file_that_is_no_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    assert ClusterRecords(tmp_path).read("c") is None


# ---- addresses ----


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host:80", ("host", 80)),
        ("[::1]:80", ("::1", 80)),
        ("host", (None, None)),
        ("host:", (None, None)),
        (":80", (None, 80)),
        ("host:x", (None, None)),
        ("host:0", (None, None)),
        ("host:65536", (None, None)),
        ("host:-1", (None, None)),
        ("host:٣", (None, None)),
        ("", (None, None)),
    ],
)
def test_addresses_are_split(address: str, parts: tuple[str | None, int | None]) -> None:
    assert split_address(address) == parts


def test_peers_hosts_are_read_from_grpcs_names() -> None:
    assert peer_host_of("ipv4:10.0.0.3:4711") == "10.0.0.3"
    assert peer_host_of("ipv6:%5B::1%5D:4711") == "::1"
    assert peer_host_of("unix:/tmp/x") is None
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("10.0.0.3") and not is_loopback("example.org")


@pytest.mark.bad_day(13)
def test_a_loopback_address_of_a_worker_elsewhere_is_refused_unasked() -> None:
    reason = asyncio.run(why_unreachable("127.0.0.1:9", "ipv4:10.0.0.3:4711"))
    assert reason is not None and "127.0.0.1:9" in reason and "10.0.0.3" in reason


def test_an_address_that_is_none_is_refused() -> None:
    assert "host:port" in str(asyncio.run(why_unreachable("nonsense", "ipv4:127.0.0.1:1")))


# ---- the environment and Ray's folder ----


def test_the_cache_follows_its_specification() -> None:
    assert read_environment({"XDG_CACHE_HOME": "/x", "HOME": "/h"}).models_dir == Path("/x/baton/models")
    assert read_environment({"XDG_CACHE_HOME": "relative", "HOME": "/h"}).cache_dir == Path("/h/.cache/baton")
    nothing = read_environment({"HOME": "/h", "BATON_ADDRESS": "", "RAY_ADDRESS": ""})
    assert nothing.baton_address is None and nothing.ray_address is None


def test_rays_folder_has_room_for_its_sockets_and_only_such_a_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("deep" * 10)))
    folder = make_temp_dir()
    assert Path(folder).is_dir() and len(folder) <= MAX_TEMP_DIR_CHARS
    remove_temp_dir(folder)
    assert not Path(folder).exists()
    remove_temp_dir(str(tmp_path))
    remove_temp_dir("")
    assert tmp_path.is_dir()
