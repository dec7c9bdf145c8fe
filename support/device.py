"""Where the model runs: device, precision, threads, determinism and compilation, decided in one place and said in one line."""

import contextlib
import ctypes
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import ComputeConfig
from support.common import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # names in glibc's malloc.h
TENSOR_CORES = (7, 0)  # CUDA capability from which fp16 matrix products are fast, and from which Triton compiles
BFLOAT16 = (8, 0)  # CUDA capability from which bf16 ones are


@dataclass
class Device:
    """What `resolve_device` decided. `line` says it, with the reasons; `compile` adds what became of compilation."""

    device: torch.device
    dtype: torch.dtype
    line: str
    compile_seconds: float = 0.0
    process_bytes: int = 0  # on a CPU: memory of the process before there is a model

    @property
    def needs_scaler(self) -> bool:
        """fp16 gradients underflow without a scaled loss."""
        return self.dtype == torch.float16

    def autocast(self) -> contextlib.AbstractContextManager:
        """Matrix products in `dtype`, weights and sums in fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def synchronize(self) -> None:
        """Waits for all work that was queued, so that a clock may be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def peak_memory(self) -> int:
        """Most bytes so far: of tensors on a CUDA device, of the whole process on a CPU; 0 where nothing tells."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resident_bytes(peak=True) if self.device.type == "cpu" else 0

    def compile(self, model: torch.nn.Module, compute: ComputeConfig, batch: tuple[int, int]) -> Callable[..., Any]:
        """`model` compiled for batches of the given shape (B, T), or as it is.

        One forward and backward pass is made here, so that a compiler that does not work shows before training starts:
        "auto" then stays eager and says why in `line`, "on" raises UserError. Gradients are left at None.
        """
        if compute.compile == "off":
            self.line += ", not compiled"
            return model
        t0 = time.perf_counter()
        silence_compiler()
        try:
            compiled = torch.compile(model, mode=_mode(compute), dynamic=False)
            self._try_step(compiled, model, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            if compute.compile == "on":
                raise UserError(f"torch.compile does not work here ({reason}); use --compile auto or off") from None
            torch.compiler.reset()
            self.line += f", not compiled ({reason})"
            return model
        self.compile_seconds = time.perf_counter() - t0
        self.line += f", compiled in {self.compile_seconds:.0f} s"
        return compiled

    def _try_step(self, compiled: Callable[..., Any], model: torch.nn.Module, batch: tuple[int, int]) -> None:
        # Two tensors: for one that is passed twice the compiler makes a case of its own, and training would wait once more.
        x, y = (torch.zeros(batch, dtype=torch.long, device=self.device) for _ in range(2))
        try:
            with self.autocast():
                _, loss = compiled(x, y, reduction="sum")
            loss.backward()
            self.synchronize()
        finally:
            model.zero_grad(set_to_none=True)


def _mode(compute: ComputeConfig) -> str | None:
    return None if compute.compile_mode == "default" else compute.compile_mode


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"


def silence_compiler() -> None:
    """Keeps torch from remarking, when it compiles for a CPU, on a machine that has CUDA's tools and no GPU."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def resolve_device(compute: ComputeConfig) -> Device:
    """Chooses device and precision, and sets threads, TF32 and determinism of this process.

    Raises UserError where the asked device cannot be used.
    """
    device, why = choose_device(compute.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype, precision = choose_dtype(device, compute.dtype)
    threads = set_threads(compute.threads)
    # Random kernels aside, CPU training is repeatable at no cost; on CUDA it costs speed and is asked for.
    repeatable = device.type == "cpu" or compute.deterministic
    if repeatable:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(repeatable)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is a debugging aid and costs a pass over each buffer
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where fp32 products remain
    where = f"{device} ({device_name(device)}{f', {threads} threads' if device.type == 'cpu' else ''})"
    line = f"{where}{why}, {str(dtype).removeprefix('torch.')} ({precision})"
    return Device(device, dtype, line, process_bytes=resident_bytes() if device.type == "cpu" else 0)


# ----------------------------------------------------------------------------------------------------------------------
# Device


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device and, where it is not the obvious one, a remark. A rank of torchrun takes the GPU of its local number."""
    if name == "auto":
        problem = cuda_problem()
        if problem is None:
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()), ""
        if torch.backends.mps.is_available():
            return torch.device("mps"), ""
        return torch.device("cpu"), f"; {problem}" if nvidia_cards() else ""
    if name.startswith("cuda"):
        return _asked_cuda(name), ""
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this machine has no Metal device that torch can use; use --device cpu")
    return torch.device(name), ""


def _asked_cuda(name: str) -> torch.device:
    index = int(name.partition(":")[2] or os.environ.get("LOCAL_RANK", "0"))
    problem = cuda_problem(index)
    if problem is not None:
        raise UserError(f"--device {name}: {problem}; use --device cpu or put that right")
    return torch.device("cuda", index)


def cuda_problem(index: int = 0) -> str | None:
    """Why CUDA device `index` cannot be used, or None where a matrix product on it works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about an old driver; the line below says it instead
        available = torch.cuda.is_available()
    if not available:
        return _why_no_cuda()
    if index >= torch.cuda.device_count():
        return f"there is no CUDA device {index}, only {torch.cuda.device_count()}"
    try:
        x = torch.ones(8, 8, device=torch.device("cuda", index))
        (x @ x).sum().item()
    except torch.OutOfMemoryError:
        return f"{torch.cuda.get_device_name(index)} has no free memory; another process holds it"
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)} (capability {major}.{minor})"
        return f"{name} is not supported by torch {torch.__version__} ({_first_line(error)}); install a build that still is"
    return None


