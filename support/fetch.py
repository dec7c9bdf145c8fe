"""Downloads that can be trusted: mirrors in order, continued after any fault, checked before a file gets its name.

A file grows as NAME.part and is renamed when its length and sha256 are right, so NAME is whole or absent. What a server
says about ranges is believed only as far as it can be checked; with a pinned sha256 the content decides in any case.
Proxies are taken from the environment, as `requests` does.
"""

import ipaddress
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit, urlunsplit

import requests
from urllib3.exceptions import HTTPError  # what a body can raise while it is read raw; urllib3 is what requests runs on

from support.common import Progress, Terminated, UserError, fsync_dir, require_free_space, sha256_file

USER_AGENT = "gpt-pretrain/0.1 (corpus download)"  # some mirrors answer 403 to a library's default
TIMEOUT_SECONDS = (10.0, 30.0)  # to connect; between two arrivals of data
TRIES = 4  # in a row without progress, for each mirror
RETRY_SECONDS = 1.0  # doubled after each of them
LONGEST_WAIT_SECONDS = 60.0  # a server's Retry-After is honoured up to this
PROGRESS_BYTES = 1 << 16  # a broken try that brought this much does not count against TRIES
CHUNK_BYTES = 1 << 17
PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504)

T = TypeVar("T")


@dataclass(frozen=True)
class _Expected:
    """What the finished file must be; None where it is not known beforehand."""

    bytes: int | None
    sha256: str | None


