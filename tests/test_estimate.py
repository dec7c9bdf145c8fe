"""--estimate and --overfit-batch: the formulas against what torch really keeps, and the commands themselves."""

import dataclasses
import re

import pytest
import torch
from conftest import assert_user_error
from tiny_corpus import TINY_RUN, make_tiny_corpus

from config import ComputeConfig, Config, ModelConfig, make_config
from model import GPT
from optimizers import build_optimizer
from support.device import resolve_device
from support.estimate import (
    StepTimes,
    activation_bytes,
    describe_disk,
    describe_sharding,
    memory_by_part,
    overfit_batch,
    parameters_by_part,
)

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 4, "max_iters": 50, "warmup_iters": 5}


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny_config(**changes) -> Config:
    return make_config("wikitext103", {**TINY, "vocab_size": 50, "threads": 1, "compile": "off", **changes})


@pytest.mark.parametrize("preset", ["wikitext103", "sydsgpt"])
def test_parts_add_up(preset: str):
    """Catches a parameter that no part counts."""
    with torch.device("meta"):
        model = GPT(make_config(preset).model)
    parts = parameters_by_part(model)
    assert sum(parts.values()) - parts.pop("padding", 0) == model.num_params()
    assert ("head" in parts) == (preset == "sydsgpt")


def kept_bytes(model: GPT, batch_size: int, dtype: torch.dtype) -> int:
    """Bytes of distinct storages that the blocks' forward pass saves for the backward pass, weights and their casts apart."""
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    idx = torch.zeros(batch_size, model.config.block_size, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
    ):
        model.hidden(idx)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    activations = [t for pointer, t in kept.items() if pointer not in own and tuple(t.shape) not in shapes]
    return sum(t.untyped_storage().nbytes() for t in activations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({}, "fused"),
        ({}, "reference"),
        ({"bias": True, "activation": "gelu_tanh"}, "fused"),
        ({"position": "rotary", "activation": "swiglu"}, "fused"),
    ],
)
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, changes: dict, attention: str):
    """Catches a formula that forgets a tensor: within 10 % of what a real forward pass saves, for both recipes' blocks."""
    config = ModelConfig(n_layer=3, n_head=4, n_embd=128, block_size=64, vocab_size=100, **changes)
    torch.manual_seed(0)
    found = kept_bytes(GPT(config, attention), 5, dtype)
    predicted = activation_bytes(config, 5, dtype, "cpu", compiled=False, attention=attention)
    assert predicted == pytest.approx(found, rel=0.10)


def test_memory_counts_state_and_copies():
    """Catches weights, gradients or optimizer state that the prediction leaves out, or casts counted where there are none."""
    config = tiny_config()
    model = GPT(config.model)
    optimizer = build_optimizer(model, config.train, "cpu")
    numbers = sum(p.numel() for p in model.parameters())
    parts = memory_by_part(config, model, optimizer, resolve_device(ComputeConfig(device="cpu", dtype="float32")))
    assert parts["weights"] == parts["gradients"] == 4 * numbers and parts["optimizer (adamw)"] == 8 * numbers
    assert not any("bfloat16" in name for name in parts)
    half = memory_by_part(config, model, optimizer, resolve_device(ComputeConfig(device="cpu", dtype="bfloat16")))
    assert 1.9 * numbers < half["weights in bfloat16"] <= 2 * numbers and half["activations"] < parts["activations"]


def test_attention_weights_are_counted_only_where_they_are_kept():
    """Catches an estimate of compiled training on a CPU that adds weights which with dropout nothing keeps."""
    kept = {}
    for dropout in (0.0, 0.1):
        config = ModelConfig(n_layer=1, n_head=4, n_embd=128, block_size=64, vocab_size=100, dropout=dropout)
        kept[dropout] = [activation_bytes(config, 5, torch.float32, "cpu", compiled=compiled) for compiled in (False, True)]
    assert kept[0.0][1] - kept[0.0][0] == 5 * 4 * (32 * 32 + 32 * 64) * 4
    assert kept[0.1][1] == kept[0.1][0]


