"""Weights in Hugging Face's GPT-2 layout, read and written, and the bare safetensors file under it.

A folder holds `config.json`, the weights (`model.safetensors`, in one piece or several, or `pytorch_model.bin`) and a tokenizer
(`tokenizer.json`, or `vocab.json` with `merges.txt`). The layout differs from ours in three points: the four matrices of a
block are stored transposed (its Conv1D), every linear layer has a bias, and there are no padding rows.
"""

import dataclasses
import json
import struct
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from checkpoint import LoadedModel, load_weights, require_size
from config import GPT2_VOCAB_SIZE, ComputeConfig, Config, ModelConfig
from model import GPT
from support.common import UserError, misfit
from support.device import resolve_device
from tokenizer import BPETokenizer

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}  # ours: theirs
LAYER_NORM_EPS = 1e-5

# ----------------------------------------------------------------------------------------------------------------------
# The safetensors file: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, the tensors' bytes.

SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, by name. Raises UserError where it is missing, cut off or no such file."""
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > 100_000_000:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
            start = 8 + size
            tensors = {}
            for name, entry in header.items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    file.seek(start + first)
                    tensors[name] = _tensor_from(file.read(last - first), entry)
            return tensors
    except FileNotFoundError:
        raise UserError(f"{path} is missing; fetch the folder again, or check the path") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        AttributeError,
        RecursionError,
        OverflowError,
        struct.error,
    ) as error:
        raise UserError(f"{path} is no whole safetensors file ({error}); fetch it again") from None


def _tensor_from(data: bytes, entry: dict[str, Any]) -> Tensor:
    dtype, shape = SAFETENSORS_TYPES[entry["dtype"]], entry["shape"]
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def write_safetensors(file: IO[bytes], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes the tensors in the given order; `metadata` is text for people ("format": "pt" is what transformers expects)."""
    names = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # readers map the file: the data starts at a multiple of 8
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


# ----------------------------------------------------------------------------------------------------------------------
# Settings


HF_DEFAULTS = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "tie_word_embeddings": True,
    "activation_function": "gelu_new",
    "vocab_size": GPT2_VOCAB_SIZE,
}


def is_hf_folder(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").exists() and not any(path.glob("checkpoint_*.pt"))


def _read_folder_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {path.parent} is no Hugging Face model folder") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); fetch the folder again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; fetch the folder again")
    return value


def read_hf_config(folder: Path) -> ModelConfig:
    """The settings of a GPT-2 folder. Raises UserError, naming the field, where it is another architecture."""
    values = {**HF_DEFAULTS, **_read_folder_json(folder / "config.json")}
    kind = values.get("model_type")
    if kind != "gpt2":
        raise UserError(f"{folder} holds a model of type {kind!r}; only 'gpt2' can be read")
    if (problem := misfit(values, {name: type(value) for name, value in HF_DEFAULTS.items()})) is not None:
        raise UserError(f"{folder / 'config.json'} is damaged ({problem}); fetch the folder again")
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    activation, n_embd = values["activation_function"], values["n_embd"]
    unusual = {
        "activation_function": activation not in activations,
        "n_inner": values.get("n_inner") not in (None, 4 * n_embd),
        "layer_norm_epsilon": values.get("layer_norm_epsilon", LAYER_NORM_EPS) != LAYER_NORM_EPS,
        "scale_attn_weights": not values.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": values.get("scale_attn_by_inverse_layer_idx", False),
    }
    for name in (name for name, is_unusual in unusual.items() if is_unusual):
        raise UserError(f"{folder / 'config.json'}: {name} is {values.get(name)!r}, which this model does not have")
    try:
        return ModelConfig(
            n_layer=values["n_layer"],
            n_head=values["n_head"],
            n_embd=n_embd,
            block_size=values["n_positions"],
            dropout=float(values["resid_pdrop"]),
            bias=True,
            tied_head=values["tie_word_embeddings"],
            activation=activations[activation],
            vocab_size=values["vocab_size"],
        )
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None


def not_gpt2(config: ModelConfig) -> list[str]:
    """What keeps a model from being a GPT-2: `field=value` for each setting that GPT-2 has no counterpart of."""
    wanted = {"position": "learned", "norm": "layernorm", "qk_norm": False, "embedding_norm": False, "logit_softcap": 0.0}
    other = [f"{name}={getattr(config, name)}" for name, value in wanted.items() if getattr(config, name) != value]
    return other + ([] if config.activation in ACTIVATIONS else [f"activation={config.activation}"])


