"""Makes NAME_loglikelihoods.json: how likely `transformers` finds two hundred short texts, in float32 and bfloat16.

Run from the root of the repository, takes a minute a model:

    python -m tests.reference.make_loglikelihoods MODEL_DIR NAME

A text's log-likelihood is the sum, over its tokens but the first, of the log-probability of each given those before.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.model.config import model_fingerprint
from tests.reference.questions import texts

FOLDER = Path(__file__).parent


@torch.inference_mode()
def loglikelihood(model: Any, ids: list[int]) -> float:
    logits_TV = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    logprobs_TV = logits_TV[:-1].log_softmax(dim=-1)
    return float(logprobs_TV.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).double().sum())


def loglikelihoods(model_dir: Path, dtype: torch.dtype, tokenized: list[list[int]]) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    return [loglikelihood(model, ids) for ids in tokenized]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("name", help="what the file's name begins with")
    arguments = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model_dir)
    tokenized = [tokenizer.encode(text) for text in texts()]
    wide = loglikelihoods(arguments.model_dir, torch.float32, tokenized)
    narrow = loglikelihoods(arguments.model_dir, torch.bfloat16, tokenized)
    header = {
        "model_fingerprint": model_fingerprint(arguments.model_dir),
        "transformers_version": transformers.__version__,
        "torch_version": torch.__version__,
    }
    lines = [
        json.dumps({"ids": ids, "float32": round(one, 6), "bfloat16": round(other, 4)}, separators=(",", ":"))
        for ids, one, other in zip(tokenized, wide, narrow, strict=True)
    ]
    head = json.dumps(header, indent=1)[:-2]
    path = FOLDER / f"{arguments.name}_loglikelihoods.json"
    path.write_text(head + ',\n "texts": [\n' + ",\n".join(lines) + "\n ]\n}\n", encoding="utf-8")
    worst = max(abs(one - other) for one, other in zip(wide, narrow, strict=True))
    print(f"{len(lines)} texts, {sum(map(len, tokenized))} tokens, bfloat16 differs by up to {worst:.3f}: {path}")


if __name__ == "__main__":
    main()
