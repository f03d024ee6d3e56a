"""Who shares blocks with whom on a worker, and that fronts, workers and engine call a block by one name."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.messages import BlockEvents
from cluster.front.settings import FrontSettings, ServedModel, load_model
from engine.core.block_hash import extra_key, hash_blocks
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from engine.model.config import model_fingerprint
from tests.support.engine_model import write_tiny_model
from tests.support.worker_pair import BLOCK_SIZE, SECOND_NS, World

PROMPT = tuple(range(1, 18))
NUM_SHARED_TOKENS = 16
"""Of the prompt's full blocks."""


def body(adapter: str = "", cache_salt: str = "", max_tokens: int = 2) -> RequestBody:
    sampling = SamplingParams(max_tokens=max_tokens)
    return RequestBody(prompt_ids=PROMPT, sampling=sampling, adapter=adapter, cache_salt=cache_salt)


def num_hit_tokens(world: World) -> list[int]:
    return [host.state.pool.prefix_counters().num_hit_tokens for host in world.hosts()]


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    ("second", "is_shared"),
    [
        (body("lora", "tenant"), True),
        (body("lora", "other"), False),
        (body("other", "tenant"), False),
        (body("tenant", "lora"), False),
        (body("loratenant", ""), False),
        (body("", "loratenant"), False),
        (body("lora", "tenant "), False),
        (body("Lora", "tenant"), False),
        (body(), False),
    ],
)
def test_requests_share_blocks_only_under_one_adapter_and_one_salt(
    second: RequestBody, is_shared: bool, is_local: bool
) -> None:
    world = World()
    for name, each in (("first", body("lora", "tenant")), ("second", second)):
        world.submit(name, each, local=is_local)
        world.settle()
    expected = NUM_SHARED_TOKENS if is_shared else 0
    assert num_hit_tokens(world) == [0 if is_local else expected, expected]


def test_requests_that_run_at_once_share_no_blocks_across_salts() -> None:
    world = World()
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        world.submit(name, body(cache_salt=salt, max_tokens=6), local=True)
    world.settle()
    # "c" waited for what was computed for "a"; "b" has computed its own.
    assert num_hit_tokens(world)[1] == NUM_SHARED_TOKENS
    assert world.decode.state.pool.num_indexed == 2 * ((len(PROMPT) + 5) // BLOCK_SIZE)


def test_models_share_no_block(tmp_path: Path) -> None:
    """The same tokens under another configuration, another layout of the weights, or another revision."""
    write_tiny_model(tmp_path / "a")
    write_tiny_model(tmp_path / "b", rms_norm_eps=1e-6)
    write_tiny_model(tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").rename(tmp_path / "c" / "weights.safetensors")
    fingerprints = [model_fingerprint(tmp_path / name) for name in "abc"]
    fingerprints += [model_fingerprint(tmp_path / "a", revision) for revision in ("r1", "r2", "r1 ")]
    names = [name for each in fingerprints for name in hash_blocks(PROMPT, BLOCK_SIZE, extra_key(each))]
    assert len(set(names)) == len(names) == 6 * 4


def test_a_front_and_a_worker_call_a_block_by_one_name() -> None:
    world = World()
    request = world.submit("r", body("lora", "café"), local=True)
    world.settle()
    world.advance(SECOND_NS)
    told = [said for _, said in world.messages if isinstance(said, BlockEvents) and said.stored]
    (run,) = told[-1].stored
    model = ServedModel(
        name="m",
        fingerprint=world.decode.config.model_fingerprint,
        dtype="float32",
        max_model_tokens=96,
        vocab_size=96,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        tokenizer=None,  # type: ignore[arg-type]
    )
    asked = model.hash_prompt(request.body.prompt_ids, request.body.adapter, request.body.cache_salt)
    assert run.hashes == asked


def test_a_front_takes_the_fingerprint_from_where_the_worker_does(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    settings = FrontSettings(coordinator_address="x:1", model_dir=tmp_path, incarnation=1, revision="r7")
    assert load_model(settings).fingerprint == model_fingerprint(tmp_path, "r7")
