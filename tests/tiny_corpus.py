"""A corpus small enough to train on in seconds: token files and a byte tokenizer, as stages 2 and 3 leave them."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from config import SPECIAL_TOKENS
from support.common import fingerprint
from tokenizer import BPETokenizer

WORDS = ["the", "model", "reads", "a", "window", "of", "tokens", "and", "learns", "what", "comes", "next"]
# The flags of a run that takes seconds: 2 layers x 32, 2 micro-batches of 4 x 32 tokens.
TINY_RUN = (
    *("--corpus", "tiny", "--n-layer", "2", "--n-embd", "32", "--n-head", "2", "--block-size", "32"),
    *("--batch-size", "4", "--grad-accum-steps", "2", "--max-iters", "30", "--warmup-iters", "5", "--learning-rate", "0.003"),
    *("--eval-interval", "10", "--eval-windows", "12", "--checkpoint-interval", "5", "--log-interval", "1"),
    *("--compile", "off", "--device", "cpu", "--threads", "1", "--dtype", "float32", "--max-new-tokens", "8"),
)


def byte_tokenizer() -> BPETokenizer:
    tokens = [name.encode() for name in SPECIAL_TOKENS] + [bytes([b]) for b in range(256)]
    return BPETokenizer("byte", tokens, [])


def make_tokens(documents: int, seed: int) -> np.ndarray:
    """`documents` random sentences as <BOS> bytes <EOS>."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(5, 30))) for _ in range(documents)]
    return np.array([i for text in texts for i in (2, *(b + 4 for b in text.encode()), 3)], np.uint16)


def make_tiny_corpus(data_dir: Path, documents: int = 60, seed: int = 0) -> dict[str, Any]:
    """Writes data_dir/tiny; returns its meta.json."""
    tokenizer, folder = byte_tokenizer(), data_dir / "tiny" / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder.parent / "tokenizer.json")
    splits = {}
    for number, (name, share) in enumerate((("train", documents), ("val", documents // 4), ("test", documents // 4))):
        ids = make_tokens(share, seed * 10 + number)
        (folder / f"{name}.bin").write_bytes(ids.tobytes())
        splits[name] = {"file": f"{name}.bin", "tokens": len(ids), "documents": share}
    meta = {"format": 1, "corpus": "tiny", "dtype": "uint16", "vocab_size": tokenizer.vocab_size, "splits": splits}
    meta |= {"tokenizer_kind": "byte", "tokenizer_sha256": tokenizer.sha256, "raw_fingerprint": "", "settings": {}}
    meta["fingerprint"] = fingerprint([documents, seed])
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return meta
