"""Stage 9 of 9: pictures of one run, or of several side by side.

Reads metrics.jsonl, config.json, evaluations and checkpoints of each run, and its tokenizer; whatever is missing is left out,
and a run that still goes on is shown as far as it is. Writes checkpoints/<first run>/report.html, one file that needs no
network and follows the reader's light or dark mode, and report_*.png beside it. Takes a few seconds.

    uv run python report.py wikitext103                       one run
    uv run python report.py wikitext103 wikitext103-fast      two runs, and the settings in which they differ
    uv run python report.py wikitext103 --watch               rewritten while the run goes on; the open page reloads itself
"""

import argparse
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from charts import STYLE as CHART_STYLE
from charts import Chart, Line, Markup, Points, draw_figure, draw_png, tag
from common import UserError, atomic_write, format_duration, run_main, write_text
from config import Config, make_config, parse_config
from metrics import read_metrics

USES = ("run.checkpoint_dir",)

MAX_STEP = 10**15  # a greater one is no step
MAX_SAMPLE_STEPS = 60
LONG_TOKEN = 20  # characters; longer tokens are counted with these
TOKENS_LOOKED_AT = 50_000  # of the validation split, to see how the vocabulary is used


# ----------------------------------------------------------------------------------------------------------------------
# Reading runs


@dataclass
class Run:
    """What was found in a run's folder. `notes` says what a reader should know about what was not."""

    label: str
    folder: Path
    train: list[dict[str, Any]] = field(default_factory=list)
    eval: list[dict[str, Any]] = field(default_factory=list)
    sample: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    config: Config | None = None
    max_iters: int = 0  # steps of the whole schedule; 0: not known
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((int(records[-1]["step"]) for records in (self.train, self.eval) if records), default=0)

    @property
    def complete(self) -> bool:
        return 0 < self.max_iters <= self.last_step


def is_run_folder(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "metrics.jsonl").exists() or any(folder.glob("checkpoint_*.pt")))


def find_run_folders(names: Sequence[str], checkpoint_dir: Path) -> list[Path]:
    """The folders of the named runs, each once. Raises UserError listing the runs that exist for a name that is none."""
    folders: list[Path] = []
    for name in names:
        candidates = [folder for folder in (checkpoint_dir / name, Path(name)) if is_run_folder(folder)]
        if not candidates:
            raise UserError(f"there is no run {name!r} in {checkpoint_dir}; {existing_runs(checkpoint_dir)}")
        if not any(candidates[0].samefile(known) for known in folders):
            folders.append(candidates[0])
    if not folders:
        raise UserError(f"name one run or several; {existing_runs(checkpoint_dir)}")
    return folders


def existing_runs(checkpoint_dir: Path) -> str:
    folders = sorted(checkpoint_dir.iterdir()) if checkpoint_dir.is_dir() else []
    names = [folder.name for folder in folders if is_run_folder(folder)]
    if names:
        return "runs there: " + ", ".join(names)
    return "there are no runs there yet; train.py makes one, --checkpoint-dir names another folder"


def read_run(folder: Path, label: str) -> Run:
    run = Run(label, folder)
    sort_metrics(run)
    run.settings = read_optional_json(run, folder / "config.json") or settings_of_checkpoint(run)
    try:
        run.config = Config.from_dict(run.settings) if run.settings else None
    except ValueError as error:
        run.notes.append(f"The settings are of another version, so some figures are left out: {error}.")
    run.max_iters = planned_steps(run)
    if not run.train and not run.eval:
        run.notes.append("There is nothing in metrics.jsonl yet.")
    bad = sum(not math.isfinite(number(record.get("loss"))) for record in run.train)
    if bad:
        run.notes.append(f"The training loss was not a finite number in {bad} of {len(run.train):,} records (marked \u00d7).")
    return run


def planned_steps(run: Run) -> int:
    """Steps of the whole schedule; where it is given in passes, the prepared tokens decide. 0 where it is not known."""
    if run.config is None or run.config.train.max_iters:
        return run.config.train.max_iters if run.config else 0
    split = table_in(table_in(read_optional_json(run, run.config.tokens_dir / "meta.json"), "splits"), "train")
    if not number(split.get("tokens")) > run.config.model.block_size:
        return 0
    from dataset import count_steps

    return count_steps(int(split["tokens"]), run.config.train, run.config.model.block_size)


