"""Token files: equal to the obvious way of making them, whatever is killed when, and checked for what they are."""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_user_error
from test_corpus import jsonl, make_corpus, make_texts, parquet

import corpus as corpus_module
import prepare_data
from config import Config
from corpus import SPLITS, Corpus
from support.common import UserError, sha256_file, write_json
from support.encoding import BlockEncoder, EncodedBlock, WorkerPool, measure, token_dtype, tokens_to_repeat
from support.manifest import load_corpus
from tokenizer import BPETokenizer

Stage = Callable[..., subprocess.CompletedProcess]


def give_tokenizer(config: Config, corpus: Corpus, kind: str = "word", vocab_size: int = 400) -> BPETokenizer:
    """What stage 2 leaves."""
    tokenizer = (
        gpt2_like() if kind == "gpt2" else BPETokenizer.train(corpus.iter_documents("train"), kind=kind, vocab_size=vocab_size)
    )
    config.tokenizer_path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(config.tokenizer_path)
    write_json(config.tokenizer_meta_path, {"raw_fingerprint": corpus.fingerprint, "tokenizer_sha256": tokenizer.sha256})
    return tokenizer


def gpt2_like() -> BPETokenizer:
    """GPT-2's layout with a handful of merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))] + ["th", "the", "<|endoftext|>"]
    return BPETokenizer.from_gpt2("#version\nt h\nth e\n", json.dumps({name: i for i, name in enumerate(names)}))


def by_hand(corpus: Corpus, tokenizer: BPETokenizer, split: str) -> list[int]:
    return [i for text in corpus.iter_documents(split) for i in tokenizer.wrap_document(tokenizer.encode(text))]


def read_bin(config: Config, split: str) -> np.ndarray:
    meta = read_meta(config)
    return np.fromfile(config.tokens_dir / f"{split}.bin", np.dtype(meta["dtype"]).newbyteorder("<"))


def read_meta(config: Config) -> dict:
    return json.loads((config.tokens_dir / "meta.json").read_text(encoding="utf-8"))


def token_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def flags(config: Config, *more: object) -> list[str]:
    return ["--corpus", config.run.corpus, "--data-dir", config.run.data_dir, *map(str, more)]


# ----------------------------------------------------------------------------------------------------------------------
# Content


@pytest.mark.parametrize("kind", ["word", "byte", "gpt2"])
def test_files_equal_the_obvious_way(tmp_path: Path, stage: Stage, kind: str) -> None:
    """Lost, doubled or reordered documents, separators in the wrong place, figures that are estimates."""
    texts = [*make_texts(400), "<BOS> text <EOS>", "a\u2003b\x1cc \xa0 d", "ünseen ☃", "x " * 40_000]
    config, corpus = make_corpus(tmp_path, {"a.jsonl": jsonl(texts), "b.txt": b"  a  b\n"})
    tokenizer = give_tokenizer(config, corpus, kind)
    result = stage("prepare_data.py", *flags(config))
    assert result.returncode == 0, result.stderr
    meta = read_meta(config)
    for split in SPLITS:
        expected = by_hand(corpus, tokenizer, split)
        assert read_bin(config, split).tolist() == expected
        documents, figures = list(corpus.iter_documents(split)), meta["splits"][split]
        assert figures["tokens"] == len(expected) and figures["documents"] == len(documents)
        assert figures["words"] == sum(len(text.split()) for text in documents)
        assert figures["source_bytes"] == sum(len(text.encode()) for text in documents)
        assert figures["scored_bytes"] == sum(len(tokenizer.scored_text(text).encode()) for text in documents)
        assert figures["unk_tokens"] == (0 if tokenizer.unk_id is None else expected.count(tokenizer.unk_id))
    assert meta["dtype"] == "uint16" and meta["tokenizer_kind"] == kind
    assert "next: uv run python train.py --corpus mine" in result.stdout and "a.jsonl (" in result.stdout


def test_figures_of_hostile_whitespace() -> None:
    """Words and collapsed bytes are counted on bytes, where `str.split` knows 29 kinds of whitespace."""
    rng = random.Random(1)
    alphabet = (
        "ab é漢😀\t\n\v\f\r\x00\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u200b\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff\u0085"
    )
    for _ in range(2_000):
        texts = ["".join(rng.choices(alphabet, k=rng.randint(1, 12))) for _ in range(rng.randint(1, 4))]
        texts = [text for text in texts if text.strip()] or ["x"]
        collapsed = [" ".join(text.split()) for text in texts]
        expected = (sum(len(t.split()) for t in texts), len("".join(texts).encode()), len("".join(collapsed).encode()))
        assert measure(texts) == expected, texts


def test_newlines_and_marks_give_the_same_word_ids(tmp_path: Path, stage: Stage) -> None:
    """A corpus saved on Windows must not train another model."""
    texts, found = make_texts(60), []
    for name, mark, end in (("unix", "", "\n"), ("windows", "", "\r\n"), ("marked", "\ufeff", "\r\n")):
        files = {f"{i:02}.txt": (mark + text.replace("\n", end)).encode() for i, text in enumerate(texts)}
        config, corpus = make_corpus(tmp_path, files, name)
        give_tokenizer(config, corpus)
        assert stage("prepare_data.py", *flags(config)).returncode == 0
        found.append([read_bin(config, split).tolist() for split in SPLITS])
    assert found[0] == found[1] == found[2]


class StubTokenizer:
    """A vocabulary of any size, whose every text is the ids it was made with."""

    kind, bos_id, eos_id, unk_id = "byte", 2, 3, 1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_535, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (50_257, "<u2")])
def test_ids_never_wrap(vocab_size: int, dtype: str) -> None:
    """NumPy wraps ids that do not fit into 16 bits without a word."""
    encoder = BlockEncoder(None, StubTokenizer(vocab_size))
    ids = np.array([5, vocab_size - 1, 7], np.uint32)
    assert token_dtype(vocab_size) == np.dtype(dtype)
    out = encoder.with_separators(ids, np.array([0, 2, 2, 3]))
    assert out.dtype == np.dtype(dtype) and out.tolist() == [2, 5, vocab_size - 1, 3, 2, 3, 2, 7, 3]
    for bad in (np.array([vocab_size], np.uint32), np.array([-1], np.int32)):
        with pytest.raises(ValueError, match=f"vocabulary has {vocab_size:,} tokens"):
            encoder.with_separators(bad, np.array([0, 1]))


def test_workers_change_nothing(tmp_path: Path, stage: Stage) -> None:
    """Results taken in the order workers finish differ from run to run; a worker that imports torch wastes 300 MB."""
    texts = make_texts(30_000)
    files = {"a.jsonl": jsonl(texts[:15_000]), "b.parquet": parquet(tmp_path / "b", texts[15_000:], rows=4_000)}
    config, corpus = make_corpus(tmp_path, files)
    give_tokenizer(config, corpus)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    found = []
    for workers in (1, 3):  # processes, though there is little text
        process = start_eager(tmp_path, config, "--workers", workers)
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        assert f"processes: {workers}\n" in out and "nothing to do" not in out
        found.append(token_files(config.tokens_dir))
        (config.tokens_dir / "meta.json").unlink()
    assert found[0] == found[1]
    assert "processes: 1\n" in stage("prepare_data.py", *flags(config, "--workers", 3)).stdout
    assert token_files(config.tokens_dir) == found[0]


def test_skips_what_is_current_and_refuses_a_foreign_tokenizer(tmp_path: Path, stage: Stage) -> None:
    """Tokens of an older text or tokenizer, used because they were there."""
    config, corpus = make_corpus(tmp_path, {"a.jsonl": jsonl(make_texts(100))})
    assert_user_error(
        stage("prepare_data.py", *flags(config)), "tokenizer.json is missing; run: uv run python train_tokenizer.py"
    )
    give_tokenizer(config, corpus)
    assert stage("prepare_data.py", *flags(config)).returncode == 0
    before = token_files(config.tokens_dir)
    assert "nothing to do" in stage("prepare_data.py", *flags(config)).stdout
    (config.tokens_dir / "val.bin").write_bytes(b"12")
    assert "nothing to do" not in stage("prepare_data.py", *flags(config)).stdout
    assert token_files(config.tokens_dir) == before
    make_corpus(tmp_path, {"a.jsonl": jsonl(make_texts(101))})
    refusal = stage("prepare_data.py", *flags(config))
    assert_user_error(refusal, "learnt from another state of", "run: uv run python train_tokenizer.py --corpus mine")
    give_tokenizer(config, load_corpus(config), vocab_size=300)
    write_json(config.tokenizer_meta_path, {"raw_fingerprint": load_corpus(config).fingerprint, "tokenizer_sha256": "0"})
    assert_user_error(stage("prepare_data.py", *flags(config)), "is not the one tokenizer_meta.json describes")
    assert_user_error(stage("prepare_data.py", *flags(config, "--workers", 0)), "--workers is 0", "at least 1")


def test_too_little_text_for_a_window(tmp_path: Path, stage: Stage) -> None:
    """A bare index error at the start of training is all that others show."""
    config, corpus = make_corpus(tmp_path, {"a.txt": "\n\n".join(make_texts(5)).encode()})
    give_tokenizer(config, corpus)
    result = stage("prepare_data.py", *flags(config, "--block-size", 2_000))
    val = read_meta(config)["splits"]["val"]["tokens"]
    line = f"warning: the val split has {val:,} tokens, but a window needs 2,001; give stage 1 more text, or train with"
    line += f" --block-size {val - 1} or less"
    assert result.returncode == 0 and line in result.stdout


# ----------------------------------------------------------------------------------------------------------------------
# Killed and continued

# Commits after each block, so that a kill at any instant leaves something to continue from; has little text in processes too.
# With SLOW all processes take so many seconds more for a block, so that none is done before it is killed; with STUCK a worker
# takes a minute for its second block, so that it has work whenever it is killed, on the busiest machine too.
EAGER = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import corpus, prepare_data
from support import common, encoding
encoding.COMMIT_SECONDS = 0.0
encoding.PROCESS_BYTES = 1 << 20
if "SLOW" in os.environ:
    read = corpus.Corpus.read
    corpus.Corpus.read = lambda *block: (time.sleep(float(os.environ["SLOW"])), read(*block))[1]
if "STUCK" in os.environ and __name__ != "__main__":
    read, waits = corpus.Corpus.read, iter((0, 60))
    corpus.Corpus.read = lambda *block: (time.sleep(next(waits)), read(*block))[1]
if __name__ == "__main__":
    common.run_main(prepare_data.main)
"""


