"""Damages every artifact in every way and mistypes every command, and looks at how the stages end.

    uv run python bench/bench_hostile.py --mutations 1000 --commands 200

Small real artifacts are made once. Each case copies them, damages one file (or writes a wrong command line), and runs a stage
in a process of its own, forked from one that has everything loaded. A stage must end with exit code 0, or with 2 and exactly
one line `error: ...`; it must not hang, print a traceback, take gigabytes, or run code that a file brings (a canary file shows
that). The cases are numbered and seeded: --only N runs one again and shows what it printed.
"""

import argparse
import contextlib
import gzip
import importlib
import io
import json
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny_corpus import TINY_RUN, WORDS  # noqa: E402

STAGES = (
    *("download_data", "train_tokenizer", "prepare_data", "train", "generate", "evaluate", "export", "report"),
    *("pipeline", "config", "tokenizer", "test_model"),
)
PRELOADED = [
    *("torch", "torch._dynamo", "support.start", "support.updater", "support.sampling", "support.inference"),
    *("support.scoring", "support.estimate", "support.encoding", "support.inspection", "support.hf_modern", *STAGES),
]
TIMEOUT_S, BUSY_S = 60, 10
MEMORY_BYTES = 4 << 30  # what a stage may map beyond what is loaded
CANARY = "canary"

CORPUS = ("--corpus", "tiny")
CPU = ("--device", "cpu", "--threads", "1", "--dtype", "float32")
RUN = (*CORPUS, "--run", "base")
TRAIN = (*TINY_RUN[2:], *CORPUS, "--max-iters", "12", "--eval-interval", "4", "--checkpoint-interval", "4")
SHORT = ("--max-new-tokens", "4")


# ----------------------------------------------------------------------------------------------------------------------
# Running a stage


@dataclass(frozen=True)
class Ending:
    """How a stage ended; `code` is None where it had to be killed, `busy` whether it was still saying new things then."""

    code: int | None
    output: str
    busy: bool = False

    def fault(self, folder: Path, may_fail: bool) -> str | None:
        """What it did that no stage may do, None where it is fine. `may_fail`: finding something wrong is its business."""
        if (folder / CANARY).exists():
            return "executed what a file brought"
        if "Traceback" in self.output:
            return "traceback"
        if self.code is None:  # a schedule may be damaged to a long one
            return None if self.busy else "hangs"
        errors = sum(line.startswith("error: ") for line in self.output.splitlines())
        if self.code == 2:
            return None if errors == 1 else f"{errors} error lines"
        return None if self.code in (0, 1 if may_fail else 0) and errors == 0 else f"exit code {self.code}"


def run_stage(folder: Path, script: str, arguments: Sequence[str], before: str = "") -> Ending:
    """What `cd folder; python script arguments` does. `before` is code that is run first."""
    log = folder / "output.txt"
    os.environ["PYTHONPATH"] = str(ROOT)  # the server looks for the modules it loads there
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_child, args=(str(folder), script, list(arguments), str(log), before))
    process.start()
    process.join(TIMEOUT_S)
    killed, said = process.exitcode is None, log.stat().st_size
    if killed:
        process.join(BUSY_S)
        process.kill()
        process.join()
    output = log.read_text(encoding="utf-8", errors="replace")
    return Ending(None if killed else process.exitcode, output, busy=log.stat().st_size > said)


def _child(folder: str, script: str, arguments: list[str], log: str, before: str) -> None:
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8")
    _limit_memory()
    sys.path.insert(0, str(ROOT))
    sys.argv = [script, *arguments]
    from support import device
    from support.common import run_main

    device.matmul_rate = lambda _: 1e12  # takes longer than a tiny run
    exec(before, {})
    run_main(importlib.import_module(script.removesuffix(".py")).main)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))


# ----------------------------------------------------------------------------------------------------------------------
# Good artifacts

INTERRUPTED = "import support.encoding as e, support.common as c\ndef finish(*_): raise c.UserError('stopped')\n"


