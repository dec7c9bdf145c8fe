"""Stage 2 of 9: learns a BPE vocabulary from the corpus: its training documents, or a seeded sample of them.

Reads   data/CORPUS/raw/ (stage 1)
Writes  data/CORPUS/tokenizer.json and, beside it, tokenizer_meta.json

    uv run python train_tokenizer.py --vocab-size 16384

A few seconds for 60 MB of text on two cores. With --tokenizer-kind gpt2 nothing is learnt: OpenAI's vocabulary is fetched, or
read with --archive from a folder or zip that holds vocab.bpe and encoder.json.
"""

import argparse
import dataclasses
import hashlib
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import Config, parse_config
from support.common import FolderLock, Progress, UserError, read_json, run_main, sha256_file, write_json

if TYPE_CHECKING:
    from corpus import Corpus
    from tokenizer import BPETokenizer

USES = ("run.corpus", "run.variant", "run.data_dir", "run.seed", "tokenizer")
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
UNPACKED_KINDS = ("wikitext", "text")  # files that are text as they lie on the disk
SUMMARY_BYTES = 4_000_000  # held-out text that the figures printed at the end are measured on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--archive", metavar="FILE", help="gpt2: a folder or zip with vocab.bpe and encoder.json, instead of fetching them"
    )


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=USES, add_arguments=add_arguments)
    from support.manifest import load_corpus

    corpus = load_corpus(config)
    if args.archive is not None and config.tokenizer.tokenizer_kind != "gpt2":
        raise UserError("--archive is for --tokenizer-kind gpt2; the other kinds are learnt from the corpus")
    with FolderLock(config.tokenizer_path.parent, f"the tokenizer in {config.tokenizer_path.parent}"):
        if is_current(config, corpus):
            print(f"{config.tokenizer_path} is current: same corpus, same settings")
        else:
            print_summary(config, corpus, make_tokenizer(config, corpus, args.archive))
    if argv is None:  # else another program goes on by itself
        print("next: " + config.command("prepare_data.py"))
    return 0


def make_tokenizer(config: Config, corpus: "Corpus", archive: str | None) -> "BPETokenizer":
    """Learns or fetches the tokenizer, and writes both files."""
    if config.tokenizer.tokenizer_kind == "gpt2":
        tokenizer, sample = gpt2_tokenizer(config, archive), None
    else:
        sample = Sample(corpus, config.run.seed, round(config.tokenizer.sample_mb * 1e6))
        tokenizer = learn(config, sample)
    # The meta file goes first and comes back last: a stage killed between never leaves it beside another tokenizer.
    config.tokenizer_meta_path.unlink(missing_ok=True)
    tokenizer.save(config.tokenizer_path)
    write_json(config.tokenizer_meta_path, meta_of(config, corpus, tokenizer, sample))
    return tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# Learning


class Sample:
    """The training documents with the lowest sha256(seed, text), up to `limit_bytes` of UTF-8; a smaller corpus is used whole.

    Which documents they are depends on the seed and the documents alone, not on their order. Equal documents are all in or
    all out; the lowest one is always in. `documents` and `bytes` are known after the sample was read once.
    """

    def __init__(self, corpus: "Corpus", seed: int, limit_bytes: int) -> None:
        self.corpus, self.seed = corpus, seed
        self.total_documents = corpus.documents["train"]
        self.highest = self._highest_hash(limit_bytes)
        self.documents = self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        self.documents = self.bytes = 0
        with Progress(self.total_documents, "reading", "documents", scale=True) as progress:
            for text in self.corpus.iter_documents("train"):
                if self.highest is None or self._hash(text) <= self.highest:
                    self.documents += 1
                    self.bytes += utf8_length(text)
                    yield text
                progress.update()

    def _highest_hash(self, limit_bytes: int) -> int | None:
        """The highest hash in the sample, None where every document is in it."""
        plain = all(file.kind in UNPACKED_KINDS for file in self.corpus.files)
        if plain and self.corpus.bytes <= limit_bytes:
            return None  # no need to read everything twice: text takes no more bytes than its files
        hashes, sizes = array("Q"), array("Q")
        with Progress(self.total_documents, "choosing the sample", "documents", scale=True) as progress:
            for text in self.corpus.iter_documents("train"):
                hashes.append(self._hash(text))
                sizes.append(utf8_length(text))
                progress.update()
        return highest_within(hashes, sizes, limit_bytes)

    def _hash(self, text: str) -> int:
        digest = hashlib.sha256(f"{self.seed}\n{text}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big")


