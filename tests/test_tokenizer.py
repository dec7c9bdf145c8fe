"""The tokenizer against slow reference algorithms, against the libraries that read its files, and on hostile text."""

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_user_error
from hypothesis import given, settings
from hypothesis import strategies as st

import bpe
from bpe import to_utf8
from config import SPECIAL_TOKENS
from support.common import UserError
from support.unicode_ranges import LETTERS, NUMBERS
from test_model import naive_merges, ordered_merges, random_corpus
from tokenizer import BPETokenizer, split_bytes, split_words

tokenizers = pytest.importorskip("tokenizers")

WHITESPACE = [chr(c) for c in range(0x110000) if chr(c).isspace()]
HOSTILE = [
    *WHITESPACE,
    *"\x00\x7f\u200b\ufeff\u180e\u2060\ue000\uffff\U0010ffff",  # NUL, zero width, private use, the last code point
    *"e\u0301\u0323\u200d👩🏽‍🚀🇫🇷日本ÿ٣²½ǅ\u2019",
    *"aAbB sstdm'''\"re ve ll01.,-_^<>|",
    *["<EOS>", "<UNK>", "<|endoftext|>", "don't", "we'll", "''s", "  ", "\r\n", "ÿÿ", "a" * 40, "日" * 20],
]
hostile_text = st.lists(st.one_of(st.sampled_from(HOSTILE), st.characters(exclude_categories=["Cs"])), max_size=40).map("".join)
TRAINING_TEXT = "".join(HOSTILE) * 3 + "the quick brown fox doesn't jump over the lazy dog 1234 times\n\n" * 20


@pytest.fixture(scope="module", params=["word", "byte"])
def ours(request) -> BPETokenizer:
    return BPETokenizer.train([TRAINING_TEXT], kind=request.param, vocab_size=700)


def theirs(tokenizer: BPETokenizer):
    """The same tokenizer, read from its file's text by the `tokenizers` library."""
    loaded = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    loaded.encode_special_tokens = True
    return loaded


@pytest.fixture
def small_windows(monkeypatch) -> random.Random:
    """Windows, batches and chunks so small that a short text meets every border; the random numbers to vary them with."""
    rng = random.Random(5)

    def shrink() -> random.Random:
        monkeypatch.setattr(bpe, "WINDOW", rng.choice([4, 32, 1 << 20]))
        monkeypatch.setattr(bpe, "PENDING_ROWS", rng.choice([1, 20, 1 << 21]))
        monkeypatch.setattr(bpe, "SLICE_ROWS", rng.choice([1, 3, 1 << 16]))
        monkeypatch.setattr(bpe, "SMALL_COUNT", rng.choice([1, 3, 1 << 15]))
        monkeypatch.setattr(bpe, "BATCH", rng.choice([1, 2, 64]))
        monkeypatch.setattr(bpe, "BATCH_ROWS", rng.choice([1, 5, 1 << 20]))
        monkeypatch.setattr(bpe, "PARALLEL_ROWS", rng.choice([1, 1 << 20]))
        monkeypatch.setattr(bpe, "HEAP", rng.choice([1, 4, 1 << 10]))
        monkeypatch.setattr(bpe, "CHUNK", rng.choice([1, 7, 1 << 20]))
        monkeypatch.setattr(bpe, "JOB_PIECES", rng.choice([1, 5, 1 << 16]))
        monkeypatch.setattr(bpe, "JOB_BYTES", rng.choice([1, 40, 1 << 19]))
        monkeypatch.setattr(bpe, "ALONE", rng.choice([1, 3, 12]))
        monkeypatch.setattr(bpe.Encoder, "GROUP", rng.choice([1, 2, 8]))
        monkeypatch.setattr(bpe, "cpu_count", lambda: 1)  # thousands of one-cell chunks are no work for threads
        return rng

    return shrink


# ----------------------------------------------------------------------------------------------------------------------
# Training


