"""The model: every variant against its formula, its cache, its compiled form and the same architecture in transformers."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

import model as model_module
from config import ModelConfig
from model import ATTENTION, GPT, BlockedAttention, HeadLoss, KVCache, blocked_attention, fused_attention, reference_attention

TINY = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)
QWEN3 = {"position": "rotary", "norm": "rmsnorm", "qk_norm": True, "activation": "swiglu"}
NANOCHAT = {
    "position": "rotary",
    "norm": "rmsnorm_plain",
    "embedding_norm": True,
    "qk_norm": True,
    "activation": "relu2",
    "logit_softcap": 15.0,
}
VARIANTS = {
    "gpt2": {},
    "sydsgpt": {"bias": True, "tied_head": False, "activation": "gelu_tanh"},
    "qwen3": QWEN3,
    "nanochat": NANOCHAT,
    "mixed": {"position": "rotary", "qk_norm": True, "zero_init": True, "bias": True, "activation": "swiglu"},
}


MASKED = {**NANOCHAT, "document_mask": True, "bos_id": 9}

pytestmark = pytest.mark.usefixtures("one_thread")


def gpt(seed: int = 1, attention: str = "fused", **changes) -> GPT:
    torch.manual_seed(seed)
    return GPT(dataclasses.replace(TINY, **changes), attention)


def scrambled(model: GPT) -> GPT:
    """Every parameter random, so that gains, biases and projections that start at 1 or 0 count."""
    torch.manual_seed(5)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=0.1, std=0.2)
    return model


def random_ids(*shape: int, vocab_size: int = TINY.vocab_size) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(7))


def test_parameter_formula_equals_the_model():
    """Catches a setting whose parameters `ModelConfig.num_params`, which the settings print, does not count."""
    choices = {
        "bias": (False, True),
        "tied_head": (False, True),
        "activation": ("gelu", "swiglu"),
        "position": ("learned", "rotary"),
        "norm": ("layernorm", "rmsnorm", "rmsnorm_plain"),
        "qk_norm": (False, True),
    }
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        model = gpt(**changes)
        assert model.num_params() == model.config.num_params, changes


@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_equals_reading_everything(variant: str):
    """Catches positions, masks or norms that differ when the past comes from the cache: one at a time and in pieces."""
    model, idx = scrambled(gpt(**VARIANTS[variant])).eval(), random_ids(3, 16)
    with torch.no_grad():
        whole, _ = model(idx)
        cache, parts = KVCache(model.config, 3, "cpu", torch.float32), []
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 11), (11, 16)):
            parts.append(model(idx[:, start:end], cache=cache)[0])
            assert cache.length == end
        assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)
        cache.length = 7  # forget, and read on differently
        again, _ = model(idx[:, 7:9], cache=cache, last_only=True)
        assert again.shape == (3, 1, TINY.vocab_size)
        assert torch.allclose(again[:, 0], whole[:, 8], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("path", ["fused", "reference", "compiled", "cache"])
def test_attention_stays_inside_documents(path: str, monkeypatch: pytest.MonkeyPatch):
    """Catches a document that sees another, one that begins a token late, numbers that a cache starts anew, lost gradients."""
    model = scrambled(gpt(attention="reference" if path == "reference" else "fused", **MASKED)).eval()
    documents = [random_ids(n) for n in (5, 4, 7)]  # the first one's begin lies before the window
    for seed, document in enumerate(documents):
        document[document == MASKED["bos_id"]] = 20 + seed
    documents[1][0] = documents[2][0] = MASKED["bos_id"]
    idx = torch.stack([torch.cat(documents), random_ids(16)])
    alone = [GPT.forward(model, document[None])[0][0] for document in documents]
    if path == "cache":
        cache = KVCache(model.config, 2, "cpu", torch.float32)
        parts = [model(idx[:, a:b], cache=cache)[0] for a, b in ((0, 3), (3, 7), (7, 8), (8, 12), (12, 16))]
        cache.length = 6  # forget, and read on differently
        assert torch.allclose(model(idx[:, 6:8], cache=cache)[0][0, -1], alone[1][2], atol=1e-5)
        assert torch.allclose(torch.cat(parts, dim=1)[0], torch.cat(alone), atol=1e-5)
        return
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: path == "compiled")
    together = model(idx)[0][0]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    weight = model.transformer.h[0].attn.c_attn.weight
    ours, theirs = (torch.autograd.grad(y.square().sum(), weight)[0] for y in (together, torch.cat(alone)))
    assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-4)
    across = GPT(dataclasses.replace(model.config, document_mask=False))
    across.load_state_dict(model.state_dict())
    assert not torch.allclose(across(idx)[0][0, 5:], together[5:], atol=1e-2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_future_tokens_do_not_matter(variant: str):
    """Catches a variant that looks ahead."""
    model, idx = scrambled(gpt(**VARIANTS[variant])).eval(), random_ids(2, 16)
    changed = idx.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % TINY.vocab_size
    before, after = model(idx)[0], model(changed)[0]
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-2)


def test_loss_is_cross_entropy_over_the_real_vocabulary():
    """Catches padding columns in the softmax, ignored targets that count, and a sum that is not count times the mean."""
    model, idx, targets = scrambled(gpt()).eval(), random_ids(2, 16), random_ids(2, 16)
    targets[0, 3:7] = -100
    logits = F.linear(model.hidden(idx), model.transformer.wte.weight[: TINY.vocab_size])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    _, mean = model(idx, targets)
    _, total = model(idx, targets, reduction="sum")
    assert torch.allclose(mean, expected, rtol=1e-6)
    assert torch.allclose(total, 28 * expected, rtol=1e-6)
    total.backward()
    padding = model.transformer.wte.weight.grad[TINY.vocab_size :]
    assert padding.shape[0] == 14 and torch.count_nonzero(padding) == 0


def test_initial_weights():
    """Catches an initialisation that is not GPT-2's: 0.02, and 0.02 / sqrt(2 * n_layer) in front of the residual stream."""
    model = gpt(n_layer=8, n_embd=128, bias=True)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert abs(p.std().item() / expected - 1) < 0.05 and abs(p.mean().item()) < expected / 10, name
        else:
            assert torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0)), name
    zero = [p for n, p in gpt(zero_init=True).named_parameters() if n.endswith("c_proj.weight")]
    assert len(zero) == 4 and not any(p.any() for p in zero)


