"""Stage 1 as a user runs it: archives, own files, a hub, what is verified and what is repaired."""

import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import loopback
import pytest
from conftest import assert_user_error
from loopback import Server

import download_data
from support import sources

ARTICLE = " \n = Title {} = \n \n Some text about {} in an article of its own . \n \n = = Section = = \n \n More text . \n"


@pytest.fixture
def server() -> Iterator[Server]:
    with loopback.serve() as server:
        yield server


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    return tmp_path


def articles(start: int, n: int) -> bytes:
    return "".join(ARTICLE.format(i, i) for i in range(start, start + n)).encode()


def zip_of(files: dict[str, bytes], folder: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(folder + name, data)
    return buffer.getvalue()


WIKI_FILES = {"wiki.train.raw": articles(0, 30), "wiki.valid.raw": articles(100, 4), "wiki.test.raw": articles(200, 3)}


def manifest_of(here: Path, corpus: str) -> dict:
    return json.loads((here / "data" / corpus / "raw" / "manifest.json").read_text(encoding="utf-8"))


def run(*arguments: object) -> int:
    return download_data.main([str(a) for a in arguments])


def user_error(*arguments: object) -> str:
    with pytest.raises(download_data.UserError) as error:
        run(*arguments)
    return str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Addresses and archives


def test_a_zip_keeps_wikitext_splits(server: Server, here: Path, capsys: pytest.CaptureFixture) -> None:
    """A corpus with splits of its own is split anew, fetched again when complete, or damage in it goes unseen."""
    archive = zip_of({**WIKI_FILES, "readme.pdf": b"%PDF"}, "some/folder/")
    server.bodies["/w.zip"] = archive
    assert run("--url", f"{server.url}/w.zip", "--corpus", "wiki") == 0
    out = capsys.readouterr().out
    manifest = manifest_of(here, "wiki")
    assert manifest["documents"] == {"train": 30, "val": 4, "test": 3}
    for fragment in [
        hashlib.sha256(archive).hexdigest(),
        ".pdf 1",
        manifest["fingerprint"],
    ]:
        assert fragment in out
    raw = here / "data/wiki/raw"
    assert {Path(f["path"]).name: (raw / f["path"]).read_bytes() for f in manifest["files"]} == WIKI_FILES

    server.requests.clear()
    command = [sys.executable, download_data.__file__, "--corpus", "wiki"]
    again = subprocess.run(command, cwd=here, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    assert "verified" in again and "next: uv run python train_tokenizer.py --corpus wiki" in again
    train = raw / next(f["path"] for f in manifest["files"] if f["split"] == "train")
    train.write_bytes(train.read_bytes()[:-7])
    assert run("--url", f"{server.url}/w.zip", "--corpus", "wiki") == 0
    out = capsys.readouterr().out
    assert str(train.relative_to(here)) in out and "instead of" in out
    assert train.read_bytes() == WIKI_FILES["wiki.train.raw"]
    assert manifest_of(here, "wiki")["fingerprint"] == manifest["fingerprint"]
    assert server.requests == []  # the archive was still there


def test_a_damaged_plain_file_is_fetched_again(server: Server, here: Path) -> None:
    """Without a checksum, what lies there is taken for good whatever happened to it."""
    text = b"A line of text that is long enough to be one.\n\n" * 900
    server.bodies["/book.txt"] = text
    run("--url", f"{server.url}/book.txt")
    (here / "data/custom/raw/book.txt").write_bytes(text[:500])
    run("--url", f"{server.url}/book.txt")
    assert (here / "data/custom/raw/book.txt").read_bytes() == text


def test_checksums_of_addresses(server: Server, here: Path) -> None:
    """--sha256 is not compared, or two files of one name overwrite each other."""
    one, two = b"First text. " * 3000, b"Second text. " * 3000
    server.bodies = {"/a/x.txt": one, "/b/x.txt": two}
    urls = [f"{server.url}/a/x.txt", f"{server.url}/b/x.txt"]
    hashes = [hashlib.sha256(body).hexdigest() for body in (one, two)]
    assert "sha256" in user_error("--url", *urls, "--sha256", hashes[0], hashes[0])
    assert "1 values for 2" in user_error("--url", *urls, "--sha256", hashes[0])
    assert "64 hexadecimal" in user_error("--url", urls[0], "--sha256", "abc")
    run("--url", *urls, "--sha256", hashes[0].upper(), hashes[1])
    manifest = manifest_of(here, "custom")
    assert [f["sha256"] for f in manifest["files"]] == hashes == manifest["source"]["sha256"]


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_is_one_line_whatever_the_compression(here: Path, method: int) -> None:
    """A traceback where bzip2 and LZMA have exceptions of their own."""
    with zipfile.ZipFile(here / "a.zip", "w", method) as archive:
        archive.writestr("a.txt", "some words in a line\n" * 9_000)
    data = bytearray((here / "a.zip").read_bytes())
    data[60:90] = bytes(byte ^ 0x55 for byte in data[60:90])
    (here / "a.zip").write_bytes(data)
    assert "a.zip is no readable zip archive" in user_error("--archive", "a.zip", "--corpus", "x")


def evil_zip(name: str, mode: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("good.txt", "good text")
        info = zipfile.ZipInfo("placeholder")
        info.filename, info.external_attr = name, mode << 16
        archive.writestr(info, "evil text")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("../evil.txt", 0),
        ("a/../../evil.txt", 0),
        ("/tmp/evil.txt", 0),
        ("..\\evil.txt", 0),
        ("C:\\evil.txt", 0),
        ("C:evil.txt", 0),
        ("\\\\host\\share\\evil.txt", 0),
        ("link.txt", stat.S_IFLNK | 0o777),
        ("evil/../..", 0),
    ],
)
def test_members_that_would_escape(here: Path, name: str, mode: int) -> None:
    """A prepared archive writes outside of its folder."""
    (here / "evil.zip").write_bytes(evil_zip(name, mode))
    assert "refused" in user_error("--archive", "evil.zip", "--corpus", "x")
    written = [p for p in here.rglob("*") if p.is_file() and p.name not in ("evil.zip", ".lock")]
    assert written == []


def test_archives_that_cannot_be_read(server: Server, here: Path) -> None:
    """A damaged archive leaves files that look whole, is kept for the next try, or ends in a traceback."""
    good = zip_of(WIKI_FILES)
    position = good.index(b"wiki.train.raw") + 60
    flipped = bytearray(good)
    flipped[position] ^= 0xFF
    encrypted = bytearray(good)
    for i in [j for j in range(len(good)) if good[j : j + 4] == b"PK\x01\x02"]:
        encrypted[i + 8] |= 1
    for name, data in {"cut": good[:-50], "flipped": flipped, "text": b"no zip", "empty": b""}.items():
        server.bodies[f"/{name}.zip"] = bytes(data)
        assert "no readable zip" in user_error("--url", f"{server.url}/{name}.zip"), name
        server.bodies[f"/{name}.zip"] = good
        assert run("--url", f"{server.url}/{name}.zip") == 0, "the next try did not fetch it again"
    for name, data in {"locked": bytes(encrypted), "none": zip_of({"a.png": b""})}.items():
        (here / f"{name}.zip").write_bytes(data)
        assert {"locked": "encrypted", "none": ".png"}[name] in user_error("--archive", f"{name}.zip", "--corpus", "x")


# ----------------------------------------------------------------------------------------------------------------------
# WikiText


@pytest.fixture
def release(server: Server, monkeypatch: pytest.MonkeyPatch) -> sources.Release:
    """A small stand-in for WikiText-2, with real checksums, on two mirrors."""
    archive = zip_of(WIKI_FILES, "wikitext-2-raw/")
    server.bodies["/second/w.zip"] = archive
    release = sources.Release(
        archive="w.zip",
        bytes=len(archive),
        sha256=hashlib.sha256(archive).hexdigest(),
        unpacked_bytes=sum(map(len, WIKI_FILES.values())),
        mirrors=(f"{server.url}/first/w.zip", "{hub}/second/w.zip"),
        files={name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in WIKI_FILES.items()},
    )
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
    monkeypatch.setitem(sources.RELEASES, "small", release)
    return release


def test_wikitext(server: Server, here: Path, release: sources.Release) -> None:
    """A dead mirror ends the run; --mirror is not tried first, or is believed without its checksum."""
    server.bodies["/wrong.zip"] = zip_of({**WIKI_FILES, "wiki.train.raw": b"x"})
    assert run("--preset", "wikitext2", "--mirror", f"{server.url}/wrong.zip") == 0
    assert [path for path, _ in server.requests] == ["/wrong.zip", "/first/w.zip", "/second/w.zip"]
    manifest = manifest_of(here, "wikitext2")
    assert [(f["path"], f["split"], f["documents"]) for f in manifest["files"]] == [
        ("wiki.train.raw", "train", 30),
        ("wiki.valid.raw", "val", 4),
        ("wiki.test.raw", "test", 3),
    ]
    server.requests.clear()
    (here / "data/wikitext2/raw/wiki.test.raw").unlink()
    (here / "data/wikitext2/raw/w.zip").write_bytes(server.bodies["/second/w.zip"][:100])
    assert run("--size", "small") == 0
    assert manifest_of(here, "wikitext2")["fingerprint"] == manifest["fingerprint"]
    assert server.requests[-1][1]["Range"] == "bytes=100-"


def test_wikitext_from_a_file(here: Path, server: Server, release: sources.Release) -> None:
    """Offline, a file that is not the published one is accepted, or one of the right name is insisted on."""
    (here / "mine.zip").write_bytes(server.bodies["/second/w.zip"])
    (here / "other.zip").write_bytes(zip_of(WIKI_FILES))
    assert "is not w.zip" in user_error("--size", "small", "--archive", "other.zip")
    assert "is missing" in user_error("--size", "small", "--archive", "nowhere.zip")
    assert run("--size", "small", "--archive", "mine.zip") == 0
    assert server.requests == []
    assert run("--size", "small") == 0  # complete, however it came
    assert server.requests == []


def test_wikitext_with_wrong_splits(here: Path, release: sources.Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is right but what is unpacked is not looked at."""
    wrong = {**release.files, "wiki.valid.raw": (7, None)}
    monkeypatch.setitem(sources.RELEASES, "small", sources.Release(**{**vars(release), "files": wrong}))
    assert "wiki.valid.raw" in user_error("--size", "small")
    assert not (here / "data/wikitext2/raw/manifest.json").exists()


def test_the_published_evaluation_files(here: Path, wikitext_zip: Path) -> None:
    """The pinned sizes and hashes of WikiText's validation and test files have a typing error."""
    paths = sources.unpack(wikitext_zip, here / "w")
    for path in paths:
        size, sha256 = sources.RELEASES["full"].files[path.name]
        assert sources.describe_damage(path, size, sha256) is None
    assert len(paths) == 2


# ----------------------------------------------------------------------------------------------------------------------
# The user's own files


def test_own_folder(here: Path, capsys: pytest.CaptureFixture) -> None:
    """Files are copied, taken twice, skipped without a word, or our own output is taken for input."""
    notes = here / "notes"
    (notes / "sub").mkdir(parents=True)
    for i in range(40):
        (notes / "sub" / f"{i:02}.txt").write_text(f"Note number {i}, with text of its own. " * 20, encoding="utf-8")
    (notes / "more.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    (notes / "picture.png").write_bytes(b"\x89PNG")
    (notes / ".hidden.txt").write_text("hidden", encoding="utf-8")
    (notes / "sub" / "round").symlink_to(notes)
    (notes / "alias.txt").symlink_to(notes / "sub" / "01.txt")
    (here / "data/other/raw").mkdir(parents=True)
    (here / "data/other/raw/ours.txt").write_text("ours", encoding="utf-8")
    assert run("--input", ".", "notes/sub/03.txt") == 0
    out = capsys.readouterr().out
    assert "picture.png" in out and "skipped 1 file" in out
    manifest = manifest_of(here, "custom")
    paths = [Path(f["path"]) for f in manifest["files"]]
    assert len(paths) == 41 and all(path.is_absolute() and path.exists() for path in paths)
    assert sum(manifest["documents"].values()) == 42
    assert manifest["notes"] and all(note in out for note in manifest["notes"])
    assert [p.name for p in (here / "data/custom/raw").iterdir()] == ["manifest.json"]

    (notes / "new.md").write_text("A new note.", encoding="utf-8")
    (notes / "more.jsonl").write_text('{"text": "one"}\n', encoding="utf-8")
    (notes / "sub" / "00.txt").unlink()
    assert run("--corpus", "custom") == 0
    out = capsys.readouterr().out
    for name in ["new.md", "more.jsonl", "00.txt"]:
        assert name in out
    assert len(manifest_of(here, "custom")["files"]) == 41
    assert run("--input", ".", "--val-fraction", "0.2") == 0
    assert "val_fraction" in capsys.readouterr().out
    assert manifest_of(here, "custom")["settings"]["val_fraction"] == 0.2
    assert run("--corpus", "custom") == 0
    out = capsys.readouterr().out
    assert "--val-fraction changes it" in out and "verified" in out
    assert run("--input", "notes") == 0
    assert manifest_of(here, "custom")["settings"]["val_fraction"] == 0.02  # another source, the defaults again


def test_what_is_no_file_is_named(here: Path, capsys: pytest.CaptureFixture) -> None:
    """A folder of links whose disk is not mounted passed over in silence; a pipe that `does not exist`."""
    (here / "notes").mkdir()
    (here / "notes/there.txt").write_text("Some words of a book.\n\n" * 500, encoding="utf-8")
    (here / "notes/gone.txt").symlink_to("/nowhere/gone.txt")
    (here / "notes/round.txt").symlink_to("round.txt")
    os.mkfifo(here / "notes/pipe.txt")
    assert run("--input", "notes") == 0
    out = capsys.readouterr().out
    assert "skipped 3 that are no files" in out and "gone.txt" in out
    assert len(manifest_of(here, "custom")["files"]) == 1
    assert "neither a file nor a folder" in user_error("--input", "notes/pipe.txt")
    assert "leads nowhere" in user_error("--input", "notes/gone.txt")
    (here / "notes/there.txt").unlink()
    assert "skipped 3 that are no files" in user_error("--input", "notes")


@pytest.mark.parametrize("text", ["{}", "[1]", '{"format": 1, "files": 3}', "{", '{"settings": {"nonsense": 1}}'])
def test_a_damaged_manifest(here: Path, text: str, capsys: pytest.CaptureFixture) -> None:
    """A manifest that cannot be used stops the very command that would mend it."""
    (here / "book.txt").write_text("Some words of a book.\n\n" * 500, encoding="utf-8")
    assert run("--input", "book.txt") == 0
    good = manifest_of(here, "custom")
    (here / "data/custom/raw/manifest.json").write_text(text, encoding="utf-8")
    assert run("--input", "book.txt") == 0
    assert "cannot be used" in capsys.readouterr().out
    assert manifest_of(here, "custom") == good


@pytest.mark.parametrize("text", ['{"mix": [{}]}', '{"mix": 3}', "{"])
def test_a_damaged_mix(here: Path, text: str) -> None:
    """A traceback where the parts of a mix are looked for in a manifest that is none."""
    (here / "data/both/raw").mkdir(parents=True)
    (here / "data/both/raw/manifest.json").write_text(text, encoding="utf-8")
    assert "manifest" in user_error("--corpus", "both")


def test_one_lone_text_file(stage, tmp_path: Path) -> None:
    """The commonest corpus of all, one text file, does not simply work."""
    text = "\n\n".join(f"Paragraph {i} of a story that goes on and on, as stories do. " * 5 for i in range(300))
    (tmp_path / "tale.txt").write_text(text, encoding="utf-8")
    result = stage("download_data.py", "--input", "tale.txt")
    assert result.returncode == 0, result.stderr
    documents = manifest_of(tmp_path, "custom")["documents"]
    assert all(documents[split] > 0 for split in ("train", "val", "test"))
    assert "cut at blank lines" in result.stdout
    assert "uv run python train_tokenizer.py --corpus custom" in result.stdout.splitlines()[-1]


def test_mistakes(stage, tmp_path: Path) -> None:
    """A mistake ends in a traceback, or its message leaves the user without a next step."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.docx").write_bytes(b"PK")
    (tmp_path / "blank.txt").write_bytes(b" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    for arguments, fragments in {
        ("--input", "nowhere"): ["nowhere", "does not exist"],
        ("--input", "empty"): ["empty", ".txt"],
        ("--input", "a.docx"): ["a.docx", ".txt"],
        ("--input", "blank.txt"): ["blank.txt"],
        ("--input", "latin.txt"): ["latin.txt", "byte 3", "--errors replace"],
        ("--url", "http://example.com/a.txt"): ["https"],
        ("--url", "https://example.com/"): [".zip"],
        ("--corpus", "unheard-of"): ["unheard-of", "--input"],
        ("--size", "local", "--mirror", "https://example.com"): ["--mirror"],
        ("--size", "local", "--archive", "a.zip"): ["--archive"],
        ("--size", "small", "--sha256", "0" * 64): ["--sha256", "--url"],
        ("--hub", "nonsense"): ["OWNER/SET"],
        ("--size", "small", "--input", "a.txt"): ["not allowed with"],
        ("--siz", "small"): ["--size"],
    }.items():
        assert_user_error(stage("download_data.py", *arguments), *fragments)
    assert not list(tmp_path.rglob("manifest.json"))


def test_help_is_quick_and_light(stage) -> None:
    """--help imports what only the work needs."""
    code = "import sys, download_data\ntry: download_data.main(['--help'])\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(download_data.__file__).parent, capture_output=True, text=True, encoding="utf-8"
    )
    assert "Stage 1 of 9" in result.stdout
    for module in ("torch", "numpy", "requests"):
        assert f"'{module}'" not in result.stdout


# ----------------------------------------------------------------------------------------------------------------------
# A hub


@pytest.fixture
def hub(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Speaks the hub's tree API, in pages of two entries, and redirects downloads to another address, over real parquet."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    names = [f"en/part-{i}.parquet" for i in range(3)] + ["en/deep/part-9.parquet"]
    entries = [
        {"type": "directory", "oid": "0", "size": 0, "path": "en/deep"},
        {"type": "file", "oid": "1", "size": 5, "path": "en/README.md"},
    ]
    for i, name in enumerate(names):
        buffer = io.BytesIO()
        parquet.write_table(pa.table({"id": [1, 2], "text": [f"Text {i} a, some words.", f"Text {i} b, some words."]}), buffer)
        body = buffer.getvalue()
        server.bodies[f"/cdn/{i}"] = body
        server.script[f"/datasets/own/set/resolve/main/{name}"] = [loopback.status(302, {"Location": f"/cdn/{i}"})]
        lfs = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
        entries.append({"type": "file", "oid": "f" * 40, "size": len(body), "path": name, "lfs": lfs})
    root = "/api/datasets/own/set/tree/main/en?recursive=true"
    for page in range(0, len(entries), 2):
        path = root if page == 0 else f"{root}&cursor={page}"
        body = json.dumps(entries[page : page + 2]).encode()
        more = {"Link": f'<{server.url}{root}&cursor={page + 2}>; rel="next"'} if page + 2 < len(entries) else {}
        server.script[path] = [lambda request, body=body, more=more: request.send(200, body, more)]
    return server


def test_hub_set(hub: Server, here: Path) -> None:
    """Only the hub's first page is read, a file is not checked, or which file belongs to which source is forgotten."""
    arguments = ["--hub", "first=own/set:en", "--corpus", "mix"]
    assert run(*arguments) == 0
    manifest = manifest_of(here, "mix")
    expected = ["first/deep/part-9.parquet", "first/part-0.parquet", "first/part-1.parquet", "first/part-2.parquet"]
    assert [f["path"] for f in manifest["files"]] == expected
    assert {f["source"] for f in manifest["files"]} == {"first"}
    assert sum(manifest["documents"].values()) == 8
    hub.requests.clear()
    assert run("--corpus", "mix") == 0
    assert hub.requests == []
    (here / "data/mix/raw/first/part-1.parquet").write_bytes(b"PAR1")
    assert run(*arguments) == 0
    assert [path for path, _ in hub.requests if path.startswith("/cdn")] == ["/cdn/1"]
    assert manifest_of(here, "mix")["fingerprint"] == manifest["fingerprint"]


def test_hub_faults(hub: Server, here: Path) -> None:
    """A file that differs from what the hub announces is kept, or a hostile file name leaves the folder."""
    hub.bodies["/cdn/2"] = bytes(len(hub.bodies["/cdn/2"]))
    assert "sha256" in user_error("--hub", "own/set:en")
    assert sorted(p.name for p in (here / "data/custom/raw/set").glob("*.parquet")) == ["part-0.parquet", "part-1.parquet"]
    assert "404" in user_error("--hub", "own/other")
    entry = {"type": "file", "oid": "0", "size": 3, "path": "../../evil.parquet"}
    hub.script["/api/datasets/own/evil/tree/main?recursive=true"] = [lambda r: r.send(200, json.dumps([entry]).encode())]
    assert "refused" in user_error("--hub", "own/evil")
    for i, page in enumerate(
        ['{"error": "x"}', "[1]", '[{"type": "file"}]', '[{"type": "file", "path": "a.parquet", "size": "x"}]']
    ):
        hub.script[f"/api/datasets/own/odd{i}/tree/main?recursive=true"] = [lambda r, page=page: r.send(200, page.encode())]
        assert "no list of files" in user_error("--hub", f"own/odd{i}"), page
    assert "two sets of one name" in user_error("--hub", "own/set:en", "own/set:de")
    assert "OWNER/SET" in user_error("--hub", "..=own/set")
    hub.script["/api/datasets/own/page/tree/main?recursive=true"] = [lambda r: r.send(200, b"<html>")]
    assert "no JSON" in user_error("--hub", "own/page")
    hub.script["/api/datasets/own/none/tree/main?recursive=true"] = [lambda r: r.send(200, b"[]")]
    assert "no .parquet" in user_error("--hub", "own/none")
    assert not list(here.rglob("evil.parquet"))
