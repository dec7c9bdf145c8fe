"""The shortened form of bench/bench_hostile.py, and faults that it found."""

import random
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import bench_hostile

from support.common import misfit


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def test_damaged_artifacts_and_wrong_command_lines_end_in_one_line(work: Path) -> None:
    """A traceback, a hang, a second error line, or a file whose code is executed."""
    cases = bench_hostile.make_cases(mutations=40, commands=25, seed=2)
    tally = bench_hostile.bench(work, cases, say=print)
    assert sum(tally.endings.values()) == 65
    assert tally.faults == []


def in_json(*path: object, value: object) -> bench_hostile.Damage:
    """Damage that replaces (`value` None: removes) one value of a JSON file."""

    def damage(data: bytes, draw: random.Random, others: object) -> bytes:
        whole = owner = bench_hostile.json.loads(data)
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = value
        return bench_hostile.json.dumps(whole).encode("utf-8")

    return damage


def in_torch(*path: object, value: object) -> bench_hostile.Damage:
    def damage(data: bytes, draw: random.Random, others: object) -> bytes:
        whole = owner = torch.load(bench_hostile.io.BytesIO(data), weights_only=True)
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = value
        buffer = bench_hostile.io.BytesIO()
        torch.save(whole, buffer)
        return buffer.getvalue()

    return damage


LATEST, BEST = (f"checkpoints/base/checkpoint_{name}.pt" for name in ("latest", "best"))
BIAS = "transformer.h.0.mlp.c_fc.bias"
FOUND = {
    "manifest of numbers": ("data/tiny/raw/manifest.json", in_json("documents", value=3), bench_hostile.PREPARE),
    "file without a time": ("data/tiny/raw/manifest.json", in_json("files", 0, value={}), bench_hostile.PREPARE),
    "path that is none": ("data/tiny/raw/manifest.json", in_json("files", 0, "path", value="a\0b"), bench_hostile.PREPARE),
    "splits of text": (
        "data/tiny/tokens/meta.json",
        in_json("splits", "train", value="x"),
        (*bench_hostile.PREPARE, "--show", "2"),
    ),
    "file elsewhere": (
        "data/tiny/tokens/meta.json",
        in_json("splits", "train", "file", value="/dev/zero"),
        bench_hostile.NEW_RUN,
    ),
    "vast vocabulary": ("data/tiny/tokens/meta.json", in_json("vocab_size", value=10**13), bench_hostile.NEW_RUN),
    "tokenizer a number": (LATEST, in_torch("config", "tokenizer", value=7), bench_hostile.RESUME),
    "tokenizer no JSON": (BEST, in_torch("config", "tokenizer", value="{"), bench_hostile.USE_FILE[2]),
    "settings of another type": (
        BEST,
        in_torch("config", "settings", "model", "n_layer", value="2"),
        bench_hostile.USE_FILE[3],
    ),
    "a billion layers": (BEST, in_torch("config", "settings", "model", "n_layer", value=10**4), bench_hostile.GENERATE),
    "unknown preset": (BEST, in_torch("config", "settings", "preset", value="x"), bench_hostile.EVALUATE),
    "optimizer state a number": (LATEST, in_torch("optimizer", "optimizer", "state", BIAS, value=3), bench_hostile.RESUME),
    "progress of text": (LATEST, in_torch("config", "progress", "tokens_seen", value="x"), bench_hostile.RESUME),
    "vocabulary a number": ("data/tiny/tokenizer.json", in_json("model", "vocab", value=3), bench_hostile.NEW_RUN),
    "weights a table": ("hf_bin/pytorch_model.bin", in_torch("transformer.wte.weight", value={}), bench_hostile.HF_BIN[0]),
    "weights repeated without end": (
        "hf_bin/pytorch_model.bin",
        in_torch("transformer.h.0.attn.c_attn.weight", value=torch.zeros(1).expand(10**6, 10**5)),
        bench_hostile.HF_BIN[0],
    ),
    "nested tokenizer": ("hf/tokenizer.json", lambda *_: b"[" * 200_000, bench_hostile.HF[0]),
    "width of text": ("hf/config.json", in_json("n_embd", value="x"), bench_hostile.HF[0]),
}


@pytest.mark.parametrize("name", FOUND)
def test_faults_found_before(work: Path, name: str) -> None:
    """Each of these once ended in a traceback, or would build a model of a size out of all bounds."""
    path, damage, command = FOUND[name]

    def prepare(folder: Path) -> None:
        target = folder / path
        target.write_bytes(damage(target.read_bytes(), random.Random(0), ()))

    case = bench_hostile.Case(0, name, command, prepare)
    ending = bench_hostile.run_case(case, bench_hostile.make_good(work), work / "case")
    assert ending.fault(work / "case", may_fail=False) is None, ending.output


def test_misfit_names_the_place() -> None:
    """A check that accepts True as a count, or a table where a list belongs."""
    make = {"n": int, "kind": ("a", "b"), "files": [{"path": str}], "sizes": {str: float}}
    good = {"n": 3, "kind": "a", "files": [{"path": "x", "more": 1}], "sizes": {"x": 1, "y": 0.5}}
    assert misfit(good, make) is None
    for place, value in (("n", True), ("n", -1), ("n", 2**63), ("n", "3"), ("kind", "c"), ("kind", []), ("files", {})):
        assert misfit({**good, place: value}, make).startswith(f"{place} is")
    assert misfit({**good, "files": [{"path": "x"}, {}]}, make) == "files[1].path is missing"
    assert misfit({**good, "sizes": {"y": "much"}}, make) == "sizes.y is 'much'"
    assert misfit([], make) == "the whole is list"
