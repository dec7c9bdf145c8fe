"""Optimizer state dealt out to the processes of a run, each of which keeps and steps a share of the parameters.

Stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): gradients are summed as ever, so every process holds all of them
and an update equals the one without sharding, bit for bit. Whole parameters are dealt out, since Muon and GaLore need whole
matrices. A checkpoint holds the state of all of them, as without sharding.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimizers import Optimizer, state_shapes
from support.distributed import World


def state_numbers(optimizer: Optimizer) -> dict[str, int]:
    """Numbers of optimizer state that each parameter needs, by its name."""
    return {
        name: sum(shape.numel() for shape in map(torch.Size, state_shapes(group, p).values()))
        for group in optimizer.param_groups
        for name, p in zip(group["names"], group["params"], strict=True)
    }


def deal_out(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Which of `count` processes each name goes to: the biggest first, each to the one that has least so far."""
    loads, owners = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def sharded_state_bytes(optimizer: Optimizer, count: int) -> int:
    """Bytes of optimizer state (fp32) in the fullest of `count` processes."""
    sizes = state_numbers(optimizer)
    owners = deal_out(sizes, count)
    return 4 * max(sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(count))


class ShardedOptimizer:
    """Does what `Optimizer` does; `step`, `state_dict` and `load_state_dict` have to be called by every process.

    Whole parameters travel from their owners after each step, in place and without a buffer: 4 bytes a parameter.
    """

    def __init__(self, whole: Optimizer, world: World) -> None:
        self._whole, self._world = whole, world
        self.kind = whole.kind
        self._parameters = {n: p for g in whole.param_groups for n, p in zip(g["names"], g["params"], strict=True)}
        self._owners = deal_out(state_numbers(whole), world.size)
        self._mine = {name for name, owner in self._owners.items() if owner == world.rank}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._whole.param_groups

    def set_lr(self, lr: float) -> None:
        self._whole.set_lr(lr)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._whole.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Steps this process's share, then brings all parameters up to date. The gradients of the others are given up."""
        for name, p in self._parameters.items():
            if name not in self._mine:
                p.grad = None  # what has no gradient is left alone, and gets no state
        self._whole.step()
        sent = [dist.broadcast(p.detach(), self._owners[name], async_op=True) for name, p in self._parameters.items()]
        for one in sent:
            one.wait()

    def state_dict(self) -> dict[str, Any]:
        """On the main process the state of all parameters, on its CPU; elsewhere only the own part of it."""
        saved = self._whole.state_dict()
        own = {name: saved["state"][name] for name in self._mine}
        plain = {name: {key: _stand_in(value) for key, value in values.items()} for name, values in own.items()}
        gathered = [None] * self._world.size if self._world.is_main else None
        dist.gather_object(plain, gathered)
        if not self._world.is_main:
            for tensor in (value for name in plain for value in own[name].values() if isinstance(value, Tensor)):
                dist.send(tensor.cpu(), 0)
            return saved
        for rank, values in enumerate(gathered):
            saved["state"] |= own if rank == 0 else _receive(values, rank)
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Checks all of a checkpoint's state and takes this process's share. Raises UserError like `Optimizer`'s."""
        self._whole.load_state_dict(saved, self._mine)

    def state_bytes(self) -> int:
        """Bytes of this process's share once every parameter has been stepped."""
        sizes = state_numbers(self._whole)
        return 4 * sum(sizes[name] for name in self._mine)

    def describe(self) -> list[str]:
        most = sharded_state_bytes(self._whole, self._world.size) / 1e6
        share = f"optimizer state: at most {most:,.1f} of {self._whole.state_bytes() / 1e6:,.1f} MB in a process"
        return [*self._whole.describe(), share]


def _stand_in(value: Any) -> Any:
    """What travels first: of a tensor only its shape, in a form that no plain value has, so that memory can be made ready."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _receive(plain: dict[str, dict[str, Any]], rank: int) -> dict[str, dict[str, Any]]:
    """The state of process `rank`, whose tensors arrive in the order of `plain`."""
    state = {}
    for name, values in plain.items():
        state[name] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                value = torch.empty(value.shape, dtype=value.dtype)
                dist.recv(value, rank)
            state[name][key] = value
    return state
