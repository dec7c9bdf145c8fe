"""The NumPy core of byte-pair encoding: cutting text into pieces, counting them, learning merges, encoding in bulk.

Everything works on arrays of bytes in which END, a byte that UTF-8 never uses, closes every text. A *piece* is what merges
stay inside: a word with its space, or a match of the byte pattern (tokenizer.py says which). Three ideas make it fast:

- A piece of up to 8 bytes, padded with END, is one 64-bit number, so pieces are compared, sorted and hashed as numbers;
  one of up to 24 bytes is two or three numbers; the few longer ones are Python bytes in a dict.
- Learning keeps exact counts of those pairs alone that can still win, and where they are. One merge touches only the
  places where its pair occurs, and merges that cannot influence each other are applied together.
- Encoding looks every piece up in a table of pieces met before, and merges the new ones side by side, in columns.
"""

import bisect
import contextlib
import gc
import heapq
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from support.unicode_ranges import LETTERS, NUMBERS

END = 0xFF
WINDOW = 1 << 20  # bytes of text worked on at a time: the arrays of a window stay near the caches
LANES = (1, 2, 3)  # numbers that a piece may be: a third one saves counting and looking up one piece in a hundred as bytes
PENDING_ROWS = 1 << 21  # of pieces as numbers, counted in windows, before those of all windows are joined
SLICE_ROWS = 1 << 16  # joined at a time
MARGIN = 8 * LANES[-1]  # bytes behind a window that 8-byte reads may touch

# Outside ASCII, str.split() and Unicode's White_Space (the \s of the byte pattern) agree on what is whitespace; inside ASCII
# the separators U+001C to U+001F are whitespace to str.split() alone.
WIDE_WHITESPACE = "\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
WORD_WHITESPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f " + WIDE_WHITESPACE
BYTE_WHITESPACE = "\t\n\v\f\r " + WIDE_WHITESPACE

Piece = bytes
# Starts (N,) and lengths (N,) of the pieces in a window, in order, and how many of them come before each END; int64.
Spans = tuple[np.ndarray, np.ndarray, np.ndarray]
# Pieces as numbers, an array for each 8 bytes, and how often each occurs.
Rows = tuple[tuple[np.ndarray, ...], np.ndarray]


# ----------------------------------------------------------------------------------------------------------------------
# Texts to windows


def cpu_count() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[Any], Any], items: Iterable[Any], threads: int) -> Iterator[Any]:
    """`map` over threads, in order, with at most two items a thread in flight. NumPy lets go of the interpreter's lock."""
    if threads == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[Any] = []
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 2 * threads:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def reuse_freed_memory() -> None:
    """Saves a tenth of encoding's time and a twentieth of training's: arrays are new memory half as often.

    The GNU allocator keeps freed memory for later, up to twice the largest block freed so far (32 MB count at most). This one
    is never touched.
    """
    np.empty(31 << 20, np.uint8)


def to_utf8(text: str) -> bytes:
    """UTF-8, with U+FFFD for every lone surrogate, which UTF-8 cannot express."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode("utf-8")


# In front of a space between two visible ASCII characters no piece is cut, and nothing before decides what comes behind.
_SAFE_CUT = re.compile("[!-~](?= [!-~])")


class Window(NamedTuple):
    """Texts to work on together. Its array is made where it is worked on, so that threads share that too."""

    texts: list[str]
    closed: bool  # else the last text goes on in the next window, with a space

    def array(self) -> np.ndarray:
        """The texts in UTF-8, END behind each, and MARGIN more; behind one that goes on stands the space to come."""
        try:
            encoded = list(map(str.encode, self.texts))
        except UnicodeEncodeError:
            encoded = [to_utf8(text) for text in self.texts]
        data = bytearray([END]).join(encoded)
        data += bytes([END]) * (MARGIN + 1) if self.closed else b" " + bytes([END]) * (MARGIN - 1)
        return np.frombuffer(data, np.uint8)


def windows(texts: Iterable[str]) -> Iterator[Window]:
    """The texts in windows of about WINDOW characters that no piece crosses."""
    waiting: list[str] = []
    size = 0
    for block in _blocks(texts):
        block_size = sum(map(len, block)) + len(block)
        if size + block_size < WINDOW:
            waiting += block
            size += block_size
            continue
        for text in block:
            if len(text) > WINDOW:
                low = 0
                while len(text) - low > WINDOW and (cut := _SAFE_CUT.search(text, low + WINDOW)):
                    yield Window([*waiting, text[low : cut.end()]], closed=False)
                    waiting, size, low = [], 0, cut.end()
                text = text[low:]
            waiting.append(text)
            size += len(text) + 1
            if size >= WINDOW:
                yield Window(waiting, closed=True)
                waiting, size = [], 0
    if waiting:
        yield Window(waiting, closed=True)


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts some at a time, so that short ones cost little; one by one where they come from a generator, which may be reading
    them."""
    if isinstance(texts, list):
        return (texts[i : i + 64] for i in range(0, len(texts), 64))
    return ([text] for text in texts)


# ----------------------------------------------------------------------------------------------------------------------
# Windows to pieces


def word_spans(window: np.ndarray) -> Spans:
    """Words with the space behind them; `window` gets a plain space for every whitespace character.

    A text's last word has no space: END, which as padding is no part of a piece, takes its place.
    """
    text = window[: len(window) - MARGIN + 1]
    _blank_wide_whitespace(text)
    blank = _is_word_whitespace(text)
    turn = np.empty(len(text), np.bool_)
    turn[0] = not blank[0]
    np.not_equal(blank[1:], blank[:-1], out=turn[1:])
    edges = np.flatnonzero(turn)  # of words, begin and end in turns: the text ends with END, which is blank
    starts, ends = edges[::2].copy(), edges[1::2] + 1
    uneven = np.flatnonzero(blank & (text != 0x20))
    closes = text[uneven] == END
    text[uneven[~closes]] = 0x20
    closing = uneven[closes]
    before = np.searchsorted(starts, closing)
    text[ends[before[before > 0] - 1] - 1] = END  # of an empty text, the word before it once more
    return starts, ends - starts, before[closing < len(window) - MARGIN]


def _is_word_whitespace(text: np.ndarray) -> np.ndarray:
    """Whether a byte is END or whitespace to str.split(): 9 to 13, 28 to 32 (small numbers wrap around to large ones)."""
    return (text - np.uint8(9) < 5) | (text - np.uint8(28) < 5) | (text == END)


def _blank_wide_whitespace(text: np.ndarray) -> None:
    """Overwrites whitespace outside ASCII with spaces; two spaces for one character do no harm."""
    at = np.flatnonzero(_is_wide_lead(text))
    at = at[_WIDE_WHITESPACE_LEADS[text[at]]]
    if len(at) == 0:
        return
    at, point, size = _decode_wide(text, at)
    blank = _WIDE_WHITESPACE_POINTS[np.minimum(point, len(_WIDE_WHITESPACE_POINTS) - 1)]
    at, size = at[blank], size[blank]
    for i in range(3):
        text[at[size > i] + i] = 0x20


def _marked(numbers: Iterable[int], size: int) -> np.ndarray:
    """Whether a number is one of these, by number. `np.isin` takes longer, 40 ms of it for what it imports at first."""
    marked = np.zeros(size, np.bool_)
    marked[list(numbers)] = True
    return marked


_WIDE_WHITESPACE_LEADS = _marked((c.encode()[0] for c in WIDE_WHITESPACE), 256)
_WIDE_WHITESPACE_POINTS = _marked(map(ord, WIDE_WHITESPACE), ord(max(WIDE_WHITESPACE)) + 2)  # False for all that are greater


def _is_wide_lead(text: np.ndarray) -> np.ndarray:
    """Whether a byte is the first of a character outside ASCII."""
    return text - np.uint8(0xC2) < END - 0xC2


