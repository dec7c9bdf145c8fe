"""Documents and splits: every kind of file, block edges, hostile bytes, the manifest."""

import gzip
import hashlib
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

import corpus
from config import Config, make_config
from corpus import Corpus, SourceFile, cut_pieces
from support.common import UserError
from support.manifest import build_manifest, load_corpus, make_mix

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "ran", "away", "from", "every", "dog", "in", "town"]


def make_corpus(folder: Path, files: dict[str, bytes], name: str = "mine", **settings: object) -> tuple[Config, Corpus]:
    """A corpus out of files with the given contents, taken stock of."""
    config = make_config("wikitext103", {"corpus": name, "data_dir": str(folder / "data"), **settings})
    config.raw_dir.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (config.raw_dir / file).write_bytes(data)
    build_manifest(config, {"kind": "test"}, [SourceFile.of(file) for file in files])
    return config, load_corpus(config)


def make_texts(n: int, seed: int = 0) -> list[str]:
    """Different documents of a few lines, some with characters of several bytes."""
    rng = random.Random(seed)
    texts = []
    for i in range(n):
        lines = [" ".join(rng.choices(WORDS, k=rng.randint(3, 30))) for _ in range(rng.randint(1, 6))]
        texts.append("\n".join(lines) + f" n° {i} … {chr(0x4E00 + i % 99)}")
    return texts


def jsonl(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def parquet(path: Path, texts: list, column: str = "text", rows: int = 70, kind: str = "string") -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    arrays = {"string": pa.string(), "large": pa.large_string(), "binary": pa.binary()}
    values = pa.array(texts, arrays.get(kind, pa.string()))
    values = values.dictionary_encode() if kind == "dictionary" else values
    parquet.write_table(pa.table({"id": list(range(len(texts))), column: values}), path, row_group_size=rows)
    return path.read_bytes()


def all_documents(found: Corpus) -> list[str]:
    return [text for split in corpus.SPLITS for text in found.iter_documents(split)]


# ----------------------------------------------------------------------------------------------------------------------
# WikiText


def test_real_articles_are_counted_as_published(wikitext_zip: Path, dictwiki_zip: Path, tmp_path: Path) -> None:
    """A title rule that is too loose takes formulas and ruled lines for articles, one too strict loses articles."""
    with zipfile.ZipFile(wikitext_zip) as archive:
        for split in ("valid", "test"):
            data = archive.read(f"wikitext-raw/wiki.{split}.raw")
            _, found = make_corpus(tmp_path / split, {f"wiki.{split}.raw": data})
            assert sum(found.documents.values()) == 60
            assert sorted(all_documents(found)) == sorted(corpus._articles(data.decode()))
    with zipfile.ZipFile(dictwiki_zip) as archive:
        files = {f"wiki.{s}.raw": archive.read(f"dictwiki-raw/wiki.{s}.raw") for s in ("train", "valid", "test")}
    _, found = make_corpus(tmp_path, files)
    assert found.documents == {"train": 235_343, "val": 3_268, "test": 3_268}
    text = "".join(found.iter_documents("val"))
    assert "".join(text.split()) == "".join(files["wiki.valid.raw"].decode().split())


def test_title_rule() -> None:
    """Each line here was once taken for a title, or a title for a line."""
    lines = [
        " ",
        " = A = ",
        " ",
        " x ",
        " = y = z = ",
        " ",
        " = = Part = = ",
        " ",
        " 1 ",
        "",
        " = E = m = ",
        " ",
        " = B = ",
        "",
    ]
    lines += ["", " = === = ", "", "", " =  C = ", "", "", " = D = not", "", ""]
    articles = list(corpus._articles("\n".join(lines)))
    assert [a.split("\n")[0].strip() for a in articles] == ["= A =", "= E = m =", "= B ="]
    unix = "\n".join(lines)
    assert all(article in unix for article in articles) and "".join("".join(articles).split()) == "".join(unix.split())
    assert [m.start(1) for m in corpus._TITLE_BYTES.finditer(unix.replace("\n", "\r\n").encode())]


def test_block_size_never_changes_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block cut in the wrong place (within a title, a character, a separator, a line) shows as other documents."""
    texts = make_texts(300)
    wiki = "".join(f" \n = T {i} = \n \n {text} \n" for i, text in enumerate(texts)).encode()
    separated = "<sep>\n".join(text.replace("\n", "\r\n") for text in texts).encode()
    kinds = {
        "a.raw": ({"a.raw": wiki}, {}),
        "b.txt": ({"b.txt": separated}, {"document_separator": "<sep>\\n"}),
        "c.jsonl": ({"c.jsonl": jsonl(texts)}, {}),
        "d.jsonl.gz": ({"d.jsonl.gz": gzip.compress(jsonl(texts))}, {}),
        "e.parquet": ({"e.parquet": parquet(tmp_path / "e", texts)}, {}),
        "f": ({f"{i:03}.md": text.encode() for i, text in enumerate(texts)}, {}),
    }
    for name, (files, settings) in kinds.items():
        found = {}
        for size in (corpus.BLOCK_BYTES, 5_000, 37):
            with monkeypatch.context() as patch:
                patch.setattr(corpus, "BLOCK_BYTES", size)
                _, made = make_corpus(tmp_path / f"{name}-{size}", files, **settings)
                found[size] = {split: list(made.iter_documents(split)) for split in corpus.SPLITS}
                assert len(list(made.blocks())) > 300_000 // (size + 70_000)
        assert found[37] == found[5_000] == found[corpus.BLOCK_BYTES], name
        if name != "a.raw":
            assert sorted(text for s in found[37].values() for text in s) == sorted(texts), name


def test_titles_between_read_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A title that straddles two looks into the file, or looks like one only because a look begins within a line."""
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 64)
    for pad in range(60_000, 66_000, 97):
        path = tmp_path / "x.raw"
        path.write_bytes(b" \n = A = \n \n" + b"w" * pad + b"  \n = no = \n \n \n = B = \n \n b \n")
        ends = [part.end for part in corpus._range_parts(0, path, corpus._TITLE_BYTES)]
        assert ends == [path.stat().st_size - len(b" = B = \n \n b \n"), path.stat().st_size]


