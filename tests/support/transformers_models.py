"""Small random models written by transformers, and what transformers computes with them.

`CASES` holds configurations of every family: grouped heads, odd sizes, windows smaller than the prompts, scaled
rotary embeddings. Only a test that needs them imports transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 96
PROMPT_LENGTHS = (1, 2, 7, 16, 23, 41, 65)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
}
_GEMMA3 = {
    **_SHAPE,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
    "query_pre_attn_scalar": 20,
}
_EXPERTS = {**_SHAPE, "num_local_experts": 5, "num_experts_per_tok": 2}

# Family and case -> (configuration class of transformers, arguments).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("LlamaConfig", {**_SHAPE, "tie_word_embeddings": True}),
    "llama untied, one kv head": ("LlamaConfig", {**_SHAPE, "num_key_value_heads": 1}),
    "llama odd sizes": (
        "LlamaConfig",
        {**_SHAPE, "vocab_size": 93, "hidden_size": 39, "intermediate_size": 53, "num_attention_heads": 3}
        | {"num_key_value_heads": 3, "head_dim": 10},
    ),
    "llama biases": ("LlamaConfig", {**_SHAPE, "attention_bias": True, "mlp_bias": True}),
    "llama linear rope": (
        "LlamaConfig",
        {**_SHAPE, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "llama llama3 rope": ("LlamaConfig", {**_SHAPE, "rope_parameters": _LLAMA3}),
    "llama yarn rope": ("LlamaConfig", {**_SHAPE, "rope_parameters": _YARN}),
    "llama yarn rope, all options": (
        "LlamaConfig",
        {
            **_SHAPE,
            "rope_parameters": {**_YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}
            | {"mscale": 0.7, "mscale_all_dim": 1.2},
        },
    ),
    "llama dynamic rope": (
        "LlamaConfig",
        {**_SHAPE, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "mistral windowed": ("MistralConfig", {**_SHAPE, "sliding_window": 12}),
    "mistral without a window": ("MistralConfig", {**_SHAPE, "sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {**_SHAPE, "head_dim": 8}),
    "qwen2 late windows": (
        "Qwen2Config",
        {**_SHAPE, "head_dim": 8, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen3 tied": ("Qwen3Config", {**_SHAPE, "tie_word_embeddings": True}),
    "qwen3 biases, windows": (
        "Qwen3Config",
        {**_SHAPE, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "gemma3": ("Gemma3TextConfig", _GEMMA3),
    "gemma3 scaled global rope, biases, untied": (
        "Gemma3TextConfig",
        {**_GEMMA3, "rope_parameters": _LOCAL_AND_GLOBAL, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "mixtral": ("MixtralConfig", _EXPERTS),
    "mixtral windowed, three of five": ("MixtralConfig", {**_EXPERTS, "num_experts_per_tok": 3, "sliding_window": 12}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "moe_intermediate_size": 24}),
    "qwen3_moe normalised, some layers dense": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_hidden_layers": 5, "moe_intermediate_size": 24, "norm_topk_prob": True}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": 11},
    ),
}


def make_model(case: str, seed: int) -> Any:
    """A random model of `CASES`: its weights are large enough that greedy tokens vary."""
    import transformers

    class_name, arguments = CASES[case]
    config = getattr(transformers, class_name)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(model, seed)
    return model.eval()


def make_model_with_images() -> Any:
    """A Gemma 3 whose text decoder is the case "gemma3"."""
    import transformers

    text = CASES["gemma3"][1]
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomise(model, seed=0)
    return model


def randomise(model: Any, seed: int) -> None:
    """Norms around what leaves values as they are, which is 0 where a family adds 1 to them.

    Embeddings are smaller than the rest: a tied model would else repeat the token that it has read.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = float(parameter.mean()) if "norm" in name else 0.0
            scale = 0.1 if "embed_tokens" in name else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + centre)


def save_model(model: Any, directory: Path, **options: Any) -> None:
    """As `save_pretrained`; without an end of sequence, so that every answer has its full length."""
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(directory, **options)


def prompts(vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@torch.inference_mode()
def generate(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy answer."""
    ids = torch.tensor([prompt])
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = generated[0, len(prompt) :].tolist()
    return answer


@torch.inference_mode()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), V]."""
    result: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return result.float()
