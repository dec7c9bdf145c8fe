"""Peak memory of training: what the formula behind `train.py --estimate` says, and what real runs take, side by side.

    uv run python bench/bench_memory.py                                   all configurations; some minutes on two cores
    uv run python bench/bench_memory.py --only quick small --modes eager  some of them
    uv run python bench/bench_memory.py --device cuda                     on a GPU

Each configuration is a run of train.py of a few updates, in a process of its own, on the corpus of the quick preset with a
vocabulary of the configuration's size. The prediction is the one that the run prints before its first step; measured is, from
the run's metrics, on a CPU the most that the process had resident (Python, torch and the compiler included), on a CUDA device
torch.cuda.max_memory_allocated: tensors alone, as the formula counts there. Ratio is predicted / measured.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SMALL = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256}
WIDE = {"n_layer": 12, "n_head": 8, "n_embd": 512, "block_size": 256}
UPDATES = {"max_iters": 4, "warmup_iters": 1, "eval_interval": 4, "eval_windows": 16, "checkpoint_interval": 4}
BRIEF = {"log_interval": 1, "keep_checkpoints": 0, "max_new_tokens": 4}
MODES = ("eager", "compiled")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Shape:
    """A preset, the size of the vocabulary, and settings that differ from the preset's."""

    preset: str
    vocab_size: int
    settings: dict[str, object]


SHAPES = {
    "quick": Shape("quick", 4_096, {}),
    "small": Shape("wikitext103", 8_192, {**SMALL, "batch_size": 16, "grad_accum_steps": 1}),
    "small, galore": Shape("wikitext103", 8_192, {**SMALL, "batch_size": 16, "grad_accum_steps": 1, "optimizer": "galore"}),
    "12 x 512": Shape("wikitext103", 8_192, {**WIDE, "batch_size": 8, "grad_accum_steps": 1}),
    "126M": Shape("wikitext103", 16_384, {"batch_size": 2, "grad_accum_steps": 1}),
    "126M, 2 micro-batches": Shape("wikitext103", 16_384, {"batch_size": 1, "grad_accum_steps": 2}),
}


def flags(settings: dict[str, object]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run(work: Path, script: str, *arguments: str) -> str:
    """The output of a stage. Raises RuntimeError, with what it said, where it fails."""
    command = [sys.executable, str(ROOT / script), *arguments]
    result = subprocess.run(command, cwd=work, capture_output=True, text=True, encoding="utf-8")
    if result.returncode != 0:
        raise RuntimeError(f"{script} ended with code {result.returncode}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout


def make_corpus(work: Path, vocab_size: int) -> list[str]:
    """Tokens of a vocabulary of that size, as a variant of the local corpus; returns the flags that select it."""
    selected = ["--corpus", "local", "--variant", f"v{vocab_size}"]
    if not (work / "data" / "local" / "raw").exists():
        run(work, "download_data.py", "--preset", "quick")
    if not (work / "data" / "local" / f"v{vocab_size}").exists():
        run(work, "train_tokenizer.py", "--preset", "quick", *selected, "--vocab-size", str(vocab_size))
        run(work, "prepare_data.py", "--preset", "quick", *selected)
    return selected


def measure(work: Path, shape: Shape, mode: str, dtype: str, device: str) -> tuple[float, float, str]:
    """Predicted and measured bytes of a run, and the line that says what it ran on."""
    selected = make_corpus(work, shape.vocab_size)
    name = re.sub(r"\W+", "-", f"{shape.preset} {shape.settings} {mode} {dtype}")[-60:].strip("-")
    compute = {"dtype": dtype, "device": device, "compile": "on" if mode == "compiled" else "off"}
    settings = {**UPDATES, **BRIEF, **shape.settings, **compute, "run": name}
    said = run(work, "train.py", "--preset", shape.preset, "--overwrite", *selected, *flags(settings))
    predicted = float(re.search(r"predicted peak of memory: ([\d.]+) GB", said)[1]) * 1e9
    records = [json.loads(line) for line in (work / "checkpoints" / name / "metrics.jsonl").read_text("utf-8").splitlines()]
    measured = max(record.get("memory_bytes", 0) for record in records)
    return predicted, measured, re.search(r"^device: (.*)", said, re.MULTILINE)[1]


def configurations(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for name in args.only:
        for mode in args.modes:
            for dtype in args.dtypes:
                yield name, mode, dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help="keep corpus and runs in this folder (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.folder or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        print(f"{'configuration':24} {'mode':9} {'precision':9} {'predicted':>9} {'measured':>9}   ratio", flush=True)
        for name, mode, dtype in configurations(args):
            predicted, measured, line = measure(work, SHAPES[name], mode, dtype, args.device)
            sizes = f"{predicted / 1e9:6.2f} GB {measured / 1e9:6.2f} GB"
            print(f"{name:24} {mode:9} {dtype:9} {sizes}   {predicted / measured:5.2f}   {line}", flush=True)


if __name__ == "__main__":
    main()