def test_trainer_equals_naive_rescan_at_every_border(small_windows, monkeypatch):
    """Catches pairs lost between chunks, batches that hide a rival pair, and thresholds that were never lowered."""
    original = bpe.Learner.__init__
    for _ in range(350):
        rng = small_windows()
        texts, kind, vocab_size, min_frequency = random_corpus(rng)
        threshold = rng.choice([1, 3, 10, 1000])

        def with_threshold(self, *args, threshold=threshold):
            original(self, *args)
            self.threshold = threshold

        monkeypatch.setattr(bpe.Learner, "__init__", with_threshold)
        tokenizer = BPETokenizer.train(texts, kind=kind, vocab_size=vocab_size, min_frequency=min_frequency)
        pieces = Counter(to_utf8(piece) for text in texts for piece in tokenizer.split(text))
        found = [(tokenizer.tokens[a], tokenizer.tokens[b]) for a, b in tokenizer.merges]
        assert found == naive_merges(pieces, kind, vocab_size, min_frequency), (kind, texts, vocab_size, min_frequency)


def test_counting_in_parts_equals_a_plain_count(small_windows):
    """Catches pieces that windows, joins or slices lose, or keep apart so that memory grows with the text."""
    for _ in range(60):
        rng = small_windows()
        texts, kind, _, _ = random_corpus(rng)
        tokenizer = BPETokenizer.train(["a b"], kind=kind, vocab_size=300)
        counts = bpe.Counts(bpe.word_spans if kind == "word" else bpe.byte_spans)
        counts.add_all(texts, 1)
        pieces, found, left_out = counts.pieces()
        plain = Counter(to_utf8(piece) for text in texts for piece in tokenizer.split(text))
        listed = pieces.tobytes().split(bytes([bpe.END]))[:-1]
        assert len(listed) == len(set(listed)) and dict(zip(listed, found.tolist(), strict=True)) == plain and left_out == 0


def test_a_large_alphabet_and_wide_cells_train_like_naive():
    """Catches ids that do not fit the cells: thousands of characters, and a vocabulary above 32,767."""
    rng = random.Random(6)
    texts = ["".join(chr(rng.randint(0x4E00, 0x4E00 + 600)) for _ in range(3_000))]
    pieces = Counter(to_utf8(piece) for piece in split_words(texts[0]))
    for vocab_size in (700, 40_000):
        tokenizer = BPETokenizer.train(texts, kind="word", vocab_size=vocab_size, min_frequency=2)
        found = [(tokenizer.tokens[a], tokenizer.tokens[b]) for a, b in tokenizer.merges]
        assert found[:60] == naive_merges(pieces, "word", tokenizer.vocab_size, 2)[:60]


def test_counts_beyond_32_bits():
    """Catches a counter that wraps: of two pairs with 3e9 and 2e9 occurrences the first must be merged first."""
    pieces, counts = np.frombuffer(b"the \xffof \xff", np.uint8), np.array([2_000_000_000, 3_000_000_000])
    alphabet, cells = bpe.cells_of(pieces, True, 4)
    tokens = [name.encode() for name in SPECIAL_TOKENS] + alphabet
    learner = bpe.Learner(cells, counts, tokens, len(tokens) + 2)
    merges = learner.learn([], 2, None)
    assert [(tokens[a], tokens[b]) for a, b in merges] == [(b"f", b" "), (b"o", b"f ")]


@pytest.mark.parametrize(
    ("counts", "dtype"), [(np.array([1 << 40, 3, 40_000, 3, 32_767, 32_768]), np.uint16), (np.arange(1, 100_000), np.uint32)]
)
def test_numbers_of_counts_stand_for_them(counts: np.ndarray, dtype: type):
    """Catches numbers that wrap around where there are more different counts than 16 bits have room for."""
    numbers, meant = bpe.numbered(counts)
    assert numbers.dtype == dtype and np.array_equal(meant[numbers], counts)


