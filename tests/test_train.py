"""The training loop: what an update is, what it survives, and how it ends."""

import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, assert_user_error
from tiny_corpus import TINY_RUN
from training_process import TrainingProcess

import checkpoint as ck
import train
from config import make_config
from dataset import TokenData, WindowReader, eval_windows
from support import device, memory
from support.common import UserError
from support.distributed import SAME_SIGNAL_SECONDS, World
from support.metrics import MetricsLog, read_metrics
from support.updater import LossScaler, Updater

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 32, "device": "cpu", "dtype": "float32", "compile": "off"}


pytestmark = pytest.mark.usefixtures("in_tiny_folder")


def make_updater(**settings: Any) -> Updater:
    config = make_config("quick", {**SMALL, "threads": 1, **settings})
    return Updater(config, device.resolve_device(config.compute), World())


def latest(name: str) -> dict[str, Any]:
    return ck.load_checkpoint(Path("checkpoints") / name / "checkpoint_latest.pt")


def records(name: str, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(Path("checkpoints") / name / "metrics.jsonl") if record["kind"] == kind]


# ----------------------------------------------------------------------------------------------------------------------
# One update


def gradients_after(batch_size: int, grad_accum_steps: int, ignored: bool, dropout: float = 0.0) -> dict[str, torch.Tensor]:
    """Gradients of one update over the same 6 windows, cut in the given way; some targets are ignored unevenly."""
    updater = make_updater(batch_size=batch_size, grad_accum_steps=grad_accum_steps, dropout=dropout)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 260, (6, 32), generator=draw)
    y = torch.randint(0, 260, (6, 32), generator=draw)
    if ignored:
        y[0, :30], y[3, :7], y[5] = -100, -100, -100  # the last is a row that a short last micro-batch lacks
    caught: dict[str, torch.Tensor] = {}

    def fetch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(m * batch_size, (m + 1) * batch_size)
        return x[rows], y[rows]

    updater.optimizer.step = lambda: caught.update({n: p.grad.clone() for n, p in updater.model.named_parameters()})
    result = updater.update(0, 1e-3, fetch, int((y != -100).sum()))
    assert result.applied
    return {**caught, "loss": torch.tensor(result.loss)}


@pytest.mark.parametrize("ignored", [False, True], ids=["all targets", "uneven targets"])
def test_micro_batches_equal_one_big_batch(ignored: bool):
    """A mean of means weighs the tokens of a short micro-batch more; a missing or second division scales everything."""
    whole = gradients_after(6, 1, ignored)
    for cut in ((1, 6), (2, 3), (3, 2)):
        for name, gradient in gradients_after(*cut, ignored).items():
            torch.testing.assert_close(
                gradient, whole[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name, c=cut: f"{n} {c}: {m}"
            )


def test_loss_is_that_of_the_plain_model():
    """An update that reports, or descends, another loss than cross entropy over its targets."""
    updater = make_updater(batch_size=2, grad_accum_steps=2)
    x = torch.randint(0, 260, (4, 32))
    with torch.no_grad():
        _, expected = updater.model(x, x)
    result = updater.update(0, 1e-3, lambda m: (x[2 * m : 2 * m + 2], x[2 * m : 2 * m + 2]), 4 * 32)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)


def test_clipping_limits_the_norm_and_reports_it_unclipped():
    """Clipping against the norm of scaled gradients, or reporting the norm after clipping, which is always the limit."""
    for limit, dtype in ((0.5, "float32"), (0.0, "float32"), (0.5, "float16")):
        updater = make_updater(batch_size=2, grad_accum_steps=1, grad_clip=limit, dtype=dtype)
        if updater.scaler:
            updater.scaler.scale = 256.0
        norms: list[float] = []
        updater.optimizer.step = lambda u=updater, n=norms: n.append(
            math.sqrt(sum(p.grad.square().sum().item() for p in u.model.parameters()))
        )
        x = torch.full((2, 32), 7)
        result = updater.update(0, 1e-3, lambda _, x=x: (x, x), 64)
        assert result.grad_norm > 1
        assert norms[0] == pytest.approx(limit or result.grad_norm, rel=1e-3)


