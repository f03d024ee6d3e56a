"""Makes smollm2_float32_greedy.json: what `transformers` generates greedily, in float32, for the fixed prompts.

Run from the root of the repository, takes minutes:

    python -m tests.reference.make_reference [--model DIR] [--output FILE]

The weights are those of the imported bfloat16 checkpoint, cast up to float32. Beside each output token stands the
margin by which its logit exceeds the runner-up's, rounded to 4 places, so that a near-tie can be told from an error.
A prompt one of whose margins is below MIN_MARGIN is replaced by the next candidate of its kind: it would test the
order of additions in a matrix product, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.model.config import ModelConfig, model_fingerprint
from engine.model.importer import import_smollm2
from tests.reference.prompts import CHATS, CODE, EXACT_LENGTHS, OTHER_LANGUAGES, paragraph

MAX_NEW_TOKENS = 64
MIN_MARGIN = 5e-4
DEFAULT_CACHE_DIR = Path.home() / ".cache" / "baton" / "models"
DEFAULT_OUTPUT = Path(__file__).with_name("smollm2_float32_greedy.json")
TOKENS_PER_SENTENCE_AT_LEAST = 6


def exact_length_candidates(tokenizer: Any, length: int) -> Iterator[tuple[str, list[int]]]:
    """Endless prompts of exactly `length` tokens, each from its own seed."""
    for seed in range(10_000):
        text = paragraph(seed * 1_000 + length, length // TOKENS_PER_SENTENCE_AT_LEAST + 1)
        ids = tokenizer.encode(text, add_special_tokens=False)
        # Short prompts would nearly all begin with "The": take them from the middle.
        offset = (seed % 7) if length < 64 else 0
        if len(ids) >= offset + length:
            yield f"length_{length}_seed_{seed}", ids[offset : offset + length]


def groups(tokenizer: Any) -> Iterator[tuple[int, Iterator[tuple[str, list[int]]]]]:
    """(how many prompts to keep, candidates) for each kind of prompt."""
    for length, count in EXACT_LENGTHS.items():
        yield count, exact_length_candidates(tokenizer, length)
    chats = [
        (f"chat_{i}", tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        for i, chat in enumerate(CHATS)
    ]
    yield len(chats), iter(chats)
    for name, texts in (("language", OTHER_LANGUAGES), ("code", CODE)):
        encoded = [(f"{name}_{i}", tokenizer.encode(text, add_special_tokens=False)) for i, text in enumerate(texts)]
        yield len(encoded), iter(encoded)


@torch.inference_mode()
def generate(model: Any, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """The greedy continuation, ending after EOS if it comes, and the margin of each of its tokens."""
    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    output_ids = output.sequences[0, len(prompt_ids) :].tolist()
    top = [logits[0].topk(2).values for logits in output.logits]
    return output_ids, [float(pair[0] - pair[1]) for pair in top]


def make_entries(model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    for count, candidates in groups(tokenizer):
        kept = 0
        for name, prompt_ids in candidates:
            if kept == count:
                break
            start_s = time.monotonic()
            output_ids, margins = generate(model, prompt_ids)
            usable = min(margins) >= MIN_MARGIN
            verdict = "kept" if usable else "near tie, left out"
            print(
                f"{name}: {len(prompt_ids)} + {len(output_ids)} tokens, smallest margin {min(margins):.5f}, "
                f"{verdict}, {time.monotonic() - start_s:.1f} s",
                flush=True,
            )
            if usable:
                kept += 1
                yield {
                    "name": name,
                    "prompt_ids": prompt_ids,
                    "output_ids": output_ids,
                    "margins": [round(margin, 4) for margin in margins],
                }


def write_reference(path: Path, header: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """One prompt a line, so that differences can be read."""
    lines = [json.dumps(entry, separators=(",", ":")) for entry in entries]
    head = json.dumps(header, indent=1)[:-2]
    path.write_text(head + ',\n "prompts": [\n' + ",\n".join(lines) + "\n ]\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: the imported SmolLM2)")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    model_dir = arguments.model or import_smollm2(DEFAULT_CACHE_DIR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    header = {
        "model": model_dir.name,
        "model_fingerprint": model_fingerprint(model_dir),
        "dtype": "float32",
        "transformers_version": transformers.__version__,
        "torch_version": torch.__version__,
        "max_new_tokens": MAX_NEW_TOKENS,
        "min_margin": MIN_MARGIN,
        "eos_token_ids": list(ModelConfig.from_directory(model_dir).eos_token_ids),
    }
    entries = list(make_entries(model, tokenizer))
    write_reference(arguments.output, header, entries)
    print(f"{len(entries)} prompts written to {arguments.output}")


if __name__ == "__main__":
    main()
