"""Checkpoints: written so that no instant is without a good one, read without running code, found by run.

A checkpoint is a dict of tensors and plain values, so torch.load(weights_only=True) reads it:
    iter          schedule steps completed, skipped ones included
    model         the state dict of the plain model
    optimizer     all that stepping needs: {"optimizer": ..., "scaler": ... or None}
    train_loss, val_loss
    config        {"settings", "tokenizer" (JSON text), "data_fingerprint", "progress", "environment"}
"""

import itertools
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from config import ComputeConfig, Config, ModelConfig
from support.common import UserError, atomic_write, explain_os_error, fsync_dir, misfit, require_free_space, temporary_of

if TYPE_CHECKING:
    from model import GPT
    from support.device import Device
    from tokenizer import BPETokenizer

STORED = {"settings": dict, "tokenizer": str, "data_fingerprint": str, "progress": dict, "environment": dict}
LAYOUT = {
    "iter": int,
    "model": {str: Tensor},
    "optimizer": dict,
    "train_loss": float,
    "val_loss": float,
    "config": STORED,
}
STAGED = "checkpoint_latest.new"  # a whole checkpoint that has not got its place yet
WRAPPER_PREFIXES = ("_orig_mod.", "module.")


def checkpoint_path(run_dir: Path, name: str) -> Path:
    return run_dir / f"checkpoint_{name}.pt"


def has_checkpoints(run_dir: Path) -> bool:
    return any(run_dir.glob("checkpoint_*.pt"))


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def write_checkpoint(checkpoint: dict[str, Any], run_dir: Path, keep: int, best: bool = False) -> None:
    """Writes `latest`, moves the `keep` older ones on, and with `best` gives the new file that name too.

    The order makes every instant safe: the new file is durable before any old name moves, `best` has its name before `latest`
    claims so, older names are linked before their successors replace them, `latest` is replaced last.
    Raises UserError when the disk has not enough room, OSError when writing fails; the old files are whole in both cases.
    """
    require_free_space(run_dir, int(1.02 * tensor_bytes(checkpoint)) + 1_000_000, "a checkpoint")
    staged = run_dir / STAGED
    with atomic_write(staged) as file:
        writer = _PatientWriter(file)
        torch.save(checkpoint, writer)
        writer.raise_error()
    try:
        if best:
            _link_over(staged, checkpoint_path(run_dir, "best"))
        _rotate(run_dir, keep)
        fsync_dir(run_dir)
        os.replace(staged, checkpoint_path(run_dir, "latest"))
    finally:
        staged.unlink(missing_ok=True)
    fsync_dir(run_dir)


class _PatientWriter:
    """Keeps the first error of a file (a full disk) for later: raised inside torch.save it ends in an obscure C++ error."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._error = file, None

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """torch.save asks for it; the file is flushed once, by its owner."""

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _rotate(run_dir: Path, keep: int) -> None:
    """prev2 becomes what prev1 was, prev1 what latest is; numbers above `keep` go."""
    names = [checkpoint_path(run_dir, name) for name in ("latest", *(f"prev{i}" for i in range(1, keep + 1)))]
    cut_short = keep > 0 and names[0].exists() and names[1].exists() and os.path.samefile(names[0], names[1])
    if not cut_short:  # a process killed right here before has moved them already
        for newer, older in reversed(list(itertools.pairwise(names))):
            if newer.exists():
                _link_over(newer, older)
    for path in previous_checkpoints(run_dir)[keep:]:
        path.unlink()


def _link_over(source: Path, target: Path) -> None:
    """Lets `target` be the same file as `source`, atomically; a copy where the file system has no links."""
    temporary = temporary_of(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        _copy_durably(source, temporary)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # renaming onto another link of the same file does nothing at all


def _copy_durably(source: Path, target: Path) -> None:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


def previous_checkpoints(run_dir: Path) -> list[Path]:
    """prev1, prev2, ...: the newest first."""
    numbered = {}
    for path in run_dir.glob("checkpoint_prev*.pt"):
        if match := re.fullmatch(r"checkpoint_prev(\d+)\.pt", path.name):
            numbered[int(match[1])] = path
    return [numbered[number] for number in sorted(numbered)]


def remove_temporaries(run_dir: Path) -> list[str]:
    """Removes what a killed save left behind; returns the names. Only for the process that holds the run's lock."""
    stale = sorted([*run_dir.glob("*.tmp"), *run_dir.glob(STAGED)])
    for path in stale:
        path.unlink()
    return [path.name for path in stale]


