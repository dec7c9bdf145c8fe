"""The whole path from text to sampled text, at a size that takes seconds, in real processes."""

import json
import random
import re
from pathlib import Path

import pytest
from conftest import assert_user_error

TINY = [
    *("--vocab-size", "400", "--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--block-size", "32"),
    *("--batch-size", "4", "--max-iters", "12", "--warmup-iters", "2", "--eval-interval", "6", "--eval-windows", "8"),
    *("--checkpoint-interval", "6", "--log-interval", "2", "--max-new-tokens", "20", "--compile", "off"),
]


def write_corpus(path: Path, paragraphs: int = 400) -> None:
    """Invented prose: random words in sentences, paragraphs separated by blank lines."""
    rng = random.Random(7)
    words = ["".join(rng.choice("aeioulnrst") for _ in range(rng.randint(2, 8))) for _ in range(300)]
    sentences = [[" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(6)] for _ in range(paragraphs)]
    path.write_text("\n\n".join(" ".join(s) for s in sentences), encoding="utf-8")


@pytest.mark.parametrize("kind", ["byte", "word"])
def test_one_lone_text_file_becomes_a_model_that_samples(stage, tmp_path: Path, kind: str) -> None:
    """Any stage whose output the next one cannot read; a second run that does the work again instead of skipping it."""
    write_corpus(tmp_path / "book.txt")
    arguments = ["--input", "book.txt", "--tokenizer-kind", kind, "--skip-checks", *TINY]
    first = stage("pipeline.py", *arguments)
    assert first.returncode == 0, first.stderr + first.stdout
    for expected in ("parameters", "tokens seen", "validation", "bits per byte", "Go on with:"):
        assert expected in first.stdout
    assert "next: " not in first.stdout, "a stage names a command that the pipeline runs itself"
    run = tmp_path / "checkpoints" / "quick-custom"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {r["step"]: r["val_loss"] for r in records if r["kind"] == "eval"}
    assert sorted(losses) == [0, 6, 12]
    assert losses[12] < losses[0]
    artifacts = [*(tmp_path / "data" / "custom").rglob("*.*"), run / "checkpoint_latest.pt", run / "checkpoint_best.pt"]
    before = {p: p.stat().st_mtime_ns for p in artifacts if p.is_file() and p.name != ".lock"}

    second = stage("pipeline.py", *arguments)
    assert second.returncode == 0, second.stderr + second.stdout
    assert {p: p.stat().st_mtime_ns for p in before} == before, "a stage wrote again what was current"
    summary = re.compile(r"(parameters|tokens seen|validation|bits per byte) +(.*)")
    assert dict(summary.findall(first.stdout)) == dict(summary.findall(second.stdout))


def test_changed_text_is_noticed_by_every_later_stage(stage, tmp_path: Path) -> None:
    """Training on tokens of a text that is no longer there, or with a tokenizer made from another one."""
    write_corpus(tmp_path / "book.txt")
    arguments = ["--input", "book.txt", "--skip-checks", *TINY]
    assert stage("pipeline.py", *arguments).returncode == 0
    write_corpus(tmp_path / "book.txt", paragraphs=300)
    selection = ["--preset", "quick", "--corpus", "custom"]
    assert_user_error(stage("prepare_data.py", *selection), "download_data.py")
    again = stage("pipeline.py", *arguments)
    assert_user_error(again, "--overwrite")
    assert stage("pipeline.py", *arguments, "--overwrite").returncode == 0


def test_a_mistake_in_one_stage_ends_the_pipeline_with_its_line(stage, tmp_path: Path) -> None:
    """A pipeline that carries on after a failed stage, or buries the reason."""
    assert_user_error(stage("pipeline.py", "--input", "missing.txt", *TINY), "missing.txt")
    (tmp_path / "empty.txt").write_text(" \n\n ", encoding="utf-8")
    assert_user_error(stage("pipeline.py", "--input", "empty.txt", *TINY), "empty.txt")
    (tmp_path / "short.txt").write_text("Too short to train on.", encoding="utf-8")
    assert_user_error(stage("pipeline.py", "--input", "short.txt", *TINY))
