"""Drawing tokens: edge values of every setting, and one text with and without the cache."""

import dataclasses
import math
import shutil
from functools import partial

import pytest
import torch
from tiny_models import random_model, tiny_config, tiny_tokenizer

from config import SampleConfig
from model import GPT
from support.common import UserError
from support.compiled import LARGE_PAGE, CompiledDecoder, RowLinear, on_large_pages
from support.inference import Float16Linear, Int8Linear, LeanDecoder, has_fbgemm, replace_linears
from support.sampling import (
    CachedDecoder,
    StopFilter,
    UncachedDecoder,
    generate,
    generate_batch,
    next_token,
    penalise_repeats,
    sampling_probabilities,
)

GREEDY = SampleConfig(temperature=0.0)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> GPT:
    return random_model(tiny_config(tiny_tokenizer("byte"), block_size=12))


def test_greedy_takes_the_largest_and_needs_no_generator():
    """Would catch temperature 0 dividing by zero: NaN, or always token 0."""
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, -1.0, 4.9]])
    assert next_token(logits, temperature=0.0).tolist() == [1, 0]
    for temperature in (1e-300, 5e-324, 1e-9):
        assert next_token(logits, temperature=temperature).tolist() == [1, 0], temperature


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 1000])
def test_top_k_keeps_exactly_k(k):
    """Would catch ties at the edge leaking in (a threshold comparison keeps them all), and k above the vocabulary raising."""
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.5, 0.5]])
    probs, ids = sampling_probabilities(logits, 1.0, top_k=k)
    assert int((probs > 0).sum()) == min(k, 6)
    assert len(set(ids[0].tolist())) == min(k, 6)


def test_top_k_of_the_whole_vocabulary_changes_nothing():
    """Would catch an off-by-one that drops the least likely token."""
    logits = torch.randn(3, 50)
    assert torch.equal(sampling_probabilities(logits, 0.7, top_k=50)[0], sampling_probabilities(logits, 0.7, top_k=0)[0])


def test_distribution_equals_transformers():
    """Would catch a filter applied in another order, or keeping one token too many or too few."""
    transformers = pytest.importorskip("transformers")
    warp = transformers.generation.logits_process
    logits = torch.randn(20, 200, generator=torch.Generator().manual_seed(3)) * 3
    for temperature, k, p, min_p in [
        (0.7, 0, 0.9, 0.0),
        (1.3, 40, 1.0, 0.0),
        (1.0, 40, 0.6, 0.0),
        (0.9, 0, 1.0, 0.1),
        (1, 1, 1, 0),
    ]:
        ours, ids = sampling_probabilities(logits, temperature, k, p, min_p)
        ours = torch.zeros(20, 200, dtype=torch.double).scatter(1, ids, ours / ours.sum(-1, keepdim=True))
        theirs = warp.TemperatureLogitsWarper(float(temperature))(None, logits.double())
        theirs = warp.TopKLogitsWarper(k)(None, theirs) if k else theirs
        theirs = warp.TopPLogitsWarper(float(p))(None, theirs) if p < 1 else theirs
        theirs = warp.MinPLogitsWarper(min_p)(None, theirs) if min_p else theirs
        assert torch.allclose(ours, theirs.softmax(-1), atol=1e-12), (temperature, k, p, min_p)


def test_repetition_penalty_equals_transformers():
    """Would catch negative logits divided, which makes repeats likelier, and a penalty applied once per occurrence."""
    transformers = pytest.importorskip("transformers")
    logits, seen = torch.randn(4, 30), torch.randint(0, 30, (4, 80))
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(seen, logits.clone())
    assert torch.allclose(penalise_repeats(logits, seen, 1.7), theirs)


def test_draws_follow_the_distribution():
    """Would catch drawing from a filtered order without mapping back to ids."""
    logits = torch.log(torch.tensor([0.1, 0.6, 0.05, 0.25])).repeat(20_000, 1)
    drawn = next_token(logits, 1.0, top_k=3, generator=torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=4) / 20_000
    assert torch.allclose(shares, torch.tensor([0.1, 0.6, 0.0, 0.25]) / 0.95, atol=0.015)


@pytest.mark.parametrize("cached", [CachedDecoder, LeanDecoder])
def test_same_text_with_and_without_cache_at_every_length_around_the_edge(model, cached):
    """Would catch a cache that is off by one at the window's edge, or two different rules for going past it."""
    generator = torch.Generator().manual_seed(5)
    for length in range(1, 2 * model.config.block_size + 3):
        prompt = torch.randint(0, model.config.vocab_size, (2, length), generator=generator)
        texts = [
            torch.stack(list(generate_batch(kind(model), prompt, 30, GREEDY))).tolist() for kind in (cached, UncachedDecoder)
        ]
        assert texts[0] == texts[1], length


