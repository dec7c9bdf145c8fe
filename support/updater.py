"""One optimizer update: micro-batches forward and backward, gradients summed over ranks, clipped, applied. And one evaluation.

The loss of an update is the sum over its target tokens divided once by their number, over micro-batches and ranks, so
how an update is cut into micro-batches or dealt to ranks does not change it.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from checkpoint import load_weights
from config import Config
from dataset import MICRO_STEP_STREAM, WindowReader, derived_seed, in_batches
from model import GPT
from optimizers import build_optimizer
from support.common import UserError, misfit
from support.device import Device, device_name
from support.distributed import World
from support.sharding import ShardedOptimizer

Fetch = Callable[[int], tuple[Tensor, Tensor]]  # micro-step -> inputs, targets


@dataclass(frozen=True)
class UpdateResult:
    """What an update did. `loss` is per target token, `grad_norm` that before clipping."""

    loss: float
    grad_norm: float
    applied: bool


class LossScaler:
    """Keeps fp16 gradients from vanishing: the loss is multiplied by a power of two, which shrinks after each overflow.

    Micikevicius et al. 2018, arXiv 1710.03740, section 3.2. A power of two changes no digits of a gradient.
    """

    GROW_AFTER = 2000  # updates without an overflow

    def __init__(self) -> None:
        self.scale, self.good_updates = 65_536.0, 0

    def update(self, applied: bool) -> None:
        if not applied:
            self.scale, self.good_updates = max(1.0, self.scale / 2), 0
            return
        self.good_updates += 1
        if self.good_updates == self.GROW_AFTER:
            self.scale, self.good_updates = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_updates = state["scale"], state["good_updates"]


def seed_device(device: torch.device, seed: int) -> None:
    """What torch.manual_seed does, for this device alone: that one takes over a millisecond for devices that are not there."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


