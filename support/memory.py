"""What training keeps in memory, by a formula with every term named; and running out of it, said in one line with a way out."""

import contextlib
import math
import os
import re
from collections.abc import Iterator

import torch

from config import Config, ModelConfig
from model import GPT, LONGEST_BLOCKED, rows_at_once
from optimizers import Optimizer
from support.common import UserError
from support.device import Device

COMPILER_BYTES = 150e6  # what torch.compile leaves in a process on a CPU: its modules, graphs and compiled code

# ----------------------------------------------------------------------------------------------------------------------
# The formula
#
# Checked by bench/bench_memory.py. What it says of CPUs has been measured there. Of CUDA devices it follows from what autograd
# saves, which is the same, and these things that torch does there alone: dropout keeps its mask as bytes, attention with
# dropout stays in one kernel, and the matrix library takes a workspace of the allocator's memory.


def activation_bytes(
    config: ModelConfig, batch_size: int, dtype: torch.dtype, device_type: str, compiled: bool, attention: str = "fused"
) -> int:
    """Bytes that a forward pass keeps for the backward pass, up to the head's input.

    The residual stream is fp32; what enters and leaves matrix products has `dtype`. A compiled model computes cheap
    element-wise results again instead of keeping them.
    """
    half, C, hidden = dtype.itemsize, config.n_embd, config.mlp_hidden
    eager, gain = not compiled, config.norm == "rmsnorm"
    norm = C * (4 + half)  # a norm's input, and its output as the products read it
    if gain and eager:
        norm += C * 4  # what the gain multiplies
    heads = 4 * C * half  # query, key, value; the heads' output
    if config.qk_norm or config.position == "rotary":
        heads += 3 * C * half  # queries and keys after norm and rotation; the output once more, as it lies side by side
    if config.qk_norm and eager:
        heads += 2 * C * ((4 if half < 4 else 0) + (4 if gain else 0))  # what their norms read, and what the gains multiply
    # In front of and behind the non-linearity; SwiGLU's gate and what it lets through are two of the former.
    mlp = hidden * half * ((4 if eager else 3) if config.activation == "swiglu" else 2)
    mask = half if eager and device_type == "cpu" else 1  # bytes that dropout remembers for a number
    per_token = 2 * norm + heads + mlp + (2 * C * mask if config.dropout else 0)
    weights = config.n_head * config.block_size * weight_bytes(config, half, device_type, compiled, attention)
    if config.document_mask and attention == "fused" and (eager or device_type != "cpu"):
        per_token += config.block_size * half  # the mask, as the kernel reads it
    embedded = C * 4 if eager and (config.dropout or config.embedding_norm) else 0
    return round(batch_size * config.block_size * (config.n_layer * (per_token + weights) + norm + embedded))


def weight_bytes(config: ModelConfig, half: int, device_type: str, compiled: bool, attention: str) -> float:
    """Bytes kept for each of the block_size x block_size attention weights of a head; 0 where one kernel does it all."""
    cpu, dropout = device_type == "cpu", config.dropout > 0
    if attention == "reference":
        mask = 0 if not dropout else 1 if compiled or not cpu else 4
        product = half if half < 4 or dropout else 0  # what the product with the values reads, where that is another tensor
        return 4 + mask + product
    if not cpu:
        return 0
    if dropout:  # torch's kernel for CPUs knows none, so the weights are written out, in fp32
        return 12 if not compiled else 9 if half == 4 else 5
    if compiled and config.block_size <= LONGEST_BLOCKED:  # BlockedAttention: two blocks under the diagonal
        return half * 3 / 4
    return 0


def logits_bytes(config: ModelConfig, batch_size: int, dtype: torch.dtype, device_type: str, compiled: bool) -> int:
    """Bytes of logits, what the loss makes of them, and their gradient, as far as these exist at once."""
    rows, half = batch_size * config.block_size, dtype.itemsize
    if compiled and device_type == "cpu" and not config.logit_softcap:  # HeadLoss: of some rows at a time
        return min(rows, rows_at_once(rows)) * config.padded_vocab_size * 12
    if compiled:  # the logits, and their gradient, which is computed from them in one pass
        return rows * config.padded_vocab_size * 2 * half
    # Log-probabilities, gradients on both their sides, all fp32; with a cap its tanh as well.
    return rows * config.padded_vocab_size * (16 if config.logit_softcap else 12)


