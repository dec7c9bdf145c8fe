"""What every stage shares: errors a user can act on, exit codes, atomic files, hashes, progress, locks.

Standard library only (tqdm where there is a terminal), so that importing it costs nothing.
"""

import contextlib
import errno
import hashlib
import json
import os
import reprlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as of any program that a closed pipe ends
HEARTBEAT_SECONDS = 20.0


class UserError(Exception):
    """Something the user can put right. The message is one line: what is wrong, where, and what to do."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised in the main thread so that `finally` and `with` clean up, as KeyboardInterrupt for SIGINT."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


# ----------------------------------------------------------------------------------------------------------------------
# Running a command


def run_main(main: Callable[[Sequence[str] | None], int]) -> NoReturn:
    """Runs a stage's `main` as a command and turns the ways it can end into exit codes.

    0 done, 1 a check failed, 2 a user's mistake, a full disk or too little memory (one line `error: ...`), 130 / 143 / 129
    interrupted, 141 cut short because nobody reads the output any more. Anything else is our bug and keeps its traceback.
    """
    _open_closed_streams()
    _make_console_safe()
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        code = _end_output(main(None))
    except UserError as error:
        code = _fail(str(error))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        _say("\ninterrupted")
    except Terminated as signalled:
        code = 128 + signalled.signum
        _say("\nterminated")
    except BrokenPipeError:  # `| head`: what was under way is not done, so this is no success
        _discard(sys.stdout, sys.stderr)
        code = EXIT_BROKEN_PIPE
    except OSError as error:
        message = explain_os_error(error)
        if message is None:
            raise
        code = _fail(message)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        code = _fail("out of memory; ask for less at a time (workers, batch size, samples), or close other programs")
    _leave(code)


def _end_output(code: int) -> int:
    """`code`, once everything printed has arrived. Where nobody reads the last of it, all work is done all the same."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    return code


def _discard(*streams: IO[str]) -> None:
    """What is still printed there goes nowhere; else the interpreter would flush into it again at its end, and fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(null, stream.fileno())
    os.close(null)


def _is_out_of_memory(error: BaseException) -> bool:
    """Torch raises a RuntimeError."""
    known = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in known)


def _leave(code: int) -> NoReturn:
    """Ends the process. One of several that train together skips the interpreter's own end.

    A thread of gloo's that has not yet let go of the last sum's tensor asks for the interpreter to do so, and aborts the
    process where that is being torn down already. DDP holds its process group in a cycle, so no call ends these threads.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _fail(message: str) -> int:
    _say("error: " + " ".join(message.split()))
    return EXIT_USER_ERROR


