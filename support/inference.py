"""Opening a trained model for use, and the fast decoding path on CPUs.

Writing a token reads every weight once, so its speed is the bytes of the weights over the memory's bandwidth. Weights can be
kept in 16 or 8 bits; what is multiplied stays fp32 with float16 weights, which are then both faster and closer to fp32
than bf16 throughout, and is rounded to 8 bits a row with int8.
"""

import dataclasses
import warnings
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from checkpoint import (
    DamagedCheckpoint,
    LoadedModel,
    find_checkpoint,
    instead_of,
    is_finite,
    load_checkpoint,
    load_model,
    load_weights,
    require_size,
    stored_config,
    stored_tokenizer,
)
from config import ComputeConfig, Config, ModelConfig, flag_of
from model import GPT, RMS_EPS, Block, KVCache, rotate, visible
from support.common import UserError
from support.device import DTYPES
from support.hf_gpt2 import from_hf_state, is_hf_folder, load_hf_folder, read_hf_config, read_hf_state, read_hf_tokenizer
from support.sampling import CachedDecoder, Decoder, UncachedDecoder
from tokenizer import BPETokenizer


def open_model(config: Config, explicit: str | None) -> tuple[LoadedModel, Path]:
    """The model to use and where it lies: a Hugging Face folder, a checkpoint file or run folder, else the run's best.

    Raises UserError where there is none.
    """
    if explicit is not None and is_hf_folder(Path(explicit)):
        return load_hf_folder(Path(explicit), config.compute), Path(explicit)
    path = find_checkpoint(config, explicit)
    try:
        loaded = load_model(path, config.compute)
    except DamagedCheckpoint as error:
        remedy = instead_of(path) or f"no other one in {path.parent} reads well, so train again: {config.command('train.py')}"
        raise UserError(f"{error}; {remedy}") from None
    if loaded.tokenizer.vocab_size != loaded.config.model.vocab_size:
        sizes = f"{loaded.tokenizer.vocab_size:,} tokens, its model {loaded.config.model.vocab_size:,}"
        raise UserError(f"{path} is no whole checkpoint: its tokenizer has {sizes}; use another checkpoint")
    return loaded, path


def title(loaded: LoadedModel, path: Path) -> str:
    """The model in a few words; a Hugging Face folder knows no step."""
    step = f" (step {loaded.checkpoint['iter']:,})" if loaded.checkpoint else ""
    return f"{path}{step}, {loaded.config.model.num_params:,} parameters"


def open_decoder(
    config: Config, explicit: str | None, *, quantize: str = "none", use_cache: bool = True
) -> tuple[Decoder, BPETokenizer, str]:
    """A decoder at the best speed of its device, the tokenizer, and one line that says what they are.

    Only `--compile on` compiles its steps: that takes longer than a short text.
    """
    loaded, path = open_model(config, explicit)
    where = loaded.device.device
    if config.compute.compile == "on":
        decoder, weights = compiled_decoder(loaded, config.compute, quantize)
    else:
        model, weights = prepare(loaded, config.compute.dtype, quantize)
        cached = LeanDecoder if where.type == "cpu" and config.compute.attention == "fused" else CachedDecoder
        decoder = cached(model) if use_cache else UncachedDecoder(model)
    threads = f" ({torch.get_num_threads()} threads)" if where.type == "cpu" else ""
    return decoder, loaded.tokenizer, f"{title(loaded, path)}, {weights}, {where}{threads}"


def compiled_decoder(loaded: LoadedModel, compute: ComputeConfig, quantize: str) -> tuple[Decoder, str]:
    """A decoder of one text whose steps are compiled, and its weights in words. Raises UserError where there is none."""
    from support.compiled import CompiledDecoder, RowLinear  # which builds on this file

    if loaded.device.device.type != "cpu" or compute.attention != "fused":
        found = f"the device is {loaded.device.device}, --attention {compute.attention}"
        raise UserError(f"--compile on is for CPUs and fused attention, {found}; use --compile auto or off")
    name = "int8" if quantize == "int8" else "float16" if compute.dtype == "auto" else compute.dtype
    dtype = torch.int8 if name == "int8" else DTYPES[name]
    several = Int8Linear if name == "int8" else Float16Linear if name == "float16" and has_fbgemm() else None
    decoder = CompiledDecoder(replace_linears(loaded.model, partial(RowLinear, dtype=dtype, several=several)))
    return decoder, f"{name} weights, compiled in {decoder.compile_seconds:.0f} s"


