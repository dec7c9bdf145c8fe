"""What the processes of one run agree on: who they are, sums over all of them, and when to stop.

One process never starts a process group; several are started by torchrun, which tells each its place in the environment.
"""

import contextlib
import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from support.common import Terminated, UserError

# The last one is a terminal that was closed; not every system has it.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
SAME_SIGNAL_SECONDS = 1.0
LOST_OUTPUT = (errno.EPIPE, errno.EIO)
NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")  # what torchrun sets, and MASTER_ADDR


@dataclass(frozen=True)
class World:
    """This process's place among the `size` processes of the run; `local` counts within its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """The one process that writes files and prints."""
        return self.rank == 0

    @property
    def launcher(self) -> str:
        """What starts as many processes on this machine."""
        return "python" if self.size == 1 else f"torchrun --nproc_per_node={self.local_size} --"

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all processes, in double precision. Every process has to call it."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in one process at least. Every process has to call it."""
        return self.sum([float(flag)])[0] > 0

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join_world(device: str) -> World:
    """Joins the other processes where torchrun started several. `device` is the setting, "auto" to "mps".

    Raises UserError where the environment speaks of several processes without saying which one this is.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return World()
    wrong = [name for name in NUMBERS if not os.environ.get(name, "").isdecimal()]
    if wrong or "MASTER_ADDR" not in os.environ:
        name = (wrong or ["MASTER_ADDR"])[0]
        found = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {name} is {os.environ.get(name, 'not set')}"
        raise UserError(f"{found}; start several processes with torchrun, or unset WORLD_SIZE to train in this one alone")
    size = int(os.environ["WORLD_SIZE"])
    on_gpu = device != "cpu" and torch.cuda.is_available()
    # Small sums run on the CPU through gloo even then, so that they never wait for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return World(dist.get_rank(), size, local_rank, local_size)


class StopSignals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request, which the training loop meets between two updates.

    The second one leaves at once; one that comes within SAME_SIGNAL_SECONDS is the first again, sent to this process and
    passed on by the one that started it (`uv run`, a shell script). While `immediate` is set (compiling, before any update)
    the first one is raised where it arrives. Used as a context manager, which gives the handlers back at its end.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.received_at = -math.inf
        self.immediate = False
        # torchrun passes the terminal's signal on to processes that had it already, and after 30 s kills them itself.
        self._launched = "TORCHELASTIC_RUN_ID" in os.environ

    def __enter__(self) -> "StopSignals":
        self._previous = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            # nohup tells a process to ignore the end of its terminal, and it shall.
            wanted = [s for s in STOP_SIGNALS if s == signal.SIGINT or signal.getsignal(s) != signal.SIG_IGN]
            self._previous = {signum: signal.signal(signum, self._handle) for signum in wanted}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def raised_at_once(self) -> Iterator[None]:
        """Meanwhile the first signal is raised where it arrives: nothing has been trained that could be lost."""
        self.immediate = True
        try:
            if self.received is not None:
                raise stop_exception(self.received)
            yield
        finally:
            self.immediate = False

    @contextlib.contextmanager
    def meets_lost_output(self) -> Iterator[None]:
        """A terminal that is gone, or a pipe without a reader, met in here stops the run as the signal for it does.

        Raised on, it would cost the steps since the last save, and leave other processes waiting.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in LOST_OUTPUT:
                raise
            discard_lost_output()
            self.received = self.received or STOP_SIGNALS[-1]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if not self._launched and time.monotonic() - self.received_at > SAME_SIGNAL_SECONDS:
                os._exit(128 + signum)
            return
        self.received, self.received_at = signum, time.monotonic()
        if self.immediate:
            raise stop_exception(signum)
        # print() could be interrupted inside itself; a plain write cannot.
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, b"\nstopping after this update, then saving; a second signal leaves at once\n")


def stop_exception(signum: int) -> BaseException:
    """What ends a command with the exit code of this signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else Terminated(signum)


def discard_lost_output() -> None:
    """From now on what is printed where nobody reads it goes nowhere, what else is printed arrives."""
    for stream in (sys.stdout, sys.stderr):
        try:
            os.write(stream.fileno(), b"\n")
        except OSError as error:
            if error.errno not in LOST_OUTPUT:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