def make_artifacts(folder: Path) -> None:
    """Everything the stages write, small, by the stages themselves; also an interrupted preparation and a folder of another
    program's weights."""
    make_texts(folder / "notes")
    for script, *arguments in (
        ("download_data.py", "--input", "notes", *CORPUS),
        ("train_tokenizer.py", *CORPUS, "--tokenizer-kind", "byte", "--vocab-size", "300"),
        ("prepare_data.py", *CORPUS, "--workers", "1"),
        ("train.py", *TRAIN, "--run", "base", "--bias", "--sample-tokens", "4"),
        ("evaluate.py", *RUN, *CPU),
        ("export.py", *RUN, "--out", "hf"),
        ("train_tokenizer.py", *CORPUS, "--variant", "cut", "--tokenizer-kind", "word", "--vocab-size", "200"),
    ):
        ending = run_stage(folder, script, arguments)
        assert ending.code == 0, (script, ending)
    interrupted = (*CORPUS, "--variant", "cut", "--workers", "1")
    run_stage(folder, "prepare_data.py", interrupted, INTERRUPTED + "e.TokenWriter.finish = finish")
    assert (folder / "data/tiny/cut/tokens/journal.jsonl").exists()
    _make_pickled_weights(folder)


def make_texts(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True)
    draw = random.Random(5)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 60))) for _ in range(90)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[:30])
    (folder / "a.jsonl").write_text(lines, encoding="utf-8")
    with gzip.GzipFile(folder / "b.jsonl.gz", "wb", mtime=0) as file:
        file.write(lines.replace("the", "a").encode("utf-8"))
    (folder / "c.txt").write_text("\n\n".join(texts[30:60]), encoding="utf-8")
    articles = "".join(f" \n = Title {i} = \n \n {text} \n" for i, text in enumerate(texts[60:]))
    (folder / "d.raw").write_text(articles, encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[20:70]}), folder / "e.parquet")


def _make_pickled_weights(folder: Path) -> None:
    import torch

    from support.hf_gpt2 import read_safetensors

    shutil.copytree(folder / "hf", folder / "hf_bin")
    weights = read_safetensors(folder / "hf_bin" / "model.safetensors")
    (folder / "hf_bin" / "model.safetensors").unlink()
    torch.save(weights, folder / "hf_bin" / "pytorch_model.bin")


# ----------------------------------------------------------------------------------------------------------------------
# Damage to any file


