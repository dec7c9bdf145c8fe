"""--estimate and --overfit-batch: the formulas against what torch really keeps, and the commands themselves."""

import dataclasses
import re

import pytest
import torch
from conftest import assert_user_error
from tiny_corpus import TINY_RUN, make_tiny_corpus

import train
from config import ComputeConfig, Config, ModelConfig, make_config
from model import GPT
from optimizers import build_optimizer
from support.device import Device, resolve_device
from support.estimate import (
    StepTimes,
    describe_disk,
    describe_sharding,
    overfit_batch,
    parameters_by_part,
)
from support.memory import activation_bytes, fullest_instant, memory_by_instant

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


def kept_bytes(model: GPT, batch_size: int, dtype: torch.dtype, compiled: bool) -> int:
    """Bytes of distinct storages that a forward pass saves for the backward pass: without weights, their casts, and logits.

    Compiled by a backend that decides what to keep as the compiler does, and then runs without making code.
    """
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False) if compiled else model
    idx, targets = (torch.zeros(batch_size, model.config.block_size, dtype=torch.long) for _ in range(2))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
    ):
        run(idx, targets, reduction="sum")
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    logits = (model.config.vocab_size, model.config.padded_vocab_size)
    activations = [t for pointer, t in kept.items() if pointer not in own and tuple(t.shape) not in shapes]
    return sum(t.untyped_storage().nbytes() for t in activations if not t.dim() or t.shape[-1] not in logits)


VARIANTS = [
    ({}, "fused"),
    ({}, "reference"),
    ({"bias": True, "activation": "gelu_tanh", "dropout": 0.1}, "fused"),
    ({"dropout": 0.1}, "reference"),
    ({"position": "rotary", "activation": "swiglu", "norm": "rmsnorm", "qk_norm": True}, "fused"),
    ({"position": "rotary", "activation": "relu2", "norm": "rmsnorm_plain", "qk_norm": True, "embedding_norm": True}, "fused"),
    ({"document_mask": True}, "fused"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("changes", "attention"), VARIANTS)
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, changes: dict, attention: str, compiled: bool):
    """Catches a formula that forgets a tensor: fp32 copies under qk_norm, dropout's masks, the attention weights that torch's
    kernel for CPUs writes out under dropout (a tenth of the memory was predicted). Within 10 % of what a forward pass saves."""
    config = ModelConfig(n_layer=3, n_head=4, n_embd=128, block_size=96, vocab_size=700, **changes)
    torch.manual_seed(0)
    found = kept_bytes(GPT(config, attention), 5, dtype, compiled)
    assert activation_bytes(config, 5, dtype, "cpu", compiled, attention) == pytest.approx(found, rel=0.10)


def cpu(dtype: torch.dtype, compiled: bool = False) -> Device:
    return Device(torch.device("cpu"), dtype, "", compile_seconds=float(compiled), process_bytes=10)


def test_memory_counts_state_and_copies():
    """Catches weights, gradients or optimizer state that the prediction leaves out, or casts counted where there are none."""
    config = tiny_config(grad_accum_steps=2)
    model = GPT(config.model)
    optimizer = build_optimizer(model, config.train, "cpu")
    numbers = sum(p.numel() for p in model.parameters())
    begin, end, *_ = memory_by_instant(config, model, optimizer, cpu(torch.float32)).values()
    assert begin["weights"] == begin["gradients"] == 4 * numbers and begin["optimizer (adamw)"] == 8 * numbers
    assert begin["Python and torch"] == end["Python and torch"] == 10
    assert not any("bfloat16" in name for name in begin)
    half = memory_by_instant(config, model, optimizer, cpu(torch.bfloat16))["as the backward pass begins"]
    assert 1.9 * numbers < half["weights in bfloat16"] <= 2 * numbers and half["activations"] < begin["activations"]


