"""How a run begins: its inputs opened and checked, afresh or from a checkpoint, and which settings may change on a resume.

A resumed run has its checkpoint's settings, with the flags given now on top. What would silently make another run of it (the
schedule's length, the order of the data, the data, the tokenizer, the model) is refused with both values unless --override
names it; everything else may change and is shown, old -> new.
"""

import argparse
import dataclasses
import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import (
    checkpoint_path,
    has_checkpoints,
    newest_readable,
    promote,
    remove_run,
    remove_temporaries,
    stored_config,
    stored_tokenizer,
)
from config import SECTIONS, Config, ModelConfig, flag_of
from dataset import TokenData, count_steps
from optimizers import get_lr, warmup_steps
from support.common import UserError, write_json
from support.distributed import World
from support.inference import initial_model_config
from support.memory import same_tokens
from tokenizer import BPETokenizer

DATA, TOKENIZER = "data", "tokenizer"
VOCABULARY = {"vocab_size", "bos_id"}  # the tokenizer's
MODEL = {f.name for f in dataclasses.fields(ModelConfig)} - {"dropout"} - VOCABULARY
BENDING = MODEL | {"max_iters", "max_epochs", "sampling", "seed", DATA, TOKENIZER}
SELECTING = ("run", "checkpoint_dir")  # they say where the run is, which may have been moved
SETTINGS = {f.name for section in SECTIONS.values() for f in dataclasses.fields(section)}


@dataclass
class Start:
    """What a run begins with; `checkpoint` and `path` are None for a new one. `notes` are lines for the user."""

    config: Config
    data: TokenData
    tokenizer: BPETokenizer
    checkpoint: dict[str, Any] | None = None
    path: Path | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def ended(self, steps: int) -> bool:
        """Whether there is nothing left to do in a run of so many `steps`."""
        if self.checkpoint is None or self.path != checkpoint_path(self.config.run_dir, "latest"):
            return False
        return self.checkpoint["iter"] == self.checkpoint["config"]["progress"].get("last_eval_iter") == steps


def check_start(config: Config, args: argparse.Namespace) -> None:
    """Raises UserError where what is asked does not fit what the run's folder holds."""
    if args.override and not args.resume:
        raise UserError("--override only means something together with --resume")
    if args.init_from and args.resume:
        raise UserError("--init-from begins a new run, --resume goes on with one; leave one of them out")
    exists = has_checkpoints(config.run_dir)
    if args.resume and not exists:
        raise UserError(f"there is no checkpoint in {config.run_dir}; start the run with: {config.command('train.py')}")
    if exists and not args.resume and not args.overwrite:
        resume = config.command("train.py", "--resume")
        raise UserError(f"{config.run_dir} holds a run; go on with: {resume}; or name another with --run, or use --overwrite")


def new_run(config: Config, init_from: Path | None = None, given: Collection[str] = ()) -> Start:
    """`init_from` brings the model's shape with its weights; of the flags `given`, none may contradict it."""
    if init_from is not None:
        config = dataclasses.replace(config, model=initial_model_config(init_from, config, given))
    data, tokenizer = open_inputs(config)
    return Start(dataclasses.replace(config, model=data.fit(config.model)), data, tokenizer)


def resumed_run(config: Config, args: argparse.Namespace) -> Start:
    """Picks the newest readable checkpoint and lays the flags given now over its settings."""
    path, checkpoint, notes = newest_readable(config.run_dir, config.command("train.py", "--overwrite"))
    stored, overrides = stored_config(path, checkpoint), parse_overrides(args.override)
    start = new_run(resumed_config(config, stored, args.given, path))
    changes = changed_settings(stored, start.config)
    for name, old, new in (
        (DATA, checkpoint["config"]["data_fingerprint"], start.data.fingerprint),
        (TOKENIZER, stored_tokenizer(path, checkpoint).sha256, start.tokenizer.sha256),
    ):
        if old != new:
            changes[name] = old, new
    check_changes(changes, overrides)
    check_order(stored, start.config, overrides)
    start.path, start.checkpoint = path, checkpoint
    start.notes = [*notes, f"resuming from {path}, step {checkpoint['iter']:,}", *describe_changes(changes)]
    start.notes += describe_schedule_change(stored, start.config, checkpoint["iter"], start.data)
    return start


def open_inputs(config: Config) -> tuple[TokenData, BPETokenizer]:
    """Token files and tokenizer, checked. Raises UserError naming the command to run where they do not serve."""
    data = TokenData.load(config)
    tokenizer = BPETokenizer.load(config.tokenizer_path)
    if tokenizer.sha256 != data.meta["tokenizer_sha256"]:
        command = config.command("prepare_data.py")
        raise UserError(f"{config.tokens_dir} was encoded with another tokenizer than {config.tokenizer_path}; run: {command}")
    if tokenizer.vocab_size != data.vocab_size:
        sizes = f"{data.vocab_size:,} tokens, the tokenizer {tokenizer.vocab_size:,}"
        raise UserError(
            f"{config.tokens_dir / 'meta.json'} is damaged (it says {sizes}); run: {config.command('prepare_data.py')}"
        )
    for split in ("train", "val"):
        data.require_window(split, config.model.block_size)
        data.check_ids(split)
    return data, tokenizer