def start_eager(tmp_path: Path, config: Config, *more: object, slow: float = 0.0, **environment: str) -> subprocess.Popen:
    script = tmp_path / "eager.py"
    script.write_text(EAGER, encoding="utf-8")
    command = [sys.executable, str(script), *flags(config, *more)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), **({"SLOW": str(slow)} if slow else {}), **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)


def wait_for_blocks(process: subprocess.Popen, config: Config, blocks: int) -> None:
    journal = config.tokens_dir / "journal.jsonl"
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > blocks:
            return
        time.sleep(0.002)


def children_of(pid: int) -> list[int]:
    """The worker processes of a stage (its resource tracker is not one)."""
    found = []
    for path in (Path(f"/proc/{pid}/task/{pid}/children"),):
        for child in path.read_text().split():
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, bytes]]:
    """A corpus of a dozen blocks, and the files an undisturbed run makes of it."""
    folder = tmp_path_factory.mktemp("large")
    texts = make_texts(40_000)
    files = {"a.jsonl": jsonl(texts[:25_000]), "b.parquet": parquet(folder / "b", texts[25_000:], rows=3_000)}
    config, corpus = make_corpus(folder, files, "large")
    give_tokenizer(config, corpus)
    process = start_eager(folder, config, "--workers", 1)
    assert process.communicate()[1] == "" and process.returncode == 0
    whole = token_files(config.tokens_dir)
    assert set(whole) == {"train.bin", "val.bin", "test.bin", "meta.json"}
    return config, whole


