"""report.py on made-up runs: what a reader sees, and that neither damage nor hostile text harms the page."""

import html.parser
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_user_error

import report
from config import Config, make_config
from support.charts import label_ticks, log_ticks, make_axis, round_ticks, short, thin_out
from support.common import UserError
from support.runs import find_run_folders, labels_of, read_run, read_vocabularies
from tokenizer import BPETokenizer

HOSTILE = '</pre><script>alert(1)</script><img src=x onerror="alert(1)">\u202e\ud800\0"&\u001b[31m'
STEPS = 400
TEXT = [
    "the cat sat on the mat and looked at the moon",
    "a caf\u00e9 in Z\u00fcrich serves t\u00e9 and \u8336 to everyone",
] * 30


def make_run(folder: Path, *, steps: int = STEPS, quality: float = 1.0, **settings: Any) -> Path:
    """A run folder as train.py leaves it: a noisy falling loss, five evaluations, samples, one loss that was not finite."""
    folder.mkdir(parents=True)
    data = {"data_dir": str(folder.parent.parent / "data"), "max_iters": STEPS}
    config = make_config("quick", {**data, **settings})
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records(steps, quality)), encoding="utf-8")
    return folder


def records(steps: int, quality: float) -> list[dict[str, Any]]:
    draw, made = random.Random(steps), []
    for step in range(steps + 1):
        where = {"step": step, "tokens": step * 4_096, "elapsed_s": step * 1.7}
        loss = 3.2 / quality + 5.1 * math.exp(-step / 60)
        if step % 10 == 0 and step:
            speed = {
                "lr": 2e-3 * min(1, step / 40),
                "grad_norm": 0.4 + draw.random(),
                "tokens_per_s": 2_400 + draw.random() * 90,
            }
            noisy = None if step == 200 else loss + draw.gauss(0, 0.08)
            made.append({"kind": "train", **where, "loss": noisy, **speed, "mfu": 0.31})
        if step % 100 == 0:
            made.append({"kind": "eval", **where, "val_loss": loss + 0.05})
            made.append({"kind": "sample", "step": step, "prompt": "The cat", "text": f"The cat said {step} things."})
    return made


