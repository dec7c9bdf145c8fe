"""Stage 3 against the encoder alone, and the memory of all its processes together.

    uv run python bench/bench_prepare.py TEXT.raw [--megabytes 1000] [--parquet | --one-line] [--workers 2]

Copies of TEXT.raw (WikiText layout) up to --megabytes are prepared in a temporary folder: as they are, as one parquet file, or
as one document in one line behind a thousand small ones. A first run of the stage, which also compiles the modules, is watched
for peak memory. Without --megabytes a second one is timed, and so is the encoder in one call in this process.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import Config, make_config  # noqa: E402
from corpus import SourceFile, _articles  # noqa: E402
from support.common import write_json  # noqa: E402
from support.manifest import build_manifest, load_corpus  # noqa: E402
from tokenizer import BPETokenizer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=float, default=0.0)
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--parquet", action="store_true")
    layout.add_argument("--one-line", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kind", default="word")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config("wikitext103", {"corpus": "bench", "data_dir": folder})
        source = make_source(args, Path(folder))
        build_manifest(config, {"kind": "bench"}, [SourceFile.of(source)])
        give_tokenizer(config, args)
        peak, peak_private, wall = watch_stage(config, args.workers)
        size = source.stat().st_size / 1e6
        print(f"peak memory of all processes: {peak:,.0f} MB resident ({peak_private:,.0f} MB unshared), in {wall:.0f} s")
        if not args.megabytes:
            shutil.rmtree(config.tokens_dir)
            wall, cpu = time_stage(config, args.workers)
            print(f"stage, {args.workers} workers: {wall:.2f} s, {cpu:.2f} s of CPU for {size:,.1f} MB")
            wall, cpu = encode_alone(config, args)
            print(f"encoder alone, {args.workers} threads: {wall:.2f} s, {cpu:.2f} s of CPU")


def make_source(args: argparse.Namespace, folder: Path) -> Path:
    copies = max(1, round(args.megabytes * 1e6 / args.text.stat().st_size))
    if args.parquet:
        return write_parquet(args.text, folder / "bench.parquet", copies)
    if args.one_line:
        return write_one_line(args.text, folder / "bench.jsonl", round(args.megabytes * 1e6) or args.text.stat().st_size)
    path = folder / "wiki.train.raw"
    with open(path, "wb") as file:
        for _ in range(copies):
            with open(args.text, "rb") as text:
                shutil.copyfileobj(text, file, 1 << 20)
    return path


def write_parquet(text: Path, path: Path, copies: int) -> Path:
    """Uncompressed, in row groups of 64 MB: the hardest case for memory."""
    import pyarrow as pa
    from pyarrow import parquet

    articles = list(_articles(text.read_text(encoding="utf-8")))
    rows = int(64e6 / (text.stat().st_size / len(articles)))
    stream = itertools.chain.from_iterable(itertools.repeat(articles, copies))
    with parquet.ParquetWriter(path, pa.schema([("text", pa.string())]), compression="none", use_dictionary=False) as writer:
        while batch := list(itertools.islice(stream, rows)):
            writer.write_table(pa.table({"text": batch}), row_group_size=rows)
    return path


def write_one_line(text: Path, path: Path, size: int) -> Path:
    """A thousand small documents, and one of `size` bytes without a line end."""
    content = text.read_text(encoding="utf-8")
    huge = " ".join(content.split())
    huge = (huge * (size // len(huge) + 1))[:size]
    with open(path, "w", encoding="utf-8") as file:
        for document in [*_articles(content)[:1000], huge]:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
    return path


def give_tokenizer(config: Config, args: argparse.Namespace) -> None:
    corpus = load_corpus(config)
    sample = itertools.islice(corpus.iter_documents("train"), 240_000)
    tokenizer = BPETokenizer.train(sample, kind=args.kind, vocab_size=16_384)
    tokenizer.save(config.tokenizer_path)
    write_json(config.tokenizer_meta_path, {"raw_fingerprint": corpus.fingerprint, "tokenizer_sha256": tokenizer.sha256})


def encode_alone(config: Config, args: argparse.Namespace) -> tuple[float, float]:
    texts = list(load_corpus(config).iter_documents("train"))
    tokenizer = BPETokenizer.load(config.tokenizer_path)
    t0, cpu0 = time.perf_counter(), time.process_time()
    tokenizer.encode_to_array(texts, threads=args.workers)
    return time.perf_counter() - t0, time.process_time() - cpu0


def start_stage(config: Config, workers: int) -> subprocess.Popen:
    """With modules compiled once, as on any machine where the project has run before."""
    command = [sys.executable, str(ROOT / "prepare_data.py"), "--corpus", "bench", "--data-dir", config.run.data_dir]
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(config.run.data_dir) / "pycache")}
    env = {**os.environ, **compiled}
    return subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.DEVNULL, env=env)


def watch_stage(config: Config, workers: int) -> tuple[float, float, float]:
    """Peak megabytes resident and unshared, summed over the stage and its workers, and the seconds it took."""
    t0, process = time.perf_counter(), start_stage(config, workers)
    peak = peak_private = 0.0
    while process.poll() is None:
        resident, private = memory_of(process.pid)
        peak, peak_private = max(peak, resident), max(peak_private, private)
        time.sleep(0.02)
    assert process.returncode == 0, "the stage failed"
    return peak, peak_private, time.perf_counter() - t0


def time_stage(config: Config, workers: int) -> tuple[float, float]:
    """Wall and CPU seconds of the stage and its workers."""
    before, t0 = os.times(), time.perf_counter()
    assert start_stage(config, workers).wait() == 0, "the stage failed"
    wall, after = time.perf_counter() - t0, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def memory_of(pid: int) -> tuple[float, float]:
    """Megabytes of a process and its children: resident, and proportional (shared pages counted once)."""
    resident = proportional = 0
    for process in [pid, *children_of(pid)]:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        values = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
        resident += values.get("Rss", 0)
        proportional += values.get("Pss", 0)
    return resident / 1024, proportional / 1024


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    main()
