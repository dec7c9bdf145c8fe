"""One training step, side by side in one process: ours, nanoGPT's default CPU step, and the matrix-product rate of the machine.

    uv run python bench/bench_train_step.py              6 x 384, block 256, vocabulary 8,192, batch 16; then the 126M shape
    uv run python bench/bench_train_step.py --shape stand-in --optimizer adamw muon recipe      side by side
    uv run python bench/bench_train_step.py --profile    also where our step's time goes
    uv run python bench/bench_train_step.py --cpu-time   on one thread, in processor seconds: for a machine that others use too

nanoGPT's step is written anew here from what its README runs on a CPU (github.com/karpathy/nanoGPT: fp32, eager, plain AdamW,
clipped gradients), at the same shapes, in a process of its own that keeps torch's defaults. Both steps and the products take
turns, so that a slow spell of the machine hits all of them; medians are shown.
A step is zero_grad, forward, backward, clip, update of one micro-batch. FLOPs are counted as in `GPT.flops_per_token`.
"""

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import FAST_RECIPE, ModelConfig, make_config
from model import GPT
from optimizers import build_optimizer
from support.device import Device, resolve_device

Clock = Callable[[], float]

SHAPES = {
    "small": (ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=8_192), 16),
    "126M": (ModelConfig(), 2),
    "stand-in": (ModelConfig(n_layer=4, n_head=4, n_embd=256, block_size=256, vocab_size=4_096), 32),  # bench_recipes.py's
}

OPTIMIZERS = ("adamw", "muon", "galore", "recipe")


class NanoBlock(nn.Module):
    """nanoGPT's block: pre-norm, one fused query-key-value product, SDPA, exact GELU, no biases."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.n_head = c.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd, bias=False), nn.LayerNorm(c.n_embd, bias=False)
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=False)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=False)
        self.mlp_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(NanoBlock(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd, bias=False)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nano_step(config: ModelConfig, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    model = NanoGPT(config)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))

    def step() -> None:
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def serve_nano_steps(pipe: Connection, config: ModelConfig, batch: int, threads: int, clock: Clock) -> None:
    """The other process: makes one step whenever it is asked to, and answers with the seconds it took."""
    torch.set_num_threads(threads)
    step = nano_step(config, *make_batch(config, batch))
    while pipe.recv():
        t0 = clock()
        step()
        pipe.send(clock() - t0)


@contextlib.contextmanager
def nano_process(config: ModelConfig, batch: int, clock: Clock) -> Iterator[Callable[[], float]]:
    """A function that makes one step of nanoGPT's in the other process and returns its seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_nano_steps, args=(theirs, config, batch, torch.get_num_threads(), clock))
    process.start()

    def step() -> float:
        ours.send(True)
        return ours.recv()

    yield step
    ours.send(False)
    process.join()


def make_batch(config: ModelConfig, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.randint(config.vocab_size, (batch, config.block_size + 1), generator=torch.Generator().manual_seed(1))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def our_step(config: ModelConfig, device: Device, x: torch.Tensor, y: torch.Tensor, optimizer: str) -> Callable[[], None]:
    """A step with the optimizer of that name; "recipe" is the model of the fast presets with their optimizer."""
    if optimizer == "recipe":
        fields = config.__dataclass_fields__
        config = dataclasses.replace(config, **{name: value for name, value in FAST_RECIPE.items() if name in fields})
        optimizer = FAST_RECIPE["optimizer"]
    settings = make_config("wikitext103", {"optimizer": optimizer})
    model = GPT(config).to(device.device)
    optimizer = build_optimizer(model, settings.train, device.device)
    run = device.compile(model, settings.compute, tuple(x.shape))
    parameters = list(model.parameters())

    def step() -> None:
        with device.autocast():
            _, loss = run(x, y, reduction="sum")
        (loss / y.numel()).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        if norm > settings.train.grad_clip:  # as the Updater does
            torch.nn.utils.clip_grads_with_norm_(parameters, settings.train.grad_clip, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], object], device: Device, clock: Clock) -> float:
    device.synchronize()
    t0 = clock()
    step()
    device.synchronize()
    return clock() - t0