class Updater:
    """The model with all that changes it: its optimizer, the loss scaler, compilation and the other ranks.

    `model` stays the plain one, for saving and sampling; its parameters are shared with the wrapped one that is run.
    """

    def __init__(self, config: Config, device: Device, world: World) -> None:
        train, shape = config.train, (config.train.batch_size, config.model.block_size)
        self.config, self.device, self.world = config, device, world
        torch.manual_seed(config.run.seed)
        self.model = model = GPT(config.model, attention=config.compute.attention).to(device.device)
        self.optimizer = build_optimizer(model, train, device.device)
        if config.compute.shard_optimizer and world.size > 1:
            self.optimizer = ShardedOptimizer(self.optimizer, world)
        self.scaler = LossScaler() if device.needs_scaler else None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._micro_steps = range(world.rank, train.grad_accum_steps, world.size)
        self._run = device.compile(model, config.compute, shape)
        self._ddp = None
        if world.size > 1:
            ids = [device.device.index] if device.device.type == "cuda" else None
            self._run = self._ddp = DistributedDataParallel(self._run, device_ids=ids, gradient_as_bucket_view=True)
            self._settle_buckets(shape)

    def _settle_buckets(self, shape: tuple[int, int]) -> None:
        """DDP regroups gradients after its first backward pass; here, so that a resumed run sums in the same order."""
        x, y = (torch.zeros(shape, dtype=torch.long, device=self.device.device) for _ in range(2))
        for _ in range(2):
            with self.device.autocast():
                _, loss = self._ddp(x, y, reduction="sum")
            loss.backward()
            self._ddp.zero_grad(set_to_none=True)

    def update(self, step: int, lr: float, fetch: Fetch, targets: int) -> UpdateResult:
        """Update number `step` with learning rate `lr`; `targets` counts the target tokens of all its micro-steps.

        With a loss or gradient that is not finite nothing is changed, and `applied` is False. Every rank has to call it.
        """
        loss_sum = self._backward(step, fetch, targets)
        norm = self._gradient_norm()
        # The one place where the CPU waits for the device.
        mine, norm = torch.stack([loss_sum, norm.to(loss_sum)]).tolist()
        # Each rank takes the norm of the same gradients, but one with other hardware may round or overflow where others do
        # not; all have to decide alike, or those that step wait for ever in a sharded optimizer's broadcasts.
        total, bad_norms = self.world.sum([mine, not math.isfinite(norm)])
        applied = math.isfinite(total) and not bad_norms
        if applied:
            self._clip(norm)
            self.optimizer.set_lr(lr)
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.update(applied)
        return UpdateResult(total / targets, norm, applied)

    def _backward(self, step: int, fetch: Fetch, targets: int) -> Tensor:
        """Adds up the gradients of this rank's micro-steps; returns the sum of their losses."""
        # DDP averages over ranks, where a sum is wanted.
        factor = self.world.size * self._scale / targets
        loss_sum = torch.zeros((), device=self.device.device)
        for micro_step in self._micro_steps:
            x, y = self._to_device(*fetch(micro_step))
            seed_device(self.device.device, derived_seed(self.config.run.seed, MICRO_STEP_STREAM, (step, micro_step)))
            # Both passes belong inside: gradients travel between ranks only after the last micro-step.
            with self._synchronised(micro_step == self._micro_steps[-1]):
                with self.device.autocast():
                    _, loss = self._run(x, y, reduction="sum")
                (loss * factor).backward()
            loss_sum += loss.detach()
        return loss_sum

    @property
    def _scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def _to_device(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.device.device.type != "cuda":
            return x.to(self.device.device), y.to(self.device.device)
        # Pinned memory is copied while the GPU still works on the micro-step before.
        return tuple(t.pin_memory().to(self.device.device, non_blocking=True) for t in (x, y))

    def _gradient_norm(self) -> Tensor:
        """Global norm of the gradients, which are brought back from the scaled loss first."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._scale != 1.0:
            for gradient in gradients:
                gradient.mul_(1.0 / self._scale)
        return torch.nn.utils.get_total_norm(gradients)

    def _clip(self, norm: float) -> None:
        limit = self.config.train.grad_clip
        if limit and norm > limit:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, limit, torch.tensor(norm, device=self.device.device))

    # ------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def mean_loss(self, reader: WindowReader, offsets: np.ndarray, batch_size: int, stop: Callable[[], bool]) -> float | None:
        """Loss per target token over the windows at `offsets`, in training precision, without dropout.

        Batches are dealt to the ranks in turn, which all have to call it. None where `stop` said so in between.
        """
        # A whole number of rounds, since DDP expects as many forward passes on each rank.
        batches = in_batches(offsets, batch_size, self.world.size)
        loss_sum = 0.0
        self.model.eval()
        try:
            for first in range(0, len(batches), self.world.size):
                if self.world.any(stop()):
                    return None
                loss_sum += self._eval_loss(*self._to_device(*reader.read(batches[first + self.world.rank])))
        finally:
            self.model.train()
        return self.world.sum([loss_sum])[0] / reader.count_targets(offsets)

    def _eval_loss(self, x: Tensor, y: Tensor) -> float:
        with self.device.autocast():
            _, loss = self._run(x, y, reduction="sum")
        return loss.item()

    # ------------------------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, Any]:
        """What decides how sums are rounded, besides the settings."""
        return {
            "torch": str(torch.__version__),
            "device": device_name(self.device.device),
            "threads": torch.get_num_threads(),
            "precision": str(self.device.dtype).removeprefix("torch."),
            "compiled": self.device.compile_seconds > 0,
            "processes": self.world.size,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps under "optimizer"; whole on the main process alone. Every rank has to call it."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict() if self.scaler else None}

    def load(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Takes weights and optimizer from a checkpoint, which `path` names in errors.

        A scaler is taken where both the checkpoint and this precision have one.
        """
        load_weights(self.model, checkpoint["model"], path)
        state = checkpoint["optimizer"]
        if (problem := misfit(state, {"optimizer": dict, "scaler": dict if state.get("scaler") else (None,)})) is not None:
            raise UserError(f"{path} holds no state of an optimizer ({problem}); use another checkpoint")
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
