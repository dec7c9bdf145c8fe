"""Stage 4 of 9: the checks worth running before GPU hours are spent: tokenizer, model, one overfitted batch, one checkpoint.

    uv run python test_model.py        a tick per check, exit code 1 if one fails; about a minute on two CPU cores

pytest collects the same functions. The reference algorithms here are the slow, obvious ones that the fast code must equal.
"""

import contextlib
import dataclasses
import io
import itertools
import math
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from config import SPECIAL_TOKENS, ModelConfig, SampleConfig, make_config, parse_config
from support.common import run_main

# Settings this stage takes on its command line: none beyond the preset, since the checks bring their own tiny ones.
USES = ()

# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer: the slow, obvious algorithms, and checks that the fast ones equal them


def merge_everywhere(symbols: list, pair: tuple, merged) -> list:
    """`symbols` with every occurrence of `pair`, from the left, replaced."""
    result, i = [], 0
    while i < len(symbols):
        found = tuple(symbols[i : i + 2]) == pair
        result.append(merged if found else symbols[i])
        i += 2 if found else 1
    return result


def naive_merges(pieces: dict[bytes, int], kind: str, vocab_size: int, min_frequency: int) -> list[tuple[bytes, bytes]]:
    """BPE training by definition: count every pair again before each merge. Ties go to the smallest pair of byte strings."""
    characters = (lambda piece: [c.encode() for c in piece.decode()]) if kind == "word" else lambda p: [bytes([b]) for b in p]
    words = {piece: characters(piece) for piece in pieces}
    size = len(SPECIAL_TOKENS) + (len({c for word in words.values() for c in word}) if kind == "word" else 256)
    merges: list[tuple[bytes, bytes]] = []
    while size + len(merges) < vocab_size:
        counts: Counter[tuple[bytes, bytes]] = Counter()
        for piece, word in words.items():
            for pair in itertools.pairwise(word):
                counts[pair] += pieces[piece]
        allowed = [p for p, n in counts.items() if n >= min_frequency and (p[0] + p[1]).decode("latin-1") not in SPECIAL_TOKENS]
        if not allowed:
            break
        best = min(allowed, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        words = {piece: merge_everywhere(word, best, best[0] + best[1]) for piece, word in words.items()}
    return merges


def ordered_merges(tokenizer, text: str) -> list[int]:
    """Encoding by definition: every merge in the order it was learnt, over the whole piece."""
    results = {token: i for i, token in enumerate(tokenizer.tokens)}
    ids = []
    for piece in tokenizer.split(text):
        symbols = tokenizer.symbols_of(piece)
        for left, right in tokenizer.merges:
            symbols = merge_everywhere(symbols, (left, right), results[tokenizer.tokens[left] + tokenizer.tokens[right]])
        ids += symbols
    return ids


def random_corpus(rng: random.Random) -> tuple[list[str], str, int, int]:
    """Texts that are hard for a trainer (runs, ties, the letters of special tokens), a kind, a vocabulary, a least count."""
    alphabet = rng.choice(["a", "ab", "ab ", "abc \n", "aé日🙂 ", "<EOS> BPAD", "abcdefghij     ", "^^^ 's", "a\x00ÿ\x1c\xa0 "])
    length = rng.choice([1, 10, 40, 150])
    texts = ["".join(rng.choices(alphabet, k=length)) + "a" for _ in range(rng.randint(1, 4))]
    kind = rng.choice(["word", "byte"])
    return texts, kind, rng.choice([20, 40, 80]) + (256 if kind == "byte" else 0), rng.choice([1, 2, 5])


def test_incremental_trainer_equals_naive_rescan():
    """Catches a count that went wrong on runs such as aaaa, ties broken otherwise, a merge into a special token."""
    from bpe import to_utf8
    from tokenizer import BPETokenizer

    rng, total = random.Random(1), 0
    for i in range(150):
        texts, kind, vocab_size, min_frequency = random_corpus(rng)
        tokenizer = BPETokenizer.train(texts, kind=kind, vocab_size=vocab_size, min_frequency=min_frequency)
        found = [(tokenizer.tokens[a], tokenizer.tokens[b]) for a, b in tokenizer.merges]
        pieces = Counter(to_utf8(piece) for text in texts for piece in tokenizer.split(text))
        assert found == naive_merges(pieces, kind, vocab_size, min_frequency), f"corpus {i}: {kind}, {texts}"
        total += len(found)
    print(f"{total:,} merges")


def test_rank_encoding_equals_ordered_merges():
    """Catches an encoder that applies merges in another order, one text at a time or in bulk."""
    from tokenizer import BPETokenizer

    rng = random.Random(2)
    for _ in range(40):
        texts, kind, vocab_size, _ = random_corpus(rng)
        tokenizer = BPETokenizer.train(texts, kind=kind, vocab_size=vocab_size, min_frequency=1)
        texts += [random_corpus(rng)[0][0], ""]
        ids, offsets = tokenizer.encode_to_array(texts)
        for text, a, b in zip(texts, offsets[:-1], offsets[1:], strict=True):
            expected = ordered_merges(tokenizer, text)
            assert tokenizer.encode(text) == expected, f"{kind}: {text!r}"
            assert ids[a:b].tolist() == expected, f"{kind} in bulk: {text!r}"


def test_round_trips_also_after_save_and_load():
    """Catches text lost between encode and decode, and a file that does not hold the whole tokenizer."""
    from tokenizer import BPETokenizer

    texts = [
        "the cat sat on the mat, the hat.\n\n" * 5,
        "",
        " \n",
        "👩‍👩‍👧 naïve\u3000日本",
        "a" * 300,
        "<EOS> <BOS>",
        "\x00\x1c\x85²½",
    ]
    for kind in ("word", "byte"):
        tokenizer = BPETokenizer.train(texts, kind=kind, vocab_size=400)
        loaded = BPETokenizer.from_json(tokenizer.to_json())
        assert loaded.to_json() == tokenizer.to_json()
        for text in texts:
            ids = loaded.encode(text)
            assert ids == tokenizer.encode(text)
            assert loaded.decode(ids) == loaded.scored_text(text), f"{kind}: {text!r}"
            assert "".join(loaded.decode_stream(ids)) == loaded.scored_text(text), f"{kind} streamed: {text!r}"


def test_special_ids_and_unknown_characters():
    """Catches text that turns into a control token, a document without its markers, and an unseen character dropped."""
    from tokenizer import BPETokenizer

    spelled = "<EOS> <PAD> " * 20
    for kind in ("word", "byte"):
        tokenizer = BPETokenizer.train([spelled], kind=kind, vocab_size=400, min_frequency=1)
        assert [tokenizer.tokens[i].decode() for i in range(4)] == list(SPECIAL_TOKENS)
        assert min(tokenizer.encode(spelled)) >= len(SPECIAL_TOKENS)
        assert tokenizer.wrap_document([9]) == [tokenizer.bos_id, 9, tokenizer.eos_id]
        assert tokenizer.decode(tokenizer.wrap_document(tokenizer.encode("<EOS>"))) == "<EOS>"
    word = BPETokenizer.train([spelled], kind="word", vocab_size=400)
    assert word.encode("é") == [word.unk_id]


# ----------------------------------------------------------------------------------------------------------------------
# Model

TINY = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)


