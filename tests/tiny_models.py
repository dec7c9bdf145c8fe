"""Small models with real tokenizers in real checkpoint files, for the tests of what uses a trained model."""

import dataclasses
from pathlib import Path

import torch

from checkpoint import write_checkpoint
from config import Config, make_config
from model import GPT
from tokenizer import BPETokenizer

TEXT = "the quick brown fox jumps over the lazy dog, and don't you say \u00e9\u00fc\u4e2d\U0001f642 again; " * 3
SHAPE = {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": 32}
GPT2 = {"position": "learned", "norm": "layernorm", "qk_norm": False, "embedding_norm": False, "activation": "gelu"}


def tiny_tokenizer(kind: str, text: str = TEXT) -> BPETokenizer:
    if kind != "gpt2":
        return BPETokenizer.train([text], kind=kind, vocab_size=300)
    base = BPETokenizer.train([text], kind="byte", vocab_size=300)
    shift = 4  # the byte vocabulary without its four special tokens, and GPT-2's separator at the end
    tokens = [*base.tokens[shift:], b"<|endoftext|>"]
    return BPETokenizer("gpt2", tokens, [(a - shift, b - shift) for a, b in base.merges])


def tiny_config(tokenizer: BPETokenizer, **settings: object) -> Config:
    config = make_config("quick", {**SHAPE, **GPT2, "zero_init": False, **settings})
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size))


def random_model(config: Config, scale: float = 0.2) -> GPT:
    """A model whose every parameter is random, norms and biases too, so that each of them shows in the logits."""
    torch.manual_seed(11)
    model = GPT(config.model).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * scale)
    return model


def save_run(run_dir: Path, tokenizer: BPETokenizer, config: Config, model: GPT) -> Path:
    stored = {
        "settings": config.to_dict(),
        "tokenizer": tokenizer.to_json(),
        "data_fingerprint": "",
        "progress": {},
        "environment": {},
    }
    checkpoint = {"iter": 7, "model": model.state_dict(), "optimizer": {}, "train_loss": 1.0, "val_loss": 2.0, "config": stored}
    run_dir.mkdir(parents=True, exist_ok=True)
    write_checkpoint(checkpoint, run_dir, keep=0, best=True)
    return run_dir / "checkpoint_best.pt"
