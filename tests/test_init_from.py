"""Training that begins with weights that are already there."""

import json

import pytest
import torch
from conftest import assert_user_error
from tiny_corpus import TINY_RUN, make_tiny_corpus

import export
import train
from support.common import UserError

SHORT = (*TINY_RUN, "--max-iters", "10")


@pytest.fixture
def first(tmp_path, monkeypatch):
    """A run of ten steps in an empty folder; returns its last validation loss."""
    monkeypatch.chdir(tmp_path)
    make_tiny_corpus(tmp_path / "data")
    assert train.main([*SHORT, "--run", "first"]) == 0
    return evaluations(tmp_path, "first")[-1]


def evaluations(folder, run):
    lines = (folder / "checkpoints" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["val_loss"] for record in map(json.loads, lines) if record["kind"] == "eval"]


def test_a_run_begins_where_the_weights_are(first, tmp_path, stage):
    """Would catch weights that are loaded and then initialised over, an optimizer taken along, and flags that contradict."""
    source = tmp_path / "checkpoints" / "first" / "checkpoint_latest.pt"
    assert export.main(["--checkpoint", str(source), "--out", "hf"]) == 0
    for run, path in (("second", source), ("third", tmp_path / "hf")):
        assert train.main([*SHORT, "--run", run, "--init-from", str(path), "--learning-rate", "1e-4"]) == 0
        losses = evaluations(tmp_path, run)
        assert losses[0] == pytest.approx(first, abs=1e-5)
        assert losses[-1] < losses[0]
    with pytest.raises(UserError, match="has n_layer 2, not 3; leave out --n-layer"):
        train.main([*SHORT, "--run", "fourth", "--init-from", str(source), "--n-layer", "3"])
    assert_user_error(stage("train.py", *SHORT, "--run", "first", "--resume", "--init-from", source), "--init-from")
    assert not (tmp_path / "checkpoints" / "fourth").exists()


def test_a_flipped_bit_in_the_weights_is_refused(first, tmp_path):
    """Would catch a run that begins with a damaged weight: a number like any other, which only the checksum tells."""
    damaged = bytearray((tmp_path / "checkpoints" / "first" / "checkpoint_latest.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(damaged)
    with pytest.raises(UserError, match=r"damaged\.pt is damaged .*checksum"):
        train.main([*SHORT, "--run", "second", "--init-from", str(tmp_path / "damaged.pt")])


def test_weights_that_are_not_finite_are_refused(first, tmp_path):
    """Would catch a run that begins with them and then points to a checkpoint that it never wrote."""
    checkpoint = torch.load(tmp_path / "checkpoints" / "first" / "checkpoint_latest.pt", weights_only=True)
    checkpoint["model"]["transformer.ln_f.weight"][3] = float("nan")
    torch.save(checkpoint, tmp_path / "damaged.pt")
    with pytest.raises(UserError, match=r"damaged\.pt holds weights that are no finite numbers"):
        train.main([*SHORT, "--run", "second", "--init-from", str(tmp_path / "damaged.pt")])