def _why_no_cuda() -> str:
    cards = nvidia_cards()
    if not cards:
        return "no NVIDIA GPU found"
    card = "; ".join(cards)
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return f"{card} is hidden by CUDA_VISIBLE_DEVICES"
    if torch.version.cuda is None:
        return f"{card} is not used: torch {torch.__version__} is a build without CUDA; install one with it"
    build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    return f"{card} is not used: {build} cannot work with this driver; update the driver or install an older torch build"


def nvidia_cards() -> list[str]:
    """`name, driver N` of each NVIDIA card that the driver's own tool sees; empty without driver or card."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode != 0:
        return []
    rows = [line.split(",") for line in result.stdout.splitlines() if "," in line]
    return [f"{name.strip()} with driver {driver.strip()}" for name, driver in (row[:2] for row in rows)]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu" and Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or platform.machine()


# ----------------------------------------------------------------------------------------------------------------------
# Precision


def choose_dtype(device: torch.device, name: str) -> tuple[torch.dtype, str]:
    """Precision of matrix products and the reason: bf16 where the hardware does it fast, else fp16 on GPUs, else fp32."""
    if name != "auto":
        return DTYPES[name], "as asked"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= BFLOAT16:
            return torch.bfloat16, f"capability {major}.{minor}"
        if (major, minor) >= TENSOR_CORES:
            return torch.float16, f"capability {major}.{minor} has no bf16; loss scaler on"
        return torch.float32, f"capability {major}.{minor} has no fast half precision"
    if device.type == "mps":
        works = mps_has_bfloat16()
        return (torch.bfloat16, "works here") if works else (torch.float32, "this system has no bf16")
    instructions = cpu_bfloat16()
    return (torch.bfloat16, instructions) if instructions else (torch.float32, "this CPU has no bf16 instructions")


def cpu_bfloat16() -> str:
    """The CPU's instructions for bf16 products; empty where there are none, where bf16 can be far slower than fp32."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""


def mps_has_bfloat16() -> bool:
    """Older systems refuse bf16 only when the first operation runs, so one is tried."""
    try:
        x = torch.ones(8, 8, device="mps", dtype=torch.bfloat16)
        return (x @ x).sum().item() == 512
    except (RuntimeError, TypeError):
        return False


# ----------------------------------------------------------------------------------------------------------------------
# Threads and speed


def set_threads(asked: int) -> int:
    """Sets and returns torch's CPU threads: as asked, else this process's share of the cores it may use."""
    torch.set_num_threads(asked or default_threads())
    return torch.get_num_threads()


def default_threads() -> int:
    """torch's own choice (physical cores), cut to the affinity and the container's quota, shared among local ranks.

    torchrun sets OMP_NUM_THREADS=1, which torch would follow: with several local ranks the cores are dealt out instead.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usable = min(usable, container_cpus() or usable)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, usable // ranks if ranks > 1 else min(usable, torch.get_num_threads()))


def container_cpus(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """CPUs that a container's quota amounts to, rounded up; None without a quota."""
    try:
        quota, period = quota_file.read_text(encoding="utf-8").split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None


def keep_freed_memory() -> None:
    """Lets glibc reuse large buffers instead of returning each to the system, which hands it out anew page by page.

    A training step on a CPU otherwise spends some percent of its time on page faults. Elsewhere nothing is done.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def resident_bytes(peak: bool = False) -> int:
    """Memory of this process that lies in RAM, now or at its `peak` (where only that is known, always); 0 on Windows."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s*(\d+) kB$", status, re.MULTILINE)[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@torch.no_grad()
def matmul_rate(device: Device, seconds: float = 0.5) -> float:
    """FLOP/s of the best large square matrix product on this device in its precision: what utilisation is measured against.

    2048 cubed on a CPU, 8192 cubed (on small cards 4096) on a GPU, repeated for `seconds`.
    """
    size = 2048 if device.device.type == "cpu" else 8192 if _memory_bytes(device.device) > 8e9 else 4096
    a, b = (torch.randn(size, size, device=device.device).to(device.dtype) for _ in range(2))
    best, measured, stop = float("inf"), -1, 0.0  # the first product only warms up
    while measured < 1 or time.perf_counter() < stop:
        device.synchronize()
        t0 = time.perf_counter()
        a @ b
        device.synchronize()
        if measured >= 0:
            best = min(best, time.perf_counter() - t0)
        else:
            stop = time.perf_counter() + seconds
        measured += 1
    return 2 * size**3 / best


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return 0
