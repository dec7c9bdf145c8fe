"""Learning-rate schedule and optimizers: which parameters get which update, and a state that survives a resume.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) orthogonalises the momentum of each hidden matrix; its update is
scaled to AdamW's size (Liu et al. 2025, arXiv 2502.16982), so both may share a learning rate. GaLore (Zhao et al. 2024,
arXiv 2403.03507) keeps AdamW's moments of each hidden matrix in a low-rank space that follows the gradient.
Embeddings, head, norms and biases are AdamW's under every optimizer.
"""

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig
from model import GPT
from support.common import UserError, misfit

FUSED_DEVICES = ("cpu", "cuda", "mps")

# ----------------------------------------------------------------------------------------------------------------------
# Schedule


def warmup_steps(config: TrainConfig, max_iters: int) -> int:
    return round(config.warmup_ratio * max_iters) if config.warmup_ratio else config.warmup_iters


def get_lr(step: int, config: TrainConfig, max_iters: int) -> float:
    """Learning rate of update `step`, counted from 0, in a schedule of `max_iters` updates.

    Warm-up is peak * (step + 1) / warm-up, or, where initial_lr is set, a line from there that meets the peak at its end.
    Then a cosine down to min_lr_ratio * peak at max_iters (Loshchilov & Hutter 2017, arXiv 1608.03983), or with "wsd" the
    peak until the last decay_ratio of all steps and a line down (Hägele et al. 2024, arXiv 2405.18392).
    """
    peak, warmup = config.learning_rate, warmup_steps(config, max_iters)
    low = config.min_lr_ratio * peak
    if step < warmup:
        if config.initial_lr:
            return config.initial_lr + step * (peak - config.initial_lr) / warmup
        return peak * (step + 1) / warmup
    wsd = config.lr_schedule == "wsd"
    start = max(warmup, max_iters - round(config.decay_ratio * max_iters)) if wsd else warmup
    progress = min(1.0, max(0, step - start) / max(1, max_iters - start))
    share = 1.0 - progress if wsd else 0.5 * (1.0 + math.cos(math.pi * progress))
    return low + share * (peak - low)


# ----------------------------------------------------------------------------------------------------------------------
# Groups


def is_hidden_matrix(name: str, p: Tensor) -> bool:
    """The 2-D weights inside the blocks: what Muon and GaLore work on."""
    return p.dim() == 2 and name.startswith("transformer.h.")


def make_group(name: str, named: Iterable[tuple[str, Tensor]], **settings: Any) -> dict[str, Any]:
    named = list(named)
    return {"name": name, "names": [n for n, _ in named], "params": [p for _, p in named], "lr_ratio": 1.0, **settings}


