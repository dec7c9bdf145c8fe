"""Seconds until something happens: --help of every script, and the first update of the quick preset.

    uv run python bench/bench_startup.py [--rounds 3] [--no-compiled]

The stages before training run first, on the corpus of the quick preset. "First update" is from starting the process to the
first training record in metrics.jsonl, the first evaluation included: without compilation, compiled with an empty cache, and
compiled again with the cache that the run before filled.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("download_data.py", "train_tokenizer.py", "prepare_data.py")
SCRIPTS = (*STAGES, "pipeline.py", "test_model.py", "train.py", "generate.py", "evaluate.py", "export.py", "report.py")
MODULES = ("config.py", "tokenizer.py")  # modules that are commands as well


def run(work: Path, script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(ROOT / script), *arguments], cwd=work, check=True, stdout=subprocess.DEVNULL)


def seconds_of_help(work: Path, script: str, rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        t0 = time.perf_counter()
        run(work, script, "--help")
        seconds.append(time.perf_counter() - t0)
    return statistics.median(seconds)


def seconds_to_first_update(work: Path, name: str, cache: Path, compiled: bool) -> float:
    """Starts a run, waits for its first training record, and ends it. Raises RuntimeError where it ends before."""
    flags = ["--preset", "quick", "--run", name, "--log-interval", "1", "--compile", "on" if compiled else "off"]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    metrics = work / "checkpoints" / name / "metrics.jsonl"
    t0 = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *flags], cwd=work, env=environment, stdout=subprocess.DEVNULL
    ) as process:
        try:
            while not (metrics.exists() and b'"kind": "train"' in metrics.read_bytes()):
                if process.poll() is not None:
                    raise RuntimeError(f"train.py ended with code {process.returncode} before its first update")
                time.sleep(0.01)
            return time.perf_counter() - t0
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind; the median is shown")
    parser.add_argument("--no-compiled", action="store_true", help="leave out the compiled runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for script in (*SCRIPTS, *MODULES):
            print(f"{script + ' --help':28} {seconds_of_help(work, script, args.rounds):.2f} s", flush=True)
        for script in STAGES:
            run(work, script, "--preset", "quick")
        eager = [seconds_to_first_update(work, f"eager{i}", work / "cache", False) for i in range(args.rounds)]
        print(f"first update, not compiled   {statistics.median(eager):.1f} s", flush=True)
        if not args.no_compiled:
            for state in ("cold", "warm"):
                seconds = seconds_to_first_update(work, state, work / "cache", True)
                print(f"first update, compiled, {state} {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
