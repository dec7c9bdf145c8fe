"""Data sets of a hub: which files they have, where, and what their bytes must be.

The tree API lists a folder in pages (the Link header names the next one); of large files it tells size and sha256.
"""

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from corpus import kind_of
from support.common import UserError
from support.fetch import read_json_pages, require_safe_url

HUB_VARIABLE = "HF_ENDPOINT"  # the name that the hub's own tools use for another address of it
HUB = "https://huggingface.co"


def hub_endpoint() -> str:
    return os.environ.get(HUB_VARIABLE, "").rstrip("/") or HUB


def hub_hint() -> str:
    return f"check the connection or the proxy, or set {HUB_VARIABLE} to another address of the hub; finished files are kept"


@dataclass(frozen=True)
class HubSet:
    """The data files below one folder of a hub data set."""

    name: str  # what the manifest calls the source
    repository: str
    folder: str = ""
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> "HubSet":
        """From `[NAME=]OWNER/SET[@REVISION][:FOLDER]`. Raises UserError."""
        pattern = r"(?:(?P<name>\w[\w.-]*)=)?(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^:]+))?(?::(?P<folder>.+))?"
        match = re.fullmatch(pattern, text)
        if match is None:
            raise UserError(
                f"--hub {text}: expected [NAME=]OWNER/SET[@REVISION][:FOLDER], as in wiki=wikimedia/wikipedia:20231101.en"
            )
        name = match["name"] or match["repository"].rpartition("/")[2]
        return cls(name, match["repository"], (match["folder"] or "").strip("/"), match["revision"] or "main")


# The mix of the published 163,823,616-parameter run: a sample of FineWeb, English Wikipedia, the Pile's arXiv part.
# --hub takes other sets, or the same ones from elsewhere.
SYDSGPT = (
    HubSet("fineweb", "HuggingFaceFW/fineweb", "sample/10BT"),
    HubSet("wikipedia", "wikimedia/wikipedia", "20231101.en"),
    HubSet("arxiv", "timaeus/pile-arxiv"),
)


@dataclass(frozen=True)
class HubFile:
    """A file of a hub data set, with what the hub says of it."""

    url: str
    path: str  # relative to raw/
    source: str
    bytes: int
    sha256: str | None  # known of large files (LFS), which data files are


def list_hub_files(hub_set: HubSet) -> list[HubFile]:
    """The data files of a set, sorted by path, from the hub's tree API.

    Raises UserError where the hub cannot be read or has no such files.
    """
    root = f"{hub_endpoint()}/api/datasets/{hub_set.repository}/tree/{quote(hub_set.revision, safe='')}"
    url = f"{root}/{quote(hub_set.folder)}?recursive=true" if hub_set.folder else f"{root}?recursive=true"
    require_safe_url(url)
    found = {}
    for page in read_json_pages(url, hub_hint()):
        try:
            files = [_hub_file(hub_set, entry) for entry in page if entry["type"] == "file"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{url} answers with something that is no list of files; {hub_hint()}") from None
        found.update({file.path: file for file in files if kind_of(file.path) in ("parquet", "jsonl")})
    if not found:
        where = hub_set.folder or "its root"
        raise UserError(f"{hub_set.repository} has no .parquet or .jsonl files below {where}; check the name and the folder")
    return [found[path] for path in sorted(found)]


def _hub_file(hub_set: HubSet, entry: dict[str, Any]) -> HubFile:
    path = PurePosixPath(entry["path"])
    inner = path.relative_to(hub_set.folder) if hub_set.folder else path
    if path.is_absolute() or ".." in path.parts or "\\" in entry["path"]:
        raise UserError(f"{hub_set.repository} is refused: its file {entry['path']!r} would land outside of the corpus folder")
    revision = quote(hub_set.revision, safe="")
    url = f"{hub_endpoint()}/datasets/{hub_set.repository}/resolve/{revision}/{quote(entry['path'])}"
    large = entry.get("lfs") or {}
    sha256 = large["oid"].removeprefix("sha256:") if large else None
    place = PurePosixPath(hub_set.name, inner).as_posix()
    return HubFile(url, place, hub_set.name, int(large.get("size", entry["size"])), sha256)