def prepare(loaded: LoadedModel, dtype: str, quantize: str = "none") -> tuple[GPT, str]:
    """Changes the model's weights, in place, to the type that is fastest here, or asked for; returns it and that in words."""
    model, device = loaded.model, loaded.device
    if quantize == "int8":
        if device.device.type != "cpu":
            raise UserError(f"--quantize int8 is for CPUs, the device is {device.device}; leave it out or add --device cpu")
        return replace_linears(model, Int8Linear), "int8 weights"
    if device.device.type == "cpu" and has_fbgemm() and dtype in ("auto", "float16"):
        return replace_linears(model, Float16Linear), "float16 weights"
    if device.device.type == "cpu" and device.dtype == torch.float16:
        raise UserError("--dtype float16 is slow on this CPU; use --dtype bfloat16 or float32")
    return model.to(device.dtype), f"{str(device.dtype).removeprefix('torch.')} weights"


class LeanCache(KVCache):
    """KVCache in one tensor, token by token: a step takes the views of all layers at once, and memory is read in one stream.

    Numbers kept in 16 bits are widened a layer at a time into one buffer, which stays in the processor's own cache: memory is
    read half as much, and attention runs in fp32. Memory: as KVCache, and 2 * B * block_size * C numbers of 4 bytes if widened.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, device: torch.device | str, dtype: torch.dtype, widen: bool = False
    ) -> None:
        shape = (config.n_layer, batch_size, config.block_size, 2, config.n_head, config.head_dim)
        self._all = torch.zeros(shape, device=device, dtype=dtype)
        self._wide = torch.zeros(self._all[0].numel(), device=device) if widen else None
        self.k, self.v = (list(part.transpose(2, 3).unbind(0)) for part in self._all.unbind(3))
        self.documents = torch.zeros(batch_size, config.block_size, device=device, dtype=torch.int32)
        self.length = 0

    def slots(self) -> tuple[Tensor, ...]:
        """Where each layer writes the newest token's key and value: (B, 2, n_head, 1, head_dim)."""
        return self._all.select(2, self.length).unsqueeze(4).unbind(0)

    def readers(self) -> list[Callable[[], tuple[Tensor, ...]]]:
        """For each layer what gives keys and values, those in the newest slot too: (B, n_head, length + 1, head_dim) each."""
        stored = self._all.narrow(2, 0, self.length + 1)
        if self._wide is None:
            return [partial(self._pair, layer) for layer in stored.unbind(0)]
        wide = self._wide[: stored[0].numel()].view(stored.shape[1:])
        pair = self._pair(wide)

        def widened(layer: Tensor) -> tuple[Tensor, ...]:
            wide.copy_(layer)
            return pair

        return [partial(widened, layer) for layer in stored.unbind(0)]

    @staticmethod
    def _pair(layer: Tensor) -> tuple[Tensor, ...]:
        return layer.transpose(1, 3).unbind(2)  # (B, T, 2, n_head, head_dim) -> two of (B, n_head, T, head_dim)