def _decode_wide(text: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Characters outside ASCII, by the places of their first bytes: places, code points, byte lengths.

    A character that the text cuts off at its end is left out.
    """
    lead = text[at]
    size = 2 + (lead >= 0xE0) + (lead >= 0xF0)
    whole = at + size <= len(text)
    if not whole.all():
        at, lead, size = at[whole], lead[whole], size[whole]
    point = (lead & _LEAD_BITS[size]).astype(np.int64)
    for i in (1, 2, 3):
        longer = np.flatnonzero(size > i)
        point[longer] = point[longer] << 6 | (text[at[longer] + i] & 0x3F)
    return at, point, size


_LEAD_BITS = np.array([0, 0, 0x1F, 0x0F, 0x07], np.uint8)  # of a first byte, by the character's length, are its own


SPACE_CLASS, LETTER_CLASS, NUMBER_CLASS, OTHER_CLASS, END_CLASS = range(5)


@cache
def _point_classes() -> np.ndarray:
    """uint8 by code point."""
    classes = np.full(0x110000, OTHER_CLASS, np.uint8)
    for ranges, value in ((LETTERS, LETTER_CLASS), (NUMBERS, NUMBER_CLASS)):
        for first, last in ranges:
            classes[first : last + 1] = value
    classes[[ord(c) for c in BYTE_WHITESPACE]] = SPACE_CLASS
    return classes


@cache
def _byte_classes() -> np.ndarray:
    classes = _point_classes()[:256].copy()
    classes[END] = END_CLASS
    return classes


def byte_spans(window: np.ndarray) -> Spans:
    """Matches of GPT-2's pattern, which tile the window; END is a piece of its own."""
    text = window[: len(window) - MARGIN]
    kind = _byte_classes()[text]
    wide_space = _classify_wide(text, kind)
    first = np.empty(len(text), np.bool_)  # whether a piece starts here
    first[0] = True
    np.not_equal(kind[1:], kind[:-1], out=first[1:])
    # The last character of a whitespace run stands apart when something follows, and a plain space joins what follows.
    turn = (kind[:-1] == SPACE_CLASS) & first[1:] & (kind[1:] != END_CLASS)
    first[:-1] |= turn
    first[1:] &= ~(turn & (text[:-1] == 0x20))
    if wide_space:
        _split_wide_spaces(text, turn, first)
    _split_contractions(text, first)
    starts = np.flatnonzero(first)
    return starts, np.diff(starts, append=len(text)), np.searchsorted(starts, np.flatnonzero(text == END))


def _classify_wide(text: np.ndarray, kind: np.ndarray) -> bool:
    """Sets the class of characters outside ASCII, on each of their bytes; whether whitespace is among them."""
    at = np.flatnonzero(_is_wide_lead(text))
    if len(at) == 0:
        return False
    at, point, size = _decode_wide(text, at)
    value = _point_classes()[point]
    kind[at] = value
    for i in (1, 2, 3):
        longer = size > i
        kind[at[longer] + i] = value[longer]
    return bool((value == SPACE_CLASS).any())


def _split_wide_spaces(text: np.ndarray, turn: np.ndarray, first: np.ndarray) -> None:
    """Moves the start of a run's last whitespace character from its last byte to its first."""
    at = np.flatnonzero(turn & (text[:-1] >= 0x80))
    first[at] = False
    back = 1 + (text[at - 1] < 0xC0)  # a continuation byte before the last one: three bytes
    first[at - back] = True


_CONTRACTIONS = (b"s", b"t", b"m", b"d", b"re", b"ve", b"ll")


def _split_contractions(text: np.ndarray, first: np.ndarray) -> None:
    """An apostrophe that starts a piece takes s, t, m, d, re, ve or ll with it, whatever letters follow."""
    at = np.flatnonzero(text == 0x27)
    at = at[first[at]]
    for letters in _CONTRACTIONS:
        end = at + len(letters) + 1
        found = at[end <= len(text)]
        for i, letter in enumerate(letters, 1):
            found = found[text[found + i] == letter]
        first[found + 1] = False
        after = found + len(letters) + 1
        first[after[after < len(text)]] = True


# ----------------------------------------------------------------------------------------------------------------------
# Pieces as numbers

_PADDING = np.array([(1 << 64) - (1 << 8 * n) for n in range(8)] + [0], "<u8")  # END in the bytes from n on
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_UNMIX = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))  # gives a number back that was multiplied by the first of them


