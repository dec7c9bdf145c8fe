"""Evaluation: every token once, the definitions of the figures, and what makes two of them comparable."""

import contextlib
import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_user_error
from tiny_models import random_model, save_run, tiny_config, tiny_tokenizer

import evaluate
from model import GPT
from support.inference import Int8Linear, has_fbgemm, replace_linears
from support.scoring import ScoredText, Scores, detokenise_wikitext, interval, plan_windows, score, token_losses
from tokenizer import BPETokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def text_of(tokenizer: BPETokenizer, documents: list[str]) -> ScoredText:
    ids = [tokenizer.wrap_document(tokenizer.encode(text)) for text in documents]
    starts = np.cumsum([0, *map(len, ids)])
    words = np.array([len(text.split()) for text in documents], float)
    num_bytes = np.array([len(tokenizer.scored_text(text).encode()) for text in documents], float)
    return ScoredText(np.array([i for document in ids for i in document], np.uint16), starts, words, num_bytes, "here")


def test_every_token_but_the_first_is_scored_once_with_enough_context():
    """Would catch a window's first target dropped, a tail left out, or tokens scored twice where windows overlap."""
    for N, T, first in itertools.product(range(40), (1, 2, 5, 16), (0, 3)):
        for stride in range(1, T + 1):
            scored = []
            for start, end, begin in plan_windows(first, first + N, T, stride):
                assert first <= start < begin <= end < first + N and end - start <= T
                assert not scored or begin - start > T - stride
                scored += range(begin, end + 1)
            assert scored == list(range(first + 1, first + N)), (N, T, stride)


@pytest.mark.parametrize("stride", [16, 5, 1])
def test_losses_equal_one_forward_pass_a_token(stride):
    """Would catch losses at a neighbour's position, padded rows that leak, or a window that sees the future."""
    tokenizer = tiny_tokenizer("byte")
    model = random_model(tiny_config(tokenizer, block_size=16))
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 75)
    windows = list(plan_windows(0, len(ids), 16, stride))
    losses = token_losses(model, ids, windows, contextlib.nullcontext(), "scoring")
    assert math.isnan(losses[0])
    for start, end, begin in windows:
        for p in range(begin, end + 1):
            with torch.no_grad():
                logits = model(torch.from_numpy(ids[start:p])[None])[0][0, -1]
            assert abs(-logits.log_softmax(-1)[ids[p]].item() - losses[p]) < 1e-4, p


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_separate_documents_do_not_see_each_other(kind):
    """Would catch a boundary that is off by one: then changing document 1 changes what document 2 scores."""
    tokenizer = tiny_tokenizer(kind)
    model = random_model(tiny_config(tokenizer))
    one, other = (text_of(tokenizer, [first, "the lazy dog", "a fox"]) for first in ("the quick brown", "jumps over dog"))
    for separate in (True, False):
        a, b = (score(model, text, tokenizer, 32, separate, contextlib.nullcontext()) for text in (one, other))
        assert np.allclose(a.nats[1:], b.nats[1:], atol=1e-5) == separate
        assert not np.allclose(a.nats[0], b.nats[0])
        markers = 3 if separate and kind == "byte" else 1
        assert a.tokens.sum() == len(one.ids) - markers


def test_figures_follow_their_definitions():
    """Would catch a loss averaged over windows or documents instead of tokens, bits for nats, or bytes for characters."""
    scores = Scores(np.array([20.0, 10.0]), np.array([8.0, 2.0]), np.array([4.0, 1.0]), np.array([25.0, 5.0]))
    figures = scores.figures()
    assert figures["loss"] == pytest.approx(3.0)
    assert figures["perplexity"] == pytest.approx(math.exp(3.0))
    assert figures["word_perplexity"] == pytest.approx(math.exp(6.0))
    assert figures["bits_per_byte"] == pytest.approx(30 / math.log(2) / 30)
    assert Scores(np.array([1e6]), *[np.array([1.0])] * 3).figures()["perplexity"] == math.inf