class Bomb:
    """Unpickled by a careless reader, it leaves the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


def truncated(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    return data[: draw.randrange(len(data))]


def flipped(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 8, 100))):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def emptied(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    return b""


def swapped(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    return draw.choice(others).read_bytes()


def garbage(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    return draw.choice((draw.randbytes(len(data)), b"\0" * len(data), data + draw.randbytes(33), b"\xff\xfe" + data))


def nested(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    deep = draw.choice((b"[", b'{"a":')) * 200_000
    return draw.choice((deep, b'{"format": 1, "files": ' + deep, data.rstrip(b"}\n") + b', "more": ' + deep))


def pickled(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    """Code in a bare pickle, or in a zip as torch writes it."""
    bomb = pickle.dumps({"iter": 1, "model": Bomb()}, protocol=draw.choice((0, 2, 4)))
    if draw.random() < 0.4:
        return bomb
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


BYTES = (truncated, truncated, flipped, flipped, flipped, emptied, swapped, garbage, pickled)


# ----------------------------------------------------------------------------------------------------------------------
# Damage to values

HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3.5, -0.5, 10**9, 10**13, 2**63, -(2**63), 10**400, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "x" * 100_000, "../../../etc/passwd", "/", "\ud800", "\0", "uint8", "float64"),
    *([], {}, [1], [None], {"a": 1}, [[]], {"": {}}),
)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside a nest of dicts and lists, at most 40 of each."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:40]:
        yield from places(item, (*path, key))


def replaced(value: Any, draw: random.Random, hostile: Callable[[Any, random.Random], Any]) -> Any:
    """`value` with something in it replaced, removed or renamed. Places near the top are likelier."""
    found = sorted(places(value), key=len)
    *parents, key = found[min(draw.randrange(len(found)), draw.randrange(len(found)))]
    owner = value
    for name in parents:
        owner = owner[name]
    what = draw.random()
    if what < 0.2:
        del owner[key]
    elif what < 0.25 and isinstance(owner, dict):
        owner[str(key) + "_"] = owner.pop(key)
    else:
        owner[key] = hostile(owner[key], draw)
    return value


def hostile_value(old: Any, draw: random.Random) -> Any:
    if type(old) in (int, float) and draw.random() < 0.5:  # near the truth
        return draw.choice((old + 1, old - 1, -old, old * 1000, old / 7, str(old), [old], 10**400))
    return draw.choice(HOSTILE_VALUES)


def json_values(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    value = replaced(json.loads(data), draw, hostile_value)
    return json.dumps(value).encode("utf-8")


def jsonl_values(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    lines = data.splitlines()
    for n in {draw.randrange(len(lines)) for _ in range(draw.choice((1, 3)))}:
        lines[n] = json_values(lines[n], draw, others)
    return b"\n".join(lines) + b"\n"


def wide_ids(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    """Tokens in another type, or beyond the vocabulary."""
    import numpy as np

    ids = np.frombuffer(data, np.uint16).copy()
    if draw.random() < 0.5:
        return ids.astype(draw.choice((np.uint32, np.float32, np.uint8))).tobytes()
    ids[draw.randrange(len(ids))] = draw.choice((300, 40_000, 65_535))
    return ids.tobytes()


def torch_values(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    """A checkpoint that is whole, but holds something wrong."""
    import torch

    value = torch.load(io.BytesIO(data), weights_only=True)
    buffer = io.BytesIO()
    torch.save(replaced(value, draw, _hostile_for_torch), buffer)
    return buffer.getvalue()


def _hostile_for_torch(old: Any, draw: random.Random) -> Any:
    import torch

    if isinstance(old, torch.Tensor) and draw.random() < 0.8:
        return draw.choice(
            (
                *(old.double(), old.long(), old.bool(), old.bfloat16(), old.to(torch.complex64), old.flatten()[:1]),
                *(old.unsqueeze(0), torch.full_like(old, float("nan")), torch.full_like(old, 3e38), old.t(), old.to_sparse()),
                *(torch.empty(0), torch.empty(10**7, 10**7, device="meta"), torch.zeros(1).expand(10**6, 10**5)),
            )
        )
    return Bomb() if draw.random() < 0.1 else hostile_value(old, draw)


def safetensors_values(data: bytes, draw: random.Random, others: Sequence[Path]) -> bytes:
    """Another header before the same weights, or another length of it."""
    size = int.from_bytes(data[:8], "little")
    if draw.random() < 0.2:
        return draw.choice((0, 1, size - 1, size + 9, 2**40, 2**64 - 1)).to_bytes(8, "little") + data[8:]
    header = json_values(data[8 : 8 + size], draw, others)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


# ----------------------------------------------------------------------------------------------------------------------
# Which damage to which artifact, and who reads it

Damage = Callable[[bytes, random.Random, Sequence[Path]], bytes]
Command = tuple[str, ...]

PREPARE = ("prepare_data.py", *CORPUS, "--workers", "1")
REPORT = ("report.py", "base", "--no-png")
RESUME = ("train.py", *RUN, "--resume")
NEW_RUN = ("train.py", *TRAIN, "--run", "new", "--max-iters", "6")
GENERATE = ("generate.py", *RUN, *CPU, *SHORT)
EVALUATE = ("evaluate.py", *RUN, *CPU)
ANEW = (*EVALUATE, "--detokenize")
CUT = ("prepare_data.py", *CORPUS, "--variant", "cut", "--workers", "1")
USE_FILE = (
    GENERATE,
    EVALUATE,
    ("export.py", *RUN, "--out", "out"),
    ("config.py", "--show", "checkpoints/base/checkpoint_best.pt"),
    (*NEW_RUN, "--bias", "--init-from", "checkpoints/base/checkpoint_best.pt"),
)
TOKEN_READERS = (NEW_RUN, EVALUATE, PREPARE, (*PREPARE, "--check"), (*PREPARE, "--show", "2"), REPORT, RESUME)
HF, HF_BIN = (
    ((*GENERATE, "--checkpoint", name), (*EVALUATE, "--checkpoint", name), (*NEW_RUN, "--bias", "--init-from", name))
    for name in ("hf", "hf_bin")
)


@dataclass(frozen=True)
class Target:
    """An artifact, the damage it gets, the commands that read it, and files that would keep them from reading it."""

    path: str
    damages: Sequence[Damage]
    commands: Sequence[Command]
    without: Sequence[str] = ()


JSON = (*BYTES, nested, *[json_values] * 14)
JSONL = (*BYTES, nested, *[jsonl_values] * 10)
TORCH = (*BYTES, pickled, pickled, *[torch_values] * 14)
TOKENS = "data/tiny/tokens"
STOCK = (("download_data.py", "--input", "notes", "--corpus", "fresh"), ("train_tokenizer.py", *CORPUS), PREPARE, ANEW)
TARGETS = (
    Target("data/tiny/raw/manifest.json", JSON, (PREPARE, ANEW, ("download_data.py", *CORPUS), REPORT)),
    Target("data/tiny/raw/manifest.json", JSON, (PREPARE, ("train_tokenizer.py", *CORPUS, "--vocab-size", "310")), (TOKENS,)),
    *(Target(f"notes/{name}", BYTES, STOCK, (TOKENS,)) for name in ("b.jsonl.gz", "c.txt", "d.raw", "e.parquet")),
    Target("notes/a.jsonl", JSONL, STOCK, (TOKENS,)),
    Target("data/tiny/tokenizer.json", JSON, (PREPARE, NEW_RUN, ("tokenizer.py", "the model", *CORPUS), REPORT, RESUME)),
    Target("data/tiny/tokenizer_meta.json", JSON, (PREPARE, ("train_tokenizer.py", *CORPUS), REPORT)),
    Target(f"{TOKENS}/train.bin", (*BYTES, wide_ids, wide_ids), TOKEN_READERS),
    Target(f"{TOKENS}/val.bin", (*BYTES, wide_ids, wide_ids), TOKEN_READERS),
    *[Target(f"{TOKENS}/meta.json", JSON, (*TOKEN_READERS, (*NEW_RUN, "--estimate")))] * 2,
    Target("data/tiny/cut/tokens/journal.jsonl", JSONL, (CUT,)),
    Target("data/tiny/cut/tokens/train.bin.part", BYTES, (CUT,)),
    *[Target("checkpoints/base/checkpoint_best.pt", TORCH, USE_FILE)] * 2,
    *[Target("checkpoints/base/checkpoint_latest.pt", TORCH, (RESUME, RESUME, REPORT), ("checkpoints/base/config.json",))] * 2,
    Target("checkpoints/base/config.json", JSON, (REPORT, RESUME)),
    Target("checkpoints/base/metrics.jsonl", JSONL, (REPORT, RESUME)),
    Target("checkpoints/base/evaluation_val.json", JSON, (REPORT, EVALUATE)),
    Target("checkpoints/base/.lock", BYTES, (RESUME,)),
    Target(f"{TOKENS}/.lock", BYTES, (PREPARE,)),
    Target("hf/model.safetensors", (*BYTES, *[safetensors_values] * 8), HF),
    Target("hf/config.json", JSON, HF),
    Target("hf/tokenizer.json", JSON, HF),
    Target("hf_bin/pytorch_model.bin", TORCH, HF_BIN),
)


@dataclass(frozen=True)
class Case:
    """One stage run over artifacts of which `target` is damaged (None: the command line is wrong instead)."""

    number: int
    name: str
    command: Command
    prepare: Callable[[Path], None] | None = None


def damage_case(number: int, seed: int) -> Case:
    draw = random.Random(f"{seed}/{number}")
    target = TARGETS[number % len(TARGETS)]
    damage, command = draw.choice(list(target.damages)), draw.choice(list(target.commands))

    def prepare(folder: Path) -> None:
        path = folder / target.path
        others = sorted(p for p in folder.rglob("*") if p.is_file() and p != path and p.stat().st_size)
        data = path.read_bytes()
        path.unlink()
        as_folder = draw.random() < 0.03
        if as_folder:
            path.mkdir()
        else:
            path.write_bytes(damage(data, draw, others) if data else draw.randbytes(50))
        for name in target.without:
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return Case(number, f"{target.path} {damage.__name__}", command, prepare)


# ----------------------------------------------------------------------------------------------------------------------
# Wrong command lines

BAD_WORDS = (
    *("", " ", "x" * 5_000, "\udcff\udcfe", "é\n\t", "a\0b", "-1", "--", "-", "nan", "inf", "-inf", "1e999", "9" * 400),
    *("0", "1.5", "0x10", "١٢", "none", "../..", "/dev/null", "/", "notes", "hf", "data/tiny/tokenizer.json", "~", "*"),
    *("checkpoints/base", "checkpoints/base/metrics.jsonl", "notes/e.parquet", "missing/file", "a/" * 3_000),
)
FLAGS = {
    "download_data.py": "--input --url --hub --sha256 --mirror --archive --size --corpus --data-dir --val-fraction --errors",
    "train_tokenizer.py": "--archive --vocab-size --min-frequency --sample-mb --tokenizer-kind --seed --corpus --data-dir",
    "prepare_data.py": "--workers --max-docs --dedup --mix --show --corpus --variant --data-dir --block-size",
    "train.py": "--init-from --override --max-iters --learning-rate --n-head --block-size --run --checkpoint-dir --device "
    "--batch-size --beta1 --warmup-ratio --optimizer --sample-prompt --threads --dtype --eval-windows",
    "generate.py": "--prompt --prompt-file --checkpoint --num-samples --stop --temperature --top-p --top-k --seed --quantize "
    "--max-new-tokens --device --repetition-penalty",
    "evaluate.py": "--split --checkpoint --stride --quantize --by-document --corpus --run --checkpoint-dir --device",
    "export.py": "--out --checkpoint --format --run --checkpoint-dir",
    "report.py": "--watch-seconds --checkpoint-dir",
    "pipeline.py": "--input --url --hub --archive --preset --corpus --n-embd --vocab-size --data-dir",
    "config.py": "--show --preset --run --n-layer --learning-rate",
    "tokenizer.py": "--tokenizer --compare --file --corpus",
    "test_model.py": "--preset",
}
BASES = {
    "download_data.py": ("--input", "notes", "--corpus", "fresh"),
    "train_tokenizer.py": CORPUS,
    "prepare_data.py": (*CORPUS, "--workers", "1"),
    "train.py": (*TRAIN, "--run", "new", "--max-iters", "6"),
    "generate.py": (*RUN, *CPU, *SHORT),
    "evaluate.py": (*RUN, *CPU),
    "export.py": (*RUN, "--out", "out"),
    "report.py": ("base", "--no-png"),
    "tokenizer.py": ("the model", *CORPUS),
}
CONTRADICTIONS: tuple[Command, ...] = (
    ("train.py", *TRAIN, "--run", "base"),
    ("train.py", *TRAIN, "--resume", "--overwrite"),
    ("train.py", *RUN, "--resume", "--n-embd", "64"),
    ("train.py", *RUN, "--resume", "--init-from", "hf"),
    ("train.py", *TRAIN, "--run", "new", "--override", "seed"),
    ("train.py", *TRAIN, "--run", "new", "--n-embd", "33"),
    ("train.py", *TRAIN, "--run", "new", "--warmup-iters", "100"),
    ("train.py", *TRAIN, "--run", "new", "--block-size", "100000"),
    ("train.py", *TRAIN, "--run", "new", "--device", "cuda:99"),
    ("generate.py", *RUN, "--interactive", "--json"),
    ("generate.py", *RUN, "--prompt", "a", "--prompt-file", "b"),
    ("evaluate.py", *RUN, *CPU, "--stride", "9999"),
    ("evaluate.py", *RUN, *CPU, "--split", "test", "--checkpoint", "hf", "missing.pt"),
    ("download_data.py", "--input", "notes", "--size", "local"),
    ("download_data.py", "--url", "https://localhost:1/x.txt", "--sha256", "12"),
    ("download_data.py", *CORPUS, "--val-fraction", "0.6", "--test-fraction", "0.6"),
    ("export.py", *RUN, "--out", "notes"),
    ("export.py", *RUN, "--out", "notes/c.txt"),
    ("prepare_data.py", *CORPUS, "--mix", "tiny:1"),
    ("report.py", "missing", "--no-png"),
    ("export.py", *RUN, "--out", "out", "--checkpoint=--"),
)


def command_case(number: int, seed: int) -> Case:
    draw = random.Random(f"{seed}/command/{number}")
    if number < len(CONTRADICTIONS):
        return Case(number, "contradiction", CONTRADICTIONS[number])
    script = list(FLAGS)[number % len(FLAGS)]
    flag, word = draw.choice(FLAGS[script].split()), draw.choice(BAD_WORDS)
    wrong: tuple[str, ...] = draw.choice(
        ((flag, word), (flag, word), (f"{flag}={word}",), (flag,), (flag + "x", word), (word,))
    )
    if script in ("pipeline.py", "test_model.py"):  # whole runs where the word is fine; so something else is wrong too
        wrong = (*wrong, "--no-such-flag")
    arguments = BASES.get(script, ())
    command = (*arguments, *wrong) if draw.random() < 0.8 else (*wrong, *arguments)
    return Case(number, "command line", (script, *command))


# ----------------------------------------------------------------------------------------------------------------------
# All of it


@dataclass
class Tally:
    """What came of the cases."""

    endings: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def run_case(case: Case, good: Path, folder: Path) -> Ending:
    """Runs one case in `folder`, which is made anew from the good artifacts."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    if case.prepare is not None:
        case.prepare(folder)
    script, *arguments = case.command
    return run_stage(folder, script, arguments)