def promote(path: Path, run_dir: Path) -> None:
    """Lets the checkpoint that a run goes on from be its latest; one that was skipped as unreadable stays as .damaged.

    Otherwise rotation would push good checkpoints out with the damaged one.
    """
    latest = checkpoint_path(run_dir, "latest")
    if path == latest:
        return
    if latest.exists():
        _link_over(latest, latest.with_suffix(".damaged"))
    _link_over(path, latest)
    fsync_dir(run_dir)


def remove_run(run_dir: Path) -> None:
    """Removes the checkpoints and records of a run that is started over."""
    for path in [*run_dir.glob("checkpoint_*.pt"), run_dir / "metrics.jsonl"]:
        path.unlink(missing_ok=True)
    shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def tensor_bytes(checkpoint: dict[str, Any]) -> int:
    """Bytes of all tensors; one that is there under two names counts once, as in the file."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(checkpoint)}
    return sum(storages.values())


def is_finite(state: dict[str, Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in state.values())


# ----------------------------------------------------------------------------------------------------------------------
# Reading


class DamagedCheckpoint(UserError):
    """A file that cannot be read as a checkpoint; an older one beside it may be whole."""


def load_checkpoint(path: Path, verify: bool = False) -> dict[str, Any]:
    """The checkpoint in `path`, its tensors on the CPU. Raises UserError when it is missing or of another program,
    DamagedCheckpoint when it is damaged.

    `verify` also compares the checksums that the file holds, which torch does not and which takes a pass over the file.
    """
    try:
        if verify:
            _verify_checksums(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; name a file that exists or a run's folder, or train a model first") from None
    except MemoryError:
        raise
    except Exception as error:  # whatever the unpickler meets in foreign or damaged bytes
        if isinstance(error, OSError) and error.filename is not None and (message := explain_os_error(error)):
            raise UserError(message) from None  # not opened at all: permissions, the disk
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise DamagedCheckpoint(f"{path} is damaged or no checkpoint ({reason})") from None
    _check_layout(path, checkpoint)
    checkpoint["model"] = {_plain_name(name): tensor for name, tensor in checkpoint["model"].items()}
    return checkpoint


def _verify_checksums(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {name} is wrong")


def _check_layout(path: Path, checkpoint: Any) -> None:
    if (problem := misfit(checkpoint, LAYOUT)) is not None:
        raise UserError(f"{path} is no checkpoint of this program ({problem}; it needs {', '.join(LAYOUT)})")


def _plain_name(name: str) -> str:
    """A parameter's name without what torch.compile or DDP put in front of it."""
    while name.startswith(WRAPPER_PREFIXES):
        name = name.partition(".")[2]
    return name


def existing_checkpoints(run_dir: Path) -> list[Path]:
    """A run's checkpoint files: the newest first, the best one last."""
    latest, best = checkpoint_path(run_dir, "latest"), checkpoint_path(run_dir, "best")
    return [path for path in (latest, *previous_checkpoints(run_dir), best) if path.exists()]


def instead_of(damaged: Path) -> str | None:
    """What to use instead of a damaged file: the newest other checkpoint of its folder that reads well, None if none does."""
    for path in existing_checkpoints(damaged.parent):
        if not os.path.samefile(path, damaged):  # best and latest are often one file
            try:
                return f"use --checkpoint {path} (step {load_checkpoint(path, verify=True)['iter']:,}), which reads well"
            except UserError:
                continue  # damaged as well
    return None