def tiny_gpt(attention: str = "fused", **changes):
    """A GPT of a few thousand parameters with the given fields changed, the same at each call."""
    import torch

    from model import GPT

    torch.manual_seed(1)
    return GPT(dataclasses.replace(TINY, **changes), attention)


def tiny_batch(B: int = 4, T: int = 16):
    """Inputs and targets (B, T), the same at each call."""
    import torch

    ids = torch.randint(TINY.vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def test_parameter_counts_are_the_published_ones():
    """Catches a bias, a norm or padding rows too many: the counts are those of the two recipes."""
    import torch

    from model import GPT

    for preset, expected in (("wikitext103", 126_273_024), ("sydsgpt", 163_823_616)):
        with torch.device("meta"):  # shapes only, no memory
            found = GPT(make_config(preset).model).num_params()
        assert found == expected, f"{preset}: {found:,}, expected {expected:,}"
        print(f"{preset} {found:,}", end="  ")


def test_shapes_and_initial_loss_near_ln_of_the_vocabulary():
    """Catches a wrong initial scale and padding columns that take part in the softmax."""
    import torch

    model, (x, y) = tiny_gpt(), tiny_batch()
    logits, none = model(x)
    assert none is None and logits.shape == (4, 16, TINY.vocab_size) and logits.dtype == torch.float32
    none, loss = model(x, y)
    assert none is None and loss.shape == ()
    expected = math.log(TINY.vocab_size)
    assert abs(loss.item() - expected) < 0.05, f"{loss.item():.3f}, expected about {expected:.3f}"
    print(f"{loss.item():.3f}, ln({TINY.vocab_size}) = {expected:.3f}")


def test_future_tokens_cannot_change_past_logits():
    """Catches a missing or shifted causal mask, in both kinds of attention."""
    import torch

    x, _ = tiny_batch()
    for attention in ("fused", "reference"):
        model = tiny_gpt(attention).eval()
        before, _ = model(x)
        for t in range(1, x.size(1)):
            changed = x.clone()
            changed[:, t:] = (changed[:, t:] + 1) % TINY.vocab_size
            after, _ = model(changed)
            assert torch.allclose(before[:, :t], after[:, :t], atol=1e-6), f"{attention}: token {t} is seen before its time"
            assert not torch.allclose(before[:, t], after[:, t], atol=1e-6), f"{attention}: token {t} is not seen at all"


def test_tied_weights_are_one_tensor():
    """Catches a head that is copied, not shared: after one update the two would differ."""
    tied, untied = tiny_gpt(), tiny_gpt(tied_head=False)
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert untied.lm_head.weight is not untied.transformer.wte.weight
    assert untied.num_params() - tied.num_params() == TINY.vocab_size * TINY.n_embd


def test_fused_attention_equals_the_reference():
    """Catches a wrong scale or mask in the fast path, for outputs and gradients."""
    import torch

    from model import blocked_attention, fused_attention, reference_attention

    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        q, k, v, dy = (torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4))
        results = []
        for attention in (reference_attention, fused_attention, blocked_attention):
            inputs = [t.clone().requires_grad_() for t in (q, k, v)]
            y = attention(*inputs)
            results.append((y, *torch.autograd.grad(y, inputs, dy)))
        reference, *others = results
        pairs = [(a, b) for other in others for a, b in zip(reference, other, strict=True)]
        error = max((a - b).abs().max().item() / a.abs().max().item() for a, b in pairs)
        assert error < bound, f"{dtype}: relative difference {error:.1e}, expected below {bound:.0e}"
        print(f"{str(dtype).removeprefix('torch.')} {error:.0e}", end="  ")


