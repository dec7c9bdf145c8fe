"""train.py --tensorboard: the metrics as events, or one line where the package is missing."""

import importlib.util
from pathlib import Path

import pytest
from conftest import assert_user_error
from tiny_corpus import TINY_RUN, make_tiny_corpus
from training_process import TrainingProcess

from support.metrics import read_metrics

has_tensorboard = importlib.util.find_spec("tensorboard") is not None


@pytest.mark.skipif(has_tensorboard, reason="tensorboard is installed")
def test_a_missing_package_is_named(stage, tmp_path: Path) -> None:
    """An import error after the model was built."""
    make_tiny_corpus(tmp_path / "data")
    assert_user_error(stage("train.py", *TINY_RUN, "--tensorboard"), "--tensorboard", "uv pip install tensorboard")


@pytest.mark.skipif(not has_tensorboard, reason="tensorboard is not installed")
def test_events_are_the_metrics_also_after_a_resume(tmp_path: Path) -> None:
    """Steps drawn twice after a resume, or events of a part that ran without the flag missing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_tiny_corpus(tmp_path / "data")
    crash = "import os, train; step = train.Trainer.step\n"
    crash += "train.Trainer.step = lambda self: os._exit(9) if self.state.step == 13 else step(self)"
    run = (*TINY_RUN, "--run", "tb", "--tensorboard")
    assert TrainingProcess(tmp_path, run, before=crash).wait() == 9
    resumed = TrainingProcess(tmp_path, ["--corpus", "tiny", "--run", "tb", "--resume", "--tensorboard"])
    assert resumed.wait() == 0, resumed.output()
    folder = tmp_path / "checkpoints" / "tb"
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    records = read_metrics(folder / "metrics.jsonl")
    for tag, kind, name in (("train/loss", "train", "loss"), ("eval/val_loss", "eval", "val_loss")):
        expected = [(r["step"], r[name]) for r in records if r["kind"] == kind]
        assert [step for step, _ in expected] == sorted({step for step, _ in expected})
        assert [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars(tag)] == expected