def test_the_file_depends_on_text_and_settings_alone(small_windows, monkeypatch):
    """Catches ties broken by hash order, by document order, by where windows end, or by the number of threads."""
    texts = [f"{a} {b}'s {a}{b}\n" for a, b in itertools.product(["ab", "ba", "日b", "", "abab"], repeat=2)] * 3
    for kind in ("word", "byte"):
        expected = BPETokenizer.train(texts, kind=kind, vocab_size=330, min_frequency=1).to_json()
        for _ in range(3):
            small_windows().shuffle(texts)
            monkeypatch.setattr(bpe, "cpu_count", lambda: 3)
            assert BPETokenizer.train(texts, kind=kind, vocab_size=330, min_frequency=1).to_json() == expected
    script = (
        "import sys; from tokenizer import *; print(BPETokenizer.train(sys.argv[1:], vocab_size=60, min_frequency=1).sha256)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script, *texts[:20]],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "7")
    }
    assert len(found) == 1


def test_what_cannot_be_trained_says_so():
    """Catches a crash on empty text, an alphabet silently cut to the vocabulary, and a claimed size that was not reached."""
    for texts in ([], ["", " \n\u3000"]):
        with pytest.raises(ValueError, match="no text to learn from"):
            BPETokenizer.train(texts, kind="word", vocab_size=100)
    with pytest.raises(ValueError, match="no room for the 4 special tokens and 26 different characters"):
        BPETokenizer.train(["abcdefghijklmnopqrstuvwxyz"], kind="word", vocab_size=29)
    with pytest.raises(ValueError, match="only word and byte can be trained"):
        BPETokenizer.train(["a"], kind="gpt2", vocab_size=300)
    assert BPETokenizer.train(["ab ab"], kind="word", vocab_size=1_000).vocab_size == 4 + 3 + 1


def test_progress_counts_merges():
    """Catches a bar that stands still or runs past its end."""
    calls = []
    tokenizer = BPETokenizer.train([TRAINING_TEXT], kind="byte", vocab_size=500, progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1][0] == len(tokenizer.merges) <= calls[-1][1] == 240


# ----------------------------------------------------------------------------------------------------------------------
# Cutting text


def test_bulk_splitting_equals_the_plain_splitters(small_windows):
    """Catches pieces cut at a window's end, at wide whitespace, at an apostrophe or between documents."""
    rng = random.Random(7)
    for _ in range(400):
        small_windows()
        texts = ["".join(rng.choices(HOSTILE, k=rng.choice([0, 1, 3, 40]))) for _ in range(rng.randint(1, 4))]
        for spans, split in ((bpe.word_spans, split_words), (bpe.byte_spans, split_bytes)):
            counts = bpe.Counts(spans)
            counts.add_all(texts, 2)
            pieces, numbers, _ = counts.pieces()
            found: Counter[bytes] = Counter()
            for piece, number in zip(pieces.tobytes().split(b"\xff"), numbers.tolist(), strict=False):
                found[piece] += number
            assert found == Counter(to_utf8(piece) for text in texts for piece in split(text)), texts


def test_word_whitespace_is_that_of_split():
    """Catches a whitespace character forgotten or invented."""
    assert sorted(bpe.WORD_WHITESPACE) == WHITESPACE
    assert len(WHITESPACE) == 29


def test_letters_and_numbers_are_those_of_the_libraries():
    """Catches a splitter that files characters otherwise than tokenizers and tiktoken do; prints how many differ."""
    points = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    joined = "\ue000".join(map(chr, points))
    for pattern, ranges in ((r"\p{L}", LETTERS), (r"\p{N}", NUMBERS)):
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        found = {ord(piece) for piece, _ in split.pre_tokenize_str(joined) if len(piece) == 1} - {0xE000}
        listed = {c for first, last in ranges for c in range(first, last + 1)}
        print(f"{pattern}: {len(listed):,} here, {len(found ^ listed)} differ from tokenizers {tokenizers.__version__}")
        assert listed - found == set(), "a later Unicode version may add characters, but takes none away"


# ----------------------------------------------------------------------------------------------------------------------
# Encoding


