"""metrics.jsonl: the append-only record of a run, one JSON object a line.

A killed process can leave a torn last line, and lines newer than its last checkpoint; resuming cuts both off, so that no
record is ever missing or there twice.
"""

import contextlib
import errno
import importlib.util
import json
import math
import os
import shutil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from support.common import UserError, atomic_write

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def require_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs the package tensorboard; run: uv pip install tensorboard, or leave the flag out")


class MetricsLog:
    """Appends records to a run's metrics.jsonl. `path` None records nothing: the other ranks of a run."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._pending = b""
        self._events: SummaryWriter | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record; numbers that JSON cannot say become null.

        A disk that is full ends no run: the record is kept, tried again with the next one, and insisted on by `sync`.
        """
        if self.path is None:
            return
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._pending += (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
        with contextlib.suppress(OSError):
            self._write_pending()
            self._add_events(plain)

    def _write_pending(self) -> None:
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(self._pending) < len(self._pending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            self._file.truncate(size)  # no torn line before the next attempt
            raise
        self._pending = b""

    def mirror(self) -> None:
        """From now on records go to RUN/tensorboard/ as events too.

        Those of the records so far are written anew, since events cannot be cut back: none is missing and none is there twice.
        """
        if self.path is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        folder = self.path.parent / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._events = SummaryWriter(str(folder))
        for record in read_metrics(self.path) if self.path.exists() else []:
            self._add_events(record)

    def _add_events(self, record: dict[str, Any]) -> None:
        for name, value in record.items() if self._events is not None else ():
            if isinstance(value, int | float) and name != "step":
                self._events.add_scalar(f"{record['kind']}/{name}", value, record["step"])
            elif name == "text":
                self._events.add_text(record["kind"], value, record["step"])

    def sync(self) -> None:
        """Makes all records durable; called before a checkpoint that counts on them is written. Raises OSError."""
        if self.path is not None:
            self._write_pending()
            os.fsync(self._file.fileno())

    def cut_back(self, step: int, last_eval_iter: int) -> None:
        """Drops what a checkpoint at `step` does not know yet: later steps, and evaluations after `last_eval_iter`."""
        if self.path is None or not self.path.exists():
            return
        last = {"train": step, "eval": last_eval_iter, "sample": last_eval_iter}
        records = read_metrics(self.path)
        with atomic_write(self.path) as file:
            for record in records:
                if record["step"] <= last.get(record["kind"], step):
                    file.write((json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics file; a torn last line, or anything else that is no record, is left out."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("kind"), str):
            records.append(record)
    return records