def adamw_groups(named: dict[str, Tensor], config: TrainConfig) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, unless decay_all; groups without a parameter are left out."""
    matrices = [(n, p) for n, p in named.items() if p.dim() >= 2]
    vectors = [(n, p) for n, p in named.items() if p.dim() < 2]
    groups = [
        make_group("matrices", matrices, weight_decay=config.weight_decay),
        make_group("vectors", vectors, weight_decay=config.weight_decay if config.decay_all else 0.0),
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: GPT, config: TrainConfig, device: torch.device | str) -> "Optimizer":
    """The optimizer named by the settings, for the parameters of `model` (not compiled, so that names are plain)."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    fused = torch.device(device).type in FUSED_DEVICES
    adamw = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.optimizer == "adamw":
        return Optimizer("adamw", [torch.optim.AdamW(adamw_groups(named, config), **adamw, fused=fused)])
    hidden = {n: p for n, p in named.items() if is_hidden_matrix(n, p)}
    rest = {n: p for n, p in named.items() if n not in hidden}
    if config.optimizer == "galore":
        group = make_group("hidden matrices", hidden.items(), weight_decay=config.weight_decay)
        group |= {"rank": config.galore_rank, "update_gap": config.galore_update_gap, "scale": config.galore_scale}
        return Optimizer("galore", [GaLoreAdamW([group, *adamw_groups(rest, config)], **adamw)])
    ratio = (config.muon_learning_rate or config.learning_rate) / config.learning_rate
    muon = torch.optim.Muon(
        [make_group("hidden matrices", hidden.items(), lr_ratio=ratio)],
        lr=config.learning_rate * ratio,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return Optimizer("muon", [muon, torch.optim.AdamW(adamw_groups(rest, config), **adamw, fused=fused)])


class Optimizer:
    """One or several torch optimizers that step together.

    Their state is kept by parameter name, as tensors and plain numbers, so it loads with weights_only=True and a resume
    that would hand a parameter another one's moments is refused.
    """

    def __init__(self, kind: str, parts: list[torch.optim.Optimizer]) -> None:
        self.kind, self.parts = kind, parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def set_lr(self, lr: float) -> None:
        """Sets AdamW's learning rate; Muon's keeps its ratio to it."""
        for group in self.param_groups:
            group["lr"] = lr * group["lr_ratio"]

    def state_dict(self) -> dict[str, Any]:
        state = {}
        for part in self.parts:
            for group in part.param_groups:
                for name, p in zip(group["names"], group["params"], strict=True):
                    state[name] = {key: _plain(key, value) for key, value in part.state.get(p, {}).items()}
        return {
            "kind": self.kind,
            "groups": {group["name"]: list(group["names"]) for group in self.param_groups},
            "state": state,
        }

    def load_state_dict(self, saved: dict[str, Any], names: Collection[str] | None = None) -> None:
        """Takes the saved state of all parameters or, with `names`, of these; all of it is checked.

        Raises UserError where it is none, or belongs to another optimizer, other groups or other shapes.
        """
        if (problem := misfit(saved, {"kind": str, "groups": {str: [str]}, "state": {str: {str: object}}})) is not None:
            raise UserError(f"the checkpoint's optimizer state is damaged ({problem}); go on from another checkpoint")
        if saved["kind"] != self.kind:
            raise UserError(
                f"the checkpoint was trained with --optimizer {saved['kind']}, not {self.kind}; go on with the same"
            )
        groups = {group["name"]: list(group["names"]) for group in self.param_groups}
        for name in {**groups, **saved["groups"]}:
            if groups.get(name) != saved["groups"].get(name):
                raise UserError(f"the checkpoint's optimizer group {name!r} holds other parameters than this model's")
        for part in self.parts:
            for group in part.param_groups:
                for name, p in zip(group["names"], group["params"], strict=True):
                    values = saved["state"].get(name, {})
                    self._check_one(group, name, p, values)
                    if values and (names is None or name in names):
                        self._load_one(part, p, values)

    @staticmethod
    def _check_one(group: dict[str, Any], name: str, p: Tensor, values: dict[str, Any]) -> None:
        expected = state_shapes(group, p)
        makes = {key: int if key in ("step", "failed") else Tensor for key in values}
        kept = values.keys() - {"failed"}  # a count of GaLore's, which stands alone while there is no basis
        if misfit(values, makes) or (kept and kept - {"step"} != expected.keys()):
            raise UserError(f"the checkpoint's optimizer state of {name} is damaged; go on from another checkpoint")
        for key, value in values.items():
            if isinstance(value, Tensor) and tuple(value.shape) != expected[key]:
                found = f"{tuple(value.shape)}, expected {expected[key]}"
                raise UserError(
                    f"the checkpoint's optimizer state {key} of {name} has shape {found}; was --galore-rank changed?"
                )

    @staticmethod
    def _load_one(part: torch.optim.Optimizer, p: Tensor, values: dict[str, Any]) -> None:
        state = {key: value.to(p.device, copy=True) if isinstance(value, Tensor) else value for key, value in values.items()}
        if isinstance(part, torch.optim.AdamW) and "step" in state:
            on_device = p.device if part.defaults["fused"] else "cpu"
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=on_device)
        part.state[p] = state

    def state_bytes(self) -> int:
        """Bytes of optimizer state once every parameter has been stepped (fp32)."""
        groups = self.param_groups
        return sum(4 * math.prod(s) for g in groups for p in g["params"] for s in state_shapes(g, p).values())

    def describe(self) -> list[str]:
        """One line per group, and for GaLore what it saves."""
        lines = []
        for part in self.parts:
            for group in part.param_groups:
                count = sum(p.numel() for p in group["params"])
                what = "GaLore AdamW" if "rank" in group else "Muon" if isinstance(part, torch.optim.Muon) else "AdamW"
                peak = f"learning rate x {group['lr_ratio']:g}, " if group["lr_ratio"] != 1 else ""
                decay = f"weight decay {group['weight_decay']:g}"
                lines.append(f"{what}: {group['name']}, {len(group['params'])} tensors, {count:,} numbers, {peak}{decay}")
        return lines + (self._describe_saving() if self.kind == "galore" else [])

    def _describe_saving(self) -> list[str]:
        ours = self.state_bytes() / 1e6
        adamw = sum(8 * p.numel() for group in self.param_groups for p in group["params"]) / 1e6
        line = f"GaLore: {ours:,.1f} MB of optimizer state, AdamW would keep {adamw:,.1f} MB"
        if ours >= adamw:
            return [f"{line}: at this rank AdamW is smaller, and updates in full rank (--optimizer adamw)"]
        return [f"{line}; where that fits into memory, AdamW learns at least as well per step (--optimizer adamw)"]