def test_encoding_equals_ordered_merges_at_every_border(small_windows, monkeypatch):
    """Catches table lookups of the wrong piece, lost documents, and a full cache that changes ids."""
    for _ in range(60):
        rng = small_windows()
        monkeypatch.setattr(bpe.Encoder, "MOST_PIECES", rng.choice([2, 1 << 20]))
        texts, kind, vocab_size, _ = random_corpus(rng)
        tokenizer = BPETokenizer.train(texts, kind=kind, vocab_size=vocab_size, min_frequency=1)
        texts += [random_corpus(rng)[0][0] for _ in range(rng.randint(0, 5))] + ["", " ", "q日" * 30, "a b \n", "\n"]
        expected = [ordered_merges(tokenizer, text) for text in texts]
        for _ in range(2):
            ids, offsets = tokenizer.encode_to_array(texts, threads=rng.choice([1, 2]))
            assert (ids.dtype, offsets.dtype, len(offsets)) == (np.uint32, np.int64, len(texts) + 1)
            assert [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)] == expected
        assert [tokenizer.encode(text) for text in texts] == expected


@pytest.mark.parametrize("length", [255, 256, 257])
def test_long_pieces_side_by_side(length, monkeypatch):
    """Catches lengths and places that do not fit their 8 bits, and ended columns that come to life again, when many pieces
    are long; the last merge makes a token of earlier ones, as it may in a file made elsewhere."""
    monkeypatch.setattr(bpe, "ALONE", 1)
    merges = [("a", "bb"), ("c", "a"), ("bb", "bb"), ("abb", "bb"), ("b", "a"), ("b", "b")]
    tokens = [*"abc", " ", "ba", "ca", "abb", "bbbb", "abbbb", "bb"]
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *tokens])}
    ids = {token.encode(): i for token, i in vocab.items()}
    tokenizer = BPETokenizer("word", list(ids), [(vocab[a], vocab[b]) for a, b in merges])
    rng = random.Random(8)
    texts = ["".join(rng.choices("abc", k=rng.choice([length - 1, length - 1, 3, 30]))) for _ in range(60)]
    encoded, offsets = tokenizer.encode_to_array(texts)
    expected = [theirs(tokenizer).encode(text).ids for text in texts]
    assert [encoded[a:b].tolist() for a, b in itertools.pairwise(offsets)] == expected


@pytest.mark.parametrize("vocab_size", [0xFFFE, 0xFFFF, 0x10001])
def test_ids_up_to_the_largest(vocab_size):
    """Catches ids that are taken for the marks that stand between them, and pieces of many tokens whose ids are wide."""
    last = (ord("~"), ord("~"))
    others = (pair for pair in itertools.product(range(256), repeat=2) if pair != last)
    pairs = [*itertools.islice(others, vocab_size - 261), last]
    tokens = [*map(str.encode, SPECIAL_TOKENS), *(bytes([b]) for b in range(256)), *map(bytes, pairs)]
    tokenizer = BPETokenizer("byte", tokens, [(4 + a, 4 + b) for a, b in pairs])
    rng = random.Random(3)
    text = " ~~" + " ".join("".join(rng.choices("~~a1-é日", k=rng.randint(1, 40))) for _ in range(3_000))
    ids, _ = tokenizer.encode_to_array([text])
    assert (tokenizer.vocab_size, max(ids)) == (vocab_size, vocab_size - 1)
    assert ids.tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("lanes", [1, 2])
def test_pieces_may_have_equal_values(lanes):
    """Catches a piece taken for stored because another one that encodes alike (all unknown characters) stands in its place."""
    rng = np.random.default_rng(4)
    table = bpe.PieceTable(lanes, fullest=5 / 8)
    pieces = [rng.integers(0, 1 << 62, 9_000).astype(np.uint64) for _ in range(lanes)]
    for low in range(0, 8_000, 2_000):
        table.insert([lane[low : low + 2_000] for lane in pieces], np.full(2_000, 7))
    assert table.find(pieces).tolist() == [7] * 8_000 + [bpe.UNKNOWN] * 1_000


@settings(max_examples=300, deadline=None)
@given(text=hostile_text)
def test_hostile_text_round_trips_with_the_ids_of_the_library(ours, text):
    """Catches any difference between our code and what the file says, on characters chosen to find one."""
    ids = ours.encode(text)
    assert ids == theirs(ours).encode(text).ids
    assert ids == ours.encode_to_array([text])[0].tolist()
    if ours.kind == "byte":
        assert ours.decode(ids) == text
    elif ours.unk_id not in ids:
        assert ours.decode(ids) == " ".join(text.split()) == theirs(ours).decode(ids)


