"""Stage 3 of 9: encodes the corpus with the tokenizer into flat files of token ids, one per split.

Reads   data/CORPUS/raw/ (stage 1) and data/CORPUS/tokenizer.json (stage 2)
Writes  data/CORPUS/tokens/train.bin, val.bin, test.bin (little-endian uint16, or uint32 for a vocabulary above 65,536; each
        document is <BOS> ... <EOS>) and meta.json

    uv run python prepare_data.py --workers 4
    uv run python prepare_data.py --check              proves that the files are what meta.json says and the splits are clean

Seconds for 60 MB of text. Disk: about half a byte per byte of text. Memory: below 600 MB with two workers, whatever the size of
the corpus; for a document of more than 8 MB ten times its size on top. An interrupted run continues where it was.
"""

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import Config, parse_config
from support.common import (
    FolderLock,
    Progress,
    UserError,
    fingerprint,
    misfit,
    read_json,
    require_free_space,
    run_main,
    write_json,
)

if TYPE_CHECKING:
    from corpus import Block, Corpus
    from support.encoding import EncodedBlock, Repeats, TokenWriter, WorkerPool
    from tokenizer import BPETokenizer

USES = ("run.corpus", "run.variant", "run.data_dir", "run.seed", "model.block_size")
# For the disk estimate, both on the safe side: bytes of text in a byte of a compressed file, and bytes of text a token.
EXPANSION = {".gz": 4.0, ".parquet": 3.0}
LEAST_BYTES_PER_TOKEN = 2.5
MANY_PASSES = 4  # repeating a source more often than this is worth little (Muennighoff et al., 2023)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, metavar="N", help="most processes that encode; fewer for little text [one per core]"
    )
    parser.add_argument("--max-docs", type=int, metavar="N", help="take at most N documents of each split [all]")
    parser.add_argument("--dedup", choices=("off", "exact"), default="off", help="drop documents that repeat another [off]")
    parser.add_argument("--mix", metavar="NAME:WEIGHT,...", help="make --corpus a mix of other corpora by share of tokens")
    parser.add_argument("--check", action="store_true", help="verify finished files instead; exit code 1 with what differs")
    parser.add_argument("--show", type=int, metavar="N", help="print N random documents of finished files as tokens instead")


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=USES, add_arguments=add_arguments)
    for name in ("workers", "max_docs", "show"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, but it must be at least 1")
    from support.manifest import load_corpus, make_mix

    if args.mix is not None:
        make_mix(config, args.mix)
    corpus = load_corpus(config)
    tokenizer = load_tokenizer(config, corpus)
    if args.check or args.show:
        from support.inspection import check_tokens, show_documents

        return check_tokens(config, corpus, tokenizer, args) if args.check else show_documents(config, tokenizer, args.show)
    with FolderLock(config.tokens_dir, f"the token folder {config.tokens_dir}"):
        meta = current_meta(config, key_of(corpus, tokenizer, args))
        if meta is None:
            meta = prepare(config, corpus, tokenizer, args)
            print(f"wrote {config.tokens_dir}")
        else:
            print(f"{config.tokens_dir} is current (same text, tokenizer and settings): nothing to do")
    print_summary(config, corpus, meta)
    if argv is None:  # else another program goes on by itself
        print("next: " + config.command("train.py"))
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# What the tokens are made from


def load_tokenizer(config: Config, corpus: "Corpus") -> "BPETokenizer":
    """The tokenizer of stage 2. Raises UserError, naming the command, unless it was learnt from this very corpus."""
    from tokenizer import BPETokenizer

    command = config.command("train_tokenizer.py")
    if not config.tokenizer_path.exists():
        raise UserError(f"{config.tokenizer_path} is missing; run: {command}")
    meta = read_json(config.tokenizer_meta_path, command)
    tokenizer = BPETokenizer.load(config.tokenizer_path)
    if meta.get("tokenizer_sha256") != tokenizer.sha256:
        raise UserError(f"{config.tokenizer_path} is not the one {config.tokenizer_meta_path.name} describes; run: {command}")
    # GPT-2's vocabulary is made from no corpus of ours, so it fits every one.
    if tokenizer.kind != "gpt2" and meta.get("raw_fingerprint") != corpus.fingerprint:
        raise UserError(f"{config.tokenizer_path} was learnt from another state of {config.raw_dir}; run: {command}")
    return tokenizer


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the tokens beside text and tokenizer; the number of workers does not."""
    return {"max_docs": args.max_docs, "dedup": args.dedup}


def key_of(corpus: "Corpus", tokenizer: "BPETokenizer", args: argparse.Namespace) -> str:
    from corpus import BLOCK_BYTES

    return fingerprint([corpus.fingerprint, tokenizer.sha256, settings_of(args), BLOCK_BYTES])


def current_meta(config: Config, key: str) -> dict[str, Any] | None:
    """meta.json, when the finished files were made from the same inputs and are whole."""
    from support.encoding import PREPARED, token_dtype

    try:
        meta = read_json(config.tokens_dir / "meta.json", "")
        if misfit(meta, PREPARED) is not None or meta["inputs"] != key:
            return None
        size = token_dtype(meta["vocab_size"]).itemsize
        whole = all((config.tokens_dir / s["file"]).stat().st_size == s["tokens"] * size for s in meta["splits"].values())
    except (UserError, KeyError, OSError):
        return None
    return meta if whole else None


# ----------------------------------------------------------------------------------------------------------------------
# Encoding


def prepare(config: Config, corpus: "Corpus", tokenizer: "BPETokenizer", args: argparse.Namespace) -> dict[str, Any]:
    """Encodes all splits, or what an interrupted run left to do; writes meta.json and returns it."""
    from support.encoding import TokenWriter, find_repeats, make_pool, token_dtype

    key = key_of(corpus, tokenizer, args)
    dtype = token_dtype(tokenizer.vocab_size)
    with TokenWriter(config.tokens_dir, key) as writer:
        done = sum(writer.totals.split(split)["documents"] for split in corpus.documents)
        if writer.blocks:
            print(f"continuing an interrupted run: {done:,} documents in {writer.blocks:,} blocks are kept")
        needed = text_bytes(corpus) / LEAST_BYTES_PER_TOKEN * dtype.itemsize - writer.size
        require_free_space(config.tokens_dir, max(0, round(needed)), "the token files")
        with make_pool(corpus, tokenizer, args.workers) as pool:
            print(f"encoding {corpus.bytes / 1e6:,.1f} MB, processes: {pool.processes}", flush=True)
            repeats = find_repeats(pool.digests(corpus.blocks()), config.tokens_dir) if args.dedup == "exact" else None
            encode_all(corpus, pool, writer, repeats, args.max_docs)
        splits = writer.finish(corpus, tokenizer)
        meta = meta_of(config, corpus, tokenizer, args, splits, writer)
        write_json(config.tokens_dir / "meta.json", meta)
        writer.forget()
    return meta


def text_bytes(corpus: "Corpus") -> float:
    """About how many bytes of text the files hold."""
    sizes = zip(corpus.paths, corpus.sizes, strict=True)
    return sum(size * EXPANSION.get(path.suffix.lower(), 1.0) for path, size in sizes)


class Tasks:
    """The blocks still to be encoded, for the pool to take; remembers those under way for whoever takes the results."""

    def __init__(self, corpus: "Corpus", first: int, repeats: "Repeats | None", is_full: Any, progress: Progress) -> None:
        self.corpus, self.first, self.repeats, self.is_full, self.progress = corpus, first, repeats, is_full, progress
        self.under_way: deque[tuple[int, Block, Sequence[int]]] = deque()

    def __iter__(self) -> Iterator[tuple["Block", Sequence[int]]]:
        from corpus import disk_bytes

        for number, block in enumerate(self.corpus.blocks()):
            if number < self.first or self.is_full(self.corpus.files[block[0].file].split):
                self.progress.update(disk_bytes(block))
                continue
            dropped = () if self.repeats is None else self.repeats.in_block(number).tolist()
            self.under_way.append((number, block, dropped))
            yield block, dropped


def encode_all(
    corpus: "Corpus", pool: "WorkerPool", writer: "TokenWriter", repeats: "Repeats | None", max_docs: int | None
) -> None:
    """Appends every block that `writer` does not hold yet, in order."""
    from corpus import disk_bytes

    room = Room(writer, max_docs)
    with Progress(corpus.bytes, "encoding", "bytes", scale=True) as progress:
        tasks = Tasks(corpus, writer.blocks, repeats, room.is_full, progress)
        for encoded in pool.encode(tasks):
            number, block, dropped = tasks.under_way.popleft()
            # What workers encoded ahead of a limit depends on their number and speed, and must not count.
            if not room.is_full(corpus.files[block[0].file].split):
                if room.exceeded_by(encoded):
                    encoded = pool.encoder.encode(block, dropped, room.left())
                writer.append(number, encoded)
            progress.update(disk_bytes(block), note=f"{writer.size // pool.encoder.dtype.itemsize:,} tokens")


class Room:
    """How many more documents each split may take under --max-docs."""

    def __init__(self, writer: "TokenWriter", max_docs: int | None) -> None:
        self.writer, self.max_docs = writer, max_docs

    def left(self) -> dict[str, int]:
        from corpus import SPLITS

        return {split: self.max_docs - self.writer.totals.split(split)["documents"] for split in SPLITS}

    def is_full(self, split: str) -> bool:
        """Whether a block of documents of `split` (hash: of any) can be left out."""
        if self.max_docs is None:
            return False
        left = self.left()
        return left[split] <= 0 if split in left else max(left.values()) <= 0

    def exceeded_by(self, encoded: "EncodedBlock") -> bool:
        if self.max_docs is None:
            return False
        left = self.left()
        return any(figures["documents"] > left[split] for split, figures in encoded.stats.items())


# ----------------------------------------------------------------------------------------------------------------------
# What is kept and what is shown


def meta_of(
    config: Config,
    corpus: "Corpus",
    tokenizer: "BPETokenizer",
    args: argparse.Namespace,
    splits: dict[str, dict[str, Any]],
    writer: "TokenWriter",
) -> dict[str, Any]:
    from support.encoding import source_figures, token_dtype

    for name, split in splits.items():
        top = writer.totals.files.get(name, {})
        split["top_files"] = {str(corpus.paths[file]): top[file] for file in sorted(top, key=lambda f: (-top[f], f))[:3]}
    chunking = {"chunk_tokens": n} if (n := corpus.splitting.get("chunk_tokens")) else {}
    content = {
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_kind": tokenizer.kind,
        "tokenizer_sha256": tokenizer.sha256,
    }
    return {
        "format": 1,
        "corpus": config.run.corpus,
        **content,
        "raw_fingerprint": corpus.fingerprint,
        "settings": {**settings_of(args), **chunking},
        "splits": splits,
        "sources": source_figures(writer.totals, corpus),
        "counts": dict(writer.totals.counts),
        "inputs": key_of(corpus, tokenizer, args),
        "fingerprint": fingerprint([content, {name: split["sha256"] for name, split in splits.items()}]),
    }


def print_summary(config: Config, corpus: "Corpus", meta: dict[str, Any]) -> None:
    from support.manifest import split_notes

    for name, split in meta["splits"].items():
        print(split_line(name, split))
        files = ", ".join(f"{Path(path).name} ({n:,})" for path, n in split["top_files"].items())
        if files:
            print(f"       most documents from {files}")
    for name, source in meta["sources"].items():
        print(source_line(name, source))
    for what, n in meta["counts"].items():
        print(f"{what}: {n:,}")
    for line in (*split_notes(corpus), *too_short(config, meta)):
        print(line)
    total = sum(split["tokens"] for split in meta["splits"].values())
    print(f"{config.tokens_dir}: {total:,} tokens, {meta['dtype']}, fingerprint {meta['fingerprint'][:12]}")


def split_line(name: str, split: dict[str, Any]) -> str:
    tokens = split["tokens"]
    parts = [
        f"{name:5}  {split['documents']:,} documents",
        f"{tokens:,} tokens",
        f"{split['words']:,} words",
        f"{split['source_bytes']:,} bytes",
        f"{split['characters'] / max(1, tokens):.3f} characters per token",
        f"{100 * split['unk_tokens'] / max(1, tokens):.4f} % <UNK>",
        f"longest document {split['longest_document']:,} tokens",
    ]
    return ", ".join(parts)


def source_line(name: str, source: dict[str, Any]) -> str:
    line = f"source {name}: {source['tokens']:,} training tokens, {100 * source['share']:.2f} %"
    if "asked" in source:
        line += f" ({100 * source['asked']:.2f} % asked), {source['passes']:.2f} passes"
        if source["passes"] > MANY_PASSES:
            line += f" (warning: beyond {MANY_PASSES} passes little more is learnt)"
    return line


def too_short(config: Config, meta: dict[str, Any]) -> Iterator[str]:
    """A line for each split that has not one training window, with two ways out."""
    needed = config.model.block_size + 1
    for name in ("train", "val"):
        tokens = meta["splits"][name]["tokens"]
        if tokens < needed:
            share = " (or a larger --val-fraction)" if name == "val" and meta["splits"]["train"]["tokens"] > needed else ""
            shorter = f", or train with --block-size {tokens - 1} or less" if tokens > 1 else ""
            ways = f"give stage 1 more text{share}{shorter}"
            yield f"warning: the {name} split has {tokens:,} tokens, but a window needs {needed:,}; {ways}"


if __name__ == "__main__":
    run_main(main)
