"""The GPT: a decoder-only transformer, with every variation chosen by a field of `ModelConfig`.

The defaults are GPT-2's block (Radford et al. 2019): layer norm in front, learned positions, GELU. The fields allow
rotary positions (Su et al. 2021, arXiv 2104.09864), RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467), norms on queries
and keys (Henry et al. 2020, arXiv 2010.04245), squared ReLU (So et al. 2021, arXiv 2109.08668), SwiGLU (Shazeer 2020,
arXiv 2002.05202), zero-initialised residual projections (Zhang et al. 2019, arXiv 1901.09321), a soft cap on the logits
(Gemma Team 2024, arXiv 2408.00118) and attention inside documents alone (Zhao et al. 2024, arXiv 2402.13991). rotary +
rmsnorm + qk_norm + swiglu is Qwen3's architecture; rotary + rmsnorm_plain + embedding_norm + qk_norm + relu2 is NanoChat's
(which rotates the other way: swap the halves of each query and key head).

Shapes: B sequences, T tokens each, C = n_embd, V = vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from config import ModelConfig

ROTARY_BASE = 10_000.0
RMS_EPS = 1e-6
IGNORE_INDEX = -100  # targets with this value are not scored
LONGEST_BLOCKED = 1_024  # tokens; see fused_attention
HEAD_ROWS = 1_024  # tokens whose logits exist at once, and more in batches of over HEAD_PIECES times as many; see HeadLoss
HEAD_PIECES = 16  # the compiler writes each out: 32 take it twice as long as 16


class KVCache:
    """Keys and values of the tokens already seen: static buffers, filled from the left up to `length`.

    Setting `length` back forgets the tokens behind it. Memory: 2 * n_layer * B * block_size * C numbers.
    """

    def __init__(self, config: ModelConfig, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> None:
        shape = (batch_size, config.n_head, config.block_size, config.head_dim)
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.documents = torch.zeros(batch_size, config.block_size, device=device, dtype=torch.int32)
        self.length = 0

    def append_documents(self, begins: Tensor) -> Tensor:
        """Numbers of the documents of all tokens (B, S): those before, and T more of which some begin one, `begins` (B, T)."""
        end = self.length + begins.size(1)
        before = self.documents[:, self.length - 1 : self.length] if self.length else 0
        self.documents[:, self.length : end] = before + begins.cumsum(1, dtype=torch.int32)
        return self.documents[:, :end]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v (B, n_head, T, head_dim) behind `length`; returns all that is stored, in the type of `k`."""
        end = self.length + k.size(2)
        self.k[layer][:, :, self.length : end] = k
        self.v[layer][:, :, self.length : end] = v
        return self.k[layer][:, :, :end].type_as(k), self.v[layer][:, :, :end].type_as(v)


class RMSNorm(nn.Module):
    """x / rms(x) over the last dimension, taken in fp32, with a gain or without parameters."""

    def __init__(self, size: int, gain: bool) -> None:
        super().__init__()
        self.shape = (size,)
        self.weight = nn.Parameter(torch.ones(size)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.shape, eps=RMS_EPS)
        return (y if self.weight is None else y * self.weight).type_as(x)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd)
    return RMSNorm(config.n_embd, gain=config.norm == "rmsnorm")


def rotary_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, each (block_size, head_dim): position times the frequency of each pair of channels (i, i + head_dim / 2)."""
    channel = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequency = ROTARY_BASE ** (-channel / config.head_dim)
    angle = torch.outer(torch.arange(config.block_size, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of channels of x (B, n_head, T, head_dim) by the angle of its position."""
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """(T, S), True where query t, which stands at position S - T + t, may look at key s: s <= S - T + t."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(diagonal=S - T)


def visible(T: int, S: int, device: torch.device, documents: Tensor | None = None) -> Tensor:
    """The causal mask (T, S) or, with the numbers of the keys' documents (B, S), (B, 1, T, S): earlier and of the same one."""
    mask = causal_mask(T, S, device)
    return mask if documents is None else mask & (documents[:, None, -T:, None] == documents[:, None, None, :])


