"""Stage 2 as a user meets it: what it writes, what it refuses, and which documents it learns from."""

import json
import random
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from conftest import ROOT, assert_user_error

from tokenizer import BPETokenizer
from train_tokenizer import highest_within


@pytest.fixture
def books(stage, tmp_path):
    """A corpus named custom of 60 documents, of which a few are held out."""
    rng = random.Random(1)
    words = ["the", "model", "reads", "a", "window", "of", "tokens", "and", "learns", "what", "comes", "next", "<EOS>"]
    words += ["na\xefve", "\u65e5\u672c"]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=80)) + f" {i}"}) for i in range(60)]
    (tmp_path / "books.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert stage("download_data.py", "--input", "books.jsonl").returncode == 0
    return tmp_path / "data" / "custom"


def test_it_writes_a_tokenizer_and_how_it_was_made(stage, books):
    """Catches a meta file that misses what later stages compare, or a summary without the figures that matter."""
    result = stage("train_tokenizer.py", "--corpus", "custom", "--vocab-size", 120)
    assert result.returncode == 0, result.stderr
    tokenizer, meta = BPETokenizer.load(books / "tokenizer.json"), json.loads((books / "tokenizer_meta.json").read_bytes())
    assert meta["tokenizer_sha256"] == tokenizer.sha256
    assert meta["vocab_size"] == tokenizer.vocab_size
    assert meta["raw_fingerprint"] == json.loads((books / "raw" / "manifest.json").read_bytes())["fingerprint"]
    assert (meta["seed"], meta["settings"]["vocab_size"]) == (1337, 120)
    assert 40 < meta["sample"]["documents"] < 60 and meta["sample"]["bytes"] > 10_000
    for text in (
        "characters per token",
        "<UNK>",
        "longest tokens",
        "sample words",
        "uv run python prepare_data.py --corpus custom",
    ):
        assert text in result.stdout


def test_a_current_tokenizer_is_not_learnt_again_and_a_damaged_one_is(stage, books):
    """Catches work done twice, and a damaged or outdated file taken for a current one."""
    command = ("train_tokenizer.py", "--corpus", "custom", "--vocab-size", 60)
    assert stage(*command).returncode == 0
    path = books / "tokenizer.json"
    content, written = path.read_bytes(), path.stat().st_mtime_ns
    assert "is current" in stage(*command).stdout
    assert path.stat().st_mtime_ns == written
    path.write_bytes(content[:-100])
    assert "is current" not in stage(*command).stdout
    assert path.read_bytes() == content
    assert "is current" not in stage(*command[:-1], 70).stdout
    assert path.read_bytes() != content


def test_a_vocabulary_out_of_reach_says_both_sizes(stage, books):
    """Catches a claimed size that was not reached, and an alphabet that does not fit the vocabulary."""
    result = stage("train_tokenizer.py", "--corpus", "custom", "--vocab-size", 50_000)
    reached = json.loads((books / "tokenizer_meta.json").read_bytes())["vocab_size"]
    assert f"asked for 50,000 tokens, reached {reached:,}" in result.stdout
    assert_user_error(stage("train_tokenizer.py", "--corpus", "custom", "--vocab-size", 20), "no room for the 4 special tokens")
    assert_user_error(stage("train_tokenizer.py", "--corpus", "custom", "--vocab-size", 4), "vocab_size is 4")


def test_a_missing_corpus_names_the_command_that_makes_it(stage):
    """Catches a traceback, or an empty tokenizer, where stage 1 was not run."""
    assert_user_error(stage("train_tokenizer.py", "--corpus", "nothing"), "download_data.py")


def test_gpt2_archive_must_be_the_published_one(stage, books, tmp_path):
    """Catches an altered vocabulary taken for GPT-2's, and an archive given where it means nothing."""
    command = ("train_tokenizer.py", "--corpus", "custom", "--tokenizer-kind", "gpt2", "--archive")
    assert_user_error(stage(*command, "none.zip"), "holds no vocab.bpe")
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    assert_user_error(stage(*command, "bad.zip"), "neither a folder nor a sound zip file")
    with zipfile.ZipFile(tmp_path / "flipped.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vocab.bpe", "some words of a text in lines\n" * 5_000)
    data = bytearray((tmp_path / "flipped.zip").read_bytes())
    data[60:90] = bytes(30)
    (tmp_path / "flipped.zip").write_bytes(data)  # once a traceback (zlib.error)
    assert_user_error(stage(*command, "flipped.zip"), "neither a folder nor a sound zip file")
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert_user_error(stage(*command, tmp_path), "is not the published file")
    assert_user_error(stage("train_tokenizer.py", "--corpus", "custom", "--archive", tmp_path), "--tokenizer-kind gpt2")
    assert not (books / "tokenizer.json").exists()


def test_an_interrupt_leaves_the_old_files_or_none(stage, books, tmp_path):
    """Catches half a tokenizer under its final name, and a traceback on Ctrl-C."""
    (tmp_path / "big.txt").write_text("".join(f"word{i} {i * 7919 % 100_003}x " for i in range(1_500_000)), encoding="utf-8")
    assert stage("download_data.py", "--input", "big.txt", "--corpus", "big").returncode == 0
    command = [sys.executable, str(ROOT / "train_tokenizer.py"), "--corpus", "big"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    files = {path.name for path in (tmp_path / "data" / "big").iterdir() if path.is_file()}
    assert "Traceback" not in errors
    assert files <= {".lock"} if process.returncode == 130 else process.returncode == 0


def test_the_sample_is_the_lowest_hashes_up_to_its_size():
    """Catches a sample that depends on order, splits equal documents, overshoots, or is empty."""
    rng = random.Random(2)
    for _ in range(200):
        hashes = [rng.randrange(20) for _ in range(rng.randint(1, 30))]
        sizes, limit = [rng.randrange(1, 100) for _ in hashes], rng.randrange(1, 1_000)
        highest = highest_within(hashes, sizes, limit)
        total = {h: sum(s for h2, s in zip(hashes, sizes, strict=True) if h2 <= h) for h in hashes}
        if sum(sizes) <= limit:
            assert highest is None
        else:
            assert highest == max((h for h in hashes if total[h] <= limit), default=min(hashes))