def test_dropout_belongs_to_the_micro_step():
    """Dropout from one running stream differs after a resume, and between one process and several."""
    a, b = (gradients_after(2, 3, False, dropout=0.3) for _ in range(2))
    torch.randn(7)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_validation_loss_does_not_depend_on_the_eval_batch(batch_size: int):
    """A mean over batches weighs the short last one too much, and makes another number of it for every batch size."""
    config = make_config("quick", {"corpus": "tiny", **SMALL})
    reader = WindowReader(TokenData.load(config), "val", 32)
    updater = make_updater(dropout=0.5)
    offsets = eval_windows(reader.num_tokens, 32, 0)
    loss = updater.mean_loss(reader, offsets, batch_size, lambda: False)
    with torch.no_grad():
        updater.model.eval()
        sums = [updater.model(*reader.read(offsets[i : i + 1]), reduction="sum")[1].item() for i in range(len(offsets))]
    assert loss == pytest.approx(sum(sums) / (reader.num_tokens - 1), rel=1e-5)
    assert updater.mean_loss(reader, offsets, batch_size, lambda: True) is None


def test_an_evaluation_batch_is_no_larger_than_the_evaluation(capsys: pytest.CaptureFixture):
    """Gigabytes of rows of padding, or out of memory in the first evaluation with advice about --batch-size."""
    run("--run", "a", "--max-iters", "6", "--eval-windows", "3", "--eval-batch-size", "1099511627776")
    run("--run", "b", "--max-iters", "6", "--eval-windows", "3")
    losses = [[record["val_loss"] for record in records(name, "eval")] for name in "ab"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_loss_scaler():
    """A scale that never recovers, or whose counters are lost."""
    scaler = LossScaler()
    scaler.update(False)
    assert scaler.scale == 32_768
    for _ in range(2000):
        scaler.update(True)
    assert scaler.scale == 65_536 and scaler.good_updates == 0
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert vars(other) == vars(scaler) and all(type(v) in (int, float) for v in scaler.state_dict().values())


# ----------------------------------------------------------------------------------------------------------------------
# A run in this process


def run(*flags: object) -> None:
    train.main([*TINY_RUN, *map(str, flags)])


def test_memory_is_predicted_measured_and_recorded(capsys: pytest.CaptureFixture):
    """A run on a CPU that says nothing of memory, or records less than the process holds."""
    run("--run", "a", "--max-iters", "6")
    said = capsys.readouterr().out
    assert "predicted peak of memory: " in said and ", peak of memory " in said
    held = device.resident_bytes()
    assert 0 < 0.5 * held < records("a", "train")[-1]["memory_bytes"] <= device.resident_bytes(peak=True)


def test_fresh_run(capsys: pytest.CaptureFixture):
    """The files, records and last lines that other stages and people rely on."""
    run("--run", "a", "--sample-tokens", "3", "--sample-prompt", "the")
    folder, out = Path("checkpoints/a"), capsys.readouterr().out
    assert "step 0: validation loss 5.5" in out, "perplexity starts near the vocabulary size"
    assert out.rstrip().splitlines()[-1].startswith("best validation loss ")
    assert "4 x 2 x 32 = 256 tokens a step, 30 steps, 7,680 tokens, 1.29 passes" in out
    assert [r["step"] for r in records("a", "train")] == list(range(1, 31))
    assert [r["step"] for r in records("a", "eval")] == [r["step"] for r in records("a", "sample")] == [0, 10, 20, 30]
    assert records("a", "train")[-1]["tokens"] == 30 * 256
    for path in folder.glob("checkpoint_*.pt"):
        assert set(torch.load(path, weights_only=True)) == set(ck.LAYOUT)
    state, best = latest("a"), ck.load_checkpoint(folder / "checkpoint_best.pt")
    progress = state["config"]["progress"]
    assert state["iter"] == 30 and state["val_loss"] < 5 and progress["tokens_seen"] == 7680
    lowest = min(records("a", "eval"), key=lambda r: r["val_loss"])
    assert (
        (best["iter"], best["val_loss"])
        == (lowest["step"], lowest["val_loss"])
        == (progress["best_iter"], progress["best_val_loss"])
    )
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert settings.pop("environment") == state["config"]["environment"]
    assert settings == state["config"]["settings"] and settings["model"]["vocab_size"] == 260


def test_passes_are_counted_to_the_last_token():
    """A short last update that is dropped, or padded with tokens that count; --max-epochs that the preset's steps overrule."""
    flags = [flag for flag in TINY_RUN if flag not in ("--max-iters", "30")]
    train.main([*flags, "--run", "a", "--max-epochs", "1", "--sampling", "epoch", "--warmup-iters", "2"])
    tokens = TokenData.load(make_config("quick", {"corpus": "tiny"})).num_tokens("train")
    assert latest("a")["config"]["progress"]["tokens_seen"] == tokens - 1
    assert latest("a")["iter"] == math.ceil(math.ceil((tokens - 1) / 32) / 8)


def spoil_updates(steps: set[int], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Makes the loss, or only one gradient, of these updates infinite."""
    original = Updater._backward

    def backward(self: Updater, step: int, *rest: Any) -> torch.Tensor:
        loss = original(self, step, *rest)
        if step in steps and where == "gradient":
            next(self.model.parameters()).grad.view(-1)[0] = math.inf
        return loss * math.nan if step in steps and where == "loss" else loss

    monkeypatch.setattr(Updater, "_backward", backward)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_updates_that_are_not_finite_are_skipped_and_counted(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """One infinite gradient makes every weight NaN, and the next checkpoint too."""
    spoil_updates({3, 4, 17}, monkeypatch, where)
    run("--run", "a", "--max-bad-steps", "3")
    state = latest("a")
    assert state["iter"] == 30 and state["config"]["progress"]["skipped_updates"] == 3
    assert ck.is_finite(state["model"]) and math.isfinite(state["train_loss"])
    assert "skipped an update that is not finite: step 4, learning rate" in capsys.readouterr().out
    loss = records("a", "train")[3]["loss"]
    assert loss is None if where == "loss" else math.isfinite(loss)


def test_too_many_bad_updates_in_a_row_stop_the_run(monkeypatch: pytest.MonkeyPatch):
    """Skipping for ever, or overwriting the last good checkpoint."""
    spoil_updates(set(range(12, 99)), monkeypatch, "gradient")
    with pytest.raises(UserError, match=r"3 updates in a row .*step 15, learning rate .*gradient norm inf.*step 10 is intact"):
        run("--run", "a", "--max-bad-steps", "3", "--checkpoint-interval", "10")
    assert latest("a")["iter"] == 10 and ck.is_finite(latest("a")["model"])


def test_weights_that_are_not_finite_are_never_saved():
    """A learning rate so high that finite gradients still blow the weights up."""
    with pytest.raises(UserError, match=r"not finite"):
        run("--run", "a", "--learning-rate", "1e38", "--grad-clip", "0", "--weight-decay", "0", "--checkpoint-interval", "1")
    for path in Path("checkpoints/a").glob("checkpoint_*.pt"):
        assert ck.is_finite(ck.load_checkpoint(path)["model"])


def test_a_failed_save_leaves_the_run_alive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """A disk that was full for a while ends a week of training; or the best file is not what the progress says."""
    original, calls = ck.write_checkpoint, []

    def write(checkpoint: dict, *rest: Any) -> None:
        calls.append(checkpoint["iter"])
        if checkpoint["iter"] in (10, 15):
            raise OSError(28, "No space left on device", "checkpoint_latest.pt.tmp")
        original(checkpoint, *rest)

    monkeypatch.setattr(ck, "write_checkpoint", write)
    run("--run", "a", "--learning-rate", "1e-9", "--eval-interval", "10", "--dropout", "0")
    assert "warning: no checkpoint of step 10 (no space left on the disk" in capsys.readouterr().out
    assert calls == [0, 5, 10, 15, 20, 25, 30]
    best = ck.load_checkpoint(Path("checkpoints/a/checkpoint_best.pt"))
    assert best["iter"] == latest("a")["config"]["progress"]["best_iter"] != 10


def test_a_last_save_that_fails_is_no_success(monkeypatch: pytest.MonkeyPatch):
    """Exit code 0 for a run whose result was never written."""

    def write(checkpoint: dict, *rest: Any) -> None:
        raise OSError(28, "No space left on device", "checkpoint_latest.pt.tmp")

    monkeypatch.setattr(ck, "write_checkpoint", write)
    with pytest.raises(UserError, match="could not be saved"):
        run("--run", "a", "--max-iters", "6")


def test_checkpoints_by_the_clock(monkeypatch: pytest.MonkeyPatch):
    """--checkpoint-minutes that is read and ignored."""
    original, calls = ck.write_checkpoint, []
    monkeypatch.setattr(ck, "write_checkpoint", lambda c, *rest: (calls.append(c["iter"]), original(c, *rest)))
    run("--run", "a", "--max-iters", "6", "--checkpoint-interval", "1000", "--checkpoint-minutes", "1e-6")
    assert calls == [0, 1, 2, 3, 4, 5, 6]


def test_out_of_memory_is_one_line_with_a_way_out(monkeypatch: pytest.MonkeyPatch):
    """A traceback, or advice that changes the recipe."""
    config = make_config("quick", {"batch_size": 6, "grad_accum_steps": 2})
    cpu = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 17 bytes. Error code 12 (Cannot allocate memory)"
    gpu = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of"
    advice = r"out of memory: asked for .*--batch-size 3 --grad-accum-steps 4 keeps 3,072 tokens"
    for error in (torch.OutOfMemoryError(gpu), RuntimeError(cpu), MemoryError()):
        with pytest.raises(UserError, match=advice), memory.explained_out_of_memory(config):
            raise error
    with pytest.raises(RuntimeError, match="mat1"), memory.explained_out_of_memory(config):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(UserError, match=r"asked for 2.50 GiB"), memory.explained_out_of_memory(config):
        raise torch.OutOfMemoryError(gpu)


def test_metrics_are_cut_back_to_a_checkpoint(tmp_path: Path):
    """Records of steps that a kill undid stay, and appear a second time."""
    log = MetricsLog(tmp_path / "m.jsonl")
    for step in range(6):
        log.append({"kind": "train", "step": step, "loss": math.nan})
        log.append({"kind": "eval", "step": step, "val_loss": 1.0})
    log.sync()
    log.close()
    with open(log.path, "ab") as file:
        file.write(b'{"kind": "train", "step')
    log.cut_back(step=3, last_eval_iter=2)
    kept = [(r["kind"], r["step"]) for r in read_metrics(log.path)]
    assert kept == [("train", 0), ("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2), ("train", 3)]
    assert log.path.read_bytes().endswith(b"}\n") and b"NaN" not in log.path.read_bytes()


def test_metrics_survive_a_disk_that_is_full_for_a_while(tmp_path: Path):
    """A run that dies of a log line, a record that is lost, or half of one in the middle of the file."""
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append({"kind": "train", "step": 1})
    size, limit = log.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limit[1]))
    try:
        log.append({"kind": "train", "step": 2})
        with pytest.raises(OSError):
            log.sync()
        assert log.path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    log.append({"kind": "train", "step": 3})
    assert [record["step"] for record in read_metrics(log.path)] == [1, 2, 3]


# ----------------------------------------------------------------------------------------------------------------------
# Real processes and signals


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_finishes_the_update_and_saves(signum: int, code: int, tmp_path: Path):
    """Ctrl-C, a scheduler's SIGTERM, or a connection that breaks, loses hours; so does one signal that comes from the terminal
    and from `uv run` as well, taken for two."""
    process = TrainingProcess(tmp_path, [*TINY_RUN, "--run", "a", "--max-iters", "100000", "--checkpoint-interval", "100000"])
    process.wait_until(lambda out: "step 10:" in out)
    process.signal(signum)
    process.wait_until(lambda out: "a second signal leaves at once" in out)
    process.signal(signum)
    assert process.wait() == code
    step = int(re.search(r"stopped at step ([\d,]+); go on with: (.*)", process.output())[1].replace(",", ""))
    assert "go on with: uv run python train.py --corpus tiny --run a --resume" in process.output()
    assert latest("a")["iter"] == step >= 10 and "Traceback" not in process.output()


@pytest.mark.parametrize("lost", [1, 2])
def test_output_that_nobody_reads_any_more_saves(lost: int, tmp_path: Path):
    """`train.py | head`, or a terminal that is gone, raises inside the loop: the steps since the last save are lost."""
    close_at_10 = f"""
import os, sys
from support import common
reader, writer = os.pipe()
os.dup2(writer, {lost})
os.close(writer)
sys.stdout, sys.stderr = (open(number, 'w', closefd=False) for number in (1, 2))
original = common.Progress.update
def update(self, *args, **kwargs):
    if self.done == 9:
        os.close(reader)
    original(self, *args, **kwargs)
    print("bar", file=(sys.stdout, sys.stderr)[{lost} - 1], flush=True)
common.Progress.update = update
"""
    arguments = [*TINY_RUN, "--run", "a", "--max-iters", "100000", "--checkpoint-interval", "100000"]
    process = TrainingProcess(tmp_path, [*arguments, "--eval-interval", "100000"], before=close_at_10)
    assert process.wait() == 129, process.output()
    assert latest("a")["iter"] == 10 and "Traceback" not in process.output()
    assert ("stopped at step 10; go on with:" in process.output()) == (lost == 2)


def test_nohup_outlives_the_terminal(tmp_path: Path):
    """A handler of our own for the signal that nohup has told the process to ignore."""
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = TrainingProcess(tmp_path, [*TINY_RUN, "--run", "a", "--max-iters", "200"], before=ignored)
    process.wait_until(lambda out: "step 10:" in out)
    process.signal(signal.SIGHUP)
    assert process.wait() == 0 and latest("a")["iter"] == 200


def test_a_signal_inside_a_save_starts_no_further_update(monkeypatch: pytest.MonkeyPatch):
    """A half-finished save taken for a good one, or another update, which may take minutes, before the run ends."""
    original = ck.write_checkpoint

    def write(checkpoint: dict, *rest: Any) -> None:
        if checkpoint["iter"] == 5:
            signal.raise_signal(signal.SIGINT)
        original(checkpoint, *rest)

    monkeypatch.setattr(ck, "write_checkpoint", write)
    with pytest.raises(KeyboardInterrupt):
        run("--run", "a")
    assert latest("a")["iter"] == 5 and [r["step"] for r in records("a", "train")] == [1, 2, 3, 4, 5]


def test_a_second_signal_leaves_at_once(tmp_path: Path):
    """A process that cannot be stopped while it saves to a dead network disk."""
    hang = "import checkpoint, time; checkpoint.write_checkpoint = lambda *_: time.sleep(600)"
    process = TrainingProcess(tmp_path, [*TINY_RUN, "--run", "a"], before=hang)
    process.wait_until(lambda out: "step 0:" in out)
    process.signal(signal.SIGINT)
    process.wait_until(lambda out: "a second signal leaves at once" in out)
    time.sleep(1.1 * SAME_SIGNAL_SECONDS)
    process.signal(signal.SIGINT)
    assert process.wait(30) == 130


def test_a_signal_while_compiling_ends_at_once(tmp_path: Path):
    """Compilation takes a minute and knows nothing of signals, or takes the interrupt for a compiler that does not work."""
    process = TrainingProcess(
        tmp_path, [*TINY_RUN, "--run", "a", "--compile", "auto"], {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "c")}
    )
    process.wait_until(lambda out: (tmp_path / "c").exists())
    process.signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "stopped before the first step; go on with: uv run python train.py --corpus tiny --run a" in process.output()
    assert not ck.has_checkpoints(tmp_path / "checkpoints/a")


def test_a_run_killed_before_its_first_save_starts_afresh(tmp_path: Path):
    """Records of an attempt that left no checkpoint stay, and appear twice."""
    kill = "import checkpoint, os, signal; checkpoint.write_checkpoint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    assert TrainingProcess(tmp_path, [*TINY_RUN, "--run", "a"], before=kill).wait() == -signal.SIGKILL
    assert [record["step"] for record in records("a", "eval")] == [0]
    run("--run", "a", "--max-iters", "10")
    assert [record["step"] for record in records("a", "eval")] == [0, 10]


def test_a_real_file_size_limit_costs_checkpoints_and_no_steps(tmp_path: Path):
    """A full disk inside a save ends the run, breaks the old checkpoint, or goes unnoticed at the end."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))"
    run("--run", "a", "--max-iters", "10")
    more = ("--max-iters", "20", "--override", "max_iters", "--resume")
    process = TrainingProcess(tmp_path, [*TINY_RUN, "--run", "a", *more], before=full)
    assert process.wait() == 2
    out = process.output()
    assert "warning: no checkpoint of step 15" in out and "error: step 20, the last, could not be saved" in out
    assert latest("a")["iter"] == 10 and not list(Path("checkpoints/a").glob("*.tmp"))
    run("--run", "a", *more)
    assert [record["step"] for record in records("a", "train")] == list(range(1, 21))


def test_two_processes_cannot_share_a_run_and_a_dead_ones_lock_is_taken_over(tmp_path: Path):
    """Two processes that write one folder leave checkpoints of neither."""
    process = TrainingProcess(tmp_path, [*TINY_RUN, "--run", "a", "--max-iters", "100000"])
    process.wait_until(lambda out: "step 10:" in out)
    with pytest.raises(UserError, match=r"run a is being written by process \d+"):
        run("--run", "a", "--resume", "--max-iters", "100000")
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    run("--run", "a", "--resume", "--max-iters", "20", "--override", "max_iters")


def test_mistakes_end_in_one_line(stage: Callable):
    """A traceback for a missing corpus."""
    assert_user_error(stage("train.py", "--corpus", "none"), "none", "prepare_data.py --corpus none")
    help_text = stage("train.py", "--help").stdout
    assert "Stage 5 of 9" in help_text
    script = "import sys, train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0, "--help must not wait for torch"


# ----------------------------------------------------------------------------------------------------------------------
# Several processes


def rank_environments(count: int) -> list[dict[str, str]]:
    """What torchrun would tell each of `count` processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"TORCHELASTIC_RUN_ID": "test"}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(count)]


SHARED_RUN = (*TINY_RUN, "--batch-size", "2", "--grad-accum-steps", "4")


def start_ranks(folder: Path, count: int, *flags: object, before: str = "") -> list[TrainingProcess]:
    """The processes that torchrun would start, joined through gloo."""
    return [
        TrainingProcess(folder, [*SHARED_RUN, *flags], environment, before, f"rank{environment['RANK']}.txt")
        for environment in rank_environments(count)
    ]


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two", "RANK": "0"}])
def test_half_of_torchruns_environment_is_one_line(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """A traceback where a cluster's shell sets WORLD_SIZE although nobody called torchrun."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="with torchrun, or unset WORLD_SIZE"):
        run("--run", "a")


def test_one_two_and_three_processes_make_the_same_run(tmp_path: Path):
    """Gradients averaged where a sum is due, synchronised too late or too often, ranks that skip or repeat windows."""
    flags = ("--dropout", "0.1", "--grad-clip", "0.5", "--max-iters", "6", "--eval-interval", "3", "--warmup-iters", "2")
    run("--batch-size", "2", "--grad-accum-steps", "4", "--run", "n1", *flags)
    for count in (2, 3):
        for rank, process in enumerate(start_ranks(tmp_path, count, "--run", f"n{count}", *flags)):
            assert process.wait() == 0, process.output()
            assert process.output().count(f"next: uv run python generate.py --corpus tiny --run n{count}") == (rank == 0)
        for name, weights in latest("n1")["model"].items():
            torch.testing.assert_close(latest(f"n{count}")["model"][name], weights, rtol=1e-5, atol=1e-6)
        for one, other in zip(records("n1", "eval"), records(f"n{count}", "eval"), strict=True):
            assert other["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)
        assert [r["step"] for r in records(f"n{count}", "train")] == list(range(1, 7))


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="threads cannot be slowed down on this system")
def test_slow_threads_of_gloo_abort_no_finished_run():
    """A thread of gloo's that still holds a tensor while the interpreter is torn down ends a good run with SIGABRT."""
    slow_threads = """
import os, sys
from support import distributed
original = distributed.World.sum
def sum(self, values):
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
        if thread != os.getpid():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    return original(self, values)
distributed.World.sum = sum
import train
from support.common import run_main
run_main(train.main)
"""
    # Real interpreters: a forked process has no end that gloo could abort.
    command = [sys.executable, "-c", slow_threads, *SHARED_RUN, "--run", "a", "--max-iters", "4", "--warmup-iters", "2"]
    environments = [{**os.environ, "PYTHONPATH": str(ROOT), **environment} for environment in rank_environments(2)]
    ranks = [subprocess.Popen(map(str, command), env=e, stderr=subprocess.PIPE, text=True) for e in environments]
    for process in ranks:
        message = process.communicate(timeout=120)[1]
        assert process.returncode == 0, message


def test_ranks_stop_together_and_another_number_goes_on(tmp_path: Path):
    """One rank leaves, the others wait in a collective for half an hour; or a resume needs as many processes again."""
    flags = ("--run", "a", "--position", "rotary", "--eval-windows", "3", "--sampling", "epoch")
    endless = ("--warmup-iters", "0", "--checkpoint-interval", "100000", "--eval-interval", "100000")
    pair = start_ranks(tmp_path, 2, *flags, "--max-iters", "100000", *endless)
    pair[0].wait_until(lambda out: "step 0:" in out)
    pair[1].signal(signal.SIGTERM)  # only one of them is told
    assert [process.wait() for process in pair] == [143, 143]
    stopped = latest("a")["iter"]
    assert "stopped at step" in pair[0].output() and "stopped at step" not in pair[1].output()
    assert "go on with: uv run torchrun --nproc_per_node=2 -- train.py --corpus tiny" in pair[0].output()
    more = ("--max-iters", str(stopped + 3), "--override", "max_iters", "--resume")
    for process in start_ranks(tmp_path, 3, *flags, *endless, *more):
        assert process.wait() == 0, process.output()
    assert latest("a")["iter"] == stopped + 3


def test_three_processes_resume_bit_for_bit(tmp_path: Path):
    """DDP regroups its gradients after a first pass, so the first sums after a resume could be taken in another order."""
    flags = ("--dropout", "0.1", "--n-embd", "128", "--max-iters", "10", "--eval-interval", "5", "--grad-accum-steps", "7")
    stop_at_4 = """
import os, signal
from support import updater
original = updater.Updater.update
def update(self, step, *rest):
    if step == 3 and self.world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, step, *rest)
updater.Updater.update = update
"""
    for name, before, code in (("a", "", [0]), ("b", stop_at_4, [143]), ("b", "", [0])):
        resume = ["--resume"] if (tmp_path / "checkpoints" / name).exists() else []
        ranks = start_ranks(tmp_path, 3, "--run", name, *flags, *resume, before=before)
        assert [process.wait() for process in ranks] == 3 * code, ranks[0].output()
    for name, weights in latest("a")["model"].items():
        assert torch.equal(latest("b")["model"][name], weights), name


def test_more_processes_than_micro_batches_are_refused_with_the_arithmetic(tmp_path: Path):
    """A rank without work hangs the others, or the batch grows with the number of GPUs in silence."""
    ranks = start_ranks(tmp_path, 2, "--run", "a", "--batch-size", "8", "--grad-accum-steps", "1")
    assert [process.wait() for process in ranks] == [2, 2]
    assert "2 processes cannot share 1 micro-batches" in ranks[0].output()
    assert "--batch-size 4 --grad-accum-steps 2 keeps 256 tokens a step" in ranks[0].output()


def test_weights_that_are_not_finite_end_all_processes_in_one_line(tmp_path: Path):
    """The main process alone looks at the weights and leaves; the others end in a traceback, or wait for it."""
    spoil = """
from support import updater
original = updater.Updater.update
def update(self, *rest):
    result = original(self, *rest)
    self.model.transformer.ln_f.weight.data.fill_(float("nan"))
    return result
updater.Updater.update = update
"""
    ranks = start_ranks(tmp_path, 2, "--run", "a", "--max-iters", "9", "--checkpoint-interval", "1", before=spoil)
    assert [process.wait() for process in ranks] == [2, 2], ranks[1].output()
    for process in ranks:
        assert "the weights of step 1 are not finite" in process.output() and "Traceback" not in process.output()


@pytest.mark.parametrize("sharded", ["--shard-optimizer", "--no-shard-optimizer"])
def test_a_norm_that_overflows_in_one_process_alone_is_skipped_by_all(tmp_path: Path, sharded: str):
    """One process skips what the others apply: weights part in silence or, sharded, the others wait for its broadcasts."""
    overflow = """
import hashlib, torch
from support import updater
original, norm = updater.Updater.update, updater.Updater._gradient_norm
def update(self, step, *rest):
    self.overflows = step == 2 and self.world.rank == 1
    result = original(self, step, *rest)
    weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), "applied", result.applied, flush=True)
    return result
updater.Updater.update = update
updater.Updater._gradient_norm = lambda self: torch.tensor(float("inf")) if self.overflows else norm(self)
"""
    ranks = start_ranks(tmp_path, 2, "--run", "a", "--max-iters", "5", "--warmup-iters", "2", sharded, before=overflow)
    assert [process.wait() for process in ranks] == [0, 0], ranks[0].output()
    lines = [re.findall(r"weights (\w+) applied (\w+)", process.output()) for process in ranks]
    assert lines[0] == lines[1] and [applied for _, applied in lines[0]] == ["True", "True", "False", "True", "True"]
    assert lines[0][1][0] == lines[0][2][0]
    assert latest("a")["config"]["progress"]["skipped_updates"] == 1


def assert_same_checkpoint(name: str, other: str) -> None:
    """Weights and optimizer state, in the same order, equal bit for bit."""
    one, two = latest(name), latest(other)
    for part in ("model", "optimizer"):
        flat, flat_too = (list(ck.tensors_of(checkpoint[part])) for checkpoint in (one, two))
        assert len(flat) == len(flat_too) and all(map(torch.equal, flat, flat_too)), part
    state, state_too = (checkpoint["optimizer"]["optimizer"] for checkpoint in (one, two))
    assert state["groups"] == state_too["groups"] and list(state["state"]) == list(state_too["state"])
    assert all(values["step"] == state_too["state"][key]["step"] for key, values in state["state"].items() if "step" in values)


@pytest.mark.parametrize(("optimizer", "count"), [("adamw", 2), ("adamw", 3), ("muon", 2), ("galore", 2)])
def test_sharded_optimizer_state_changes_nothing_but_memory(tmp_path: Path, optimizer: str, count: int):
    """Parameters that are stepped nowhere, twice or never sent round; state that a checkpoint lacks or mixes up."""
    flags = ("--optimizer", optimizer, "--max-iters", "6", "--eval-interval", "3", "--warmup-iters", "2", "--galore-rank", "4")
    counted = """
import torch
from support import updater
original = updater.Updater.update
def update(self, step, *rest):
    result = original(self, step, *rest)
    state = [t for part in self.optimizer._whole.parts for s in part.state.values() for t in s.values()]
    kept = sum(4 * t.numel() for t in state if torch.is_tensor(t) and t.dim())
    print("kept", kept, self.optimizer.state_bytes(), flush=True)
    return result
updater.Updater.update = update
"""
    for name, sharded, before in (("whole", (), ""), ("sharded", ("--shard-optimizer",), counted)):
        ranks = start_ranks(tmp_path, count, "--run", name, *flags, *sharded, before=before)
        assert [process.wait() for process in ranks] == count * [0], ranks[0].output()
    assert_same_checkpoint("whole", "sharded")
    whole = ck.tensor_bytes(latest("whole")["optimizer"])
    kept = [int(re.findall(r"kept (\d+) (\d+)", process.output())[-1][0]) for process in ranks]
    assert sum(kept) == whole and max(kept) < whole / count * 1.5
    assert kept == [int(re.findall(r"kept (\d+) (\d+)", process.output())[-1][1]) for process in ranks]
    assert "optimizer state: at most" in ranks[0].output()


def test_a_run_goes_on_sharded_or_not_with_any_number_of_processes(tmp_path: Path):
    """A checkpoint that only as many processes can read, or a resume that hands a process another one's moments."""
    flags = ("--warmup-iters", "2", "--batch-size", "2", "--grad-accum-steps", "4", "--eval-interval", "100")
    resume = ("--resume", "--override", "max_iters")
    for count, *more in ((2, 4, "--shard-optimizer"), (3, 8, *resume), (2, 12, *resume, "--no-shard-optimizer")):
        for process in start_ranks(tmp_path, count, "--run", "a", *flags, "--max-iters", *more):
            assert process.wait() == 0, process.output()
    for more in ((4,), (8, *resume), (12, *resume)):
        run("--run", "b", *flags, "--max-iters", *more)
    for name, weights in latest("b")["model"].items():
        torch.testing.assert_close(latest("a")["model"][name], weights, rtol=1e-5, atol=1e-5)
