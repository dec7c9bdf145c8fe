"""Decoding steps that the compiler writes, for one text on a CPU: all operations of a step in a few loops over the weights.

Called one by one, the operations of a step take a millisecond beyond the reading of the weights, which is an eighth to a third
of the whole. Compiled, a matrix product is a loop like the rest, with the weights in fp16 or int8 and everything else in fp32.
"""

import contextlib
import math
import mmap
import time
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

from config import ModelConfig
from model import GPT, KVCache
from support.common import UserError
from support.device import silence_compiler
from support.inference import LeanDecoder, scaled_int8

LARGE_PAGE = 2**21  # bytes
SHORTEST = 2  # tokens of context: the compiler makes a case of its own of each length below


class RowLinear(nn.Module):
    """y = x W^T + b for one row in a compiled step, W in `dtype` or in int8 with one scale an output channel, the rest fp32.

    A prompt's many rows take the layer that `several` makes of the same weights, or `linear` itself: they are held twice.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, several: Callable[[nn.Linear], nn.Module] | None) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        weight, self.scale = scaled_int8(weight) if dtype == torch.int8 else (weight.to(dtype), None)
        self.weight = nn.Buffer(weight, persistent=False)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.several = linear if several is None else several(linear)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self.several(x)
        y = (self.weight.float() * stored(x)).sum(dim=1)[None]  # (1, in) -> (1, out)
        y = y if self.scale is None else y * self.scale
        return y if self.bias is None else y + self.bias


def on_large_pages(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, which Linux maps in pages of 2 MB if it can, and the tensor itself elsewhere.

    A step reads hundreds of megabytes once, each 4 kB of which would want an address looked up that no table still holds.
    """
    if tensor.nbytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor
    area = mmap.mmap(-1, -(-tensor.nbytes // LARGE_PAGE) * LARGE_PAGE)
    with contextlib.suppress(OSError):  # a kernel without large pages; it is the same memory, only slower
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)


def gather_weights(model: GPT) -> None:
    """Moves the weights of all `RowLinear`s into one piece of memory, in the order in which a step reads them."""
    layers = [module for module in model.modules() if isinstance(module, RowLinear)]
    together = on_large_pages(torch.cat([layer.weight.flatten() for layer in layers]))
    for layer, part in zip(layers, together.split([layer.weight.numel() for layer in layers]), strict=True):
        layer.weight = part.view(layer.weight.shape)


def stored(x: Tensor) -> Tensor:
    """x as it is. The compiler would work it out again for each row of a weight that meets it; a strided view has it stored."""
    return x.contiguous().as_strided(x.shape, x.stride())


class CompiledCache(KVCache):
    """KVCache of one text in one tensor, (n_layer, 2, n_head, block_size, head_dim), of which a step reads a part."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        shape = (config.n_layer, 2, config.n_head, config.block_size, config.head_dim)
        self._all = on_large_pages(torch.zeros(shape, dtype=dtype))
        self.k, self.v = (list(part.unsqueeze(1).unbind(0)) for part in self._all.unbind(1))
        self.documents = torch.zeros(1, config.block_size, dtype=torch.int32)
        self.length = 0

    def past(self, begin: int) -> Tensor:
        """Keys and values of all layers from position `begin` on: (n_layer, 2, n_head, length - begin, head_dim)."""
        return self._all.narrow(3, begin, self.length - begin)

    def push(self, new: Tensor) -> None:
        """Adds one token's keys and values, (n_layer, 2, n_head, head_dim)."""
        self._all.select(3, self.length).copy_(new)
        self.length += 1


class CompiledDecoder(LeanDecoder):
    """LeanDecoder for one text whose steps are compiled; the linear layers of `model` are `RowLinear`s.

    The compiler runs when the decoder is made, `compile_seconds` says how long, and keeps its work on disk for the next time.
    Raises UserError where it does not work.
    """

    def __init__(self, model: GPT) -> None:
        silence_compiler()
        gather_weights(model)
        super().__init__(model)
        self._compiled = torch.compile(self._logits_and_pairs, fullgraph=True)
        t0 = time.perf_counter()
        try:
            self.prefill(torch.zeros(1, min(SHORTEST, self.block_size), dtype=torch.long))
            if self.block_size > SHORTEST:
                self.step(torch.zeros(1, dtype=torch.long))
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(f"torch.compile does not work here ({reason}); use --compile auto or off") from None
        self.compile_seconds = time.perf_counter() - t0

    def _new_cache(self, batch_size: int) -> KVCache:
        assert batch_size == 1, f"a compiled step is for one text, not {batch_size}"
        weight = self.model.lm_head.weight
        return CompiledCache(self.model.config, torch.float32 if weight.dtype == torch.float32 else torch.float16)

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        cache = self._cache
        documents = self.model.documents(ids[:, None], cache)
        begin = 0 if documents is None else int((documents != documents[:, -1:]).sum())  # of the newest token's document
        if cache.length - begin < SHORTEST:
            return self._read(ids[:, None])
        past = cache.past(begin)
        torch._dynamo.mark_dynamic(past, 3)  # one program for all lengths
        logits, pairs = self._compiled(ids, torch.tensor([cache.length]), past)
        cache.push(pairs)
        return logits

    def _logits_and_pairs(self, ids: Tensor, position: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (1, V) behind ids (1,) at position (1,), and their keys and values, (n_layer, 2, n_head, head_dim)."""
        x, rotary = self._embed(ids, position)  # (1, C)
        pairs = []
        for layer, (keys, values) in zip(self._layers, past.unbind(0), strict=True):
            q, k, v = layer.qkv(x, rotary)[0].unbind(0)
            x = x + layer.attn_proj(attend(q, k, v, keys, values).view(x.shape))
            x = x + layer.mlp_proj(layer.activate(layer.c_fc(layer.ln_2(x))))
            pairs.append(torch.cat((k, v), dim=1).transpose(0, 1))
        return self.model.logits(self.model.transformer.ln_f(x)), torch.stack(pairs)


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the newest token's q over its own k and v, (n_head, 1, head_dim), and those before, (n_head, T, head_dim).

    Returns (n_head, head_dim). All in fp32, whatever the type of keys and values.
    """
    q = q / math.sqrt(q.size(-1))
    past, own = (keys.float() * q).sum(dim=-1), (k * q).sum(dim=-1)  # (n_head, T), (n_head, 1)
    largest = torch.maximum(past.amax(dim=-1, keepdim=True), own)
    past, own = stored(torch.exp(past - largest)), torch.exp(own - largest)
    y = (past[:, :, None] * values.float()).sum(dim=1) + own * v.squeeze(1)
    return y / (past.sum(dim=-1, keepdim=True) + own)
