"""The decode role: takes KV over and writes answers.

It reads prompts as well where that is cheaper than a push, where no prefill worker is to be had, and after a
preemption: in small chunks, because each one holds up everybody's next token. When it is drained, it pushes the KV of
its answers to whoever goes on with them, as a prefill worker does.
"""

from __future__ import annotations

from cluster.agent.settings import RoleProfile
from cluster.core.commands import Prefill, Reserve, RunLocal
from cluster.core.ids import Role

PROFILE = RoleProfile(role=Role.DECODE, accepts=(Reserve, RunLocal, Prefill), prefill_chunk_tokens=64)
