"""train.py as a real process that can be signalled and killed, started in well under a second.

Each process is forked from a server that has torch loaded and has computed nothing, so that a test may kill dozens of them.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = ["torch", "torch._dynamo", "support.start", "support.updater", "support.sampling", "train"]


def _context() -> multiprocessing.context.ForkServerContext:
    os.environ["PYTHONPATH"] = str(ROOT)  # the server looks for the modules it loads there
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _main(arguments: list[str], log: str, environment: dict[str, str], before: str) -> None:
    """The child: what `cd folder; python train.py arguments` does."""
    os.chdir(Path(log).parent)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(ROOT))
    sys.argv = ["train.py", *arguments]
    import train
    from support import device
    from support.common import run_main

    device.matmul_rate = lambda _: 1e12  # takes longer than a tiny run
    exec(before, {})
    run_main(train.main)


class TrainingProcess:
    """A running `train.py` in `folder`; its output goes to the file `log` there, which is emptied first.

    `before` is Python code that the process runs before it trains: a fault to be survived.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[object],
        environment: dict[str, str] | None = None,
        before: str = "",
        log: str = "log.txt",
    ) -> None:
        self.log = folder / log
        self.log.write_bytes(b"")
        self._process = _context().Process(
            target=_main, args=([str(a) for a in arguments], str(self.log), environment or {}, before)
        )
        self._process.start()

    def signal(self, signum: int) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, signum)

    def wait(self, timeout: float = 120) -> int:
        """The exit code; minus the signal's number for a process that was killed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"train.py did not end:\n{self.output()}")
        return self._process.exitcode

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, condition: Callable[[str], bool], timeout: float = 120, or_end: bool = False) -> None:
        """Waits until `condition` holds for the output, or with `or_end` the process ends. Raises TimeoutError otherwise."""
        t0 = time.monotonic()
        while not condition(self.output()):
            if or_end and self._process.exitcode is not None:
                return
            if self._process.exitcode is not None or time.monotonic() - t0 > timeout:
                raise TimeoutError(f"train.py never came to that point:\n{self.output()}")
            time.sleep(0.01)
