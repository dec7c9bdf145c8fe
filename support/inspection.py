"""Looking into finished token files: proof that they are what meta.json says and that the splits are clean, and documents."""

import argparse
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config import Config
from corpus import SPLITS, Block, Corpus, disk_bytes
from support.common import Progress, UserError, misfit, read_json, sha256_file
from support.encoding import PREPARED, Repeats, WorkerPool, chunk_split, find_repeats, make_pool, token_dtype, without
from tokenizer import BPETokenizer

READ_BYTES = 8 << 20
SAMPLED_BLOCKS = 16
SAMPLED_DOCUMENTS = 8  # of a block and split
SHOWN_TOKENS = 200


# ----------------------------------------------------------------------------------------------------------------------
# Reading token files a piece at a time


def read_tokens(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The ids of a file, some megabytes at a time."""
    with open(path, "rb") as file:
        while len(ids := np.fromfile(file, dtype, READ_BYTES // dtype.itemsize)):
            yield ids


def read_dealt(folder: Path, dtype: np.dtype, corpus: Corpus) -> Iterator[np.ndarray]:
    """The stream that a corpus split by chunks was dealt out from, some megabytes at a time: the inverse of `cut_chunks`."""
    length = corpus.splitting["chunk_tokens"]
    gathered: list[np.ndarray] = []
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "rb")) for split in SPLITS}
        for number in itertools.count():
            gathered.append(np.fromfile(files[chunk_split(corpus, number)], dtype, length))
            if len(gathered[-1]) < length:
                break
            if len(gathered) * length * dtype.itemsize >= READ_BYTES:
                yield np.concatenate(gathered)
                gathered = []
        yield np.concatenate([*gathered, np.fromfile(files["train"], dtype)])  # a short last chunk is there, whatever its split


def documents_at(stream: Iterable[np.ndarray], eos_id: int, wanted: Sequence[int]) -> dict[int, np.ndarray]:
    """The ids, separators included, of the documents with the given numbers, in one pass over a stream of ids.

    Numbers of documents that the stream does not have are left out.
    """
    left, found = sorted(set(wanted), reverse=True), {}
    number, rest = 0, np.zeros(0, np.uint16)
    for chunk in stream:
        ids = np.concatenate((rest, chunk))
        ends = np.flatnonzero(ids == eos_id) + 1
        starts = np.concatenate(([0], ends))
        while left and left[-1] < number + len(ends):
            n = left.pop()
            found[n] = ids[starts[n - number] : ends[n - number]].copy()
        number += len(ends)
        rest = ids[starts[-1] :]
        if not left:
            break
    return found


# ----------------------------------------------------------------------------------------------------------------------
# --check


@dataclass
class _Sample:
    """A block drawn at random, and how many documents of each split come before it."""

    block: Block
    number: int
    before: dict[str, int]


def _read_meta(config: Config) -> dict[str, Any]:
    path, command = config.tokens_dir / "meta.json", config.command("prepare_data.py")
    meta = read_json(path, command)
    if (problem := misfit(meta, PREPARED)) is not None:
        raise UserError(f"{path} is damaged ({problem}); make it again with: {command}")
    return meta


def check_tokens(config: Config, corpus: Corpus, tokenizer: BPETokenizer, args: argparse.Namespace) -> int:
    """Prints what was verified and what differs; returns 1 if anything does."""
    meta = _read_meta(config)
    differences = [*_check_inputs(config, corpus, tokenizer, meta), *_check_files(config, tokenizer, meta)]
    if not differences:
        with make_pool(corpus, tokenizer, args.workers) as pool:
            differences += _check_documents(config, corpus, tokenizer, meta, pool)
    for line in differences:
        print(f"✗ {line}")
    print(f"{len(differences)} differences" if differences else f"✓ {config.tokens_dir} is what meta.json says")
    return 1 if differences else 0


def _check_inputs(config: Config, corpus: Corpus, tokenizer: BPETokenizer, meta: dict[str, Any]) -> Iterator[str]:
    for path, digest in corpus.digests():
        if sha256_file(path) != digest:
            yield f"{path} has changed since the corpus was made"
    if meta.get("raw_fingerprint") != corpus.fingerprint:
        yield f"the tokens were made from another state of {config.raw_dir}"
    if meta.get("tokenizer_sha256") != tokenizer.sha256:
        yield f"the tokens were made with another tokenizer than {config.tokenizer_path}"
    print(f"raw files hashed, {tokenizer.kind} tokenizer of {tokenizer.vocab_size:,} tokens compared")


def _check_files(config: Config, tokenizer: BPETokenizer, meta: dict[str, Any]) -> Iterator[str]:
    """Sizes, hashes, ids and separators of the token files."""
    totals: Counter = Counter()
    for name in SPLITS:
        path, split = config.tokens_dir / f"{name}.bin", meta["splits"][name]
        if not path.exists():
            yield f"{path} is missing"
            continue
        if (found := sha256_file(path)) != split["sha256"]:
            yield f"{path} has sha256 {found[:12]}, meta.json says {split['sha256'][:12]}"
        counted = _count_tokens(path, tokenizer)
        totals.update(counted)
        yield from _compare_counts(path, split, counted, tokenizer, straddling="chunk_tokens" in meta["settings"])
    documents = sum(split["documents"] for split in meta["splits"].values())
    if totals["bos"] != documents:
        yield f"there are {totals['bos']:,} documents by their first separators, meta.json says {documents:,}"
    print(f"{totals['tokens']:,} tokens and {totals['eos']:,} documents counted in the files")


def _count_tokens(path: Path, tokenizer: BPETokenizer) -> Counter:
    counted = Counter(tokens=0, bos=0, eos=0, unfit=0)
    for ids in read_tokens(path, token_dtype(tokenizer.vocab_size)):
        counted["tokens"] += len(ids)
        counted["bos"] += int(np.count_nonzero(ids == tokenizer.bos_id))
        counted["eos"] += int(np.count_nonzero(ids == tokenizer.eos_id))
        counted["unfit"] += int(np.count_nonzero(ids >= tokenizer.vocab_size))
    return counted


def _compare_counts(
    path: Path, split: dict[str, Any], counted: Counter, tokenizer: BPETokenizer, straddling: bool
) -> Iterator[str]:
    if counted["tokens"] != split["tokens"]:
        yield f"{path} has {counted['tokens']:,} tokens, meta.json says {split['tokens']:,}"
    if counted["unfit"]:
        yield f"{path} has {counted['unfit']:,} ids that the vocabulary of {tokenizer.vocab_size:,} tokens lacks"
    if counted["eos"] != split["documents"]:
        yield f"{path} has {counted['eos']:,} documents by their last separators, meta.json says {split['documents']:,}"
    if counted["bos"] != counted["eos"] and not straddling:
        yield f"{path} has {counted['bos']:,} <BOS> but {counted['eos']:,} <EOS>"


def _check_documents(
    config: Config, corpus: Corpus, tokenizer: BPETokenizer, meta: dict[str, Any], pool: WorkerPool
) -> Iterator[str]:
    """No document in two splits, and a random sample decodes to its text. Reads the whole corpus once or twice.

    Where splits are chunks, documents straddle them; the sample then is of the stream that was dealt out.
    """
    repeats = None
    if meta["settings"]["dedup"] == "exact":
        repeats = find_repeats(pool.digests(corpus.blocks()), config.tokens_dir)
    held_out: dict[str, set[bytes]] = {"val": set(), "test": set()}
    samples: list[_Sample] = []
    before = dict.fromkeys(SPLITS, 0)
    for number, (block, digests, splits) in enumerate(_read_all(corpus, pool, repeats)):
        _draw(samples, _Sample(block, number, dict(before)), config.run.seed)
        for digest, split in zip(digests, splits, strict=True):
            before[split] += 1
            if split != "train":
                held_out[split].add(digest)
    if corpus.splitting["unit"] == "chunk":
        print("splits are chunks: documents straddle them, so that no document is in two splits cannot be shown")
    else:
        yield from _shared_documents(corpus, pool, repeats, held_out)
    yield from _check_decoding(config, corpus, tokenizer, meta, samples, repeats)


def _shared_documents(
    corpus: Corpus, pool: WorkerPool, repeats: Repeats | None, held_out: dict[str, set[bytes]]
) -> Iterator[str]:
    shared = dict.fromkeys((("train", "val"), ("train", "test")), 0)
    for _, digests, splits in _read_all(corpus, pool, repeats):
        for digest, split in zip(digests, splits, strict=True):
            for other in ("val", "test"):
                shared["train", other] += split == "train" and digest in held_out[other]
    shared["val", "test"] = len(held_out["val"] & held_out["test"])
    for (one, other), n in shared.items():
        if n:
            yield f"{n:,} documents are in {one} and in {other} as well; leave them out of training with --dedup exact"


def _read_all(
    corpus: Corpus, pool: WorkerPool, repeats: Repeats | None
) -> Iterator[tuple[Block, Sequence[bytes], Sequence[str]]]:
    """Each block with its documents' digests and splits, repeats left out."""
    blocks, kept = itertools.tee(corpus.blocks())
    with Progress(corpus.bytes, "reading documents", "bytes", scale=True) as progress:
        for number, (digests, splits) in enumerate(pool.digests(blocks)):
            block = next(kept)
            if repeats is not None:
                dropped = set(repeats.in_block(number).tolist())
                stay = [n for n in range(len(digests)) if n not in dropped]
                digests, splits = [digests[n] for n in stay], [splits[n] for n in stay]
            yield block, digests, splits
            progress.update(disk_bytes(block))


def _draw(samples: list[_Sample], new: _Sample, seed: int) -> None:
    """Reservoir sampling: after n blocks each is among the samples with the same chance."""
    at = random.Random(f"{seed}/{new.number}").randint(0, new.number)
    if len(samples) < SAMPLED_BLOCKS:
        samples.append(new)
    elif at < SAMPLED_BLOCKS:
        samples[at] = new


def _check_decoding(
    config: Config,
    corpus: Corpus,
    tokenizer: BPETokenizer,
    meta: dict[str, Any],
    samples: list[_Sample],
    repeats: Repeats | None,
) -> Iterator[str]:
    texts = _sampled_texts(corpus, samples, repeats, config.run.seed)
    dtype, chunks = token_dtype(tokenizer.vocab_size), corpus.splitting["unit"] == "chunk"
    documents = {split: figures["documents"] for split, figures in meta["splits"].items()}
    if chunks:
        documents = {"train": sum(documents.values())}
    compared = unknown = 0
    for split, most in documents.items():
        expected = {n: t for (s, n), t in texts.items() if s == split and n < most}
        path = config.tokens_dir if chunks else config.tokens_dir / f"{split}.bin"
        stream = read_dealt(path, dtype, corpus) if chunks else read_tokens(path, dtype)
        found = documents_at(stream, tokenizer.eos_id, list(expected))
        for n, text in expected.items():
            ids = found[n].tolist()
            compared += 1
            if tokenizer.unk_id is not None and tokenizer.unk_id in ids:
                unknown += 1  # an unseen character decodes to nothing: compare the ids instead
                same = ids == list(tokenizer.wrap_document(tokenizer.encode(text)))
            else:
                same = tokenizer.decode(ids) == tokenizer.scored_text(text)
            if not same:
                yield f"document {n:,} of {path} does not decode to its text, which begins {text[:60]!r}"
    print(f"{compared:,} random documents decoded and compared with their text ({unknown:,} with <UNK>, by their ids)")


def _sampled_texts(corpus: Corpus, samples: list[_Sample], repeats: Repeats | None, seed: int) -> dict[tuple[str, int], str]:
    """Some documents of each sampled block, by split and number."""
    texts = {}
    for sample in samples:
        documents = corpus.read(sample.block)
        if repeats is not None:
            documents = without(documents, set(repeats.in_block(sample.number).tolist()))
        for split in SPLITS:
            n = len(documents.texts[split])
            for k in random.Random(f"{seed}/{sample.number}").sample(range(n), min(n, SAMPLED_DOCUMENTS)):
                texts[split, sample.before[split] + k] = documents.texts[split][k]
    return texts


# ----------------------------------------------------------------------------------------------------------------------
# --show


def show_documents(config: Config, tokenizer: BPETokenizer, count: int) -> int:
    """Prints random training documents, a `|` between tokens, long ones shortened."""
    meta = _read_meta(config)
    split = meta["splits"]["train"]
    chosen = random.Random(config.run.seed).sample(range(split["documents"]), min(count, split["documents"]))
    stream = read_tokens(config.tokens_dir / split["file"], np.dtype(meta["dtype"]).newbyteorder("<"))
    for n, ids in sorted(documents_at(stream, tokenizer.eos_id, chosen).items()):
        print(f"document {n:,} of train, {len(ids):,} tokens:\n{visible(tokenizer, ids.tolist())}\n")
    return 0


def visible(tokenizer: BPETokenizer, ids: Sequence[int]) -> str:
    """`<BOS>|The |cat|<EOS>`; line ends and other controls as escapes, the middle of a long document left out."""
    pieces = [_printable(tokenizer.decode([i], special=True)) for i in ids]
    if len(pieces) > SHOWN_TOKENS:
        left_out = f" ... {len(pieces) - SHOWN_TOKENS:,} tokens ... "
        pieces = [*pieces[: SHOWN_TOKENS // 2], left_out, *pieces[-SHOWN_TOKENS // 2 :]]
    return "|".join(pieces)


def _printable(piece: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in piece)