def reference_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, documents: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, written out: the (T, S) weights exist in full, in fp32. `documents` as in `visible`."""
    weights = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.size(-1))  # (B, n_head, T, S)
    weights = weights.masked_fill(~visible(q.size(2), k.size(2), q.device, documents), float("-inf"))
    weights = F.dropout(F.softmax(weights, dim=-1), dropout)
    return weights.type_as(v) @ v


class BlockedAttention(torch.autograd.Function):
    """The same for one block of queries after the other, each with no more keys than its last query may see.

    q, k, v: (N, T, head_dim); T is a multiple of `blocks`; documents: (N, T) numbers, or None. Made for the compiler on a CPU:
    the weights exist in the type of v alone, not yet divided by their sum, and the backward pass works from these. The gradient
    is that of Dao et al. 2022, arXiv 2205.14135, appendix B.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: int, documents: Tensor | None = None) -> Tensor:
        size, outputs, sums, weights = q.size(1) // blocks, [], [], []
        for end in range(size, q.size(1) + 1, size):
            scores = (q[:, end - size : end] @ k[:, :end].transpose(1, 2)).float() / math.sqrt(q.size(2))
            mask = causal_mask(size, end, q.device)
            if documents is not None:
                mask = mask & (documents[:, end - size : end, None] == documents[:, None, :end])
            scores = scores.masked_fill(~mask, float("-inf"))  # (N, size, end)
            weights.append(torch.exp(scores - scores.amax(-1, keepdim=True)).type_as(v))
            sums.append(weights[-1].sum(-1, keepdim=True, dtype=torch.float32))
            outputs.append(((weights[-1] @ v[:, :end]).float() / sums[-1]).type_as(v))
        ctx.save_for_backward(q, k, v, *outputs, *sums, *weights)
        return torch.cat(outputs, dim=1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        blocks = len(saved) // 3
        size, dq, dk, dv = q.size(1) // blocks, [], [], []
        for i in range(blocks):
            y, total, weights = saved[i::blocks]
            begin, end = i * size, (i + 1) * size
            dy_block = dy[:, begin:end].float()
            mean = (dy_block * y.float()).sum(-1, keepdim=True) / total
            dy_block = (dy_block / total).type_as(v)
            dweights = (dy_block @ v[:, :end].transpose(1, 2)).float()
            dscores = (weights.float() * (dweights - mean) / math.sqrt(q.size(2))).type_as(q)
            dq.append(dscores @ k[:, :end])
            dk.append(dscores.transpose(1, 2) @ q[:, begin:end])
            dv.append(weights.transpose(1, 2) @ dy_block)
        return torch.cat(dq, dim=1), _sum_of_blocks(dk), _sum_of_blocks(dv), None, None


def _sum_of_blocks(parts: list[Tensor]) -> Tensor:
    """Sum of (N, size, D), (N, 2 * size, D) ... as (N, blocks * size, D), each a prefix of the next one's rows."""
    size = parts[0].size(1)
    rows = [sum(p[:, i * size : (i + 1) * size].float() for p in parts[i:]).type_as(parts[0]) for i in range(len(parts))]
    return torch.cat(rows, dim=1)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """BlockedAttention of q, k, v (B, n_head, T, head_dim), in two blocks where T allows it. `documents` as in `visible`."""
    if documents is not None:
        documents = documents.repeat_interleave(q.size(1), 0)  # the same for every head
    y = BlockedAttention.apply(*(t.flatten(0, 1) for t in (q, k, v)), 2 if q.size(2) % 2 == 0 else 1, documents)
    return y.view(q.shape)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, documents: Tensor | None = None) -> Tensor:
    """The same in one kernel that never stores the weights (Dao et al. 2022, arXiv 2205.14135).

    Compiled for a CPU, blocks with a softmax that the compiler fuses take a third of the kernel's time, forward and backward
    (T = 256, head_dim 64, bf16); their stored weights grow with the square of T, so long contexts stay with the kernel.
    """
    T, S = q.size(2), k.size(2)
    if q.device.type == "cpu" and torch.compiler.is_compiling() and not dropout and 1 < T == S <= LONGEST_BLOCKED:
        return blocked_attention(q, k, v, documents)
    if documents is None and T in (1, S):  # a single query is the newest token and may look at everything
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible(T, S, q.device, documents), dropout_p=dropout)


