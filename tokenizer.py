"""Byte-pair encoding (Sennrich et al., 2016): train, encode, decode, save, load.

Three kinds share one class and one core (bpe.py); they differ in how text is cut into the pieces that merges stay inside:

- `word`: whitespace collapses to one space, every word but a text's last carries it (`the ` is a token). Symbols are
  characters; one that was not seen in training becomes <UNK>.
- `byte`: GPT-2's pattern over UTF-8 bytes, lossless for every text.
- `gpt2`: `byte` with OpenAI's published merges.

Files are in the schema of the Hugging Face `tokenizers` library, which loads them and gives the same ids. Text that spells
a special token is ordinary text here: ids below 4 (`gpt2`: 50256) never come out of `encode`, except <UNK>.
Lone surrogates, which are no characters and have no UTF-8 form, count as U+FFFD.
"""

import argparse
import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

import bpe
from bpe import to_utf8
from config import SPECIAL_TOKENS, parse_config
from support.common import UserError, run_main, write_text
from support.unicode_ranges import LETTERS, NUMBERS

PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(len(SPECIAL_TOKENS))
GPT2_END_OF_TEXT = "<|endoftext|>"
CACHED_WORDS = 100_000  # words whose ids `encode` remembers, per tokenizer: some 20 MB


def _regex_class(ranges: Iterable[tuple[int, int]]) -> str:
    return "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in ranges)


@cache
def byte_pattern() -> re.Pattern[str]:
    r"""GPT-2's 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+, its classes written out."""
    L, N, S = _regex_class(LETTERS), _regex_class(NUMBERS), _regex_class((ord(c), ord(c)) for c in bpe.BYTE_WHITESPACE)
    return re.compile(f"'(?:[stmd]|re|ve|ll)| ?[{L}]+| ?[{N}]+| ?[^{S}{L}{N}]+|[{S}]+(?![^{S}])|[{S}]+")


def split_words(text: str) -> list[str]:
    """`word` pieces: they join to " ".join(text.split())."""
    words = text.split()
    return [word + " " for word in words[:-1]] + words[-1:]


def split_bytes(text: str) -> list[str]:
    """`byte` pieces: they join to `text`."""
    return byte_pattern().findall(text)