def start_over(config: Config) -> None:
    for path in config.tokens_dir.iterdir():
        path.unlink()


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_of_the_stage(large: tuple, tmp_path: Path, workers: int) -> None:
    """A journal ahead of the data, a torn line taken for a whole one, documents twice: other bytes after a kill."""
    config, whole = large
    start_over(config)
    kept = []
    for blocks in (1, 2, 3, 4):
        process = start_eager(tmp_path, config, "--workers", workers)
        wait_for_blocks(process, config, blocks)
        process.kill()
        out = process.communicate()[0]
        kept += [int(n) for n in re.findall(r"documents in (\d+) blocks are kept", out)]
        assert not (config.tokens_dir / "meta.json").exists(), "unfinished data must not look finished"
    with open(config.tokens_dir / "journal.jsonl", "ab") as journal:
        journal.write(b'{"blocks": 99, "sizes": {"tr')  # torn by a power cut
    part = config.tokens_dir / "train.bin.part"
    if part.exists():  # a kill between the last renames leaves none
        part.write_bytes(part.read_bytes() + b"more than the journal knows")
    process = start_eager(tmp_path, config, "--workers", workers)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "continuing an interrupted run" in out
    assert kept == sorted(kept) and kept[-1] >= 3
    assert token_files(config.tokens_dir) == whole