def sort_metrics(run: Run) -> None:
    """Sorts the records of metrics.jsonl into the run by kind and step.

    A torn last line is what a killed or a writing process leaves, so it is passed over; other bad lines are counted.
    """
    path = run.folder / "metrics.jsonl"
    if not path.exists():
        return
    records = [record for record in read_metrics(path) if 0 <= record["step"] < MAX_STEP]
    unreadable = path.read_bytes().count(b"\n") - len(records)
    if unreadable > 0:
        run.notes.append(f"{unreadable:,} lines of metrics.jsonl could not be read.")
    for kind, found in (("train", run.train), ("eval", run.eval), ("sample", run.sample)):
        found.extend(sorted((r for r in records if r["kind"] == kind), key=lambda r: r["step"]))


def number(value: Any) -> float:
    """`value` as a float; NaN for whatever is not a number, or one beyond all that a run can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < 1e100 else math.nan


def table_in(values: dict[str, Any], key: str) -> dict[str, Any]:
    return values[key] if isinstance(values.get(key), dict) else {}


def read_optional_json(run: Run, path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one, with a note where the file is damaged, when there is none."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        run.notes.append(f"{path.name} is damaged and was left out.")
        return {}
    return value


def settings_of_checkpoint(run: Run) -> dict[str, Any]:
    """The settings inside a checkpoint, for a run folder that lost its config.json."""
    paths = [path for path in checkpoints_of(run) if path.is_file()]
    if not paths:
        return {}
    from checkpoint import load_checkpoint

    try:
        return load_checkpoint(paths[0])["config"]["settings"]
    except UserError as error:
        run.notes.append(f"{error}.")
        return {}


def checkpoints_of(run: Run) -> list[Path]:
    return sorted(run.folder.glob("checkpoint_*.pt"))


def labels_of(folders: Sequence[Path]) -> list[str]:
    """A short, distinct name for each run: the folder's name, or the whole path where two share a name."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers


@dataclass
class Vocabulary:
    """What a tokenizer's vocabulary looks like, and how the validation text uses it."""

    label: str
    kind: str
    size: int
    lengths: Counter
    used: Counter
    longest: list[str]
    special: int
    sample: dict[str, Any]
    splits: dict[str, Any]

    @property
    def characters_per_token(self) -> float:
        total = sum(self.used.values())
        return sum(length * n for length, n in self.used.items()) / total if total else math.nan


def read_vocabularies(runs: Sequence[Run]) -> list[Vocabulary]:
    """The tokenizers of the runs, each once, labelled by the runs that use it."""
    users: dict[Path, list[Run]] = {}
    for run in runs:
        if run.config and run.config.tokenizer_path.exists():
            users.setdefault(run.config.tokenizer_path.resolve(), []).append(run)
    vocabularies = [read_vocabulary(sharing) for sharing in users.values()]
    return [vocabulary for vocabulary in vocabularies if vocabulary is not None]


def read_vocabulary(sharing: Sequence[Run]) -> Vocabulary | None:
    from tokenizer import BPETokenizer

    run = sharing[0]
    try:
        tokenizer = BPETokenizer.load(run.config.tokenizer_path)
    except UserError as error:
        run.notes.append(f"{error}.")
        return None
    texts = [tokenizer.decode_bytes([i]).decode("utf-8", "replace") for i in range(tokenizer.vocab_size)]
    meta = read_optional_json(run, run.config.tokens_dir / "meta.json")
    used = Counter(len(texts[i]) for i in validation_ids(run, meta) if i < len(texts) and texts[i])
    return Vocabulary(
        label=", ".join(other.label for other in sharing),
        kind=tokenizer.kind,
        size=tokenizer.vocab_size,
        lengths=Counter(len(text) for text in texts if text),
        used=used,
        longest=sorted(texts, key=len, reverse=True)[:40],
        special=texts.count(""),
        sample=table_in(read_optional_json(run, run.config.tokenizer_meta_path), "sample"),
        splits=table_in(meta, "splits"),
    )


def validation_ids(run: Run, meta: dict[str, Any]) -> list[int]:
    """The first ids of the validation split, or none where it was not prepared."""
    import numpy as np

    path, dtype = run.config.tokens_dir / "val.bin", meta.get("dtype")
    if dtype not in ("uint16", "uint32") or not path.exists():
        return []
    return np.fromfile(path, dtype=np.dtype(dtype).newbyteorder("<"), count=TOKENS_LOOKED_AT).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Charts of runs


