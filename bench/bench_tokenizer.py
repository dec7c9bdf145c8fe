"""Our tokenizer beside every tokenizer library installed here, on the same file, in one run.

    uv run --group bench python bench/bench_tokenizer.py [FILE] [--repeats N] [--jobs train-word,encode-byte] [--gpt2 FOLDER]

Each measurement is a fresh process that reads the file and does the whole job (starting the interpreter and importing is not
counted), tools take turns, and the best of the repeats counts. Ratios are what carries over to other machines. Where
tools are given the same vocabulary their ids are compared as well. FILE defaults to the development corpus; FOLDER holds
GPT-2's vocab.bpe and encoder.json.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

VOCAB_SIZE = 16_384
SPECIAL = ["<PAD>", "<UNK>", "<BOS>", "<EOS>"]
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SMALL_BATCH = 10_000  # documents at once, for tools whose results take a multiple of the text

JOBS = {
    "train-word": ["ours", "gigatoken", "rustbpe", "tokenizers", "bpeasy"],
    "train-byte": ["ours", "gigatoken", "rustbpe", "tokenizers", "bpeasy"],
    "encode-word": ["ours", "gigatoken", "tiktoken", "tokenizers"],
    "encode-byte": ["ours", "gigatoken", "tiktoken", "tokenizers"],
    "encode-gpt2": ["ours", "tiktoken"],
}


def documents(path: Path) -> list[str]:
    """Where a job encodes, this is done before the clock starts: cutting a file into documents is no tokenizer's work."""
    return re.split(r"(?m)(?=^ = [^=])", path.read_bytes().decode("utf-8"))


# ----------------------------------------------------------------------------------------------------------------------
# One measurement, in a process of its own


def measure(job: str, tool: str, path: Path, work: Path, gpt2: Path | None) -> dict[str, Any]:
    import resource

    task, kind = job.split("-")
    run = PREPARE[task, tool](kind, path, work, gpt2)
    t0, cpu0 = time.perf_counter(), time.process_time()
    result = run()
    seconds, cpu = time.perf_counter() - t0, time.process_time() - cpu0
    scale = 1e6 if sys.platform == "darwin" else 1e3
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
    return {"seconds": seconds, "cpu": cpu, "peak_mb": peak_mb, **finish(result, task, work, kind, tool)}


def finish(result: Any, task: str, work: Path, kind: str, tool: str) -> dict[str, Any]:
    """What the result was, worked out after the clock stopped."""
    if task == "train" or result is None:
        return {}
    import numpy as np

    ids = np.concatenate([np.asarray(part, np.uint32) for part in result]) if isinstance(result, list) else result
    return {"tokens": len(ids), "ids": hashlib.sha256(np.ascontiguousarray(ids, np.uint32).tobytes()).hexdigest()[:12]}