ROTARY = {"position": "rotary", "qk_norm": True}
VARIANTS = {
    "gpt2": {"bias": True, "activation": "gelu_tanh", "tied_head": False},
    "qwen3": ROTARY | {"norm": "rmsnorm", "activation": "swiglu"},
    "nanochat": ROTARY | {"norm": "rmsnorm_plain", "activation": "relu2", "embedding_norm": True, "logit_softcap": 5.0},
    "documents": ROTARY | {"norm": "rmsnorm_plain", "document_mask": True},
}


@pytest.mark.parametrize("kind", [CachedDecoder, LeanDecoder])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_those_of_one_pass(variant, kind):
    """Would catch keys stored at the wrong position, or a step that leaves out what a variant of the model adds."""
    model = random_model(tiny_config(tiny_tokenizer("byte"), block_size=12, **VARIANTS[variant]))
    idx = torch.randint(0, model.config.vocab_size, (2, 12))
    idx[0, [3, 7]] = idx[1, 5] = model.config.bos_id
    decoder = kind(model)
    steps = [decoder.prefill(idx[:, :5]), *(decoder.step(idx[:, t]) for t in range(5, 12))]
    with torch.no_grad():
        whole = model(idx)[0][:, 4:]
    assert torch.allclose(torch.stack(steps, dim=1), whole, atol=1e-4)


def test_block_of_one_token_still_writes():
    """Would catch half of a block of 1 being an empty context."""
    model = random_model(tiny_config(tiny_tokenizer("byte"), block_size=1))
    assert len(list(generate(model, [5, 6, 7], 9, SampleConfig()))) == 9


def test_a_seed_fixes_the_text_whatever_is_drawn_elsewhere(model):
    """Would catch drawing from torch's global generator."""
    first = list(generate(model, [9], 20, SampleConfig(), seed=4))
    torch.rand(3)
    assert list(generate(model, [9], 20, SampleConfig(), seed=4)) == first
    assert list(generate(model, [9], 20, SampleConfig(), seed=5)) != first


def test_untrained_model_draws_ten_thousand_ids_of_its_vocabulary():
    """Would catch padding rows or forbidden ids being drawn; a flat distribution meets every id."""
    tokenizer = tiny_tokenizer("byte")
    config = tiny_config(tokenizer, block_size=8)
    model = random_model(config, scale=0.0)
    assert config.model.padded_vocab_size > tokenizer.vocab_size
    prompt = torch.full((100, 1), tokenizer.bos_id)
    settings = SampleConfig(temperature=50.0, top_k=0)
    drawn = torch.stack(list(generate_batch(CachedDecoder(model), prompt, 100, settings, never=[tokenizer.pad_id])))
    assert drawn.max() < tokenizer.vocab_size
    assert tokenizer.pad_id not in drawn
    assert len(drawn.unique()) == tokenizer.vocab_size - 1


def test_generate_stops_restores_the_mode_and_leaves_grad_alone(model):
    """Would catch a sample during training that leaves dropout or gradients off."""
    greedy = list(generate(model, [9, 8], 6, GREEDY))
    stop = greedy[3]
    model.train()
    assert list(generate(model, [9, 8], 6, GREEDY, stop_ids=[stop])) == greedy[: greedy.index(stop)]
    iterator = generate(model, [9, 8], 6, GREEDY)
    next(iterator)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    iterator.close()
    assert model.training
    model.eval()


def test_damaged_weights_are_a_plain_error(model):
    """Would catch torch's `probability tensor contains inf, nan` reaching the user."""
    broken = random_model(tiny_config(tiny_tokenizer("byte")))
    torch.nn.init.constant_(broken.transformer.ln_f.weight, math.nan)
    with pytest.raises(UserError, match="not a number"):
        list(generate(broken, [1], 3, SampleConfig()))


def test_repetition_penalty_reaches_the_text(model):
    """Would catch a setting that is accepted and ignored."""
    plain = list(generate(model, [9], 40, GREEDY))
    varied = list(generate(model, [9], 40, dataclasses.replace(GREEDY, repetition_penalty=50.0)))
    assert len(set(varied)) > len(set(plain))


def test_stop_filter_over_all_ways_of_cutting():
    """Would catch a stop text that is spread over pieces, or text held back and lost at the end."""
    text, stops = "ab<b/b>c</b>rest", ["</b>", "zzz"]
    for size in range(1, len(text) + 1):
        stop, out = StopFilter(stops), ""
        for at in range(0, len(text), size):
            out += stop.push(text[at : at + size])
            if stop.hit:
                break
        assert stop.hit and out == "ab<b/b>c", size
    stop = StopFilter(["</b>"])
    assert stop.push("a</") + stop.flush() == "a</" and not stop.hit


@pytest.mark.skipif(not has_fbgemm(), reason="this CPU has no FBGEMM")
@pytest.mark.parametrize(("kind", "bound"), [(Float16Linear, 2e-3), (Int8Linear, 5e-2)])
@pytest.mark.parametrize("bias", [False, True])
def test_small_weights_give_nearly_the_same_logits(kind, bound, bias):
    """Would catch a wrong scale or a lost bias in the packed layers, in a step and in a pass over many tokens."""
    config = tiny_config(tiny_tokenizer("byte"), bias=bias)
    exact, packed = (random_model(config, scale=0.1) for _ in range(2))
    packed = replace_linears(packed, kind)
    idx = torch.randint(0, config.model.vocab_size, (3, 20))
    with torch.inference_mode():
        for x in (idx, idx[:1, :1]):
            want, got = exact(x)[0], packed(x)[0]
            assert (got - want).std() / want.std() < bound