def test_interval_is_that_of_the_mean():
    """Would catch resampling tokens instead of documents, or unpaired sets for two models."""
    nats = np.random.default_rng(1).normal(100, 20, 400)
    scores = Scores(nats, np.full(400, 50.0), np.full(400, 30.0), np.full(400, 200.0))
    low, high = interval(scores.resampled(seed=3)[:, 0])
    width = 2 * 1.96 * nats.std() / math.sqrt(400) / 50
    assert low < scores.figures()["loss"] < high and abs((high - low) / width - 1) < 0.15
    shifted = Scores(nats + 1, scores.tokens, scores.words, scores.bytes)
    gap = shifted.resampled(seed=3)[:, 0] - scores.resampled(seed=3)[:, 0]
    assert np.allclose(gap, 1 / 50)


def test_detokeniser():
    """Would catch WikiText's artefacts left in, or ordinary spaces eaten."""
    spaced = ' = = Early " life " = = \n A 20 @.@ 5 @-@ m ( " long " ) jump , he said ; it \'s the dogs \' 1 @,@ 000 ! \n'
    plain = '== Early "life" ==\nA 20.5-m ("long") jump, he said; it\'s the dogs\' 1,000!\n'
    assert detokenise_wikitext(spaced) == plain
    assert detokenise_wikitext(" They do n't . \n") == "They don't.\n"
    assert detokenise_wikitext("plain text - with (no) spaces, 'as is'.") == "plain text - with (no) spaces, 'as is'."


# ----------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A corpus of this project's sources, token files in one vocabulary, and three runs: in that one, a word and a byte one."""
    import download_data
    import prepare_data
    import train_tokenizer

    folder = tmp_path_factory.mktemp("work")
    (folder / "texts").mkdir()
    for path in sorted(ROOT.glob("*.py"))[:20]:
        (folder / "texts" / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    where = ["--data-dir", str(folder / "data"), "--corpus", "mine"]
    download_data.main([*where, "--input", str(folder / "texts"), "--val-fraction", "0.4"])
    train_tokenizer.main([*where, "--tokenizer-kind", "byte", "--vocab-size", "400"])
    prepare_data.main([*where, "--workers", "1"])
    own = BPETokenizer.load(folder / "data" / "mine" / "tokenizer.json")
    for name, tokenizer in [("own", own), *((kind, tiny_tokenizer(kind)) for kind in ("word", "byte", "gpt2"))]:
        config = tiny_config(tokenizer, corpus="mine", data_dir=str(folder / "data"))
        save_run(folder / "runs" / name, tokenizer, config, random_model(config, 0.02))
    return folder


def run(workplace: Path, *arguments: str) -> dict:
    """Runs the command; returns what it keeps beside run `own`, if it was asked about that one."""
    fixed = ["--checkpoint-dir", str(workplace / "runs"), "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    assert evaluate.main([*fixed, *arguments]) == 0
    kept = workplace / "runs" / "own" / "evaluation_val.json"
    return json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}


def test_command_counts_agree_with_the_token_files(workplace, capsys):
    """Would catch a split that is scored in part, or totals that are not those of the text."""
    found = run(workplace, "--run", "own", "--by-document", "2")
    meta = json.loads((workplace / "data" / "mine" / "tokens" / "meta.json").read_text(encoding="utf-8"))["splits"]["val"]
    assert (found["tokens"], found["documents"]) == (meta["tokens"] - 1, meta["documents"])
    assert (found["words"], found["bytes"]) == (meta["words"], meta["scored_bytes"])
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / found["bytes"] / math.log(2))
    low, high = found["intervals"]["bits_per_byte"]
    assert low < found["bits_per_byte"] < high
    printed = capsys.readouterr().out
    assert printed.count("\n  best ") == printed.count("\n  worst ") == 2


def test_encoding_anew_gives_the_figures_of_the_token_files(workplace, tmp_path):
    """Would catch documents in another order, without their markers, or another text than was prepared."""
    from_tokens = run(workplace, "--run", "own")
    (workplace / "data" / "mine" / "tokens").rename(tmp_path / "aside")
    try:
        from_text = run(workplace, "--run", "own")
    finally:
        (tmp_path / "aside").rename(workplace / "data" / "mine" / "tokens")
    assert from_tokens["source"] != from_text["source"]
    same = [key for key in from_tokens if key not in ("source", "intervals")]
    assert [from_tokens[key] for key in same] == [from_text[key] for key in same]
    assert np.allclose(from_tokens["intervals"]["loss"], from_text["intervals"]["loss"])


