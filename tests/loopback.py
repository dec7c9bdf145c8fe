"""A real HTTP server on this machine that answers as told, fault by fault, and remembers what it was asked."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Request"], None]


@dataclass
class Request:
    """One request, and the ways to answer it."""

    handler: BaseHTTPRequestHandler
    body: bytes  # what the server holds under this path

    @property
    def offset(self) -> int | None:
        """First byte asked for, None without a range."""
        value = self.handler.headers.get("Range")
        return int(value.removeprefix("bytes=").rstrip("-")) if value else None

    def send(self, status: int, body: bytes, headers: dict[str, Any] | None = None, length: int | None = None) -> None:
        """`length`: what Content-Length says where that is not the truth; -1: none, the end of the connection is the end."""
        self.handler.send_response(status)
        for name, value in (headers or {}).items():
            self.handler.send_header(name, str(value))
        if length != -1:
            self.handler.send_header("Content-Length", str(len(body) if length is None else length))
        self.handler.send_header("Connection", "close")  # else the next request may go into a connection that is just closing
        self.handler.end_headers()
        self.handler.wfile.write(body)
        self.handler.close_connection = True


def whole(request: Request) -> None:
    """200 with everything, whatever range was asked for."""
    request.send(200, request.body)


def ranged(request: Request) -> None:
    """A good server: 206 from the byte asked for, 416 behind the end."""
    total, offset = len(request.body), request.offset
    if offset is None:
        request.send(200, request.body)
    elif offset >= total:
        request.send(416, b"<html>nothing there</html>", {"Content-Range": f"bytes */{total}", "Content-Type": "text/html"})
    else:
        request.send(206, request.body[offset:], {"Content-Range": f"bytes {offset}-{total - 1}/{total}"})


def cut_after(n: int) -> Answer:
    """A good answer whose connection closes after `n` bytes of the body."""

    def answer(request: Request) -> None:
        total, offset = len(request.body), request.offset or 0
        rest = request.body[offset:]
        headers = {"Content-Range": f"bytes {offset}-{total - 1}/{total}"} if request.offset else {}
        request.send(206 if request.offset else 200, rest[:n], headers, length=len(rest))

    return answer


def stall_after(n: int, seconds: float) -> Answer:
    """Like cut_after, but the connection stays open and silent for a while first."""

    def answer(request: Request) -> None:
        cut_after(n)(request)
        request.handler.wfile.flush()
        time.sleep(seconds)

    return answer


def shifted(by: int) -> Answer:
    """206 that honestly says it starts at another byte than asked for."""

    def answer(request: Request) -> None:
        total = len(request.body)
        offset = max(0, (request.offset or 0) + by)
        request.send(206, request.body[offset:], {"Content-Range": f"bytes {offset}-{total - 1}/{total}"})

    return answer


def status(code: int, headers: dict[str, Any] | None = None) -> Answer:
    def answer(request: Request) -> None:
        request.send(code, b"<html>no</html>", {"Content-Type": "text/html", **(headers or {})})

    return answer


def error_page(request: Request) -> None:
    """A login page with status 200, as captive networks send it."""
    request.send(200, b"<html>please log in</html>", {"Content-Type": "text/html"})


def broken_206(request: Request) -> None:
    """206 without a Content-Range."""
    request.send(206, request.body[request.offset or 0 :])


@dataclass
class Server:
    """`bodies` by path; `script` holds answers by path, used up in order, the last one for good (default: ranged)."""

    bodies: dict[str, bytes] = field(default_factory=dict)
    script: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.requests.append((path, dict(handler.headers)))
        answers = self.script.get(path, [])
        if path not in self.bodies and not answers:
            status(404)(Request(handler, b""))
            return
        answer = (answers.pop(0) if len(answers) > 1 else answers[0]) if answers else ranged
        answer(Request(handler, self.bodies.get(path, b"")))

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("Range") for _, headers in self.requests]


@contextmanager
def serve() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                state.answer(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client hung up, as it may

        def log_message(self, *_: Any) -> None: ...

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

    server = Quiet(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
