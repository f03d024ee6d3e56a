"""`baton drain` and `baton flip`: what they order, what they show meanwhile, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from baton.v1 import admin_pb2
from cluster.cli import drain
from tests.support.cli_scripted import ScriptedFront, answer, baton, serving


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks again without waiting."""
    monkeypatch.setattr(drain, "POLL_S", 0.0)


def status(
    pool: str, state: str, incarnation: int, waits_for: str = "", **fields: object
) -> admin_pb2.GetStatusResponse:
    """Of a cluster with one worker, `w`."""
    worker = admin_pb2.WorkerStatus(name="w", role="decode", state=state, incarnation=incarnation)
    if waits_for:
        worker.drain.CopyFrom(admin_pb2.DrainStatus(then="stop", waits_for=waits_for, **fields))  # type: ignore[arg-type]
    return admin_pb2.GetStatusResponse(pools=[admin_pb2.PoolStatus(name=pool, role="decode", workers=[worker])])


def front(*statuses: admin_pb2.GetStatusResponse) -> ScriptedFront:
    """The last one stays."""
    return ScriptedFront(answer, status=statuses[-1], next_statuses=list(statuses[:-1]))


def test_a_drain_is_followed_until_the_worker_is_gone(tmp_path: Path) -> None:
    scripted = front(
        status("d", "draining", 1, "2 answers"),
        status("d", "draining", 1, "2 answers"),
        status("d", "draining", 1, "its process to end"),
        status("d", "drained", 0),
    )
    with serving(scripted) as address:
        said = baton("drain", "w", "--migrate", "--deadline", "2.5", "-a", address, home=tmp_path)
    assert scripted.orders == [admin_pb2.DrainRequest(worker="w", migrate=True, deadline_ms=2500)]
    assert said.exit_code == 0 and said.stdout.startswith("w is drained and gone after ")
    assert said.stderr.splitlines() == ["  w: waiting for 2 answers", "  w: waiting for its process to end"]


def test_a_worker_that_was_lost_meanwhile_is_gone_as_well(tmp_path: Path) -> None:
    with serving(front(status("d", "down", 0, "its next life, as it was lost before it had left"))) as address:
        assert baton("drain", "w", "-a", address, home=tmp_path).exit_code == 0


def test_a_restart_waits_for_the_next_life(tmp_path: Path) -> None:
    scripted = front(status("d", "draining", 1, "1 answer"), status("d", "down", 0), status("d", "ready", 2))
    with serving(scripted) as address:
        said = baton("drain", "w", "--restart", "--force", "-a", address, home=tmp_path)
    assert scripted.orders == [admin_pb2.DrainRequest(worker="w", restart=True, force=True)]
    assert said.exit_code == 0 and "its next life 2 serves" in said.stdout
    assert said.stderr.splitlines()[-1] == "  w: waiting for its next life"


def test_a_flip_names_the_pool_that_the_worker_is_in_then(tmp_path: Path) -> None:
    scripted = front(status("p", "draining", 1, "1 prompt or push"), status("p", "down", 0), status("d", "ready", 2))
    with serving(scripted) as address:
        said = baton("flip", "w", "--pool", "d", "--json", "-a", address, home=tmp_path)
    assert scripted.orders == [admin_pb2.FlipRequest(worker="w", pool="d")]
    told = json.loads(said.stdout)
    assert (told["worker"], told["pool"], told["state"], told["incarnation"]) == ("w", "d", "ready", 2)
    assert told["drained_incarnation"] == 1 and told["took_s"] >= 0


@pytest.mark.parametrize(
    ("code", "exit_code"), [(grpc.StatusCode.NOT_FOUND, 3), (grpc.StatusCode.FAILED_PRECONDITION, 2)]
)
def test_a_refusal_is_told_as_the_coordinator_gave_it(tmp_path: Path, code: grpc.StatusCode, exit_code: int) -> None:
    scripted = front(status("d", "ready", 1))
    scripted.refusal = (code, "the coordinator: w is the last decode worker")
    with serving(scripted) as address:
        said = baton("drain", "w", "-a", address, home=tmp_path)
    assert (said.exit_code, said.stderr) == (exit_code, "baton: w is the last decode worker\n")


def test_a_drain_that_nobody_knows_of_any_more_is_a_failure(tmp_path: Path) -> None:
    with serving(front(status("d", "ready", 1))) as address:
        said = baton("drain", "w", "-a", address, home=tmp_path)
    assert said.exit_code == 1 and "w is not being drained any more; it is ready" in said.stderr


def test_a_deadline_that_cannot_be_orders_nothing(tmp_path: Path) -> None:
    scripted = front(status("d", "ready", 1))
    with serving(scripted) as address:
        assert baton("drain", "w", "--deadline", "0", "-a", address, home=tmp_path).exit_code == 2
    assert not scripted.orders


def test_status_shows_what_a_drain_waits_for(tmp_path: Path) -> None:
    scripted = front(status("d", "draining", 1, "2 answers, 1 lease", remaining_ms=4200, migrate=True))
    with serving(scripted) as address:
        text = baton("status", "-a", address, home=tmp_path).stdout
        told = json.loads(baton("status", "--json", "-a", address, home=tmp_path).stdout)
    assert "draining w: waiting for 2 answers, 1 lease, 4 s left" in text
    assert told["pools"][0]["workers"][0]["drain"] == {
        "then": "stop",
        "pool": None,
        "migrate": True,
        "remaining_ms": 4200,
        "waits_for": "2 answers, 1 lease",
    }