@pytest.mark.skipif(sys.platform != "linux", reason="finds workers through /proc")
def test_kill_9_of_a_worker(large: tuple, tmp_path: Path) -> None:
    """A pool that waits for a dead worker hangs for ever."""
    config, whole = large
    start_over(config)
    process = start_eager(tmp_path, config, "--workers", 2, STUCK="1")
    wait_for_blocks(process, config, 1)
    os.kill(children_of(process.pid)[0], signal.SIGKILL)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "error: a worker process died" in errors and "it continues" in errors
    process = start_eager(tmp_path, config, "--workers", 2)
    out, errors = process.communicate()
    assert "continuing an interrupted run" in out, errors
    assert token_files(config.tokens_dir) == whole


@pytest.mark.skipif(sys.platform != "linux", reason="finds workers through /proc")
def test_workers_end_with_a_killed_stage(large: tuple, tmp_path: Path) -> None:
    """Workers of a killed parent wait for tasks for ever and hold their memory."""
    config, _ = large
    start_over(config)
    process = start_eager(tmp_path, config, "--workers", 2, slow=0.2)
    wait_for_blocks(process, config, 1)
    workers = children_of(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(
        Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() for pid in workers
    ):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    assert workers


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_keeps_what_is_done(large: tuple, tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """Ctrl-C that throws the work away, hangs in the pool, or prints a traceback for each worker."""
    config, whole = large
    start_over(config)
    process = start_eager(tmp_path, config, "--workers", 2, slow=0.2)
    wait_for_blocks(process, config, 2)
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code and "Traceback" not in errors, errors
    process = start_eager(tmp_path, config)
    assert "continuing an interrupted run" in process.communicate()[0]
    assert token_files(config.tokens_dir) == whole


def test_killed_between_the_renames(large: tuple, tmp_path: Path) -> None:
    """Files renamed one by one: a kill between two must not mix old and new, or lose the work."""
    config, whole = large
    start_over(config)
    process = start_eager(tmp_path, config)
    wait_for_blocks(process, config, 10**6)  # until it ends
    journal = {"key": read_meta(config)["inputs"]}
    meta = read_meta(config)
    digests = {split: meta["splits"][split]["sha256"] for split in SPLITS}
    sizes = {split: len(whole[f"{split}.bin"]) for split in SPLITS}
    last = {"since": 0, "blocks": 10**6, "sizes": sizes, "sha256": digests, "stats": {}, "files": {}, "counts": {}}
    (config.tokens_dir / "meta.json").unlink()
    (config.tokens_dir / "journal.jsonl").write_text(json.dumps(journal) + "\n" + json.dumps(last) + "\n", encoding="utf-8")
    os.replace(config.tokens_dir / "test.bin", config.tokens_dir / "test.bin.part")
    out = start_eager(tmp_path, config).communicate()[0]
    assert "1,000,000 blocks are kept" in out
    assert {name: data for name, data in token_files(config.tokens_dir).items() if name != "meta.json"} == {
        name: data for name, data in whole.items() if name != "meta.json"
    }


def test_damaged_unfinished_files_are_not_continued(large: tuple, tmp_path: Path) -> None:
    """Continuing behind damaged bytes keeps the damage for good; so does continuing a journal of other settings."""
    config, whole = large
    start_over(config)
    process = start_eager(tmp_path, config)
    wait_for_blocks(process, config, 3)
    process.kill()
    process.wait()
    part = config.tokens_dir / "train.bin.part"
    data = bytearray(part.read_bytes())
    data[1000] ^= 1
    part.write_bytes(data)
    out = start_eager(tmp_path, config).communicate()[0]
    assert "continuing" not in out
    assert token_files(config.tokens_dir) == whole


# ----------------------------------------------------------------------------------------------------------------------
# Choices


def test_max_docs(tmp_path: Path, stage: Stage) -> None:
    """A limit applied per block or worker takes more, fewer or other documents."""
    config, corpus = make_corpus(tmp_path, {f"{i:03}.jsonl": jsonl(make_texts(40, i)) for i in range(20)}, val_fraction=0.1)
    tokenizer = give_tokenizer(config, corpus)
    assert stage("prepare_data.py", *flags(config, "--max-docs", 33)).returncode == 0
    for split in SPLITS:
        texts = list(corpus.iter_documents(split))[:33]
        expected = [i for text in texts for i in tokenizer.wrap_document(tokenizer.encode(text))]
        assert read_bin(config, split).tolist() == expected
        assert read_meta(config)["splits"][split]["documents"] == len(texts)


def test_a_limit_counts_nothing_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that workers encoded before the limit was reached, counted as read though none of their documents is taken."""
    files = {f"{i:03}.jsonl": jsonl([*make_texts(40, i), ""]) for i in range(20)}
    config, corpus = make_corpus(tmp_path, files, val_fraction=0.1)
    give_tokenizer(config, corpus)
    monkeypatch.setattr(corpus_module, "BLOCK_BYTES", 10_000)
    args = argparse.Namespace(max_docs=5, dedup="off", workers=1)
    tokenizer = prepare_data.load_tokenizer(config, corpus)
    lazy = prepare_data.prepare(config, corpus, tokenizer, args)
    assert 0 < lazy["counts"]["empty documents dropped"] < 20

    def encode_ahead(pool: WorkerPool, tasks: Iterable[tuple]) -> Iterator[EncodedBlock]:
        yield from [pool.encoder.encode(*task) for task in tasks]

    monkeypatch.setattr(WorkerPool, "encode", encode_ahead)
    assert prepare_data.prepare(config, corpus, tokenizer, args) == lazy


def test_exact_repeats_are_dropped(tmp_path: Path, stage: Stage) -> None:
    """Repeats within a block, over blocks, over files, and in two splits at once; the copy that is evaluated on stays."""
    wiki = {name: "".join(f" \n = {t} = \n \n text {t} \n" for t in titles).encode() for name, titles in
            {"wiki.train.raw": "abcabdefgh", "wiki.valid.raw": "cxyzz", "wiki.test.raw": "qxr"}.items()}  # fmt: skip
    config, corpus = make_corpus(tmp_path, wiki)
    tokenizer = give_tokenizer(config, corpus, "byte")
    assert stage("prepare_data.py", *flags(config)).returncode == 0
    found = stage("prepare_data.py", *flags(config, "--check"))
    assert found.returncode == 1 and "1 documents are in train and in val as well" in found.stdout
    assert "1 documents are in val and in test as well" in found.stdout
    result = stage("prepare_data.py", *flags(config, "--dedup", "exact"))
    assert "repeated documents dropped: 5" in result.stdout
    titles = {s: "".join(re.findall(r" = (.) = ", tokenizer.decode(read_bin(config, s).tolist()))) for s in SPLITS}
    assert titles == {"train": "abdefgh", "val": "cxyz", "test": "qr"}
    assert stage("prepare_data.py", *flags(config, "--check", "--dedup", "exact")).returncode == 0


def test_a_mix_larger_than_the_disk_is_refused_first(tmp_path: Path, stage: Stage) -> None:
    """Weights mistyped by some zeros, which filled the whole disk before they ended in an error."""
    for name, seed in (("large", 1), ("small", 2)):
        make_corpus(tmp_path, {f"{name}.jsonl": jsonl(make_texts(60, seed))}, name)
    config, _ = make_corpus(tmp_path, {"c.jsonl": jsonl(make_texts(30, 3))}, "both")
    (config.raw_dir / "manifest.json").unlink()
    stage("prepare_data.py", *flags(config, "--mix", "large:1e11,small:1"))
    give_tokenizer(config, load_corpus(config))
    result = stage("prepare_data.py", *flags(config), timeout=60)
    assert_user_error(result, "no space left", "repeating sources up to their weight needs")
    assert not (config.tokens_dir / "train.bin").exists()


def test_mix_has_the_shares_asked_for(tmp_path: Path, stage: Stage) -> None:
    """Weights that are documented and not applied, and a small source repeated many times unknowingly."""
    make_corpus(tmp_path, {"a.jsonl": jsonl(make_texts(4_000, 1))}, "large")
    make_corpus(tmp_path, {"b.jsonl": jsonl(make_texts(700, 2))}, "small")
    config, _ = make_corpus(tmp_path, {"c.jsonl": jsonl(make_texts(30, 3))}, "both")
    (config.raw_dir / "manifest.json").unlink()
    first = stage("prepare_data.py", *flags(config, "--mix", "large:0.6,small:0.4"))
    assert_user_error(first, "tokenizer.json is missing; run: uv run python train_tokenizer.py --corpus both")
    assert "both is a mix of large, small: nothing to bring" in stage("download_data.py", *flags(config)).stdout
    corpus = load_corpus(config)
    tokenizer = give_tokenizer(config, corpus)
    result = stage("prepare_data.py", *flags(config))
    assert result.returncode == 0, result.stderr
    meta = read_meta(config)
    for name, asked in (("large", 0.6), ("small", 0.4)):
        assert meta["sources"][name]["share"] == pytest.approx(asked, rel=0.01)
    assert meta["sources"]["large"]["passes"] == 1
    assert meta["sources"]["small"]["passes"] == pytest.approx(0.4 / 0.6 * 4_000 / 700, rel=0.05)
    assert "source small: " in result.stdout and "passes" in result.stdout
    once = by_hand(corpus, tokenizer, "train")
    ids = read_bin(config, "train").tolist()
    assert ids[: len(once)] == once and ids[-1] == tokenizer.eos_id
    start = meta["sources"]["large"]["tokens"]
    assert ids[len(once) :] == (once[start:] * 9)[: len(ids) - len(once)]
    assert meta["splits"]["train"]["tokens"] == len(ids) and ids.count(3) == meta["splits"]["train"]["documents"]
    assert read_bin(config, "val").tolist() == by_hand(corpus, tokenizer, "val")
    assert stage("prepare_data.py", *flags(config, "--check")).returncode == 0


def test_tokens_to_repeat() -> None:
    """Every source is read at least once, and none more often than its weight asks."""
    assert tokens_to_repeat({"a": 300, "b": 100}, {"a": 1, "b": 1}) == {"a": 0, "b": 200}
    assert tokens_to_repeat({"a": 300, "b": 100}, {"a": 0.75, "b": 0.25}) == {"a": 0, "b": 0}


def test_chunk_splits(tmp_path: Path, stage: Stage) -> None:
    """The published split by chunks of a stream: nothing may be lost, the user is warned that documents straddle, and
    a check that gives up there passes on chunks in the wrong order."""
    settings = {"split_unit": "chunk", "val_fraction": 0.2, "test_fraction": 0.0, "block_size": 64}
    config, corpus = make_corpus(tmp_path, {"a.jsonl": jsonl(make_texts(3_000))}, **settings)
    tokenizer = give_tokenizer(config, corpus)
    result = stage("prepare_data.py", *flags(config))
    assert result.returncode == 0 and "documents straddle" in result.stdout, result.stderr
    stream = np.array(by_hand(corpus, tokenizer, "train"))
    splits = {split: read_bin(config, split) for split in SPLITS}
    assert len(splits["test"]) == 0 and len(splits["val"]) % 64 == 0
    assert len(splits["val"]) / len(stream) == pytest.approx(0.2, abs=0.02)
    chunks = [bytes(stream[at : at + 64].astype("<u2")) for at in range(0, len(stream), 64)]
    dealt = [bytes(ids[at : at + 64]) for ids in splits.values() for at in range(0, len(ids), 64)]
    assert sorted(chunks) == sorted(dealt)
    assert sum(len(ids) for ids in splits.values()) == len(stream)
    sound = stage("prepare_data.py", *flags(config, "--check"))
    assert sound.returncode == 0 and "8 random documents decoded" in sound.stdout, sound.stdout
    path, meta = config.tokens_dir / "train.bin", read_meta(config)
    whole = len(splits["train"]) // 64 * 64
    splits["train"][:whole].reshape(-1, 64)[::-1].tofile(path)
    with open(path, "ab") as file:
        splits["train"][whole:].tofile(file)
    meta["splits"]["train"]["sha256"] = sha256_file(path)
    write_json(config.tokens_dir / "meta.json", meta)
    found = stage("prepare_data.py", *flags(config, "--check"))
    assert found.returncode == 1 and "does not decode to its text" in found.stdout, found.stdout


# ----------------------------------------------------------------------------------------------------------------------
# Looking into finished files


@pytest.mark.parametrize("kind", ["word", "gpt2"])
def test_check_finds_each_difference(tmp_path: Path, stage: Stage, kind: str) -> None:
    """A check that passes on damaged files is worse than none."""
    config, corpus = make_corpus(tmp_path, {"a.jsonl": jsonl([*make_texts(300), "ünseen ☃"])})
    tokenizer = give_tokenizer(config, corpus, kind)
    assert stage("prepare_data.py", *flags(config)).returncode == 0
    sound = stage("prepare_data.py", *flags(config, "--check"))
    assert sound.returncode == 0 and "is what meta.json says" in sound.stdout, sound.stdout
    path, meta = config.tokens_dir / "train.bin", read_meta(config)
    ids = np.fromfile(path, "<u2")
    ends = np.flatnonzero(ids == tokenizer.eos_id)

    def checked(changed: np.ndarray, *, honest: bool = True, **more: object) -> str:
        changed.astype("<u2").tofile(path)
        split = {**meta["splits"]["train"], "tokens": len(changed), **more}
        split["sha256"] = sha256_file(path) if honest else split["sha256"]
        write_json(config.tokens_dir / "meta.json", {**meta, "splits": {**meta["splits"], "train": split}})
        result = stage("prepare_data.py", *flags(config, "--check"))
        assert result.returncode == 1, result.stdout
        return result.stdout

    damaged = ids.copy()
    damaged[10] ^= 1
    assert "has sha256" in checked(damaged, honest=False)
    assert "documents by their last separators" in checked(np.delete(ids, ends[3]))
    assert f"ids that the vocabulary of {tokenizer.vocab_size:,} tokens lacks" in checked(np.where(ids == ids[1], 60_000, ids))
    swapped = np.concatenate((ids[ends[99] + 1 :], ids[: ends[99] + 1]))
    assert "does not decode to its text" in checked(swapped)
    write_json(config.tokens_dir / "meta.json", {**meta, "raw_fingerprint": "0", "tokenizer_sha256": "0"})
    ids.tofile(path)
    found = stage("prepare_data.py", *flags(config, "--check"))
    assert found.returncode == 1 and "another state of" in found.stdout and "another tokenizer" in found.stdout


def test_show_prints_documents_with_boundaries(tmp_path: Path, stage: Stage) -> None:
    """Users want to see what the model will see, special tokens and line ends included."""
    config, corpus = make_corpus(tmp_path, {"a.jsonl": jsonl(make_texts(100))})
    give_tokenizer(config, corpus, "byte")
    assert_user_error(
        stage("prepare_data.py", *flags(config, "--show", 2)), "meta.json is missing; run: uv run python prepare_data.py"
    )
    assert stage("prepare_data.py", *flags(config)).returncode == 0
    shown = stage("prepare_data.py", *flags(config, "--show", 3)).stdout
    assert shown.count("<BOS>|") == shown.count("|<EOS>") == 3
    assert r"\n" in shown and len(re.findall(r"document [\d,]+ of train", shown)) == 3


def test_one_huge_line(tmp_path: Path, stage: Stage) -> None:
    """One long document without a space or line end: quadratic time, or a length limit that drops it."""
    rng = random.Random(0)
    huge = "".join(rng.choices("abcdefgh", k=400_000))
    config, corpus = make_corpus(tmp_path, {"a.jsonl": jsonl([*make_texts(50), huge])})
    tokenizer = give_tokenizer(config, corpus, "byte", 300)
    assert stage("prepare_data.py", *flags(config)).returncode == 0
    split = next(split for split in SPLITS if huge in set(corpus.iter_documents(split)))
    assert huge in tokenizer.decode(read_bin(config, split).tolist())


def test_disk_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up after hours of work, when the need could have been told at the start."""
    import shutil

    import prepare_data

    config, corpus = make_corpus(tmp_path, {"a.jsonl": jsonl(make_texts(5_000))})
    give_tokenizer(config, corpus)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 100_000))
    with pytest.raises(UserError, match=r"the token files needs about 1 MB, but 0 MB are free"):
        prepare_data.main(flags(config))
    assert not (config.tokens_dir / "meta.json").exists()
