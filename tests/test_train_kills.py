"""The shortened form of bench/bench_kill_resume.py: real processes, killed where it hurts."""

import sys
from pathlib import Path

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import bench_kill_resume


def test_killed_runs_equal_the_unbroken_ones(tmp_path: Path):
    """A kill at some instant, also inside a save, that costs more than the steps since the last save, or bends the run."""
    name = "muon bf16, epochs, dropout"
    tally = bench_kill_resume.bench(tmp_path, 10, {name: bench_kill_resume.VARIANTS[name]}, seed=3, say=print)
    assert tally.kills == 10 and tally.inside_saves >= 2
    assert max(tally.steps_lost) <= bench_kill_resume.SAVE_EVERY
    assert tally.different == []
