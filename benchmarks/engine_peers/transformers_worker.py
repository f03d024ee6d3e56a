"""The transformers side: the model called by hand with its own growing cache. In float32 it judges all sides."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.engine_peers.worker_loop import Handler, engine_handlers, serve, take_stdout


class TransformersEngine:
    """Implements `worker_loop.Engine` for a batch of prompts of one length."""

    def __init__(self, model_dir: str, dtype: str, num_threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(num_threads)
        self._torch = torch
        self._new_cache = transformers.DynamicCache
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
        self._model = model.eval()
        self._cache: Any = None
        self._columns: list[Any] = []
        """The tokens of each step: one a sequence."""

    def open(self, prompts: list[list[int]], max_tokens: int) -> None:
        assert self._cache is None
        self._cache = self._new_cache(config=self._model.config)
        self._forward(self._torch.tensor(prompts))

    def step(self) -> None:
        self._forward(self._columns[-1][:, None])

    def close(self) -> list[list[int]]:
        tokens: list[list[int]] = self._torch.stack(self._columns, 1).tolist()
        self._cache, self._columns = None, []
        return tokens

    def margins(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Of each token, how far its logit lies below the largest, after the prompt and the tokens before it."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([[*prompt, *tokens[:-1]]])
            logits_KV = self._model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
            chosen_K1 = logits_KV.gather(1, self._torch.tensor(tokens)[:, None])
            margins: list[float] = (logits_KV.amax(1, keepdim=True) - chosen_K1)[:, 0].tolist()
        return margins

    def _forward(self, ids_BT: Any) -> None:
        with self._torch.inference_mode():
            output = self._model(input_ids=ids_BT, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self._columns.append(output.logits[:, -1].argmax(-1))

    def handlers(self) -> dict[str, Handler]:
        return {**engine_handlers(self), "margins": self.margins}


def main() -> None:
    answers = take_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    args = parser.parse_args()
    engine = TransformersEngine(args.model, args.dtype, args.num_threads)
    print('"ready"', file=answers, flush=True)
    serve(answers, engine.handlers())


if __name__ == "__main__":
    main()