@pytest.mark.parametrize("kind", ["word", "byte"])
def test_real_text_has_the_ids_of_the_library(kind, wikitext_zip, dictwiki_zip):
    """Catches what random text does not: real punctuation, rare characters, long words."""
    import zipfile

    texts = {}
    for archive, names in ((wikitext_zip, ("valid", "test")), (dictwiki_zip, ("valid", "test"))):
        with zipfile.ZipFile(archive) as opened:
            for member in opened.namelist():
                if any(member.endswith(f"wiki.{name}.raw") for name in names):
                    texts[member] = opened.read(member).decode("utf-8").splitlines(keepends=True)
    assert len(texts) == 4
    tokenizer = BPETokenizer.train(texts[min(texts)], kind=kind, vocab_size=4_096)
    library = theirs(tokenizer)
    for member, lines in texts.items():
        ids, _ = tokenizer.encode_to_array(lines)
        expected = [i for encoding in library.encode_batch_fast(lines) for i in encoding.ids]
        assert ids.tolist() == expected, member


def test_byte_ids_equal_those_of_tiktoken(wikitext_zip):
    """Catches a difference from the library that most training code uses, given the same vocabulary."""
    import zipfile

    tiktoken = pytest.importorskip("tiktoken")
    with zipfile.ZipFile(wikitext_zip) as opened:
        text = next(opened.read(m).decode("utf-8") for m in opened.namelist() if m.endswith("wiki.valid.raw"))
    tokenizer = BPETokenizer.train([text], kind="byte", vocab_size=3_000)
    encoding = tiktoken_encoding(tiktoken, tokenizer)
    for sample in (text[:300_000], "".join(HOSTILE) * 2, "".join(reversed(HOSTILE))):
        assert tokenizer.encode(sample) == encoding.encode_ordinary(sample)


def tiktoken_encoding(tiktoken, tokenizer: BPETokenizer):
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ranks = {token: i for i, token in enumerate(tokenizer.tokens) if i not in tokenizer.special_ids}
    special = {tokenizer.tokens[i].decode(): i for i in tokenizer.special_ids}
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def random_merges(rng: random.Random) -> tuple[dict[tuple[int, int], int], list[int], list[str]]:
    """Merges as a loaded file may have them, two with one result and some before what makes their parts; results, tokens."""
    tokens = list("abc"[: rng.randint(1, 3)])
    made: dict[tuple[int, int], int] = {}
    for _ in range(rng.randint(1, 25)):
        left, right = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        text = tokens[left] + tokens[right]
        if (left, right) in made or len(text) > 12:
            continue
        if text not in tokens:
            tokens.append(text)
        made[left, right] = tokens.index(text)
    pairs = list(made)
    if rng.random() < 0.3:
        rng.shuffle(pairs)
    return {pair: rank for rank, pair in enumerate(pairs)}, [made[pair] for pair in pairs], tokens


def test_overlapping_blocks_merge_like_the_whole(monkeypatch):
    """Catches a token cut in two, lost or doubled where blocks or groups of them meet, and blocks that never agree."""
    rng = random.Random(11)
    short = whole = 0
    for _ in range(400):
        ranks, made, tokens = random_merges(rng)
        table, results = bpe.MergeTable(ranks, len(tokens)), np.array([*made, len(tokens)], np.uint16)
        block = rng.choice([4, 8, 30, 64])
        monkeypatch.setattr(bpe, "BLOCKS", rng.choice([2, 3, 1 << 13]))
        base = len(set("".join(tokens)))
        sizes = [block + rng.randint(1, 200) for _ in range(rng.randint(1, 4))]
        period = rng.choices(range(base), k=rng.choice([1, 2, 3, 5, 1000]))
        symbols = np.array((period * 2000)[: sum(sizes) + 7], np.uint16)
        starts = np.cumsum(sizes) - sizes + 7
        widths = np.array([*map(len, tokens), 1])
        found = bpe.merge_overlapping(symbols, starts, np.array(sizes), block, table, results, widths)
        for start, size, ids in zip(starts, sizes, found, strict=True):
            if len(ids):
                assert ids.tolist() == bpe.merge_piece(symbols[start : start + size].tolist(), ranks, made)
            short, whole = short + (len(ids) == 0), whole + (len(ids) > 0)
    assert short > 20 and whole > 200


