"""Documents into token files: several processes encode blocks of documents; one of them appends, in order, with a journal.

The journal says how much of the unfinished files is good, so a run that was killed continues where it was and ends with the
same bytes as one that was not. Workers hold a block or two each, whatever the size of the corpus, and never import torch.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from bpe import WIDE_WHITESPACE, WORD_WHITESPACE, cpu_count
from corpus import SPLITS, Block, Corpus, Documents, document_hash
from support.common import UserError, atomic_write, fsync_dir, misfit, require_free_space, start_worker
from tokenizer import BPETokenizer

COMMIT_SECONDS = 1.0
PROCESS_BYTES = 8 << 20  # of less text for each, one process more is done too late with starting
TASKS_AHEAD = 2  # of a worker: one it works on, and one to go on with
LARGEST_UINT16_VOCAB = 1 << 16

# Kinds of bytes for `measure`: 1 is whitespace to str.split(), 2 may begin a whitespace character of several bytes.
_WIDE = [c.encode("utf-8") for c in WIDE_WHITESPACE]
_BYTE_KINDS = bytes(1 if chr(b) in WORD_WHITESPACE and b < 0x80 else 2 * (b in {c[0] for c in _WIDE}) for b in range(256))
_WIDE_2 = np.array([int.from_bytes(c, "big") for c in _WIDE if len(c) == 2], np.uint32)
_WIDE_3 = np.array([int.from_bytes(c, "big") for c in _WIDE if len(c) == 3], np.uint32)


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 while every id fits (a vocabulary of 65,536 still does), uint32 above."""
    return np.dtype("<u2" if vocab_size <= LARGEST_UINT16_VOCAB else "<u4")


# ----------------------------------------------------------------------------------------------------------------------
# One block


@dataclass
class EncodedBlock:
    """What a worker hands back: per split its tokens, separators included, and what was counted."""

    source: str
    ids: dict[str, np.ndarray] = field(default_factory=dict)
    stats: dict[str, dict[str, int]] = field(default_factory=dict)
    files: dict[str, dict[int, int]] = field(default_factory=dict)  # documents per file
    counts: Counter = field(default_factory=Counter)


