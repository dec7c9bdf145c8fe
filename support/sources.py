"""Where a corpus comes from: WikiText's archives, this machine's documentation, the user's files, addresses, a hub.

Each source brings its files into a corpus folder and can do so again: what is there and right is kept, what is missing or
damaged is brought anew. `describe()` is what the manifest remembers of it.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from corpus import KINDS, SourceFile, kind_of
from support.archives import DamagedArchive, describe_skipped, unpack
from support.common import UserError, require_free_space, sha256_file
from support.docstrings import versions, write_docstrings
from support.fetch import describe_damage, download, require_safe_url, shown_url
from support.hub import HubSet, hub_endpoint, hub_hint, list_hub_files


class Source:
    """Brings the files of a corpus into its folder."""

    def collect(self, raw_dir: Path) -> list[SourceFile]:
        """Brings what is missing or damaged; returns all files in reading order. Raises UserError."""
        raise NotImplementedError

    def describe(self, raw_dir: Path) -> dict[str, Any]:
        """What the manifest records, once the files are there."""
        raise NotImplementedError

    def made(self, recorded: dict[str, Any], raw_dir: Path) -> bool:
        """Whether a corpus of this record is what this source would bring."""
        return recorded == self.describe(raw_dir)


# ----------------------------------------------------------------------------------------------------------------------
# WikiText


@dataclass(frozen=True)
class Release:
    """A published archive, with what is known of it and of its unpacked files (bytes and sha256; None where not known)."""

    archive: str
    bytes: int
    sha256: str
    unpacked_bytes: int  # about
    mirrors: tuple[str, ...]  # `{hub}` stands for the hub's address
    files: dict[str, tuple[int | None, str | None]]


# Both releases have the same validation and test text.
_EVALUATION_FILES = {
    "wiki.valid.raw": (1_146_846, "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7"),
    "wiki.test.raw": (1_290_590, "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"),
}
RELEASES = {
    "full": Release(
        archive="wikitext-103-raw-v1.zip",
        bytes=191_984_949,
        sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        unpacked_bytes=550_000_000,
        mirrors=(
            "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
            "{hub}/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",
        ),
        files={"wiki.train.raw": (None, None), **_EVALUATION_FILES},
    ),
    "small": Release(
        archive="wikitext-2-raw-v1.zip",
        bytes=4_721_645,
        sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        unpacked_bytes=13_400_000,
        mirrors=(
            "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
            "{hub}/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
        ),
        files={"wiki.train.raw": (10_940_747, None), **_EVALUATION_FILES},
    ),
}


@dataclass(frozen=True)
class WikiText(Source):
    """One of the two releases, fetched from a mirror or taken from a file; the pinned checksum holds for either."""

    size: str
    mirror: str | None = None
    archive: Path | None = None

    def describe(self, raw_dir: Path) -> dict[str, Any]:
        release = RELEASES[self.size]
        return {"kind": "wikitext", "archive": release.archive, "bytes": release.bytes, "sha256": release.sha256}

    def collect(self, raw_dir: Path) -> list[SourceFile]:
        release = RELEASES[self.size]
        unpack(self._archive(raw_dir), raw_dir)
        for name, (size, sha256) in release.files.items():
            problem = describe_damage(raw_dir / name, size, sha256)
            if problem:
                raise UserError(
                    f"{raw_dir / name}, out of {release.archive}, {problem}; report this, the archive itself is right"
                )
        return [SourceFile.of(name) for name in release.files]

    def _archive(self, raw_dir: Path) -> Path:
        release = RELEASES[self.size]
        if self.archive is not None:
            problem = describe_damage(self.archive, release.bytes, release.sha256)
            if problem:
                raise UserError(f"{self.archive} is not {release.archive}: it {problem}; hand in the published archive")
            return self.archive
        target = raw_dir / release.archive
        missing = 0 if target.exists() else release.bytes
        require_free_space(raw_dir, missing + release.unpacked_bytes, f"{release.archive} with its content")
        hint = (
            "check the connection or the proxy, name another address with --mirror URL, or hand in the file with --archive FILE"
        )
        download(self._addresses(release), target, bytes=release.bytes, sha256=release.sha256, hint=hint)
        return target

    def _addresses(self, release: Release) -> list[str]:
        own = []
        if self.mirror is not None:
            own = [self.mirror if self.mirror.endswith(".zip") else f"{self.mirror.rstrip('/')}/{release.archive}"]
        return own + [mirror.replace("{hub}", hub_endpoint()) for mirror in release.mirrors]


# ----------------------------------------------------------------------------------------------------------------------
# This machine's documentation


@dataclass(frozen=True)
class Local(Source):
    """Docstrings of the standard library, NumPy and PyTorch: no network."""

    def describe(self, raw_dir: Path) -> dict[str, Any]:
        return {"kind": "local", "versions": versions()}

    def made(self, recorded: dict[str, Any], raw_dir: Path) -> bool:
        """A corpus stays what it is when Python or a package is updated; to follow, its folder has to be removed."""
        if recorded.get("kind") != "local":
            return False
        before = recorded.get("versions", {})
        changed = [f"{name} {before.get(name, 'none')} -> {now}" for name, now in versions().items() if before.get(name) != now]
        if changed:
            print(
                f"made from other versions than installed now ({', '.join(changed)}); remove the corpus folder to make it anew"
            )
        return True

    def collect(self, raw_dir: Path) -> list[SourceFile]:
        path = raw_dir / "docstrings.raw"
        print(f"{path.name}: {write_docstrings(path):,} articles written", flush=True)
        return [SourceFile.of(path.name)]


# ----------------------------------------------------------------------------------------------------------------------
# The user's own files


@dataclass(frozen=True)
class Input(Source):
    """Files and folders of the user, read where they lie. `not_in`: folders of ours, which may lie inside theirs."""

    paths: tuple[Path, ...]
    not_in: tuple[Path, ...] = ()

    def describe(self, raw_dir: Path) -> dict[str, Any]:
        return {"kind": "input", "paths": [str(path.absolute()) for path in self.paths]}

    def collect(self, raw_dir: Path) -> list[SourceFile]:
        raw_dir.mkdir(parents=True, exist_ok=True)
        return self.list_files(report=True)

    def list_files(self, report: bool = False) -> list[SourceFile]:
        """Every file once, in the order given and sorted within a folder. Raises UserError where there is none."""
        found: dict[str, SourceFile] = {}
        skipped: list[str] = []
        dead: list[str] = []  # of a known kind by their names, but no files
        for path in self.paths:
            for file in self._files_of(path.absolute()):
                if path.is_dir() and kind_of(file) is None:
                    skipped.append(str(file))
                elif path.is_dir() and not file.is_file():
                    dead.append(str(file))
                else:
                    found.setdefault(os.path.realpath(file), SourceFile.of(file))
        remarks = [describe_skipped(skipped)] if skipped or not dead else []
        if dead:
            remarks.append(f"skipped {len(dead):,} that are no files (links that lead nowhere, pipes): {', '.join(dead[:3])}")
        if not found:
            where = ", ".join(str(path) for path in self.paths)
            raise UserError(f"{where} holds no file that can be read ({'; '.join(remarks)}); kinds: {', '.join(KINDS)}")
        if report and (skipped or dead):
            print("\n".join(remarks), flush=True)
        return list(found.values())

    def _files_of(self, path: Path) -> Iterator[Path]:
        if path.suffix.lower() == ".zip" and path.is_file():
            raise UserError(f"{path} is an archive; unpack it, or use: --archive {path} --corpus NAME")
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from self._files_below(path, set())
        elif path.exists():
            raise UserError(f"{path} is neither a file nor a folder; input is read more than once, so write it to a file first")
        else:
            problem = "is a link that leads nowhere" if path.is_symlink() else "does not exist"
            raise UserError(f"{path} {problem}; check the path given to --input")

    def _files_below(self, folder: Path, above: set[str]) -> Iterator[Path]:
        """Sorted, without hidden entries; links are followed, but not in circles."""
        real = os.path.realpath(folder)
        if real in above or real in {os.path.realpath(other) for other in self.not_in}:
            return
        for path in sorted(folder.iterdir(), key=lambda p: p.name):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                yield from self._files_below(path, above | {real})
            else:
                yield path  # also what is no file (a link that leads nowhere, a pipe), to be named among what is skipped


# ----------------------------------------------------------------------------------------------------------------------
# Addresses and archives


@dataclass(frozen=True)
class Addresses(Source):
    """Files of the known kinds, or zips of them, behind addresses of the user's."""

    urls: tuple[str, ...]
    sha256: tuple[str, ...] = ()  # one for each address, or none

    def describe(self, raw_dir: Path) -> dict[str, Any]:
        hashes = [sha256_file(raw_dir / name) for name in self._names()]
        return {"kind": "url", "urls": [shown_url(url) for url in self.urls], "sha256": hashes}

    def made(self, recorded: dict[str, Any], raw_dir: Path) -> bool:
        """An archive may be removed once it is unpacked, so it is the record that counts."""
        same_content = not self.sha256 or [h.lower() for h in self.sha256] == recorded.get("sha256")
        return recorded.get("urls") == [shown_url(url) for url in self.urls] and same_content

    def collect(self, raw_dir: Path) -> list[SourceFile]:
        files: list[SourceFile] = []
        for url, name, sha256 in zip(self.urls, self._names(), self.sha256 or [None] * len(self.urls), strict=True):
            target = raw_dir / name
            download([url], target, sha256=sha256)
            if sha256 is None:
                print(f"{name}: {target.stat().st_size:,} bytes, sha256 {sha256_file(target)} (not checked: no --sha256 given)")
            files += [SourceFile.of(path.relative_to(raw_dir)) for path in self._unpacked(target)]
        return files

    def _unpacked(self, target: Path) -> list[Path]:
        if target.suffix.lower() != ".zip":
            return [target]
        try:
            return unpack(target, target.with_suffix(""))
        except DamagedArchive:
            target.unlink()  # so that the next try fetches it again
            raise

    def _names(self) -> list[str]:
        """A file name for each address, from its last part. Raises UserError where that is of no known kind."""
        names: list[str] = []
        for url in self.urls:
            require_safe_url(url)
            name = re.sub(r"[^\w.+-]", "_", unquote(urlsplit(url).path).rpartition("/")[2]).lstrip(".")
            if kind_of(name) is None and not name.lower().endswith(".zip"):
                raise UserError(f"{shown_url(url)} does not end in the name of a known kind: .zip, {', '.join(KINDS)}")
            taken = {other.lower() for other in names}
            names.append(f"{len(names) + 1}-{name}" if name.lower() in taken else name)
        return names