@pytest.mark.parametrize("kind", ["word", "byte"])
def test_long_pieces_have_the_ids_of_the_library(kind: str):
    """Catches symbols of one width taken for another's where pieces of thousands of characters are merged in blocks."""
    rng = random.Random(12)
    words = [" ".join(rng.choices(["ab", "abc", "日本", "é", "zzz", "q"], k=200)) for _ in range(30)]
    tokenizer = BPETokenizer.train(words, kind=kind, vocab_size=340)
    long = ["".join(rng.choices(words, k=30)).replace(" ", "") for _ in range(3)]
    texts = [long[0], long[1] + " and", long[2] + "\n\n", "日" * 5_000, "#" * 999]
    ids, offsets = tokenizer.encode_to_array(texts)
    for i, text in enumerate(texts):
        assert ids[offsets[i] : offsets[i + 1]].tolist() == theirs(tokenizer).encode(text).ids


def test_no_cliff_on_text_without_a_place_to_cut():
    """Catches quadratic time: each of these takes hours, or the memory of the machine, when merging is quadratic."""
    rng = random.Random(8)
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=100_000))
    for kind in ("word", "byte"):
        tokenizer = BPETokenizer.train([letters + " the quick brown fox " * 50 + "^" * 999], kind=kind, vocab_size=2_000)
        for text in ("^" * (1_000_000 if kind == "byte" else 100_000), letters, "the quick brown fox " * 20_000, "日" * 20_000):
            ids, _ = tokenizer.encode_to_array([text])
            if tokenizer.unk_id not in ids:
                assert tokenizer.decode(ids) == tokenizer.scored_text(text)
    assert BPETokenizer.train(["^" * 1_000_000], kind="byte", vocab_size=300).vocab_size > 270


def test_the_cache_is_capped(monkeypatch):
    """Catches a word cache that grows with noise, in bulk or one text at a time."""
    import tokenizer as module

    monkeypatch.setattr(bpe.Encoder, "MOST_PIECES", 1_000)
    monkeypatch.setattr(bpe, "WINDOW", 4_096)
    monkeypatch.setattr(module, "CACHED_WORDS", 500)
    rng = random.Random(9)
    tokenizer = BPETokenizer.train(["the quick brown fox"], kind="byte", vocab_size=270)
    for _ in range(20):
        text = " ".join(str(rng.random()) for _ in range(1_000))
        tokenizer.encode_to_array([text])
        tokenizer.encode(text)
        assert sum(table.size for table in tokenizer._encoder.tables) + len(tokenizer._encoder.long) < 4_000
        assert len(tokenizer._encoder.store) < 100_000
        assert len(tokenizer._cache) <= 500


def test_too_many_words_are_an_error_with_a_way_out(monkeypatch):
    """Catches counting that takes all memory on noise, and an error that leaves the user without a next step."""
    monkeypatch.setattr(bpe.Counts, "MOST_DISTINCT", 3)
    with pytest.raises(ValueError, match=r"more than 3 different words; learn from less text \(--sample-mb\)"):
        BPETokenizer.train(["a b c d"], kind="word", vocab_size=30)


def test_a_prompt_keeps_its_last_space():
    """Catches a prompt whose last word is cut as training almost never showed it."""
    tokenizer = BPETokenizer.train(["the cat the cat the"], kind="word", vocab_size=30, min_frequency=1)
    assert tokenizer.decode(tokenizer.encode_prompt("the  cat")) == "the cat "
    assert tokenizer.encode_prompt("the cat", trailing_space=False) == tokenizer.encode("the cat")
    assert tokenizer.encode_prompt(" ") == []