def _plain(key: str, value: Any) -> Any:
    """Step counters, which torch keeps as tensors, as int; other tensors as they are."""
    return int(value) if key == "step" else value


def state_shapes(group: dict[str, Any], p: Tensor) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that a group's optimizer keeps for the parameter `p`."""
    if "rank" in group:
        low, basis = low_rank_shapes(p.shape, group["rank"])
        return {"exp_avg": low, "exp_avg_sq": low, "basis": basis}
    shape = tuple(p.shape)
    return {"momentum_buffer": shape} if "momentum" in group else {"exp_avg": shape, "exp_avg_sq": shape}


# ----------------------------------------------------------------------------------------------------------------------
# GaLore


def low_rank_shapes(shape: torch.Size, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of a projected gradient and of the basis that projects it: the smaller side of `shape` becomes the rank."""
    rows, columns = shape
    rank = min(rank, rows, columns)
    return ((rows, rank), (rank, columns)) if rows >= columns else ((rank, columns), (rows, rank))


def project(grad: Tensor, basis: Tensor) -> Tensor:
    """Into the low-rank space: (rows, columns) -> (rows, rank) or, for a wide matrix, (rank, columns)."""
    rows, columns = grad.shape
    return grad @ basis.T if rows >= columns else basis.T @ grad


def project_back(low: Tensor, basis: Tensor, shape: torch.Size) -> Tensor:
    rows, columns = shape
    return low @ basis if rows >= columns else basis @ low


def singular_basis(grad: Tensor, rank: int) -> Tensor | None:
    """The leading singular vectors of the smaller side, in fp32; None where the decomposition fails or is not finite."""
    rows, columns = grad.shape
    try:
        u, _, vh = torch.linalg.svd(grad.float(), full_matrices=False)
    except torch.linalg.LinAlgError:
        return None
    basis = (vh[:rank] if rows >= columns else u[:, :rank]).contiguous()
    return basis if bool(basis.isfinite().all()) else None


class GaLoreAdamW(torch.optim.Optimizer):
    """AdamW; in groups with a `rank`, its moments live in the space of the gradient's leading singular vectors.

    After Zhao et al. 2024, algorithm 2: a new basis every `update_gap` steps, the update scaled by `scale` on its way back.
    eps is added before the bias correction, and the decay is taken after the update. A basis that cannot be computed leaves
    the old one in place (no update at all while there is none); state "failed" counts these.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group)

    def _update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad, projected = p.grad, "rank" in group
        if projected:
            self._refresh_basis(grad, state, group)
            if "basis" not in state:
                return
            grad = project(grad.float(), state["basis"])
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
        if projected:
            update = project_back(update, state["basis"], p.shape).mul_(group["scale"])
        correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        p.add_(update, alpha=-group["lr"] * correction)
        p.mul_(1 - group["lr"] * group["weight_decay"])

    @staticmethod
    def _refresh_basis(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "basis" in state and state["step"] % group["update_gap"] != 0:
            return
        basis = singular_basis(grad, group["rank"])
        if basis is None:
            state["failed"] = state.get("failed", 0) + 1
        else:
            state["basis"] = basis