@dataclass(frozen=True)
class Archive(Source):
    """A zip of the user's own."""

    path: Path

    def describe(self, raw_dir: Path) -> dict[str, Any]:
        sha256 = sha256_file(self.path) if self.path.is_file() else None
        return {"kind": "archive", "path": str(self.path.absolute()), "sha256": sha256}

    def made(self, recorded: dict[str, Any], raw_dir: Path) -> bool:
        """A corpus outlives the archive it was unpacked from."""
        mine = self.describe(raw_dir)
        return recorded == mine or (mine["sha256"] is None and recorded.get("path") == mine["path"])

    def collect(self, raw_dir: Path) -> list[SourceFile]:
        if not self.path.is_file():
            raise UserError(f"{self.path} does not exist; check the path given to --archive")
        paths = unpack(self.path, raw_dir / self.path.stem)
        return [SourceFile.of(path.relative_to(raw_dir)) for path in paths]


# ----------------------------------------------------------------------------------------------------------------------
# A hub


@dataclass(frozen=True)
class Hub(Source):
    """Parquet (or .jsonl, .jsonl.gz) files of hub data sets, each checked against the hub's own sha256."""

    sets: tuple[HubSet, ...]

    def describe(self, raw_dir: Path) -> dict[str, Any]:
        sets = [{"name": s.name, "repository": s.repository, "revision": s.revision, "folder": s.folder} for s in self.sets]
        return {"kind": "hub", "sets": sets}

    def collect(self, raw_dir: Path) -> list[SourceFile]:
        names = [hub_set.name for hub_set in self.sets]
        if len(set(names)) < len(names):
            raise UserError("two sets of one name; tell them apart with --hub NAME=OWNER/SET NAME=OWNER/SET")
        files = [file for hub_set in self.sets for file in list_hub_files(hub_set)]
        missing = sum(file.bytes for file in files if not (raw_dir / file.path).exists())
        total = sum(file.bytes for file in files)
        print(f"{len(files):,} files, {total / 1e9:,.2f} GB, of which {missing / 1e9:,.2f} GB are not here yet", flush=True)
        require_free_space(raw_dir, missing, "the data set")
        for i, file in enumerate(files):
            print(f"{i + 1} of {len(files)}: {file.path} ({file.bytes / 1e6:,.1f} MB)", flush=True)
            download([file.url], raw_dir / file.path, bytes=file.bytes, sha256=file.sha256, hint=hub_hint())
        return [SourceFile(path=file.path, kind=kind_of(file.path), source=file.source) for file in files]


def of_record(record: dict[str, Any], not_in: tuple[Path, ...] = ()) -> Source:
    """The source that `describe()` recorded. Raises UserError for a record of an unknown kind."""
    sizes = {release.archive: size for size, release in RELEASES.items()}
    match record:
        case {"kind": "wikitext", "archive": archive} if archive in sizes:
            return WikiText(sizes[archive])
        case {"kind": "local"}:
            return Local()
        case {"kind": "input", "paths": paths}:
            return Input(tuple(map(Path, paths)), not_in)
        case {"kind": "url", "urls": urls, "sha256": hashes}:
            return Addresses(tuple(urls), tuple(hashes))
        case {"kind": "archive", "path": path}:
            return Archive(Path(path))
        case {"kind": "hub", "sets": sets}:
            return Hub(tuple(HubSet(**hub_set) for hub_set in sets))
    raise UserError(
        "the manifest does not say where the corpus came from; name its files with --input, --url, --hub or --archive"
    )
