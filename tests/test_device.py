"""Device, precision, threads and compilation: what is chosen, what is said, and what happens where something is missing."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from config import ComputeConfig
from support import device as device_module
from support.common import UserError
from support.device import (
    choose_device,
    choose_dtype,
    container_cpus,
    cuda_problem,
    default_threads,
    matmul_rate,
    resolve_device,
)

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines whose GPU torch cannot use")


@pytest.fixture(autouse=True)
def process_settings():
    """Puts back what resolve_device sets for the whole process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A driver's tool that lists one card, or whatever else the test has it print."""
    if os.name == "nt":
        pytest.skip("the stand-in is a shell script")
    tool = tmp_path / "nvidia-smi"

    def install(script: str = "echo 'NVIDIA GeForce RTX 3050, 470.82.01'") -> None:
        tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


@no_gpu
def test_a_card_that_torch_cannot_use_is_named(nvidia_smi, monkeypatch):
    """Catches the silent fall to the CPU when the driver is too old, and a vague error when CUDA was asked for."""
    nvidia_smi()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device, remark = choose_device("auto")
    assert device.type in ("cpu", "mps")
    assert "NVIDIA GeForce RTX 3050 with driver 470.82.01 is not used" in cuda_problem()
    if device.type == "cpu":
        assert "NVIDIA GeForce RTX 3050" in remark
        assert "NVIDIA GeForce RTX 3050" in resolve_device(ComputeConfig()).line
    with pytest.raises(UserError, match=r"--device cuda: NVIDIA GeForce RTX 3050 .* --device cpu"):
        choose_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda_problem().endswith("is hidden by CUDA_VISIBLE_DEVICES")


@no_gpu
@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "printf '\\377\\376'"])
def test_a_broken_driver_tool_is_no_card(nvidia_smi, script: str):
    """Catches a crash, or a card made of an error message, when nvidia-smi itself fails."""
    nvidia_smi(script)
    assert cuda_problem() == "no NVIDIA GPU found"
    with pytest.raises(UserError, match="no NVIDIA GPU found"):
        choose_device("cuda:0")


def test_precision_follows_the_hardware(monkeypatch):
    """Catches bf16 on CPUs and GPUs that only emulate it, fp16 without a scaler, and a choice that cannot be forced."""
    cpu, cuda, mps = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")
    monkeypatch.setattr(device_module, "cpu_bfloat16", lambda: "")
    assert choose_dtype(cpu, "auto")[0] == torch.float32
    assert choose_dtype(cpu, "bfloat16")[0] == torch.bfloat16
    monkeypatch.setattr(device_module, "cpu_bfloat16", lambda: "AMX")
    assert choose_dtype(cpu, "auto") == (torch.bfloat16, "AMX")
    for capability, expected in (((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert choose_dtype(cuda, "auto")[0] == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert choose_dtype(cuda, "auto")[0] == torch.float32
    for works, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(device_module, "mps_has_bfloat16", lambda w=works: w)
        assert choose_dtype(mps, "auto")[0] == expected


def test_the_line_and_what_it_stands_for():
    """Catches a line that does not say device, precision and threads, and a process that is not set accordingly."""
    device = resolve_device(ComputeConfig(device="cpu", dtype="float16", threads=1))
    assert device.line.startswith("cpu (") and "1 threads), float16 (as asked)" in device.line
    assert device.needs_scaler and torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    with device.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    plain = resolve_device(ComputeConfig(device="cpu", dtype="float32"))
    with plain.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert matmul_rate(plain, seconds=0.0) > 1e8


def test_threads_of_containers_and_of_ranks(tmp_path: Path, monkeypatch):
    """Catches as many threads as the host has cores in a container with a quota, and one thread a rank under torchrun."""
    quota = tmp_path / "cpu.max"
    for text, expected in (("max 100000\n", None), ("150000 100000\n", 2), ("50000 100000\n", 1), ("nonsense", None)):
        quota.write_text(text, encoding="utf-8")
        assert container_cpus(quota) == expected
    assert container_cpus(tmp_path / "missing") is None
    monkeypatch.setattr(device_module, "container_cpus", lambda: None)
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        torch.set_num_threads(1)  # as torchrun's OMP_NUM_THREADS=1 would
        for ranks, expected in (("2", 4), ("3", 2), ("16", 1), ("1", 1)):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
            assert default_threads() == expected


COMPILE = """
from config import ComputeConfig, ModelConfig
from support.device import resolve_device
from model import GPT
model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=50))
for choice in ("auto", "off"):
    compute = ComputeConfig(device="cpu", compile=choice)
    device = resolve_device(compute)
    print(choice, device.compile(model, compute, (2, 16)) is model, device.line)
assert all(p.grad is None for p in model.parameters())
"""


@pytest.mark.skipif(os.name == "nt", reason="the broken compiler is a POSIX command")
def test_without_a_compiler_training_goes_on_eagerly(tmp_path: Path):
    """Catches a run that does not start where torch.compile has no C++ compiler: auto says why and goes on."""
    env = {**os.environ, "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    auto, off = result.stdout.splitlines()
    assert auto.startswith("auto True cpu") and ", not compiled (" in auto
    assert off.startswith("off True cpu") and off.endswith("not compiled")


def test_compile_on_insists_and_out_of_memory_is_no_compiler_problem(monkeypatch):
    """Catches --compile on that goes on eagerly, and a lack of memory that is blamed on the compiler and tried again."""
    compute, model = ComputeConfig(device="cpu", compile="on"), torch.nn.Linear(2, 2)

    def failing(error: Exception):
        def compile(model: torch.nn.Module, **settings):
            raise error

        return compile

    monkeypatch.setattr(torch, "compile", failing(RuntimeError("\nno compiler\nat all")))
    with pytest.raises(UserError, match=r"does not work here \(RuntimeError: no compiler\); use --compile auto or off"):
        resolve_device(compute).compile(model, compute, (2, 16))
    monkeypatch.setattr(torch, "compile", failing(torch.OutOfMemoryError("tried to allocate")))
    auto = ComputeConfig(device="cpu", compile="auto")
    with pytest.raises(torch.OutOfMemoryError):
        resolve_device(auto).compile(model, auto, (2, 16))
