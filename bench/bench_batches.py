"""Batch assembly from a large token file: what a batch costs beside a training step, and whether memory stays flat.

    uv run python bench/bench_batches.py                      2 GB of tokens, 20,000 batches of 16 x 256, both kinds of sampling
    uv run python bench/bench_batches.py --gigabytes 8 --batch-size 8 --block-size 512

A batch is what train.py makes of it: the windows' offsets drawn, the tokens read, inputs and targets as int64. It is compared
with the fastest step that this machine could make of the model of bench_train_step.py: the step's FLOPs at the rate of a large
matrix product. The file is written to --folder and removed. Memory is read from /proc, so Linux only.
"""

import argparse
import dataclasses
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_train_step import SHAPES

from config import ModelConfig, TrainConfig, make_config
from dataset import TokenData, WindowReader, train_windows
from model import GPT
from support.device import matmul_rate, resolve_device

CHUNK = 1 << 25  # tokens written at a time


def write_tokens(path: Path, count: int, vocab_size: int) -> None:
    """A file of `count` random uint16 ids."""
    draw = np.random.default_rng(0)
    with open(path, "wb") as file:
        for first in range(0, count, CHUNK):
            file.write(draw.integers(vocab_size, size=min(CHUNK, count - first), dtype=np.uint16).tobytes())


def resident_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"^VmRSS:\s*(\d+) kB", text, re.MULTILINE)[1]) * 1024


def fastest_step_seconds(model: ModelConfig, batch_size: int) -> float:
    """The FLOPs of a training step at the rate of a large matrix product on all cores."""
    flops = batch_size * model.block_size * GPT(model).flops_per_token()
    return flops / matmul_rate(resolve_device(make_config("wikitext103", {"device": "cpu"}).compute))


def bench(reader: WindowReader, train: TrainConfig, batches: int) -> tuple[float, list[int]]:
    """Seconds a batch, and resident bytes after a tenth of the batches, two tenths ... all of them."""
    resident, seconds = [], 0.0
    for step in range(batches):
        t0 = time.perf_counter()
        reader.read(train_windows(1337, step, reader.num_tokens, train, reader.block_size))
        seconds += time.perf_counter() - t0
        if (step + 1) % (batches // 10) == 0:
            resident.append(resident_bytes())
    return seconds / batches, resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the token file is written (default: the temporary folder)"
    )
    args = parser.parse_args()
    model = dataclasses.replace(SHAPES["small"][0], block_size=args.block_size)
    step = fastest_step_seconds(model, args.batch_size)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        tokens = int(args.gigabytes * 1e9) // 2
        write_tokens(Path(folder) / "train.bin", tokens, model.vocab_size)
        meta = {"splits": {"train": {"file": "train.bin", "tokens": tokens}}, "dtype": "uint16", "fingerprint": ""}
        data = TokenData(Path(folder), {**meta, "vocab_size": model.vocab_size}, "")
        reader = WindowReader(data, "train", args.block_size)
        print(f"{tokens:,} tokens; a step of {args.batch_size} x {args.block_size} takes {step * 1e3:,.0f} ms at best")
        for sampling in ("random", "epoch"):
            settings = {"sampling": sampling, "batch_size": args.batch_size, "grad_accum_steps": 1}
            seconds, resident = bench(reader, make_config("wikitext103", settings).train, args.batches)
            growth = (resident[-1] - resident[0]) / 1e6
            print(
                f"{sampling:6} {seconds * 1e6:6,.0f} microseconds a batch, {seconds / step:.3%} of the step; resident "
                f"{resident[0] / 1e6:,.0f} MB after a tenth of {args.batches:,} batches, {growth:+,.1f} MB at the end"
            )


if __name__ == "__main__":
    main()