def curve(records: Iterable[dict[str, Any]], x: str, y: str, scale: float = 1.0) -> Points:
    """(x, y) of the records that have both, x divided by `scale`. A y of null was not finite, and is NaN here."""
    pairs = [(number(r.get(x)) / scale, number(r[y])) for r in records if y in r]
    return [(a, b) for a, b in pairs if math.isfinite(a)]


def time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    """The unit that suits the longest run, and its seconds."""
    times = [number(r.get("elapsed_s")) for run in runs for r in (*run.train, *run.eval)]
    longest = max((t for t in times if math.isfinite(t)), default=0.0)
    for unit, seconds in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if longest >= 2 * seconds:
            return unit, seconds
    return "seconds", 1.0


def make_charts(runs: Sequence[Run]) -> list[Chart]:
    unit, seconds = time_unit(runs)
    nats = "loss (nats per token)"
    steps = loss_lines(runs, "step")
    charts = [
        Chart("loss_step", "Loss against steps", "step", nats, steps),
        Chart("loss_close", "Loss, close up", "step (the first fifth left out)", nats, close_up(steps)),
        Chart("loss_tokens", "Loss against tokens", "tokens seen", nats, loss_lines(runs, "tokens")),
        Chart("loss_time", "Loss against time", f"time ({unit})", nats, loss_lines(runs, "elapsed_s", seconds)),
        Chart("learning_rate", "Learning rate", "step", "learning rate", lines_of(runs, "lr"), from_zero=True),
        Chart("grad_norm", "Gradient norm", "step", "norm before clipping", lines_of(runs, "grad_norm"), log=True),
        Chart("speed", "Speed", "step", "tokens per second", lines_of(runs, "tokens_per_s"), from_zero=True),
        Chart("utilisation", "Utilisation", "step", "% of the peak FLOP/s", percent(lines_of(runs, "mfu")), from_zero=True),
    ]
    return [chart for chart in charts if chart.lines]


def loss_lines(runs: Sequence[Run], x: str, scale: float = 1.0) -> list[Line]:
    lines = []
    for i, run in enumerate(runs):
        name = f"{run.label}, " if len(runs) > 1 else ""
        lines.append(Line(name + "training", i, curve(run.train, x, "loss", scale), "thin"))
        lines.append(Line(name + "validation", i, curve(run.eval, x, "val_loss", scale), "bold"))
    return drawable_lines(lines)


def drawable_lines(lines: Iterable[Line]) -> list[Line]:
    """Those with a finite value at all: where the peak of a device is not known, utilisation has none."""
    return [line for line in lines if any(math.isfinite(y) for _, y in line.points)]


def close_up(lines: Sequence[Line]) -> list[Line]:
    """The lines without their first fifth, where the fall from the random start would flatten everything after it."""
    start = 0.2 * max((x for line in lines for x, _ in line.points), default=0.0)
    late = [Line(line.label, line.run, [p for p in line.points if p[0] >= start], line.style) for line in lines]
    return [line for line in drawable_lines(late) if len(line.points) > 1]


def lines_of(runs: Sequence[Run], y: str) -> list[Line]:
    return drawable_lines(Line(run.label, i, curve(run.train, "step", y)) for i, run in enumerate(runs))


def percent(lines: Sequence[Line]) -> list[Line]:
    return [Line(line.label, line.run, [(x, 100 * y) for x, y in line.points]) for line in lines]


def token_length_chart(vocabularies: Sequence[Vocabulary]) -> Chart:
    """How long tokens are, as entries of the vocabulary and as they occur in text."""
    lines = []
    for i, vocabulary in enumerate(vocabularies):
        name = f"{vocabulary.label}, " if len(vocabularies) > 1 else ""
        lines.append(Line(name + "vocabulary", i, histogram(vocabulary.lengths), "bars"))
        lines.append(Line(name + "in text", i, histogram(vocabulary.used), "bold"))
    clipped = any(max(v.lengths, default=0) > LONG_TOKEN for v in vocabularies)
    x_label = f"characters ({LONG_TOKEN}: and more)" if clipped else "characters"
    return Chart("token_length", "Token length", x_label, "% of the tokens", drawable_lines(lines), from_zero=True)


def histogram(lengths: Counter) -> Points:
    """(length, share in %) for every length up to the longest, or to LONG_TOKEN, which stands for all above it."""
    grouped: Counter = Counter()
    for length, n in lengths.items():
        grouped[min(length, LONG_TOKEN)] += n
    return [(float(k), 100 * grouped[k] / grouped.total()) for k in range(1, max(grouped, default=0) + 1)]