def test_gradients_are_counted_when_they_exist():
    """Catches gradients added to activations that are gone by then (half a gigabyte of a 126M model), or a compiled backward
    pass whose gradients are counted once although those of the micro-batch before wait beside them."""
    config = tiny_config(grad_accum_steps=1)
    model = GPT(config.model)
    optimizer = build_optimizer(model, config.train, "cpu")
    size = 4 * sum(p.numel() for p in model.parameters())
    counted = {}
    for accum in (1, 2):
        train = dataclasses.replace(config.train, grad_accum_steps=accum)
        for compiled in (False, True):
            now = dataclasses.replace(config, train=train)
            instants = memory_by_instant(now, model, optimizer, cpu(torch.float32, compiled)).values()
            counted[accum, compiled] = [parts.get("gradients", 0) // size for parts in instants]
    assert counted == {(1, False): [0, 1, 1, 0], (1, True): [0, 1, 1, 0], (2, False): [1, 1, 1, 0], (2, True): [1, 2, 1, 0]}


def test_evaluation_in_larger_batches_is_counted():
    """A peak that lies in the evaluation, left out where it goes over the whole split (0 windows)."""
    instants = {}
    for windows in (0, 64, 16):
        changes = {"batch_size": 2, "eval_batch_size": 64, "eval_windows": windows}
        config = make_config("wikitext103", {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 32, **changes})
        model = GPT(config.model)
        optimizer = build_optimizer(model, config.train, "cpu")
        instants[windows] = memory_by_instant(config, model, optimizer, cpu(torch.float32))["in an evaluation"]["logits"]
    assert instants[0] == instants[64] == 4 * instants[16] == 64 * 32 * config.model.padded_vocab_size * 12


def test_time_and_disk_arithmetic():
    """Catches an ETA that forgets micro-batches, updates or evaluations, and the copy of a checkpoint that is being written."""
    config = tiny_config(grad_accum_steps=8, eval_interval=100, batch_size=4)
    times = StepTimes(micro=[1.0, 2.0], update=[0.5, 0.5], forward=[0.25, 0.5])
    assert times.run_seconds(config, 200, 10, min) == 200 * (8 * 1.0 + 0.5) + 3 * 0.25 * 3
    assert times.run_seconds(config, 200, 10, max) == 200 * (8 * 2.0 + 0.5) + 3 * 0.5 * 3


def test_disk_is_what_a_finished_run_holds(tmp_path):
    """Catches a size that forgets the optimizer's state, or copies that are counted although they are links. Within 10 %."""
    make_tiny_corpus(tmp_path / "data")
    settings = {**TINY, "n_embd": 256, "max_iters": 20, "checkpoint_interval": 5, "eval_interval": 20, "keep_checkpoints": 2}
    config = make_config("wikitext103", {**settings, "vocab_size": 260})
    model = GPT(config.model)
    line = describe_disk(config, model, build_optimizer(model, config.train, "cpu"), 20)
    size, count = (float(re.search(f"([0-9.]+) {what}", line)[1]) for what in ("MB a checkpoint", "that a run keeps"))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    folders = ("--data-dir", str(tmp_path / "data"), "--checkpoint-dir", str(tmp_path / "runs"), "--run", "a")
    train.main([*TINY_RUN, *flags, *folders])
    found = {path.stat().st_ino: path.stat().st_size for path in (tmp_path / "runs" / "a").iterdir()}
    assert sum(found.values()) == pytest.approx(1e6 * size * count, rel=0.10)


def test_sharded_peak_loses_the_shares_of_the_others():
    """Catches a peak that counts the whole optimizer state, or divides weights and activations as well."""
    config = make_config("wikitext103")
    with torch.device("meta"):
        model = GPT(config.model)
    optimizer = build_optimizer(model, config.train, "cpu")
    state = 8 * sum(p.numel() for p in model.parameters())
    rest = sum(fullest_instant(memory_by_instant(config, model, optimizer, cpu(torch.float32)))[1].values()) - state
    line = describe_sharding(config, model, optimizer, cpu(torch.float32))
    for processes in (2, 4, 8):
        shown = float(re.search(rf"([\d.]+) GB with {processes}", line)[1]) * 1e9
        assert rest + state / processes - 1e7 <= shown <= rest + 1.1 * state / processes, line


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
        "is not there yet, so a vocabulary of 16,384 tokens is taken for granted",
        "next: uv run python download_data.py\n",
    ):
        assert text in result.stdout, result.stdout
    assert not list(tmp_path.iterdir())
    make_tiny_corpus(tmp_path / "data")  # tokens that train.py would refuse: an estimate of minutes for a run that cannot be
    assert_user_error(stage("train.py", "--estimate", *TINY_RUN, "--block-size", 100_000), "bring more text")
    again = stage("train.py", "--estimate", *TINY_RUN, "--shard-optimizer").stdout.splitlines()[-1]
    assert again.startswith("next: uv run python train.py --corpus tiny ") and "--n-layer=2" in again
    assert "--shard-optimizer" in again
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