def test_time_and_disk_arithmetic():
    """Catches an ETA that forgets micro-batches, updates or evaluations, and the copy of a checkpoint that is being written."""
    config = tiny_config(grad_accum_steps=8, eval_interval=100, batch_size=4)
    times = StepTimes(micro=[1.0, 2.0], update=[0.5, 0.5], forward=[0.25, 0.5])
    assert times.run_seconds(config, 200, 10, min) == 200 * (8 * 1.0 + 0.5) + 3 * 0.25 * 3
    assert times.run_seconds(config, 200, 10, max) == 200 * (8 * 2.0 + 0.5) + 3 * 0.5 * 3
    model = GPT(config.model)
    line = describe_disk(config, model, build_optimizer(model, config.train, "cpu"))
    assert "for up to 5 of them" in line and "checkpoints" in line


def test_sharded_peak_loses_the_shares_of_the_others():
    """Catches a peak that counts the whole optimizer state, or divides weights and activations as well."""
    with torch.device("meta"):
        model = GPT(make_config("wikitext103").model)
    optimizer = build_optimizer(model, make_config("wikitext103").train, "cpu")
    state = 8 * sum(p.numel() for p in model.parameters())
    line = describe_sharding(5 * state, optimizer)
    for processes in (2, 4, 8):
        shown = float(re.search(rf"([\d.]+) GB with {processes}", line)[1]) * 1e9
        assert 4 * state + state / processes - 1e7 <= shown <= 4 * state + 1.1 * state / processes, line


def test_overfitting_passes_for_a_model_and_fails_for_a_broken_one(monkeypatch):
    """Catches an exercise that cannot fail: where no gradient reaches the blocks, the loss must not come down."""
    config, device = tiny_config(), resolve_device(ComputeConfig(device="cpu", dtype="float32", threads=1, compile="off"))
    ids = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(1))
    batch, lines = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), []
    config = dataclasses.replace(config, compute=dataclasses.replace(config.compute, compile="off"))
    assert overfit_batch(config, device, batch, lines.append)
    assert lines[-1].startswith("passed: loss 0.0")
    monkeypatch.setattr(GPT, "hidden", lambda self, idx, cache=None, hidden=GPT.hidden: hidden(self, idx, cache).detach())
    assert not overfit_batch(config, device, batch, lines.append, max_steps=60)
    assert lines[-1].startswith("FAILED: loss ")


def test_estimate_before_there_is_any_data(stage, tmp_path):
    """Catches an estimate that needs the hours of preparation it should precede, or that leaves files behind."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    result = stage("train.py", "--estimate", "--shard-optimizer", "--compile", "off", "--threads", 1, *flags)
    assert result.returncode == 0, result.stderr
    for text in (
        "parameters: 549,696 = ",
        "predicted peak: 0.",
        "optimizer state sharded: ",
        "20 (Chinchilla)",
        "tokens/s",
        "the whole run: ",
        "disk: ",
        "next: ",
    ):
        assert text in result.stdout, result.stdout
    assert not list(tmp_path.iterdir())
    passes = stage("train.py", "--estimate", "--preset", "sydsgpt")
    assert_user_error(passes, "prepare_data.py --preset sydsgpt")


def test_overfit_batch_on_the_runs_own_data(stage, tmp_path):
    """Catches a command that reports without training, that needs no data, or that begins a run."""
    missing = stage("train.py", "--overfit-batch", *TINY_RUN)
    assert_user_error(missing, "prepare_data.py --corpus tiny")
    make_tiny_corpus(tmp_path / "data")
    result = stage("train.py", "--overfit-batch", *TINY_RUN)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "one batch of 128 tokens" in result.stdout and "step 0: loss 5." in result.stdout
    assert result.stdout.splitlines()[-1].startswith("passed: loss ")
    assert not (tmp_path / "checkpoints").exists()
