"""bench/bench_recipes.py: what it makes of runs, and that it continues instead of starting over."""

import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from tiny_corpus import make_tiny_corpus

sys.path.insert(0, str(ROOT / "bench"))

import bench_recipes
from bench_recipes import Row


def test_tokens_to_reach_a_loss_lie_on_the_curve() -> None:
    """A goal that is read off the wrong end of an interval, or counted as reached where the curve never falls to it."""
    curve = [[0, 0, 8.0], [10, 1_000, 6.0], [20, 2_000, 6.5], [30, 3_000, 5.0]]
    assert bench_recipes.tokens_to_reach(curve, 7.0) == 500
    assert bench_recipes.tokens_to_reach(curve, 6.0) == 1_000
    assert bench_recipes.tokens_to_reach(curve, 5.75) == 2_500
    assert bench_recipes.tokens_to_reach(curve, 4.9) is None


def test_rows_are_chosen_with_what_they_are_compared_with() -> None:
    """A chosen row without its baseline, a shortened one compared with the long one, a misspelt name that runs nothing."""
    rows = [Row("base", "", 1e6), Row("other", "", 1e6), Row("mine", "", 1e6, (1, 2), "base")]
    assert [row.name for row in bench_recipes.choose(rows, ["mine"])] == ["base", "mine"]
    assert bench_recipes.choose(rows, []) == rows
    assert bench_recipes.scaled(rows[2], 5e5).against == bench_recipes.scaled(rows[0], 5e5).name
    with pytest.raises(ValueError, match="no row is named mien; there are: base, mine, other"):
        bench_recipes.choose(rows, ["mien"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs of the tiny model on the tiny corpus, 64 tokens a step."""
    make_tiny_corpus(tmp_path / "data")
    tiny = (
        "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --batch-size 4 --grad-accum-steps 1 --eval-windows 4 "
        "--log-interval 1 --compile off --device cpu --dtype float32 --max-new-tokens 1 --warmup-iters 1 --learning-rate 0.01"
    )
    for name, value in (("COMMON", tiny), ("CORPUS", "tiny"), ("TOKENS_PER_STEP", 64), ("LEAST_INTERVAL", 3)):
        monkeypatch.setattr(bench_recipes, name, value)
    for name in ("results", "runs"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_run_is_measured_once_and_resumed_where_it_was_cut_off(folder: Path) -> None:
    """A finished run trained again, an interrupted one begun anew, a table that takes one row's numbers for another's."""
    base, mine = Row("base", "", 64 * 12, (1, 2)), Row("mine", "--optimizer muon", 64 * 12, (1,), "base")
    bench_recipes.python("train.py", *bench_recipes.train_arguments(base, 1, folder, 1), log=folder / "log")
    trained = (folder / "runs" / "base-seed1" / "metrics.jsonl").read_bytes()
    assert bench_recipes.run_all([base, mine], folder, 2, 1) == 0
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (folder / "results").iterdir()}
    assert (folder / "runs" / "base-seed1" / "metrics.jsonl").read_bytes() == trained
    assert results.keys() == {"base-seed1", "base-seed2", "mine-seed1"}
    for result in results.values():
        assert [step for step, _, _ in result["curve"]] == [0, 3, 6, 9, 12]
        assert result["curve"][-1][1:] == [64 * 12, result["final_loss"]]
        assert result["step_ms"] > 0 and result["commit"]
    assert results["base-seed1"]["final_loss"] != results["base-seed2"]["final_loss"]
    path = folder / "results" / "mine-seed1.json"
    path.write_text(json.dumps(results["mine-seed1"] | {"final_loss": 1.5}), encoding="utf-8")
    assert bench_recipes.run_all([base, mine], folder, 1, 1) == 0
    *_, shown = bench_recipes.show(folder, [base, mine]).splitlines()
    assert shown.startswith("| mine | 1 | 0.000768 M | 1.500 |")