class BPETokenizer:
    """A vocabulary, its merges, and how text is cut.

    `tokens[id]` is a token's UTF-8 bytes (a special token's name for the special ids); `merges[rank]` is a pair of ids.
    Made by `train`, `load`, `from_json` or `from_gpt2`, not by calling the class. Raises ValueError on a vocabulary that
    cannot be one: merges of unknown tokens, or of a result that is not in the vocabulary.
    """

    def __init__(self, kind: str, tokens: Sequence[bytes], merges: Sequence[tuple[int, int]]) -> None:
        self.kind, self.tokens, self.merges = kind, list(tokens), list(merges)
        self.vocab_size = len(self.tokens)
        if kind == "gpt2":
            self.bos_id = self.eos_id = self.vocab_size - 1
            self.pad_id = self.unk_id = None
            self.special_ids = (self.eos_id,)
        else:
            self.pad_id, self.unk_id, self.bos_id, self.eos_id = PAD_ID, UNK_ID, BOS_ID, EOS_ID
            self.special_ids = (PAD_ID, UNK_ID, BOS_ID, EOS_ID)
        ids = {token: i for i, token in enumerate(self.tokens) if i not in self.special_ids}
        if len(ids) + len(self.special_ids) != self.vocab_size:
            raise ValueError("two ids of the vocabulary stand for the same token")
        self._symbols = {token: i for token, i in ids.items() if len(token if kind != "word" else token.decode()) == 1}
        self._ranks: dict[tuple[int, int], int] = {}
        self._results: list[int] = []
        for rank, (a, b) in enumerate(self.merges):
            merged = ids.get(self.tokens[a] + self.tokens[b])
            if merged is None:
                raise ValueError(f"merge {rank} makes {self.tokens[a] + self.tokens[b]!r}, which is not in the vocabulary")
            self._ranks.setdefault((a, b), rank)
            self._results.append(merged)
        self.left_out = 0  # rare distinct pieces that training did not look at, to bound its memory
        self._encoder: bpe.Encoder | None = None
        self._cache: dict[str, list[int]] = {}

    # Making one

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        kind: str = "word",
        vocab_size: int = 16_384,
        min_frequency: int = 2,
        progress: Callable[[int, int], None] | None = None,
    ) -> "BPETokenizer":
        """Learns a vocabulary from `texts`, each a whole document; the result does not depend on their order.

        It has fewer than `vocab_size` tokens where the text has too few pairs seen `min_frequency` times. `progress` is
        called with (merges done, merges wanted). Raises ValueError where there is no text, or where the alphabet alone
        does not fit.
        """
        if kind not in ("word", "byte"):
            raise ValueError(f"kind is {kind!r}, but only word and byte can be trained")
        counts = bpe.Counts(bpe.word_spans if kind == "word" else bpe.byte_spans)
        counts.add_all(texts, bpe.cpu_count())
        pieces, count, left_out = counts.pieces()
        del counts
        if len(pieces) == 0:
            raise ValueError("there is no text to learn from: every document is empty or whitespace")
        special = [name.encode() for name in SPECIAL_TOKENS]
        alphabet, cells = bpe.cells_of(pieces, kind == "word", len(special))
        tokens = special + alphabet
        if len(tokens) > vocab_size:
            room = f"{len(special)} special tokens and {len(alphabet):,} different characters"
            raise ValueError(f"a vocabulary of {vocab_size:,} has no room for the {room} of this text")
        learner = bpe.Learner(cells, count, tokens, vocab_size)
        del pieces, cells
        tokenizer = cls(kind, tokens, learner.learn(special, min_frequency, progress))
        tokenizer.left_out = left_out
        return tokenizer

    @classmethod
    def load(cls, path: Path | str) -> "BPETokenizer":
        """The inverse of `save`. Raises UserError where the file is missing, damaged or of another kind."""
        path = Path(path)
        try:
            return cls.from_json(path.read_bytes().decode("utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} is missing; make it with train_tokenizer.py") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is no tokenizer of ours ({error}); make it again with train_tokenizer.py") from None

    @classmethod
    def from_json(cls, text: str) -> "BPETokenizer":
        """The inverse of `to_json`. Raises ValueError on anything else."""
        data = json.loads(text)
        model = data.get("model") if isinstance(data, dict) else None
        if not isinstance(model, dict):
            raise ValueError("it has no model")
        vocab, merges = model.get("vocab"), model.get("merges")
        _check_vocab(vocab, merges)
        kind = _kind_of(data)
        if kind is None:
            raise ValueError("its splitter is none of word, byte and gpt2")
        names = sorted(vocab, key=vocab.__getitem__)
        known = tuple(i for i, name in enumerate(names) if name in (SPECIAL_TOKENS if kind != "gpt2" else (GPT2_END_OF_TEXT,)))
        if known != (tuple(range(len(SPECIAL_TOKENS))) if kind != "gpt2" else (len(names) - 1,)):
            raise ValueError("its special tokens are not where they belong")
        tokens = [name.encode() if i in known or kind == "word" else _printable_to_bytes(name) for i, name in enumerate(names)]
        tokenizer = cls(kind, tokens, [(vocab[a], vocab[b]) for a, b in merges])
        if _skeleton(json.loads(tokenizer.to_json())) != _skeleton(data):
            raise ValueError("its settings differ from those written here")
        return tokenizer

    @classmethod
    def from_gpt2(cls, vocab_bpe: str, encoder_json: str) -> "BPETokenizer":
        """OpenAI's vocabulary from the texts of `vocab.bpe` (merges) and `encoder.json` (ids). Raises ValueError."""
        vocab = json.loads(encoder_json)
        lines = vocab_bpe.split("\n")[1:]  # the first line is a version
        merges = [tuple(line.split(" ")) for line in lines if line]
        _check_vocab(vocab, merges)
        names = sorted(vocab, key=vocab.__getitem__)
        if names[-1] != GPT2_END_OF_TEXT:
            raise ValueError(f"encoder.json does not end with {GPT2_END_OF_TEXT}")
        tokens = [_printable_to_bytes(name) for name in names[:-1]] + [GPT2_END_OF_TEXT.encode()]
        return cls("gpt2", tokens, [(vocab[a], vocab[b]) for a, b in merges])

    # Keeping it

    def save(self, path: Path | str) -> None:
        write_text(Path(path), self.to_json())

    def to_json(self) -> str:
        """The vocabulary in the schema of the `tokenizers` library; the same text for the same tokenizer, always."""
        return json.dumps(_schema(self), ensure_ascii=False, separators=(",", ":")) + "\n"

    @cached_property
    def sha256(self) -> str:
        """Identity of the tokenizer: the hash of `to_json()`."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    # Text to ids

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without separators. Time is near-linear in the text's length."""
        return self._encode_pieces(self.split(text))

    def encode_prompt(self, text: str, trailing_space: bool = True) -> list[int]:
        """Ids of a text that will be continued: `word` gives its last word the space that training nearly always showed."""
        pieces = self.split(text)
        if self.kind == "word" and trailing_space and pieces:
            pieces[-1] += " "
        return self._encode_pieces(pieces)

    def encode_to_array(self, texts: Sequence[str], threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Ids of many texts at once: (all ids, uint32 (N,); offsets, int64 (len(texts) + 1,)).

        Text i is `ids[offsets[i] : offsets[i + 1]]`. Pieces met before are remembered between calls, in bounded memory.
        """
        if self._encoder is None:
            self._encoder = self._make_encoder()
        return self._encoder.encode(texts, threads)

    def _make_encoder(self) -> bpe.Encoder:
        word = self.kind == "word"
        symbols = {ord(token.decode()) if word else token[0]: i for token, i in self._symbols.items()}
        widths = [len(token.decode() if word else token) for token in self.tokens]
        return bpe.Encoder(self._ranks, self._results, symbols, UNK_ID, widths, characters=word)

    def wrap_document(self, ids: Sequence[int]) -> list[int]:
        """A document as the model sees it: <BOS> ids <EOS>; with GPT-2's vocabulary ids and one end-of-text."""
        return [*([] if self.kind == "gpt2" else [self.bos_id]), *ids, self.eos_id]

    def split(self, text: str) -> list[str]:
        """The pieces that merges stay inside."""
        return split_words(text) if self.kind == "word" else split_bytes(text)

    def scored_text(self, text: str) -> str:
        """What the ids stand for, which is what a loss per byte is divided by: `word` collapses whitespace."""
        return " ".join(text.split()) if self.kind == "word" else text

    def _encode_pieces(self, pieces: list[str]) -> list[int]:
        known, ids = self._cache, []
        for piece in pieces:
            found = known.get(piece)
            if found is None:
                if len(known) >= CACHED_WORDS:
                    known.clear()
                found = known[piece] = bpe.merge_piece(self.symbols_of(piece), self._ranks, self._results)
            ids += found
        return ids

    def symbols_of(self, piece: str) -> list[int]:
        """The ids a piece starts from, before any merge."""
        symbols = self._symbols
        if self.kind == "word":
            return [symbols.get(to_utf8(c), UNK_ID) for c in piece]
        return [symbols[bytes([b])] for b in to_utf8(piece)]

    # Ids to text

    def decode_bytes(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of `ids`; special tokens are left out unless `special`. Raises ValueError on an id that is none."""
        ids = list(ids)
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{wrong} is no id of this vocabulary of {self.vocab_size:,} tokens")
        return b"".join(self.tokens[i] for i in ids if special or i not in self.special_ids)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a torn character) show as U+FFFD."""
        return self.decode_bytes(ids, special=special).decode("utf-8", "replace")

    def decode_stream(self, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
        """Text as soon as it is whole: one string an id, where an id may end in the middle of a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            yield decoder.decode(self.decode_bytes([int(i)], special=special))
        yield decoder.decode(b"", final=True)


# ----------------------------------------------------------------------------------------------------------------------
# The file


@cache
def _printable() -> dict[int, str]:
    """GPT-2's stand-ins for bytes, which `tokenizers` uses too: printable bytes are themselves, the rest U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}


def _bytes_to_printable(token: bytes) -> str:
    stand_in = _printable()
    return "".join(stand_in[b] for b in token)


@cache
def _unprintable() -> dict[str, int]:
    return {c: b for b, c in _printable().items()}


def _printable_to_bytes(name: str) -> bytes:
    byte_of = _unprintable()
    try:
        return bytes(byte_of[c] for c in name)
    except KeyError as error:
        raise ValueError(f"token {name!r} holds {error}, which stands for no byte") from None


def _schema(tokenizer: BPETokenizer) -> dict[str, Any]:
    names = []
    for i, token in enumerate(tokenizer.tokens):
        plain = tokenizer.kind == "word" or i in tokenizer.special_ids
        names.append(token.decode("utf-8") if plain else _bytes_to_printable(token))
    word = tokenizer.kind == "word"
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": names[i], **special} for i in tokenizer.special_ids],
        "normalizer": _word_normalizer() if word else None,
        "pre_tokenizer": _word_splitter() if word else byte_level,
        "post_processor": None,
        "decoder": {"type": "Fuse"} if word else byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIAL_TOKENS[UNK_ID] if word else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [[names[a], names[b]] for a, b in tokenizer.merges],
        },
    }


def _word_normalizer() -> dict[str, Any]:
    """ " ".join(text.split()), with split's own idea of whitespace, which differs from the library's."""
    whitespace = "[" + "".join(rf"\x{{{ord(c):X}}}" for c in bpe.WORD_WHITESPACE) + "]+"
    collapse = {"type": "Replace", "pattern": {"Regex": whitespace}, "content": " "}
    return {"type": "Sequence", "normalizers": [collapse, {"type": "Strip", "strip_left": True, "strip_right": True}]}


def _word_splitter() -> dict[str, Any]:
    return {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def _kind_of(data: dict[str, Any]) -> str | None:
    if data.get("pre_tokenizer") == _word_splitter():
        return "word"
    if not isinstance(data.get("pre_tokenizer"), dict) or data["pre_tokenizer"].get("type") != "ByteLevel":
        return None
    return "gpt2" if GPT2_END_OF_TEXT in data["model"]["vocab"] else "byte"


def _check_vocab(vocab: Any, merges: Any) -> None:
    """Raises ValueError unless ids are 0 to n - 1, each once, and merges are pairs of tokens."""
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise ValueError("it has no vocabulary and merges")
    if any(type(i) is not int for i in vocab.values()) or sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError(f"its ids are not 0 to {len(vocab) - 1}, each once")
    for rank, pair in enumerate(merges):
        if (
            not isinstance(pair, (list, tuple))
            or len(pair) != 2
            or not all(isinstance(token, str) and token in vocab for token in pair)
        ):
            raise ValueError(f"merge {rank} is no pair of tokens")


def _skeleton(data: dict[str, Any]) -> dict[str, Any]:
    """A file without its vocabulary: what must be equal for our code to give the ids that the library gives."""
    model = {key: value for key, value in data["model"].items() if key not in ("vocab", "merges")}
    return {**data, "model": model}


# ----------------------------------------------------------------------------------------------------------------------
# Looking at it

USES = ("run.corpus", "run.variant", "run.data_dir")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", metavar="TEXT", help="text to show in tokens")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json (default: that of the corpus)")
    parser.add_argument("--compare", metavar="OTHER.json", help="set two vocabularies side by side, on TEXT or on --file")
    parser.add_argument("--file", metavar="FILE", help="UTF-8 text to compare on")


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=VIEW, uses=USES, add_arguments=add_arguments)
    path = Path(args.tokenizer) if args.tokenizer else config.tokenizer_path
    if not path.exists():
        raise UserError(f"{path} is missing; run: {config.command('train_tokenizer.py')}")
    tokenizer = BPETokenizer.load(path)
    text = _read_text(args.file) if args.file else args.text
    if text is None:
        raise UserError('say what to show, as in: uv run python tokenizer.py "a text", or a file with --file')
    if args.compare is None:
        print(show(tokenizer, text))
        return 0
    rows = [(str(name), statistics(BPETokenizer.load(name), text)) for name in (path, args.compare)]
    print(side_by_side(rows))
    return 0


VIEW = """How text becomes tokens: boundaries and ids of a text, or two vocabularies side by side.

    uv run python tokenizer.py "Once upon a time"
    uv run python tokenizer.py --file book.txt --compare other/tokenizer.json
"""


def _read_text(name: str) -> str:
    try:
        return Path(name).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 at byte {error.start}; convert it first") from None


def show(tokenizer: BPETokenizer, text: str) -> str:
    """The tokens of `text` between bars, spaces and control characters made visible, then one line with an id for each."""
    ids = tokenizer.encode(text)
    names = [_visible(tokenizer.tokens[i]) for i in ids]
    length = len(tokenizer.scored_text(text))
    summary = f"{len(ids):,} tokens, {length / max(1, len(ids)):.2f} characters per token"
    vocabulary = f"{tokenizer.kind} vocabulary of {tokenizer.vocab_size:,}"
    return "\n".join(["|".join(["", *names, ""]), " ".join(map(str, ids)), f"{summary}, {vocabulary}"])


def _visible(token: bytes) -> str:
    """`·` for a space, escapes for what does not print and for torn characters."""
    text = token.decode("utf-8", "backslashreplace")
    return "".join("·" if c == " " else c if c.isprintable() else ascii(c)[1:-1] for c in text)


def statistics(tokenizer: BPETokenizer, text: str) -> dict[str, float]:
    """How well a vocabulary fits a text. `bits per byte` is that of a model that knows token frequencies alone (unigram)."""
    ids, _ = tokenizer.encode_to_array([text])
    scored = tokenizer.scored_text(text)
    counts = np.bincount(ids, minlength=1).astype(np.float64)
    counts = counts[counts > 0]
    bits = -(counts * np.log2(counts / max(1, len(ids)))).sum()
    return {
        "entries": tokenizer.vocab_size,
        "tokens": len(ids),
        "entries used": len(counts),
        "characters per token": len(scored) / max(1, len(ids)),
        "bits per byte (unigram)": bits / max(1, len(to_utf8(scored))),
        "<UNK>": 0 if tokenizer.unk_id is None else int((ids == tokenizer.unk_id).sum()),
    }


def side_by_side(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    lines = [f"{'':<24}" + "".join(f"  {name:>24}" for name, _ in rows)]
    for key in rows[0][1]:
        values = (f"{values[key]:,.3f}" if isinstance(values[key], float) else f"{values[key]:,}" for _, values in rows)
        lines.append(f"{key:<24}" + "".join(f"  {value:>24}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
