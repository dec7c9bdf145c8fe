"""Documents out of whatever lies in a corpus folder: WikiText articles, .txt, .md, .jsonl, .jsonl.gz and .parquet files.

Files are read in blocks of a few megabytes that begin and end between documents, so memory follows the block (or the largest
document), never the corpus, and blocks can be read by several processes. What decides the documents and their splits is
written into raw/manifest.json when a corpus is made, and every later stage follows it.

Policies, the same for every kind of file and counted in the manifest: text is UTF-8; one leading byte-order mark is dropped
per file; CRLF becomes LF; a lone surrogate (from JSON) becomes U+FFFD; a document of whitespace alone is dropped. All else,
NUL and control characters included, is kept as it is.
"""

import bisect
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from config import DataConfig
from support.common import UserError

SPLITS = ("train", "val", "test")
KINDS = {".raw": "wikitext", ".txt": "text", ".md": "text", ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet"}
WIKITEXT_SPLITS = {"wiki.train.raw": "train", "wiki.valid.raw": "val", "wiki.test.raw": "test"}

BLOCK_BYTES = 2 << 20  # memory follows this
OVERLAP_BYTES = 4_096  # no title line is longer

BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")
# An empty line, then ` = Title = ` with exactly one `=` on each side, then (not consumed, it may lead to another title) an
# empty line. The title begins where the first group ends.
_TITLE = r"(\n[ \t]*\r?\n) = (?![= ])[^\r\n]{1,2000}(?<![= ]) =[ \t]*(?=\r?\n[ \t]*\r?\n)"
_TITLE_TEXT, _TITLE_BYTES = re.compile(_TITLE), re.compile(_TITLE.encode())
_LINE_END, _BLANK_LINE = re.compile(rb"(\n)"), re.compile(rb"(\n[ \t]*\r?\n)")


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus. `path` is relative to raw/, or absolute; `split` is train, val, test, or hash (by document)."""

    path: str
    kind: str
    split: str = "hash"
    source: str = ""  # which part of a mixed corpus it belongs to

    @classmethod
    def of(cls, path: str | Path) -> "SourceFile":
        """The kind from the name's ending, the split from WikiText's file names. Raises UserError for an unknown kind."""
        kind = kind_of(path)
        if kind is None:
            raise UserError(f"{path} is of no known kind; expected a name that ends in {', '.join(KINDS)}")
        return cls(path=Path(path).as_posix(), kind=kind, split=WIKITEXT_SPLITS.get(Path(path).name, "hash"))


@dataclass(frozen=True)
class Part:
    """Whole documents out of one file: the byte range start:end, or `data` where the file has no such ranges.

    Of parquet `start` is a row, and `bounds` are the offsets of the rows in `data` (n + 1 of them).
    """

    file: int
    start: int
    end: int
    disk_bytes: int  # what it takes of the file as that lies on the disk
    data: bytes | None = None
    bounds: tuple[int, ...] | None = None

    @property
    def text_bytes(self) -> int:
        return self.end - self.start if self.data is None else len(self.data)


Block = tuple[Part, ...]
Unit = Callable[[], Iterator[Part]]


@dataclass
class Documents:
    """The documents of a block by split, in order, with the index of the file each came from, and what was counted."""

    texts: dict[str, list[str]] = dataclasses.field(default_factory=lambda: {name: [] for name in SPLITS})
    files: dict[str, list[int]] = dataclasses.field(default_factory=lambda: {name: [] for name in SPLITS})
    counts: Counter = dataclasses.field(default_factory=Counter)


def disk_bytes(block: Block) -> int:
    """What a block takes of its files, for progress."""
    return sum(part.disk_bytes for part in block)


def kind_of(path: str | Path) -> str | None:
    """`notes.jsonl.gz` is jsonl, `picture.png` is None."""
    name = Path(path).name.lower()
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def document_hash(text: str) -> int:
    """The first 8 bytes of sha256 over the UTF-8 text: what decides a document's split."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def _digest(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}/{text}".encode()).digest()


# ----------------------------------------------------------------------------------------------------------------------
# The corpus


class Corpus:
    """A corpus as its manifest describes it. Can be sent to worker processes."""

    def __init__(self, manifest: dict[str, Any], raw_dir: Path) -> None:
        self.manifest = manifest
        self.files = [SourceFile(f["path"], f["kind"], f["split"], f.get("source", "")) for f in manifest["files"]]
        self.paths = [raw_dir / f.path for f in self.files]  # an absolute path stays as it is
        self.sizes = [f["bytes"] for f in manifest["files"]]
        self.settings = DataConfig(**manifest["settings"])
        self.splitting = manifest["splitting"]

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    @property
    def weights(self) -> dict[str, float]:
        """Share of the training tokens that each source of a mix is to have; {} for any other corpus."""
        return {}

    @property
    def documents(self) -> dict[str, int]:
        """Documents per split."""
        return self.manifest["documents"]

    @property
    def bytes(self) -> int:
        """Size of all files, as they lie on the disk."""
        return sum(self.sizes)

    def digests(self) -> Iterator[tuple[Path, str]]:
        """Every file with the sha256 it had when the corpus was made."""
        return zip(self.paths, (f["sha256"] for f in self.manifest["files"]), strict=True)

    def iter_documents(self, split: str) -> Iterator[str]:
        """Streams the documents of a split in their fixed order."""
        for block in self.blocks(split):
            yield from self.read(block).texts[split]

    def blocks(self, split: str | None = None) -> Iterator[Block]:
        """All blocks in their fixed order, or those that may hold documents of `split`."""
        gathered: list[Part] = []
        size = 0
        for part in self._parts(split):
            if gathered and (size >= BLOCK_BYTES // 2 or self._kin(gathered[0]) != self._kin(part)):
                yield tuple(gathered)
                gathered, size = [], 0
            gathered.append(part)
            size += part.text_bytes
        if gathered:
            yield tuple(gathered)

    def _kin(self, part: Part) -> tuple[str, str]:
        """Parts of one block agree in this."""
        return self.files[part.file].source, self.files[part.file].split

    def source_of(self, block: Block) -> str:
        """Which part of a mixed corpus a block belongs to, "" where there are none."""
        return self.files[block[0].file].source

    def _parts(self, split: str | None) -> Iterator[Part]:
        wanted = (i for i, file in enumerate(self.files) if split is None or file.split in ("hash", split))
        for source, indices in itertools.groupby(wanted, lambda i: self.files[i].source):
            units = (unit for i in indices for unit in self._units(i))
            for unit in units if self.settings.shuffle_seed < 0 else self._shuffled(list(units), source):
                yield from unit()

    def _shuffled(self, units: list[Unit], source: str) -> list[Unit]:
        """Byte ranges and row groups in a seeded order; `read` then shuffles within a block, so memory stays that of one.

        By hash, not by a library's generator, so that the order never changes with a version.
        """
        seed = self.settings.shuffle_seed
        order = sorted(range(len(units)), key=lambda n: _digest(seed, f"{source}/{n}"))
        return [units[n] for n in order]

    def _units(self, i: int) -> Iterator[Unit]:
        """What a file can be entered at: its byte ranges or row groups, or the whole of a compressed file."""
        path, kind = self.paths[i], self.files[i].kind
        if kind == "parquet":
            yield from _parquet_units(i, path, self.settings.text_field)
        elif path.suffix.lower() == ".gz":
            yield functools.partial(_gzip_parts, i, path)
        else:
            for part in _range_parts(i, path, self._boundary(kind)):
                yield functools.partial(iter, (part,))

    def _boundary(self, kind: str) -> re.Pattern[bytes] | None:
        """Where a file may be cut: behind the first group of a match. None: nowhere."""
        if kind == "wikitext":
            return _TITLE_BYTES
        if kind == "jsonl":
            return _LINE_END
        if self.separator:
            pattern = re.escape(self.separator.encode("utf-8")).replace(rb"\n", b"\r?\n").replace(b"\\\n", b"\r?\n")
            return re.compile(b"(" + pattern + b")")
        return _BLANK_LINE if self.splitting["unit"] == "piece" else None

    @property
    def separator(self) -> str:
        r"""The document separator; `\n` and `\t` may be written with a backslash, as a shell makes easiest."""
        return self.settings.document_separator.replace("\\n", "\n").replace("\\t", "\t")

    def read(self, block: Block) -> Documents:
        """The documents of a block. Raises UserError naming file and byte offset where the text cannot be read."""
        documents = Documents()
        texts: list[str] = []
        files: list[int] = []
        for part in block:
            found = list(self._texts(part, documents.counts))
            kept = [text for text in found if text and not text.isspace()]
            if len(kept) < len(found):
                documents.counts["empty documents dropped"] += len(found) - len(kept)
            texts += kept
            files += [part.file] * len(kept)
        if self.settings.shuffle_seed >= 0 or self.settings.keep_fraction < 1.0:
            drawn = self._drawn(texts, block[0])
            texts, files = [texts[n] for n in drawn], [files[n] for n in drawn]
        split = self.files[block[0].file].split  # the same for all files of a block
        if split != "hash":
            documents.texts[split], documents.files[split] = texts, files
            return documents
        for text, file, split in zip(texts, files, self._splits_of(texts), strict=True):
            documents.texts[split].append(text)
            documents.files[split].append(file)
        return documents

    def _drawn(self, texts: list[str], first: Part) -> list[int]:
        """Which documents of a block are kept, in their final order; both go by a hash of seed and text.

        Of n documents n * keep_fraction are kept, rounded up or down by a hash of the block's place, so that over many
        blocks the share is right.
        """
        seed, share = self.settings.shuffle_seed, self.settings.keep_fraction
        order = sorted(range(len(texts)), key=lambda n: _digest(seed, texts[n]))
        place = _digest(seed, f"{first.file}/{first.start}")
        kept = order[: int(len(texts) * share + int.from_bytes(place[:4], "big") / 2**32)]
        return kept if seed >= 0 else sorted(kept)

    def _splits_of(self, texts: list[str]) -> list[str]:
        if self.splitting["unit"] == "chunk":
            return ["train"] * len(texts)  # the token stream is cut when it is written
        return [self.split_of_hash(document_hash(text)) for text in texts]

    def split_of_hash(self, value: int) -> str:
        if value < self.splitting["val_below"]:
            return "val"
        return "test" if value < self.splitting["test_below"] else "train"

    def _texts(self, part: Part, counts: Counter) -> Iterator[str]:
        texts = self._whole_texts(part, counts)
        if self.splitting["unit"] != "piece" or self.files[part.file].split != "hash":
            return texts
        return (piece for text in texts for piece in cut_pieces(text, self.splitting["piece_bytes"]))

    def _whole_texts(self, part: Part, counts: Counter) -> Iterator[str]:
        path, kind = self.paths[part.file], self.files[part.file].kind
        data = part.data if part.data is not None else _read_range(path, part)
        if kind == "parquet":
            rows = enumerate(itertools.pairwise(part.bounds), part.start)
            return (self._clean(path, data[a:b], row, counts) for row, (a, b) in rows)
        if part.start == 0 and data.startswith(BOM):
            counts["byte-order marks dropped"] += 1
            # Blanked out rather than cut off, so that byte offsets in messages stay right.
            text = self._clean(path, b"   " + data[3:], 0, counts)[3:]
        else:
            text = self._clean(path, data, part.start, counts)
        if kind == "wikitext":
            return _articles(text)
        if kind == "jsonl":
            return self._json_texts(path, text, part, counts)
        return _separated(text, self.separator)

    def _clean(self, path: Path, data: bytes, offset: int, counts: Counter) -> str:
        """Decoded text with LF line ends; `offset` is where `data` begins in the file."""
        try:
            text = data.decode("utf-8", self.settings.errors)
        except UnicodeDecodeError as error:
            place = f"row {offset}" if path.suffix.lower() == ".parquet" else f"byte {offset + error.start:,}"
            hint = "convert the file to UTF-8, or replace such bytes with: --errors replace"
            raise UserError(f"{path} is not UTF-8 at {place} (0x{data[error.start]:02x}); {hint}") from None
        if self.settings.errors == "replace" and "\ufffd" in text:
            replaced = text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
            counts["invalid byte sequences replaced"] += replaced
        if "\0" in text:
            counts["NUL characters kept (usual text has none; is it UTF-16?)"] += text.count("\0")
        return _unix_newlines(text, counts)

    def _json_texts(self, path: Path, text: str, part: Part, counts: Counter) -> Iterator[str]:
        name = self.settings.text_field
        for number, line in enumerate(text.split("\n")):
            if not line or line.isspace():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{_line_of(path, part, number)} is not JSON ({error}); mend or remove the line") from None
            if not isinstance(value, dict) or name not in value:
                raise UserError(_field_message(_line_of(path, part, number), name, value))
            found = value[name]
            if not isinstance(found, str | None):
                kind = type(found).__name__
                raise UserError(
                    f"{_line_of(path, part, number)}: field {name!r} is {kind}, not text; name it with --text-field"
                )
            yield _clean_json(found or "", counts)


class MixedCorpus(Corpus):
    """Several corpora one after the other, each with its own settings and splits. A file's `source` is its corpus's name."""

    def __init__(self, manifest: dict[str, Any], members: dict[str, Corpus]) -> None:
        self.manifest = manifest
        self.members = list(members.values())
        self.files = [dataclasses.replace(f, source=name) for name, member in members.items() for f in member.files]
        self.paths = [path for member in self.members for path in member.paths]
        self.sizes = [size for member in self.members for size in member.sizes]
        self.splitting = {"unit": "document"}
        self._firsts = [0, *itertools.accumulate(len(member.files) for member in self.members)]

    @property
    def weights(self) -> dict[str, float]:
        return {entry["name"]: entry["weight"] for entry in self.manifest["mix"]}

    def digests(self) -> Iterator[tuple[Path, str]]:
        return itertools.chain.from_iterable(member.digests() for member in self.members)

    def blocks(self, split: str | None = None) -> Iterator[Block]:
        for first, member in zip(self._firsts, self.members, strict=False):
            for block in member.blocks(split):
                yield _renumbered(block, first)

    def read(self, block: Block) -> Documents:
        n = bisect.bisect_right(self._firsts, block[0].file) - 1
        documents = self.members[n].read(_renumbered(block, -self._firsts[n]))
        documents.files = {split: [file + self._firsts[n] for file in files] for split, files in documents.files.items()}
        return documents


def _renumbered(block: Block, first: int) -> Block:
    return tuple(dataclasses.replace(part, file=part.file + first) for part in block)


def _unix_newlines(text: str, counts: Counter) -> str:
    if "\r" not in text or "\r\n" not in text:  # one character is sought several times faster than two
        return text
    counts["CRLF line ends made LF"] += text.count("\r\n")
    return text.replace("\r\n", "\n")


def _clean_json(text: str, counts: Counter) -> str:
    """JSON can spell what UTF-8 cannot: half a surrogate pair."""
    if not text.isascii() and _SURROGATE.search(text):
        text, n = _SURROGATE.subn("\ufffd", text)
        counts["lone surrogates replaced"] += n
    return _unix_newlines(text, counts)


def _field_message(where: str, name: str, value: Any) -> str:
    if not isinstance(value, dict):
        return f"{where} is not a JSON object; each line must be one, with its text in the field {name!r}"
    fields = ", ".join(sorted(map(str, value))[:8]) or "none"
    return f"{where} has no field {name!r} (its fields: {fields}); name the right one with --text-field"


def _line_of(path: Path, part: Part, number: int) -> str:
    """`file line N` for line `number` of a part; only errors pay for the counting."""
    before = 0
    with _open_plain(path) as file:
        left = part.start
        while left > 0 and (data := file.read(min(left, 1 << 20))):
            before += data.count(b"\n")
            left -= len(data)
    return f"{path} line {before + number + 1:,}"


# ----------------------------------------------------------------------------------------------------------------------
# Text into documents


def _articles(text: str) -> list[str]:
    """WikiText articles, without the empty lines behind them: else an article's text would depend on what follows it.

    A block begins with a title (or the file's first lines), so its start is always that of an article.
    """
    padded = "\n" + text  # so that a title in the first lines of a file is behind an empty line too
    starts = [1, *(match.end(1) for match in _TITLE_TEXT.finditer(padded)), len(padded)]
    articles = [padded[a:b].rstrip() for a, b in itertools.pairwise(starts)]
    return [article for article in articles if article]


def _separated(text: str, separator: str) -> Iterator[str]:
    """`a<sep>b<sep>` as a, b: the last separator ends a document and opens none."""
    if not separator:
        return iter([text])
    return iter(text.removesuffix(separator).split(separator))


def cut_pieces(text: str, piece_bytes: int) -> Iterator[str]:
    """Cuts a text into pieces of about `piece_bytes` characters that join to it again.

    The cut is at the first blank line behind that size; where there is none within as much again, at a line end, then at
    a space, then anywhere.
    """
    start = 0
    while len(text) - start > 2 * piece_bytes:
        low, high = start + piece_bytes, start + 2 * piece_bytes
        found = (text.find(end, low, high) + len(end) for end in ("\n\n", "\n \n", "\n", " ") if text.find(end, low, high) >= 0)
        end = next(found, low)
        yield text[start:end]
        start = end
    yield text[start:]


# ----------------------------------------------------------------------------------------------------------------------
# Files into parts


def _open_plain(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")


def _read_range(path: Path, part: Part) -> bytes:
    with open(path, "rb") as file:
        file.seek(part.start)
        data = file.read(part.end - part.start)
    if len(data) != part.end - part.start:
        raise UserError(f"{path} became shorter while it was read; make the corpus again")
    return data


def _range_parts(i: int, path: Path, boundary: re.Pattern[bytes] | None) -> Iterator[Part]:
    """Byte ranges of about BLOCK_BYTES that end between documents; only the text around each cut is looked at."""
    size = path.stat().st_size
    start = 0
    with open(path, "rb") as file:
        while start < size:
            end = size if boundary is None else _find_boundary(file, boundary, start + BLOCK_BYTES, size)
            yield Part(i, start, end, end - start)
            start = end


def _find_boundary(file: IO[bytes], boundary: re.Pattern[bytes], position: int, size: int) -> int:
    """Offset of the first boundary from `position` on, or `size`. Windows overlap, so none is missed between two."""
    window = 64 << 10
    while position < size:
        file.seek(position)
        data = file.read(window)
        if match := boundary.search(data):
            return position + match.end(1)
        position += window - OVERLAP_BYTES
        window = min(2 * window, 1 << 20)
    return size


def _gzip_parts(i: int, path: Path) -> Iterator[Part]:
    """Whole lines of about BLOCK_BYTES; a compressed file cannot be entered in the middle, so the data travels along."""
    start, rest, before = 0, [], 0  # `rest`: pieces of an unfinished line; joined only once, however long it grows
    with _gzip_errors(path), open(path, "rb") as packed, gzip.open(packed, "rb") as file:
        while data := file.read(BLOCK_BYTES):
            head, newline, tail = data.rpartition(b"\n")
            if not newline:
                rest.append(data)
                continue
            block, rest, at = b"".join((*rest, head, newline)), [tail] if tail else [], packed.tell()
            yield Part(i, start, start + len(block), at - before, block)
            start, before = start + len(block), at
        if rest:
            block = b"".join(rest)
            yield Part(i, start, start + len(block), packed.tell() - before, block)


@contextlib.contextmanager
def _gzip_errors(path: Path) -> Iterator[None]:
    """Makes damage in a compressed file the user's one-line error."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged ({error}); fetch or make it again") from None


def _parquet_units(i: int, path: Path, column: str) -> Iterator[Unit]:
    """A unit a row group, of which only the text column is read."""
    _, parquet = _import_pyarrow(path)
    with _parquet_errors(path), parquet.ParquetFile(path) as file:
        _require_text_column(path, file.schema_arrow, column)
        metadata = file.metadata
    row = 0
    for group in range(metadata.num_row_groups):
        yield functools.partial(_row_group_parts, i, path, column, metadata, group, row)
        row += metadata.row_group(group).num_rows


def _row_group_parts(i: int, path: Path, column: str, metadata: Any, group: int, row: int) -> Iterator[Part]:
    """The rows of a group in batches of about BLOCK_BYTES; `row` is the number of its first."""
    pa, parquet = _import_pyarrow(path)
    rows = metadata.row_group(group).num_rows
    size = max(1, BLOCK_BYTES * rows // max(1, _column_size(metadata.row_group(group), column)))
    options = {"metadata": metadata, "buffer_size": 1 << 20, "pre_buffer": False}  # else the group's column is held whole
    with _parquet_errors(path), parquet.ParquetFile(path, **options) as file:
        for batch in file.iter_batches(min(size, max(1, rows)), row_groups=[group], columns=[column], use_threads=False):
            data, bounds = _column_bytes(pa, batch.column(0))
            n = len(bounds) - 1
            yield Part(i, row, row + n, path.stat().st_size * n // metadata.num_rows, data, bounds)
            row += n


def _column_size(group: Any, column: str) -> int:
    """Uncompressed bytes of a column in a row group."""
    columns = (group.column(n) for n in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] == column)


@contextlib.contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """Makes damage in a parquet file the user's one-line error."""
    pa, _ = _import_pyarrow(path)
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is no readable parquet file ({reason}); fetch or make it again") from None


def _import_pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"reading {path} needs pyarrow; install it with: uv pip install pyarrow") from None
    return pa, parquet


def _require_text_column(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        columns = ", ".join(schema.names[:8])
        raise UserError(f"{path} has no column {column!r} (its columns: {columns}); name the right one with --text-field")
    if schema.names.count(column) > 1:
        raise UserError(f"{path} has several columns named {column!r}; rename all but one, or name another with --text-field")
    kind = str(schema.field(column).type)
    if not re.match(r"(dictionary<values=)?(large_|fixed_size_)?(string|binary)", kind):  # and not a list or struct of them
        raise UserError(f"{path}: column {column!r} holds {kind}, not text; name the right one with --text-field")


def _column_bytes(pa: Any, column: Any) -> tuple[bytes, tuple[int, ...]]:
    """The rows' bytes end to end, and the offset of each (n + 1 of them). Nulls become empty."""
    rows = column.cast(pa.large_binary()).fill_null(b"")
    _, offsets, data = rows.buffers()
    bounds = memoryview(offsets).cast("q")[rows.offset : rows.offset + len(rows) + 1].tolist() if len(rows) else [0]
    first, last = bounds[0], bounds[-1]
    raw = data.slice(first, last - first).to_pybytes() if last > first else b""
    return raw, tuple(b - first for b in bounds)
