"""Makes gemma3_sentencepiece.json: how SentencePiece itself, given the vocabulary of the GGUF file, cuts texts up.

Run from the root of the repository, with `sentencepiece` installed, which nothing else needs:

    python -m tests.reference.make_token_reference
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from engine.model.packaged_models import GEMMA3, assemble_gguf, find_gguf_pieces
from tests.reference.prompts import CODE, OTHER_LANGUAGES, SENTENCES

OUTPUT = Path(__file__).with_name("gemma3_sentencepiece.json")
NUM_RANDOM_TEXTS = 200
USER_DEFINED = 4
UNKNOWN = 2
UNKNOWN_PIECE = "<unk>"
# What random texts are made of: runs of white space, symbols of the vocabulary, scripts, and characters outside it.
# Not in it: the names of control tokens, which SentencePiece never reads from a text, and U+2581.
FRAGMENTS = [
    *("a", "b", "the", " the", "The", "12", "7", ".", ",", "--", "==", "{", "}", ";", '"', "'", "http://", "<", ">"),
    *(" ", "  ", "   ", "     ", " " * 31, " " * 40, "\n", "\n\n", "\n" * 33, "\t", "\t\t", "\r\n"),
    *("<h1>", "</a>", "<table>", "<start_of_image>", "[multimodal]"),
    *("é", "a\u0301", "ß", "İ", "ﬁ", "字", "日本", "हिन्दी", "ไทย", "عربي", "한국", "🐎", "👩‍👩‍👧", "𝔹"),
    *("\x00", "\x7f", "\u200b", "\u00a0", "\u3000", "\ufffd", "\U0001fae8", "\U00013080"),
]


def sentencepiece_of(gguf_path: Path) -> Any:
    """A processor with the file's pieces, scores and types, and the normalisation that its flags ask for."""
    fields = gguf.GGUFReader(gguf_path).fields
    pieces, scores, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    model = sentencepiece_model_pb2.ModelProto()
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    trainer.byte_fallback = True
    trainer.vocab_size = len(pieces)
    for name, spelt in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        setattr(trainer, f"{name}_id", fields[f"tokenizer.ggml.{spelt}_token_id"].contents())
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = fields["tokenizer.ggml.add_space_prefix"].contents()
    normalizer.remove_extra_whitespaces = False
    for piece, score, kind in zip(pieces, scores, kinds, strict=True):
        # The file spells out the spaces of user-defined pieces.
        spelling = piece.replace(" ", "\u2581") if kind == USER_DEFINED else piece
        model.pieces.add(piece=spelling, score=score, type=UNKNOWN if piece == UNKNOWN_PIECE else kind)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.SerializeToString())
    return processor


def texts() -> Iterator[str]:
    yield from (*SENTENCES, *OTHER_LANGUAGES, *CODE)
    for length in (1, 2, 3, 30, 31, 32, 33, 62, 63, 64, 100):
        yield from (f"a{' ' * length}b", " " * length, "\n" * length, "\t" * length + "x")
    draw = random.Random(0)
    for _ in range(NUM_RANDOM_TEXTS):
        yield "".join(draw.choice(FRAGMENTS) for _ in range(draw.randint(1, 14)))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        processor = sentencepiece_of(assemble_gguf(GEMMA3, find_gguf_pieces(GEMMA3), Path(directory)))
    lines = [json.dumps({"text": text, "ids": processor.encode(text)}, separators=(",", ":")) for text in texts()]
    OUTPUT.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{len(lines)} texts written to {OUTPUT}")


if __name__ == "__main__":
    main()
