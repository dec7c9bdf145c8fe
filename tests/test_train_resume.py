"""A run that was stopped and resumed equals the run that never stopped; what would bend it is refused."""

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_corpus import TINY_RUN, make_tiny_corpus

import train
from checkpoint import load_checkpoint
from support.common import UserError
from support.metrics import read_metrics
from support.updater import Updater

pytestmark = pytest.mark.usefixtures("in_tiny_folder")


def run(*flags: object) -> None:
    """train.py in this process, with the tiny run's flags first, so that `flags` may change them."""
    train.main([*TINY_RUN, *map(str, flags)])


def stop_at(steps: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a real SIGINT arrives in the middle of each of these updates, once."""
    left, original = sorted(steps), Updater.update

    def update(self: Updater, step: int, *rest: Any) -> Any:
        if left and step >= left[0]:
            left.pop(0)
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, step, *rest)

    monkeypatch.setattr(Updater, "update", update)


def run_with_stops(steps: Sequence[int], monkeypatch: pytest.MonkeyPatch, *flags: object) -> None:
    stop_at(steps, monkeypatch)
    for number in range(len(steps)):
        with pytest.raises(KeyboardInterrupt):
            run(*flags, *(["--resume"] if number else []))
    run(*flags, "--resume")


def latest(name: str) -> dict[str, Any]:
    return load_checkpoint(Path("checkpoints") / name / "checkpoint_latest.pt")


def losses(name: str) -> list[tuple]:
    """What metrics.jsonl says, without clocks and speeds."""
    records = read_metrics(Path("checkpoints") / name / "metrics.jsonl")
    keys = ("kind", "step", "tokens", "loss", "val_loss", "train_loss", "lr", "grad_norm", "text")
    return [tuple(record.get(key) for key in keys) for record in records]


def assert_same_tensors(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_tensors(a[key], b[key], f"{where}/{key}")
    else:
        assert a == b, where


def assert_same_run(a: str, b: str) -> None:
    """Bit for bit: weights, optimizer, losses; and what progress counts."""
    one, other = latest(a), latest(b)
    assert one["iter"] == other["iter"]
    assert_same_tensors(one["model"], other["model"], "model")
    assert_same_tensors(one["optimizer"], other["optimizer"], "optimizer")
    assert losses(a) == losses(b)
    clocks = {"elapsed_s": 0.0}
    assert {**one["config"]["progress"], **clocks} == {**other["config"]["progress"], **clocks}


VARIANTS = {
    "adamw": (),
    "bf16, dropout, epochs": (
        *("--dtype", "bfloat16", "--dropout", "0.2", "--sampling", "epoch", "--max-iters", "0", "--max-epochs", "1.3"),
        *("--checkpoint-interval", "100", "--keep-checkpoints", "0"),
    ),
    "fp16 with scaler": ("--dtype", "float16", "--dropout", "0.1"),
    "muon": ("--dtype", "bfloat16", "--optimizer", "muon", "--sampling", "epoch"),
    "galore": ("--optimizer", "galore", "--galore-rank", "8", "--galore-update-gap", "4", "--dropout", "0.1"),
    "samples": ("--sample-tokens", "4", "--activation", "swiglu", "--position", "rotary", "--log-interval", "3"),
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_stopped_run_equals_the_unbroken_one(flags: tuple, monkeypatch: pytest.MonkeyPatch):
    """State that is not saved (moments, scaler, dropout, data order, best loss), a lost or repeated step or record."""
    run("--run", "a", *flags)
    run_with_stops([2, 9, 10, 22], monkeypatch, "--run", "b", *flags)
    assert_same_run("a", "b")


def test_stopped_compiled_run_equals_the_unbroken_one(monkeypatch: pytest.MonkeyPatch):
    """A compiled backward pass that is not repeatable, or that draws its dropout elsewhere."""
    flags = ("--compile", "on", "--dropout", "0.1", "--max-iters", "12", "--n-layer", "1")
    run("--run", "a", *flags)
    run_with_stops([5], monkeypatch, "--run", "b", *flags)
    assert_same_run("a", "b")
    assert latest("a")["config"]["environment"]["compiled"] is True


def test_stop_at_a_resumed_checkpoint_loses_nothing(monkeypatch: pytest.MonkeyPatch):
    """Resuming at the step of an evaluation that the signal cut short, or from the last step, must not lose or repeat it."""
    run("--run", "a")
    original = Updater.mean_loss
    signals = iter([False, True, False, False, True, False])

    def mean_loss(self: Updater, *rest: Any) -> Any:
        if next(signals, False):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *rest)

    monkeypatch.setattr(Updater, "mean_loss", mean_loss)
    for resume in ([], ["--resume"]):
        with pytest.raises(train.Terminated):
            run("--run", "b", *resume)
    run("--run", "b", "--resume")
    assert_same_run("a", "b")
    before = (Path("checkpoints/b/checkpoint_latest.pt").stat().st_mtime_ns, losses("b"))
    run("--run", "b", "--resume")
    assert before == (Path("checkpoints/b/checkpoint_latest.pt").stat().st_mtime_ns, losses("b"))


def test_resume_from_any_older_checkpoint_ends_in_the_same_run():
    """A damaged latest costs the steps since prev1 and nothing else: records cut back, best kept."""
    run("--run", "a")
    run("--run", "b")
    folder = Path("checkpoints/b")
    (folder / "checkpoint_latest.pt").write_bytes(b"torn")
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "step": 31, "lo')
    (folder / "checkpoint_best.pt.tmp").write_bytes(b"left by a kill")
    run("--run", "b", "--resume")
    assert_same_run("a", "b")
    assert not list(folder.glob("*.tmp"))


def test_resume_says_what_it_skipped(capsys: pytest.CaptureFixture):
    """Going back in time without a word."""
    run("--run", "a")
    Path("checkpoints/a/checkpoint_latest.pt").write_bytes(b"torn")
    run("--run", "a", "--resume")
    out = capsys.readouterr().out
    assert "skipped: checkpoints/a/checkpoint_latest.pt is damaged" in out
    assert "resuming from checkpoints/a/checkpoint_prev1.pt, step 25" in out


# ----------------------------------------------------------------------------------------------------------------------
# Settings on a resume


BENDING = {
    "longer": (
        ["--max-iters", "40"],
        "max_iters is 30 .* and 40 now; to go on by the schedule of .* add --override max_iters",
    ),
    "shorter": (["--max-iters", "20"], "max_iters is 30 in the checkpoint and 20 now.* insist with --override max_iters"),
    "sampling": (["--sampling", "epoch"], "sampling is random in the checkpoint and epoch now.* --override sampling"),
    "seed": (["--seed", "5"], "seed is 1337 in the checkpoint and 5 now.* --override seed"),
    "n_layer": (["--n-layer", "3"], r"n_layer is 2 in the checkpoint and 3 now.* \(--run NAME\)$"),
    "block_size": (["--block-size", "16"], r"block_size is 32 in the checkpoint and 16 now.* \(--run NAME\)$"),
    "batch_size": (
        ["--batch-size", "2"],
        r"took 4 x 2 = 8 sequences and would take 2 x 2 = 4 now.* --override batch_size",
    ),
}


@pytest.mark.parametrize(("flags", "message"), BENDING.values(), ids=BENDING)
def test_what_bends_a_run_is_refused_with_both_values(flags: list, message: str):
    """A schedule stretched, data replayed or a model swapped in silence."""
    run("--max-iters", "30", "--run", "a")
    before = Path("checkpoints/a/checkpoint_latest.pt").read_bytes()
    with pytest.raises(UserError, match=message):
        resume("a", *flags)
    assert Path("checkpoints/a/checkpoint_latest.pt").read_bytes() == before


def resume(name: str, *flags: str) -> None:
    """Resumes with nothing said but where the run is: all other settings are the checkpoint's."""
    train.main(["--run", name, "--resume", *flags])


def test_override_bends_and_says_so(capsys: pytest.CaptureFixture):
    """--override that is accepted and ignored, or a schedule change without the learning rates."""
    run("--run", "a")
    resume("a", "--max-iters", "40", "--override", "max_iters")
    out = capsys.readouterr().out
    assert "changed: max_iters 30 -> 40" in out and "changed: learning rate of the next step" in out
    assert latest("a")["iter"] == 40 and [step for kind, step, *_ in losses("a") if kind == "train"] == list(range(1, 41))


def test_a_schedule_that_ends_before_the_checkpoint_is_refused():
    """A run that has passed its last step already, and so trains for ever."""
    run("--run", "a", "--max-iters", "20")
    with pytest.raises(UserError, match="has 20 steps already, and the schedule ends at 15; raise --max-iters"):
        resume("a", "--max-iters", "15", "--override", "max_iters")


def test_a_complete_run_says_so(capsys: pytest.CaptureFixture):
    """A run without a step to do that compiles for a minute and writes its sample again, as if it had trained."""
    run("--run", "a", "--max-iters", "20")
    before, _ = Path("checkpoints/a/metrics.jsonl").read_bytes(), capsys.readouterr()
    resume("a")
    out = capsys.readouterr().out
    assert (
        "run checkpoints/a is complete, all 20 steps of it; to train it longer: uv run python train.py --run a --resume" in out
    )
    assert "sample:" not in out and Path("checkpoints/a/metrics.jsonl").read_bytes() == before
    resume("a", "--max-iters", "25", "--override", "max_iters")
    assert latest("a")["iter"] == 25


def test_override_of_what_cannot_fit_or_does_not_exist():
    """Weights of another shape squeezed in, a misspelt name taken for consent."""
    run("--run", "a")
    with pytest.raises(UserError, match="do not fit this model"):
        resume("a", "--n-layer", "3", "--override", "n_layer")
    with pytest.raises(UserError, match=r"names max_iter, which is no setting.*did you mean max_iters"):
        resume("a", "--max-iters", "40", "--override", "max_iter")
    with pytest.raises(UserError, match="--override only means something together with --resume"):
        train.main(["--run", "new", "--override", "max_iters"])


def test_other_data_or_tokenizer_is_refused():
    """The corpus was prepared anew in between: the run would go on with other text."""
    run("--run", "a")
    make_tiny_corpus(Path("data"), seed=1)
    with pytest.raises(UserError, match=r"data is .* in the checkpoint and .* now.*--override data"):
        resume("a")
    resume("a", "--override", "data")
    meta = Path("data/tiny/tokens/meta.json")
    values = json.loads(meta.read_text(encoding="utf-8"))
    meta.write_text(json.dumps({**values, "tokenizer_sha256": "0" * 64}), encoding="utf-8")
    with pytest.raises(UserError, match=r"encoded with another tokenizer .*prepare_data.py"):
        resume("a")


def test_harmless_changes_take_effect_and_are_shown(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Flags on a resume that are ignored, or settings that fall back to the preset's."""
    stop_at([11], monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run("--run", "a")
    resume("a", "--learning-rate", "0.001", "--batch-size", "8", "--grad-accum-steps", "1", "--keep-checkpoints", "1")
    out = capsys.readouterr().out
    assert "changed: learning_rate 0.003 -> 0.001" in out and "changed: batch_size 4 -> 8" in out
    settings = latest("a")["config"]["settings"]
    assert settings["train"]["learning_rate"] == 0.001 and settings["model"]["n_layer"] == 2
    assert settings["train"]["max_iters"] == 30 and settings["run"]["corpus"] == "tiny"
    assert not Path("checkpoints/a/checkpoint_prev2.pt").exists()


def test_changed_surroundings_are_named(capsys: pytest.CaptureFixture):
    """A resume on other hardware or in another precision that differs in the last digit, and nobody knows why."""
    run("--run", "a")
    resume("a", "--dtype", "bfloat16", "--max-iters", "35", "--override", "max_iters")
    assert "precision float32 -> bfloat16" in capsys.readouterr().out


def test_existing_run_is_never_overwritten_by_chance():
    """A bare train.py that deletes a finished run."""
    run("--run", "a", "--max-iters", "10")
    before = Path("checkpoints/a/checkpoint_latest.pt").read_bytes()
    with pytest.raises(UserError, match=r"checkpoints.a holds a run; go on with: .* --resume; .*--run.*--overwrite"):
        run("--run", "a")
    assert Path("checkpoints/a/checkpoint_latest.pt").read_bytes() == before
    run("--run", "a", "--max-iters", "12", "--overwrite", "--keep-checkpoints", "0")
    assert latest("a")["iter"] == 12 and [step for kind, step, *_ in losses("a") if kind == "train"] == list(range(1, 13))
    with pytest.raises(UserError, match=r"there is no checkpoint in checkpoints.nothing"):
        run("--run", "nothing", "--resume")
    assert not Path("checkpoints/nothing").exists()


def test_random_stops_many_times(monkeypatch: pytest.MonkeyPatch):
    """Any step, any number of times: stops drawn at random, several in a row at the same place."""
    flags = ("--sampling", "epoch", "--dropout", "0.1", "--eval-interval", "7", "--checkpoint-interval", "1000")
    run("--run", "a", *flags)
    steps = sorted(random.Random(0).choices(range(30), k=12))
    run_with_stops(steps, monkeypatch, "--run", "b", *flags)
    assert_same_run("a", "b")