def product_timer(device: Device, clock: Clock) -> tuple[Callable[[], float], float]:
    """A function that gives the seconds of one product of 2048-cubed matrices in our precision, a median of seven in a row, and
    the FLOPs of one (on GPUs of 8192-cubed ones)."""
    size = 2048 if device.device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device.device).to(device.dtype) for _ in range(2))
    return lambda: statistics.median(timed(lambda: a @ b, device, clock) for _ in range(7)), 2 * size**3


def measure(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every step, the steps taking turns; two rounds warm up and are thrown away.

    A turn is two steps, of which the second counts: the first one finds caches that are full of another's data.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 2):
        for name, step in steps.items():
            step()
            seconds = step()
            if i >= 2:
                times[name].append(seconds)
    return times


def show_profile(step: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step()
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=60))


def bench(name: str, args: argparse.Namespace) -> None:
    config, batch = SHAPES[name]
    clock = time.process_time if args.cpu_time else time.perf_counter
    threads = 1 if args.cpu_time else args.threads
    device = resolve_device(make_config("wikitext103", {"threads": threads}).compute)
    x, y = (t.to(device.device) for t in make_batch(config, batch))
    steps = {f"ours, {kind}": our_step(config, device, x, y, kind) for kind in args.optimizer}
    rounds = max(3, args.rounds // 4) if name == "126M" else args.rounds
    product, product_flops = product_timer(device, clock)
    timers = {what: functools.partial(timed, step, device, clock) for what, step in steps.items()}
    timers["product"] = product
    if device.device.type == "cpu" and len(steps) == 1:
        with nano_process(config, batch, clock) as nano:
            times = measure({**timers, "nanoGPT": nano}, rounds)
    else:
        times = measure(timers, rounds)
    rates = [product_flops / seconds for seconds in times.pop("product")]
    report(name, config, batch, device, times, rates)
    if args.profile:
        for step in steps.values():
            show_profile(step)


def report(
    name: str, config: ModelConfig, batch: int, device: Device, times: dict[str, list[float]], rates: list[float]
) -> None:
    tokens = batch * config.block_size
    flops = tokens * GPT(config).flops_per_token()
    rate = statistics.median(rates)
    causal = flops - tokens * 6 * config.n_layer * config.n_embd * config.block_size
    print(f"\n{name}: {config.num_params:,} parameters, {batch} x {config.block_size} tokens, {device.line}")
    dtype = str(device.dtype).removeprefix("torch.")
    print(f"large matrix products, {dtype}: {rate / 1e9:,.0f} GFLOP/s ({max(rates) / 1e9:,.0f} at best)")
    for what, seconds in times.items():
        t = statistics.median(seconds)
        spread = f"{min(seconds) * 1e3:,.0f} to {max(seconds) * 1e3:,.0f}"
        share = f"{flops / t / rate:.1%} of the matrix-product rate ({causal / t / rate:.1%} counting causal attention half)"
        print(f"{what:12} {t * 1e3:8,.0f} ms a step ({spread}), {tokens / t:,.0f} tokens/s, {share}")
    first, *others = times
    for other in others:
        pairs = [b / a for a, b in zip(times[first], times[other], strict=True)]
        print(f"{other} takes {statistics.median(pairs):.2f} times as long as {first} (median of pairs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both", help="both: small and 126M")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each kind (a quarter of it for the 126M shape)")
    parser.add_argument("--threads", type=int, default=0)
    names = "|".join(OPTIMIZERS)
    parser.add_argument("--optimizer", nargs="+", default=["adamw"], choices=OPTIMIZERS, metavar="NAME", help=names)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, processor seconds instead of the wall clock")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for name in ("small", "126M") if args.shape == "both" else [args.shape]:
        bench(name, args)


if __name__ == "__main__":
    main()