def newest_readable(run_dir: Path, start_command: str) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest checkpoint that can be read, its content, and a line for each newer one that cannot.

    Raises UserError when there is none.
    """
    skipped = []
    for path in existing_checkpoints(run_dir):
        try:
            return path, load_checkpoint(path, verify=True), skipped
        except UserError as error:
            skipped.append(f"skipped: {error}")
    if skipped:
        raise UserError(f"no checkpoint in {run_dir} can be read: {'; '.join(skipped)}; start over with: {start_command}")
    raise UserError(f"there is no checkpoint in {run_dir}; start the run with: {start_command}")


def stored_config(path: Path, checkpoint: dict[str, Any]) -> Config:
    """The settings in a checkpoint. Raises UserError where they are none, or say another size than that of the weights."""
    try:
        config = Config.from_dict(checkpoint["config"]["settings"])
    except ValueError as error:
        raise UserError(f"{path} holds settings this version does not accept: {error}") from None
    require_size(config.model, checkpoint["model"], path)
    return config


def require_size(model: ModelConfig, weights: dict[str, Tensor], path: Path) -> None:
    """Raises UserError where `weights` cannot be those of `model`: before a model of a size out of all bounds is built."""
    found = sum(tensor.numel() for tensor in weights.values())
    rows = (model.padded_vocab_size - model.vocab_size) * model.n_embd
    tables = 1 if model.tied_head else 2
    tied = model.padded_vocab_size * model.n_embd if model.tied_head and "lm_head.weight" in weights else 0
    expected = model.num_params + tables * rows + tied
    if found != expected:
        raise UserError(f"the weights in {path} do not fit this model: {found:,} numbers, by its settings {expected:,}")


def stored_tokenizer(path: Path, checkpoint: dict[str, Any]) -> "BPETokenizer":
    """The tokenizer in a checkpoint. Raises UserError where it is none."""
    from tokenizer import BPETokenizer

    try:
        return BPETokenizer.from_json(checkpoint["config"]["tokenizer"])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} holds no tokenizer of ours ({' '.join(str(error).split())[:160]})") from None


def find_checkpoint(config: Config, explicit: str | None = None) -> Path:
    """The file to read: `explicit` (a file, or a run's folder), else the run's best, else its latest.

    Raises UserError, which lists the runs that exist, when there is none.
    """
    if explicit is not None and not Path(explicit).is_dir():
        return Path(explicit)
    run_dir = config.run_dir if explicit is None else Path(explicit)
    for path in (checkpoint_path(run_dir, "best"), checkpoint_path(run_dir, "latest"), *previous_checkpoints(run_dir)):
        if path.exists():
            return path
    missing = f"there is no checkpoint in {run_dir}"
    runs = sorted(path.name for path in Path(config.run.checkpoint_dir).glob("*") if has_checkpoints(path))
    if not runs:
        raise UserError(f"{missing}; run: {config.command('train.py')}")
    known = ", ".join(f"--run {name}" for name in runs)
    raise UserError(f"{missing}; runs that exist: {known}; to train this one run: {config.command('train.py')}")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be used, with all that was stored beside it; `checkpoint` holds no weights any more."""

    model: "GPT"
    tokenizer: "BPETokenizer"
    config: Config
    checkpoint: dict[str, Any]
    device: "Device"


def load_model(path: Path, compute: ComputeConfig) -> LoadedModel:
    """The model in a checkpoint file, on the device that `compute` asks for, in evaluation mode.

    Checksums are compared: a flipped bit in a weight would spoil every figure and text, and nothing else would tell.
    """
    from model import GPT
    from support.device import resolve_device

    checkpoint = load_checkpoint(path, verify=True)
    config = stored_config(path, checkpoint)
    device = resolve_device(compute)
    model = GPT(config.model, attention=compute.attention)
    load_weights(model, checkpoint.pop("model"), path)
    tokenizer = stored_tokenizer(path, checkpoint)
    return LoadedModel(model.to(device.device).eval(), tokenizer, config, checkpoint, device)


def load_weights(model: "GPT", weights: dict[str, Tensor], path: Path) -> None:
    """Copies `weights` into `model`. Raises UserError unless every name and shape fits."""
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise UserError(f"the weights in {path} do not fit this model: {' '.join(str(error).split())[:300]}") from None
