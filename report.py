"""Stage 9 of 9: pictures of one run, or of several side by side.

Reads metrics.jsonl, config.json, evaluations and checkpoints of each run, and its tokenizer; whatever is missing is left out,
and a run that still goes on is shown as far as it is. Writes checkpoints/<first run>/report.html, one file that needs no
network and follows the reader's light or dark mode, and report_*.png beside it. Takes a few seconds.

    uv run python report.py wikitext103                       one run
    uv run python report.py wikitext103 wikitext103-fast      two runs, and the settings in which they differ
    uv run python report.py wikitext103 --watch               rewritten while the run goes on; the open page reloads itself
"""

import argparse
import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from config import make_config, parse_config
from support.charts import STYLE as CHART_STYLE
from support.charts import Chart, Line, Markup, Points, draw_figure, draw_png, tag
from support.common import UserError, atomic_write, format_duration, run_main, write_text
from support.runs import (
    Run,
    Vocabulary,
    checkpoints_of,
    find_run_folders,
    labels_of,
    number,
    read_run,
    read_vocabularies,
    table_in,
)

USES = ("run.checkpoint_dir",)

EVALUATION_KEYS = ("loss", "perplexity", "word_perplexity", "bits_per_byte")
MAX_SAMPLE_STEPS = 60
LONG_TOKEN = 20  # characters; longer tokens are counted with these


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
    charts = [*loss_charts(runs), *progress_charts(runs)]
    return [chart for chart in charts if chart.lines]


def loss_charts(runs: Sequence[Run]) -> list[Chart]:
    unit, seconds = time_unit(runs)
    nats, note = "loss (nats per token)", "thin: training, bold: validation" if len(runs) > 1 else ""
    steps, late = loss_lines(runs, "step"), "step (the first fifth left out)"
    return [
        Chart("loss_step", "Loss against steps", "step", nats, steps, note),
        Chart("loss_close", "Loss, close up, training smoothed", late, nats, close_up(steps), note),
        Chart("loss_tokens", "Loss against tokens", "tokens seen", nats, loss_lines(runs, "tokens"), note),
        Chart("loss_time", "Loss against time", f"time ({unit})", nats, loss_lines(runs, "elapsed_s", seconds), note),
    ]


def progress_charts(runs: Sequence[Run]) -> list[Chart]:
    share = percent(lines_of(runs, "mfu"))
    return [
        Chart("learning_rate", "Learning rate", "step", "learning rate", lines_of(runs, "lr"), from_zero=True),
        Chart("grad_norm", "Gradient norm", "step", "norm before clipping", lines_of(runs, "grad_norm"), log=True),
        Chart("speed", "Speed", "step", "tokens per second", lines_of(runs, "tokens_per_s"), from_zero=True),
        Chart("utilisation", "Utilisation", "step", "% of matrix-product speed", share, from_zero=True),
    ]


def loss_lines(runs: Sequence[Run], x: str, scale: float = 1.0) -> list[Line]:
    """Both losses of each run; of several runs only one line each is named, since a colour stands for a run."""
    lines = []
    for i, run in enumerate(runs):
        labels = ("training", "validation") if len(runs) == 1 else ("" if run.eval else run.label, run.label)
        lines.append(Line(labels[0], i, curve(run.train, x, "loss", scale), "thin"))
        lines.append(Line(labels[1], i, curve(run.eval, x, "val_loss", scale), "bold"))
    return drawable_lines(lines)


def drawable_lines(lines: Iterable[Line]) -> list[Line]:
    """Those with a finite value at all: where the peak of a device is not known, utilisation has none."""
    return [line for line in lines if any(math.isfinite(y) for _, y in line.points)]


def close_up(lines: Sequence[Line]) -> list[Line]:
    """The lines without their first fifth, where the fall from the random start would flatten everything after it."""
    start = 0.2 * max((x for line in lines for x, _ in line.points), default=0.0)
    late = []
    for line in lines:
        points = smooth(line.points) if line.style == "thin" else line.points
        late.append(Line(line.label, line.run, [p for p in points if p[0] >= start], line.style))
    return [line for line in drawable_lines(late) if len(line.points) > 1]