class _Fault(Exception):
    """One try that failed. `final`: this server will not do better; `restart`: what lies in .part is of no use with it."""

    def __init__(self, reason: str, *, final: bool = False, restart: bool = False, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.final, self.restart, self.wait = final, restart, wait


def download(
    urls: Sequence[str],
    target: Path,
    *,
    bytes: int | None = None,
    sha256: str | None = None,
    hint: str = "check the connection or the proxy settings and run the same command again",
) -> None:
    """Fetches `target` from the first of `urls` that yields the right content; returns at once where it is there already.

    An interrupted download is continued by the next call. Raises UserError naming every mirror and its fault, with `hint`
    (what to do), when all fail.
    """
    expected = _Expected(bytes, sha256)
    part = target.with_name(target.name + ".part")
    for url in urls:
        require_safe_url(url)
    if target.exists():
        problem = describe_damage(target, bytes, sha256)
        if problem is None:
            return
        print(f"{target} {problem}; fetching it again", flush=True)
        os.replace(target, part)  # cut short, it is continued; wrong, its hash shows it
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fetch_from_any(urls, part, expected, target.name, hint)
    except (KeyboardInterrupt, Terminated):
        if part.exists():
            print(f"\n{part} keeps its {part.stat().st_size:,} bytes; the same command continues there", file=sys.stderr)
        raise
    os.replace(part, target)
    _validator_path(part).unlink(missing_ok=True)
    fsync_dir(target.parent)


def describe_damage(path: Path, bytes: int | None, sha256: str | None) -> str | None:
    """What is wrong with a file of known length and hash, None where nothing is."""
    if not path.exists():
        return "is missing"
    size = path.stat().st_size
    if bytes is not None and size != bytes:
        return f"has {size:,} bytes instead of {bytes:,}"
    if sha256 is not None and (found := sha256_file(path)) != sha256.lower():
        return f"has sha256 {found} instead of {sha256.lower()}"
    return None


def read_json_pages(url: str, hint: str) -> Iterator[Any]:
    """The JSON values of an address and of those that its Link headers call next, page by page. Raises UserError."""
    seen = set()
    with _Session() as session:
        while url and url not in seen:
            seen.add(url)
            try:
                value, url = _retry(url, lambda _, page=url: _read_json(session, page))
            except _Fault as fault:
                raise UserError(f"could not read {shown_url(url)}: {fault}; {hint}") from None
            yield value


def require_safe_url(url: str) -> None:
    """Raises UserError for anything but HTTPS; plain HTTP is for servers on this machine only."""
    problem = _describe_unsafe(url)
    if problem:
        raise UserError(f"{shown_url(url)} is refused: {problem}")


def shown_url(url: str) -> str:
    """The address without user name and password, for messages and manifests."""
    try:
        parts = urlsplit(url)
    except ValueError:  # no address at all
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _describe_unsafe(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError as error:
        return str(error)
    if not host or parts.scheme not in ("http", "https"):
        return "it is no https:// address"
    if parts.scheme == "http" and not _is_loopback(host):
        return "only https:// is used, except on this machine (loopback)"
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Session(requests.Session):
    """Says who it is, takes bodies as stored, and checks every hop of a redirect."""

    def __init__(self) -> None:
        super().__init__()
        self.headers.update({"User-Agent": USER_AGENT, "Accept-Encoding": "identity"})
        self.max_redirects = 10

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        problem = _describe_unsafe(request.url)
        if problem:
            raise _Fault(f"redirects to {shown_url(request.url)}: {problem}", final=True)
        return super().send(request, **options)


# ----------------------------------------------------------------------------------------------------------------------
# Mirrors and tries


def _fetch_from_any(urls: Sequence[str], part: Path, expected: _Expected, name: str, hint: str) -> None:
    faults = []
    with _Session() as session:
        for url in urls:
            try:
                _retry(url, lambda restart, url=url: _try_once(session, url, part, expected, restart), lambda: _size(part))
                return
            except _Fault as fault:
                faults.append(f"{shown_url(url)}: {fault}")
                if len(urls) > 1:
                    print(f"mirror failed: {faults[-1]}", flush=True)
    raise UserError(f"could not fetch {name} ({'; '.join(faults)}); {hint}")


def _retry(url: str, attempt: Callable[[bool], T], measure: Callable[[], int] = lambda: 0) -> T:
    """Calls `attempt(restart)` until it succeeds. Gives up, with its last fault, on a final one or after TRIES in a row
    that did not take `measure()` beyond its highest value by PROGRESS_BYTES (so a server that always breaks off at the
    same place, or always starts over, ends it too).
    """
    tries, restart, highest = 0, False, measure()
    while True:
        try:
            return attempt(restart)
        except _Fault as fault:
            progressed = measure() >= highest + PROGRESS_BYTES
            highest = max(highest, measure())
            tries = 0 if progressed else tries + 1
            if fault.final or tries >= TRIES:
                raise
            restart = fault.restart
            wait = min(max(fault.wait, RETRY_SECONDS * 2 ** max(0, tries - 1)), LONGEST_WAIT_SECONDS)
            print(f"{urlsplit(url).hostname}: {fault}; trying again in {wait:.0f} s", flush=True)
            time.sleep(wait)


def _try_once(session: _Session, url: str, part: Path, expected: _Expected, restart: bool) -> None:
    """One request, and the check of what it made of `part`. Raises _Fault."""
    offset = 0 if restart else _offset_to_continue(part, url, expected)
    if offset == 0 or offset != expected.bytes:
        _request_rest(session, url, part, expected, offset)
    problem = describe_damage(part, expected.bytes, expected.sha256)
    if problem:
        part.unlink(missing_ok=True)
        # Bytes kept from an earlier try may be the wrong ones; a body that is wrong from its first byte stays wrong.
        raise _Fault(f"the content {problem}", final=offset == 0, restart=True)


def _offset_to_continue(part: Path, url: str, expected: _Expected) -> int:
    """Bytes of `part` worth keeping: any with a pinned hash, else only those known to be of the same version."""
    size = _size(part)
    if expected.bytes is not None and size > expected.bytes:
        return 0
    return size if expected.sha256 is not None or _read_validator(part, url) else 0


def _request_rest(session: _Session, url: str, part: Path, expected: _Expected, offset: int) -> None:
    """Appends to `part`, from `offset` on, what the server sends, or writes it anew where it sends the whole."""
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    if offset and expected.sha256 is None:
        headers["If-Range"] = _read_validator(part, url)
    with _get(session, url, headers) as response:
        if response.status_code == 416 and _total_of(response) == offset:
            return  # nothing is left to fetch
        start, total = _place_of_body(response, offset)
        if start and expected.sha256 is None and _validator_of(response) != headers["If-Range"]:
            raise _Fault("the file changed on the server since the download began", restart=True)
        _refuse_wrong_body(response, part, total, expected)
        require_free_space(part.parent, (total or expected.bytes or 0) - start, part.name)
        if expected.sha256 is None:
            text = f"{shown_url(url)}\n{_validator_of(response)}"
            _validator_path(part).write_text(text, encoding="utf-8")
        _copy_body(response, part, start, total if total is not None else expected.bytes)


def _place_of_body(response: requests.Response, offset: int) -> tuple[int, int | None]:
    """Where the body belongs in the file, and the file's length if the server tells. Raises _Fault when that is not at
    0 or `offset`.
    """
    if response.status_code == 200:  # ranges are not supported, or the file changed: the body is the whole file
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    if response.status_code == 416:
        raise _Fault(f"the server has nothing behind byte {offset:,}", restart=True)
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", "").strip())
    if offset == 0 or match is None or int(match[1]) != offset:
        said = response.headers.get("Content-Range", "no range")
        raise _Fault(f"the server answered {said} to a request from byte {offset:,}", final=offset == 0, restart=True)
    return offset, None if match[3] == "*" else int(match[3])


def _refuse_wrong_body(response: requests.Response, part: Path, total: int | None, expected: _Expected) -> None:
    """Recognises an answer that cannot be the file before it overwrites anything. Raises _Fault."""
    if total is not None and expected.bytes is not None and total != expected.bytes:
        raise _Fault(f"offers {total:,} bytes instead of {expected.bytes:,}", final=True)
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    # Some servers label stored .gz files so; their bytes, read raw, are the file. Elsewhere it would be something else.
    if encoding not in ("identity", "") and not part.name.endswith(".gz.part"):
        raise _Fault(f"sends the file in another encoding ({encoding}) than asked for", final=True)
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "text/html" and (total is None or total != expected.bytes):  # a login or error page with status 200
        raise _Fault("sent a web page instead of a file", final=True)


def _copy_body(response: requests.Response, part: Path, start: int, total: int | None) -> None:
    """Writes the body at `start`. What arrived before a fault stays. Raises _Fault on a broken, short or long body."""
    with open(part, "r+b" if start else "wb") as file:
        file.seek(start)
        file.truncate()
        try:
            with Progress(total, part.name.removesuffix(".part"), "B", scale=True, initial=start) as progress:
                for chunk in _chunks(response):
                    file.write(chunk)
                    progress.update(len(chunk))
                    if total is not None and file.tell() > total:
                        raise _Fault(f"sent more than the {total:,} bytes of the file", restart=True)
        finally:
            file.flush()
            os.fsync(file.fileno())
        if total is not None and file.tell() < total:
            raise _Fault(f"broke off after {file.tell():,} of {total:,} bytes")


def _chunks(response: requests.Response) -> Iterator[bytes]:
    try:
        yield from response.raw.stream(CHUNK_BYTES, decode_content=False)
    except HTTPError as error:
        raise _Fault(f"broke off ({_innermost(error)})") from None


def _read_json(session: _Session, url: str) -> tuple[Any, str | None]:
    """The value and the address of the next page. Raises _Fault."""
    with _get(session, url, {}) as response:
        try:
            value = json.loads(b"".join(_chunks(response)))
        except ValueError:
            raise _Fault("sent something that is no JSON", final=True) from None
        link = response.links.get("next", {}).get("url")
        return value, urljoin(response.url, link) if link else None


def _get(session: _Session, url: str, headers: dict[str, str]) -> requests.Response:
    """A response with status 200, or 206 / 416 to a range request. Raises _Fault for any other outcome."""
    try:
        response = session.get(url, headers=headers, stream=True, timeout=TIMEOUT_SECONDS)
    except (requests.ConnectionError, requests.Timeout) as error:
        raise _Fault(_innermost(error), final=isinstance(error, requests.exceptions.SSLError)) from None
    except (requests.RequestException, HTTPError, ValueError) as error:  # too many redirects, to what is no address
        raise _Fault(_innermost(error), final=True) from None
    status = response.status_code
    if status in (200, 206) or (status == 416 and "Range" in headers):
        return response
    response.close()
    after = response.headers.get("Retry-After", "")
    wait = float(after) if after.isdecimal() else 0.0
    raise _Fault(f"HTTP {status} {response.reason or ''}".strip(), final=status not in PASSING_STATUSES, wait=wait)


def _innermost(error: BaseException) -> str:
    """The part of a wrapped network error that a person can use: `Connection refused`, `timed out`."""
    while True:
        inner = getattr(error, "reason", None) or next((a for a in error.args if isinstance(a, BaseException)), None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return str(error).rpartition(": ")[2].strip() or type(error).__name__


def _total_of(response: requests.Response) -> int | None:
    match = re.search(r"/(\d+)\s*$", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ----------------------------------------------------------------------------------------------------------------------
# Without a pinned hash, a partial file may only be continued with the same version of the file at the same address


def _validator_path(part: Path) -> Path:
    return part.with_name(part.name + ".version")


def _validator_of(response: requests.Response) -> str:
    """What names this version of the file: a strong ETag, else a modification time; empty where there is none."""
    etag = response.headers.get("ETag", "")
    return response.headers.get("Last-Modified", "") if not etag or etag.startswith("W/") else etag


def _read_validator(part: Path, url: str) -> str:
    """The version `url` had when `part` began; empty where it is not known."""
    path = _validator_path(part)
    if not path.exists():
        return ""
    stored_url, _, validator = path.read_text(encoding="utf-8").partition("\n")
    return validator if stored_url == shown_url(url) else ""