# ----------------------------------------------------------------------------------------------------------------------
# The page

STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --muted: #5a6370; --grid: #e3e6ea;
  --link: #0b57d0; --warn: #c8440a; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #101418; --card: #191e24; --ink: #e8ebee; --muted: #a0a9b4; --grid: #2d343c;
    --link: #8ab8ff; --warn: #ff8f5a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 16px; background: var(--bg); color: var(--ink);
  font: 16px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .2em 0; }
h2 { font-size: 1.2rem; margin: 1.6em 0 .5em; }
h3 { font-size: 1rem; margin: 0 0 .3em; }
p { margin: .4em 0; }
a { color: var(--link); }
ul { margin: .2em 0 1em; padding-left: 1.2em; }
.muted { color: var(--muted); }
.notes { border-left: 4px solid var(--warn); padding: .4em .8em; background: var(--card); }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
.scroll { overflow-x: auto; background: var(--card); border-radius: 8px; padding: 4px 12px; }
table { border-collapse: collapse; font-size: .9rem; }
td { min-width: 7.5em; }
th, td { text-align: left; vertical-align: top; padding: .3em 1.4em .3em 0; overflow-wrap: normal; }
th { font-weight: 600; }
td { font-variant-numeric: tabular-nums; }
tr + tr { border-top: 1px solid var(--grid); }
.samples { display: grid; gap: 10px; overflow-x: auto; }
.sample { background: var(--card); border-radius: 8px; padding: 10px 12px; min-width: 0; }
.sample h3 { font-size: .85rem; color: var(--muted); font-weight: 500; }
pre, code { font: .86rem/1.45 ui-monospace, Menlo, Consolas, monospace; }
pre { margin: 0 0 .6em; white-space: pre-wrap; unicode-bidi: isolate; }
code { background: var(--grid); border-radius: 3px; padding: 0 .25em; unicode-bidi: isolate; }
section > * + * { margin-top: 12px; }
.tokens { display: flex; flex-wrap: wrap; gap: .35em; margin-bottom: 1em; }
summary { cursor: pointer; margin: .8em 0; }
"""

# Nothing is fetched and nothing runs, whatever a sample's text holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def make_page(runs: Sequence[Run], vocabularies: Sequence[Vocabulary], page: Path, refresh: int | None) -> str:
    """The whole report as one HTML document. `refresh` is the number of seconds after which an open page reloads."""
    title = "Report: " + ", ".join(run.label for run in runs)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="refresh", content=refresh) if refresh else Markup(),
        tag("title", title),
        tag("style", Markup(STYLE + CHART_STYLE)),
    )
    written = "Written " + time.strftime("%Y-%m-%d %H:%M:%S")
    live = f"; reloads every {refresh} s while report.py --watch runs" if refresh else ""
    charts = [draw_figure(chart) for chart in make_charts(runs)]
    body = tag(
        "body",
        tag("h1", title),
        tag("p", written + live + ".", class_="muted"),
        notes_section(runs),
        section("In short", table(["", *(run.label for run in runs)], summary_rows(runs))),
        section("Curves", tag("div", *charts, class_="charts")) if charts else Markup(),
        section("Samples", *sample_cards(runs)),
        section("Settings", *settings_parts(runs)),
        section("Tokenizer", *tokenizer_parts(vocabularies)),
        section("Files", *file_lists(runs, page)),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def section(title: str, *parts: Markup) -> Markup:
    return tag("section", tag("h2", title), *parts) if parts else Markup()


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """A table whose first column heads the rows; it scrolls sideways where the screen is narrow."""
    lines = [tag("tr", *(tag("th", tag("bdi", head)) for head in heads))] if any(heads) else []
    for first, *rest in rows:
        lines.append(tag("tr", tag("th", first), *(tag("td", tag("bdi", cell)) for cell in rest)))
    return tag("div", tag("table", *lines), class_="scroll")


def notes_section(runs: Sequence[Run]) -> Markup:
    notes = [tag("p", tag("b", run.label), ": ", note) for run in runs for note in run.notes]
    return tag("div", *notes, class_="notes") if notes else Markup()


def summary_rows(runs: Sequence[Run]) -> list[list[str]]:
    """The figures that matter, a column per run; rows that are empty for every run are left out."""
    columns = [summary_of(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [[name, *(column.get(name, "\u2013") for column in columns)] for name in names]


def summary_of(run: Run) -> dict[str, str]:
    """Row title -> figure. Medians for speed, since single records catch pauses."""
    figures = {"progress": progress_of(run)}
    if run.config:
        model = run.config.model
        shape = f"{model.n_layer} layers \u00d7 {model.n_embd} wide \u00d7 {model.n_head} heads, block {model.block_size:,}"
        figures["parameters"] = f"{model.num_params:,}"
        figures["shape"] = f"{shape}, vocabulary {model.vocab_size:,}"
        figures["tokens per step"] = f"{run.config.tokens_per_step:,}"
    last = (run.train or run.eval or [{}])[-1]
    tokens, seconds = number(last.get("tokens")), number(last.get("elapsed_s"))
    if math.isfinite(tokens):
        figures["tokens seen"] = f"{tokens:,.0f}"
    if math.isfinite(seconds):
        figures["training time"] = format_duration(seconds)
    figures |= loss_figures(run) | speed_figures(run) | evaluation_figures(run)
    return figures


def progress_of(run: Run) -> str:
    if not run.max_iters:
        return f"step {run.last_step:,}"
    state = "complete" if run.complete else f"{100 * run.last_step / run.max_iters:.0f} %"
    return f"step {run.last_step:,} of {run.max_iters:,} ({state})"


def loss_figures(run: Run) -> dict[str, str]:
    figures = {}
    trained = [loss for _, loss in curve(run.train[-10:], "step", "loss") if math.isfinite(loss)]
    if trained:
        figures["training loss, last ten records"] = f"{statistics.fmean(trained):.4f}"
    validated = [(loss, step) for step, loss in curve(run.eval, "step", "val_loss") if math.isfinite(loss)]
    if validated:
        for name, (loss, step) in (("best validation loss", min(validated)), ("last validation loss", validated[-1])):
            figures[name] = f"{loss:.4f} (perplexity {perplexity(loss)}) at step {step:,.0f}"
    return figures


def perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 100 else "astronomical"


def speed_figures(run: Run) -> dict[str, str]:
    figures = {}
    speeds = [y for _, y in curve(run.train, "step", "tokens_per_s") if math.isfinite(y)]
    shares = [y for _, y in curve(run.train, "step", "mfu") if math.isfinite(y)]
    if speeds:
        figures["tokens per second, median"] = f"{statistics.median(speeds):,.0f}"
    if shares:
        figures["utilisation, median"] = f"{100 * statistics.median(shares):.1f} % of the peak FLOP/s"
    return figures


def evaluation_figures(run: Run) -> dict[str, str]:
    """What evaluate.py found on whole splits."""
    figures = {}
    for path in sorted(run.folder.glob("evaluation_*.json")):
        found = read_optional_json(run, path)
        split = path.stem.removeprefix("evaluation_")
        names = {
            "loss": "loss",
            "perplexity": "perplexity",
            "word_perplexity": "word perplexity",
            "bits_per_byte": "bits per byte",
        }
        values = [(words, number(found.get(key))) for key, words in names.items()]
        shown = ", ".join(f"{words} {value:,.4g}" for words, value in values if math.isfinite(value))
        if shown:
            figures[f"whole {split} split"] = shown
    return figures


# Samples


def sample_cards(runs: Sequence[Run]) -> list[Markup]:
    """One row a step with the runs side by side; a single run's steps stand side by side instead."""
    steps = sorted({record["step"] for run in runs for record in run.sample})
    if not steps:
        return []
    shown = evenly(steps, MAX_SAMPLE_STEPS)
    cards = [sample_card(run, i, step, len(runs) > 1) for step in shown for i, run in enumerate(runs)]
    columns = f"repeat({len(runs)}, minmax(min(80vw, 300px), 1fr))" if len(runs) > 1 else ""
    style = f"grid-template-columns: {columns or 'repeat(auto-fill, minmax(min(100%, 400px), 1fr))'}"
    left_out = len(steps) - len(shown)
    parts = [tag("p", f"{left_out} of {len(steps)} steps are left out here.", class_="muted")] if left_out else []
    return [*parts, tag("div", *cards, class_="samples", style=style)]


