"""Ways to shard the optimizer state, side by side: bytes that each process keeps and time of a step, on gloo processes here.

    uv run python bench/bench_sharding.py                     2 processes of 1 thread, the small model of bench_train_step.py

whole is plain DDP; ours is `--shard-optimizer` (whole parameters dealt out, broadcast after each step); zero is torch's
ZeroRedundancyOptimizer; fsdp is torch's fully_shard, which shards weights and gradients
as well and gathers them in both passes.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_train_step import SHAPES, make_batch

from config import make_config
from model import GPT
from optimizers import adamw_groups, build_optimizer
from support.distributed import World
from support.sharding import ShardedOptimizer

WAYS = ("whole", "ours", "zero", "fsdp")


def tensor_bytes(tensors: list[Tensor]) -> int:
    """Bytes that this process holds; of a distributed tensor only its own shard."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local if t.dim())


def prepare(way: str, model: GPT, world: World) -> tuple[nn.Module, object, Callable[[], list[Tensor]]]:
    """The wrapped model, its optimizer, and a function that lists the state that this process keeps."""
    train = make_config("wikitext103").train
    if way == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world.size,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return model, optimizer, lambda: [t for s in optimizer.state.values() for t in s.values()]
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        groups = adamw_groups(dict(model.named_parameters()), train)
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True)
        return wrapped, optimizer, lambda: [t for s in optimizer.optim.state.values() for t in s.values()]
    whole = build_optimizer(model, train, "cpu")
    optimizer = ShardedOptimizer(whole, world) if way == "ours" else whole
    return wrapped, optimizer, lambda: [t for part in whole.parts for s in part.state.values() for t in s.values()]


def work(way: str, rank: int, size: int, port: int, batch: int, steps: int, answers: Queue) -> None:
    """One process: trains for some steps and answers with milliseconds a step and bytes of weights and of state."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    config = SHAPES["small"][0]
    model, optimizer, state = prepare(way, GPT(config), World(rank, size, rank, size))
    x, y = make_batch(config, batch)
    times = []
    for _ in range(steps + 2):
        t0 = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * (time.perf_counter() - t0))
    answers.put((rank, statistics.median(times[2:]), tensor_bytes(list(model.parameters())), tensor_bytes(state())))
    answers.close()
    answers.join_thread()
    dist.barrier()
    os._exit(0)  # the threads of gloo can abort an ordinary end: see _leave in support/common.py


def bench(way: str, args: argparse.Namespace) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    tasks = [(way, rank, args.processes, port, args.batch_size, args.steps, answers) for rank in range(args.processes)]
    processes = [context.Process(target=work, args=task) for task in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        print(f"{way:6} does not work here")
        return
    found = sorted(answers.get() for _ in processes)
    weights, state = (", ".join(f"{one[i] / 1e6:,.1f}" for one in found) for i in (2, 3))
    print(f"{way:6} {found[0][1]:7,.0f} ms a step; MB in each process: weights {weights}; optimizer state {state}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of each process")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    for way in args.ways:
        bench(way, args)


if __name__ == "__main__":
    main()
