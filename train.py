"""Stage 5 of 9: train the model, losing nothing whatever is killed when.

Reads data/CORPUS/tokens/ and tokenizer.json. Writes checkpoints/RUN/: checkpoint_latest.pt, checkpoint_prev1.pt ...,
checkpoint_best.pt, config.json, metrics.jsonl. Ctrl-C, SIGTERM and a closed terminal finish the update and save.
The published 126-million-parameter recipe takes under 3 hours on an 8 GB GPU; a checkpoint holds 12 bytes per parameter.

    uv run python train.py                              start the run
    uv run python train.py --estimate                   what it will take: memory, time, disk
    uv run python train.py --resume                     go on, after an interruption or a crash
    torchrun --nproc_per_node=2 -- train.py --run two   a run dealt to two processes (`--` keeps torchrun from reading --run)
"""

import argparse
import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import Config, parse_config
from support.common import FolderLock, Progress, Terminated, UserError, explain_os_error, format_duration, run_main
from support.metrics import MetricsLog, require_tensorboard

if TYPE_CHECKING:
    from support.device import Device
    from support.distributed import StopSignals, World
    from support.start import Start
    from support.updater import UpdateResult

USES = ["run", "model", "train", "compute", "sample"]
COMPILING = ", after compiling, which takes about a minute (--compile off goes without)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on from the run's newest readable checkpoint")
    start.add_argument("--overwrite", action="store_true", help="start over, deleting the run's checkpoints and records")
    start.add_argument("--estimate", action="store_true", help="only say what the run takes in memory, time and disk")
    start.add_argument("--overfit-batch", action="store_true", help="only check that the model learns one batch by heart")
    parser.add_argument(
        "--init-from", type=Path, metavar="PATH", help="begin with the weights of a checkpoint or a Hugging Face GPT-2 folder"
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="write the metrics as TensorBoard events too, in the run's folder"
    )
    parser.add_argument(
        "--override",
        default="",
        metavar="NAME[,NAME]",
        help="with --resume: settings (or data, tokenizer) that may change although that bends the run",
    )


@dataclass
class TrainState:
    """Where a run stands: what a checkpoint stores beside weights and optimizer, and a resume takes back."""

    step: int = 0  # updates completed, skipped ones included
    train_loss: float = math.nan
    val_loss: float = math.nan
    best_val_loss: float = math.inf
    best_iter: int = 0
    last_eval_iter: int = -1
    tokens_seen: int = 0
    elapsed_s: float = 0.0
    skipped_updates: int = 0
    bad_steps_in_a_row: int = 0

    def progress(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in ("step", "train_loss", "val_loss")}

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], path: Path) -> "TrainState":
        progress = checkpoint["config"]["progress"]
        expected = {f.name: f.type for f in dataclasses.fields(cls) if f.name not in ("step", "train_loss", "val_loss")}
        wrong = {name for name, make in expected.items() if type(progress.get(name)) is not make} | (
            progress.keys() - expected.keys()
        )
        if wrong:
            raise UserError(f"{path} does not say how far the run was ({sorted(map(str, wrong))[0]}); use another checkpoint")
        losses = {name: checkpoint[name] for name in ("train_loss", "val_loss")}
        return cls(step=checkpoint["iter"], **losses, **progress)