def smooth(points: Points) -> Points:
    """Each value averaged with those before it, a fiftieth of all together; what is not finite is left out and stays."""
    window = max(1, len(points) // 50)
    recent: deque[float] = deque(maxlen=window)
    smoothed = []
    for x, y in points:
        if math.isfinite(y):
            recent.append(y)
        smoothed.append((x, statistics.fmean(recent) if math.isfinite(y) else y))
    return smoothed


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


@dataclass
class Report:
    """All that the page and the PNG files show."""

    runs: list[Run]
    vocabularies: list[Vocabulary]
    charts: list[Chart]  # of the runs

    @property
    def all_charts(self) -> list[Chart]:
        return self.charts + ([token_length_chart(self.vocabularies)] if self.vocabularies else [])


def read_report(folders: Sequence[Path]) -> Report:
    runs = [read_run(folder, label) for folder, label in zip(folders, labels_of(folders), strict=True)]
    return Report(runs, read_vocabularies(runs), make_charts(runs))


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


def make_page(report: Report, page: Path, pictures: bool, refresh: int | None) -> str:
    """The whole report as one HTML document, which links the PNG files if there are `pictures`.

    `refresh` is the number of seconds after which an open page reloads itself.
    """
    runs = report.runs
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
    charts = [draw_figure(chart) for chart in report.charts]
    body = tag(
        "body",
        tag("h1", title),
        tag("p", written + live + ".", class_="muted"),
        notes_section(runs),
        section("In short", table(["", *(run.label for run in runs)], summary_rows(runs))),
        section("Curves", tag("div", *charts, class_="charts")) if charts else Markup(),
        section("Samples", *sample_cards(runs)),
        section("Settings", *settings_parts(runs)),
        section("Tokenizer", *tokenizer_parts(report.vocabularies)),
        section("Files", *file_lists(runs, page), *(picture_links(report) if pictures else [])),
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
    last = max([{"step": -1}, *run.train[-1:], *run.eval[-1:]], key=lambda record: record["step"])
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
    state = "complete" if run.complete else f"{100 * run.last_step // run.max_iters} %"
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
    value = math.exp(min(loss, 700.0))
    return f"{value:,.2f}" if value < 1e6 else f"{value:.1e}"


def speed_figures(run: Run) -> dict[str, str]:
    figures = {}
    speeds = [y for _, y in curve(run.train, "step", "tokens_per_s") if math.isfinite(y)]
    shares = [y for _, y in curve(run.train, "step", "mfu") if math.isfinite(y)]
    if speeds:
        figures["tokens per second, median"] = f"{statistics.median(speeds):,.0f}"
    if shares:
        figures["utilisation, median"] = f"{100 * statistics.median(shares):.1f} % of the device's speed in matrix products"
    memory = max((y for _, y in curve(run.train, "step", "memory_bytes") if math.isfinite(y)), default=0.0)
    if memory > 0:
        figures["peak memory"] = f"{memory / 1e9:.2f} GB"
    return figures


def evaluation_figures(run: Run) -> dict[str, str]:
    """What evaluate.py found on whole splits."""
    figures = {}
    for split, found in run.evaluations.items():
        values = [(key.replace("_", " "), number(found.get(key))) for key in EVALUATION_KEYS]
        shown = ", ".join(f"{words} {value:,.4g}" for words, value in values if math.isfinite(value))
        if shown:
            figures[f"whole {split} split"] = shown
    return figures


# Samples


def sample_cards(runs: Sequence[Run]) -> list[Markup]:
    """One row a step with the runs side by side; a single run's steps stand side by side instead."""
    several, runs = len(runs) > 1, [run for run in runs if run.sample]
    steps = sorted({record["step"] for run in runs for record in run.sample})
    if not steps:
        return []
    shown = evenly(steps, MAX_SAMPLE_STEPS)
    cards = [sample_card(run, step, several) for step in shown for run in runs]
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


def sample_card(run: Run, step: int, name_run: bool) -> Markup:
    """All samples of a run at a step, the prompt in bold."""
    title = f"step {step:,}" + (f", {run.label}" if name_run else "")
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
        own = {name: value for name, value in columns[0].items() if not name.startswith("environment.")}
        heads, compared = [f"preset {runs[0].settings.get('preset')}", *heads], [preset, own]
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
    paths += [*sorted(run.folder.glob("evaluation_*.json")), *checkpoints_of(run)]
    if run.config:
        paths += [run.config.tokenizer_path, run.config.tokenizer_meta_path]
        paths += [run.config.tokens_dir / "meta.json", run.config.raw_dir / "manifest.json"]
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


def picture_name(chart: Chart) -> str:
    return f"report_{chart.name}.png"


def picture_links(report: Report) -> list[Markup]:
    items = [tag("li", tag("a", picture_name(chart), href=picture_name(chart))) for chart in report.all_charts]
    return [tag("div", tag("h3", "Pictures"), tag("ul", *items))]


# ----------------------------------------------------------------------------------------------------------------------
# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="name of a run under the checkpoint folder, or path of its folder"
    )
    parser.add_argument("--watch", action="store_true", help="write the page again and again until the runs are complete")
    parser.add_argument("--watch-seconds", type=int, default=20, metavar="N", help="seconds between two writes [20]")
    parser.add_argument("--no-png", action="store_true", help="write the page only, which needs no matplotlib")


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def write_pngs(charts: Sequence[Chart], folder: Path) -> None:
    """Draws each chart into a PNG file; those of an earlier call, which showed something else, are removed."""
    for old in set(folder.glob("report_*.png")) - {folder / picture_name(chart) for chart in charts}:
        old.unlink()
    for chart in charts:
        with atomic_write(folder / picture_name(chart)) as file:
            draw_png(chart, file)


def watch(folders: Sequence[Path], page: Path, seconds: int) -> None:
    """Writes the page again every `seconds` until every run has done its last step; Ctrl-C ends it sooner."""
    print(f"watching; open {page}, which reloads itself (Ctrl-C ends this)", flush=True)
    while True:
        report = read_report(folders)
        write_text(page, make_page(report, page, pictures=False, refresh=seconds))
        print(time.strftime("%H:%M:%S  ") + "; ".join(f"{run.label}: {progress_of(run)}" for run in report.runs), flush=True)
        if all(run.complete for run in report.runs):
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
    report, pictures = read_report(folders), not args.no_png and has_matplotlib()
    write_text(page, make_page(report, page, pictures, refresh=None))
    if pictures:
        write_pngs(report.all_charts, page.parent)
    elif not args.no_png:
        advice = "run: uv sync --group dev, or leave them out with --no-png"
        raise UserError(f"matplotlib is missing, so {page} is written but no PNG file is; {advice}")
    for run in report.runs:
        print(f"{run.label}: {progress_of(run)}")
    beside = f", and {len(report.all_charts)} PNG files beside it" if pictures else ""
    print(f"wrote {page} ({page.stat().st_size / 1e3:,.0f} kB){beside}; open it in a browser")
    return 0


if __name__ == "__main__":
    run_main(main)
