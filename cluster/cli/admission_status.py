"""The part of `baton status` that tells of admission: the queue, refusals by cause, and what tenants have."""

from __future__ import annotations

from typing import Any

from baton.v1 import admin_pb2
from cluster.cli.tables import format_table

_NAMELESS = "(none named)"
_HEADER = ("TENANT", "WEIGHT", "RUN", "WAIT", "ENDED", "REFUSED", "PROMPT TOK", "OUTPUT TOK", "EXPECTED", "QUOTA LEFT")


def admission_json(admission: admin_pb2.AdmissionStatus) -> dict[str, Any]:
    return {
        "queue_limit": admission.queue_limit,
        "queued_tokens": admission.num_queued_tokens,
        "slo_ttft_ms": admission.slo_ttft_ms if admission.HasField("slo_ttft_ms") else None,
        "slo_tpot_ms": admission.slo_tpot_ms if admission.HasField("slo_tpot_ms") else None,
        "refusals": {refusal.cause: refusal.count for refusal in admission.refusals},
        "tenants": [_tenant_json(tenant) for tenant in admission.tenants],
    }


def admission_text(status: admin_pb2.GetStatusResponse) -> list[str]:
    """Paragraphs. Tenants get a table once there is more to tell than that somebody who names none has asked."""
    admission = status.admission
    parts = []
    if status.num_queued or admission.refusals:
        refusals = ", ".join(f"{refusal.count} {refusal.cause}" for refusal in admission.refusals) or "none"
        parts.append(
            f"queue: {status.num_queued} of {admission.queue_limit} requests, {admission.num_queued_tokens} tokens to "
            f"read; refused: {refusals}"
        )
    if any(tenant.name or tenant.HasField("quota") for tenant in admission.tenants):
        parts.append(format_table(_HEADER, [_tenant_row(tenant) for tenant in admission.tenants]))
    return parts


def _tenant_json(tenant: admin_pb2.TenantStatus) -> dict[str, Any]:
    quota = None
    if tenant.HasField("quota"):
        quota = {
            "tokens_per_s": tenant.quota.tokens_per_s,
            "burst_tokens": tenant.quota.burst_tokens,
            "level_tokens": tenant.quota.level_tokens,
        }
    return {
        "name": tenant.name,
        "weight": round(tenant.weight, 4),
        "running": tenant.num_running,
        "queued": tenant.num_queued,
        "ended": tenant.num_ended,
        "refused": tenant.num_refused,
        "prompt_tokens": tenant.num_prompt_tokens,
        "output_tokens": tenant.num_output_tokens,
        "expected_output_tokens": tenant.expected_output_tokens,
        "quota": quota,
    }


def _tenant_row(tenant: admin_pb2.TenantStatus) -> tuple[str, ...]:
    return (
        tenant.name or _NAMELESS,
        f"{tenant.weight:g}",
        str(tenant.num_running),
        str(tenant.num_queued),
        str(tenant.num_ended),
        str(tenant.num_refused),
        str(tenant.num_prompt_tokens),
        str(tenant.num_output_tokens),
        str(tenant.expected_output_tokens),
        str(tenant.quota.level_tokens) if tenant.HasField("quota") else "-",
    )