def to_hf_config(config: ModelConfig, bos_id: int, eos_id: int) -> dict[str, Any]:
    """`config.json` of the same model as a GPT-2."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": None,
        "activation_function": ACTIVATIONS[config.activation],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": LAYER_NORM_EPS,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "use_cache": True,
        "torch_dtype": "float32",
    }


# ----------------------------------------------------------------------------------------------------------------------
# Weights


def to_hf_state(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict in GPT-2's layout: matrices transposed, absent biases zero, padding rows off, a tied head left out."""
    hf = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tied_head:
            continue
        if name in ("transformer.wte.weight", "lm_head.weight"):
            tensor = tensor[: config.vocab_size]
        is_conv1d = name.endswith(CONV1D)
        hf[name] = tensor.t().contiguous() if is_conv1d else tensor
        if is_conv1d and not config.bias:
            hf[name.removesuffix("weight") + "bias"] = torch.zeros(tensor.shape[0], dtype=tensor.dtype)
    return hf


def from_hf_state(hf: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse, fp32, for a model with biases; the rows that pad the vocabulary are zero."""
    prefix = "" if any(name.startswith("transformer.") for name in hf) else "transformer."  # OpenAI's own file has none
    state = {}
    for name, tensor in hf.items():
        name = name if name.startswith("lm_head.") else prefix + name
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask, which old files carry along
        if tensor.dim() not in (1, 2) or tensor.numel() > config.num_params:  # a few bytes can claim to be a vast tensor
            raise UserError(f"the weight {name} of shape {tuple(tensor.shape)} is none of this model; fetch the folder again")
        tensor = tensor.float()
        if name in ("transformer.wte.weight", "lm_head.weight"):
            padding = config.padded_vocab_size - tensor.shape[0]
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, max(0, padding)))
        state[name] = tensor.t().contiguous() if name.endswith(CONV1D) else tensor
    if config.tied_head:
        state["lm_head.weight"] = state.get("transformer.wte.weight", torch.empty(0))
    return state


def read_hf_state(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, whichever way they are stored, under the names in the file."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return read_safetensors(folder / "model.safetensors")
    if index.exists():
        files = sorted(set(_read_folder_json(index).get("weight_map", {}).values()))
        return {name: tensor for file in files for name, tensor in read_safetensors(folder / file).items()}
    binary = folder / "pytorch_model.bin"
    if not binary.exists():
        raise UserError(f"{folder} has neither model.safetensors nor pytorch_model.bin; fetch the weights")
    try:
        state = torch.load(binary, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"{binary} cannot be read ({type(error).__name__}); fetch it again") from None
    if (problem := misfit(state, {str: Tensor})) is not None:
        raise UserError(f"{binary} holds no table of weights ({problem}); fetch it again")
    return state


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer, and the whole folder


def read_hf_tokenizer(folder: Path, vocab_size: int) -> BPETokenizer:
    """The folder's tokenizer: one of ours that was exported, or GPT-2's however it is stored. Raises UserError."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = BPETokenizer.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        tokenizer = _gpt2_tokenizer(folder)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model {vocab_size:,}")
    return tokenizer


def _gpt2_tokenizer(folder: Path) -> BPETokenizer:
    try:
        return BPETokenizer.from_gpt2(*_gpt2_tables(folder))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder} has a tokenizer that is neither GPT-2's nor one exported here ({error})") from None


def _gpt2_tables(folder: Path) -> tuple[str, str]:
    """The texts of `vocab.bpe` and `encoder.json`, as OpenAI published them, from either way a folder holds them."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.exists() and merges.exists():
        return merges.read_text(encoding="utf-8"), vocab.read_text(encoding="utf-8")
    if not (folder / "tokenizer.json").exists():
        raise UserError(f"{folder} has no tokenizer; add tokenizer.json, or vocab.json and merges.txt")
    model = _read_folder_json(folder / "tokenizer.json")["model"]
    # A merge is a pair in newer files and "left right" in older ones.
    lines = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    return "\n".join(["#version: 0.2", *lines]), json.dumps(model["vocab"])


def load_hf_folder(folder: Path, compute: ComputeConfig) -> LoadedModel:
    """A GPT-2 folder as a model of ours, on the device that `compute` asks for, in evaluation mode."""
    model_config = read_hf_config(folder)
    tokenizer = read_hf_tokenizer(folder, model_config.vocab_size)
    device = resolve_device(compute)
    state = from_hf_state(read_hf_state(folder), model_config)
    require_size(model_config, state, folder)
    model = GPT(model_config, attention=compute.attention)
    load_weights(model, state, folder)
    config = dataclasses.replace(Config(), model=model_config)
    return LoadedModel(model.to(device.device).eval(), tokenizer, config, {}, device)
