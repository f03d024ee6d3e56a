"""The last chunk of a prompt is pushed in groups of layers while its step runs."""

from __future__ import annotations

import pytest

from cluster.agent import events as ev
from cluster.agent.last_chunks import LastChunks, layer_marks
from cluster.agent.legs import Leg, LegKind, Phase
from cluster.agent.limits import NUM_LAYER_GROUPS
from cluster.core.ids import AttemptId, Outcome
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from engine.core.step import StepPlan
from kv_transfer.protocol.messages import PushKey
from tests.support.engine_model import make_step
from tests.support.toy_engine import undisturbed
from tests.support.worker_pair import BLOCK_SIZE, NUM_LAYERS, Request, World

CHUNK_TOKENS = 8
BLOCK_BYTES = 64
PROMPT = tuple(range(2 * CHUNK_TOKENS + BLOCK_SIZE + 1))
"""Two chunks and a last one of a full block and a begun one."""
EVERY_MARK = [1, 2, 3]


def submit(prompt: tuple[int, ...] = PROMPT, name: str = "r", **options: bool) -> tuple[World, Request]:
    world = World()
    return world, add(world, prompt, name, **options)


def add(world: World, prompt: tuple[int, ...], name: str, **options: bool) -> Request:
    body = RequestBody(prompt_ids=prompt, sampling=SamplingParams(max_tokens=4))
    request = world.submit(name, body, **options)
    if world.prefill.connecting:
        world.prefill.connect()
    return request


def reach_the_last_chunk(world: World) -> None:
    while not world.prefill.layer_marks:
        world.prefill.end_step()
        while world.prefill.writes:
            world.prefill.land_write()


def finish(world: World, request: Request) -> None:
    world.settle()
    assert request.committed is not None
    body = request.body
    assert world.front.token_ids("r") == undisturbed(list(body.prompt_ids), body.sampling).token_ids
    world.forget(request)
    world.check_nothing_left()


@pytest.mark.parametrize(
    ("num_layers", "marks"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (6, (1, 2, 3, 4, 5, 6)),
        (7, (2, 4, 6, 7)),
        (28, (5, 10, 15, 20, 25, 28)),
        (30, (5, 10, 15, 20, 25, 30)),
        (80, (14, 28, 42, 56, 70, 80)),
    ],
)
def test_marks_cut_the_layers_into_about_six_groups(num_layers: int, marks: tuple[int, ...]) -> None:
    assert layer_marks(num_layers) == marks
    assert len(marks) <= NUM_LAYER_GROUPS


def test_layers_are_written_to_the_peer_while_the_step_runs() -> None:
    world, request = submit()
    reach_the_last_chunk(world)
    assert world.prefill.layer_marks == EVERY_MARK
    assert world.prefill.writes == []
    for layer in range(NUM_LAYERS):
        world.prefill.write_layers()
        (write,) = world.prefill.writes
        assert write.message.layers == range(layer, layer + 1)
        assert [block.index for block in write.message.blocks] == [4, 5]
        world.prefill.land_write()
    world.prefill.end_step()
    assert world.prefill.writes == []
    finish(world, request)
    assert request.committed is not None
    timeline = request.committed.timeline
    assert (timeline.kv_bytes, timeline.kv_early_bytes) == (6 * BLOCK_BYTES, 6 * BLOCK_BYTES)


@pytest.mark.parametrize("num_told", range(NUM_LAYERS + 1))
def test_layers_of_which_nobody_has_told_are_pushed_at_the_steps_end(num_told: int) -> None:
    world, request = submit()
    reach_the_last_chunk(world)
    for _ in range(num_told):
        world.prefill.write_layers()
        world.prefill.land_write()
    world.prefill.end_step()
    written = [write.message.layers for write in world.prefill.writes]
    assert written == ([range(num_told, NUM_LAYERS)] if num_told < NUM_LAYERS else [])
    finish(world, request)
    assert request.committed is not None
    early_bytes = (4 * NUM_LAYERS + 2 * num_told) * BLOCK_BYTES // NUM_LAYERS
    assert request.committed.timeline.kv_early_bytes == early_bytes