@pytest.mark.parametrize("attention", ATTENTION)
def test_dropout_only_in_training_and_from_the_seed(attention: str):
    """Catches dropout that stays on in evaluation, that attention forgets, or that cannot be repeated."""
    model, idx = gpt(attention=attention, dropout=0.5), random_ids(2, 16)

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(idx)[0]

    assert torch.equal(logits(1), logits(1)) and not torch.equal(logits(1), logits(2))
    q = torch.randn(2, 2, 16, 16)
    assert not torch.equal(ATTENTION[attention](q, q, q, 0.5), ATTENTION[attention](q, q, q, 0.0))
    model.eval()
    assert torch.equal(logits(1), logits(2))


@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 7), (16, 16), (1, 9), (4, 9), (6, 7)])
def test_attention_kinds_agree(T: int, S: int):
    """Catches a mask that is off by one for some length, a multiple of no block size included."""
    q, k, v = (torch.randn(2, 3, n, 8, generator=torch.Generator().manual_seed(i)) for i, n in enumerate((T, S, S)))
    expected = reference_attention(q, k, v)
    assert torch.allclose(fused_attention(q, k, v), expected, atol=1e-6)
    if T == S:
        assert torch.allclose(blocked_attention(q, k, v), expected, atol=1e-6)


@pytest.mark.parametrize(("T", "blocks"), [(7, 1), (16, 2), (48, 4)])
def test_blocked_attention_has_the_gradient_of_the_formula(T: int, blocks: int):
    """Catches a block whose keys get no gradient, one counted twice, a sum or scale left out of the hand-written backward."""
    q, k, v, dy = (torch.randn(6, T, 8, generator=torch.Generator().manual_seed(i)) for i in range(4))
    results = []

    def one_head(*qkv: torch.Tensor) -> torch.Tensor:
        return reference_attention(*(t.unsqueeze(1) for t in qkv)).squeeze(1)

    for attention in (lambda *qkv: BlockedAttention.apply(*qkv, blocks), one_head):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        y = attention(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, dy)])
    for ours, formula in zip(*results, strict=True):
        assert torch.allclose(ours, formula, atol=1e-5)


def test_loss_in_pieces_is_cross_entropy(monkeypatch: pytest.MonkeyPatch):
    """Catches a piece that is left out, ignored targets that are scored, a gradient that ignores the factor on the loss."""
    monkeypatch.setattr(model_module, "HEAD_ROWS", 4)
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=draw) for n in (10, 21))
    targets = torch.tensor([0, 20, -100, 3, -100, -100, -100, -100, 7, 7])
    results = []
    for loss in (
        lambda x, w: HeadLoss.apply(x, w, targets, True),
        lambda x, w: F.cross_entropy(x @ w.T, targets, reduction="sum"),
    ):
        inputs = [t.clone().requires_grad_() for t in (x, weight)]
        value = loss(*inputs)
        results.append([value, *torch.autograd.grad(value * 0.3, inputs)])
    for ours, formula in zip(*results, strict=True):
        assert torch.allclose(ours, formula, atol=1e-5)
    assert torch.allclose(HeadLoss.apply(x, weight, targets, False), results[0][0])