ATTENTION = {"fused": fused_attention, "reference": reference_attention}


class CausalSelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, attention: str) -> None:
        super().__init__()
        self.layer, self.n_head, self.head_dim = layer, config.n_head, config.head_dim
        self.attention, self.dropout = ATTENTION[attention], config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # query, key, value
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, gain=config.norm == "rmsnorm")
            self.k_norm = RMSNorm(config.head_dim, gain=config.norm == "rmsnorm")

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: KVCache | None, documents: Tensor | None
    ) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, self.head_dim)  # (B, T, C) -> (B, T, 3, n_head, head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, n_head, T, head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        q, k = q.type_as(v), k.type_as(v)  # norms and tables are fp32, the kernel wants one type
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = self.attention(q, k, v, self.dropout if self.training else 0.0, documents)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation, self.dropout = config.activation, config.dropout
        hidden = config.mlp_hidden
        self.c_fc = nn.Linear(config.n_embd, 2 * hidden if config.activation == "swiglu" else hidden, bias=config.bias)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(self.activate(self.c_fc(x))), self.dropout, self.training)

    def activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            return F.silu(gate) * value
        if self.activation == "relu2":
            return F.relu(x).square()
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


def rows_at_once(count: int) -> int:
    """Of so many tokens, those whose logits HeadLoss has at once: 1,024 of 8,192, 2,048 of 32,768."""
    return max(HEAD_ROWS, -(-count // HEAD_PIECES))


class HeadLoss(torch.autograd.Function):
    """Sum of the cross-entropies of x (N, C) times the head's weight (V, C) against targets (N,), IGNORE_INDEX not scored.

    The logits of rows_at_once(N) rows at a time, and with `with_gradient` their gradient at once: what is in the cache is not
    read from memory again in the backward pass, and no more logits exist than that. Made for the compiler on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, with_gradient: bool) -> Tensor:
        loss, dx, dweight = x.new_zeros((), dtype=torch.float32), [], torch.zeros_like(weight)
        columns = torch.arange(weight.size(0), device=x.device, dtype=torch.int32)  # as wide as the scores, for one vector loop
        size = rows_at_once(x.size(0))
        for rows, target in zip(x.split(size), targets.unsqueeze(1).split(size), strict=True):
            logits, scored = F.linear(rows, weight), target != IGNORE_INDEX
            scores = logits.float()  # (size, V)
            log_sum = scores.logsumexp(-1, keepdim=True)
            loss = loss + torch.where(scored, log_sum - scores.gather(1, target.clamp(min=0)), 0.0).sum()
            if with_gradient:
                hit = columns == target.to(torch.int32)
                dlogits = torch.where(scored, torch.exp(scores - log_sum) - hit.float(), 0.0).type_as(logits)
                dx.append(dlogits @ weight)
                dweight = dweight + dlogits.T @ rows
        ctx.save_for_backward(torch.cat(dx) if with_gradient else x, dweight)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return dx.float() * dloss, dweight * dloss, None, None


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, attention: str) -> None:
        super().__init__()
        self.ln_1, self.attn = make_norm(config), CausalSelfAttention(config, layer, attention)
        self.ln_2, self.mlp = make_norm(config), MLP(config)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: KVCache | None, documents: Tensor | None
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotary, cache, documents)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """`attention` is "fused" or "reference": how it is computed, not what, so it is no part of the model's settings."""

    def __init__(self, config: ModelConfig, attention: str = "fused") -> None:
        super().__init__()
        self.config = config
        parts = {"wte": nn.Embedding(config.padded_vocab_size, config.n_embd)}
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        else:
            for name, table in zip(("rotary_cos", "rotary_sin"), rotary_table(config), strict=True):
                self.register_buffer(name, table, persistent=False)
        parts["h"] = nn.ModuleList(Block(config, layer, attention) for layer in range(config.n_layer))
        parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal(0, 0.02); the 2 * n_layer projections that add to the residual stream start smaller, or at zero."""
        residual_std = 0.0 if self.config.zero_init else 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, p in self.named_parameters():  # a tied matrix is named, and drawn, once
            if p.dim() == 2:
                nn.init.normal_(p, std=residual_std if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits or loss of the token ids idx (B, T); with a cache they continue the `cache.length` tokens in it.

        With targets (B, T; IGNORE_INDEX is not scored): (None, loss), fp32, a mean or a sum over the scored targets.
        Without: (logits, None), fp32, (B, T, V), or (B, 1, V) with `last_only`.
        """
        x = self.hidden(idx, cache)  # (B, T, C)
        if targets is None:
            return self.logits(x[:, -1:] if last_only else x), None
        in_pieces = x.device.type == "cpu" and torch.compiler.is_compiling() and not self.config.logit_softcap
        if in_pieces and reduction in ("sum", "mean"):
            weight = self.lm_head.weight[: self.config.vocab_size]
            loss = HeadLoss.apply(x.flatten(0, 1), weight, targets.flatten(), torch.is_grad_enabled())
            return None, loss if reduction == "sum" else loss / (targets != IGNORE_INDEX).sum()
        # Whole, although it is the biggest tensor: F.linear_cross_entropy's chunks break the compiled graph, and its products
        # took 2.7 times as long on a CPU.
        logits = self.logits(x).flatten(0, 1)  # (B * T, V)
        return None, F.cross_entropy(logits, targets.flatten(), reduction=reduction, ignore_index=IGNORE_INDEX)

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """The normalised residual stream (B, T, C) behind the last block."""
        start, T = cache.length if cache is not None else 0, idx.size(1)
        assert start + T <= self.config.block_size, f"{start} + {T} tokens do not fit into {self.config.block_size}"
        x = self.transformer.wte(idx)
        rotary = None
        if self.config.position == "learned":
            x = x + self.transformer.wpe.weight[start : start + T]
        else:
            rotary = self.rotary_cos[start : start + T], self.rotary_sin[start : start + T]
        if self.config.embedding_norm:
            x = F.rms_norm(x, (self.config.n_embd,), eps=RMS_EPS)
        x = F.dropout(x, self.config.dropout, self.training)
        documents = self.documents(idx, cache)
        for block in self.transformer.h:
            x = block(x, rotary, cache, documents)
        if cache is not None:
            cache.length = start + T
        return self.transformer.ln_f(x)

    def documents(self, idx: Tensor, cache: KVCache | None = None) -> Tensor | None:
        """Number of the document of each key (B, S): of idx (B, T) and, with a cache, what is in it; None without the mask."""
        if not self.config.document_mask:
            return None
        begins = idx == self.config.bos_id
        return begins.cumsum(1, dtype=torch.int32) if cache is None else cache.append_documents(begins)

    def logits(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V) in fp32; the columns that only pad the matrix are cut off, so they are never scored or drawn."""
        logits = self.lm_head(x)[..., : self.config.vocab_size].float()
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def num_params(self) -> int:
        """Parameters as advertised: a tied matrix once, padding rows not at all."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        matrices = 1 if self.config.tied_head else 2
        return sum(p.numel() for p in self.parameters()) - matrices * padding

    def flops_per_token(self) -> int:
        """Floating-point operations of a token's forward and backward pass at full context.

        6 per weight that multiplies, and 12 * n_layer * C * block_size for attention, causal or not (Chowdhery et al. 2022,
        arXiv 2204.02311, appendix B).
        """
        config = self.config
        blocks = sum(p.numel() for p in self.transformer.h.parameters() if p.dim() == 2)
        head = config.vocab_size * config.n_embd
        return 6 * (blocks + head) + 12 * config.n_layer * config.n_embd * config.block_size
