"""Schedules against tables, groups, GaLore against its formula and its authors' package, and resuming in the middle."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from config import ModelConfig, TrainConfig, make_config
from model import GPT
from optimizers import GaLoreAdamW, build_optimizer, get_lr, make_group, singular_basis, warmup_steps
from support.common import UserError

TINY = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)
KINDS = ("adamw", "muon", "galore")


pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**changes) -> TrainConfig:
    return dataclasses.replace(TrainConfig(learning_rate=1e-2, galore_rank=8, galore_update_gap=3), **changes)


def train(model: GPT, optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(step))
        optimizer.set_lr(get_lr(step, settings(warmup_iters=4), 20))
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ----------------------------------------------------------------------------------------------------------------------
# Schedule


def test_wikitext_schedule():
    """Catches a first step at 0, a warm-up that is one step off, and a cosine that ends elsewhere than at 10 %."""
    config = make_config("wikitext103").train
    table = {0: 1.25e-6, 1: 2.5e-6, 99: 1.25e-4, 199: 2.5e-4, 200: 2.5e-4, 2_100: 1.375e-4, 4_000: 2.5e-5, 5_000: 2.5e-5}
    assert {k: get_lr(k, config, 4_000) for k in table} == pytest.approx(table, rel=1e-12)
    assert get_lr(1_150, config, 4_000) == pytest.approx(2.5e-5 + 2.25e-4 * (0.5 + math.sqrt(0.125)), rel=1e-12)


def test_sydsgpt_schedule():
    """Catches a warm-up that starts at 0 or reaches the peak a step early, and a share that is not of all steps."""
    config = make_config("sydsgpt").train
    assert warmup_steps(config, 50_000) == 1_000
    table = {0: 1e-6, 500: 1e-6 + 0.5 * 9.9e-5, 999: 1e-4 - 9.9e-8, 1_000: 1e-4, 25_500: 5.5e-5, 50_000: 1e-5}
    assert {k: get_lr(k, config, 50_000) for k in table} == pytest.approx(table, rel=1e-12)


def test_stable_then_decay_schedule():
    """Catches a decay that starts in the warm-up, or does not end at the last step."""
    config = settings(lr_schedule="wsd", decay_ratio=0.25, warmup_iters=10, min_lr_ratio=0.0)
    table = {0: 1e-3, 9: 1e-2, 10: 1e-2, 75: 1e-2, 76: 9.6e-3, 99: 4e-4, 100: 0.0}
    assert {k: get_lr(k, config, 100) for k in table} == pytest.approx(table, rel=1e-9, abs=1e-15)
    assert get_lr(5, dataclasses.replace(config, decay_ratio=0.99), 12) == pytest.approx(6e-3)


# ----------------------------------------------------------------------------------------------------------------------
# Groups and state


def test_groups_hold_what_their_names_say():
    """Catches an embedding or a head in Muon or GaLore, a parameter in no group or in two, and norms that decay."""
    for kind in KINDS:
        for tied in (True, False):
            model = GPT(dataclasses.replace(TINY, tied_head=tied, bias=True, norm="rmsnorm", qk_norm=True, position="rotary"))
            groups = {g["name"]: g for g in build_optimizer(model, settings(optimizer=kind), "cpu").param_groups}
            names = [name for g in groups.values() for name in g["names"]]
            assert sorted(names) == sorted(name for name, _ in model.named_parameters())
            assert groups["vectors"]["weight_decay"] == 0.0 and groups["matrices"]["weight_decay"] == 0.1
            assert all(p.dim() == 1 for p in groups["vectors"]["params"])
            if kind != "adamw":
                outside = {"transformer.wte.weight"} | (set() if tied else {"lm_head.weight"})
                assert set(groups["matrices"]["names"]) == outside
                assert len(groups["hidden matrices"]["names"]) == 8


def test_decay_all_and_separate_learning_rates():
    """Catches the SydsGPT recipe decaying matrices only, and a Muon rate that the schedule overwrites."""
    model = GPT(TINY)
    everywhere = build_optimizer(model, settings(decay_all=True), "cpu").param_groups
    assert [g["weight_decay"] for g in everywhere] == [0.1, 0.1]
    optimizer = build_optimizer(model, settings(optimizer="muon", muon_learning_rate=3e-2), "cpu")
    optimizer.set_lr(5e-3)
    assert {g["name"]: g["lr"] for g in optimizer.param_groups} == pytest.approx(
        {"hidden matrices": 1.5e-2, "matrices": 5e-3, "vectors": 5e-3}
    )
    assert optimizer.describe()[0].startswith("Muon: hidden matrices, 8 tensors, 24,576 numbers, learning rate x 3")


@pytest.mark.parametrize("kind", KINDS)
def test_resume_equals_the_unbroken_run(kind: str, tmp_path: Path):
    """Catches state that is lost, rounded or shared on its way through a file, GaLore's basis included."""
    torch.manual_seed(3)
    model = GPT(TINY)
    optimizer = build_optimizer(model, settings(optimizer=kind), "cpu")
    train(model, optimizer, range(5))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    expected = train(model, optimizer, range(5, 12))
    saved, other = torch.load(tmp_path / "half.pt", weights_only=True), GPT(TINY)
    other.load_state_dict(saved["model"])
    resumed = build_optimizer(other, settings(optimizer=kind), "cpu")
    resumed.load_state_dict(saved["optimizer"])
    assert train(other, resumed, range(5, 12)) == expected
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    steps = {v["step"] for v in saved["optimizer"]["state"].values() if "step" in v}
    assert steps == {5} and all(type(step) is int for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_state_bytes_are_what_the_state_takes(kind: str):
    """Catches an estimate, or GaLore's promised saving, that is not what is really kept."""
    model = GPT(TINY)
    optimizer = build_optimizer(model, settings(optimizer=kind), "cpu")
    train(model, optimizer, range(1))
    kept = [t for values in optimizer.state_dict()["state"].values() for t in values.values() if isinstance(t, torch.Tensor)]
    assert optimizer.state_bytes() == sum(t.numel() * t.element_size() for t in kept)


def test_state_of_something_else_is_refused():
    """Catches moments that are handed to other parameters after the optimizer, the grouping or the rank changed."""

    def saved(**changes):
        model = GPT(TINY)
        optimizer = build_optimizer(model, settings(**changes), "cpu")
        train(model, optimizer, range(1))
        return optimizer.state_dict()

    with pytest.raises(UserError, match="--optimizer muon, not adamw"):
        build_optimizer(GPT(TINY), settings(), "cpu").load_state_dict(saved(optimizer="muon"))
    moved = saved(optimizer="muon")
    moved["groups"]["matrices"].append(moved["groups"]["hidden matrices"].pop())
    with pytest.raises(UserError, match="group 'hidden matrices' holds other parameters"):
        build_optimizer(GPT(TINY), settings(optimizer="muon"), "cpu").load_state_dict(moved)
    with pytest.raises(UserError, match="--galore-rank"):
        other = build_optimizer(GPT(TINY), settings(optimizer="galore", galore_rank=4), "cpu")
        other.load_state_dict(saved(optimizer="galore"))


# ----------------------------------------------------------------------------------------------------------------------
# GaLore


def galore_optimizer(parameters: list[torch.Tensor], rank: int, gap: int = 2, scale: float = 0.25) -> GaLoreAdamW:
    named = [(str(i), p) for i, p in enumerate(parameters)]
    group = make_group("hidden matrices", named, weight_decay=0.05) | {"rank": rank, "update_gap": gap, "scale": scale}
    return GaLoreAdamW([group], lr=1e-2, betas=(0.9, 0.999), eps=1e-6)


def gradients(shapes: list[tuple[int, int]], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_galore_really_projects():
    """Catches the published mistake (no rank, nothing projected): the update has the asked rank, the state its size."""
    shapes, rank = [(24, 40), (40, 24), (6, 24)], 8
    parameters = [torch.zeros(shape) for shape in shapes]
    optimizer = galore_optimizer(parameters, rank)
    for p, grad in zip(parameters, gradients(shapes, 1), strict=True):
        p.grad = grad
    optimizer.step()
    for p in parameters:
        smaller, larger = sorted(p.shape)
        kept = min(rank, smaller)
        assert torch.linalg.matrix_rank(p) == kept
        assert sum(t.numel() for t in optimizer.state[p].values() if torch.is_tensor(t)) == 2 * kept * larger + kept * smaller


def test_galore_matches_its_authors_package():
    """Catches a difference from the reference implementation over several refreshes: bias correction, decay, scale, side."""
    galore_torch = pytest.importorskip("galore_torch")
    shapes = [(24, 40), (40, 24), (32, 32)]
    ours, theirs = ([torch.nn.Parameter(t) for t in gradients(shapes, 0)] for _ in range(2))
    optimizer = galore_optimizer(ours, rank=8, gap=3)
    group = {"params": theirs, "rank": 8, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
    peer = galore_torch.GaLoreAdamW(
        [group], lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.05, no_deprecation_warning=True
    )
    for step in range(8):
        for parameters in (ours, theirs):
            for p, grad in zip(parameters, gradients(shapes, 10 + step), strict=True):
                p.grad = grad
        optimizer.step()
        peer.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.allclose(p, q, atol=1e-5), f"step {step}, shape {tuple(p.shape)}"


def test_galore_survives_degenerate_gradients():
    """Catches a crash or NaN weights where the decomposition has nothing to hold on to, or fails."""
    p = torch.ones(8, 12)
    optimizer = galore_optimizer([p], rank=4, gap=1)
    p.grad = torch.full((8, 12), math.inf)
    optimizer.step()  # no basis yet: nothing happens, and it is counted
    assert torch.equal(p, torch.ones(8, 12)) and optimizer.state[p]["failed"] == 1
    for grad in (torch.zeros(8, 12), torch.ones(8, 12)):
        p.grad = grad
        optimizer.step()
        assert p.isfinite().all()


@pytest.mark.parametrize("failing_step", [0, 1])
def test_a_failed_decomposition_does_not_spoil_the_checkpoint(failing_step: int, monkeypatch: pytest.MonkeyPatch):
    """Catches a resume that takes the count of failures, or a matrix that has no basis yet, for damage."""
    model = GPT(TINY)
    optimizer = build_optimizer(model, settings(optimizer="galore", galore_update_gap=1), "cpu")
    for step in range(failing_step + 1):
        if step == failing_step:
            monkeypatch.setattr("optimizers.singular_basis", lambda grad, rank: None)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    saved_state = optimizer.state_dict()
    assert sum(values.get("failed", 0) for values in saved_state["state"].values()) > 0
    other = build_optimizer(GPT(TINY), settings(optimizer="galore", galore_update_gap=1), "cpu")
    other.load_state_dict(saved_state)
    assert str(other.state_dict()) == str(saved_state)
    values = next(values for values in saved_state["state"].values() if "failed" in values)
    values["step"] = 1
    values.pop("basis", None)
    with pytest.raises(UserError, match="is damaged"):
        other.load_state_dict(saved_state)
    assert singular_basis(torch.full((8, 12), math.nan), 4) is None
    assert singular_basis(torch.randn(8, 12).bfloat16(), 4).dtype == torch.float32


def test_galore_says_when_it_saves_nothing():
    """Catches advice that is wrong at a rank as large as the matrices."""
    small, full = (
        build_optimizer(GPT(TINY), settings(optimizer="galore", galore_rank=rank), "cpu").describe()[-1] for rank in (4, 32)
    )
    assert "AdamW learns at least as well" in small and "AdamW is smaller" in full