class Trainer:
    """The training loop of one run and its book-keeping. Every rank has one; the main one prints and writes."""

    def __init__(self, start: "Start", device: "Device", world: "World", stop: "StopSignals") -> None:
        from dataset import WindowReader, count_steps, eval_windows
        from support.updater import Updater

        config, data, self.device, self.world, self.stop = start.config, start.data, device, world, stop
        self.config, self.data, self.tokenizer = config, data, start.tokenizer
        block_size = config.model.block_size
        self.train_reader = WindowReader(data, "train", block_size)
        self.val_reader = WindowReader(data, "val", block_size)
        self.eval_offsets = eval_windows(data.num_tokens("val"), block_size, config.train.eval_windows)
        self.max_iters = count_steps(data.num_tokens("train"), config.train, block_size)
        self.updater = Updater(config, device, world)
        self.state = TrainState()
        self.metrics = MetricsLog(config.run_dir / "metrics.jsonl" if world.is_main else None)
        self.progress: Progress | None = None
        self.stop_signal: int | None = None
        self.saved_step, self.saved_at = -1, time.monotonic()

    def restore(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Takes up the run where `checkpoint` left it."""
        self.updater.load(checkpoint, path)
        self.state = TrainState.from_checkpoint(checkpoint, path)
        self.saved_step = self.state.step

    def say(self, line: str) -> None:
        with self.stop.meets_lost_output():
            if self.progress is not None:
                self.progress.print(line)
            elif self.world.is_main:
                print(line, flush=True)

    # ------------------------------------------------------------------------------------------------------------------
    # The loop

    def train(self, tensorboard: bool = False) -> None:
        """Trains from where `state` stands to the end of the schedule or to a signal; both end with a checkpoint."""
        from support.device import matmul_rate

        self.metrics.cut_back(self.state.step, self.state.last_eval_iter)
        if tensorboard:
            self.metrics.mirror()
        self.peak_flops = matmul_rate(self.device) * self.world.size
        self.clock, self.interval_s, self.interval_tokens = time.monotonic(), 0.0, 0
        if self.world.is_main:
            self.progress = Progress(self.max_iters, "training", "step", initial=self.state.step)
        with self.progress or contextlib.nullcontext():
            while True:
                improved = self.evaluation_is_due() and self.evaluate()
                minutes_are_over = self.agree()
                if improved or minutes_are_over or self.save_is_due():
                    self.save(improved)
                    self.agree()  # a signal may have come meanwhile
                if self.state.step == self.max_iters or self.stop_signal is not None:
                    break
                self.step()
        self.progress = None

    def evaluation_is_due(self) -> bool:
        step = self.state.step
        due = step % self.config.train.eval_interval == 0 or step == self.max_iters
        return due and self.state.last_eval_iter != step

    def save_is_due(self) -> bool:
        step = self.state.step
        due = step % self.config.train.checkpoint_interval == 0 or step == self.max_iters or self.stop_signal is not None
        return due and self.saved_step != step

    def step(self) -> None:
        """One update."""
        from dataset import train_windows
        from optimizers import get_lr

        t0, config, step = time.monotonic(), self.config, self.state.step
        num_tokens = self.train_reader.num_tokens
        offsets = train_windows(config.run.seed, step, num_tokens, config.train, config.model.block_size)
        micro_batches = offsets.reshape(config.train.grad_accum_steps, config.train.batch_size)
        targets = self.train_reader.count_targets(offsets)
        lr = get_lr(step, config.train, self.max_iters)
        result = self.updater.update(step, lr, lambda m: self.train_reader.read(micro_batches[m]), targets)
        self.state.step += 1
        self.state.tokens_seen += targets
        self.count_skipped(result, lr)
        self.interval_s += time.monotonic() - t0
        self.interval_tokens += targets
        self.report(result, lr)

    def agree(self) -> bool:
        """All processes take up a signal that one of them got. Returns whether `checkpoint_minutes` are over."""
        from support.distributed import STOP_SIGNALS

        minutes = self.config.train.checkpoint_minutes
        over = self.world.is_main and 0 < minutes * 60 < time.monotonic() - self.saved_at
        *signals, over = self.world.sum([*(self.stop.received == signum for signum in STOP_SIGNALS), over])
        self.stop_signal = next((signum for signum, count in zip(STOP_SIGNALS, signals, strict=True) if count), None)
        return over > 0

    def count_skipped(self, result: "UpdateResult", lr: float) -> None:
        """Keeps count of updates that were not applied. Raises UserError after `max_bad_steps` of them in a row."""
        state = self.state
        if result.applied:
            state.train_loss, state.bad_steps_in_a_row = result.loss, 0
            return
        state.skipped_updates += 1
        state.bad_steps_in_a_row += 1
        where = f"step {state.step:,}, learning rate {lr:.3g}, loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
        scaler = self.updater.scaler
        self.say(f"skipped an update that is not finite: {where}" + (f", loss scale now {scaler.scale:g}" if scaler else ""))
        if state.bad_steps_in_a_row >= self.config.train.max_bad_steps:
            raise UserError(
                f"{state.bad_steps_in_a_row} updates in a row were not finite ({where}); the checkpoint of step "
                f"{self.saved_step:,} is intact: go on from it with a lower --learning-rate and --resume"
            )

    def report(self, result: "UpdateResult", lr: float) -> None:
        """Moves the bar, and writes the train record of every `log_interval`-th step."""
        rate = self.interval_tokens / self.interval_s
        note = f"loss {result.loss:.3f}, lr {lr:.2e}, norm {result.grad_norm:.2f}, {rate:,.0f} tokens/s"
        if self.progress is not None:
            with self.stop.meets_lost_output():
                self.progress.update(note=note)
        if self.state.step % self.config.train.log_interval == 0:
            mfu = rate * self.updater.model.flops_per_token() / self.peak_flops
            values = {"loss": result.loss, "lr": lr, "grad_norm": result.grad_norm, "tokens_per_s": rate, "mfu": mfu}
            self.record("train", **values, memory_bytes=self.device.peak_memory())
            self.interval_s, self.interval_tokens = 0.0, 0

    def record(self, kind: str, **values: Any) -> None:
        self.read_clock()
        state = self.state
        self.metrics.append(
            {"kind": kind, "step": state.step, "tokens": state.tokens_seen, **values, "elapsed_s": state.elapsed_s}
        )

    def read_clock(self) -> None:
        """Counts the time since the last reading; time between two processes of a run is not counted."""
        now = time.monotonic()
        self.state.elapsed_s, self.clock = self.state.elapsed_s + now - self.clock, now

    # ------------------------------------------------------------------------------------------------------------------
    # Evaluation, samples, checkpoints

    def evaluate(self) -> bool:
        """Measures the validation loss and records it, unless a signal comes. Returns whether it is the best so far."""
        train, state = self.config.train, self.state
        batch_size = min(train.eval_batch_size, len(self.eval_offsets)) or train.batch_size
        loss = self.updater.mean_loss(self.val_reader, self.eval_offsets, batch_size, lambda: self.stop.received is not None)
        if loss is None:
            return False
        state.val_loss = loss
        self.record("eval", val_loss=loss, train_loss=state.train_loss)
        self.say(f"step {state.step:,}: validation loss {loss:.4f}, perplexity {perplexity(loss):,.2f}")
        if train.sample_tokens and self.world.is_main:
            text = self.sample(train.sample_tokens)
            self.record("sample", prompt=train.sample_prompt, text=text)
            self.say(text)
        state.last_eval_iter = state.step
        improved = loss < state.best_val_loss
        self.previous_best = state.best_val_loss, state.best_iter
        if improved:
            state.best_val_loss, state.best_iter = loss, state.step
        return improved

    def sample(self, max_new_tokens: int) -> str:
        """Text that the model writes from `sample_prompt`, the same for the same step."""
        from dataset import SAMPLE_STREAM, derived_seed
        from support.sampling import generate

        tokenizer, prompt = self.tokenizer, self.config.train.sample_prompt
        ids = [tokenizer.bos_id, *(tokenizer.encode_prompt(prompt) if prompt else [])]
        seed = derived_seed(self.config.run.seed, SAMPLE_STREAM, (self.state.step, 0))
        drawn = generate(self.updater.model, ids, max_new_tokens, self.config.sample, seed=seed, stop_ids=[tokenizer.eos_id])
        return tokenizer.decode([*ids, *drawn])

    def save(self, best: bool) -> None:
        """Writes a checkpoint. One that fails is reported; the old ones, and the run, live on.

        Raises UserError where the weights are not finite.
        """
        from checkpoint import is_finite

        checkpoint = self.checkpoint()  # by every rank: each may hold a part of the optimizer's state
        if not is_finite(checkpoint["model"]):  # on every rank, as the weights are the same: they all leave, and none waits
            raise UserError(
                f"the weights of step {self.state.step:,} are not finite, so they are not saved; the checkpoint of step "
                f"{self.saved_step:,} is intact: go on from it with a lower --learning-rate and --resume"
            )
        problem = self.write(checkpoint, best) if self.world.is_main else None
        self.saved_at = time.monotonic()
        if self.world.any(problem is not None):
            self.say(f"warning: no checkpoint of step {self.state.step:,} ({problem}); training goes on")
            if best:
                self.state.best_val_loss, self.state.best_iter = self.previous_best
        else:
            self.saved_step = self.state.step

    def write(self, checkpoint: dict[str, Any], best: bool) -> str | None:
        """Returns what went wrong, None where nothing did."""
        from checkpoint import write_checkpoint

        try:
            self.metrics.sync()
            write_checkpoint(checkpoint, self.config.run_dir, self.config.train.keep_checkpoints, best)
        except UserError as error:
            return str(error)
        except OSError as error:
            return explain_os_error(error) or str(error)
        return None

    def checkpoint(self) -> dict[str, Any]:
        self.read_clock()
        state = self.state
        return {
            "iter": state.step,
            "model": dict(self.updater.model.state_dict()),
            "optimizer": self.updater.state_dict(),
            "train_loss": state.train_loss,
            "val_loss": state.val_loss,
            "config": {
                "settings": self.config.to_dict(),
                "tokenizer": self.tokenizer.to_json(),
                "data_fingerprint": self.data.fingerprint,
                "progress": state.progress(),
                "environment": self.updater.environment(),
            },
        }


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


# ----------------------------------------------------------------------------------------------------------------------
# Starting and ending


def describe_run(trainer: Trainer) -> list[str]:
    """What this run is and what it will cost, before it starts."""
    from support.memory import fullest_instant, memory_by_instant

    config, device = trainer.config, trainer.device
    tokens, train = trainer.train_reader.num_tokens, config.train
    total = trainer.max_iters * config.tokens_per_step
    per_step = f"{train.batch_size} x {train.grad_accum_steps} x {config.model.block_size} = {config.tokens_per_step:,}"
    eval_tokens = len(trainer.eval_offsets) * config.model.block_size
    # A forward pass is a third of a training step's work.
    eval_share = eval_tokens / (eval_tokens + 3 * train.eval_interval * config.tokens_per_step)
    updater, several = trainer.updater, trainer.world.size > 1
    _, memory = fullest_instant(memory_by_instant(config, updater.model, updater.optimizer, device, buckets=several))
    lines = [
        f"run {config.run_dir}, corpus {config.run.corpus}: {tokens:,} training tokens",
        f"model: {config.model.num_params:,} parameters (vocabulary padded to {config.model.padded_vocab_size:,})",
        *updater.optimizer.describe(),
        f"device: {device.line}" + (f", {trainer.world.size} processes" if several else ""),
        f"{per_step} tokens a step, {trainer.max_iters:,} steps, {total:,} tokens, {total / tokens:.2f} passes over the corpus",
        f"predicted peak of memory: {sum(memory.values()) / 1e9:.2f} GB" + (" in this process" if several else ""),
        f"evaluations take about {100 * eval_share:.0f} % of the time",
    ]
    if eval_share > 0.1:
        lines[-1] += "; raise --eval-interval or lower --eval-windows to make that less"
    return lines


def finish(trainer: Trainer) -> None:
    """The last lines: what was written, and the figures that matter."""
    from checkpoint import checkpoint_path

    config, state = trainer.config, trainer.state
    latest, best = (checkpoint_path(config.run_dir, name) for name in ("latest", "best"))
    rate, memory = state.tokens_seen / state.elapsed_s, trainer.device.peak_memory()
    if not config.train.sample_tokens:
        trainer.say("sample: " + trainer.sample(config.sample.max_new_tokens))
    trainer.say(f"wrote {latest} (step {state.step:,}) and {best} (step {state.best_iter:,})")
    trainer.say(
        f"best validation loss {state.best_val_loss:.4f} (perplexity {perplexity(state.best_val_loss):,.2f}), last "
        f"{state.val_loss:.4f}; {state.tokens_seen:,} tokens in {format_duration(state.elapsed_s)}, {rate:,.0f} tokens/s"
        + (f", peak of memory {memory / 1e9:.2f} GB" if memory else "")
        + (f"; {state.skipped_updates:,} updates skipped" if state.skipped_updates else "")
    )


def train_run(config: Config, args: argparse.Namespace, world: "World", stop: "StopSignals") -> None:
    """One process's part in a run, from opening its inputs to the last line."""
    from support.memory import explained_out_of_memory
    from support.start import check_schedule, check_start, new_run, resumed_run, tidy_folder

    if args.tensorboard:
        require_tensorboard()
    check_start(config, args)
    start = None if args.resume else new_run(config, args.init_from, args.given)
    if start is not None:
        check_schedule(start.config, start.data, world)  # before there is a folder of the run
    with FolderLock(config.run_dir, f"run {config.run_name}") if world.is_main else contextlib.nullcontext():
        check_start(config, args)  # again: another process may have held the lock
        if start is None:
            start = resumed_run(config, args)
            steps = check_schedule(start.config, start.data, world, start.checkpoint["iter"])
            if start.ended(steps) and not args.override and not args.tensorboard:  # which shows what is recorded
                longer = config.command("train.py", "--resume --max-iters N --override max_iters", launcher=world.launcher)
                if world.is_main:
                    print(f"run {config.run_dir} is complete, all {steps:,} steps of it; to train it longer: {longer}")
                return
        with explained_out_of_memory(start.config):
            trainer = make_trainer(start, world, stop, args.init_from)
            # Last, so that a run that is started over goes only when the new one can begin.
            for line in tidy_folder(start, trainer.updater.environment()) if world.is_main else []:
                trainer.say(line)
            trainer.train(args.tensorboard)
        end(trainer)


def make_trainer(start: "Start", world: "World", stop: "StopSignals", init_from: Path | None) -> Trainer:
    """The trainer, at the step where it begins, with everything about it said."""
    from support.device import resolve_device
    from support.inference import load_initial_weights
    from support.start import describe_environment

    if world.is_main and start.config.compute.compile != "off":
        print(f"starting{COMPILING}", flush=True)
    try:
        with stop.raised_at_once():  # compiling takes long, and nothing is lost
            trainer = Trainer(start, resolve_device(start.config.compute), world, stop)
    except (KeyboardInterrupt, Terminated):
        again = start.config.command("train.py", *(["--resume"] if start.checkpoint else []), launcher=world.launcher)
        if world.is_main:
            print(f"stopped before the first step; go on with: {again}", flush=True)
        raise
    if init_from is not None:
        start.notes.append(load_initial_weights(trainer.updater.model, init_from, start.config, start.tokenizer))
    if start.checkpoint is not None:
        trainer.restore(start.checkpoint, start.path)
        start.notes += describe_environment(start.checkpoint["config"]["environment"], trainer.updater.environment())
        start.checkpoint = None  # the second copy of everything is freed before the first step
    for line in [*start.notes, *describe_run(trainer)]:
        trainer.say(line)
    return trainer


def end(trainer: Trainer) -> None:
    """Ends a run, or this part of it. Raises the exception of the signal that stopped it."""
    from support.distributed import stop_exception

    step = trainer.state.step
    resume = trainer.config.command("train.py", "--resume", launcher=trainer.world.launcher)
    trainer.metrics.close()
    if trainer.stop_signal is None:
        if trainer.saved_step != step:
            raise UserError(f"step {step:,}, the last, could not be saved; make room, then: {resume}")
        if trainer.world.is_main:
            finish(trainer)
        return
    if trainer.saved_step != step:
        trainer.say(f"step {step:,} is not saved; the newest checkpoint is that of step {trainer.saved_step:,}")
    trainer.say(f"stopped at step {step:,}; go on with: {resume}")
    raise stop_exception(trainer.stop_signal)


def rehearse(config: Config, args: argparse.Namespace) -> int:
    """--estimate and --overfit-batch, which write nothing."""
    from support.estimate import estimate_run, overfit_run

    print(f"measuring{COMPILING if config.compute.compile != 'off' else ''} ...", flush=True)
    if args.overfit_batch:
        return 0 if overfit_run(config, lambda line: print(line, flush=True)) else 1
    print("\n".join(estimate_run(config)))
    if not (config.tokens_dir / "meta.json").exists():
        vocabulary = f"a vocabulary of {config.model.vocab_size:,} tokens is taken for granted"
        print(f"{config.tokens_dir} is not there yet, so {vocabulary}\nnext: {config.command('download_data.py')}")
        return 0
    print(f"next: {config.command_again('train.py', args.given)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=USES, add_arguments=add_arguments)
    if args.estimate or args.overfit_batch:
        return rehearse(config, args)
    from support.distributed import StopSignals, join_world

    with StopSignals() as stop:
        world = join_world(config.compute.device)
        train_run(config, args, world, stop)
        world.leave()
    if argv is None and world.is_main:  # else another program goes on by itself
        print(f"next: {config.command('generate.py', '--interactive')}")
    return 0


if __name__ == "__main__":
    run_main(main)