@pytest.mark.parametrize("count", [1, 1_024, 16_384, 16_385, 65_536, 1_000_000])
def test_a_large_batch_is_no_large_graph(count: int):
    """Catches pieces that grow in number with the batch: 64 of them took the compiler minutes."""
    size = model_module.rows_at_once(count)
    assert -(-count // size) <= 16 and (size == 1_024 or count > 16_384)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_compiled_paths_reduce_as_the_eager_ones(reduction: str, monkeypatch: pytest.MonkeyPatch):
    """Catches the loss in pieces given, as one number, to a caller that asked for one a token, or a mean over ignored ones."""
    model, idx = scrambled(gpt(**QWEN3)), random_ids(3, 17)
    x, y = idx[:, :-1], idx[:, 1:].clone()
    y[0, 3:] = -100
    _, eager = model(x, y, reduction=reduction)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    _, compiled = model(x, y, reduction=reduction)
    assert torch.allclose(eager, compiled, atol=1e-4) and eager.shape == compiled.shape


def test_compiled_equals_eager_and_compiles_once():
    """Catches compilation that changes the mathematics, is not repeatable bit for bit, or starts anew at each step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, idx = scrambled(gpt(**QWEN3, n_layer=1)), random_ids(3, 17)
    x, y = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()
    compiled = torch.compile(model, dynamic=False)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for run in (model, compiled, compiled, compiled):
            _, loss = run(x, y, reduction="sum")
            results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    finally:
        torch.use_deterministic_algorithms(False)
    for eager, first, *others in zip(*results, strict=True):
        assert torch.allclose(eager, first, atol=1e-3, rtol=1e-4)
        assert all(torch.equal(first, other) for other in others)
    assert counters["stats"]["unique_graphs"] == 1


def head_rows(model: GPT, layer: int) -> tuple[torch.Tensor, ...]:
    return model.transformer.h[layer].attn.c_attn.weight.detach().chunk(3)


def test_qwen3_variant_is_transformers_qwen3():
    """Catches rotary positions, norms or SwiGLU that are almost, but not quite, those of the architecture it claims to be."""
    transformers = pytest.importorskip("transformers")
    model = scrambled(gpt(**QWEN3, vocab_size=64)).eval()
    peer = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=model.config.mlp_hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    ).eval()
    state = {"model.embed_tokens.weight": model.transformer.wte.weight, "model.norm.weight": model.transformer.ln_f.weight}
    for i, block in enumerate(model.transformer.h):
        gate, up = block.mlp.c_fc.weight.chunk(2)
        attention = dict(zip(("q_proj", "k_proj", "v_proj"), head_rows(model, i), strict=True))
        attention |= {
            "o_proj": block.attn.c_proj.weight,
            "q_norm": block.attn.q_norm.weight,
            "k_norm": block.attn.k_norm.weight,
        }
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": block.mlp.c_proj.weight}
        state |= {f"model.layers.{i}.self_attn.{name}.weight": p for name, p in attention.items()}
        state |= {f"model.layers.{i}.mlp.{name}.weight": p for name, p in mlp.items()}
        state[f"model.layers.{i}.input_layernorm.weight"] = block.ln_1.weight
        state[f"model.layers.{i}.post_attention_layernorm.weight"] = block.ln_2.weight
    missing = peer.load_state_dict({name: p.detach() for name, p in state.items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    idx = random_ids(3, 16, vocab_size=64)
    with torch.no_grad():
        assert torch.allclose(model(idx)[0], peer(idx).logits, atol=1e-4)


def test_nanochat_variant_is_transformers_nanochat():
    """Catches a difference from NanoChat other than the direction of its rotation, which swapped half heads undo."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "NanoChatForCausalLM"):
        pytest.skip("this transformers has no NanoChat")
    model = scrambled(gpt(**NANOCHAT, vocab_size=64)).eval()
    peer = transformers.NanoChatForCausalLM(
        transformers.NanoChatConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    ).eval()
    state = {"model.embed_tokens.weight": model.transformer.wte.weight}
    for i, block in enumerate(model.transformer.h):
        q, k, v = head_rows(model, i)
        q, k = (t.view(2, 2, 8, 32).flip(1).reshape(32, 32) for t in (q, k))  # (head, half, channels, C): halves swapped
        projections = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": block.attn.c_proj.weight}
        state |= {f"model.layers.{i}.self_attn.{name}.weight": p for name, p in projections.items()}
        state[f"model.layers.{i}.mlp.fc1.weight"] = block.mlp.c_fc.weight
        state[f"model.layers.{i}.mlp.fc2.weight"] = block.mlp.c_proj.weight
    missing = peer.load_state_dict({name: p.detach() for name, p in state.items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    idx = random_ids(3, 16, vocab_size=64)
    with torch.no_grad():
        assert torch.allclose(model(idx)[0], peer(idx).logits, atol=1e-4)