def highest_within(hashes: Sequence[int], sizes: Sequence[int], limit: int) -> int | None:
    """The highest hash up to which the sizes, in order of their hashes, sum to at most `limit`; None where all do.

    It is the lowest hash at least, whatever its size.
    """
    import numpy as np

    keys, amounts = np.array(hashes, np.uint64), np.array(sizes, np.int64)
    if amounts.sum() <= limit:
        return None
    order = np.argsort(keys)
    keys, total = keys[order], np.cumsum(amounts[order])
    last_of_equals = np.append(keys[1:] != keys[:-1], True)
    within = np.flatnonzero(last_of_equals & (total <= limit))
    return int(keys[within[-1]] if len(within) else keys[0])


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def learn(config: Config, sample: Sample) -> "BPETokenizer":
    from tokenizer import BPETokenizer

    settings = config.tokenizer
    with MergeProgress() as progress:
        try:
            return BPETokenizer.train(
                sample,
                kind=settings.tokenizer_kind,
                vocab_size=settings.vocab_size,
                min_frequency=settings.min_frequency,
                progress=progress,
            )
        except ValueError as error:
            raise UserError(f"{config.raw_dir}: {error}") from None


class MergeProgress:
    """A bar that appears with the first merge: reading has its own before."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __enter__(self) -> "MergeProgress":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def __call__(self, done: int, wanted: int) -> None:
        if self._bar is None:
            self._bar = Progress(wanted, "merging", "merges").__enter__()
        self._bar.update(done - self._bar.done)


# ----------------------------------------------------------------------------------------------------------------------
# GPT-2's vocabulary


def gpt2_tokenizer(config: Config, archive: str | None) -> "BPETokenizer":
    from tokenizer import BPETokenizer

    texts = {name: gpt2_file(config, archive, name).decode("utf-8") for name in GPT2_FILES}
    return BPETokenizer.from_gpt2(texts["vocab.bpe"], texts["encoder.json"])


def gpt2_file(config: Config, archive: str | None, name: str) -> bytes:
    """One of the published files, checked: from `archive`, or fetched once and kept in the corpus's folder."""
    if archive is not None:
        content = read_member(Path(archive), name)
        if hashlib.sha256(content).hexdigest() != GPT2_FILES[name]:
            raise UserError(f"{name} in {archive} is not the published file (its sha256 differs); fetch it from {GPT2_URL}")
        return content
    from support.fetch import download

    path = config.corpus_dir / "gpt2" / name
    hint = "check the connection, or bring both files with --archive FILE (a folder or zip)"
    download([GPT2_URL + name], path, sha256=GPT2_FILES[name], hint=hint)
    return path.read_bytes()


def read_member(archive: Path, name: str) -> bytes:
    """The bytes of `name` in a folder, or in a zip at any depth. Raises UserError."""
    from support.archives import DamagedArchive, archive_errors

    try:
        if archive.is_dir():
            return (archive / name).read_bytes()
        with archive_errors(archive), zipfile.ZipFile(archive) as opened:
            member = next((m for m in opened.namelist() if m.rpartition("/")[2] == name), None)
            if member is not None:
                return opened.read(member)
    except FileNotFoundError:
        pass
    except DamagedArchive:
        raise UserError(f"--archive {archive} is neither a folder nor a sound zip file") from None
    except RuntimeError:  # a password is needed
        raise UserError(f"--archive {archive} is encrypted; unpack it by hand and give the folder") from None
    raise UserError(f"--archive {archive} holds no {name}; it needs vocab.bpe and encoder.json")


# ----------------------------------------------------------------------------------------------------------------------
# What is kept and what is shown