# ----------------------------------------------------------------------------------------------------------------------
# Policies


def test_marks_line_ends_surrogates_and_empties(tmp_path: Path) -> None:
    """A mark or carriage return kept in one kind of file and not in another makes equal text encode differently."""
    lines = [json.dumps({"text": t}) for t in ("a\r\nb", "x \ud83d y", "\ud83d\ude00", "  \n", "", "\x00\x01<BOS>", "\ufeffq")]
    more = [json.dumps({"text": text}) for text in make_texts(30)]
    data = b"\xef\xbb\xbf" + "\r\n".join([*lines, json.dumps({"text": None}), "", *more]).encode()
    config, found = make_corpus(tmp_path, {"a.jsonl": data})
    assert {"a\nb", "x \ufffd y", "😀", "\x00\x01<BOS>", "\ufeffq"} <= set(all_documents(found))
    assert sum(found.documents.values()) == 35
    counts = json.loads((config.raw_dir / "manifest.json").read_text(encoding="utf-8"))["counts"]
    assert counts["byte-order marks dropped"] == 1
    assert counts["lone surrogates replaced"] == 1
    assert counts["empty documents dropped"] == 3
    files = {f"{i}.txt": ("\ufeff" + t.replace("\n", "\r\n")).encode() for i, t in enumerate(make_texts(25))}
    _, found = make_corpus(tmp_path / "txt", files)
    assert sorted(all_documents(found)) == sorted(make_texts(25))
    assert found.manifest["counts"]["byte-order marks dropped"] == 25


