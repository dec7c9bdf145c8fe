"""The corpus `local`: the documentation that every machine with this project has, as articles in WikiText's layout.

Docstrings of the running interpreter's standard library, NumPy and PyTorch, read from their source files with `ast`;
nothing is imported, so nothing of theirs runs.
"""

import ast
import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from support.common import Progress, UserError, atomic_write, start_worker

LEAST_CHARACTERS = 80
PACKAGES = ("numpy", "torch")
# Test suites document cases, not the library; site-packages may lie inside the standard library's folder.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TITLE_LIKE = re.compile(r"\s*= (?!= )(.+)(?<! =) =\s*")  # a line that a reader could take for an article's title


def versions() -> dict[str, str]:
    """What the corpus is made from: it differs from machine to machine with these."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if _package_folder(package) is not None:
            found[package] = _version(package)
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # installed without metadata, as some source builds are
        return "unknown"


def write_docstrings(path: Path) -> int:
    """Writes every docstring as an article titled with its qualified name; returns the number of articles.

    Sorted by name; exact duplicates and docstrings under LEAST_CHARACTERS are left out. Raises UserError where no source
    is found.
    """
    docstrings = _collect_docstrings()
    if not docstrings:
        raise UserError("no Python source files are installed beside this interpreter; use --size small or --input instead")
    articles = 0
    seen = set()
    with atomic_write(path) as file:
        for name, text in sorted(docstrings):
            if text not in seen:
                seen.add(text)
                file.write(_article(name, text).encode("utf-8"))
                articles += 1
    return articles


def _article(name: str, text: str) -> str:
    """One article, laid out as in WikiText. A heading that looks like a title becomes one of a section."""
    lines = [TITLE_LIKE.sub(r" = = \1 = = ", line) if TITLE_LIKE.fullmatch(line) else line for line in text.split("\n")]
    body = "\n".join(lines)
    return f" \n = {name} = \n \n{body}\n"


def _collect_docstrings() -> list[tuple[str, str]]:
    """(qualified name, text) of all docstrings long enough, parsed on all cores. Raises UserError."""
    files = list(_source_files())
    docstrings, unreadable = [], 0
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(8, os.cpu_count() or 1), context, _prepare_worker)
    try:
        with Progress(len(files), "reading docstrings", "files") as progress:
            for found in pool.map(_read_file, files, chunksize=16):
                progress.update()
                if found is None:
                    unreadable += 1
                else:
                    docstrings += found
    except BrokenProcessPool:
        raise UserError("a process that read source files was killed (out of memory?); run the same command again") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    note = f" ({unreadable} could not be parsed)" if unreadable else ""
    print(f"read {len(files):,} source files{note}")
    return docstrings


def _prepare_worker() -> None:
    start_worker()
    warnings.simplefilter("ignore")  # sources warn about their escape sequences when they are parsed
    gc.disable()  # syntax trees are made of millions of objects, freed by their reference counts alone


def _source_files() -> Iterator[tuple[str, str]]:
    """(module name, path) of every source file."""
    yield from _files_below(Path(sysconfig.get_path("stdlib")), "")
    for package in PACKAGES:
        folder = _package_folder(package)
        if folder is None:
            print(f"{package} is not installed: its documentation is left out")
        else:
            yield from _files_below(folder, package)


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)  # finds a top-level package without running it
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _files_below(root: Path, package: str) -> Iterator[tuple[str, str]]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if s not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = [package, *path.relative_to(root).with_suffix("").parts]
                yield ".".join(p for p in parts if p and p != "__init__"), str(path)


def _read_file(module_and_path: tuple[str, str]) -> list[tuple[str, str]] | None:
    """The docstrings of one file; None where it is no valid source (some are templates, or for another Python)."""
    module, path = module_and_path
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return [(name, text) for name, text in _docstrings_of(tree, module) if len(text) >= LEAST_CHARACTERS]


def _docstrings_of(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Depth first, so that a method is named after its class; definitions under `if` and `try` count as well."""
    if isinstance(node, (ast.Module, *DEFINITIONS)):
        text = ast.get_docstring(node)
        if text:
            yield name, _plain_text(text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            yield from _docstrings_of(child, f"{name}.{child.name}")
        elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _docstrings_of(child, name)


def _plain_text(text: str) -> str:
    """Text that UTF-8 can hold, with one kind of line end and no blank line around it."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