def test_only_the_last_chunk_of_a_push_is_cut_into_layers() -> None:
    world, request = submit()
    num_marked = 0
    while request.committed is None:
        plan, marks = world.prefill.plan, world.prefill.layer_marks
        is_last = plan is not None and plan.sequences[0].sample
        assert marks == (EVERY_MARK if is_last else [])
        num_marked += bool(marks)
        if plan is not None:
            world.prefill.end_step()
        else:
            world.settle()
        assert world.decode.layer_marks == []
    assert num_marked == 1
    finish(world, request)
    world, request = submit(local=True)
    while world.decode.plan is not None:
        assert world.decode.layer_marks == []
        world.decode.end_step()
    world.settle()
    world.forget(request)
    world.check_nothing_left()


def test_failed_step_leaves_no_half_given_block() -> None:
    world, request = submit()
    reach_the_last_chunk(world)
    world.prefill.write_layers()
    world.prefill.fail_step()
    world.run_later()
    assert [failure.outcome for failure in request.failures] == [Outcome.INTERNAL]
    world.settle()
    assert request.committed is None and request.legs == {}
    world.forget(request)
    world.check_nothing_left()
    again = add(world, PROMPT, "again")
    world.settle()
    assert again.committed is not None


def test_cancel_between_two_groups_ends_the_push_and_the_step_goes_on_alone() -> None:
    world, request = submit()
    reach_the_last_chunk(world)
    world.prefill.write_layers()
    world.cancel(request)
    num_writes = len(world.prefill.writes)
    world.prefill.write_layers()
    assert len(world.prefill.writes) == num_writes
    world.settle()
    assert request.legs == {}
    world.forget(request)
    world.check_nothing_left()


def test_two_prompts_of_one_step_are_pushed_side_by_side() -> None:
    world = World()
    # The others came while the first one's step ran, so they go into the next one together.
    requests = [add(world, tuple(range(start, start + 4)), f"r{start}") for start in (0, 30, 60)]
    world.prefill.end_step()
    while world.prefill.writes:
        world.prefill.land_write()
    assert world.prefill.plan is not None and len(world.prefill.plan.sequences) == 2
    world.prefill.write_layers()
    assert [write.message.key.request_id for write in world.prefill.writes] == ["r30", "r60"]
    world.settle()
    for request in requests:
        assert request.committed is not None
        world.forget(request)
    world.check_nothing_left()


def test_word_of_a_step_that_is_over_is_a_bug() -> None:
    world, _ = submit()
    reach_the_last_chunk(world)
    plan = world.prefill.plan
    assert plan is not None
    world.prefill.end_step()
    with pytest.raises(AssertionError, match="is over"):
        world.prefill.handle(ev.LayersWritten(step_id=plan.step_id, num_layers=1))


class RecordedPushes:
    """Stands in for Pushes: what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[list[tuple[int, int]], range | None]] = []

    def blocks_ready(
        self, now_ns: int, key: PushKey, blocks: list[tuple[int, int]], layers: range | None = None
    ) -> None:
        self.given.append((blocks, layers))


def test_a_push_keeps_to_the_blocks_it_has_begun_with() -> None:
    """The sequence may go on with another block of equal content: the push's layers come from one and the same."""
    pushes = RecordedPushes()
    last_chunks = LastChunks(pushes, num_layers=12, block_size=4)  # type: ignore[arg-type]
    body = RequestBody(prompt_ids=tuple(range(10)), sampling=SamplingParams())
    leg = Leg(attempt=AttemptId("r", 1), kind=LegKind.PREFILL, phase=Phase.RUNNING, body=body, created_ns=0)
    leg.num_blocks_ready = 1
    last_chunks.add(leg)
    table = [7, 5, 9]
    step = make_step(body.prompt_ids[4:], 4, table)
    assert last_chunks.step_started(StepPlan(step_id=1, sequences=[step])) == (2, 4, 6, 8, 10, 12)
    last_chunks.layers_written(1, 2)
    last_chunks.layers_written(2, 6)
    table[1] = step.block_table[1] = 3
    assert last_chunks.complete(3, leg)
    blocks = [(1, 5), (2, 9)]
    assert pushes.given == [(blocks, range(2)), (blocks, range(2, 6)), (blocks, range(6, 12))]
    last_chunks.check_invariants()
    last_chunks.remove(leg)
    last_chunks.check_invariants()
    assert last_chunks.step_started(StepPlan(step_id=2, sequences=[step])) == ()