def check_schedule(config: Config, data: TokenData, world: World, done: int = 0) -> int:
    """Updates of the whole schedule. Raises UserError where settings that are fine alone do not fit data, processes, or the
    number of updates that the run has `done` already."""
    train = config.train
    steps = count_steps(data.num_tokens("train"), train, config.model.block_size)
    if warmup_steps(train, steps) >= steps:
        raise UserError(
            f"warm-up takes {warmup_steps(train, steps):,} of only {steps:,} steps; lower --warmup-iters or train longer"
        )
    if done > steps:
        raise UserError(f"the checkpoint has {done:,} steps already, and the schedule ends at {steps:,}; raise --max-iters")
    if world.size > train.grad_accum_steps:
        advice = same_tokens(config, world.size)
        raise UserError(
            f"{world.size} processes cannot share {train.grad_accum_steps} micro-batches a step (grad_accum_steps); take fewer "
            f"processes, or more and smaller micro-batches: {advice}"
        )
    return steps


def tidy_folder(start: Start, environment: dict[str, Any]) -> list[str]:
    """Puts the run's folder in order, for the process that holds its lock; returns lines that say what was removed.

    config.json holds the settings and what decides how sums are rounded besides them.
    """
    run_dir = start.config.run_dir
    removed = remove_temporaries(run_dir)
    if start.path is None:
        remove_run(run_dir)
    else:
        promote(start.path, run_dir)
    write_json(run_dir / "config.json", {**start.config.to_dict(), "environment": environment})
    return [f"removed {name}, left by a save that was killed" for name in removed]


# ----------------------------------------------------------------------------------------------------------------------
# What may change


def parse_overrides(text: str) -> set[str]:
    """The names in a value of --override. Raises UserError for one that is unknown."""
    names = {name.strip().removeprefix("--").replace("-", "_") for name in text.split(",") if name.strip()}
    known = SETTINGS | {DATA, TOKENIZER}
    for name in sorted(names - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--override names {name}, which is no setting, nor {DATA} or {TOKENIZER}{hint}")
    return names


def resumed_config(config: Config, stored: Config, given: dict[str, Any], path: Path) -> Config:
    """The stored settings with the flags that were `given` on top. Raises UserError where they do not fit together."""
    try:
        merged = stored.with_settings({name: value for name, value in given.items() if name not in SELECTING})
    except ValueError as error:
        raise UserError(f"with the settings stored in {path}: {error}") from None
    run = dataclasses.replace(merged.run, checkpoint_dir=config.run.checkpoint_dir)
    if merged.run_name != config.run_name:
        run = dataclasses.replace(run, run=config.run_name)
    return dataclasses.replace(merged, run=run)


def changed_settings(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """(old, new) value of every setting that differs, by name."""
    changes = {}
    for section in SECTIONS:
        before, after = getattr(old, section), getattr(new, section)
        for f in dataclasses.fields(before):
            if getattr(before, f.name) != getattr(after, f.name) and f.name not in SELECTING:
                changes[f.name] = getattr(before, f.name), getattr(after, f.name)
    return changes


def check_changes(changes: dict[str, tuple[Any, Any]], overrides: Collection[str]) -> None:
    """Raises UserError for the first change that would bend the run and is not named in `overrides`."""
    for name, (old, new) in changes.items():
        if name in BENDING and name not in overrides:
            undo = f"leave out {flag_of(name)}" if name in SETTINGS else f"go on with the same {name}"
            differ = f"{name} is {_short(old)} in the checkpoint and {_short(new)} now"
            if name == "max_iters" and new > old > 0:
                raise UserError(
                    f"{differ}; to go on by the schedule of a run of {new:,} steps, add --override max_iters; else {undo}"
                )
            raise UserError(
                f"{differ}, which would bend the run; {undo}, start over with --overwrite, start another run (--run NAME)"
                + ("" if name in MODEL else f", or insist with --override {name}")
            )


def check_order(old: Config, new: Config, overrides: Collection[str]) -> None:
    """Raises UserError when a step takes another number of sequences: counted in steps, data and schedule would shift."""
    sizes = [config.train.batch_size * config.train.grad_accum_steps for config in (old, new)]
    if sizes[0] != sizes[1] and not {"batch_size", "grad_accum_steps"} & set(overrides):
        raise UserError(
            f"a step took {old.train.batch_size} x {old.train.grad_accum_steps} = {sizes[0]:,} sequences and would take "
            f"{new.train.batch_size} x {new.train.grad_accum_steps} = {sizes[1]:,} now, which would bend the run; keep the "
            f"product of --batch-size and --grad-accum-steps, or insist with --override batch_size"
        )


def describe_changes(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    return [f"changed: {name} {_short(old)} -> {_short(new)}" for name, (old, new) in changes.items()]


def describe_schedule_change(old: Config, new: Config, step: int, data: TokenData) -> list[str]:
    """A line where the learning rate of the next update is another than it would have been."""
    rates = [get_lr(step, c.train, count_steps(data.num_tokens("train"), c.train, c.model.block_size)) for c in (old, new)]
    return [f"changed: learning rate of the next step {rates[0]:.4g} -> {rates[1]:.4g}"] if rates[0] != rates[1] else []


def describe_environment(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line where the run goes on under other circumstances, under which sums may round differently."""
    changed = [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]
    return [f"changed surroundings, results may differ in rounding: {', '.join(changed)}"] if changed else []


def _short(value: Any) -> str:
    text = str(value) if value != "" else "none"
    return text if len(text) <= 40 else text[:12] + "..."