def inputs_of(config: Config, corpus: "Corpus") -> dict[str, Any]:
    """All that decides the vocabulary."""
    return {
        "format": 1,
        "corpus": config.run.corpus,
        "settings": dataclasses.asdict(config.tokenizer),
        "seed": config.run.seed,
        "raw_fingerprint": corpus.fingerprint,
    }


def is_current(config: Config, corpus: "Corpus") -> bool:
    """Whether the files that are there were made from the same corpus with the same settings, and are whole."""
    try:
        meta = read_json(config.tokenizer_meta_path, "train_tokenizer.py")
        if {name: meta.get(name) for name in inputs_of(config, corpus)} != inputs_of(config, corpus):
            return False
        return sha256_file(config.tokenizer_path) == meta.get("tokenizer_sha256")
    except (UserError, FileNotFoundError):  # missing or damaged: made again
        return False


def meta_of(config: Config, corpus: "Corpus", tokenizer: "BPETokenizer", sample: Sample | None) -> dict[str, Any]:
    return {
        **inputs_of(config, corpus),
        "sample": None if sample is None else {"documents": sample.documents, "bytes": sample.bytes},
        "vocab_size": tokenizer.vocab_size,
        "merges": len(tokenizer.merges),
        "tokenizer_sha256": sha256_file(config.tokenizer_path),
    }


def print_summary(config: Config, corpus: "Corpus", tokenizer: "BPETokenizer") -> None:
    settings = config.tokenizer
    if tokenizer.vocab_size < settings.vocab_size:
        print(
            f"asked for {settings.vocab_size:,} tokens, reached {tokenizer.vocab_size:,}: no further pair occurs "
            f"{settings.min_frequency} times; later stages use the {tokenizer.vocab_size:,}"
        )
    if tokenizer.left_out:
        print(f"to bound memory, {tokenizer.left_out:,} of the rarest different words were left out of the merging")
    texts, split = held_out(corpus)
    if texts:
        print_figures(tokenizer, texts, split)
    longest = sorted(
        set(range(tokenizer.vocab_size)) - set(tokenizer.special_ids), key=lambda i: (-len(tokenizer.tokens[i]), i)
    )
    print("longest tokens: " + " ".join(repr(tokenizer.decode([i])) for i in longest[:10]))
    print(f"wrote {config.tokenizer_path} ({tokenizer.vocab_size:,} tokens, sha256 {tokenizer.sha256[:12]})")


def held_out(corpus: "Corpus") -> tuple[list[str], str]:
    """Some megabytes of validation text, or of training text where there is none."""
    for split in ("val", "train"):
        texts, size = [], 0
        for text in corpus.iter_documents(split):
            texts.append(text)
            size += len(text)
            if size >= SUMMARY_BYTES:
                break
        if size:
            return texts, split
    return [], "train"


def print_figures(tokenizer: "BPETokenizer", texts: Sequence[str], split: str) -> None:
    ids, _ = tokenizer.encode_to_array(texts)
    characters = sum(len(tokenizer.scored_text(text)) for text in texts)
    unknown = 0 if tokenizer.unk_id is None else int((ids == tokenizer.unk_id).sum())
    rate = f"{100 * unknown / max(1, len(ids)):.4f} % <UNK>" if tokenizer.kind == "word" else "lossless"
    print(f"{split} text: {characters / max(1, len(ids)):.3f} characters per token, {rate} ({len(ids):,} tokens)")
    print("sample words: " + "  ".join("|".join(pieces) for pieces in sample_words(tokenizer, texts)))


def sample_words(tokenizer: "BPETokenizer", texts: Iterable[str]) -> list[list[str]]:
    """Ten long words of the text, rare and common ones, in pieces."""
    seen = Counter(word for text in texts for word in text.split() if len(word) >= 8 and word.isalpha())
    words = [word for word, _ in seen.most_common()]
    chosen = words[:: max(1, len(words) // 10)][:10]
    return [[tokenizer.decode([i]) for i in tokenizer.encode(word)] for word in chosen]


if __name__ == "__main__":
    run_main(main)