def make_data(folder: Path) -> BPETokenizer:
    """Tokenizer and validation tokens of the corpus `local` under `folder`."""
    tokenizer = BPETokenizer.train(TEXT, kind="byte", vocab_size=400, min_frequency=2)
    tokenizer.save(folder / "local" / "tokenizer.json")
    ids = np.concatenate([tokenizer.wrap_document(tokenizer.encode(text)) for text in TEXT]).astype("<u2")
    (folder / "local" / "tokens").mkdir()
    ids.tofile(folder / "local" / "tokens" / "val.bin")
    split = {"tokens": len(ids), "words": 600, "scored_bytes": sum(len(text.encode()) for text in TEXT)}
    meta = {"dtype": "uint16", "splits": {"val": split}}
    (folder / "local" / "tokens" / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return tokenizer


class Page(html.parser.HTMLParser):
    """A parsed page: its tags with attributes, its text, and whether every element is closed where it should be."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_bytes().decode("utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"

    def with_tag(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The checkpoint folder of two runs, one still going on, and their data."""
    make_run(tmp_path / "checkpoints" / "quick")
    make_run(tmp_path / "checkpoints" / "wide", steps=260, quality=1.1, n_embd=384, n_head=6, learning_rate=1e-3)
    make_data(tmp_path / "data")
    return tmp_path / "checkpoints"


def make_report(*names: str, folder: Path) -> Page:
    assert report.main([*names, "--checkpoint-dir", str(folder), "--no-png"]) == 0
    return Page(folder / names[0] / "report.html")


def test_report_of_two_runs_shows_both_and_needs_no_network(stage: Callable, runs: Path) -> None:
    """Would catch a chart, table or picture that went missing, an address outside the page, or a dead link."""
    result = stage("report.py", "quick", "wide")
    assert result.returncode == 0, result.stderr
    page = Page(runs / "quick" / "report.html")
    charts = [attributes["id"] for attributes in page.with_tag("figure")]
    expected = ["loss_step", "loss_close", "loss_tokens", "loss_time", "learning_rate", "grad_norm", "speed", "utilisation"]
    assert charts == [*expected, "token_length"]
    for name in charts:
        assert (runs / "quick" / f"report_{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
    for words in ("step 400 of 400 (complete)", "step 260 of 400 (65 %)", "The cat", "said 300 things.", "time (minutes)"):
        assert words in page.text
    links = [attributes["href"] for attributes in page.with_tag("a")]
    assert len(links) > 14
    assert all((runs / "quick" / link).exists() for link in links)
    assert not re.search(r"https?:|url\(|src=|@import", (runs / "quick" / "report.html").read_text(encoding="utf-8"))


def test_settings_that_differ_and_no_others(runs: Path) -> None:
    """Would catch a difference between runs that is not shown, or rows of equal settings drowning it."""
    a, b = (report.flat_settings(read_run(runs / name, name).settings) for name in ("quick", "wide"))
    rows = report.setting_rows([a, b], only_different=True)
    usual = f"{make_config('quick').train.learning_rate:g}"
    expected = [["model.n_head", "4", "6"], ["model.n_embd", "256", "384"], ["train.learning_rate", usual, "0.001"]]
    assert rows == expected
    page = make_report("quick", folder=runs)
    assert "In these the run differs from its preset:" in page.text
    assert "train.max_iters" in page.text


def test_curves_follow_the_records(runs: Path) -> None:
    """Would catch a wrong column, unit or order, and a loss that was not finite vanishing without a mark."""
    run = read_run(runs / "quick", "quick")
    charts = {chart.name: chart for chart in report.make_charts([run])}
    training, validation = charts["loss_time"].lines
    assert [x for x, _ in validation.points] == pytest.approx([k * 170 / 60 for k in range(5)])
    assert [y for _, y in validation.points] == [r["val_loss"] for r in run.eval]
    assert [x for x, y in training.points if math.isnan(y)] == pytest.approx([200 * 1.7 / 60])
    assert [x for x, _ in charts["loss_tokens"].lines[1].points] == [k * 409_600 for k in range(5)]
    assert charts["utilisation"].lines[0].points[0] == (10, pytest.approx(31))
    page = make_report("quick", folder=runs)
    assert "not a finite number in 1 of 40 records" in page.text
    assert "best validation loss\n3.25" in page.text
    assert "quick: The training" not in page.text  # the run's name stands in an element of its own


def test_tokenizer_figures_are_exact(runs: Path) -> None:
    """Would catch special tokens or torn characters counted as text, and a histogram that does not add up."""
    (vocabulary,) = read_vocabularies([read_run(runs / "quick", "quick")])
    tokenizer = BPETokenizer.load(runs.parent / "data" / "local" / "tokenizer.json")
    ids = [tokenizer.encode(text) for text in TEXT]
    tokens = sum(map(len, ids))
    torn = sum("\ufffd" in tokenizer.decode([i]) for document in ids for i in document)
    characters = sum(map(len, TEXT))
    assert vocabulary.used.total() == tokens
    assert characters <= vocabulary.characters_per_token * tokens <= characters + 2 * torn
    assert vocabulary.special == 4
    assert sum(share for _, share in report.histogram(vocabulary.lengths)) == pytest.approx(100)
    assert vocabulary.longest[0] == max((tokenizer.decode([i]) for i in range(tokenizer.vocab_size)), key=len)


@pytest.mark.skipif(os.name == "nt", reason="Windows allows none of these characters in a folder's name")
def test_hostile_text_stays_text(runs: Path) -> None:
    """Would catch an unescaped sample, prompt, setting or name: a page that runs a stranger's script, or cannot be written."""
    folder = runs / "_$x$<img src=x>&\u202e"
    settings = json.loads((runs / "quick" / "config.json").read_text(encoding="utf-8"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**settings, "preset": HOSTILE, "x": {HOSTILE: HOSTILE}}), encoding="utf-8")
    sample = {"kind": "sample", "step": 100, "prompt": HOSTILE, "text": HOSTILE + "\u2028" + HOSTILE}
    lines = [json.dumps(record) + "\n" for record in (sample, *records(100, 1.0))]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    assert report.main([folder.name, "quick", "--checkpoint-dir", str(runs)]) == 0
    page = Page(folder / "report.html")
    assert not page.with_tag("script") and not page.with_tag("img")
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in page.text
    assert page.with_tag("meta")[1]["content"].startswith("default-src 'none'")


@pytest.mark.parametrize("content", ["", "{", '{"kind": "eval", "step": 0, "val_loss": 9.7}\n', "[" * 100_000 + "\n"])
def test_run_without_records_yet(tmp_path: Path, content: str) -> None:
    """Would catch a page that needs what a run that has just begun does not have: records, settings, checkpoints."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text(content, encoding="utf-8")
    page = make_report("new", folder=tmp_path)
    assert ("nothing in metrics.jsonl yet" in page.text) != ("9.7000" in page.text)


def test_torn_last_line_is_passed_over_and_damage_is_named(runs: Path) -> None:
    """Would catch a live run's half-written line reported as damage, and damage in the middle passed over in silence."""
    path = runs / "quick" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "step": 41')
    assert "could not be read" not in make_report("quick", folder=runs).text
    path.write_bytes(b"\xff\xfe garbage\n" + path.read_bytes())
    page = make_report("quick", folder=runs)
    assert "1 lines of metrics.jsonl could not be read" in page.text
    assert "step 400 of 400 (complete)" in page.text


def test_damaged_files_never_end_in_a_traceback(runs: Path, capsys: pytest.CaptureFixture) -> None:
    """Would catch a reader that trusts a file's types or values: 90 seeded mutations of everything the report reads."""
    data = runs.parent / "data" / "local"
    names = [runs / "quick" / "metrics.jsonl", runs / "quick" / "config.json", data / "tokenizer.json"]
    names += [data / "tokens" / "meta.json", data / "tokens" / "val.bin", runs / "quick" / "evaluation_val.json"]
    names[-1].write_text('{"loss": 3.2, "perplexity": 24.5, "bits_per_byte": 1.2}', encoding="utf-8")
    whole = {path: path.read_bytes() for path in names}
    for seed in range(90):
        draw = random.Random(seed)
        path = draw.choice(names)
        path.write_bytes(mutated(whole[path], draw))
        try:
            Page(make_and_find(runs))
        except UserError as error:
            assert "\n" not in str(error), seed
        path.write_bytes(whole[path])
    assert "Traceback" not in capsys.readouterr().err


def make_and_find(runs: Path) -> Path:
    report.main(["quick", "wide", "--checkpoint-dir", str(runs), "--no-png"])
    return runs / "quick" / "report.html"


def mutated(content: bytes, draw: random.Random) -> bytes:
    """`content` cut short, with a flipped bit, or with numbers and strings replaced by values of wrong types and sizes."""
    where = draw.randrange(len(content))
    kind = draw.randrange(4)
    if kind == 0:
        return content[:where]
    if kind == 1:
        return content[:where] + bytes([content[where] ^ (1 << draw.randrange(8))]) + content[where + 1 :]
    wrong = draw.choice([b"null", b"[]", b"{}", b'"x"', b"1e999", b"-1", b"NaN", b"9" * 400, b"true", b"1e-310", b"1e99"])
    pattern = rb'(?<=: )(-?[\d.e-]+|"[^"]*"|\{|\[)' if kind == 2 else rb"(?<=: )-?[\d.e-]+"
    return re.sub(pattern, lambda m: wrong if draw.random() < 0.2 else m[0], content)


def test_unknown_run_lists_those_that_exist(stage: Callable, runs: Path) -> None:
    """Would catch a traceback, or an error that leaves the user guessing, for a misspelt, missing or forgotten name."""
    (runs / "notes").mkdir()
    assert_user_error(stage("report.py", "quikc"), "'quikc'", "runs there: quick, wide")
    assert_user_error(stage("report.py"), "name one run or several", "quick, wide")
    assert_user_error(stage("report.py", "notes", "--checkpoint-dir", "elsewhere"), "no runs there yet", "--checkpoint-dir")
    assert_user_error(stage("report.py", "quick", "--watch", "--watch-seconds", 0), "at least 1")


def test_a_run_can_be_a_path_and_is_shown_once(runs: Path) -> None:
    """Would catch two runs of one name told apart by nothing, and one run named twice compared with itself."""
    other = make_run(runs.parent / "other" / "quick", quality=0.9)
    folders = find_run_folders(["quick", str(runs / "quick"), str(other)], runs)
    assert folders == [runs / "quick", other]
    assert labels_of(folders) == [str(runs / "quick"), str(other)]


def test_without_matplotlib_the_page_is_written_and_the_rest_explained(stage: Callable, runs: Path, tmp_path: Path) -> None:
    """Would catch a bare ImportError, or no page at all, on an installation without the development tools."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "matplotlib.py").write_text("raise ImportError('hidden')", encoding="utf-8")
    hidden = {"PYTHONPATH": str(tmp_path / "hidden")}
    assert_user_error(stage("report.py", "quick", env=hidden), "matplotlib is missing", "uv sync --group dev", "--no-png")
    assert Page(runs / "quick" / "report.html").with_tag("figure")
    assert stage("report.py", "quick", "--no-png", env=hidden).returncode == 0
    assert not list(runs.glob("*/*.png"))


def start_watching(runs: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "report.py"), "wide", "--watch", "--watch-seconds", "1", "--no-png"]
    return subprocess.Popen(command, cwd=runs.parent, stdout=subprocess.PIPE, text=True, encoding="utf-8")


def test_watch_follows_a_run_to_its_end(runs: Path) -> None:
    """Would catch a watcher that misses new records, goes on after the end, or leaves a page that reloads for ever."""
    process = start_watching(runs)
    assert "watching" in process.stdout.readline()
    assert "step 260 of 400" in process.stdout.readline()
    assert [m for m in Page(runs / "wide" / "report.html").with_tag("meta") if m.get("http-equiv") == "refresh"]
    later = "".join(json.dumps(record) + "\n" for record in records(STEPS, 1.1) if record["step"] > 260)
    with open(runs / "wide" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(later)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "step 400 of 400 (complete)" in output
    assert not [m for m in Page(runs / "wide" / "report.html").with_tag("meta") if m.get("http-equiv") == "refresh"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to catch")
def test_watch_ends_cleanly_on_a_signal(runs: Path) -> None:
    """Would catch a traceback or a half-written page when the watcher is told to stop."""
    process = start_watching(runs)
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert Page(runs / "wide" / "report.html").with_tag("figure")


def test_a_folder_without_config_takes_the_settings_of_its_checkpoint(runs: Path) -> None:
    """Would catch a report that knows nothing about a run whose small files were not copied along."""
    settings = json.loads((runs / "wide" / "config.json").read_text(encoding="utf-8"))
    (runs / "wide" / "config.json").unlink()
    (runs / "wide" / "metrics.jsonl").unlink()
    stored = {"settings": settings, "tokenizer": "", "data_fingerprint": "", "progress": {}, "environment": {}}
    checkpoint = {"iter": 7, "model": {}, "optimizer": {}, "train_loss": 1.0, "val_loss": 1.0, "config": stored}
    torch.save(checkpoint, runs / "wide" / "checkpoint_latest.pt")
    page = make_report("wide", folder=runs)
    assert f"{Config.from_dict(settings).model.num_params:,}" in page.text
    assert "checkpoint_latest.pt" in [attributes["href"] for attributes in page.with_tag("a")]


def test_epoch_runs_know_their_end(runs: Path) -> None:
    """Would catch a run given in passes over the data never being called complete."""
    make_run(runs / "epoch", max_iters=0, max_epochs=2.0, sampling="epoch")
    meta_path = runs.parent / "data" / "local" / "tokens" / "meta.json"
    meta = {"splits": {"train": {"tokens": 256 * 16 * 200 + 1}}}
    meta_path.write_text(json.dumps(meta), encoding="utf-8")
    assert read_run(runs / "epoch", "epoch").max_iters == STEPS


def test_axes_hold_their_data_and_round_ticks() -> None:
    """Would catch ticks outside the axis, too few or too many of them, or an endless loop on odd ranges."""
    draw = random.Random(7)
    for _ in range(2_000):
        low = draw.choice([0.0, -1.0, 1.0]) * 10 ** draw.uniform(-30, 30)
        values = [low, low + 10 ** draw.uniform(-8, 8) * abs(low or 1.0)]
        axis = make_axis(values, 5, pad=0.05)
        assert all(-1e-9 <= axis.share(v) <= 1 + 1e-9 for v in [*values, *axis.ticks]), values
        assert 2 <= len(axis.ticks) <= 7, (values, axis)
    assert round_ticks(0, 4_000, 5) == [0, 1_000, 2_000, 3_000, 4_000]
    assert log_ticks(0.09, 20) == pytest.approx([0.1, 1, 10])
    assert label_ticks([0.0, 5e-5, 1e-4], "rate") == (["0", "0.5", "1"], "rate (\u00d7 1e-4)")
    assert [short(v) for v in (0, 2_500_000, 14_100, 3_000, 1.5e9)] == ["0", "2.5M", "14.1k", "3000", "1.5B"]


def test_thinning_keeps_every_spike() -> None:
    """Would catch a long run drawn by every n-th record, which hides exactly the spike one looks for."""
    points = [(float(i), 3.0 + (i == 54_321) * 40 - (i == 777) * 2) for i in range(100_000)]
    points[60_000] = (60_000.0, math.nan)
    kept = thin_out(points)
    assert len(kept) < 1_000
    assert {points[54_321], points[777]} <= set(kept)
    assert [x for x, y in kept if math.isnan(y)] == [60_000.0]
