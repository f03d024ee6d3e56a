"""How many products a prompt costs whoever computes it, however well."""

from __future__ import annotations

from engine.model.config import ModelConfig


def prefill_products(config: ModelConfig, num_tokens: int) -> int:
    """Multiplications of a prompt from its tokens to the logits of its last one.

    Nothing is counted that can be left out: keys that a token does not see, the output head for any but the last
    token, and in the last layer everything but the keys and values of the others. Dense layers without a window.
    """
    heads, kv_heads, dim, size = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    key_value = size * 2 * kv_heads * dim
    others = 2 * size * heads * dim + 3 * size * config.intermediate_size
    seen = num_tokens * (num_tokens + 1) // 2
    layer = num_tokens * (key_value + others) + 2 * seen * heads * dim
    last_layer = num_tokens * key_value + others + 2 * num_tokens * heads * dim
    return (len(config.layers) - 1) * layer + last_layer + size * config.vocab_size