def test_parquet_columns_of_every_text_type(tmp_path: Path) -> None:
    """Offsets of a sliced, dictionary-encoded or null-holding column read wrongly shift text between documents."""
    texts = [t if i % 7 else None for i, t in enumerate(make_texts(200))]
    for kind in ("string", "large", "binary", "dictionary"):
        values = [t.encode() if t and kind == "binary" else t for t in texts]
        _, found = make_corpus(
            tmp_path / kind, {"a.parquet": parquet(tmp_path / f"{kind}.x", values, "body", kind=kind)}, text_field="body"
        )
        assert sorted(all_documents(found)) == sorted(filter(None, texts))
        assert found.manifest["counts"] == {"empty documents dropped": 29}


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    """A wrong offset sends the user to the wrong place of a file of gigabytes; uncounted replacement hides damage."""
    good = ("ü" * 1000 + "\n") * 2_000
    data = (
        jsonl(make_texts(20))
        + f'{{"text": "{good[:-1]}"}}\n'.replace("\n", " ", 1_999).encode()
        + b'{"text": "a\xffb\xe2\x82"}\n'
    )
    offset = data.index(b"\xff")
    with pytest.raises(UserError, match=rf"a\.jsonl is not UTF-8 at byte {offset:,} \(0xff\).*--errors replace"):
        make_corpus(tmp_path, {"a.jsonl": data})
    _, found = make_corpus(tmp_path, {"a.jsonl": data}, errors="replace")
    assert "a\ufffdb\ufffd" in all_documents(found)
    assert found.manifest["counts"]["invalid byte sequences replaced"] == 2
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8 at byte 5 "):
        make_corpus(tmp_path / "bom", {"b.txt": b"\xef\xbb\xbfab\xfe"})
    rows = parquet(tmp_path / "p", [b"fine"] * 99 + [b"a\xff"], kind="binary")
    with pytest.raises(UserError, match=r"p\.parquet is not UTF-8 at row 99"):
        make_corpus(tmp_path / "rows", {"p.parquet": rows})


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"a.jsonl": b'{"text": "x"}\n\n{"text": \n'}, {}, r"a\.jsonl line 3 is not JSON"),
        ({"a.jsonl": b"[1]\n"}, {}, r"a\.jsonl line 1 is not a JSON object"),
        ({"a.jsonl": b'{"body": "x", "id": 1}\n'}, {}, r"line 1 has no field 'text' \(its fields: body, id\).*--text-field"),
        ({"a.jsonl": b'{"text": ["x"]}\n'}, {}, r"line 1: field 'text' is list, not text"),
        ({"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n')[:-9]}, {}, r"a\.jsonl\.gz is damaged"),
        ({"a.jsonl.gz": b"no gzip at all"}, {}, r"a\.jsonl\.gz is damaged"),
        ({"a.parquet": b"PAR1 but not really"}, {}, r"a\.parquet is no readable parquet file"),
        ({"a.txt": b" \n\t\n", "b.txt": b""}, {}, r"no text in .*a\.txt.*b\.txt: 0 usable characters"),
        ({"a.jsonl": b'{"text": ""}\n'}, {}, "0 usable characters"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, files: dict, settings: dict, message: str) -> None:
    """Without file and line a user cannot mend one record among millions."""
    with pytest.raises(UserError, match=message):
        make_corpus(tmp_path, files, **settings)
    assert not (tmp_path / "data" / "mine" / "raw" / "manifest.json").exists()


def test_parquet_of_another_column_or_without_pyarrow(tmp_path: Path) -> None:
    """An import error deep in a stage is no help to a user who lacks an optional package."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    with pytest.raises(UserError, match=r"no column 'text' \(its columns: id, body\).*--text-field"):
        make_corpus(tmp_path, {"a.parquet": parquet(tmp_path / "x", ["t"], "body")})
    with pytest.raises(UserError, match=r"column 'id' holds int64, not text"):
        make_corpus(tmp_path, {"a.parquet": parquet(tmp_path / "x", ["t"], "body")}, text_field="id")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "y.parquet")
    with pytest.raises(UserError, match="several columns named 'text'"):
        make_corpus(tmp_path, {"a.parquet": (tmp_path / "y.parquet").read_bytes()})
    (tmp_path / "pyarrow.py").write_text("raise ImportError", encoding="utf-8")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "from pathlib import Path; import corpus; from support.common import UserError\n"
        "try: list(corpus._parquet_units(0, Path('a.parquet'), 'text'))\n"
        "except UserError as e: print(e)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "reading a.parquet needs pyarrow; install it with" in shown


# ----------------------------------------------------------------------------------------------------------------------
# Splits


def test_split_is_a_hash_of_the_text(tmp_path: Path) -> None:
    """Anything but the text deciding (position, file, run) leaks validation documents into training as a corpus grows."""
    texts = make_texts(2_000)
    _, small = make_corpus(tmp_path / "small", {"a.jsonl": jsonl(texts[:1_500])})
    _, large = make_corpus(tmp_path / "large", {"b.jsonl": jsonl(texts[1_000:]), "a.jsonl": jsonl(texts[:1_200] * 2)})
    splits = {split: set(large.iter_documents(split)) for split in corpus.SPLITS}
    assert not splits["train"] & splits["val"] and not splits["train"] & splits["test"] and not splits["val"] & splits["test"]
    assert set(small.iter_documents("val")) <= splits["val"] and set(small.iter_documents("test")) <= splits["test"]
    for text in texts:
        share = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64
        expected = "val" if share < 0.02 else "test" if share < 0.04 else "train"
        assert text in splits[expected]
    assert 20 <= len(splits["val"]) <= 60


@pytest.mark.parametrize("size", [3_000, 20_000, 1_000_000])
@pytest.mark.parametrize("layout", ["paragraphs", "lines", "one line", "no space"])
def test_one_lone_text_file_simply_works(tmp_path: Path, size: int, layout: str) -> None:
    """One file is one document, which no hash can split: without cutting, validation would be empty."""
    text = {"paragraphs": "\n\n", "lines": "\n", "one line": " ", "no space": ""}[layout].join(make_texts(size // 200))
    text = text if layout in ("paragraphs", "lines") else text.replace("\n", " ")
    text = text.replace(" ", "") if layout == "no space" else text
    config, found = make_corpus(tmp_path, {"a.txt": text.encode()})
    pieces = {split: list(found.iter_documents(split)) for split in corpus.SPLITS}
    assert sum(map(len, (p for split in pieces.values() for p in split))) == len(text)
    assert all(piece in text for split in pieces.values() for piece in split)
    assert all(pieces.values()), {split: len(p) for split, p in pieces.items()}
    smallest = min(len("".join(pieces[split]).encode()) for split in ("val", "test"))
    assert smallest >= min(4_096, size // 16)
    assert sum(map(len, pieces["train"])) >= len(text) // 3
    assert any("cut at blank lines" in note for note in found.manifest["notes"])
    again = {split: list(load_corpus(config).iter_documents(split)) for split in corpus.SPLITS}
    assert again == pieces


def test_cut_pieces_prefer_blank_lines() -> None:
    """Pieces cut in the middle of a sentence where a blank line was near teach the model torn text."""
    text = "\n\n".join("line one\nline two here" for _ in range(50))
    assert all(piece.endswith("\n\n") for piece in list(cut_pieces(text, 60))[:-1])
    assert all(piece.endswith("\n") for piece in list(cut_pieces(text.replace("\n\n", "\n"), 60))[:-1])
    assert "".join(cut_pieces("x" * 1_001, 10)) == "x" * 1_001


def test_a_document_that_is_much_of_the_text_is_cut(tmp_path: Path) -> None:
    """One long file beside many short documents that goes to the test split whole, a quarter of all text."""
    rng = random.Random(15)
    long = {f"{name}.txt": "\n\n".join(" ".join(rng.choices("abcdefgh", k=100)) for _ in range(500)) for name in "xyz"}
    short = "\n".join(json.dumps({"text": " ".join(rng.choices("abcdefgh", k=150))}) for _ in range(300))
    _, found = make_corpus(tmp_path, {**{n: t.encode() for n, t in long.items()}, "w.jsonl": short.encode()})
    sizes = {split: sum(len(text) for text in found.iter_documents(split)) for split in corpus.SPLITS}
    total = sum(sizes.values())
    assert 0.005 * total < min(sizes["val"], sizes["test"]) and max(sizes["val"], sizes["test"]) < 0.05 * total, sizes


def test_few_small_documents_are_split_too(tmp_path: Path) -> None:
    """With forty short notes the plain hash rule often gives validation nothing at all."""
    for seed in range(5):
        texts = make_texts(40, seed)
        _, found = make_corpus(tmp_path / str(seed), {"a.jsonl": jsonl(texts)})
        assert min(found.documents.values()) >= 1 and found.documents["train"] >= 25
        assert found.manifest["splitting"]["unit"] == "document"
    _, found = make_corpus(tmp_path / "none", {"a.jsonl": jsonl(texts)}, test_fraction=0.0)
    assert found.documents["test"] == 0


def test_three_lines_are_no_corpus(tmp_path: Path) -> None:
    """A text of which nothing is left for validation, presented as one whose validation is a bit larger than asked."""
    _, found = make_corpus(tmp_path, {"a.txt": b"a b\nc d\ne f\n"})
    assert found.documents == {"train": 1, "val": 0, "test": 0}
    notes = " ".join(found.manifest["notes"])
    assert "too little text to split: nothing is left for val and test" in notes and "larger share" not in notes


def test_brought_splits_are_kept(tmp_path: Path) -> None:
    """Published figures are on the published splits."""

    def wiki(n: str) -> bytes:
        return "".join(f" \n = {n} {i} = \n \n text \n" for i in range(30)).encode()

    names = ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw")
    _, found = make_corpus(tmp_path, {name: wiki(name) for name in names})
    assert found.documents == {"train": 30, "val": 30, "test": 30}
    assert all("valid" in text for text in found.iter_documents("val"))
    assert [f["documents"] for f in found.manifest["files"]] == [30, 30, 30]
    _, lone = make_corpus(tmp_path / "lone", {"wiki.train.raw": wiki("x") * 4})
    assert min(lone.documents.values()) > 0


# ----------------------------------------------------------------------------------------------------------------------
# The manifest


def test_changed_or_missing_files_are_refused(tmp_path: Path) -> None:
    """Tokens of text that is no longer there, or of other text, look fine until someone tries to reproduce them."""
    config, found = make_corpus(tmp_path, {"a.jsonl": jsonl(make_texts(50))})
    path = config.raw_dir / "a.jsonl"
    data = path.read_bytes()
    path.write_bytes(data)  # another time stamp, the same text
    assert load_corpus(config).fingerprint == found.fingerprint
    path.write_bytes(data.replace(b"cat", b"cow", 1))
    with pytest.raises(UserError, match=r"a\.jsonl has changed.*download_data\.py --corpus mine --data-dir \S+$"):
        load_corpus(config)
    path.unlink()
    with pytest.raises(UserError, match=r"a\.jsonl is missing; run: .*download_data\.py"):
        load_corpus(config)
    (config.raw_dir / "manifest.json").write_text('{"format": 1, "files": []}', encoding="utf-8")
    with pytest.raises(UserError, match="documents is missing"):
        load_corpus(config)
    with pytest.raises(UserError, match=r"manifest\.json is missing; run: uv run python download_data\.py .*--size full"):
        load_corpus(make_config("wikitext103", {"data_dir": str(tmp_path)}))


def test_fingerprint_is_of_text_and_settings(tmp_path: Path) -> None:
    """One that depends on folders or dates rebuilds for nothing; one blind to settings keeps stale tokens."""
    files = {"a.jsonl": jsonl(make_texts(50))}
    prints = [make_corpus(tmp_path / f, files)[1].fingerprint for f in ("one", "two")]
    assert prints[0] == prints[1]
    assert make_corpus(tmp_path / "one", files, val_fraction=0.1)[1].fingerprint != prints[0]
    assert make_corpus(tmp_path / "one", {"a.jsonl": jsonl(make_texts(51))})[1].fingerprint != prints[0]


def test_shuffle_and_kept_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffle that needs the corpus in memory, mixes sources, repeats or loses documents, or keeps the wrong share."""
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 4_000)
    texts = make_texts(900)
    contents = {"a.parquet": parquet(tmp_path / "a", texts[:600]), "b.jsonl": jsonl(texts[600:])}
    orders = {}
    for seed, share in ((-1, 1.0), (42, 1.0), (42, 0.5), (7, 1.0)):
        config = make_config("wikitext103", {"data_dir": str(tmp_path), "shuffle_seed": seed, "keep_fraction": share})
        config.raw_dir.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (config.raw_dir / name).write_bytes(data)
        build_manifest(config, {}, [SourceFile("a.parquet", "parquet", source="a"), SourceFile("b.jsonl", "jsonl", source="b")])
        orders[seed, share] = [
            t for block in load_corpus(config).blocks() for t in load_corpus(config).read(block).texts["train"]
        ]
    plain, shuffled, half = orders[-1, 1.0], orders[42, 1.0], orders[42, 0.5]
    assert sorted(plain) == sorted(shuffled) == sorted(orders[7, 1.0])
    assert plain != shuffled != orders[7, 1.0]
    first = [t for t in plain if t in set(texts[:600])]
    assert sorted(shuffled[: len(first)]) == sorted(first), "the sources ran into each other"
    moved = sum(abs(plain.index(t) - n) for n, t in enumerate(shuffled)) / len(plain)
    assert moved > 50
    assert abs(len(half) / len(plain) - 0.5) < 0.05 and set(half) < set(plain)


def test_mix_reads_its_members_one_after_the_other(tmp_path: Path) -> None:
    """A file index that is not shifted reads the wrong member; a changed member must not pass for the one that was mixed."""
    one, two = make_texts(60, 1), make_texts(50, 2)
    make_corpus(tmp_path, {"a.jsonl": jsonl(one)}, "one")
    make_corpus(tmp_path, {"b.jsonl": jsonl(two, "body"), "c.jsonl": jsonl(two[:30], "body")}, "two", text_field="body")
    config = make_config("wikitext103", {"corpus": "both", "data_dir": str(tmp_path / "data")})
    make_mix(config, "one:3,two:1")
    mixed = load_corpus(config)
    assert sorted(all_documents(mixed)) == sorted(one + two + two[:30])
    assert mixed.weights == {"one": 0.75, "two": 0.25}
    assert [mixed.source_of(block) for block in mixed.blocks()] == ["one", "two"]
    for wrong, message in (
        ("one", "no NAME:WEIGHT"),
        ("one:0", "above 0"),
        ("both:1", "hold itself"),
        ("three:1", "is missing"),
        ("one:1;two:1", "one:1;two.*plain name"),  # once a traceback
        ("one:1e300,two:1e-300", "far apart"),  # once a division by zero, at the end of stage 3
    ):
        with pytest.raises(UserError, match=message):
            make_mix(config, wrong)
    with pytest.raises(UserError, match="no mix"):
        make_mix(make_config("wikitext103", {"corpus": "one", "data_dir": str(tmp_path / "data")}), "two:1")
    make_corpus(tmp_path, {"a.jsonl": jsonl(one[1:])}, "one")
    with pytest.raises(UserError, match=r"one has changed since it was mixed into both.*--mix one:0\.75,two:0\.25"):
        load_corpus(config)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory of a process is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Reading a file whole would need twice its size here; on a corpus of 500 MB it fails on a small machine."""
    article = " \n = T {} = \n \n " + "some words of text " * 400 + "\n"
    with open(tmp_path / "wiki.train.raw", "w", encoding="utf-8", newline="") as file:
        for i in range(12_000):
            file.write(article.format(i))
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from corpus import SourceFile
from support.manifest import build_manifest, load_corpus
from config import make_config
config = make_config("wikitext103", {{"data_dir": {str(tmp_path / "data")!r}}})
build_manifest(config, {{}}, [SourceFile.of({str(tmp_path / "wiki.train.raw")!r})])
assert sum(1 for _ in load_corpus(config).iter_documents("train")) > 11_000
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "wiki.train.raw").stat().st_size > 90e6
    assert int(shown) < 60_000  # kilobytes


def test_parquet_columns_that_cannot_be_meant(tmp_path: Path) -> None:
    """A traceback (KeyError) for two columns of one name; `no readable parquet file` for a sound one with lists of text."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    twice = pa.Table.from_arrays([pa.array(["a b"] * 3), pa.array(["c"] * 3)], names=["text", "text"])
    for name, table, message in (
        ("twice", twice, "several columns named 'text'"),
        ("lists", pa.table({"text": [["a"]] * 3}), r"column 'text' holds list<.*not text"),
        ("tables", pa.table({"text": [{"text": "a"}] * 3}), r"column 'text' holds struct<.*not text"),
    ):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table, path)
        with pytest.raises(UserError, match=message):
            make_corpus(tmp_path, {path.name: path.read_bytes()}, name)


def test_nul_characters_are_counted(tmp_path: Path) -> None:
    """UTF-16 without its mark is valid UTF-8 as long as it is English, and was taken without a word."""
    text = "\n\n".join(make_texts(60)).encode("ascii", "ignore").decode().encode("utf-16-le")
    _, found = make_corpus(tmp_path, {"a.txt": text})
    assert any("NUL characters kept" in note and f"{text.count(0):,}" in note for note in found.manifest["notes"])
