"""Training recipes side by side at a small size: tokens needed to reach the baseline's loss, final loss, time of a step.

    uv run python bench/bench_recipes.py --input wiki.train.raw             every row of TABLE below, then the table of results
    uv run python bench/bench_recipes.py --only recipe-2M-1e-2               the rows so named and those they are compared with
    uv run python bench/bench_recipes.py --table mine.json --jobs 2          rows from a file: a list with Row's fields
    uv run python bench/bench_recipes.py --show                              only print what is there

Each run is a `train.py` process on the same token files (made here by stages 1 to 3, vocabulary 4,096) and the same model size:
4 layers x 256 wide x 4 heads, block 256, 32 windows = 8,192 tokens a step, bf16. A finished run leaves FOLDER/results/RUN.json
(flags, seed, curve of validation losses, seconds a step, commit) and is not run again; an interrupted one is resumed.
"Tokens to reach" is where the run's curve first falls to the mean final loss of the baseline's seeds, interpolated.
Steps are timed by the wall clock: on a machine with other work, bench_train_step.py compares them better.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

CORPUS = "text"
VOCAB_SIZE = 4_096
TOKENS_PER_STEP = 8_192  # 32 windows of 256 tokens
EVALUATIONS = 20  # of a run, where it is long enough for them to be LEAST_INTERVAL steps apart
LEAST_INTERVAL = 5

# What every run shares, its size and its book-keeping. Checkpoints cost time and serve only an interrupted run.
COMMON = (
    "--n-layer 4 --n-head 4 --n-embd 256 --block-size 256 --batch-size 32 --grad-accum-steps 1 --eval-windows 60 "
    "--dtype bfloat16 --log-interval 1 --checkpoint-interval 1000000 --checkpoint-minutes 5 --keep-checkpoints 0 "
    "--max-new-tokens 1"
)
RECIPE = (
    "--optimizer muon --position rotary --norm rmsnorm_plain --embedding-norm --qk-norm --activation relu2 --zero-init "
    "--sampling epoch --lr-schedule wsd --decay-ratio 0.4 --min-lr-ratio 0.05 --warmup-ratio 0.025"
)


@dataclass(frozen=True)
class Row:
    """A recipe. `flags` are train.py's, behind COMMON's; `against` names the row whose final loss is to be reached."""

    name: str
    flags: str
    tokens: float
    seeds: Sequence[int] = (1,)
    against: str = ""

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / TOKENS_PER_STEP))


# The best of the sweep below: with a twentieth of so few steps as warm-up the plain model learns worse.
BASELINE, BEST = "--warmup-ratio 0.2 --learning-rate 3e-3", "adamw-2M-3e-3-w20"
OURS = f"{RECIPE} --learning-rate 1e-2"

# One change of our recipe each.
CHANGES = {
    "recipe": "",
    "adamw": "--optimizer adamw --learning-rate 4e-3",
    "no-qk-norm": "--no-qk-norm",
    "no-zero-init": "--no-zero-init",
    "gelu": "--activation gelu",
    "learned-positions": "--position learned",
    "untied": "--no-tied-head",
    "random-windows": "--sampling random",
    "cosine": "--lr-schedule cosine",
    "rmsnorm-gain": "--norm rmsnorm",
    "layernorm": "--norm layernorm",
    "no-embedding-norm": "--no-embedding-norm",
    "qwen3": "--norm rmsnorm --no-embedding-norm --activation swiglu",
    "softcap-15": "--logit-softcap 15",
    "softcap-30": "--logit-softcap 30",
    "document-mask": "--document-mask",
}

TABLE = (
    *(Row(f"adamw-2M-{lr}", f"--warmup-ratio 0.05 --learning-rate {lr}", 2e6) for lr in ("1e-3", "2e-3", "3e-3")),
    Row("adamw-2M-2e-3-w20", "--warmup-ratio 0.2 --learning-rate 2e-3", 2e6),
    Row("adamw-2M-3e-3-w20", BASELINE, 2e6, (1, 2, 3)),
    Row("adamw-2M-5e-3-w20", "--warmup-ratio 0.2 --learning-rate 5e-3", 2e6),
    *(Row(f"recipe-2M-{lr}", f"{RECIPE} --learning-rate {lr}", 0.6e6, (1,), BEST) for lr in ("4e-3", "6e-3", "1.5e-2")),
    Row("recipe-2M-1e-2", OURS, 0.6e6, (1, 2, 3), BEST),
    *(Row(f"recipe-2M-{name}", f"{OURS} {CHANGES[name]}", 0.6e6, (1,), BEST) for name in ("untied", "document-mask")),
    Row("adamw-8M-2e-3", "--warmup-ratio 0.05 --learning-rate 2e-3", 8e6),
    Row("adamw-8M-3e-3-w10", "--warmup-ratio 0.1 --learning-rate 3e-3", 8e6, (1, 2, 3)),
    Row("recipe-8M-1e-2", OURS, 3.2e6, (1, 2, 3), "adamw-8M-3e-3-w10"),
    *(Row(f"abl-{name}", f"{OURS} {change}", 0.33e6, (1,), "abl-recipe") for name, change in CHANGES.items()),
)


# ----------------------------------------------------------------------------------------------------------------------
# Running


def python(script: str, *arguments: object, log: Path) -> None:
    """Runs one stage, its output in `log`. Raises RuntimeError with the last lines where it fails."""
    with open(log, "w", encoding="utf-8") as out:
        command = [sys.executable, str(ROOT / script), *map(str, arguments)]
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise RuntimeError(
            f"{script} ended with code {code}, see {log}: " + " / ".join(" ".join(line.split()) for line in lines[-3:])
        )


def prepare(folder: Path, inputs: Sequence[Path]) -> None:
    """Token files of the text, unless they are there."""
    data = folder / "data"
    if (data / CORPUS / "tokens" / "meta.json").exists():
        return
    if not inputs:
        raise RuntimeError(f"{data / CORPUS} holds no tokens yet: name the text with --input")
    where = ("--corpus", CORPUS, "--data-dir", data)
    log = folder / "prepare.log"
    python("download_data.py", *where, "--input", *(path.resolve() for path in inputs), log=log)
    python("train_tokenizer.py", *where, "--vocab-size", VOCAB_SIZE, log=log)
    python("prepare_data.py", *where, log=log)


def run_name(row: Row, seed: int) -> str:
    return f"{row.name}-seed{seed}"


def train_arguments(row: Row, seed: int, folder: Path, threads: int) -> list[str]:
    interval = max(LEAST_INTERVAL, row.steps // EVALUATIONS)
    return [
        *("--corpus", CORPUS, "--data-dir", str(folder / "data"), "--checkpoint-dir", str(folder / "runs")),
        *("--run", run_name(row, seed), "--seed", str(seed), "--threads", str(threads)),
        *COMMON.split(),
        *("--max-iters", str(row.steps), "--eval-interval", str(interval)),
        *row.flags.split(),
    ]


def measure(row: Row, seed: int, folder: Path, threads: int) -> None:
    """Trains one run to its end and writes its result; does nothing where there is one."""
    name = run_name(row, seed)
    result_path, run_dir = folder / "results" / f"{name}.json", folder / "runs" / name
    if result_path.exists():
        return
    arguments = train_arguments(row, seed, folder, threads)
    begun = any(run_dir.glob("checkpoint_*.pt"))
    python("train.py", *arguments, *(["--resume"] if begun else []), log=folder / "runs" / f"{name}.log")
    result = summarise(read_records(run_dir / "metrics.jsonl"))
    result = {"name": row.name, "seed": seed, "tokens": row.tokens, "flags": arguments, "commit": commit(), **result}
    result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: final loss {result['final_loss']:.4f}, {result['step_ms']:,.0f} ms a step", flush=True)


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Curve of [step, tokens, loss], final loss and median milliseconds of a step of a run's metrics."""
    curve = [[r["step"], r["tokens"], r["val_loss"]] for r in records if r["kind"] == "eval"]
    seconds = [TOKENS_PER_STEP / r["tokens_per_s"] for r in records if r["kind"] == "train"]
    return {"curve": curve, "final_loss": curve[-1][2], "step_ms": 1e3 * statistics.median(seconds)}


