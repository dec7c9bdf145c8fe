"""Downloads against real servers on this machine that misbehave in every way a download has been seen to break."""

import gzip
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import loopback
import pytest
from conftest import ROOT
from loopback import Server

from support import fetch
from support.common import UserError
from support.fetch import download

BODY = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
KNOWN = {"bytes": len(BODY), "sha256": SHA256}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", (2.0, 0.4))


@pytest.fixture
def server() -> Iterator[Server]:
    with loopback.serve() as server:
        server.bodies["/f"] = BODY
        yield server


def part_of(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def test_mirrors_in_order(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A dead first mirror ends the run, or one that refuses a library's default client name is given up on."""

    def wants_a_name(request: loopback.Request) -> None:
        name = request.handler.headers.get("User-Agent", "")
        (loopback.status(403) if name.startswith("python-requests") or not name else loopback.ranged)(request)

    server.script["/named"], server.bodies["/named"] = [wants_a_name], BODY
    dead = "http://127.0.0.1:1/f"
    download([dead, f"{server.url}/gone", f"{server.url}/named", f"{server.url}/f"], tmp_path / "f", **KNOWN)
    assert (tmp_path / "f").read_bytes() == BODY
    assert [path for path, _ in server.requests] == ["/gone", "/named"]
    assert dead in capsys.readouterr().out


def test_every_failed_mirror_is_named(server: Server, tmp_path: Path) -> None:
    """A failure names the last mirror alone, or leaves half a file under the final name."""
    server.script = {"/a": [loopback.status(404)], "/b": [loopback.status(503)], "/c": [loopback.error_page]}
    urls = [f"{server.url}/{name}" for name in "abc"]
    with pytest.raises(UserError) as error:
        download(urls, tmp_path / "f", **KNOWN, hint="do this")
    for fragment in [*urls, "404", "503", "do this"]:
        assert fragment in str(error.value)
    assert len([path for path, _ in server.requests if path == "/b"]) == fetch.TRIES  # bounded, and only where it may help
    assert not (tmp_path / "f").exists()


def test_continues_where_it_broke_off(server: Server, tmp_path: Path) -> None:
    """A truncated body is taken as complete, or fetched from the start each time."""
    server.script["/f"] = [loopback.cut_after(100_000), loopback.cut_after(70_000), loopback.ranged]
    download([f"{server.url}/f"], tmp_path / "f", **KNOWN)
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.ranges == [None, "bytes=100000-", "bytes=170000-"]
    assert not part_of(tmp_path / "f").exists()


@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        (loopback.whole, 1),  # 200 to a range request: the body must replace, not follow, what is there
        (loopback.shifted(-10), 2),  # 206 from another byte
        (loopback.shifted(10), 2),
        (loopback.broken_206, 2),
        (loopback.status(416, {"Content-Range": "bytes */17"}), 2),
        (loopback.status(416), 2),
        (loopback.status(503), 2),
        (loopback.status(429, {"Retry-After": "0"}), 2),
    ],
)
def test_mangled_ranges(server: Server, tmp_path: Path, answer: loopback.Answer, requests: int) -> None:
    """A body that does not belong at the end of the partial file is appended to it, or an error page is."""
    target = tmp_path / "f"
    part_of(target).write_bytes(BODY[:1000])
    server.script["/f"] = [answer, loopback.ranged]
    download([f"{server.url}/f"], target, **KNOWN)
    assert target.read_bytes() == BODY
    assert server.ranges[0] == "bytes=1000-"
    assert len(server.requests) == requests


@pytest.mark.parametrize("known", [KNOWN, {"sha256": SHA256}, {"bytes": len(BODY)}, {}], ids=["both", "hash", "size", "none"])
def test_partial_file_of_a_wrong_content(server: Server, tmp_path: Path, known: dict) -> None:
    """A partial file that is too long, complete, or of another version ends up in the result."""
    for i, start in enumerate([b"x" * 5000, BODY, b"x" * len(BODY), BODY + b"tail", b""]):
        target = tmp_path / f"f{i}"
        part_of(target).write_bytes(start)
        download([f"{server.url}/f"], target, **known)
        assert target.read_bytes() == BODY, start[:10]


