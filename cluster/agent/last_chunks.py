"""Pushes the last chunk of a prompt while it is computed, group of layers after group of layers.

Blocks of all earlier chunks are pushed while the next chunk is computed. Those of the last one would have nothing left
to hide behind: the layers that a running step has written are pushed while it computes the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.agent.legs import Leg, LegKind
from cluster.agent.limits import NUM_LAYER_GROUPS
from cluster.agent.pushes import Pushes
from engine.core.sequence import num_blocks_for
from engine.core.step import SequenceKey, StepPlan
from kv_transfer.protocol.messages import PushKey


@dataclass(frozen=True, slots=True)
class _LastChunk:
    push: PushKey
    blocks: list[tuple[int, int]]
    """(index, block id) as the step writes them. The sequence may go on with others that hold the same, but a push
    keeps to the blocks it has begun with."""


class LastChunks:
    """The prompts being computed for a push, and those of them that the running step completes."""

    def __init__(self, pushes: Pushes, *, num_layers: int, block_size: int) -> None:
        self._pushes = pushes
        self._block_size = block_size
        self._marks = layer_marks(num_layers)
        self._every_layer = range(num_layers)
        self._prompts: dict[SequenceKey, Leg] = {}
        self._completing: dict[SequenceKey, _LastChunk] = {}
        self._num_layers_given = 0
        """Of each block in `_completing`."""

    def add(self, leg: Leg) -> None:
        """Its prompt is going to be computed for a push."""
        self._prompts[leg.lead_key] = leg

    def remove(self, leg: Leg) -> None:
        """Its prompt is computed, or is not wanted any more."""
        self._prompts.pop(leg.lead_key, None)
        self._completing.pop(leg.lead_key, None)

    def step_started(self, plan: StepPlan) -> tuple[int, ...]:
        """After which layers `layers_written` is wanted; none for most steps."""
        assert not self._completing, "the last step is not over"
        self._num_layers_given = 0
        if not self._prompts:
            return ()
        for step in plan.sequences:
            leg = self._prompts.get(step.key)
            if leg is not None and step.sample:
                num_blocks = num_blocks_for(step.start + len(step.token_ids), self._block_size)
                blocks = [(index, step.block_table[index]) for index in range(leg.num_blocks_ready, num_blocks)]
                self._completing[step.key] = _LastChunk(leg.push_key, blocks)
        return self._marks if self._completing else ()

    def layers_written(self, now_ns: int, num_layers: int) -> None:
        layers = range(self._num_layers_given, num_layers)
        assert layers, f"{num_layers} layers were written after {self._num_layers_given}"
        self._num_layers_given = num_layers
        for chunk in self._completing.values():
            self._pushes.blocks_ready(now_ns, chunk.push, chunk.blocks, layers)

    def complete(self, now_ns: int, leg: Leg) -> bool:
        """The step has computed its last chunk: pushes the layers that are left. False if none have been pushed yet."""
        chunk = self._completing.get(leg.lead_key)
        if chunk is None or self._num_layers_given == 0:
            return False
        layers = self._every_layer[self._num_layers_given :]
        if layers:
            self._pushes.blocks_ready(now_ns, chunk.push, chunk.blocks, layers)
        return True

    def check_invariants(self) -> None:
        for key, leg in self._prompts.items():
            assert leg.lead_key == key and leg.kind is LegKind.PREFILL and not leg.is_leaving, f"{key} is not computed"
        assert all(key in self._prompts for key in self._completing)
        assert 0 <= self._num_layers_given <= len(self._every_layer)


def layer_marks(num_layers: int) -> tuple[int, ...]:
    """The numbers of layers after which a group ends. The last group may be smaller; its end is before the step's,
    which still has to draw."""
    layers_per_group = -(-num_layers // NUM_LAYER_GROUPS)
    return (*range(layers_per_group, num_layers, layers_per_group), num_layers)