def commit() -> str:
    """The checkout's commit, with a plus where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return head + ("+" if changed else "")


# ----------------------------------------------------------------------------------------------------------------------
# Results


def tokens_to_reach(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Tokens at which a curve of (step, tokens, loss) first falls to `loss`, on the line between its points; None: never."""
    for (_, t0, l0), (_, t1, l1) in itertools.pairwise(curve):
        if l1 <= loss < l0:
            return t0 + (t1 - t0) * (l0 - loss) / (l0 - l1)
    return None


def load_results(folder: Path, row: Row) -> list[dict[str, Any]]:
    paths = [folder / "results" / f"{run_name(row, seed)}.json" for seed in row.seeds]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def show_row(row: Row, results: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> str:
    losses = [r["final_loss"] for r in results]
    step_ms = statistics.mean(r["step_ms"] for r in results)
    spread = f"{min(losses):.3f} to {max(losses):.3f}"
    cells = [row.name, str(len(losses)), f"{row.tokens / 1e6:g} M", f"{statistics.mean(losses):.3f}", spread]
    if not baseline:
        return " | ".join([*cells, "", "", f"{step_ms:,.0f} ms"])
    goal = statistics.mean(r["final_loss"] for r in baseline)
    reached = [tokens_to_reach(r["curve"], goal) for r in results]
    ratio = f"{step_ms:,.0f} ms, x {step_ms / statistics.mean(r['step_ms'] for r in baseline):.2f}"
    if None in reached:
        return " | ".join([*cells, "not reached", "", ratio])
    needed, given = statistics.mean(reached), baseline[0]["curve"][-1][1]
    worst = max(reached) / given
    return " | ".join([*cells, f"{needed / 1e6:.2f} M", f"{needed / given:.0%} (worst {worst:.0%})", ratio])


def show(folder: Path, rows: Sequence[Row]) -> str:
    """The table of all rows that have a result."""
    by_name = {row.name: row for row in rows}
    lines = ["recipe | seeds | tokens | final loss | spread | reaches the baseline at | share of its tokens | step"]
    lines.append(" | ".join(["---"] * 8))
    for row in rows:
        if results := load_results(folder, row):
            baseline = load_results(folder, by_name[row.against]) if row.against in by_name else []
            lines.append(show_row(row, results, baseline))
    return "\n".join(f"| {line} |" for line in lines)


# ----------------------------------------------------------------------------------------------------------------------


def read_table(path: Path | None) -> list[Row]:
    """Rows of a JSON file; TABLE without one."""
    if path is None:
        return list(TABLE)
    return [Row(**values) for values in json.loads(path.read_text(encoding="utf-8"))]


def choose(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """The rows named in `only` with their baselines; all without names. Raises ValueError on an unknown name."""
    names = {row.name for row in rows}
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"no row is named {unknown[0]}; there are: {', '.join(sorted(names))}")
    wanted = {*only, *(row.against for row in rows if row.name in only)}
    return [row for row in rows if not only or row.name in wanted]


def run_all(rows: Sequence[Row], folder: Path, jobs: int, threads: int) -> int:
    """Runs what is missing, `jobs` at a time, in the order of the rows. Returns how many failed."""
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(measure, row, seed, folder, threads) for row in rows for seed in row.seeds]
        for future in futures:
            try:
                future.result()
            except RuntimeError as error:
                failed += 1
                print(f"failed: {error}", file=sys.stderr, flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs="+", default=[], metavar="PATH", help="text to train on, the first time")
    parser.add_argument("--folder", type=Path, default=ROOT / "checkpoints" / "recipes", help="data, runs and results")
    parser.add_argument("--table", type=Path, metavar="FILE", help="rows as JSON instead of this file's TABLE")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these rows")
    parser.add_argument("--tokens", type=float, metavar="N", help="train every row for so many tokens, as rows of their own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each")
    parser.add_argument("--show", action="store_true", help="run nothing")
    args = parser.parse_args()
    rows = choose(read_table(args.table), args.only)
    if args.tokens:
        rows = [scaled(row, args.tokens) for row in rows]
    failed = 0
    if not args.show:
        for name in ("results", "runs"):
            (args.folder / name).mkdir(parents=True, exist_ok=True)
        prepare(args.folder, args.input)
        failed = run_all(rows, args.folder, args.jobs, args.threads)
    print(show(args.folder, rows))
    return 1 if failed else 0


def scaled(row: Row, tokens: float) -> Row:
    """The row at another length, under a name that says so."""
    suffix = f"-at-{tokens:g}"
    return Row(row.name + suffix, row.flags, tokens, row.seeds, row.against and row.against + suffix)


if __name__ == "__main__":
    sys.exit(main())