def working_bytes(model: GPT, optimizer: Optimizer) -> int:
    """Bytes that an update needs for a moment, for the one parameter on which it works."""
    largest = max((p.numel() for p in model.transformer.h.parameters()), default=0)
    head = model.lm_head.weight.numel()
    if optimizer.kind == "muon":  # momentum and update in fp32; the iteration's matrix and its products in bf16
        return 14 * largest
    if optimizer.kind == "galore":  # AdamW written out: two temporaries; the decomposition: copy, factors, workspace
        return max(8 * head, 24 * largest)
    return 0  # fused


def memory_by_instant(
    config: Config, model: GPT, optimizer: Optimizer, device: Device, buckets: bool = False
) -> dict[str, dict[str, int]]:
    """Bytes of each part that exists at each instant where training may need most; the largest sum is the predicted peak.

    On CUDA devices of tensors alone, as torch.cuda.max_memory_allocated counts them; on a CPU of the whole process.
    `buckets`: several processes, which keep the gradients' memory all the time.
    """
    train, half, kind = config.train, device.dtype, device.device.type
    numbers, compiled = sum(p.numel() for p in model.parameters()), device.compile_seconds > 0
    always = {"weights": 4 * numbers, f"optimizer ({optimizer.kind})": optimizer.state_bytes()}
    if kind == "cpu":
        always["Python and torch"] = device.process_bytes
        if compiled:
            always["compiler"] = round(COMPILER_BYTES)
    gradients = 4 * numbers
    full = {"gradients": gradients} if train.grad_accum_steps > 1 or buckets else {}
    if half != torch.float32 and not compiled:  # the compiler makes them anew instead of keeping them
        matrices = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2) + model.lm_head.weight.numel()
        full[f"weights in {str(half).removeprefix('torch.')}"] = half.itemsize * matrices
    full["activations"] = activation_bytes(config.model, train.batch_size, half, kind, compiled, config.compute.attention)
    full["logits"] = logits_bytes(config.model, train.batch_size, half, kind, compiled)
    if kind == "cpu" and not compiled:
        # Measured: holes in the heap, which keeps what is freed (keep_freed_memory), and what kernels take for a moment are
        # together about as much as the logits. Compiled, their pieces are small and the holes with them.
        full["heap"] = full["logits"]
        if config.compute.attention == "reference":  # its big temporaries, between small things that stay, leave holes as well
            shape, each = config.model, weight_bytes(config.model, half.itemsize, kind, compiled, "reference")
            full["heap"] += round(shape.n_layer * shape.n_head * train.batch_size * shape.block_size**2 * each)
    eval_batch = min(train.eval_batch_size or train.batch_size, train.eval_windows or math.inf)  # 0 windows: the whole split
    evaluated = logits_bytes(config.model, eval_batch, half, kind, compiled)
    # A compiled backward pass gives all gradients at once, which are then added to those of the micro-batches before.
    twice = 2 if compiled and train.grad_accum_steps > 1 else 1
    return {
        "as the backward pass begins": {**always, **full},
        "as the backward pass ends": {**always, "gradients": twice * gradients},
        "in the update": {**always, "gradients": gradients, "temporaries": working_bytes(model, optimizer)},
        "in an evaluation": {**always, "logits": evaluated},
    }


def fullest_instant(instants: dict[str, dict[str, int]]) -> tuple[str, dict[str, int]]:
    return max(instants.items(), key=lambda item: sum(item[1].values()))


# ----------------------------------------------------------------------------------------------------------------------
# Running out of it


@contextlib.contextmanager
def explained_out_of_memory(config: Config) -> Iterator[None]:
    """Turns a failed allocation inside into a UserError that says what was asked, what is free, and which flags need less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        what = f"out of memory: asked for {asked[1] if asked else 'more'}, free are {free_memory() / 1e6:,.0f} MB"
        raise UserError(f"{what}; {need_less(config)}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises a type of its own on GPUs only."""
    known = ("not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in known)


def need_less(config: Config) -> str:
    if config.train.batch_size > 1:
        return f"smaller micro-batches need less: {same_tokens(config, 2)}"
    return "a smaller model (--n-layer, --n-embd), a smaller --block-size or --dtype bfloat16 needs less"


def same_tokens(config: Config, factor: int) -> str:
    """Flags that cut micro-batches into `factor` parts or more and keep the tokens of a step."""
    batch, accum = config.train.batch_size, config.train.grad_accum_steps
    parts = next((n for n in range(factor, batch + 1) if batch % n == 0), batch)
    return f"--batch-size {batch // parts} --grad-accum-steps {accum * parts} keeps {config.tokens_per_step:,} tokens a step"


def free_memory() -> int:
    """Bytes that an allocation on the device in use could still take; 0 where the system does not tell."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0