def test_lone_surrogates_become_the_replacement_character(ours):
    """Catches an encoding error deep inside on text scraped from broken JSON."""
    for text in ("a\ud800b", "\udfff", "x \ud83d\ude00"):
        clean = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
        assert ours.encode(text) == ours.encode(clean) == ours.encode_to_array([text])[0].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Decoding


def test_streaming_never_shows_half_a_character(ours):
    """Catches replacement characters where one character spans several tokens, and an end that is not flushed."""
    text = "👩🏽‍🚀 日本 e\u0301 end"
    ids = BPETokenizer.train([text], kind="byte", vocab_size=260).encode(text)
    tokenizer = BPETokenizer.train([text], kind="byte", vocab_size=260)
    parts = list(tokenizer.decode_stream(ids))
    assert len(parts) == len(ids) + 1
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)
    assert "".join(tokenizer.decode_stream(ids[:1])) == "\ufffd" == tokenizer.decode(ids[:1])


def test_special_ids_are_dropped_unless_asked_for(ours):
    """Catches control tokens in sampled text, and an id outside the vocabulary decoded as something."""
    ids = ours.wrap_document(ours.encode("the fox"))
    assert ours.decode(ids) == "the fox"
    assert ours.decode(ids, special=True) == "<BOS>the fox<EOS>"
    for wrong in (-1, ours.vocab_size):
        with pytest.raises(ValueError, match=f"{wrong} is no id"):
            ours.decode([wrong])


# ----------------------------------------------------------------------------------------------------------------------
# Files

GPT2_MERGES = ["Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t"]  # the published first ten
# Ids that GPT-2's splitter, byte order and first merges give; stored, so that they guard us without any library.
GPT2_IDS = {
    " the\xb2\xbd": [262, 126, 110, 126, 121],
    "a\x1cb\x1c c": [64, 216, 65, 216, 220, 66],
    "x\xa0 y\xa0": [87, 126, 254, 220, 88, 126, 254],
    "\u3000the\u2003\n\n\ton": [159, 222, 222, 83, 258, 158, 222, 225, 198, 198, 197, 261],
    "it's 'tis''s 'll": [72, 83, 6, 82, 220, 6, 83, 72, 82, 6, 6, 82, 220, 6, 75, 75],
    "\u0663 \u2460\u65e5 \U0001f642": [149, 96, 220, 158, 239, 254, 162, 245, 98, 220, 172, 253, 247, 224],
    " \xad\x7f\x00\xff": [220, 126, 255, 221, 188, 127, 123],
    "a  \n  b \x85": [64, 220, 220, 198, 220, 220, 65, 220, 126, 227],
}


def small_gpt2() -> BPETokenizer:
    """GPT-2's byte ids and its first ten merges, from texts in the format that OpenAI published."""
    names = [*map(chr, [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]), *map(chr, range(0x100, 0x144))]
    names += [merge.replace(" ", "") for merge in GPT2_MERGES] + ["<|endoftext|>"]
    encoder = json.dumps({name: i for i, name in enumerate(names)})
    return BPETokenizer.from_gpt2("#version: 0.2\n" + "\n".join(GPT2_MERGES) + "\n", encoder)


def test_gpt2_ids_are_the_stored_ones():
    """Catches a splitter that treats ² as a letter or U+001C as whitespace, and GPT-2's odd byte order got wrong."""
    tokenizer = small_gpt2()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.wrap_document([5])) == (266, 266, None, [5, 266])
    for text, expected in GPT2_IDS.items():
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.encode_to_array([text])[0].tolist() == expected, text
        assert BPETokenizer.from_json(tokenizer.to_json()).encode(text) == expected, text
        assert theirs(tokenizer).encode(text).ids == expected, text


def test_tokens_of_newlines_and_torn_characters_survive_a_file(tmp_path):
    """Catches a file format that breaks on a token holding \\n or \\r, or loses bytes that are no UTF-8."""
    text = "\n\n\r\n\r\r\t" * 50 + "日本" * 50 + "".join(map(chr, range(0x80, 0x100))) * 3
    tokenizer = BPETokenizer.train([text], kind="byte", vocab_size=320)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = BPETokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.tokens, loaded.merges, loaded.sha256) == (tokenizer.tokens, tokenizer.merges, tokenizer.sha256)
    assert loaded.decode(loaded.encode(text)) == text
    assert any(b"\n\n" in token for token in loaded.tokens)