def test_several_models_side_by_side_with_warnings(workplace, capsys):
    """Would catch losses per token of two vocabularies printed next to each other without a word."""
    runs = [str(workplace / "runs" / name) for name in ("own", "byte", "word")]
    run(workplace, "--checkpoint", *runs)
    printed = capsys.readouterr().out
    assert "A and B have different tokenizers" in printed and "A and B score different text" not in printed
    assert "A and C score different text" in printed and "<UNK>" in printed and "whitespace-normalised" in printed
    assert "B - A: " in printed
    run(workplace, "--checkpoint", *runs[:2], str(workplace / "runs" / "gpt2"), "--detokenize")
    assert "before its spacing was undone" in capsys.readouterr().out


def test_any_number_of_models_has_names():
    """The twenty-seventh checkpoint, and all behind it, left out without a word."""
    found = list(itertools.islice(evaluate.names(), 800))
    assert found[:2] == ["A", "B"] and found[25:28] == ["Z", "AA", "AB"] and len(set(found)) == 800


def test_figures_of_another_corpus_are_not_kept_as_the_runs_own(workplace, capsys):
    """evaluation_val.json, which report.py shows as the run's, replaced by figures of some other text."""
    before = run(workplace, "--run", "own")
    shutil.copytree(workplace / "data" / "mine", workplace / "data" / "other")
    assert run(workplace, "--run", "own", "--stride", "16", "--corpus", "other") == before
    assert "wrote" not in capsys.readouterr().out.split("stride 16")[1]
    assert run(workplace, "--run", "own", "--stride", "16") != before


def test_a_smaller_stride_gives_context_not_other_tokens(workplace):
    """Would catch a stride that changes which tokens count."""
    plain, sliding = run(workplace, "--run", "own"), run(workplace, "--run", "own", "--stride", "8")
    assert plain["tokens"] == sliding["tokens"] and plain["loss"] != sliding["loss"]
    run(workplace, "--run", "own")


def test_a_hugging_face_folder_scores_like_its_checkpoint(workplace, capsys):
    """Would catch a folder that is read with another tokenizer, other weights or another text."""
    import export

    run_dir = workplace / "runs" / "own"
    assert export.main(["--checkpoint", str(run_dir), "--out", str(workplace / "hf")]) == 0
    capsys.readouterr()
    run(workplace, "--checkpoint", str(run_dir), str(workplace / "hf"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("bits per byte")]
    assert abs(float(rows[0][3]) - float(rows[0][6])) < 2e-4, rows


def test_mistakes_are_one_line(workplace, stage, tmp_path):
    """Would catch tracebacks for a stride that does not fit and a corpus that is not there."""
    from support.common import UserError

    fixed = ["--checkpoint-dir", str(workplace / "runs"), "--run", "own", "--device", "cpu"]
    with pytest.raises(UserError, match="--stride is 33, but it must be from 1 to the model's block of 32"):
        evaluate.main([*fixed, "--stride", "33"])
    with pytest.raises(UserError, match="--by-document is -1, but it must be at least 0"):
        evaluate.main([*fixed, "--by-document", "-1"])
    result = stage("evaluate.py", *fixed, "--corpus", "nowhere")
    assert_user_error(result, "nowhere", "download_data.py")


@pytest.mark.skipif(not has_fbgemm(), reason="this CPU has no FBGEMM")
def test_int8_weights_keep_perplexity_within_half_a_percent():
    """Would catch a rounding that a random model hides: only trained activations have outliers."""
    source = (ROOT / "config.py").read_text(encoding="utf-8")
    tokenizer = BPETokenizer.train([source], kind="byte", vocab_size=400)
    ids = torch.tensor(tokenizer.encode(source))
    config = tiny_config(tokenizer)
    torch.manual_seed(0)
    model = GPT(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(500):
        at = torch.randint(0, len(ids) - 33, (16, 1)) + torch.arange(33)
        _, loss = model(ids[at][:, :-1], ids[at][:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    text = text_of(tokenizer, [source])
    exact = score(model.eval(), text, tokenizer, 32, False, contextlib.nullcontext()).figures()
    small = score(replace_linears(model, Int8Linear), text, tokenizer, 32, False, contextlib.nullcontext()).figures()
    assert exact["perplexity"] < 0.1 * tokenizer.vocab_size, "the model has not learned, so the comparison says nothing"
    assert abs(small["perplexity"] / exact["perplexity"] - 1) < 0.005
