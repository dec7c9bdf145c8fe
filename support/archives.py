"""Zip archives of text: unpacked safely, or refused."""

import contextlib
import re
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from corpus import KINDS, kind_of
from support.common import Progress, UserError, atomic_write, require_free_space

try:
    import lzma
except ImportError:  # a Python that was built without it refuses such archives
    lzma = None


# What zipfile raises on wrong bytes, with bzip2 also an OSError without a number.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, *([lzma.LZMAError] if lzma else []))


class DamagedArchive(UserError):
    """An archive whose bytes are wrong."""


def unpack(archive: Path, folder: Path) -> list[Path]:
    """Unpacks the files of known kinds, sorted by name, without the folder that holds them all.

    Raises UserError for a damaged or encrypted archive, for one with a member that would land outside of `folder` (nothing
    is written then), and for one without any file to read.
    """
    with archive_errors(archive), zipfile.ZipFile(archive) as file:
        members = _members(file, archive)
        require_free_space(folder, sum(info.file_size for info, _ in members), f"unpacking {archive.name}")
        return _extract(file, members, folder)


@contextlib.contextmanager
def archive_errors(archive: Path) -> Iterator[None]:
    """Makes damage in a zip archive, found by whichever of its decompressors, a DamagedArchive."""
    try:
        yield
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the archive's
            raise
        raise DamagedArchive(f"{archive} is no readable zip archive ({error}); fetch it again or unpack it by hand") from None


def _members(file: zipfile.ZipFile, archive: Path) -> list[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """(member, its path below the target folder) of every file to unpack."""
    placed = [(info, _safe_path(info, archive)) for info in file.infolist() if not info.is_dir()]
    placed = [(info, path) for info, path in placed if not any(p.startswith((".", "__MACOSX")) for p in path.parts)]
    skipped = [str(path) for _, path in placed if kind_of(path) is None]
    placed = sorted(((info, path) for info, path in placed if kind_of(path)), key=lambda pair: pair[1].as_posix())
    if not placed:
        raise UserError(f"{archive} holds no file that can be read ({describe_skipped(skipped)}); kinds: {', '.join(KINDS)}")
    if skipped:
        print(f"{archive.name}: {describe_skipped(skipped)}", flush=True)
    if any(info.flag_bits & 1 for info, _ in placed):
        raise UserError(f"{archive} is encrypted; unpack it by hand and give the files with --input")
    while len({path.parts[0] for _, path in placed}) == 1 and all(len(path.parts) > 1 for _, path in placed):
        placed = [(info, PurePosixPath(*path.parts[1:])) for info, path in placed]
    names = Counter(path.as_posix().lower() for _, path in placed)
    twice = next((path for _, path in placed if names[path.as_posix().lower()] > 1), None)
    if twice is not None:
        raise UserError(f"{archive} holds {twice} twice (capitals aside); unpack it by hand and give the files with --input")
    return placed


def _safe_path(info: zipfile.ZipInfo, archive: Path) -> PurePosixPath:
    """A member's path; raises UserError where it is absolute, climbs out of its folder or is a link."""
    name = info.filename.replace("\\", "/")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    is_link = stat.S_ISLNK(info.external_attr >> 16)
    if name.startswith("/") or ".." in parts or not parts or re.match("[A-Za-z]:", name) or is_link:
        raise UserError(f"{archive} is refused: its member {info.filename!r} would land outside of the corpus folder")
    return PurePosixPath(*parts)


def _extract(file: zipfile.ZipFile, members: list[tuple[zipfile.ZipInfo, PurePosixPath]], folder: Path) -> list[Path]:
    """Each member's bytes are checked against the archive's CRC-32 before the file gets its name."""
    paths = []
    total = sum(info.file_size for info, _ in members)
    with Progress(total, "unpacking", "B", scale=True) as progress:
        for info, relative in members:
            path = folder / relative
            with file.open(info) as member, atomic_write(path) as target:
                while chunk := member.read(1 << 20):
                    target.write(chunk)
                    progress.update(len(chunk), relative.name)
            paths.append(path)
    return paths


def describe_skipped(names: Sequence[str]) -> str:
    """`skipped 3 files of other kinds: .png 2 (a.png, b.png), .pdf 1 (c.pdf)`."""
    if not names:
        return "skipped nothing"
    kinds = Counter(Path(name).suffix.lower() or "no ending" for name in names)
    parts = []
    for kind, n in kinds.most_common(5):
        examples = [Path(name).name for name in names if (Path(name).suffix.lower() or "no ending") == kind]
        parts.append(f"{kind} {n:,} ({', '.join(examples[:3])}{', ...' if n > 3 else ''})")
    more = f", and {len(kinds) - 5} more kinds" if len(kinds) > 5 else ""
    return f"skipped {len(names):,} {'file' if len(names) == 1 else 'files'} of other kinds: {', '.join(parts)}{more}"