def test_a_stalled_connection_is_left(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A server that falls silent hangs the download for ever."""
    server.script["/f"] = [loopback.stall_after(200_000, 3.0), loopback.ranged]
    download([f"{server.url}/f"], tmp_path / "f", **KNOWN)
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.ranges[1] is not None, "what arrived before the silence was thrown away"
    assert "timed out" in capsys.readouterr().out, "it was the server that ended it"


def test_error_pages_with_status_200(server: Server, tmp_path: Path) -> None:
    """A login page is kept as the file, or overwrites a good partial one."""
    target = tmp_path / "f"
    part_of(target).write_bytes(BODY[:200_000])
    server.script["/page"] = [loopback.error_page]
    server.script["/wrong"] = [lambda request: request.send(200, b"?" * len(BODY))]
    with pytest.raises(UserError, match="web page"):
        download([f"{server.url}/page"], target, sha256=SHA256)
    with pytest.raises(UserError, match="bytes instead of"):
        download([f"{server.url}/page"], target, **KNOWN)
    assert part_of(target).read_bytes() == BODY[:200_000]
    with pytest.raises(UserError, match="sha256"):
        download([f"{server.url}/wrong"], target, **KNOWN)
    assert not target.exists()
    download([f"{server.url}/wrong", f"{server.url}/f"], target, **KNOWN)
    assert target.read_bytes() == BODY


def test_a_good_file_is_kept_and_a_bad_one_repaired(server: Server, tmp_path: Path) -> None:
    """A rerun fetches again what is there, or trusts a truncated or changed file because of its name."""
    target = tmp_path / "f"
    target.write_bytes(BODY)
    download([f"{server.url}/f"], target, **KNOWN)
    assert server.requests == []
    target.write_bytes(BODY[:250_000])
    download([f"{server.url}/f"], target, **KNOWN)
    assert target.read_bytes() == BODY
    assert server.ranges == ["bytes=250000-"]
    target.write_bytes(b"y" + BODY[1:])
    download([f"{server.url}/f"], target, **KNOWN)
    assert target.read_bytes() == BODY


def test_two_versions_are_never_mixed(server: Server, tmp_path: Path) -> None:
    """Without a pinned hash, the rest of a newer version is appended to the start of an older one."""
    newer = bytes(reversed(BODY))

    def version(body: bytes, tag: str, cut: int | None = None, heed_condition: bool = True) -> loopback.Answer:
        def answer(request: loopback.Request) -> None:
            offset, total = request.offset, len(body)
            if heed_condition and request.handler.headers.get("If-Range") != tag:
                offset = None
            rest = body[offset or 0 :]
            headers = {"ETag": tag, "Content-Range": f"bytes {offset}-{total - 1}/{total}"} if offset else {"ETag": tag}
            request.send(206 if offset else 200, rest[:cut], headers, length=len(rest))

        return answer

    for i, heed in enumerate([True, False]):
        server.script["/f"] = [version(BODY, '"1"', 90_000), version(newer, '"2"', None, heed), version(newer, '"2"')]
        download([f"{server.url}/f"], tmp_path / f"f{i}")
        assert (tmp_path / f"f{i}").read_bytes() == newer
    shrunk = loopback.status(416, {"Content-Range": "bytes */17"})
    server.script["/f"] = [version(BODY, '"1"', 90_000), shrunk, version(newer, '"2"')]
    download([f"{server.url}/f"], tmp_path / "f2")
    assert (tmp_path / "f2").read_bytes() == newer
    server.script["/f"] = [version(BODY, '"1"', 90_000), version(BODY, '"1"')]
    server.requests.clear()
    download([f"{server.url}/f"], tmp_path / "same")
    assert (tmp_path / "same").read_bytes() == BODY
    assert server.ranges == [None, "bytes=90000-"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f0", "f1", "f2", "same"]


def test_a_redirect_to_what_is_no_address(server: Server, tmp_path: Path) -> None:
    """A traceback (ValueError) where a server names an address that cannot be parsed."""
    for place in ("http://[::1", "//[", "http://a]b/"):
        server.script["/f"] = [loopback.status(302, {"Location": place})]
        with pytest.raises(UserError, match="could not fetch f"):
            download([f"{server.url}/f"], tmp_path / "f")


def test_only_https_off_this_machine(server: Server, tmp_path: Path) -> None:
    """Plain HTTP, another scheme, or a redirect that leaves HTTPS is followed."""
    for url in [
        "http://example.com/f",
        "ftp://example.com/f",
        "file:///etc/passwd",
        "example.com/f",
        "http://127.0.0.1.evil.com/f",
        "https://[::1/f",
        "",
        "https://",
    ]:
        with pytest.raises(UserError, match="refused"):
            download([url], tmp_path / "f")
    with pytest.raises(UserError) as error:
        download(["http://user:secret@example.com/f"], tmp_path / "f")
    assert "secret" not in str(error.value)
    server.script["/away"] = [loopback.status(302, {"Location": "http://example.com/f"})]
    server.script["/round"] = [loopback.status(302, {"Location": "/round"})]
    server.script["/here"] = [loopback.status(302, {"Location": "/f"})]
    with pytest.raises(UserError, match=r"redirects to http://example\.com/f"):
        download([f"{server.url}/away"], tmp_path / "f")
    with pytest.raises(UserError, match="redirects"):
        download([f"{server.url}/round"], tmp_path / "f")
    download([f"{server.url}/here"], tmp_path / "f", **KNOWN)
    assert (tmp_path / "f").read_bytes() == BODY


def test_compressed_transfers(server: Server, tmp_path: Path) -> None:
    """A stored .gz that a server labels as an encoding is unpacked on the way, so that neither size nor hash can be right."""
    label = {"Content-Encoding": "gzip"}

    def compresses_when_allowed(request: loopback.Request) -> None:
        allowed = "gzip" in request.handler.headers.get("Accept-Encoding", "")
        request.send(200, gzip.compress(BODY) if allowed else BODY, label if allowed else {})

    server.script["/f"] = [compresses_when_allowed]
    download([f"{server.url}/f"], tmp_path / "plain.txt", bytes=len(BODY))
    server.script["/f"] = [lambda request: request.send(200, BODY, label)]
    download([f"{server.url}/f"], tmp_path / "lines.jsonl.gz")
    assert (tmp_path / "lines.jsonl.gz").read_bytes() == BODY
    with pytest.raises(UserError, match="encoding"):
        download([f"{server.url}/f"], tmp_path / "text.txt")


def test_lengths_that_are_not_told(server: Server, tmp_path: Path) -> None:
    """A body without Content-Length is refused, or one that outgrows the file is written for ever."""
    server.script["/f"] = [lambda request: request.send(200, BODY, length=-1)]
    download([f"{server.url}/f"], tmp_path / "a")
    download([f"{server.url}/f"], tmp_path / "b", **KNOWN)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == BODY
    server.script["/f"] = [lambda request: request.send(200, BODY[:200_000], length=-1), loopback.ranged]
    server.requests.clear()
    download([f"{server.url}/f"], tmp_path / "d", **KNOWN)
    assert server.ranges == [None, "bytes=200000-"]
    server.script["/f"] = [lambda request: request.send(200, BODY + b"more", length=-1)]
    with pytest.raises(UserError, match="more than"):
        download([f"{server.url}/f"], tmp_path / "c", **KNOWN)


def test_proxies_are_honoured(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy nothing can be fetched, since it is asked for directly."""
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    wanted = "http://127.0.0.1:9/f"
    server.script[wanted], server.bodies[wanted] = [loopback.ranged], BODY
    download([wanted], tmp_path / "f", **KNOWN)
    assert [path for path, _ in server.requests] == [wanted]


def test_any_series_of_faults(server: Server, tmp_path: Path) -> None:
    """Some mixture of faults, over several runs and mirrors, leads to a file that is not what was published."""
    rng = random.Random(7)
    stale = bytes(reversed(BODY))
    faults = [
        *(loopback.cut_after(n) for n in (0, 1, 65_536, 131_072, 299_999)),
        *(loopback.shifted(n) for n in (-1, 1, 1000)),
        *(loopback.status(code) for code in (403, 416, 500, 503)),
        loopback.whole,
        loopback.ranged,
        loopback.ranged,
        loopback.broken_206,
        loopback.error_page,
        lambda request: request.send(200, stale),
        lambda request: request.send(206, stale[request.offset or 0 :], {"Content-Range": f"bytes {request.offset or 0}-1/2"}),
        lambda request: request.send(200, BODY[:100_000]),
        lambda request: request.send(200, BODY + b"x", length=-1),
    ]
    done = 0
    for i in range(150):
        target = tmp_path / f"f{i}"
        known = rng.choice([KNOWN, {"sha256": SHA256}])
        for _ in range(rng.randint(1, 3)):
            server.script = {f"/m{k}": [rng.choice(faults) for _ in range(rng.randint(1, 6))] for k in range(2)}
            server.bodies = {"/m0": BODY, "/m1": BODY}
            try:
                download([f"{server.url}/m0", f"{server.url}/m1"], target, **known)
            except UserError:
                assert not target.exists()
        if target.exists():
            assert target.read_bytes() == BODY
            done += 1
        part_of(target).unlink(missing_ok=True)
    assert done > 50, "the faults were to be survived, mostly"


SCRIPT = """
import sys
from pathlib import Path
from support.common import run_main
from support.fetch import download
def main(argv):
    download([sys.argv[1]], Path("f.zip"), bytes=int(sys.argv[2]), sha256=sys.argv[3])
    return 0
run_main(main)
"""


def start(server: Server, folder: Path, prefix: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", prefix + SCRIPT, f"{server.url}/f", str(len(BODY)), SHA256]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.name == "nt", reason="signals as on POSIX")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_download_goes_on(server: Server, tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """Ctrl-C throws away what has arrived, or ends in a traceback."""
    server.script["/f"] = [loopback.stall_after(200_000, 30.0), loopback.ranged]
    process = start(server, tmp_path)
    part = tmp_path / "f.zip.part"
    deadline = time.monotonic() + 30
    while (not part.exists() or part.stat().st_size < 131_072) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert sent == signal.SIGKILL or "the same command continues there" in stderr
    assert not (tmp_path / "f.zip").exists()
    again = start(server, tmp_path)
    again.communicate(timeout=30)
    assert again.returncode == 0
    assert (tmp_path / "f.zip").read_bytes() == BODY
    assert int(server.ranges[1].removeprefix("bytes=").rstrip("-")) >= 131_072


@pytest.mark.skipif(os.name == "nt", reason="resource limits as on POSIX")
def test_a_full_disk_is_no_network_fault(server: Server, tmp_path: Path) -> None:
    """A write that fails is taken for a broken connection and tried again, or ends in a traceback."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\n"
    process = start(server, tmp_path, limit)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert stderr.startswith("error: ") and "Traceback" not in stderr
    assert not (tmp_path / "f.zip").exists()
    assert len(server.requests) == 1