def _say(line: str) -> None:
    """A last line to standard error. Where it cannot go there (nobody reads it, a full disk), the exit code alone tells."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def explain_os_error(error: OSError) -> str | None:
    """One line for an operating-system error that a user can mend, None for any other."""
    where = error.filename or "this folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk of {where}; free some, or move the output with --data-dir or --checkpoint-dir"
    if error.errno == errno.EFBIG:
        return f"{where} would pass the largest file size allowed here; raise the limit (ulimit -f) or write elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to use {where}; change its permissions, or choose another folder"
    if error.errno == errno.EEXIST:
        return f"{where} is in the way: a folder of that name is needed; remove it, or choose another folder"
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT):
        return f"{where}: {os.strerror(error.errno).lower()}; check the path"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where} is one open file more than allowed here; raise the limit (ulimit -n) or use fewer --workers"
    if error.errno is not None and error.filename is not None:  # a circle of links, a failing disk, a share that went away
        return f"{where}: {os.strerror(error.errno).lower()}; check the path and what it lies on"
    return None


def _raise_terminated(signum: int, frame: FrameType | None) -> None:
    raise Terminated(signum)


def _open_closed_streams() -> None:
    """Standard streams that are closed (`>&-`, some daemons) become the null device.

    Python has None in their place, and the next file to be opened would get the number: what a library or a worker process
    prints would land in it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _make_console_safe() -> None:
    """Any text can be printed and read on any console: what it cannot show is escaped, what it cannot read replaced."""
    for name, errors in (("stdin", "replace"), ("stdout", "backslashreplace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


# ----------------------------------------------------------------------------------------------------------------------
# Files


def fsync_dir(folder: Path) -> None:
    """Makes a rename in `folder` durable. Windows cannot open folders; there the rename alone has to do."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_of(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Opens `path`.tmp for writing; on success it is flushed, fsynced and renamed over `path`, on any failure removed.

    So whatever is killed when, `path` holds the old content or the new, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Characters that UTF-8 does not know (bytes of a path that are no text) are escaped."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "backslashreplace"))


def read_json(path: Path, command: str) -> dict[str, Any]:
    """The JSON object in `path`. Raises UserError where it is missing or damaged; `command` is what makes it."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; run: {command}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); make it again with: {command}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged (it holds no JSON object); make it again with: {command}")
    return value


def misfit(value: Any, expected: Any, name: str = "") -> str | None:
    """What in a value read from a file is not of the `expected` make, in a few words; None where all of it is.

    A type stands for its values (int: a count, 0 to 2**63 - 1; float: any number), a tuple for a choice of values, [X] for a
    list of X, {str: X} for a table whose values are X, any other dict for a table with these keys and perhaps more.
    """
    if isinstance(expected, tuple):
        return None if any(value == choice and type(value) is type(choice) for choice in expected) else _wrong(name, value)
    if expected is int:
        return None if type(value) is int and 0 <= value < 2**63 else _wrong(name, value)
    if expected is float:
        return None if type(value) is float or (type(value) is int and abs(value) < 2**63) else _wrong(name, value)
    if isinstance(expected, type):
        return None if isinstance(value, expected) else _wrong(name, value)
    if not isinstance(value, type(expected)):
        return _wrong(name, value)
    if isinstance(expected, list):
        parts = ((f"{name}[{n}]", item, expected[0]) for n, item in enumerate(value))
    elif str in expected:
        parts = ((f"{name}.{key}", item, expected[str]) for key, item in value.items())
    else:
        missing = next((key for key in expected if key not in value), None)
        if missing is not None:
            return f"{f'{name}.{missing}'.strip('.')} is missing"
        parts = ((f"{name}.{key}", value[key], make) for key, make in expected.items())
    return next((found for part in parts if (found := misfit(part[1], part[2], part[0])) is not None), None)


def _wrong(name: str, value: Any) -> str:
    text = type(value).__name__ if isinstance(value, dict | list) else reprlib.repr(value)
    return f"{name.strip('.') or 'the whole'} is {text}"


def require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises UserError when the disk of `folder` (or of its nearest existing parent) has less than `needed_bytes` free."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        needed = f"{needed_bytes / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB are free"
        raise UserError(f"no space left on the disk of {folder}: {what} needs about {needed}; free some or write elsewhere")


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """sha256 of a JSON-able value in canonical form: the identity of a set of inputs and settings."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Worker processes


def start_worker() -> None:
    """The first thing a worker process does: it leaves Ctrl-C to its parent and ends with it, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    from multiprocessing import connection, parent_process  # workers have it loaded; --help need not

    connection.wait([parent_process().sentinel])
    os._exit(1)


# ----------------------------------------------------------------------------------------------------------------------
# Progress


class Progress:
    """A bar with rate and ETA on a terminal; elsewhere a heartbeat line at least every 30 seconds of work.

    Used as a context manager. `total` may be None where it is not known. `scale=True` prints 12.3M for 12,300,000.
    """

    def __init__(self, total: int | None, what: str, unit: str = "it", *, scale: bool = False, initial: int = 0) -> None:
        self.total, self.what, self.unit, self.done, self.initial = total, what, unit, initial, initial
        self.note = ""
        self._t0 = self._last = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit=unit, unit_scale=scale, initial=initial, dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, n: int = 1, note: str = "") -> None:
        """Counts `n` more units; `note` is shown behind the numbers."""
        self.done += n
        self.note = note or self.note
        if self._bar is not None:
            self._bar.set_postfix_str(self.note, refresh=False)
            self._bar.update(n)
        elif time.monotonic() - self._last >= HEARTBEAT_SECONDS:
            self._last = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def print(self, line: str) -> None:
        """Prints a line to standard output without breaking the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def line(self) -> str:
        elapsed = time.monotonic() - self._t0
        rate = (self.done - self.initial) / elapsed if elapsed > 0 else 0.0
        parts = [f"{self.what}: {self.done:,} {self.unit}"]
        if self.total:
            parts[0] += f" of {self.total:,} ({100 * self.done / self.total:.0f} %)"
        parts.append(f"{rate:,.1f} {self.unit}/s")
        if self.total and rate > 0:
            parts.append(f"ETA {format_duration((self.total - self.done) / rate)}")
        return ", ".join(part for part in [*parts, self.note] if part)


def format_duration(seconds: float) -> str:
    """`75` as `1:15`, `3675` as `1:01:15`, `200000` as `2 d 7:33:20`."""
    days, rest = divmod(max(0, round(seconds)), 86_400)
    hours, rest = divmod(rest, 3_600)
    clock = f"{hours}:{rest // 60:02}:{rest % 60:02}" if days or hours else f"{rest // 60}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


# ----------------------------------------------------------------------------------------------------------------------
# One writer a folder


class FolderLock:
    """Lets one process at a time write to a folder; a second one is refused by name, a dead one's lock is taken over.

    The operating system's own file lock does the deciding (it ends with its process, however that dies); the file's text
    only names the holder. Used as a context manager. Raises UserError when another process holds the lock.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.path, self.what = folder / ".lock", what
        self._file: IO[str] | None = None

    def __enter__(self) -> "FolderLock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+", encoding="utf-8")
        if not _try_lock(self._file):
            self._file.seek(0, os.SEEK_SET)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(f"{self.what} is being written by {holder}; wait for it, or stop it first")
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}")
        self._file.flush()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The file stays: removing it would let two later processes lock two different files of one name.
        self._file.close()


def _try_lock(file: IO[str]) -> bool:
    if os.name == "nt":
        import msvcrt

        try:
            file.seek(1 << 30)  # a byte far behind the text, since Windows forbids others to read locked bytes
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