def test_one_batch_overfits():
    """Catches gradients that do not reach the weights: four sequences must be learned by heart."""
    import torch

    from optimizers import build_optimizer

    model, (x, y) = tiny_gpt(), tiny_batch()
    settings = make_config("wikitext103", {"learning_rate": 1e-2, "weight_decay": 0.0}).train
    optimizer, threads = build_optimizer(model, settings, "cpu"), torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only lose time to a second thread
    for _ in range(150):
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    assert loss.item() < 0.1, f"loss {loss.item():.3f} after 150 steps on one batch, expected below 0.1"
    print(f"loss {loss.item():.4f}")


def test_a_checkpoint_comes_back_with_identical_logits():
    """Catches a parameter that is not saved, and a file that only loads by running code."""
    import torch

    model, other, (x, _) = tiny_gpt().eval(), tiny_gpt().eval(), tiny_batch()
    torch.nn.init.normal_(other.transformer.wte.weight)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model.state_dict(), path)
        other.load_state_dict(torch.load(path, weights_only=True))
    assert torch.equal(model(x)[0], other(x)[0])


def test_generation_stays_within_the_vocabulary():
    """Catches padding rows of the embedding that are drawn, and a context that outgrows the block."""
    import torch

    from support.sampling import generate

    model = tiny_gpt(vocab_size=5).eval()  # 5 tokens, 59 rows of padding
    torch.nn.init.normal_(model.transformer.wte.weight)
    ids = list(generate(model, [1, 2], 40, SampleConfig(temperature=2.0, top_k=0)))
    assert len(ids) == 40 and all(0 <= i < 5 for i in ids), ids


# ----------------------------------------------------------------------------------------------------------------------
# Running as a script


def main(argv: Sequence[str] | None = None) -> int:
    parse_config(argv, doc=__doc__, uses=USES)
    checks = {name: check for name, check in globals().items() if name.startswith("test_") and callable(check)}
    failed = [name for name, check in checks.items() if not passes(name, check)]
    print(f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def passes(name, check) -> bool:
    """Runs one check and prints a tick with whatever the check printed (a count, a difference), or a cross and why."""
    title, t0, output = name.removeprefix("test_").replace("_", " "), time.perf_counter(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            check()
    except Exception:
        print(f"\u2717 {title}\n{traceback.format_exc()}", flush=True)
        return False
    detail = " ".join(output.getvalue().split())
    print(f"\u2713 {title}{': ' if detail else ''}{detail} ({time.perf_counter() - t0:.1f} s)", flush=True)
    return True


if __name__ == "__main__":
    run_main(main)