class BlockEncoder:
    """Encodes blocks of one corpus with one tokenizer; every process holds one."""

    def __init__(self, corpus: Corpus, tokenizer: BPETokenizer) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)

    def encode(self, block: Block, dropped: Sequence[int] = (), limits: dict[str, int] | None = None) -> EncodedBlock:
        """`dropped` are positions of documents to leave out, `limits` the most documents to take per split."""
        documents = self.corpus.read(block)
        if len(dropped):
            documents = without(documents, set(dropped))
        for split, most in (limits or {}).items():
            documents.texts[split] = documents.texts[split][:most]
            documents.files[split] = documents.files[split][:most]
        return self._encode_documents(self.corpus.source_of(block), documents)

    def digests(self, block: Block) -> tuple[list[bytes], list[str]]:
        """16 bytes of sha256 of each document of a block, and its split, in the order `without` counts."""
        texts = self.corpus.read(block).texts
        digests = [hashlib.sha256(text.encode("utf-8")).digest()[:16] for split in SPLITS for text in texts[split]]
        return digests, [split for split in SPLITS for _ in texts[split]]

    def _encode_documents(self, source: str, documents: Documents) -> EncodedBlock:
        """All splits go through the encoder in one call: it is fastest where there is much that is alike."""
        texts = [text for split in SPLITS for text in documents.texts[split]]
        all_ids, all_offsets = self.tokenizer.encode_to_array(texts)
        assert len(all_offsets) == len(texts) + 1, f"{len(texts)} documents, but {len(all_offsets)} offsets"
        encoded, first = EncodedBlock(source, counts=documents.counts), 0
        for split in SPLITS:
            if n := len(documents.texts[split]):
                offsets = all_offsets[first : first + n + 1]
                ids, offsets = all_ids[offsets[0] : offsets[-1]], offsets - offsets[0]
                encoded.ids[split] = self.with_separators(ids, offsets)
                encoded.stats[split] = self._measure(documents.texts[split], ids, offsets)
                encoded.files[split] = dict(Counter(documents.files[split]))
                first += n
        return encoded

    def with_separators(self, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The documents' ids (N,), document i at offsets[i]:offsets[i + 1], as <BOS> ids <EOS> one after the other.

        With GPT-2's vocabulary a document is followed by one end-of-text. Raises ValueError on an id that does not fit.
        """
        tokenizer = self.tokenizer
        if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ValueError(f"the tokenizer gave id {bad:,}, but its vocabulary has {tokenizer.vocab_size:,} tokens")
        front = int(tokenizer.kind != "gpt2")  # separators in front of a document
        n = np.arange(len(offsets) - 1)
        ends = offsets[1:] + n * (front + 1) + front
        out = np.empty(len(ids) + len(n) * (front + 1), self.dtype)
        inside = np.ones(len(out), bool)
        inside[ends] = False
        if front:
            starts = offsets[:-1] + 2 * n
            inside[starts] = False
            out[starts] = tokenizer.bos_id
        out[ends] = tokenizer.eos_id
        out[inside] = ids
        return out

    def _measure(self, texts: list[str], ids: np.ndarray, offsets: np.ndarray) -> dict[str, int]:
        words, source_bytes, collapsed_bytes = measure(texts)
        separators = 1 if self.tokenizer.kind == "gpt2" else 2
        unk_id = self.tokenizer.unk_id
        return {
            "tokens": len(ids) + separators * len(texts),
            "documents": len(texts),
            "words": words,
            "characters": sum(map(len, texts)),
            "source_bytes": source_bytes,
            "scored_bytes": collapsed_bytes if self.tokenizer.kind == "word" else source_bytes,
            "unk_tokens": 0 if unk_id is None else int(np.count_nonzero(ids == unk_id)),
            "longest_document": int(np.diff(offsets).max()) + separators,
        }


def measure(texts: Sequence[str]) -> tuple[int, int, int]:
    """Words, UTF-8 bytes, and UTF-8 bytes with whitespace collapsed as `" ".join(text.split())`, over all texts.

    Counted on the bytes at once: splitting them would take as long as encoding. `["a  b", "c"]` gives (3, 5, 4).
    """
    data = "\n".join(texts).encode("utf-8")
    kinds = np.frombuffer(data.translate(_BYTE_KINDS), np.uint8)
    space = kinds == 1
    if not data.isascii():
        _mark_wide_spaces(data, np.flatnonzero(kinds == 2), space)
    words = int(np.count_nonzero(space[:-1] > space[1:])) + int(not space[0])
    between = len(texts) - 1
    return words, len(data) - between, len(data) - int(np.count_nonzero(space)) + words - len(texts)


def _mark_wide_spaces(data: bytes, at: np.ndarray, space: np.ndarray) -> None:
    """Sets `space` for the bytes of whitespace characters that begin at some of the places `at`."""
    padded = np.frombuffer(data + b"\0\0", np.uint8)
    two = padded[at].astype(np.uint32) << 8 | padded[at + 1]
    wide_2, wide_3 = at[np.isin(two, _WIDE_2)], at[np.isin(two << 8 | padded[at + 2], _WIDE_3)]
    for places, size in ((wide_2, 2), (wide_3, 3)):
        for i in range(size):
            space[places + i] = True


def without(documents: Documents, dropped: set[int]) -> Documents:
    """The documents but those at the given positions, counted through the splits in their order."""
    kept, position = Documents(counts=documents.counts), 0
    for split in SPLITS:
        for text, file in zip(documents.texts[split], documents.files[split], strict=True):
            if position not in dropped:
                kept.texts[split].append(text)
                kept.files[split].append(file)
            position += 1
    kept.counts["repeated documents dropped"] += len(dropped)
    return kept


# ----------------------------------------------------------------------------------------------------------------------
# Worker processes


class WorkerPool:
    """Calls methods of BlockEncoder with many blocks, in `processes` processes, and gives the results in order.

    This process is one of them: it works instead of waiting, so workers that are slow to start cost nothing, and there is
    one process less in memory. Used as a context manager.
    """

    def __init__(self, corpus: Corpus, tokenizer: BPETokenizer, processes: int) -> None:
        self.processes = processes
        self.encoder = BlockEncoder(corpus, tokenizer)
        self._executor: ProcessPoolExecutor | None = None
        if processes > 1:
            context = multiprocessing.get_context("spawn")  # the one way that every system has
            # A queue sends from a thread of its own; as arguments the two would hold this process up until a worker reads them.
            start = context.Queue()
            start.cancel_join_thread()  # a worker that died before it read must not be waited for
            for _ in range(processes - 1):
                start.put((corpus, tokenizer))
            self._executor = ProcessPoolExecutor(processes - 1, context, initializer=_start_worker, initargs=(start,))

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def encode(self, tasks: Iterable[tuple[Block, Sequence[int]]]) -> Iterator[EncodedBlock]:
        """`tasks` are blocks with the positions of documents to leave out."""
        return self._in_order(BlockEncoder.encode, tasks)

    def digests(self, blocks: Iterable[Block]) -> Iterator[tuple[list[bytes], list[str]]]:
        return self._in_order(BlockEncoder.digests, ((block,) for block in blocks))

    def _in_order(self, method: Callable, tasks: Iterable[tuple]) -> Iterator[Any]:
        """A few tasks for each process are under way, so memory stays bounded. Raises UserError when a worker died."""
        pending: deque[Future] = deque()
        try:
            for task in tasks:
                pending.append(self._begin(method, task, pending))
                while pending and (pending[0].done() or len(pending) >= (TASKS_AHEAD + 1) * self.processes):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            what = "a worker process died (killed, or out of memory)"
            raise UserError(f"{what}; run the same command again, it continues; --workers 1 takes the least memory") from None

    def _begin(self, method: Callable, task: tuple, pending: Iterable[Future]) -> Future:
        """Gives a task to the workers, or does it here when they have enough."""
        if sum(not future.done() for future in pending) < TASKS_AHEAD * (self.processes - 1):
            return self._executor.submit(_in_worker, method, *task)
        future: Future = Future()
        try:
            future.set_result(method(self.encoder, *task))
        except Exception as error:
            future.set_exception(error)  # told in its turn: the first of several is the same with any number of workers
        return future


def make_pool(corpus: Corpus, tokenizer: BPETokenizer, workers: int | None) -> WorkerPool:
    """A pool of so many processes, or one a core where that is not said, as far as there is enough text for each."""
    return WorkerPool(corpus, tokenizer, min(workers or cpu_count(), max(1, corpus.bytes // PROCESS_BYTES)))


class _Worker:
    """What a worker process keeps between tasks."""

    encoder: BlockEncoder


def _start_worker(start: "multiprocessing.Queue[tuple[Corpus, BPETokenizer]]") -> None:
    start_worker()
    _Worker.encoder = BlockEncoder(*start.get())


def _in_worker(method: Callable, *task: Any) -> Any:
    return method(_Worker.encoder, *task)


# ----------------------------------------------------------------------------------------------------------------------
# Repeated documents


@dataclass
class Repeats:
    """Documents that repeat another one: their numbers in reading order, sorted, and the number of each block's first."""

    numbers: np.ndarray
    first_of_block: np.ndarray

    def in_block(self, block: int) -> np.ndarray:
        """Positions, within the block, of the documents to leave out."""
        first, last = self.first_of_block[block : block + 2]
        a, b = np.searchsorted(self.numbers, (first, last))
        return self.numbers[a:b] - first


_RECORD = np.dtype([("digest", "<u8", 2), ("order", "<i8")])
_TRAINING = 1 << 60  # added to a training document's number: of equal documents the one that is evaluated on stays


def find_repeats(results: Iterable[tuple[list[bytes], list[str]]], folder: Path) -> Repeats:
    """Which documents repeat an earlier one, from the digests of all blocks. Memory: a few bytes a repeat.

    Digests go to a file and are compared a slice at a time; all documents of one digest fall into the same slice.
    """
    path, firsts = folder / "digests.part", [0]
    with open(path, "wb") as file:
        for digests, splits in results:
            records = np.zeros(len(digests), _RECORD)
            records["digest"] = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
            records["order"] = firsts[-1] + np.arange(len(digests)) + np.array([_TRAINING * (s == "train") for s in splits])
            file.write(records.tobytes())
            firsts.append(firsts[-1] + len(digests))
    slices = 1 + firsts[-1] // (1 << 20)
    numbers = [_repeats_in_slice(path, s, slices) for s in range(slices)]
    path.unlink()
    return Repeats(np.sort(np.concatenate(numbers)), np.array(firsts))


def _repeats_in_slice(path: Path, s: int, slices: int) -> np.ndarray:
    chosen = [np.zeros(0, _RECORD)]
    with open(path, "rb") as file:
        while len(records := np.fromfile(file, _RECORD, 1 << 16)):
            chosen.append(records[records["digest"][:, 0] % slices == s])
    records = np.concatenate(chosen)
    digest = records["digest"]
    records = records[np.lexsort((records["order"], digest[:, 1], digest[:, 0]))]
    same = (records["digest"][1:] == records["digest"][:-1]).all(axis=1)
    return records["order"][1:][same] % _TRAINING


# ----------------------------------------------------------------------------------------------------------------------
# Appending, with a journal


@dataclass
class Totals:
    """What was counted over all blocks so far; adds up over journal lines."""

    stats: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # split -> source -> figures
    files: dict[str, Counter] = field(default_factory=dict)  # split -> documents per file
    counts: Counter = field(default_factory=Counter)
    one_pass: dict[str, int] = field(default_factory=dict)  # training tokens per source, before any were repeated

    def add(self, other: "Totals") -> None:
        for split, sources in other.stats.items():
            for source, figures in sources.items():
                add_figures(self.stats.setdefault(split, {}).setdefault(source, {}), figures)
        for split, files in other.files.items():
            self.files.setdefault(split, Counter()).update({int(file): n for file, n in files.items()})
        self.counts.update(other.counts)

    def split(self, name: str) -> dict[str, int]:
        """The figures of a split over all its sources."""
        figures: dict[str, int] = dict.fromkeys(FIGURES, 0)
        for source in self.stats.get(name, {}).values():
            add_figures(figures, source)
        return figures


FIGURES = ("tokens", "documents", "words", "characters", "source_bytes", "scored_bytes", "unk_tokens", "longest_document")


def add_figures(total: dict[str, int], more: dict[str, int]) -> None:
    for name, n in more.items():
        total[name] = max(total.get(name, 0), n) if name == "longest_document" else total.get(name, 0) + n


JOURNAL_LINE = {
    "since": int,
    "blocks": int,
    "sizes": dict.fromkeys(SPLITS, int),
    "sha256": dict.fromkeys(SPLITS, str),
    "stats": {str: {str: {str: int}}},
    "files": {str: {str: int}},
    "counts": {str: int},
}

# What is read of a finished meta.json.
PREPARED = {
    "dtype": ("uint16", "uint32"),
    "vocab_size": int,
    "settings": {"dedup": str},
    "splits": {s: {"file": str, "sha256": str, "top_files": {str: int}, **dict.fromkeys(FIGURES, int)} for s in SPLITS},
    "sources": {str: {"tokens": int, "share": float}},
    "counts": {str: int},
    "inputs": str,
    "fingerprint": str,
}


@dataclass
class _State:
    """How far the files are good: replaced as a whole after each block, so an interrupt never leaves it half changed."""

    blocks: int
    sizes: dict[str, int]  # bytes
    hashes: dict[str, Any]


class TokenWriter:
    """Appends encoded blocks to tokens/SPLIT.bin.part, and notes in tokens/journal.jsonl how far they are good.

    `key` names what the tokens are made from: a journal of another key is not continued. Used as a context manager; when
    the stage ends early the files stay for the next run.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.totals = Totals()
        self._journal_path = folder / "journal.jsonl"
        self._committed = time.monotonic()
        self._finishing = False  # from then on the files hold more than the journal should say

    def __enter__(self) -> "TokenWriter":
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = self._read_journal()
        self._take_back_renamed()
        self._state = self._verified_state(entries) or self._start_over()
        self._files = {split: open(self.part_path(split), "ab", buffering=0) for split in SPLITS}
        for split, file in self._files.items():
            file.truncate(self._state.sizes[split])
        self._journal = open(self._journal_path, "ab", buffering=0)
        self._since: tuple[int, list[tuple[int, Totals]]] = (self._state.blocks, [])
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None and not isinstance(error, OSError) and not self._finishing:
                self.commit()
        finally:
            for file in (*self._files.values(), self._journal):
                file.close()

    @property
    def blocks(self) -> int:
        """How many blocks, from the first on, are done with."""
        return self._state.blocks

    def part_path(self, split: str) -> Path:
        return self.folder / f"{split}.bin.part"

    def append(self, block: int, encoded: EncodedBlock) -> None:
        """Appends the tokens of block number `block`; all blocks before it are then done."""
        sizes, hashes = dict(self._state.sizes), dict(self._state.hashes)
        for split, ids in encoded.ids.items():
            data = memoryview(ids).cast("B")
            _write_all(self._files[split], data)
            sizes[split] += len(data)
            hashes[split] = hashes[split].copy()
            hashes[split].update(data)
        more = Totals({split: {encoded.source: f} for split, f in encoded.stats.items()}, encoded.files, encoded.counts)
        self.totals.add(more)
        self._since[1].append((block, more))
        self._state = _State(block + 1, sizes, hashes)
        if time.monotonic() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Makes all that was appended survive a power cut; the journal's line is written after the data is on the disk.

        An interrupt may come between any two statements, and this be called again. So a line says from which block on it
        counts: of two from the same block the later one holds.
        """
        for file in self._files.values():
            os.fsync(file.fileno())
        state, (since, counted) = self._state, self._since
        new = Totals()
        for block, more in counted:
            if block < state.blocks:
                new.add(more)
        line = {"since": since, "blocks": state.blocks, "sizes": state.sizes}
        line["sha256"] = {split: h.hexdigest() for split, h in state.hashes.items()}
        line |= {"stats": new.stats, "files": new.files, "counts": new.counts}
        self._journal.write(json.dumps(line).encode("utf-8") + b"\n")
        os.fsync(self._journal.fileno())
        self._since = (state.blocks, [])
        self._committed = time.monotonic()

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(self._state.sizes.values())

    def finish(self, corpus: Corpus, tokenizer: BPETokenizer) -> dict[str, dict[str, Any]]:
        """Gives the files their names; returns each split's figures. The caller writes meta.json, then calls `forget`."""
        self.commit()
        self._finishing = True
        (self.folder / "meta.json").unlink(missing_ok=True)  # the old one must not describe the new files
        if corpus.splitting["unit"] == "chunk":
            return cut_chunks(self.part_path("train"), self.totals, corpus, tokenizer)
        if corpus.weights:
            self._repeat_sources(corpus.weights, tokenizer)
        for split, file in self._files.items():
            os.fsync(file.fileno())
            file.close()
            os.replace(self.part_path(split), self.folder / f"{split}.bin")
        fsync_dir(self.folder)
        hashes = self._state.hashes
        return {s: {"file": f"{s}.bin", **self.totals.split(s), "sha256": hashes[s].hexdigest()} for s in SPLITS}

    def _repeat_sources(self, weights: dict[str, float], tokenizer: BPETokenizer) -> None:
        """Copies sources, which lie one after the other, behind the end of train until each has its share."""
        dtype = token_dtype(tokenizer.vocab_size)
        own = {name: dict(figures) for name, figures in self.totals.stats.get("train", {}).items()}
        self.totals.one_pass = {name: figures["tokens"] for name, figures in own.items()}
        start, repeated = 0, tokens_to_repeat(self.totals.one_pass, weights)
        require_free_space(self.folder, sum(repeated.values()) * dtype.itemsize, "repeating sources up to their weight")
        for name, extra in repeated.items():
            tokens = own[name]["tokens"]
            lengths = [tokens] * (extra // tokens)
            lengths.append(nearest_end(self.part_path("train"), dtype, tokenizer.eos_id, start, tokens, extra % tokens))
            for length in lengths:
                copied = self._copy_train(dtype, tokenizer.eos_id, start, length)
                scaled = {figure: n * length // tokens for figure, n in own[name].items()}
                scaled |= {"tokens": length, "documents": copied, "longest_document": own[name]["longest_document"]}
                self.totals.add(Totals({"train": {name: scaled}}))
            start += tokens

    def _copy_train(self, dtype: np.dtype, eos_id: int, start: int, length: int) -> int:
        """Appends a stretch of train to train; returns the number of documents in it."""
        documents, state = 0, self._state
        with open(self.part_path("train"), "rb") as file:
            file.seek(start * dtype.itemsize)
            while length:
                ids = np.fromfile(file, dtype, min(length, 1 << 20))
                _write_all(self._files["train"], memoryview(ids).cast("B"))
                state.hashes["train"].update(ids)
                documents += int(np.count_nonzero(ids == eos_id))
                length -= len(ids)
        return documents

    def forget(self) -> None:
        """Removes what only an interrupted run needs."""
        self._journal.close()
        self._journal_path.unlink()
        for file in self._files.values():
            file.close()
        for split in SPLITS:
            self.part_path(split).unlink(missing_ok=True)

    # Continuing

    def _read_journal(self) -> list[dict[str, Any]]:
        """The lines of a journal of this key, [] otherwise. A torn last line is left out."""
        try:
            lines = self._journal_path.read_bytes().split(b"\n")[:-1]
            entries = [json.loads(line) for line in lines]
        except (FileNotFoundError, ValueError, RecursionError):
            return []
        if not entries or entries[0] != {"key": self.key} or misfit(entries[1:], [JOURNAL_LINE]):
            return []
        holding: list[dict[str, Any]] = []
        for entry in entries[1:]:
            while holding and holding[-1]["since"] >= entry["since"]:
                holding.pop()
            holding.append(entry)
        return holding

    def _take_back_renamed(self) -> None:
        """A run killed between the first rename and meta.json: its files go back to their unfinished names."""
        if self._journal_path.exists() and not (self.folder / "meta.json").exists():
            for split in SPLITS:
                path = self.folder / f"{split}.bin"
                if path.exists() and not self.part_path(split).exists():
                    os.replace(path, self.part_path(split))

    def _verified_state(self, entries: list[dict[str, Any]]) -> _State | None:
        """The last state whose bytes are all there and hash as noted, None where there is none."""
        if not entries:
            return None
        last = entries[-1]
        hashes = {split: _hash_start(self.part_path(split), last["sizes"][split]) for split in SPLITS}
        if any(h is None or h.hexdigest() != last["sha256"][split] for split, h in hashes.items()):
            return None
        for entry in entries:
            self.totals.add(Totals(entry["stats"], entry["files"], Counter(entry["counts"])))
        with open(self._journal_path, "r+b") as journal:  # without a torn last line, which would run into the next
            journal.truncate(journal.read().rfind(b"\n") + 1)
        return _State(last["blocks"], dict(last["sizes"]), hashes)

    def _start_over(self) -> _State:
        for split in SPLITS:
            self.part_path(split).unlink(missing_ok=True)
        self._journal_path.write_bytes(json.dumps({"key": self.key}).encode("utf-8") + b"\n")
        return _State(0, dict.fromkeys(SPLITS, 0), {split: hashlib.sha256() for split in SPLITS})


def tokens_to_repeat(tokens: dict[str, int], weights: dict[str, float]) -> dict[str, int]:
    """How many tokens of each source to read again so that shares are as weighted and every source is read at least once.

    Sources of 300 and 100 tokens, weighted 1 and 1, repeat 0 and 200.
    """
    scale = max(n / weights[name] for name, n in tokens.items())
    return {name: round(weights[name] * scale) - n for name, n in tokens.items()}


def nearest_end(path: Path, dtype: np.dtype, eos_id: int, start: int, tokens: int, wanted: int) -> int:
    """The document end nearest to `wanted` tokens behind `start`, 0 where there is none within some millions."""
    reach = 1 << 22
    low, high = max(0, wanted - reach), min(tokens, wanted + reach)
    with open(path, "rb") as file:
        file.seek((start + low) * dtype.itemsize)
        ends = low + 1 + np.flatnonzero(np.fromfile(file, dtype, high - low) == eos_id)
    ends = np.concatenate(([0], ends))
    return int(ends[np.abs(ends - wanted).argmin()])


def chunk_split(corpus: Corpus, number: int) -> str:
    """Which split a whole chunk of the token stream goes to."""
    return corpus.split_of_hash(document_hash(f"chunk {number}"))


def cut_chunks(stream: Path, totals: Totals, corpus: Corpus, tokenizer: BPETokenizer) -> dict[str, dict[str, Any]]:
    """Deals a token stream out to the splits in chunks of equal length, by a hash of the chunk's number.

    A short last chunk goes to training. Figures of text are shared out in proportion, since no document belongs to one split.
    """
    dtype, length = token_dtype(tokenizer.vocab_size), corpus.splitting["chunk_tokens"]
    counted = {split: Counter(tokens=0, documents=0) for split in SPLITS}
    hashes = {split: hashlib.sha256() for split in SPLITS}
    number = 0
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open(stream, "rb"))
        files = {split: stack.enter_context(atomic_write(stream.with_name(f"{split}.bin"))) for split in SPLITS}
        while len(ids := np.fromfile(source, dtype, length * max(1, (1 << 20) // length))):
            chunks = [ids[at : at + length] for at in range(0, len(ids), length)]
            for chunk in chunks:
                split = chunk_split(corpus, number) if len(chunk) == length else "train"
                files[split].write(chunk)
                hashes[split].update(chunk)
                counted[split].update(tokens=len(chunk), documents=int(np.count_nonzero(chunk == tokenizer.eos_id)))
                number += 1
    whole = totals.split("train")
    return {
        split: {
            "file": f"{split}.bin",
            **{figure: n * counted[split]["tokens"] // max(1, whole["tokens"]) for figure, n in whole.items()},
            **counted[split],
            "longest_document": whole["longest_document"],
            "sha256": hashes[split].hexdigest(),
        }
        for split in SPLITS
    }


def source_figures(totals: Totals, corpus: Corpus) -> dict[str, dict[str, Any]]:
    """Training tokens of each source of a corpus that has several; of a mix also shares and passes."""
    tokens = {name: figures["tokens"] for name, figures in totals.stats.get("train", {}).items()}
    if list(tokens) in ([], [""]):
        return {}
    everything, figures = sum(tokens.values()), {}
    for name, n in tokens.items():
        figures[name] = {"tokens": n, "share": n / everything}
        if corpus.weights:
            figures[name] |= {"asked": corpus.weights[name], "passes": n / totals.one_pass[name]}
    return figures


def _write_all(file: IO[bytes], data: memoryview) -> None:
    """An unbuffered write may take only a part, when the disk fills up for one."""
    while len(data):
        data = data[file.write(data) :]


def _hash_start(path: Path, size: int) -> Any | None:
    """sha256 over the first `size` bytes, None where there are fewer."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while size > 0 and (data := file.read(min(size, 1 << 20))):
                digest.update(data)
                size -= len(data)
    except FileNotFoundError:
        return None
    return digest if size == 0 else None