def evenly(values: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the values, evenly spread, the first and the last among them."""
    if len(values) <= limit:
        return list(values)
    return [values[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)]


def sample_card(run: Run, index: int, step: float, name_run: bool) -> Markup:
    """All samples of a run at a step, the prompt in bold."""
    title = f"step {step:,.0f}" + (f", {run.label}" if name_run else "")
    texts = []
    for record in run.sample:
        if record["step"] == step:
            prompt, text = str(record.get("prompt", "")), str(record.get("text", ""))
            texts.append(tag("pre", tag("b", prompt), text.removeprefix(prompt), dir="auto"))
    return tag("div", tag("h3", title), *(texts or [tag("p", "none", class_="muted")]), class_="sample")


# Settings


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """{"train": {"seed": 1}} as {"train.seed": 1}."""
    flat = {}
    for section_name, values in settings.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            flat[f"{section_name}.{name}"] = value
    return flat


def settings_parts(runs: Sequence[Run]) -> list[Markup]:
    """Several runs: what differs between them. One run: what differs from its preset. Then all settings, folded away."""
    heads, columns = [run.label for run in runs], [flat_settings(run.settings) for run in runs]
    if not any(columns):
        return []
    if len(runs) == 1:
        text, preset = "In these the run differs from its preset", preset_settings(runs[0])
        heads, compared = [f"preset {runs[0].settings.get('preset')}", *heads], [preset, *columns]
    else:
        text, compared = "In these the runs differ", columns
    differing = setting_rows(compared, only_different=True)
    first = [tag("p", text + ":"), table(["", *heads], differing)] if differing else [tag("p", text + ": none.")]
    everything = table(["", *(run.label for run in runs)], setting_rows(columns, only_different=False))
    return [*first, tag("details", tag("summary", "All settings"), everything)]


def preset_settings(run: Run) -> dict[str, Any]:
    try:
        return flat_settings(make_config(str(run.settings.get("preset"))).to_dict())
    except KeyError:
        return {}


def setting_rows(columns: Sequence[dict[str, Any]], only_different: bool) -> list[list[str]]:
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [show_setting(column.get(name)) for column in columns]
        if not only_different or len(set(cells)) > 1:
            rows.append([name, *cells])
    return rows


def show_setting(value: Any) -> str:
    if value is None or value == "":
        return "\u2013"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# Tokenizer


def tokenizer_parts(vocabularies: Sequence[Vocabulary]) -> list[Markup]:
    if not vocabularies:
        return []
    columns = [vocabulary_column(vocabulary) for vocabulary in vocabularies]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    rows = [[name, *(column[name] or "\u2013" for column in columns)] for name in names]
    parts = [table(["", *(v.label for v in vocabularies)], rows)]
    parts.append(tag("div", draw_figure(token_length_chart(vocabularies)), class_="charts"))
    return parts + [longest_tokens(v, len(vocabularies) > 1) for v in vocabularies]


def vocabulary_column(vocabulary: Vocabulary) -> dict[str, str]:
    """Row title -> figure, empty where it is not known."""
    mean = sum(n * length for length, n in vocabulary.lengths.items()) / max(1, vocabulary.lengths.total())
    in_text = vocabulary.characters_per_token
    documents, size = (number(vocabulary.sample.get(key)) for key in ("documents", "bytes"))
    return {
        "kind": vocabulary.kind,
        "tokens in the vocabulary": f"{vocabulary.size:,} ({vocabulary.special} special)",
        "learned from": f"{documents:,.0f} documents, {size / 1e6:,.1f} MB" if documents > 0 else "",
        "characters per token, vocabulary": f"{mean:.2f}",
        "characters per token, validation text": f"{in_text:.3f}" if math.isfinite(in_text) else "",
        **{f"{name} split": split_figures(table_in(vocabulary.splits, name)) for name in ("train", "val", "test")},
    }


def split_figures(split: dict[str, Any]) -> str:
    tokens, size, words = (number(split.get(key)) for key in ("tokens", "scored_bytes", "words"))
    if not (tokens > 0 and size > 0 and words > 0):
        return ""
    return f"{tokens:,.0f} tokens, {size / tokens:.3f} bytes per token, {tokens / words:.3f} tokens per word"


def longest_tokens(vocabulary: Vocabulary, name_run: bool) -> Markup:
    title = "Longest tokens" + (f", {vocabulary.label}" if name_run else "")
    words = [tag("code", visible(token)) for token in vocabulary.longest]
    return tag("div", tag("h3", title + " (\u2423 is a space)"), tag("div", *words, class_="tokens"))


def visible(token: str) -> str:
    """A token with its spaces and control characters made visible."""
    return "".join("\u2423" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in token)


# Files


def file_lists(runs: Sequence[Run], page: Path) -> list[Markup]:
    parts = []
    for run in runs:
        items = [tag("li", file_link(run, path, page), file_size(path)) for path in files_of(run)]
        parts.append(tag("div", tag("h3", run.label), tag("ul", *items)))
    return parts


def files_of(run: Run) -> list[Path]:
    paths = [run.folder / "metrics.jsonl", run.folder / "config.json"]
    paths += [*sorted(run.folder.glob("evaluation_*.json")), *checkpoints_of(run), *sorted(run.folder.glob("report_*.png"))]
    if run.config:
        config = run.config
        paths += [
            config.tokenizer_path,
            config.tokenizer_meta_path,
            config.tokens_dir / "meta.json",
            config.raw_dir / "manifest.json",
        ]
    return [path for path in paths if path.is_file()]


def file_link(run: Run, path: Path, page: Path) -> Markup:
    """A link relative to the page where there is such a path, so that the folder can be moved."""
    try:
        target = quote(Path(os.path.relpath(path.resolve(), page.parent.resolve())).as_posix())
    except ValueError:  # on Windows, another drive
        target = path.resolve().as_uri()
    return tag("a", path.name if path.parent == run.folder else path.as_posix(), href=target)


def file_size(path: Path) -> str:
    size = path.stat().st_size
    return f" {size / 1e6:,.1f} MB" if size >= 1e5 else f" {size / 1e3:,.1f} kB"


# ----------------------------------------------------------------------------------------------------------------------
# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="name of a run under the checkpoint folder, or path of its folder"
    )
    parser.add_argument("--watch", action="store_true", help="write the page again and again until the runs are complete")
    parser.add_argument("--watch-seconds", type=int, default=20, metavar="N", help="seconds between two writes [20]")
    parser.add_argument("--no-png", action="store_true", help="write the page only, which needs no matplotlib")


def write_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Draws each chart into report_<name>.png. Raises UserError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            f"matplotlib is missing, so {folder / 'report.html'} is written but no PNG file is; "
            "run: uv sync --group dev, or leave them out with --no-png"
        ) from None
    paths = [folder / f"report_{chart.name}.png" for chart in charts]
    for chart, path in zip(charts, paths, strict=True):
        with atomic_write(path) as file:
            draw_png(chart, file)
    return paths


def write_report(folders: Sequence[Path], page: Path, refresh: int | None = None) -> tuple[list[Run], list[Chart]]:
    """Reads the runs and writes the page; returns what it shows."""
    runs = [read_run(folder, label) for folder, label in zip(folders, labels_of(folders), strict=True)]
    vocabularies = read_vocabularies(runs)
    write_text(page, make_page(runs, vocabularies, page, refresh))
    charts = make_charts(runs) + ([token_length_chart(vocabularies)] if vocabularies else [])
    return runs, charts


def watch(folders: Sequence[Path], page: Path, seconds: int) -> None:
    """Writes the page again every `seconds` until every run has done its last step; Ctrl-C ends it sooner."""
    print(f"watching; open {page}, which reloads itself (Ctrl-C ends this)", flush=True)
    while True:
        runs, _ = write_report(folders, page, refresh=seconds)
        print(f"{time.strftime('%H:%M:%S')}  " + "; ".join(f"{run.label}: {progress_of(run)}" for run in runs), flush=True)
        if all(run.complete for run in runs):
            return
        time.sleep(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=USES, add_arguments=add_arguments)
    if args.watch_seconds < 1:
        raise UserError(f"--watch-seconds is {args.watch_seconds}, but it must be at least 1")
    folders = find_run_folders(args.runs, Path(config.run.checkpoint_dir))
    page = folders[0] / "report.html"
    if args.watch:
        watch(folders, page, args.watch_seconds)
    runs, charts = write_report(folders, page)
    pngs = [] if args.no_png else write_pngs(charts, page.parent)
    if pngs:
        write_report(folders, page)  # once more: it links to the pictures
    for run in runs:
        print(f"{run.label}: {progress_of(run)}")
    print(f"wrote {page} ({page.stat().st_size / 1e3:,.0f} kB) and {len(pngs)} PNG files beside it; open it in a browser")
    return 0


if __name__ == "__main__":
    run_main(main)