def test_two_merges_with_one_result_encode_like_the_library(ours):
    """Catches an encoder that trusts a foreign file's merges to be in the order ours always are."""
    data = json.loads(ours.to_json())
    for merged in ("ab", "bc", "abc"):
        data["model"]["vocab"].setdefault(merged, len(data["model"]["vocab"]))
    data["model"]["merges"] = [["a", "bc"], ["b", "c"], ["a", "b"], ["ab", "c"]]
    tokenizer = BPETokenizer.from_json(json.dumps(data))
    rng = random.Random(10)
    for _ in range(200):
        text = "".join(rng.choices("abc", k=rng.choice([3, 8, 60])))
        assert tokenizer.encode(text) == theirs(tokenizer).encode(text).ids == tokenizer.encode_to_array([text])[0].tolist()


def test_a_damaged_file_is_refused_in_one_line(ours, tmp_path):
    """Catches a traceback, or worse a tokenizer, from a file that is cut, altered, or of another make."""
    path, text = tmp_path / "tokenizer.json", ours.to_json()
    data = json.loads(text)
    changes = [
        lambda d: d["model"]["vocab"].popitem(),
        lambda d: d["model"]["vocab"].update(the="4"),
        lambda d: d["model"]["vocab"].update(a=10**9),
        lambda d: d["model"]["merges"].append(["zzz", "q"]),
        lambda d: d["model"]["merges"].append(5),
        lambda d: d["model"].update(merges=None),
        lambda d: d["model"].update(dropout=0.1),
        lambda d: d.update(model=[]),
        lambda d: d.update(pre_tokenizer=None),
        lambda d: d.update(normalizer={"type": "NFC"}),
        lambda d: d.update(added_tokens=[]),
        lambda d: d.pop("decoder"),
    ]
    damaged = [b"", b"{}", b"[]", b"null", text.encode()[:-40], b"\xff\xfe" + text.encode()]
    for change in changes:
        copy = json.loads(json.dumps(data))
        change(copy)
        damaged.append(json.dumps(copy).encode())
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UserError, match="train_tokenizer"):
            BPETokenizer.load(path)
    with pytest.raises(UserError, match="is missing"):
        BPETokenizer.load(Path(tmp_path / "none.json"))


# ----------------------------------------------------------------------------------------------------------------------
# The view


def test_the_view_shows_boundaries_ids_and_comparisons(stage, tmp_path):
    """Catches tokens whose spaces and torn characters cannot be seen, and a mistake that ends in a traceback."""
    for kind in ("word", "byte"):
        BPETokenizer.train([TRAINING_TEXT], kind=kind, vocab_size=600).save(tmp_path / f"{kind}.json")
    result = stage("tokenizer.py", "the fox\n日", "--tokenizer", "byte.json")
    ids = BPETokenizer.load(tmp_path / "byte.json").encode("the fox\n日")
    assert result.stdout.splitlines()[0].startswith("|the|·f")
    assert "\\n" in result.stdout
    assert result.stdout.splitlines()[1] == " ".join(map(str, ids))
    result = stage("tokenizer.py", "the fox", "--tokenizer", "byte.json", "--compare", "word.json")
    for text in ("byte.json", "word.json", "characters per token", "bits per byte (unigram)"):
        assert text in result.stdout
    assert_user_error(stage("tokenizer.py", "x"), "tokenizer.json is missing; run: uv run python train_tokenizer.py")
    assert_user_error(stage("tokenizer.py", "--tokenizer", "byte.json"), "say what to show")
    (tmp_path / "latin1.txt").write_bytes(b"na\xefve")
    assert_user_error(stage("tokenizer.py", "--tokenizer", "byte.json", "--file", "latin1.txt"), "not UTF-8 at byte 2")
