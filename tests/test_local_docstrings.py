"""The corpus `local`: what is taken from source files, how it is laid out, and that it can be read back exactly."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from config import make_config
from corpus import Corpus, SourceFile
from support import docstrings
from support.manifest import build_manifest

SOURCE = '''
"""Module docstring, which has to be eighty characters or more to be taken, and is just that."""

class Outer:
    """Outer docstring: {long}"""

    def method(self):
        """Method docstring: {long}

         = Looks like a title =

        = Not indented =

         = = Section = =

         = A = B =
        """

        async def inner():
            """Inner docstring: {long}"""

    short = 1

    def brief(self):
        """Too short."""

if True:
    def under_if():
        r"""Under if, with \\n as it is written: {long}"""
else:
    def under_if():
        """Under if, with \\ud800 and \\r\\n and \\0: {long}"""

try:
    pass
except Exception:
    def under_except():
        """Outer docstring: {long}"""

f = lambda: """No docstring {long}"""
'''.replace("{long}", "x" * 80)


def write_tree(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return root


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the installed sources, with files that are no Python among them."""
    files = {
        "pkg/__init__.py": SOURCE,
        "pkg/z_copy.py": SOURCE,
        "pkg/deep/latin.py": '# coding: latin-1\n"""Documented in Latin-1: caf\xe9, {}"""'.format("y" * 80).encode("latin-1"),
        "pkg/python2.py": "print 'hello'",
        "pkg/zero.py": b"\0",
        "pkg/binary.py": b"\xff\xfe\xfa",
        "pkg/tests/case.py": SOURCE.replace("docstring", "test"),
        "pkg/readme.txt": SOURCE,
    }
    root = write_tree(tmp_path / "lib", files)
    monkeypatch.setattr(docstrings, "_source_files", lambda: docstrings._files_below(root / "pkg", "pkg"))
    return root


def read_back(tmp_path: Path, raw: Path) -> list[str]:
    config = make_config("quick", {"data_dir": str(tmp_path / "data")})
    config.raw_dir.mkdir(parents=True, exist_ok=True)
    manifest = build_manifest(config, {}, [SourceFile.of(raw)])
    corpus = Corpus(manifest, config.raw_dir)
    return [text for split in ("train", "val", "test") for text in corpus.iter_documents(split)]


def test_what_is_taken(tree: Path, tmp_path: Path) -> None:
    """A nested, conditional or Latin-1 definition is missed, one is counted twice, or text that looks like a title splits
    an article in two.
    """
    raw = tmp_path / "docstrings.raw"
    written = docstrings.write_docstrings(raw)
    articles = {text.split("\n")[0].strip(" ="): text for text in read_back(tmp_path, raw)}
    assert sorted(articles) == [
        "pkg",
        "pkg.Outer",
        "pkg.Outer.method",
        "pkg.Outer.method.inner",
        "pkg.deep.latin",
        "pkg.under_if",
    ]
    assert written == 7, "both definitions of under_if count, and no duplicate"
    assert len(read_back(tmp_path, raw)) == 7
    assert "caf\xe9" in articles["pkg.deep.latin"]
    assert " = = Looks like a title = = \n" in articles["pkg.Outer.method"]
    text = raw.read_text(encoding="utf-8")
    assert "\ufffd" in text and "\0" in text and "\r" not in text
    assert [line for line in text.split("\n") if line.startswith(" = ") and not line.startswith(" = =")] == [
        f" = {name} = " for name in sorted([*articles, "pkg.under_if"])
    ]


def test_titles_in_every_disguise(tmp_path: Path) -> None:
    """Some line of a docstring is read as the title of another article."""
    lines = [
        " = A = ",
        "= A =",
        "\t= A =",
        " = A =",
        " = A = B = ",
        " = =A= = ",
        " =  A  = ",
        " = A =\t",
        " = x == y = ",
        " = = A = ",
    ]
    lines += ["\x0b = A = ", "\x0c= A =", "\u2028 = A = ", " = A = \x85", "\ufeff = A = ", " = A\x1c = "]
    for separator in ("\n\n", "\n \n", "\n\t\n"):
        body = separator.join(["start", *lines, *reversed(lines), "end"])
        names = ["one", "two", "three"]
        raw = tmp_path / "x.raw"
        raw.write_bytes("".join(docstrings._article(name, f"{name} {body}") for name in names).encode("utf-8"))
        assert len(read_back(tmp_path, raw)) == len(names)


def test_no_source_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter without source files gives an empty corpus."""
    monkeypatch.setattr(docstrings, "_source_files", lambda: iter([]))
    with pytest.raises(docstrings.UserError, match="no Python source"):
        docstrings.write_docstrings(tmp_path / "x.raw")


def test_nothing_is_imported() -> None:
    """To find the packages, torch is imported: seconds of waiting, and foreign code runs."""
    shown = "docstrings.versions(), len(list(docstrings._source_files())), sorted(sys.modules)"
    code = f"import sys; from support import docstrings; print({shown})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert "'torch': '" in result.stdout and "'numpy': '" in result.stdout
    assert "'torch'," not in result.stdout and "'numpy'," not in result.stdout


def test_this_machine(stage: Callable[..., subprocess.CompletedProcess], tmp_path: Path) -> None:
    """The whole corpus is not what was written, or is made again when it is there."""
    first = stage("download_data.py", "--preset", "quick")
    assert first.returncode == 0, first.stderr
    manifest = json.loads((tmp_path / "data/local/raw/manifest.json").read_text(encoding="utf-8"))
    documents = manifest["documents"]
    assert f"{sum(documents.values()):,} articles written" in first.stdout
    assert sum(documents.values()) > 10_000 and manifest["source"]["versions"].keys() == {"python", "numpy", "torch"}
    assert 0.01 < documents["val"] / documents["train"] < 0.04
    raw = (tmp_path / "data/local/raw/docstrings.raw").read_text(encoding="utf-8")
    for title in ["json.dumps", "torch.nn.modules.linear.Linear", "numpy.lib._function_base_impl.average"]:
        assert f" \n = {title} = \n \n" in raw
    titles = [line[3:-3] for line in raw.split("\n") if line.startswith(" = ") and not line.startswith(" = = ")]
    assert titles == sorted(titles) and len(titles) == sum(documents.values())
    again = stage("download_data.py", "--size", "local")
    assert "verified" in again.stdout and manifest["fingerprint"] in again.stdout