@pytest.mark.skipif(not has_fbgemm(), reason="this CPU has no FBGEMM")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("weights", "bound"), [("float16", 4e-3), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_steps_over_a_cache_in_16_bits_give_nearly_the_logits_of_one_pass(variant, weights, bound, batch_size):
    """Would catch keys of one layer or text read for another's from the buffer in which they are widened."""
    model = random_model(tiny_config(tiny_tokenizer("byte"), block_size=12, **VARIANTS[variant]), scale=0.1)
    idx = torch.randint(0, model.config.vocab_size, (batch_size, 12))
    with torch.no_grad():
        whole = model(idx)[0][:, 4:]
    decoder = LeanDecoder(replace_linears(model, Float16Linear) if weights == "float16" else model.bfloat16())
    for _ in range(2):  # the second text reads a cache that another one has filled
        steps = [decoder.prefill(idx[:, :5]), *(decoder.step(idx[:, t]) for t in range(5, 12))]
        assert (torch.stack(steps, dim=1) - whole).std() < bound * whole.std()


@pytest.mark.skipif(not has_fbgemm(), reason="this CPU has no FBGEMM")
def test_int8_rows_do_not_touch_each_other():
    """Would catch one scale for a batch: a large activation in one text would coarsen all the others."""
    layer = Int8Linear(torch.nn.Linear(64, 48))
    small = torch.randn(1, 1, 64)
    alone = layer(small)
    together = layer(torch.cat([small, small * 10_000]))[:1]
    assert (alone - together).abs().max() < 0.05 * alone.abs().max()


needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")


def compiled(variant: str, dtype: torch.dtype, scale: float = 0.1) -> CompiledDecoder:
    several = Int8Linear if dtype == torch.int8 else None
    model = random_model(tiny_config(tiny_tokenizer("byte"), block_size=12, **VARIANTS[variant]), scale=scale)
    return CompiledDecoder(replace_linears(model, partial(RowLinear, dtype=dtype, several=several)))


@needs_compiler
def test_compiled_steps_give_the_logits_of_one_pass():
    """Would catch a part of a variant left out of a compiled step, a lost bias or scale, and one decoder's program run with the
    weights of another: the steps of all take turns."""
    kinds = {"gpt2": (torch.int8, 5e-2), "qwen3": (torch.float16, 4e-3)}
    kinds |= dict.fromkeys(("nanochat", "documents"), (torch.float32, 1e-5))
    decoders = {variant: compiled(variant, dtype) for variant, (dtype, _) in kinds.items()}
    idx = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(2))
    idx[0, [4, 8]] = 2  # where documents begin
    steps = {variant: [decoder.prefill(idx[:, :1])] for variant, decoder in decoders.items()}
    for t in range(1, 12):
        for variant, decoder in decoders.items():
            steps[variant].append(decoder.step(idx[:, t]))
    for variant, (_, bound) in kinds.items():
        exact = random_model(tiny_config(tiny_tokenizer("byte"), block_size=12, **VARIANTS[variant]), scale=0.1)
        with torch.no_grad():
            whole = exact(idx)[0]
        assert (torch.stack(steps[variant], dim=1) - whole).std() < bound * whole.std(), variant


@needs_compiler
def test_compiled_steps_write_the_same_text_past_the_edge():
    """Would catch keys and values pushed into the wrong slot, and those of an earlier text read in the next one."""
    decoder = compiled("nanochat", torch.float32, scale=0.2)
    plain = random_model(tiny_config(tiny_tokenizer("byte"), block_size=12, **VARIANTS["nanochat"]))
    for length in (1, 2, 11, 12, 20):
        prompt = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))
        texts = [list(generate_batch(kind, prompt, 30, GREEDY)) for kind in (decoder, UncachedDecoder(plain))]
        assert torch.equal(*map(torch.cat, texts)), length


@pytest.mark.parametrize("count", [10, LARGE_PAGE // 2, LARGE_PAGE // 2 + 1, 3 * LARGE_PAGE])
def test_large_pages_hold_the_same_numbers(count):
    """Would catch a copy that is cut off at a page, and memory given back while a tensor still lies in it."""
    numbers = torch.randn(count).half()
    copies = [on_large_pages(numbers).view(-1, 1) for _ in range(3)]
    assert all(torch.equal(copy.flatten(), numbers) for copy in copies)


def test_a_compiler_that_fails_is_one_line(monkeypatch):
    """Would catch a traceback of the compiler's where `--compile on` cannot work."""

    def broken(*_, **__):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(UserError, match=r"does not work here \(RuntimeError: no compiler at all\); use --compile auto or off"):
        compiled("gpt2", torch.float16)