def make_good(work: Path) -> Path:
    """The folder of the good artifacts, made once. The manifest holds whole paths, so cases run where they were made."""
    folder, good = work / "case", work / "good"
    if not good.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_artifacts(folder)
        folder.rename(good)
    return good


def bench(work: Path, cases: Sequence[Case], say: Callable[[str], None]) -> Tally:
    """Runs all cases below `work`; `say` hears of every fault."""
    folder, good, tally = work / "case", make_good(work), Tally()
    for case in cases:
        ending = run_case(case, good, folder)
        fault = ending.fault(folder, may_fail="--check" in case.command)
        tally.endings[str(ending.code)] += 1
        if fault is not None:
            shown = " ".join(word[:60] for word in case.command)
            tally.faults.append(f"{case.number} ({case.name}): {fault}\n  {shown!a}\n{ending.output[-1500:]}")
            say(tally.faults[-1])
    return tally


def make_cases(mutations: int, commands: int, seed: int) -> list[Case]:
    return [damage_case(n, seed) for n in range(mutations)] + [command_case(n, seed) for n in range(commands)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1_000, metavar="N")
    parser.add_argument("--commands", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="these of the cases (mutations first)")
    args = parser.parse_args()
    cases = make_cases(args.mutations, args.commands, args.seed)
    with tempfile.TemporaryDirectory() as work:
        t0 = time.monotonic()
        tally = bench(Path(work), [cases[n] for n in args.only] if args.only else cases, lambda line: print(line, flush=True))
    endings = ", ".join(f"{n:,} with {code}" for code, n in sorted(tally.endings.items()))
    print(f"{args.mutations:,} mutations, {args.commands:,} command lines in {time.monotonic() - t0:,.0f} s: {endings}")
    print(f"{len(tally.faults)} faults")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
