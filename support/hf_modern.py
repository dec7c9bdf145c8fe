"""Our rotary models in the layouts of two standard architectures that compute exactly the same: Qwen3 and NanoChat.

Both keep queries, keys and values (and SwiGLU's two halves) in matrices of their own. NanoChat turns each pair of channels the
other way round, which is the same as swapping the halves of every query and key head; it normalises queries and keys behind the
rotation, which is the same where the norm has no gain, since turning changes no length.
"""

from typing import Any

import torch
from torch import Tensor

from config import ModelConfig
from model import RMS_EPS, ROTARY_BASE

QWEN3, NANOCHAT = "qwen3", "nanochat"
CLASSES = {QWEN3: "Qwen3ForCausalLM", NANOCHAT: "NanoChatForCausalLM"}
SETTINGS: dict[str, dict[str, Any]] = {
    QWEN3: {"norm": "rmsnorm", "activation": "swiglu", "embedding_norm": False, "logit_softcap": 0.0},
    NANOCHAT: {"norm": "rmsnorm_plain", "activation": "relu2", "embedding_norm": True},
}
SHARED_SETTINGS = {"position": "rotary", "qk_norm": True, "bias": False}


def differences(config: ModelConfig, architecture: str) -> list[str]:
    """`field=value` of each setting that keeps a model from being of that architecture."""
    wanted = {**SHARED_SETTINGS, **SETTINGS[architecture]}
    return [f"{name}={getattr(config, name)}" for name, value in wanted.items() if getattr(config, name) != value]


def to_modern_config(config: ModelConfig, architecture: str, bos_id: int, eos_id: int) -> dict[str, Any]:
    """`config.json` of the same model."""
    rope = {"rope_type": "default", "rope_theta": ROTARY_BASE}
    values = {
        "model_type": architecture,
        "architectures": [CLASSES[architecture]],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_hidden,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu" if architecture == QWEN3 else "relu2",
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROTARY_BASE,
        "rope_parameters": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }
    if architecture == NANOCHAT:
        values["final_logit_softcapping"] = config.logit_softcap or None
    return values


def to_modern_state(state: dict[str, Tensor], config: ModelConfig, architecture: str) -> dict[str, Tensor]:
    """Our state dict under the architecture's names, padding rows off, a tied head left out."""
    hf = {"model.embed_tokens.weight": state["transformer.wte.weight"][: config.vocab_size]}
    for layer in range(config.n_layer):
        ours = f"transformer.h.{layer}."
        block = {name.removeprefix(ours): tensor for name, tensor in state.items() if name.startswith(ours)}
        named = _attention(block, config, architecture) | _rest(block, architecture)
        hf |= {f"model.layers.{layer}.{name}": tensor for name, tensor in named.items()}
    if architecture == QWEN3:
        hf["model.norm.weight"] = state["transformer.ln_f.weight"]
    if not config.tied_head:
        hf["lm_head.weight"] = state["lm_head.weight"][: config.vocab_size]
    return hf


def _attention(block: dict[str, Tensor], config: ModelConfig, architecture: str) -> dict[str, Tensor]:
    q, k, v = block["attn.c_attn.weight"].chunk(3)
    if architecture == NANOCHAT:
        q, k = (_swap_halves(matrix, config.n_head) for matrix in (q, k))
    named = {f"self_attn.{name}_proj.weight": matrix for name, matrix in (("q", q), ("k", k), ("v", v))}
    return {**named, "self_attn.o_proj.weight": block["attn.c_proj.weight"]}


def _swap_halves(matrix: Tensor, n_head: int) -> Tensor:
    """(n_head * head_dim, C): the first and the second half of each head's rows change places."""
    first, second = matrix.view(n_head, 2, -1, matrix.size(1)).unbind(1)
    return torch.stack([second, first], dim=1).view_as(matrix)


def _rest(block: dict[str, Tensor], architecture: str) -> dict[str, Tensor]:
    if architecture == NANOCHAT:
        return {"mlp.fc1.weight": block["mlp.c_fc.weight"], "mlp.fc2.weight": block["mlp.c_proj.weight"]}
    gate, up = block["mlp.c_fc.weight"].chunk(2)
    return {
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": block["mlp.c_proj.weight"],
        "input_layernorm.weight": block["ln_1.weight"],
        "post_attention_layernorm.weight": block["ln_2.weight"],
        "self_attn.q_norm.weight": block["attn.q_norm.weight"],
        "self_attn.k_norm.weight": block["attn.k_norm.weight"],
    }
