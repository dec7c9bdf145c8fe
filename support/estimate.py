"""Before a run: what it will take in memory, time and disk, and whether the model can learn one batch by heart."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config import Config
from dataset import TokenData, WindowReader, count_steps, eval_windows, train_windows
from model import GPT
from optimizers import Optimizer, build_optimizer
from support.common import format_duration
from support.device import Device, matmul_rate, resolve_device
from support.memory import explained_out_of_memory, fullest_instant, memory_by_instant
from support.sharding import sharded_state_bytes

WARMUP_STEPS = 2  # the first steps allocate memory and fill caches
LEAST_STEPS = 3
TOKENS_PER_PARAMETER = 20  # compute-optimal, Hoffmann et al. 2022, arXiv 2203.15556

# ----------------------------------------------------------------------------------------------------------------------
# Parameters


def parameters_by_part(model: GPT) -> dict[str, int]:
    """Numbers in each part of the model; "padding" are the rows that only round the vocabulary up. A tied head is no part."""
    config = model.config
    parts = {"token embedding": config.vocab_size * config.n_embd}
    if config.position == "learned":
        parts["position embedding"] = config.block_size * config.n_embd
    for name, p in model.transformer.h.named_parameters():
        part = "attention" if ".attn." in name else "MLP" if ".mlp." in name else "norms"
        parts[part] = parts.get(part, 0) + p.numel()
    final_norm = sum(p.numel() for p in model.transformer.ln_f.parameters())
    if final_norm:
        parts["norms"] = parts.get("norms", 0) + final_norm
    if not config.tied_head:
        parts["head"] = config.vocab_size * config.n_embd
    padding = sum(p.numel() for p in model.parameters()) - sum(parts.values())
    return {**parts, "padding": padding} if padding else parts


# ----------------------------------------------------------------------------------------------------------------------
# Time


@dataclass
class StepTimes:
    """Seconds of each measured micro-batch (forward and backward), update, and forward pass alone."""

    micro: list[float]
    update: list[float]
    forward: list[float]

    def run_seconds(self, config: Config, max_iters: int, windows: int, pick: Callable[[list[float]], float]) -> float:
        """Time of the whole run with the times that `pick` (min, max, median) takes."""
        train = config.train
        step = pick(self.micro) * train.grad_accum_steps + pick(self.update)
        evaluations = max_iters // train.eval_interval + 1
        return max_iters * step + evaluations * pick(self.forward) * math.ceil(windows / train.batch_size)


class Bench:
    """Model, optimizer and one batch of a run's shapes; `time_steps` runs real steps on them."""

    def __init__(self, config: Config, device: Device, batch: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(config.run.seed)
        self.config, self.device = config, device
        self.x, self.y = (t.to(device.device) for t in batch)
        self.model = GPT(config.model, attention=config.compute.attention).to(device.device)
        self.optimizer = build_optimizer(self.model, config.train, device.device)
        self.run = device.compile(self.model, config.compute, tuple(self.x.shape))

    def forward(self) -> Tensor:
        with self.device.autocast():
            return self.run(self.x, self.y, reduction="sum")[1] / self.y.numel()

    def backward(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        if self.config.train.grad_clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time_steps(self, seconds: float) -> StepTimes:
        """Measures for about `seconds`, and LEAST_STEPS steps at least, after WARMUP_STEPS that do not count."""
        times, start, measured = StepTimes([], [], []), 0.0, -WARMUP_STEPS
        self.optimizer.set_lr(self.config.train.learning_rate / 100)  # the state is real, the weights stay sane
        while measured < LEAST_STEPS or time.perf_counter() - start < seconds:
            if measured < 0 and self.config.train.grad_accum_steps > 1:
                self.backward()  # the measured peak is that of a micro-batch which finds gradients of another
            micro, update = self._timed(self.backward), self._timed(self.update)
            if measured >= 0:
                times.micro.append(micro), times.update.append(update)
            else:
                start = time.perf_counter()
            measured += 1
        # Behind the steps, as in training: one between two of them would leave the next one caches full of other data.
        times.forward += [self._timed(self._eval) for _ in range(1 + LEAST_STEPS)][1:]
        return times

    @torch.no_grad()
    def _eval(self) -> None:
        self.model.eval()
        self.forward()
        self.model.train()

    def _timed(self, work: Callable[[], object]) -> float:
        self.device.synchronize()
        t0 = time.perf_counter()
        work()
        self.device.synchronize()
        return time.perf_counter() - t0


# ----------------------------------------------------------------------------------------------------------------------
# The report of --estimate


def estimate_run(config: Config) -> list[str]:
    """What the run of these settings takes, on this machine. Token files are needed only where the schedule counts passes."""
    max_iters, windows = config.train.max_iters, config.train.eval_windows
    if max_iters == 0 or (config.tokens_dir / "meta.json").exists():
        data, block_size = TokenData.load(config), config.model.block_size
        for split in ("train", "val"):
            data.require_window(split, block_size)
        config = dataclasses.replace(config, model=data.fit(config.model))
        max_iters = count_steps(data.num_tokens("train"), config.train, block_size)
        windows = len(eval_windows(data.num_tokens("val"), block_size, windows))
    with explained_out_of_memory(config):
        return estimate(config, resolve_device(config.compute), max_iters, windows)


def estimate(config: Config, device: Device, max_iters: int, windows: int, seconds: float = 8.0) -> list[str]:
    """Lines that say what the run takes. Measures real steps on random tokens for about `seconds` after compilation.

    `max_iters` are the updates of the whole schedule, `windows` those of one evaluation.
    """
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = (config.train.batch_size, config.model.block_size + 1)
    ids = torch.randint(config.model.vocab_size, shape, generator=generator)
    bench = Bench(config, device, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    rate = matmul_rate(device)
    times = bench.time_steps(seconds)
    lines = [f"device: {device.line}", *describe_parameters(bench.model), *bench.optimizer.describe()]
    lines += describe_memory(memory_by_instant(config, bench.model, bench.optimizer, device), device)
    if config.compute.shard_optimizer:
        lines.append(describe_sharding(config, bench.model, bench.optimizer, device))
    lines += describe_work(config, bench.model, max_iters)
    lines += describe_time(config, bench.model, times, rate, max_iters, windows)
    return [*lines, describe_disk(config, bench.model, bench.optimizer, max_iters)]


def describe_parameters(model: GPT) -> list[str]:
    parts = parameters_by_part(model)
    shown = ", ".join(f"{name} {count:,}" for name, count in parts.items() if name != "padding")
    padding = f"; {parts['padding']:,} more pad the vocabulary" if "padding" in parts else ""
    return [f"parameters: {model.num_params():,} = {shown}{padding}"]


def describe_memory(instants: dict[str, dict[str, int]], device: Device) -> list[str]:
    instant, parts = fullest_instant(instants)
    shown = ", ".join(f"{name} {count / 1e6:,.0f}" for name, count in parts.items() if count)
    lines = [f"memory in MB {instant}: {shown}", f"predicted peak: {sum(parts.values()) / 1e9:.2f} GB"]
    if device.peak_memory():
        lines[-1] += f", measured {device.peak_memory() / 1e9:.2f} GB"
    return lines


def describe_sharding(config: Config, model: GPT, optimizer: Optimizer, device: Device) -> str:
    """How many processes a run will have is torchrun's matter, so the peak is shown for several numbers of them."""
    _, parts = fullest_instant(memory_by_instant(config, model, optimizer, device, buckets=True))
    rest = sum(parts.values()) - optimizer.state_bytes()
    shown = [f"{(rest + sharded_state_bytes(optimizer, count)) / 1e9:.2f} GB with {count}" for count in (2, 4, 8)]
    return f"predicted peak of each process, optimizer state sharded: {', '.join(shown)}"


def describe_work(config: Config, model: GPT, max_iters: int) -> list[str]:
    train, tokens = config.train, max_iters * config.tokens_per_step
    product = f"{train.batch_size} x {train.grad_accum_steps} x {config.model.block_size}"
    optimal = TOKENS_PER_PARAMETER * model.num_params()
    return [
        f"work: {model.flops_per_token() / 1e6:,.0f} MFLOP a token, {product} = {config.tokens_per_step:,} tokens a step, "
        f"{max_iters:,} steps, {tokens:,} tokens",
        f"that is {tokens / model.num_params():,.2f} tokens per parameter; {TOKENS_PER_PARAMETER} (Chinchilla) would be "
        f"{optimal:,} tokens, {optimal / tokens:,.1f} times as many",
    ]


def describe_time(config: Config, model: GPT, times: StepTimes, rate: float, max_iters: int, windows: int) -> list[str]:
    accum = config.train.grad_accum_steps
    step = statistics.median(times.micro) * accum + statistics.median(times.update)
    tokens_per_s = config.tokens_per_step / step
    mfu = tokens_per_s * model.flops_per_token() / rate
    fastest, slowest = (times.run_seconds(config, max_iters, windows, pick) for pick in (min, max))
    return [
        f"speed: {tokens_per_s:,.0f} tokens/s, {step:.3g} s a step ({len(times.micro)} measured), {mfu:.0%} of the "
        f"{rate / 1e9:,.0f} GFLOP/s of a large matrix product here",
        f"the whole run: {format_duration(fastest)} to {format_duration(slowest)}, evaluations included",
    ]


def describe_disk(config: Config, model: GPT, optimizer: Optimizer, max_iters: int) -> str:
    """What a finished run keeps (latest, older ones, and best, which may be one of these) and what it needs while it saves."""
    size, train = 4 * sum(p.numel() for p in model.parameters()) + optimizer.state_bytes(), config.train
    saves = 1 + math.ceil(max_iters / train.checkpoint_interval)
    kept = min(1 + train.keep_checkpoints, saves)
    held, full = kept * size / 1e9, (kept + 2) * size / 1e9
    return (
        f"disk: {size / 1e6:,.1f} MB a checkpoint, {held:.2f} GB for the {kept} that a run keeps (one more where none of these "
        f"is the best), {full:.2f} GB at most while it saves, in {config.run_dir}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The exercise of --overfit-batch

OVERFITTED = 0.1  # loss per token below which a batch counts as learned by heart
OVERFIT_LR, OVERFIT_WARMUP = 1e-3, 20


def overfit_run(config: Config, say: Callable[[str], None]) -> bool:
    """The exercise on the first micro-batch of the run's own data. Returns whether it was learned."""
    data, block_size = TokenData.load(config), config.model.block_size
    data.require_window("train", block_size)
    config = dataclasses.replace(config, model=data.fit(config.model))
    offsets = train_windows(config.run.seed, 0, data.num_tokens("train"), config.train, block_size)
    batch = WindowReader(data, "train", block_size).read(offsets[: config.train.batch_size])
    with explained_out_of_memory(config):
        return overfit_batch(config, resolve_device(config.compute), batch, say)


def overfit_settings(config: Config) -> Config:
    """Plain AdamW without decay or dropout: what is tested are model, gradients and device, not the recipe."""
    train = dataclasses.replace(config.train, optimizer="adamw", initial_lr=0.0, learning_rate=OVERFIT_LR, weight_decay=0.0)
    return dataclasses.replace(config, train=train, model=dataclasses.replace(config.model, dropout=0.0))


def overfit_batch(
    config: Config, device: Device, batch: tuple[Tensor, Tensor], say: Callable[[str], None], max_steps: int = 400
) -> bool:
    """Repeats one batch (x, y) until its loss is below OVERFITTED or `max_steps` are done; returns whether it got there."""
    bench = Bench(overfit_settings(config), device, batch)
    say(f"one batch of {batch[0].numel():,} tokens again and again, AdamW at {OVERFIT_LR:g}; {device.line}")
    for step in range(max_steps + 1):
        bench.optimizer.set_lr(OVERFIT_LR * min(1.0, (step + 1) / OVERFIT_WARMUP))
        loss = bench.backward().item()
        done = loss < OVERFITTED or not math.isfinite(loss) or step == max_steps
        if step % 20 == 0 or done:
            say(f"step {step}: loss {loss:.4f}")
        if done:
            break
        bench.update()
    verdict = "passed" if loss < OVERFITTED else "FAILED"
    say(f"{verdict}: loss {loss:.4f} after {step} steps on one batch (below {OVERFITTED:g} is learned by heart)")
    return loss < OVERFITTED