def train_ours(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    from tokenizer import BPETokenizer

    def run() -> None:
        tokenizer = BPETokenizer.train([path.read_bytes().decode("utf-8")], kind=kind, vocab_size=VOCAB_SIZE)
        tokenizer.save(work / f"{kind}.json")

    return run


def train_gigatoken(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    import gigatoken

    return lambda: gigatoken.train_bpe(gigatoken.TextFileSource([path]), VOCAB_SIZE, SPECIAL)


def train_rustbpe(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    import rustbpe

    pattern = GPT2_PATTERN if kind == "byte" else r"\S+\s?"
    return lambda: rustbpe.Tokenizer().train_from_iterator(documents(path), VOCAB_SIZE - len(SPECIAL), pattern=pattern)


def train_bpeasy(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    import bpeasy

    pattern = GPT2_PATTERN if kind == "byte" else r"\S+\s?"
    return lambda: bpeasy.train_bpe(iter(documents(path)), pattern, 128, VOCAB_SIZE - len(SPECIAL))


def train_tokenizers(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    from tokenizers import Tokenizer, trainers

    tokenizer = Tokenizer.from_file(str(work / f"{kind}.json"))  # our normaliser and splitter; its vocabulary is replaced
    alphabet = list(tokenizer.pre_tokenizer.alphabet()) if kind == "byte" else []
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )

    def run() -> None:
        tokenizer.train_from_iterator(documents(path), trainer)
        tokenizer.save(str(work / f"hf-{kind}.json"))

    return run


def load_ours(kind: str, work: Path, gpt2: Path | None) -> Any:
    from tokenizer import BPETokenizer

    if kind != "gpt2":
        return BPETokenizer.load(work / f"{kind}.json")
    return BPETokenizer.from_gpt2(*((gpt2 / name).read_text(encoding="utf-8") for name in ("vocab.bpe", "encoder.json")))


def encode_ours(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    import bpe

    tokenizer = load_ours(kind, work, gpt2)
    texts = documents(path)
    return lambda: tokenizer.encode_to_array(texts, threads=bpe.cpu_count())[0]


def encode_gigatoken(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    import gigatoken

    tokenizer = gigatoken.Tokenizer(str(work / "byte.json"))  # it knows no `word` splitter: its byte-level job stands in

    def run() -> None:
        tokenizer.encode_files(gigatoken.TextFileSource([path]))

    return run


def encode_tiktoken(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    import tiktoken

    import bpe

    tokenizer = load_ours("byte" if kind == "word" else kind, work, gpt2)
    ranks = {token: i for i, token in enumerate(tokenizer.tokens) if i not in tokenizer.special_ids}
    special = {tokenizer.tokens[i].decode(): i for i in tokenizer.special_ids}
    encoding = tiktoken.Encoding("bench", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    texts = documents(path)
    return lambda: encoding.encode_ordinary_batch(texts, num_threads=bpe.cpu_count())


def encode_tokenizers(kind: str, path: Path, work: Path, gpt2: Path | None) -> Callable[[], Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / f"{kind}.json"))
    tokenizer.encode_special_tokens = True
    texts = documents(path)

    def run() -> list[list[int]]:
        batches = (texts[i : i + SMALL_BATCH] for i in range(0, len(texts), SMALL_BATCH))
        return [encoding.ids for batch in batches for encoding in tokenizer.encode_batch_fast(batch)]

    return run


PREPARE: dict[tuple[str, str], Callable[..., Callable[[], Any]]] = {
    ("train", "ours"): train_ours,
    ("train", "gigatoken"): train_gigatoken,
    ("train", "rustbpe"): train_rustbpe,
    ("train", "tokenizers"): train_tokenizers,
    ("train", "bpeasy"): train_bpeasy,
    ("encode", "ours"): encode_ours,
    ("encode", "gigatoken"): encode_gigatoken,
    ("encode", "tiktoken"): encode_tiktoken,
    ("encode", "tokenizers"): encode_tokenizers,
}


# ----------------------------------------------------------------------------------------------------------------------
# All of them


def run_child(job: str, tool: str, path: Path, work: Path, gpt2: Path | None) -> dict[str, Any]:
    command = [sys.executable, __file__, str(path), "--child", job, tool, "--work", str(work)]
    command += ["--gpt2", str(gpt2)] if gpt2 else []
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if result.returncode != 0:
        return {"failed": result.stderr.strip().splitlines()[-1:]}
    return json.loads(result.stdout.splitlines()[-1])


def run_job(job: str, tools: list[str], repeats: int, path: Path, work: Path, gpt2: Path | None) -> None:
    best: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for tool in tools:
            found = run_child(job, tool, path, work, gpt2)
            if tool not in best or found.get("seconds", 1e9) < best[tool].get("seconds", 1e9):
                best[tool] = found
    print(f"\n{job}, {path.stat().st_size / 1e6:.1f} MB: best of {repeats}")
    ours = best["ours"]
    for tool, found in best.items():
        if "failed" in found:
            print(f"  {tool:<11} failed: {found['failed']}")
            continue
        ratio = f"ours / {tool} = {ours['seconds'] / found['seconds']:.2f}" if tool != "ours" and "seconds" in ours else ""
        same = "" if "ids" not in found or tool == "ours" else "same ids" if found["ids"] == ours.get("ids") else "other ids"
        times = f"{found['seconds']:6.2f} s  {found['cpu']:6.2f} s CPU  {found['peak_mb']:6.0f} MB peak"
        print(f"  {tool:<11} {times}  {ratio}  {same}")


def prompt_time(work: Path) -> None:
    from tokenizer import BPETokenizer

    text = " ".join(["The quick brown fox, unimpressed by 1,024 lazy dogs, jumps over them again and again."] * 4)[:300]
    for kind in ("word", "byte"):
        tokenizer = BPETokenizer.load(work / f"{kind}.json")
        tokenizer.encode(text)
        t0 = time.perf_counter()
        for _ in range(100):
            tokenizer.encode(text)
        print(f"prompt of {len(text.split())} words, {kind}, warm: {10 * (time.perf_counter() - t0):.3f} ms")


def default_file(work: Path) -> Path:
    archive = ROOT.parent / "shared" / "corpus" / "dictwiki-raw-v1.zip"
    if not archive.exists():
        sys.exit(f"name a text file: the development corpus {archive.name} is not on this machine")
    with zipfile.ZipFile(archive) as opened:
        return Path(opened.extract("dictwiki-raw/wiki.train.raw", work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--tools", default="ours,gigatoken,rustbpe,tokenizers,bpeasy,tiktoken")
    parser.add_argument("--gpt2", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(*args.child, args.file, args.work, args.gpt2)))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = args.file or default_file(work)
        for kind in ("word", "byte"):
            run_child(f"train-{kind}", "ours", path, work, None)  # the vocabularies that the encoding jobs share
        for job in args.jobs.split(","):
            if job == "encode-gpt2" and args.gpt2 is None:
                continue
            tools = [t for t in JOBS[job] if t in args.tools and (t == "ours" or importlib.util.find_spec(t) is not None)]
            run_job(job, tools, args.repeats, path, work, args.gpt2)
        prompt_time(work)


if __name__ == "__main__":
    main()
