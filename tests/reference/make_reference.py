"""Makes the reference of a model: what `transformers` generates greedily, in float32, for the fixed prompts.

Run from the root of the repository, takes minutes:

    python -m tests.reference.make_reference NAME [--model DIR] [--output FILE]

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.model.config import ModelConfig, model_fingerprint
from engine.model.importer import import_model
from engine.model.packaged_models import GEMMA3, PACKAGED_MODELS, SMOLLM2
from tests.reference.prompts import CHATS, CODE, GEMMA3_LENGTHS, OTHER_LANGUAGES, SMOLLM2_LENGTHS, paragraph
from tests.support.engine_model import MODEL_CACHE_DIR, reference_path

MIN_MARGIN = 5e-4
TOKENS_PER_SENTENCE_AT_LEAST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Attributes:
    exact_lengths: length in tokens -> how many prompts of that length.
    num_texts: how many prompts of each other kind, at most; one whose answer has a near-tie is left out.
    """

    exact_lengths: dict[int, int]
    num_texts: int
    max_new_tokens: int


PROMPT_SETS = {
    SMOLLM2: PromptSet(exact_lengths=SMOLLM2_LENGTHS, num_texts=12, max_new_tokens=64),
    GEMMA3: PromptSet(exact_lengths=GEMMA3_LENGTHS, num_texts=5, max_new_tokens=40),
}


def encode(tokenizer: Any, text: str) -> list[int]:
    """With the token that the model's prompts begin with, if they do."""
    ids: list[int] = tokenizer.encode(text)
    return ids


def exact_length_candidates(tokenizer: Any, length: int) -> Iterator[tuple[str, list[int]]]:
    """Endless prompts of exactly `length` tokens, each from its own seed."""
    beginning = encode(tokenizer, "")
    length_of_text = length - len(beginning)
    for seed in range(10_000):
        text = paragraph(seed * 1_000 + length, length // TOKENS_PER_SENTENCE_AT_LEAST + 1)
        ids = tokenizer.encode(text, add_special_tokens=False)
        # Short prompts would nearly all begin with "The": take them from the middle.
        offset = (seed % 7) if length < 64 else 0
        if len(ids) >= offset + length_of_text:
            yield f"length_{length}_seed_{seed}", beginning + ids[offset : offset + length_of_text]


def chat_prompt(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    """By the model's template. The pretrained Gemma has none: its family's turns, written out."""
    if tokenizer.chat_template is not None:
        ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids
    roles = {"assistant": "model", "system": "user"}
    turns = [(roles.get(turn["role"], turn["role"]), turn["content"]) for turn in chat]
    text = "".join(f"<start_of_turn>{role}\n{content}<end_of_turn>\n" for role, content in turns)
    return encode(tokenizer, f"{text}<start_of_turn>model\n")


def groups(tokenizer: Any, prompt_set: PromptSet) -> Iterator[tuple[int, Iterator[tuple[str, list[int]]]]]:
    """(how many prompts to keep, candidates) for each kind of prompt."""
    for length, count in prompt_set.exact_lengths.items():
        yield count, exact_length_candidates(tokenizer, length)
    yield prompt_set.num_texts, ((f"chat_{i}", chat_prompt(tokenizer, chat)) for i, chat in enumerate(CHATS))
    for name, texts in (("language", OTHER_LANGUAGES), ("code", CODE)):
        yield prompt_set.num_texts, ((f"{name}_{i}", encode(tokenizer, text)) for i, text in enumerate(texts))


@torch.inference_mode()
def generate(model: Any, prompt_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
    """The greedy continuation, ending after EOS if it comes, and the margin of each of its tokens."""
    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    output_ids = output.sequences[0, len(prompt_ids) :].tolist()
    top = [logits[0].topk(2).values for logits in output.logits]
    return output_ids, [float(pair[0] - pair[1]) for pair in top]


def make_entries(model: Any, tokenizer: Any, prompt_set: PromptSet) -> Iterator[dict[str, Any]]:
    for count, candidates in groups(tokenizer, prompt_set):
        kept = 0
        for name, prompt_ids in candidates:
            if kept == count:
                break
            start_s = time.monotonic()
            output_ids, margins = generate(model, prompt_ids, prompt_set.max_new_tokens)
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
    parser.add_argument("name", choices=PACKAGED_MODELS)
    parser.add_argument("--model", type=Path, help="model directory (default: the imported model)")
    parser.add_argument("--output", type=Path, help="(default: the committed reference)")
    arguments = parser.parse_args()
    packaged = PACKAGED_MODELS[arguments.name]
    prompt_set = PROMPT_SETS[packaged]
    output = arguments.output or reference_path(packaged)
    model_dir = arguments.model or import_model(packaged.name, MODEL_CACHE_DIR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    header = {
        "model": model_dir.name,
        "model_fingerprint": model_fingerprint(model_dir),
        "dtype": "float32",
        "transformers_version": transformers.__version__,
        "torch_version": torch.__version__,
        "max_new_tokens": prompt_set.max_new_tokens,
        "min_margin": MIN_MARGIN,
        "eos_token_ids": list(ModelConfig.from_directory(model_dir).eos_token_ids),
    }
    entries = list(make_entries(model, tokenizer, prompt_set))
    write_reference(output, header, entries)
    print(f"{len(entries)} prompts written to {output}")


if __name__ == "__main__":
    main()