def lanes_of(window: np.ndarray, starts: np.ndarray, lengths: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
    """`count` arrays of 8 bytes of each piece, padded with END: equal pieces are equal numbers."""
    view = np.ndarray((len(window) - 7,), "S8", window, strides=(1,))  # every 8 bytes; as numbers they take twice as long
    lanes = [view[starts + 8 * i if i else starts].view("<u8") for i in range(count)]
    lanes[-1] |= _PADDING.take(lengths - 8 * (count - 1) if count > 1 else lengths)  # more lanes mean that the others are full
    return tuple(lanes)


def by_lanes(lengths: np.ndarray) -> list[np.ndarray]:
    """Which pieces are one number, which are two, which are three, and which are longer: indices."""
    short = lengths <= 8
    more = np.flatnonzero(~short)
    lanes = np.minimum(lengths[more] + 7 >> 3, LANES[-1] + 1)
    return [np.flatnonzero(short), *(more[lanes == count] for count in (*LANES[1:], LANES[-1] + 1))]


def mixed(lanes: Sequence[np.ndarray]) -> np.ndarray:
    """A 64-bit hash whose high bits are good."""
    value = lanes[0] * _MIX[0]
    for lane in lanes[1:]:
        value = ((value >> np.uint64(32)) ^ value ^ lane) * _MIX[1]
    return value


def boundaries(lanes: Sequence[np.ndarray]) -> np.ndarray:
    """Where runs of equal rows start."""
    change = np.empty(len(lanes[0]), np.bool_)
    change[:1] = True
    np.not_equal(lanes[0][1:], lanes[0][:-1], out=change[1:])
    for lane in lanes[1:]:
        change[1:] |= lane[1:] != lane[:-1]
    return np.flatnonzero(change)


def distinct(lanes: Sequence[np.ndarray], weights: np.ndarray | None = None) -> Rows:
    """Distinct rows and their summed weights (how often, without weights), in the order of the high bits of their hashes.

    Rows are sorted by (high bits of the hash, row number) packed into one number, which NumPy sorts far faster than it
    sorts indices. Where two rows share the high bits, one may come out twice, with its weight split: no harm is done.
    """
    if len(lanes) == 1 and weights is None:  # the hash is as good as the row
        hashes = mixed(lanes)
        hashes.sort()
        starts = boundaries((hashes,))
        return (hashes[starts] * _UNMIX,), np.diff(starts, append=len(hashes))
    shift = np.uint64(max(1, len(lanes[0]).bit_length()))
    packed = mixed(lanes) >> shift << shift | np.arange(len(lanes[0]), dtype=np.uint64)
    packed.sort()
    order = (packed & ((np.uint64(1) << shift) - np.uint64(1))).astype(np.int64)
    ordered = [lane[order] for lane in lanes]
    starts = boundaries(ordered)
    if weights is None:
        sums = np.diff(starts, append=len(order))
    else:
        sums = np.add.reduceat(weights[order], starts) if len(starts) else weights
    return tuple(lane[starts] for lane in ordered), sums


def _concatenated(rows: Sequence[Rows]) -> Rows:
    lanes = zip(*(columns for columns, _ in rows), strict=True)
    return tuple(map(np.concatenate, lanes)), np.concatenate([counts for _, counts in rows])


def long_pieces(window: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> list[Piece]:
    data = window.tobytes()
    ends = starts + lengths
    ends -= window[ends - 1] == END  # of a text's last word
    return [data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


class Counts:
    """How often each piece occurs, gathered window by window.

    Memory grows with the distinct pieces, not with the text, and both are bounded: counting gives up beyond `MOST_DISTINCT`
    pieces, and what is learnt from is the most frequent ones of `MOST_BYTES` together. The rarest are left out by whole
    classes of equal count, so that the result stays independent of order.
    """

    MOST_DISTINCT = 1 << 24
    MOST_BYTES = 1 << 25

    def __init__(self, spans: Callable[[np.ndarray], Spans]) -> None:
        reuse_freed_memory()
        self._spans = spans
        self._rows: dict[int, list[Rows]] = {lanes: [] for lanes in LANES}
        self._pending = dict.fromkeys(LANES, 0)
        self._long: Counter[Piece] = Counter()

    def add_all(self, texts: Iterable[str], threads: int) -> None:
        for *found, long in ordered_map(self._count, windows(texts), threads):
            for lanes, rows in zip(LANES, found, strict=True):
                self._add(lanes, rows)
            self._long.update(long)

    def _count(self, texts: Window) -> list[Any]:
        window = texts.array()
        starts, lengths, _ = self._spans(window)
        found = []
        *sizes, long = by_lanes(lengths)
        for lanes, chosen in zip(LANES, sizes, strict=True):
            found.append(distinct(lanes_of(window, starts[chosen], lengths[chosen], lanes)))
        return [*found, long_pieces(window, starts[long], lengths[long])]

    def _add(self, lanes: int, rows: Rows) -> None:
        kept = self._rows[lanes]
        kept.append(rows)
        self._pending[lanes] += len(rows[1])
        # Joining when the new rows outweigh the joined ones keeps the total cost a small multiple of the rows.
        if self._pending[lanes] > max(PENDING_ROWS, 2 * len(kept[0][1])):
            self._join(lanes, threads=1)

    def _join(self, lanes: int, threads: int) -> None:
        joined = _concatenated(list(ordered_map(lambda part: distinct(*_concatenated(part)), self._slices(lanes), threads)))
        self._rows[lanes], self._pending[lanes] = [joined], 0
        if len(joined[1]) + len(self._long) > self.MOST_DISTINCT:
            raise ValueError(f"there are more than {self.MOST_DISTINCT:,} different words; learn from less text (--sample-mb)")

    def _slices(self, lanes: int) -> list[list[Rows]]:
        """The rows in parts of about SLICE_ROWS, equal ones in the same: small enough to stay near the caches.

        All of them are in the order of the high bits of their hashes. `distinct` cannot look at the lowest ones, as many as the
        number of its rows has: 32 are more than enough.
        """
        kept = self._rows[lanes]
        parts = sum(len(counts) for _, counts in kept) // SLICE_ROWS or 1
        bounds = np.array([(i << 32) // parts << 32 for i in range(1, parts)], np.uint64)
        slices: list[list[Rows]] = [[] for _ in range(parts)]
        for columns, counts in kept:
            cuts = [0, *np.searchsorted(mixed(columns), bounds).tolist(), len(counts)]
            for part, low, high in zip(slices, cuts, cuts[1:], strict=False):
                part.append((tuple(column[low:high] for column in columns), counts[low:high]))
        return slices

    def pieces(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Distinct pieces, END behind each, as one uint8 array; how often each occurs, int64; how many were left out."""
        lanes_by_size, counts = [], []
        filled = [lanes for lanes in LANES if self._rows[lanes]]
        for lanes in filled:
            self._join(lanes, cpu_count())
            columns, sums = self._rows[lanes][0]
            real = columns[0] != _PADDING[0]  # not END alone, the piece between texts
            lanes_by_size.append(tuple(column[real] for column in columns))
            counts.append(sums[real])
        long, long_counts = list(self._long), np.fromiter(self._long.values(), np.int64, len(self._long))
        sizes = [np.full(len(sums), 5 * lanes) for lanes, sums in enumerate(counts, 1)]  # roughly, on average
        sizes.append(np.fromiter(map(len, long), np.int64, len(long)))
        rarest = self._rarest(np.concatenate([*counts, long_counts]), np.concatenate(sizes))
        kept = [sums >= rarest for sums in counts]
        long = [piece for piece, count in zip(long, long_counts.tolist(), strict=True) if count >= rarest]
        flat = flatten([tuple(x[keep] for x in columns) for columns, keep in zip(lanes_by_size, kept, strict=True)], long)
        chosen = [sums[keep] for sums, keep in zip(counts, kept, strict=True)] + [long_counts[long_counts >= rarest]]
        return flat, np.concatenate(chosen), sum(map(len, sizes)) - sum(map(len, chosen))

    def _rarest(self, counts: np.ndarray, sizes: np.ndarray) -> int:
        """The least count for which all pieces that frequent fit into MOST_BYTES."""
        if sizes.sum() <= self.MOST_BYTES:
            return 0
        order = np.argsort(-counts, kind="stable")
        first_too_many = int(np.searchsorted(np.cumsum(sizes[order]), self.MOST_BYTES, side="right"))
        return int(counts[order[first_too_many]]) + 1


def flatten(lanes_by_size: Iterable[Sequence[np.ndarray]], long: Iterable[Piece]) -> np.ndarray:
    """Pieces given as numbers, then those given as bytes, as one array with one END behind each."""
    parts = []
    for lanes in lanes_by_size:
        rows = np.full((len(lanes[0]), 8 * len(lanes) + 1), END, np.uint8)
        for i, lane in enumerate(lanes):
            rows[:, 8 * i : 8 * i + 8] = lane.astype("<u8").view(np.uint8).reshape(-1, 8)
        keep = rows != END
        keep[:, 1:] |= keep[:, :-1].copy()  # the first END of a row stays
        parts.append(rows[keep])
    parts.append(np.frombuffer(bytes([END]).join([*long, b""]), np.uint8))
    return np.concatenate(parts)


def cells_of(pieces: np.ndarray, characters: bool, first_id: int) -> tuple[list[Piece], np.ndarray]:
    """The alphabet; one cell for each symbol, an id from `first_id` on, and 0 behind every piece.

    `pieces` has END behind each. Symbols are the characters that occur, sorted, or all 256 bytes.
    """
    ends = np.flatnonzero(pieces == END)
    # Worked on in parts, by all threads, so that what is made on the way stays near the caches.
    cuts = ends[np.searchsorted(ends, np.arange(CHUNK, len(pieces), CHUNK))] + 1
    points = np.split(pieces, cuts)
    if characters:
        points = list(ordered_map(code_points, points, cpu_count()))
        present = np.zeros(END_POINT + 1, np.bool_)
        for part in points:
            present[part] = True
        alphabet = np.flatnonzero(present[:END_POINT])
        pieces_of_alphabet = [chr(c).encode() for c in alphabet.tolist()]
    else:
        alphabet = np.arange(256)
        pieces_of_alphabet = [bytes([b]) for b in range(256)]
    end = END_POINT if characters else END
    ids = np.zeros(END_POINT + 1, np.uint16 if first_id + len(alphabet) < 1 << 15 else np.uint32)
    ids[alphabet] = np.arange(first_id, first_id + len(alphabet))
    ids[end] = 0
    return pieces_of_alphabet, np.concatenate(list(ordered_map(lambda part: ids[part], points, cpu_count())))


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Small numbers for counts, and the count that each stands for: its own up to SMALL_COUNT, where most are."""
    large = np.flatnonzero(counts >= SMALL_COUNT)
    values, of_large = np.unique(counts[large], return_inverse=True)
    meant = np.concatenate((np.arange(SMALL_COUNT), values))
    numbers = counts.astype(np.uint16 if len(meant) <= 1 << 16 else np.uint32)
    numbers[large] = SMALL_COUNT + of_large
    return numbers, meant.astype(np.int32) if meant[-1] < 1 << 31 else meant


END_POINT = 0x110000  # what END becomes among code points


def code_points(text: np.ndarray) -> np.ndarray:
    """One int32 for each character of whole UTF-8 text, END_POINT for END."""
    lead = text[(text & 0xC0) != 0x80]
    points = lead.astype(np.int32)
    points[np.flatnonzero(lead == END)] = END_POINT
    points[np.flatnonzero(_is_wide_lead(lead))] = _decode_wide(text, np.flatnonzero(_is_wide_lead(text)))[1]
    return points


# ----------------------------------------------------------------------------------------------------------------------
# Learning merges

SMALL_COUNT = 1 << 15
BATCH = 64  # merges applied together at most; 16 to 128 make no difference
HEAP = 1 << 10  # pairs in the heap at a time, about
CHUNK = 1 << 20  # cells looked at together when all are read
PARALLEL_ROWS = 1 << 15  # places from which on two threads look at halves of a batch
BATCH_ROWS = 1 << 20  # places they occur at together, unless one merge alone has more: bounds the memory of a batch


@contextlib.contextmanager
def garbage_uncollected() -> Iterator[None]:
    """Spares the interpreter from looking for reference cycles: a tenth of the time where many tuples are made and kept."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Merge(NamedTuple):
    count: int
    left: int
    right: int
    number: int


class Learner:
    """Incremental BPE training on one array of cells.

    A cell is one symbol of one distinct piece, with 0 between pieces. A token writes its id into its first cell and
    id | flag into its last; the cells inside hold 0. So from a token at p the next one is at p + width[id], the one before
    is cells[p - 1] without the flag, and a stale position is noticed by reading the cell. Every cell knows how often its
    piece occurs.

    Pairs are counted exactly, but only those with at least `threshold` occurrences. A pair's count can only fall once its
    tokens exist, so the others cannot be the most frequent while one at the threshold is left; then the threshold is
    lowered and the cells are read again. Positions of a pair are kept from when it was counted; they only go stale.
    """

    def __init__(self, cells: np.ndarray, counts: np.ndarray, tokens: list[Piece], vocab_size: int) -> None:
        """`cells` (N,) ids with a 0 at the end of each piece, which are written to; `counts` (pieces,)."""
        wide = vocab_size >= 1 << 15
        self.flag = 1 << 31 if wide else 1 << 15
        self.cells = cells.astype(np.uint32 if wide else np.uint16, copy=False)
        self.tokens, self.vocab_size = tokens, vocab_size
        self.width = np.ones(min(vocab_size, len(tokens) + len(cells)), np.int64)
        self.place_dtype = np.int32 if len(cells) < 1 << 31 else np.int64
        # Anything works; this starts slightly below the count of the last merge on natural text.
        sizes = np.diff(np.flatnonzero(self.cells == 0), prepend=-1)
        self.threshold = int(counts[sizes > 2].sum()) // (6 * vocab_size)  # of two symbols and more
        numbers, self.meant = numbered(counts)
        self.numbers = np.repeat(numbers, sizes)  # of counts, by cell
        self._forget_pairs()

    def _forget_pairs(self) -> None:
        self.index = PieceTable(1, fullest=0.25)  # left << 32 | right to the pair's number
        self.pairs: list[tuple[int, int]] = []
        self.places: list[np.ndarray | None] = []
        self.counts = np.zeros(1 << 12, np.int64)  # by number; 0 once below the threshold
        # (-count, left piece, right piece, number) of all pairs at `level` and above: many below never get there.
        self.heap: list[tuple[int, Piece, Piece, int]] = []
        self.level = 1 << 62

    def learn(
        self, forbidden: Iterable[Piece], min_frequency: int, progress: Callable[[int, int], None] | None
    ) -> list[tuple[int, int]]:
        """The merges, in order; `tokens` grows by one for each."""
        merges: list[tuple[int, int]] = []
        wanted = self.vocab_size - len(self.tokens)
        self.forbidden, self.spelled = set(forbidden), set(self.tokens)
        min_frequency = max(1, min_frequency)
        self.threshold = max(min_frequency, self.threshold)
        with garbage_uncollected(), ThreadPoolExecutor(1) as self.helper:
            self._merge_all(merges, wanted, min_frequency, progress)
        return merges

    def _merge_all(
        self, merges: list[tuple[int, int]], wanted: int, min_frequency: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self.read_cells()
        while len(merges) < wanted:
            batch = self.next_batch(min(BATCH, wanted - len(merges)))
            if batch:
                merges += self.apply(batch)
                if progress:
                    progress(len(merges), wanted)
            elif self.threshold > min_frequency:
                self.threshold = max(min_frequency, self.threshold // 8)
                self.read_cells()
            else:
                return

    # Which pairs

    def read_cells(self) -> None:
        """Counts all pairs afresh and keeps those at the threshold, with their positions."""
        self._forget_pairs()
        places = np.empty(len(self.cells), self.place_dtype)
        parts = ordered_map(lambda low: self._read(places, low), range(0, len(self.cells), CHUNK), cpu_count())
        left, right, sums, starts, ends = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        narrow = self.cells.dtype
        order, firsts, left, right = grouped(left.astype(narrow), right.astype(narrow), len(self.tokens))
        sums = np.add.reduceat(sums[order], firsts) if len(order) else sums
        chosen = np.flatnonzero(sums >= self.threshold)
        lists = []
        for first, last in zip(firsts[chosen].tolist(), np.append(firsts[1:], len(order))[chosen].tolist(), strict=True):
            lists.append(np.concatenate([places[starts[i] : ends[i]] for i in order[first:last]]))
        self._count(left[chosen], right[chosen], sums[chosen], lists)

    def _read(self, places: np.ndarray, low: int) -> tuple[np.ndarray, ...]:
        """The pairs that start in one chunk of the cells: both ids, counts, from where to where their positions stand.

        The positions are put into `places` from `low` on. Chunks, because arrays of the whole length would be new memory
        at each step, which costs several times the work done on it.
        """
        cells = self.cells[low : low + CHUNK]
        at = np.flatnonzero((cells != 0) & (cells < self.flag)) + low
        left = self.cells[at]
        right = self.cells[at + self.width[left]]
        order, starts, left, right = grouped(left, right, len(self.tokens))
        at = at[order]
        places[low : low + len(at)] = at
        sums = np.add.reduceat(self._weights(at), starts, dtype=np.int64) if len(at) else np.zeros(0, np.int64)
        ends = np.append(starts[1:], len(at))[: len(starts)]
        pair = np.flatnonzero(right)  # but no pair reaches beyond its piece
        return tuple(column[pair] for column in (left, right, sums, starts + low, ends + low))

    def _count(self, left: np.ndarray, right: np.ndarray, counts: np.ndarray, places: list[np.ndarray]) -> None:
        """Takes up pairs that were never counted before."""
        first, size = len(self.pairs), len(self.pairs) + len(places)
        if size > len(self.counts):
            self.counts = np.concatenate((self.counts, np.zeros(size, np.int64)))
        self.counts[first:size] = counts
        self.index.insert((_pair_key(left, right),), np.arange(first, size))
        self.places += places
        self.pairs += zip(left.tolist(), right.tolist(), strict=True)
        self._push((first + np.flatnonzero(counts >= self.level)).tolist())

    def _push(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            left, right = self.pairs[number]
            heapq.heappush(self.heap, (-int(self.counts[number]), self.tokens[left], self.tokens[right], number))

    def _refill(self) -> bool:
        """Lowers the level so far that the empty heap gets HEAP pairs, and those equal to the last; whether it got any.

        All pairs from the old level on are merged, or stand in the batch that is being chosen.
        """
        counts = self.counts[: len(self.pairs)]
        below = np.flatnonzero((counts >= self.threshold) & (counts < self.level))
        if len(below) > HEAP:
            self.level = int(np.partition(counts[below], -HEAP)[-HEAP])
            below = below[counts[below] >= self.level]
        else:
            self.level = self.threshold
        self._push(below.tolist())
        return len(below) > 0

    def next_batch(self, limit: int) -> list[Merge]:
        """The next merges, most frequent first, as far as none shares a token with another's other side.

        Then no two of them overlap anywhere, and none changes another's count. Heap entries are upper bounds: one whose
        count has fallen goes back with the true count, or leaves the heap where that is below the level. A merge of equal
        tokens goes alone, since its places do overlap.
        """
        batch: list[Merge] = []
        lefts, rights, rows = set(), set(), 0
        while len(batch) < limit and rows < BATCH_ROWS and (self.heap or self._refill()):
            negative, left_piece, right_piece, number = self.heap[0]
            count = int(self.counts[number])
            if count < self.level:
                heapq.heappop(self.heap)
                continue
            if count != -negative:
                heapq.heapreplace(self.heap, (-count, left_piece, right_piece, number))
                continue
            left, right = self.pairs[number]
            if left_piece + right_piece in self.forbidden:
                self._drop(number)
                continue
            if batch and (left in rights or right in lefts or left == right):
                break
            heapq.heappop(self.heap)
            batch.append(Merge(count, left, right, number))
            lefts.add(left)
            rights.add(right)
            rows += len(self.places[number])
            if left == right:
                break
        return batch

    def _drop(self, number: int) -> None:
        self.counts[number], self.places[number] = 0, None

    # One batch

    def apply(self, batch: list[Merge]) -> list[tuple[int, int]]:
        """Merges the pairs of `batch`, or the first ones where a pair made by one may come before a later one."""
        part, *rest = self._parts(batch)
        waiting = [self.helper.submit(self._look, part) for part in rest]
        parts = [self._look(part), *(future.result() for future in waiting)]
        size = self._first_rival(batch, [groups for _, groups in parts])
        if size < len(batch):  # seldom
            self._push(merge.number for merge in batch[size:])
            return self.apply(batch[:size])
        new = self._add_tokens(batch)
        for places, _ in parts:
            self._write(places, new)
        for _, groups in parts:
            self._recount(batch, new, groups)
        return [(merge.left, merge.right) for merge in batch]

    def _parts(self, batch: list[Merge]) -> list[tuple[int, list[Merge]]]:
        """The batch, or where that pays two halves with about as many places, each behind the number of its first merge."""
        behind = np.cumsum([len(self.places[merge.number]) for merge in batch])
        half = int(np.searchsorted(behind, behind[-1] // 2)) + 1
        if behind[-1] < PARALLEL_ROWS or half == len(batch):
            return [(0, batch)]
        return [(0, batch[:half]), (half, batch[half:])]

    def _look(self, part: tuple[int, list[Merge]]) -> tuple["Places", "Groups"]:
        """Where part of a batch merges, and what is beside it."""
        places = self._occurrences(*part)
        return places, self._neighbours(places)

    def _occurrences(self, first: int, batch: list[Merge]) -> "Places":
        """Every place to merge. Per-merge values are spread over the places by `repeat`, which costs far less than indexing."""
        listed = [self.places[merge.number] for merge in batch]
        sizes = np.array([len(p) for p in listed])
        at = np.concatenate(listed).astype(np.int64)  # 64-bit indices gather faster than 32-bit ones
        left, right = np.array([m.left for m in batch]), np.array([m.right for m in batch])
        middle = at + np.repeat(self.width[left], sizes)
        here = self.cells.take(at) == np.repeat(left.astype(self.cells.dtype), sizes)
        here &= self.cells.take(middle) == np.repeat(right.astype(self.cells.dtype), sizes)
        valid = np.flatnonzero(here)
        at, middle = at.take(valid), middle.take(valid)
        if batch[0].left == batch[0].right:
            width = int(self.width[batch[0].left])
            at = every_other(np.sort(at), width)
            middle, sizes = at + width, np.array([len(at)])
        else:
            sizes = np.diff(np.searchsorted(valid, np.cumsum(sizes)), prepend=0)
        return Places(first, sizes, at, middle, middle + np.repeat(self.width[right], sizes))

    def _ids(self, cells: np.ndarray) -> np.ndarray:
        """The ids that first or last cells hold."""
        return self.cells.take(cells) & self.cells.dtype.type(self.flag - 1)

    def _weights(self, cells: np.ndarray) -> np.ndarray:
        """How often the pieces of some cells occur."""
        return self.meant.take(self.numbers.take(cells))

    def _neighbours(self, places: "Places") -> "Groups":
        """What is beside the places. The array ends with 0, so index -1 is none either."""
        cells = np.concatenate((places.at - 1, places.end))
        merges = np.arange(places.first, places.first + len(places.sizes), dtype=np.uint8)
        owner = np.repeat(np.concatenate((2 * merges, 2 * merges + 1)), np.tile(places.sizes, 2))
        return Groups(cells, owner, self._ids(cells), np.tile(self._weights(places.at), 2), len(self.tokens))

    def _first_rival(self, batch: list[Merge], parts: list["Groups"]) -> int:
        """How many merges of the batch are sure to come in this order.

        Merge j may go along when every pair that merges before it create is rarer than it. The counts are taken from the
        neighbours as they are before the batch: what the batch makes of them later can only divide a pair.
        """
        highest = np.zeros(len(batch), np.int64)
        for groups in parts:
            np.maximum.at(highest, groups.merge, groups.sums)
        counts = np.array([merge.count for merge in batch])
        rivals = np.flatnonzero(np.maximum.accumulate(highest)[:-1] >= counts[1:])
        return int(rivals[0]) + 1 if len(rivals) else len(batch)

    def _add_tokens(self, batch: list[Merge]) -> np.ndarray:
        first = len(self.tokens)
        for merge in batch:
            piece = self.tokens[merge.left] + self.tokens[merge.right]
            assert piece not in self.spelled, f"two merges make {piece!r}"
            self.spelled.add(piece)
            self.width[len(self.tokens)] = self.width[merge.left] + self.width[merge.right]
            self.tokens.append(piece)
            self._drop(merge.number)
        return np.arange(first, first + len(batch))

    def _write(self, places: "Places", new: np.ndarray) -> None:
        new = new[places.first : places.first + len(places.sizes)]
        ids = np.repeat(new.astype(self.cells.dtype), places.sizes)
        self.cells[places.middle - 1] = 0
        self.cells[places.middle] = 0
        self.cells[places.at] = ids
        self.cells[places.end - 1] = ids | self.cells.dtype.type(self.flag)

    def _recount(self, batch: list[Merge], new: np.ndarray, groups: "Groups") -> None:
        """Takes the pairs that are gone off their counts and counts the new ones.

        x L R y: (x, L) and (R, y) are lost, (x, new) and (new, y) gained. Where y was itself merged in this batch, the
        gained pair is (new, new y); where x was, its own right side has both.
        """
        left, right = np.array([m.left for m in batch]), np.array([m.right for m in batch])
        gained, moved = self._moved(left, right, new, groups)
        old = np.where(groups.side, right[groups.merge], left[groups.merge])
        self._lose(*groups.pairs_with(old), np.where(groups.side, groups.sums, gained))
        self._gain(groups, gained, new)
        if moved:
            self._gain(moved, moved.sums, new)

    def _moved(
        self, left: np.ndarray, right: np.ndarray, new: np.ndarray, groups: "Groups"
    ) -> tuple[np.ndarray, "Groups | None"]:
        """How often each group is left once neighbours merged in the same batch are taken off; those on right sides, if any."""
        merged = np.zeros((2, len(self.tokens)), np.bool_)
        merged[0, right] = merged[1, left] = True
        suspects = np.flatnonzero(merged[groups.side, groups.neighbour])
        if len(suspects) == 0:
            return groups.sums, None
        rows, sizes = groups.rows_of(suspects)
        now, weight = self._ids(groups.cells.take(rows)), groups.weight.take(rows)
        changed = now >= new[0]
        gained = groups.sums.copy()
        gained[suspects] -= np.add.reduceat(weight * changed, np.cumsum(sizes) - sizes, dtype=np.int64)
        found = np.flatnonzero(changed & np.repeat(groups.side[suspects] == 1, sizes))
        if len(found) == 0:
            return gained, None
        rows = rows[found]
        return gained, Groups(groups.cells[rows], groups.owner[rows], now[found], weight[found], len(self.tokens))

    def _lose(self, left: np.ndarray, right: np.ndarray, lost: np.ndarray) -> None:
        number = self.index.find((_pair_key(left, right),))
        counted = np.flatnonzero(number != UNKNOWN)
        counted = counted[self.counts[number[counted]] > 0]
        number = number[counted]
        np.subtract.at(self.counts, number, lost[counted])
        for i in number[self.counts[number] < self.threshold].tolist():
            self._drop(i)

    def _gain(self, groups: "Groups", gained: np.ndarray, new: np.ndarray) -> None:
        """Counts the groups that reach the threshold. Rows whose neighbour was merged too are stale places at once."""
        chosen = np.flatnonzero(gained >= self.threshold)
        if len(chosen) == 0:
            return
        left, right = (pair[chosen] for pair in groups.pairs_with(new[groups.merge]))
        rows, sizes = groups.rows_of(chosen)
        # The pair starts at the neighbour, whose last cell the row names, or at the new token, in front of that cell.
        places = groups.cells.take(rows) + np.repeat(1 - groups.side[chosen] - self.width[left], sizes)
        ends = np.cumsum(sizes).tolist()
        places = places.astype(self.place_dtype)
        self._count(left, right, gained[chosen], [places[a:b] for a, b in zip([0, *ends], ends, strict=False)])


class Places(NamedTuple):
    """Where a batch merges, the places of one merge behind those of another: the first cells of both tokens, and the cell
    behind them."""

    first: int  # the first merge's number in the batch
    sizes: np.ndarray  # how many places each merge has
    at: np.ndarray
    middle: np.ndarray
    end: np.ndarray


class Groups:
    """The neighbours of a batch's places grouped by (merge, side, neighbour): `sums[i]` is how often group i occurs."""

    def __init__(
        self, cells: np.ndarray, owner: np.ndarray, neighbour: np.ndarray, weight: np.ndarray, vocab_size: int
    ) -> None:
        """One row for each side of each place: the cell beside it; 2 * the number of its merge, and 1 more on the right
        side; the id in that cell, 0 for none; and the count of the piece."""
        self.cells, self.owner, self.weight = cells, owner, weight
        self.rows, starts, owner, neighbour = grouped(owner, neighbour, vocab_size)
        real = np.flatnonzero(neighbour)
        self.starts, self.ends = starts[real], np.append(starts[1:], len(self.rows))[real]
        self.sums = np.add.reduceat(weight.take(self.rows), starts, dtype=np.int64)[real]
        self.merge, self.side, self.neighbour = owner[real] >> 1, owner[real] & 1, neighbour[real]

    def pairs_with(self, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The left and the right ids of the pairs that the neighbours make with one token for each group."""
        return np.where(self.side, token, self.neighbour), np.where(self.side, self.neighbour, token)

    def rows_of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of some groups (one at least), one group after the other, and how many each has."""
        sizes = self.ends[chosen] - self.starts[chosen]
        return self.rows.take(consecutive(self.starts[chosen], sizes)), sizes


def _pair_key(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left << 32 | right).astype(np.uint64)


def consecutive(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The numbers from each start on, as many as its size says; one start at least."""
    behind = np.cumsum(sizes)
    return np.repeat(starts - behind + sizes, sizes) + np.arange(behind[-1])


def every_other(at: np.ndarray, width: int) -> np.ndarray:
    """Of sorted places `width` apart in runs (overlapping pairs of one token), the first, third, ... of each run."""
    fresh = np.flatnonzero(np.diff(at, prepend=-1 - width) != width)
    run_start = np.repeat(fresh, np.diff(fresh, append=len(at)))
    return at[(np.arange(len(at)) - run_start) % 2 == 0]


def grouped(high: np.ndarray, low: np.ndarray, span: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The order that sorts rows by (high, low), equal ones as they come; where each group starts then; the groups, int64.

    All of `low` is below `span`. NumPy sorts indices by numbers of 8 and 16 bits in linear time, several times faster than
    by wider ones, so these are made narrow where they can be, and sorted by one after the other where not.
    """
    if span <= 1 << 16:
        low = low.astype(np.uint16)
    if len(high) and (int(high.max()) + 1) * span <= 1 << 16:
        key = high * np.uint16(span) + low
        order = np.argsort(key, kind="stable")
        starts = boundaries((key.take(order),))
    else:
        order = np.argsort(low, kind="stable")
        order = order.take(np.argsort(high.take(order), kind="stable"))
        starts = boundaries((high.take(order), low.take(order)))
    firsts = order[starts]
    return order, starts, high[firsts].astype(np.int64), low[firsts].astype(np.int64)


# ----------------------------------------------------------------------------------------------------------------------
# Applying merges

Ranks = dict[tuple[int, int], int]  # (left, right) to the merge's rank: the lower goes first


def merge_piece(ids: list[int], ranks: Ranks, results: Sequence[int]) -> list[int]:
    """Applies the merge of the lowest rank, at its leftmost place, until none is left. Time is O(n log n)."""
    if len(ids) > 48:
        return _merge_long_piece(ids, ranks, results)
    ids = list(ids)
    last = len(results)
    around = [ranks.get(pair, last) for pair in itertools.pairwise(ids)]
    while around:
        rank = min(around)
        if rank == last:
            break
        i = around.index(rank)
        ids[i : i + 2] = [results[rank]]
        del around[i]
        if i > 0:
            around[i - 1] = ranks.get((ids[i - 1], ids[i]), last)
        if i < len(around):
            around[i] = ranks.get((ids[i], ids[i + 1]), last)
    return ids


def _merge_long_piece(ids: list[int], ranks: Ranks, results: Sequence[int]) -> list[int]:
    """The same with a heap of (rank, place) and links to the neighbours; a merged token lives in its first place."""
    n = len(ids)
    ids = [*ids, -1]
    following, previous = list(range(1, n + 2)), list(range(-1, n))
    heap = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(ids)) if pair in ranks]
    heapq.heapify(heap)
    while heap:
        rank, i = heapq.heappop(heap)
        j = following[i]
        if ids[i] < 0 or ranks.get((ids[i], ids[j])) != rank:
            continue  # one of the two was merged since
        ids[i], ids[j] = results[rank], -1
        before, after = previous[i], following[j]
        following[i], previous[after] = after, i
        for a, b in ((before, i), (i, after)):
            if a >= 0 and (ids[a], ids[b]) in ranks:
                heapq.heappush(heap, (ranks[ids[a], ids[b]], a))
    return [i for i in ids if i >= 0]


class MergeTable:
    """The order of merges for whole arrays of pairs, with two reads each.

    A merge's order is its rank with PLACE_BITS empty bits below, for the place of a pair; NONE (or more) is no merge.
    Row displacement: the merges of one left token are a sparse row, indexed by the right token; the rows are laid over each
    other in one array, at offsets where they do not collide, and each entry names its left token.
    """

    PLACE_BITS = 8
    NONE = 0xFFFFFF00
    MOST_MERGES = NONE >> PLACE_BITS

    def __init__(self, ranks: Ranks, vocab_size: int) -> None:
        if len(ranks) > self.MOST_MERGES:
            raise ValueError(f"{len(ranks):,} merges are too many; at most {self.MOST_MERGES:,} are supported")
        pairs = np.fromiter(itertools.chain.from_iterable(ranks), np.int64, 2 * len(ranks)).reshape(-1, 2)
        left, right = pairs[:, 0], pairs[:, 1]
        self.offsets = _row_offsets(left, right, vocab_size)
        self.entries = np.full(int(self.offsets.max()) + vocab_size + 1, (1 << 64) - 1, np.uint64)
        orders = np.fromiter(ranks.values(), np.uint64, len(ranks)) << np.uint64(self.PLACE_BITS)
        self.entries[self.offsets[left] + right] = left.astype(np.uint64) << np.uint64(32) | orders

    def find(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """uint32 orders of the pairs."""
        entries = self.entries[self.offsets[left] + right]
        entries ^= left.astype(np.uint64) << np.uint64(32)  # leaves the order alone, or something greater than any order
        return np.minimum(entries, np.uint64(self.NONE), out=entries).astype(np.uint32)


STEP = 1 << 12


def _row_offsets(left: np.ndarray, right: np.ndarray, vocab_size: int) -> np.ndarray:
    """Where each left token's row starts, int64 (vocab_size + 1,): first fit, the longest rows first.

    A wide step between tries needs a quarter of the tries that a step of one takes: rows are dense among frequent tokens.
    """
    rows: dict[int, list[int]] = {}
    for token, other in zip(left.tolist(), right.tolist(), strict=True):
        rows.setdefault(token, []).append(other)
    span = 4 * len(left) + 65  # a quarter full, so that a short row fits nearly anywhere; odd, so that STEP meets all of it
    used = bytearray(span + vocab_size + 1)
    offsets = np.zeros(vocab_size + 1, np.int64)
    for token, row in sorted(rows.items(), key=lambda item: -len(item[1])):
        offset = token * 40_503 % span
        while any(used[offset + other] for other in row):
            offset = (offset + STEP) % span
        offsets[token] = offset
        for other in row:
            used[offset + other] = 1
    return offsets


class Merged(NamedTuple):
    """Pieces that came out at one length."""

    which: np.ndarray  # (k,) the pieces' numbers
    tokens: np.ndarray  # (length, k)


def merge_columns(
    symbols: np.ndarray, starts: np.ndarray, sizes: np.ndarray, table: MergeTable, results: np.ndarray
) -> Iterator[Merged]:
    """Merges many pieces side by side, one per column; piece i is symbols[starts[i] : starts[i] + sizes[i]], 256 at most.

    All columns at work have the same length. A round applies each one's best merge and makes it one shorter, so it then
    stands beside the pieces of that length: as many rounds as the longest piece has symbols, and all of them wide.
    `results[r]` is what merge r makes; behind them stands the padding, an id without merges. Padding above and below a
    column gives every place neighbours, and inside one that has ended it makes no merge.
    """
    padding = results[-1]
    order = np.argsort(sizes.astype(np.uint16), kind="stable")[::-1]
    longest = int(sizes[order[0]])
    joining = np.split(order, np.cumsum(np.bincount(sizes, minlength=longest + 1)[:0:-1]))
    which, ended = order[:0], np.zeros(0, np.bool_)
    tokens, orders = np.zeros((longest + 2, 0), symbols.dtype), np.zeros((longest + 1, 0), np.uint32)
    for length, fresh in zip(range(longest, 0, -1), joining, strict=False):
        if len(fresh):
            columns = _columns(symbols, starts[fresh], length, padding)
            which, ended = np.concatenate((which, fresh)), np.concatenate((ended, np.zeros(len(fresh), np.bool_)))
            tokens = np.concatenate((tokens, columns), axis=1)
            orders = np.concatenate((orders, _orders(columns, table)), axis=1)
        chosen = orders.min(axis=0)
        stuck = chosen >= MergeTable.NONE
        ending = np.flatnonzero(stuck > ended)
        if len(ending):
            yield Merged(which[ending], tokens[1:-1].take(ending, axis=1))
        ended = stuck
        if 4 * np.count_nonzero(ended) > len(ended):  # moving columns costs as much as a round: meanwhile they idle along
            going = np.flatnonzero(~ended)
            which, chosen, ended = which[going], chosen[going], ended[going]
            tokens, orders = tokens.take(going, axis=1), orders.take(going, axis=1)
        if length > 1:
            tokens, orders = _round(tokens, orders, chosen, table, results)


def merge_overlapping(
    symbols: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    block: int,
    table: MergeTable,
    results: np.ndarray,
    widths: np.ndarray,
) -> list[np.ndarray]:
    """The tokens of pieces longer than `block` symbols, 256 at most; none for a piece that needs longer blocks.

    A piece is cut into blocks that overlap by half, which are merged as if each were a piece; `widths` has every token's
    symbols. Where a block and the one before have a token in common, the one is left for the other. That is what merging
    the whole gives: any two tokens side by side are so in a block, where nothing was merged across the border between them;
    so nothing is in the whole either, since the first such merge would find both as they are in the block at that time.
    """
    half = block // 2
    counts = (sizes - block - 1) // half + 2
    piece = np.repeat(np.arange(len(sizes)), counts)
    at = np.repeat(starts, counts) + half * consecutive(np.zeros_like(counts), counts)
    block_sizes = np.minimum(block, np.repeat(starts + sizes, counts) - at)
    opens = np.diff(piece, prepend=-1, append=-1) != 0  # whether a block is the first of a piece; behind the last one, True
    parts: list[list[np.ndarray]] = [[] for _ in sizes]
    failed = np.zeros(len(sizes), np.bool_)
    low, entry = 0, 0
    while low < len(at):
        high = min(low + BLOCKS, len(at))
        tokens, owner = _flat(merge_columns(symbols, at[low:high], block_sizes[low:high], table, results), high - low)
        places = _places(tokens, owner, at[low:high], widths)
        entries = _entries(tokens, owner, places, at[low:high], half, results[-1])
        if not opens[low]:
            entries[0] = entry
        entries = np.where(opens[low:high], at[low:high], entries)
        failed[piece[low:high][entries < 0]] = True
        # The last block here waits for the next ones to say where it is left, unless its piece ends with it.
        exits = np.where(opens[low + 1 : high + 1], len(symbols), np.append(entries[1:], 0))
        kept = np.flatnonzero((places >= entries[owner]) & (places < exits[owner]))
        of_piece = piece[low:high][owner[kept]]
        for first, last in itertools.pairwise([*boundaries((of_piece,)).tolist(), len(kept)]):
            parts[of_piece[first]].append(tokens[kept[first:last]])
        low, entry = (high, 0) if opens[high] else (high - 1, entries[-1])
    return [results[:0] if fault else np.concatenate(part) for part, fault in zip(parts, failed.tolist(), strict=True)]


def _flat(merged: Iterable[Merged], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of `count` pieces, one piece after the other, and the piece that each belongs to."""
    merged = list(merged)
    lengths = np.zeros(count, np.int64)
    for which, tokens in merged:
        lengths[which] = len(tokens)
    firsts = np.cumsum(lengths) - lengths
    flat = np.empty(lengths.sum(), merged[0].tokens.dtype)
    for which, tokens in merged:
        flat[firsts[which] + np.arange(len(tokens))[:, None]] = tokens
    return flat, np.repeat(np.arange(count), lengths)


def _places(tokens: np.ndarray, owner: np.ndarray, at: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Each token's first symbol; block i begins at `at[i]`."""
    ends = np.cumsum(widths[tokens])
    places = ends - widths[tokens]
    return places + (at - places[boundaries((owner,))])[owner]


def _entries(
    tokens: np.ndarray, owner: np.ndarray, places: np.ndarray, at: np.ndarray, half: int, hole: np.generic
) -> np.ndarray:
    """Where the first token of each block is that the block before has too; -1 for none."""
    seen = np.full((2, int(places.max() - at[0]) + 1), hole)  # by every other block, which do not overlap, and by those between
    seen[owner & 1, places - at[0]] = tokens
    common = np.flatnonzero((seen[1 - (owner & 1), places - at[0]] == tokens) & (places < at[owner] + half))
    entries = np.full(len(at), -1)
    entries[owner[common][::-1]] = places[common][::-1]  # of several, the last one written stays
    return entries


def _columns(symbols: np.ndarray, starts: np.ndarray, length: int, padding: np.generic) -> np.ndarray:
    """Pieces of one length as columns between padding, (length + 2, k)."""
    columns = np.full((length + 2, len(starts)), padding, symbols.dtype)
    columns[1:-1] = symbols[starts + np.arange(length)[:, None]]
    return columns


def _orders(columns: np.ndarray, table: MergeTable) -> np.ndarray:
    """Each pair's merge order with its place added: the least number of a column is the merge to apply, and where."""
    orders = np.full((len(columns) - 1, columns.shape[1]), MergeTable.NONE + 255, np.uint32)
    orders[1:-1] = table.find(columns[1:-2], columns[2:-1])
    orders[1:-1] += np.arange(1, len(columns) - 2, dtype=np.uint32)[:, None]
    return orders


def _round(
    tokens: np.ndarray, orders: np.ndarray, chosen: np.ndarray, table: MergeTable, results: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Applies the `chosen` merge of each column; what is behind it moves up by one. Columns without a merge get padding."""
    width = len(chosen)
    place = chosen.astype(np.uint8)
    behind = (place.astype(np.int16) - np.arange(len(orders), dtype=np.int16)[:, None]) >> np.int16(15)  # all bits, or none
    new = results[np.minimum(chosen >> np.uint32(MergeTable.PLACE_BITS), np.uint32(len(results) - 1))]
    tokens = _selected(behind, tokens[1:], tokens[:-1])
    orders = _selected(behind[:-1], orders[1:] - np.uint32(1), orders[:-1])  # their places too
    at = place.astype(np.int64) * width
    at += np.arange(width)
    all_tokens, all_orders = tokens.reshape(-1), orders.reshape(-1)  # views: both arrays are fresh and contiguous
    all_tokens[at] = new
    after = table.find(new, all_tokens[at + width])
    all_orders[at] = after + place
    at -= width
    before = table.find(all_tokens[at], new)
    all_orders[at] = before + (place - np.uint8(1))
    return tokens, orders


def _selected(mask: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a` where all bits of the mask are set, `b` where none is: `np.where` takes seven times as long."""
    picked = a ^ b
    picked &= mask.astype(np.dtype(f"i{b.itemsize}"), copy=False).view(b.dtype)
    picked ^= b
    return picked


# ----------------------------------------------------------------------------------------------------------------------
# Encoding in bulk

VALUE = np.dtype("<i8")  # of a piece: little-endian, so that its first token is in the lowest bits
UNKNOWN = -2  # no value
NO_TOKENS = -1  # the value of END alone
ALONE = 12  # pieces of a job that are merged one by one, the longest
TALLEST = 256  # symbols of a piece that is merged as one column
BLOCK_SIZES = (64, 256)  # of longer pieces: the smaller are faster, and hardly ever too small for tokens of a natural text
BLOCKS = 1 << 13  # merged side by side
JOB_PIECES = 1 << 16  # merged side by side: the more, the fewer calls; the fewer, the nearer to the caches
JOB_BYTES = 1 << 19  # of longer ones


class PieceTable:
    """What pieces of `lanes` numbers encode to: open addressing, for whole arrays of pieces at once.

    A piece and its value share a row of 16 or 32 bytes: a lookup reads one place in memory (a third less time than two).
    """

    def __init__(self, lanes: int, fullest: float) -> None:
        """`fullest` is the share of its slots in use at which the table grows: fuller, searches get long, emptier, memory."""
        self.lanes, self.columns, self.bits, self.size = lanes, 2 if lanes == 1 else 4, 12, 0
        self.fullest = fullest
        self._clear()

    def _clear(self) -> None:
        # Lanes from the left, the value at the right; no lane equals UNKNOWN either, whose bytes are not UTF-8.
        # Not `zeros`: NumPy asks for huge pages only where it fills memory itself.
        self.rows = np.full((1 << self.bits, self.columns), UNKNOWN, np.int64).view(np.uint64)

    @property
    def values(self) -> np.ndarray:
        """(slots,) int64, UNKNOWN in empty ones."""
        return self.rows.view(np.int64)[:, -1]

    def _slots(self, lanes: Sequence[np.ndarray]) -> np.ndarray:
        return (mixed(lanes) >> np.uint64(64 - self.bits)).view(np.int64)

    def _look(self, slots: np.ndarray, lanes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The values in some slots, and which of them are other pieces': indices."""
        rows = self.rows.take(slots, axis=0)
        values = rows.view(np.int64)[:, -1].copy()
        others = rows[:, 0] != lanes[0]
        for i in range(1, self.lanes):
            others |= rows[:, i] != lanes[i]
        others = np.flatnonzero(others)
        return values, others[values[others] != UNKNOWN]

    def find(self, lanes: Sequence[np.ndarray]) -> np.ndarray:
        """int64 values, UNKNOWN for pieces that are not here."""
        slots = self._slots(lanes)
        values, more = self._look(slots, lanes)
        wrong = more
        while len(wrong):
            slots, lanes = slots[more] + 1 & (1 << self.bits) - 1, [lane[more] for lane in lanes]
            values[wrong], more = self._look(slots, lanes)
            wrong = wrong[more]
        return values

    def insert(self, lanes: Sequence[np.ndarray], values: np.ndarray) -> None:
        """Adds pieces that are not here yet. One that comes twice takes two slots, and the first is found: no harm is done."""
        rows = np.empty((len(values), self.columns), np.uint64)
        for i, lane in enumerate(lanes):
            rows[:, i] = lane
        rows.view(np.int64)[:, -1] = values
        self.size += len(rows)
        if self.size > self.fullest * (1 << self.bits):
            old = self.rows.take(np.flatnonzero(self.values != UNKNOWN), axis=0)
            self.bits = int(1.6 * self.size / self.fullest).bit_length()
            self._clear()
            self._place(old)
        self._place(rows)

    def _place(self, rows: np.ndarray) -> None:
        slots = self._slots([rows[:, i] for i in range(self.lanes)])
        while len(rows):
            free = np.flatnonzero(self.values[slots] == UNKNOWN)
            # Of several for one slot the last one stays.
            self._whole(self.rows)[slots[free]] = self._whole(rows.take(free, axis=0))
            _, rest = self._look(slots, [rows[:, i] for i in range(self.lanes)])
            slots, rows = slots[rest] + 1 & (1 << self.bits) - 1, rows.take(rest, axis=0)

    @staticmethod
    def _whole(rows: np.ndarray) -> np.ndarray:
        """Each row as one item: so NumPy assigns rows several times faster."""
        return rows.view(f"V{rows.itemsize * rows.shape[1]}").reshape(-1)


class _LookedUp(NamedTuple):
    """A window on its way: pieces by size, and what each encodes to as far as it is known."""

    values: np.ndarray  # (pieces,), UNKNOWN for new ones
    new: list[np.ndarray]  # indices of the unknown pieces of 1, 2, and 3 lanes, and of the longer ones
    lanes: list[tuple[np.ndarray, ...]]  # their numbers, where they are such
    fresh: list[tuple[np.ndarray, ...]]  # the distinct ones of them
    long: list[Piece]  # the longer ones
    before: np.ndarray  # how many pieces come before each END


class Encoder:
    """Encodes texts in bulk, and remembers pieces from call to call, up to `MOST_PIECES` of them.

    The value of a piece is its tokens themselves, with holes behind them, as far as 8 bytes have room: so putting ids together
    is leaving out holes. The few pieces with more tokens are runs in a common store, of a size and then as many values; their
    own value is a hole with the place of the run above it.
    """

    MOST_PIECES = 1 << 20  # about 100 MB
    MOST_STORED = 1 << 21
    GROUP = 16  # windows whose new pieces are encoded together: more are alike, and the columns are wider

    def __init__(
        self,
        ranks: Ranks,
        results: Sequence[int],
        symbols: dict[int, int],
        unknown: int,
        widths: Sequence[int],
        characters: bool,
    ) -> None:
        """`symbols` gives the id of a code point (with `characters`) or of a byte, for others it is `unknown`; `results` the
        token a merge makes; `widths` how many symbols each token of the vocabulary has."""
        vocab_size = len(widths)
        reuse_freed_memory()
        self.ranks, self.result_list = ranks, list(results)
        self.table = MergeTable(ranks, vocab_size)
        self.dtype = np.uint16 if vocab_size < 0xFFFF else np.uint32
        self.hole = self.dtype(np.iinfo(self.dtype).max)  # no id
        self.room = 8 // self.hole.itemsize
        self.symbols = np.full(END_POINT + 1 if characters else 256, unknown, self.dtype)
        self.symbols[list(symbols)] = list(symbols.values())
        self.results = np.array([*self.result_list, vocab_size], self.dtype)  # with padding, as merge_columns takes them
        self.widths = np.array(widths)
        self.block_sizes = BLOCK_SIZES
        if characters:  # every byte is known
            self.widths[unknown] = 1
            if unknown in self.result_list:  # no telling then how many symbols it has
                self.block_sizes = ()
        self.characters = characters
        self.spans = word_spans if characters else byte_spans
        self._forget()

    def _forget(self) -> None:
        self.tables = [PieceTable(lanes, fullest=5 / 8) for lanes in LANES]  # emptier, new memory costs more than it saves
        self.long: dict[Piece, int] = {}
        self.store, self.stored = np.empty(1 << 12, np.int64), 0
        self.tables[0].insert((_PADDING[:1],), np.array([NO_TOKENS]))

    def encode(self, texts: Iterable[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
        """All ids, uint32 (N,), and where each text starts and ends in them, int64 (texts + 1,)."""
        ids, offsets, total = [], [np.zeros(1, np.int64)], 0
        for part, ends in self._encode_windows(windows(texts), threads):
            ids.append(part)
            offsets.append(ends + total)
            total += len(part)
        return _joined(ids, threads), np.concatenate(offsets)

    def _encode_windows(self, source: Iterator[Window], threads: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each window's ids, and how many come before each END."""
        learnt: list[_LookedUp] = []
        size = max(threads, self.GROUP // 4)  # at first, while most pieces are new, which are looked up twice
        while True:
            # The group before is put together while this one is looked up: one wait for the slowest thread instead of two.
            tasks = (partial(self._assemble, window) for window in learnt)
            tasks = itertools.chain(tasks, (partial(self._look_up, window) for window in itertools.islice(source, size)))
            done = list(ordered_map(lambda task: task(), tasks, threads))
            if not done:
                return
            yield from done[: len(learnt)]
            learnt = done[len(learnt) :]
            size = max(threads, self.GROUP)
            if learnt:
                self._learn(learnt, threads)
            if self._is_full():
                yield from ordered_map(self._assemble, learnt, threads)
                learnt = []
                self._forget()

    def _is_full(self) -> bool:
        pieces = sum(table.size for table in self.tables) + len(self.long)
        return self.stored > self.MOST_STORED or pieces > self.MOST_PIECES

    def _look_up(self, texts: Window) -> _LookedUp:
        window = texts.array()
        starts, lengths, before = self.spans(window)
        values, new, new_lanes, fresh = np.empty(len(starts), VALUE), [], [], []
        *sizes, long = by_lanes(lengths)
        for table, at in zip(self.tables, sizes, strict=True):
            lanes = lanes_of(window, starts[at], lengths[at], table.lanes)
            found = table.find(lanes)
            values[at] = found
            unknown = np.flatnonzero(found == UNKNOWN)
            new.append(at[unknown])
            new_lanes.append(tuple(lane[unknown] for lane in lanes))
            fresh.append(distinct(new_lanes[-1])[0])
        pieces = long_pieces(window, starts[long], lengths[long])
        found = np.array([self.long.get(piece, UNKNOWN) for piece in pieces], np.int64)
        values[long] = found
        unknown = np.flatnonzero(found == UNKNOWN)
        new.append(long[unknown])
        return _LookedUp(values, new, new_lanes, fresh, [pieces[i] for i in unknown.tolist()], before)

    def _learn(self, group: list[_LookedUp], threads: int) -> None:
        """Encodes the unknown pieces of some windows, each once, and puts them in the tables."""
        fresh = list(ordered_map(lambda i: _fresh(window.fresh[i] for window in group), range(len(LANES)), threads))[::-1]
        long = list(dict.fromkeys(piece for window in group for piece in window.long))
        # The largest jobs first: so the threads end together.
        jobs = [([], part) for part in _long_parts(long)] + [([part], []) for lanes in fresh for part in _parts(lanes, threads)]
        merged = ordered_map(lambda job: self._merge(flatten(*job)), jobs, threads)
        values = np.concatenate([np.zeros(0, np.int64), *map(self._store, merged)])
        values, *parts = np.split(values, np.cumsum([len(long), *(len(lanes[0]) for lanes in fresh[:-1])]))
        inserts = [partial(*job) for job in zip((table.insert for table in self.tables[::-1]), fresh, parts, strict=True)]
        list(ordered_map(lambda insert: insert(), inserts, threads))
        self.long.update(zip(long, values.tolist(), strict=True))

    def _assemble(self, window: _LookedUp) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a window, and how many come before each END."""
        values, before = window.values, window.before
        for table, new, lanes in zip(self.tables, window.new, window.lanes, strict=False):
            values[new] = table.find(lanes)
        values[window.new[-1]] = [self.long[piece] for piece in window.long]
        runs = np.flatnonzero((values.view(self.dtype)[:: self.room] == self.hole) & (values != NO_TOKENS))
        if len(runs):
            values, before = self._spread(values, before, runs)
        cells = values.view(self.dtype)
        at = np.flatnonzero(cells != self.hole)
        return cells.take(at), np.searchsorted(at, before * self.room)

    def _spread(self, values: np.ndarray, before: np.ndarray, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values, with those at `runs` replaced by their runs in the store, and `before` counted in the longer array.

        `take` of a running sum is several times as fast as `repeat`, which keeps the other threads waiting too.
        """
        first = values[runs] >> self.hole.itemsize * 8
        sizes = self.store[first]
        grown = np.cumsum(sizes - 1)
        inside = consecutive(runs + grown - sizes + 1, sizes)
        step = np.ones(len(values) + int(grown[-1]), np.int8)
        step[inside] = 0
        step[runs + grown - sizes + 1] = 1
        spread = values.take(np.cumsum(step, dtype=np.int64) - 1)
        spread[inside] = self.store[consecutive(first + 1, sizes)]
        return spread, before + np.concatenate(([0], grown))[np.searchsorted(runs, before)]

    def _merge(self, pieces: np.ndarray) -> list[Merged]:
        """Encodes pieces, END behind each. The longest few go one by one: a round costs as much as ten merges in a list."""
        points = code_points(pieces) if self.characters else pieces
        ends = np.flatnonzero(points == (END_POINT if self.characters else END))
        symbols = self.symbols[points]
        starts = np.concatenate(([0], ends[:-1] + 1))
        sizes = ends - starts
        longest = min(TALLEST, int(np.sort(sizes)[-ALONE])) if len(sizes) >= ALONE else 0
        which = np.flatnonzero(sizes <= longest)
        columns = merge_columns(symbols, starts[which], sizes[which], self.table, self.results) if len(which) else ()
        merged = [Merged(which[done], tokens) for done, tokens in columns]
        rest = np.flatnonzero(sizes > longest)
        for block in self.block_sizes:
            tall = rest[sizes[rest] > TALLEST]
            if sizes[tall].sum() < 16 * block:
                break
            found = merge_overlapping(symbols, starts[tall], sizes[tall], block, self.table, self.results, self.widths)
            done = {i: tokens for i, tokens in zip(tall.tolist(), found, strict=True) if len(tokens)}
            merged += [Merged(np.array([i]), tokens[:, None]) for i, tokens in done.items()]
            rest = np.array([i for i in rest.tolist() if i not in done], np.int64)
        for i in rest.tolist():
            tokens = merge_piece(symbols[starts[i] : ends[i]].tolist(), self.ranks, self.result_list)
            merged.append(Merged(np.array([i]), np.array(tokens, self.dtype)[:, None]))
        return merged

    def _store(self, merged: list[Merged]) -> np.ndarray:
        """The values of all pieces of a job; what does not fit into them is put into the store."""
        values = np.empty(sum(len(which) for which, _ in merged), np.int64)
        for which, tokens in merged:
            length, width = tokens.shape
            size = -(-length // self.room)
            cells = np.full((width, size * self.room), self.hole)
            cells[:, :length] = tokens.T
            runs = cells.view(VALUE)
            values[which] = runs[:, 0] if size == 1 else self._keep(np.insert(runs, 0, size, axis=1))
        return values

    def _keep(self, runs: np.ndarray) -> np.ndarray:
        """Puts rows into the store, one behind the other; the values that name them."""
        first, self.stored = self.stored, self.stored + runs.size
        if self.stored > len(self.store):
            self.store = np.concatenate((self.store[:first], np.empty(self.stored, np.int64)))
        self.store[first : self.stored] = runs.reshape(-1)
        return np.arange(first, self.stored, runs.shape[1]) << self.hole.itemsize * 8 | int(self.hole)


def _fresh(lanes_of_windows: Iterable[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Distinct rows of several windows."""
    rows, _ = distinct(tuple(np.concatenate(lanes) for lanes in zip(*lanes_of_windows, strict=True)))
    return rows


def _parts(lanes: tuple[np.ndarray, ...], threads: int) -> Iterator[tuple[np.ndarray, ...]]:
    """About JOB_PIECES pieces each, and as many for one thread as for another."""
    count = len(lanes[0])
    if count < JOB_PIECES // 4:
        threads = 1
    rounds = -(-count // (threads * JOB_PIECES))
    size = -(-count // max(1, threads * rounds))
    for low in range(0, count, max(1, size)):
        yield tuple(lane[low : low + size] for lane in lanes)


def _long_parts(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces of about JOB_BYTES together, or one that is longer."""
    ends = list(itertools.accumulate(map(len, pieces)))
    low = 0
    while low < len(pieces):
        high = max(low + 1, bisect.bisect(ends, ends[low] + JOB_BYTES))
        yield pieces[low:high]
        low = high


def _joined(parts: list[np.ndarray], threads: int) -> np.ndarray:
    """All parts one behind the other, uint32; copied by all threads, since most of the time goes to touching new memory."""
    ends = list(itertools.accumulate(map(len, parts)))
    joined = np.empty(ends[-1] if ends else 0, np.uint32)

    def copy(i: int) -> None:
        joined[ends[i] - len(parts[i]) : ends[i]] = parts[i]

    list(ordered_map(copy, range(len(parts)), threads))
    return joined