class LeanLayer:
    """A block's parts looked up once, as functions: a step calls some two hundred of them."""

    def __init__(self, block: Block) -> None:
        attn, mlp = block.attn, block.mlp
        self.ln_1, self.c_attn, self.attn_proj = block.ln_1.forward, attn.c_attn.forward, attn.c_proj.forward
        self.ln_2, self.c_fc, self.mlp_proj = block.ln_2.forward, mlp.c_fc.forward, mlp.c_proj.forward
        self.activate, self.q_norm, self.k_norm = mlp.activate, attn.q_norm, attn.k_norm
        self.qkv_shape = (-1, 3, attn.n_head, 1, attn.head_dim)

    def qkv(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Query, key and value of one token a sequence (B, C): (B, 3, n_head, 1, head_dim)."""
        qkv = self.c_attn(self.ln_1(x)).view(self.qkv_shape)
        if self.q_norm is None and rotary is None:
            return qkv
        q, k, v = qkv.unbind(1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        return torch.stack((q.type_as(v), k.type_as(v), v), dim=1)


class LeanDecoder(CachedDecoder):
    """CachedDecoder with the step written out for one token a sequence: the same sums in fewer and smaller operations.

    At 5 ms a token, several hundred reshapings and copies of 768 numbers show, and so does what calling a module costs.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self._layers = [LeanLayer(block) for block in model.transformer.h]

    def _new_cache(self, batch_size: int) -> KVCache:
        weight = self.model.transformer.wte.weight
        dtype = weight.dtype if isinstance(self.model.lm_head, nn.Linear) else torch.float16
        return LeanCache(self.model.config, batch_size, weight.device, dtype, widen=dtype != torch.float32)

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        cache = self._cache
        x, rotary = self._embed(ids, cache.length)  # (B, C)
        documents = self.model.documents(ids[:, None], cache)
        mask = None if documents is None else visible(1, cache.length + 1, x.device, documents)
        for layer, slot, read in zip(self._layers, cache.slots(), cache.readers(), strict=True):
            qkv = layer.qkv(x, rotary)
            slot.copy_(qkv.narrow(1, 1, 2))
            keys, values = read()
            y = F.scaled_dot_product_attention(qkv.select(1, 0).type_as(keys), keys, values, mask)  # (B, n_head, 1, head_dim)
            x += layer.attn_proj(y.reshape(x.shape).type_as(x))
            x += layer.mlp_proj(layer.activate(layer.c_fc(layer.ln_2(x))))
        cache.length += 1
        return self.model.logits(self.model.transformer.ln_f(x))

    def _embed(self, ids: Tensor, position: int | Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Embedded ids (B,) -> (B, C), and the rotary tables' rows (head_dim,) if the model has them."""
        model = self.model
        x = model.transformer.wte(ids)
        if model.config.position == "learned":
            x = x + model.transformer.wpe.weight[position]
        if model.config.embedding_norm:
            x = F.rms_norm(x, (model.config.n_embd,), eps=RMS_EPS)
        rotary = (model.rotary_cos[position], model.rotary_sin[position]) if model.config.position == "rotary" else None
        return x, rotary


# ----------------------------------------------------------------------------------------------------------------------
# Linear layers with small weights


def has_fbgemm() -> bool:
    """Whether torch has FBGEMM's matrix products, which are made for few rows: x86 CPUs with AVX2."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class Float16Linear(nn.Module):
    """y = x W^T + b with W in fp16, x and the sums in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach().float(), bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.packed)


class Int8Linear(nn.Module):
    """y = x W^T + b with W in int8, one scale an output channel.

    With FBGEMM x is rounded to 8 bits as well, each row (token) with a scale of its own, so that neither the tokens of a
    context nor texts drawn side by side touch each other; elsewhere x is bf16 for one row and fp32 for several.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        weight = linear.weight.detach().float()
        rounded, scale = scaled_int8(weight)
        self.packed = _pack_int8(rounded, scale) if has_fbgemm() else None
        self.weight, self.scale = (None, None) if has_fbgemm() else (rounded, scale)
        # Without VNNI, products of two full 8-bit numbers are added in saturating 16-bit sums: x gets 7 bits there.
        self.reduce_range = not torch.cpu._is_vnni_supported()
        self._product = torch.ops.quantized.linear_dynamic.default

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            y = self._plain_product(x)
        elif x.numel() == x.size(-1):
            y = self._product(x, self.packed, self.reduce_range)
        else:
            y = self._packed_product(x)
        return y if self.bias is None else y + self.bias

    def _packed_product(self, x: Tensor) -> Tensor:
        # The kernel has one scale for all of x. Rows divided by their largest value share it without loss.
        peak = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
        return self._product(x / peak, self.packed, self.reduce_range) * peak

    def _plain_product(self, x: Tensor) -> Tensor:
        if x.numel() > x.size(-1):
            return F.linear(x, self.weight.to(x.dtype) * self.scale[:, None])
        y = torch._weight_int8pack_mm(x.view(1, -1).bfloat16(), self.weight, self.scale.bfloat16())
        return y.view(*x.shape[:-1], -1).float()


def scaled_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (out, in) as numbers from -127 to 127, and what to multiply each output channel by, (out,)."""
    scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def _pack_int8(weight: Tensor, scale: Tensor) -> torch.ScriptObject:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its quantized tensors old; this matrix product has no newer home
        zeros = torch.zeros(len(scale), dtype=torch.long)
        quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(quantized, None)


def replace_linears(model: GPT, kind: Callable[[nn.Linear], nn.Module]) -> GPT:
    """Puts a `kind` in place of every linear layer; the embeddings, and with them a tied matrix's rows, stay fp32."""
    torch.backends.quantized.engine = "fbgemm" if has_fbgemm() else torch.backends.quantized.engine
    for name, linear in [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, kind(linear))
    return model


# ----------------------------------------------------------------------------------------------------------------------
# Weights to start training from


def initial_model_config(path: Path, config: Config, given: Collection[str] = ()) -> ModelConfig:
    """The model settings that `--init-from path` brings: those of the file, with the dropout of `config`.

    A flag among `given` may shorten the context. Raises UserError where one asks for another model than the file holds.
    """
    stored = read_hf_config(path) if is_hf_folder(path) else _stored(path, config)[1].model
    model = dataclasses.replace(stored, dropout=config.model.dropout)
    for f in dataclasses.fields(ModelConfig):
        asked, found = getattr(config.model, f.name), getattr(model, f.name)
        if f.name not in given or asked == found:
            continue
        if f.name != "block_size" or asked > found:
            raise UserError(f"{path} has {f.name} {found}, not {asked}; leave out {flag_of(f.name)}, or --init-from")
        model = dataclasses.replace(model, block_size=asked)
    return model


def load_initial_weights(model: GPT, path: Path, config: Config, tokenizer: BPETokenizer) -> str:
    """Copies the weights of a checkpoint of ours or a Hugging Face GPT-2 folder into `model`; returns a line that says so.

    Of learned positions, the first `block_size` are taken. Raises UserError where the vocabulary is not that of `tokenizer`, or
    the shapes differ, and for weights that are not finite.
    """
    if is_hf_folder(path):
        source = read_hf_config(path)
        theirs = read_hf_tokenizer(path, source.vocab_size)
        state = from_hf_state(read_hf_state(path), source)
        require_size(source, state, path)
    else:
        checkpoint, stored = _stored(path, config)
        theirs, state = stored_tokenizer(path, checkpoint), checkpoint["model"]
        source = stored.model
    if theirs.sha256 != tokenizer.sha256:
        other = f"another vocabulary ({theirs.vocab_size:,} tokens, kind {theirs.kind}) than {config.tokenizer_path}"
        raise UserError(f"{path} was trained with {other}; prepare the corpus with that one, or leave --init-from out")
    if source.position == "learned" and source.block_size > model.config.block_size and "transformer.wpe.weight" in state:
        state["transformer.wpe.weight"] = state["transformer.wpe.weight"][: model.config.block_size]
    load_weights(model, state, path)
    if not is_finite(state):
        raise UserError(f"{path} holds weights that are no finite numbers; take others, or leave --init-from out")
    return f"weights from {path}, optimizer fresh"


def _stored(path: Path, config: Config) -> tuple[dict, Config]:
    file = find_checkpoint(config, str(path))
    checkpoint = load_checkpoint(file, verify=True)
    return checkpoint, stored_config(file, checkpoint)
