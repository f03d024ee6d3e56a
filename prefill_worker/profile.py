"""The prefill role: reads prompts in chunks, draws each one's first token, pushes the KV to a decode worker.

Where decode is the bottleneck and nothing else is to be read, a request may stay and have its answer written here; else
its steps are chunks alone. They are long enough to use the machine well, and short enough that most of a long prompt's
KV is on its way while the rest is computed.
"""

from __future__ import annotations

from cluster.agent.settings import RoleProfile
from cluster.core.commands import Prefill, RunLocal
from cluster.core.ids import Role

PROFILE = RoleProfile(role=Role.PREFILL, accepts=(Prefill, RunLocal), prefill_chunk_tokens=256)
