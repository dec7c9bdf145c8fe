"""Generation as a command: texts, streams, stops, machines' JSON, interrupts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_user_error
from tiny_models import random_model, save_run, tiny_config, tiny_tokenizer

import generate
from model import GPT
from support.common import UserError

CPU = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of each tokenizer kind, with random weights."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("word", "byte", "gpt2"):
        tokenizer = tiny_tokenizer(kind)
        config = tiny_config(tokenizer)
        save_run(folder / kind, tokenizer, config, random_model(config, 0.02))
    return folder


def repeating_model(tokenizer, config, cycle: list[int]) -> GPT:
    """A model without attention that goes round `cycle`: the greedy text is known."""
    model = random_model(config, 0.0)
    with torch.no_grad():
        for p in model.transformer.h.parameters():
            p.zero_()
        for at, nxt in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            code = torch.zeros(config.model.n_embd)
            code[cycle.index(at)] = 10.0
            model.transformer.wte.weight[at] = code
            model.lm_head.weight[nxt] = code
        model.transformer.wpe.weight.zero_()
    return model


@pytest.fixture(scope="module")
def emoji_run(tmp_path_factory) -> Path:
    """A run whose greedy text goes round the four bytes of an emoji, then `.`, then the end of the document."""
    tokenizer = tiny_tokenizer("byte", "plain ascii text")
    config = tiny_config(tokenizer, tied_head=False)
    cycle = [tokenizer.bos_id, *(b + 4 for b in "\U0001f642.".encode()), tokenizer.eos_id]
    folder = tmp_path_factory.mktemp("emoji")
    save_run(folder, tokenizer, config, repeating_model(tokenizer, config, cycle))
    return folder


def texts(capsys, *arguments: object) -> list[dict]:
    capsys.readouterr()
    assert generate.main([*CPU, "--json", *map(str, arguments)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_document_end_stops_the_text_and_is_never_printed(emoji_run, capsys):
    """Would catch the marker in the text, or generation running on into another document."""
    (text,) = texts(capsys, "--checkpoint", emoji_run, "--temperature", 0, "--max-new-tokens", 50)
    assert (text["text"], text["finish"], text["tokens"]) == ("\U0001f642.", "eos", 5)
    (text,) = texts(capsys, "--checkpoint", emoji_run, "--temperature", 0, "--max-new-tokens", 14, "--ignore-eos")
    assert (text["text"], text["finish"]) == ("\U0001f642.\U0001f642.", "length")


def test_a_stream_never_shows_half_a_character(emoji_run, capsys):
    """Would catch replacement characters for an emoji that is four tokens, and one swallowed when the text ends inside it."""
    generate.main([*CPU, "--checkpoint", str(emoji_run), "--temperature", "0", "--prompt", ""])
    assert capsys.readouterr().out == "\U0001f642.\n"
    generate.main([*CPU, "--checkpoint", str(emoji_run), "--temperature", "0", "--max-new-tokens", "3"])
    assert capsys.readouterr().out == "\ufffd\n"


def test_stop_texts(emoji_run, capsys):
    """Would catch a stop that is printed, or that works in a stream and not in a batch."""
    for extra in ([], ["--num-samples", 2]):
        for text in texts(capsys, "--checkpoint", emoji_run, "--temperature", 0, "--stop", "zz", "--stop", ".", *extra):
            assert (text["text"], text["finish"]) == ("\U0001f642", "stop")
    generate.main([*CPU, "--checkpoint", str(emoji_run), "--temperature", "0", "--stop", "."])
    assert capsys.readouterr().out == "\U0001f642\n"


@pytest.mark.parametrize("kind", ["word", "byte", "gpt2"])
def test_same_text_streamed_batched_and_without_cache(runs, capsys, kind):
    """Would catch two ways of drawing that disagree, and a prompt that one of them encodes differently."""
    fixed = ["--checkpoint", str(runs / kind), "--prompt", "the quick \u4e2d", "--max-new-tokens", "70", "--ignore-eos"]
    (text,) = texts(capsys, *fixed, "--temperature", 0)
    (uncached,) = texts(capsys, *fixed, "--temperature", 0, "--no-cache")
    assert text == uncached
    generate.main([*CPU, *fixed, "--temperature", "0"])
    shown = capsys.readouterr().out
    assert shown.startswith("the quick \u4e2d") and shown.endswith(text["text"] + "\n")
    drawn = texts(capsys, *fixed, "--num-samples", 3, "--seed", 5)
    assert len({text["text"] for text in drawn}) == 3
    assert drawn == texts(capsys, *fixed, "--num-samples", 3, "--seed", 5)
    assert drawn != texts(capsys, *fixed, "--num-samples", 3, "--seed", 6)


def test_many_samples_are_drawn_some_at_a_time(runs, capsys, monkeypatch):
    """Would catch a batch as large as --num-samples says, which takes all memory, and samples numbered or drawn twice."""
    monkeypatch.setattr(generate, "SIDE_BY_SIDE", 2)
    drawn = texts(capsys, "--checkpoint", runs / "byte", "--max-new-tokens", 20, "--ignore-eos", "--num-samples", 5)
    assert [text["sample"] for text in drawn] == [0, 1, 2, 3, 4]
    assert len({text["text"] for text in drawn}) == 5


def test_prompts_from_files_too_long_ones_and_none(runs, capsys, tmp_path):
    """Would catch an index error behind the block, and silence about what is not read."""
    (tmp_path / "prompt.txt").write_text("the quick brown fox \u2603 " * 30, encoding="utf-8")
    fixed = [*CPU, "--checkpoint", str(runs / "word"), "--max-new-tokens", "40"]
    assert generate.main([*fixed, "--prompt-file", str(tmp_path / "prompt.txt"), "--top-k", "5000"]) == 0
    notes = capsys.readouterr().err
    assert "are not read" in notes and "30 characters of the prompt are not in the vocabulary" in notes
    assert "--top-k 5,000 is above the vocabulary" in notes
    assert generate.main(fixed) == 0


def test_word_prompt_keeps_its_trailing_space_unless_told(runs):
    """Would catch the last word of a prompt encoded as no training text showed it."""
    tokenizer = tiny_tokenizer("word")
    assert tokenizer.decode(generate.encode_prompt(tokenizer, "the quick", True)) == "the quick "
    assert tokenizer.decode(generate.encode_prompt(tokenizer, "the quick", False)) == "the quick"


def test_precisions_and_small_weights_write_the_same_greedy_text(emoji_run, capsys):
    """Would catch a fast path that computes another model."""
    for extra in (["--dtype", "auto"], ["--dtype", "bfloat16"], ["--quantize", "int8"]):
        (text,) = texts(capsys, "--checkpoint", emoji_run, "--temperature", 0, *extra)
        assert text["text"] == "\U0001f642.", extra


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")
def test_compile_on_writes_the_same_text_and_says_so(emoji_run, capsys):
    """Would catch a flag that is accepted and changes nothing, or the text."""
    generate.main([*CPU, "--checkpoint", str(emoji_run), "--temperature", "0", "--compile", "on"])
    captured = capsys.readouterr()
    assert captured.out == "\U0001f642.\n" and ", float32 weights, compiled in " in captured.err


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--num-samples", "0"], "--num-samples is 0"),
        (["--stop", ""], "--stop is empty"),
        (["--interactive", "--json"], "--interactive"),
        (["--compile", "on", "--num-samples", "2"], "--compile on is for one text"),
        (["--compile", "on", "--no-cache"], "--compile on is for one text"),
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (["--checkpoint", "missing.pt"], "missing.pt"),
    ],
)
def test_mistakes(arguments, fragment):
    """Would catch a traceback, or a loop over no texts, for a mistyped command."""
    with pytest.raises((UserError, FileNotFoundError), match=fragment):
        generate.main([*CPU, *arguments])


def test_settings_out_of_range_and_wrong_tokenizers(stage, tmp_path):
    """Would catch negative settings accepted, and a vocabulary that is not the model's."""
    assert_user_error(stage("generate.py", "--temperature", "-1"), "temperature", "at least 0")
    small, large = tiny_tokenizer("byte", "plain ascii text"), tiny_tokenizer("byte")
    config = tiny_config(large)
    path = save_run(tmp_path / "run", small, config, random_model(config))
    with pytest.raises(UserError, match="its tokenizer has"):
        generate.main([*CPU, "--checkpoint", str(path)])


def test_a_damaged_checkpoint_names_the_one_that_reads_well(runs, tmp_path):
    """Would catch text drawn from weights with a flipped bit, and a message that leaves the reader without a next step."""
    best = shutil.copytree(runs / "byte", tmp_path / "run") / "checkpoint_best.pt"
    latest, damaged = best.with_name("checkpoint_latest.pt"), bytearray(best.read_bytes())
    assert latest.exists()
    damaged[len(damaged) // 2] ^= 1  # inside a tensor: torch reads on without a word
    best.unlink()
    best.write_bytes(damaged)
    with pytest.raises(UserError, match=rf"checksum.*; use --checkpoint {re.escape(str(latest))} \(step 7\), which reads well"):
        generate.main([*CPU, "--checkpoint", str(tmp_path / "run")])
    latest.write_bytes(damaged[:100])
    with pytest.raises(UserError, match=r"no other one in .* reads well, so train again: uv run python train.py"):
        generate.main([*CPU, "--checkpoint", str(tmp_path / "run")])


@pytest.mark.skipif(os.name == "nt", reason="interrupts are sent differently on Windows")
def test_interactive_cancels_a_text_and_goes_on(runs):
    """Would catch Ctrl-C ending the session, and a cancelled text that the next prompt still sees."""
    command = [sys.executable, str(ROOT / "generate.py"), *CPU, "--checkpoint", str(runs / "byte"), "--interactive"]
    command += ["--max-new-tokens", "1000000", "--ignore-eos"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        for prompt in (b"the quick\n", b"\n"):
            process.stdin.write(prompt)
            process.stdin.flush()
            while process.stdout.read(1) != b" ":  # behind the prompt sign
                pass
            process.stdout.read(200)
            process.send_signal(signal.SIGINT)
            while process.stdout.read(1) != b"]":
                pass
        notes = process.communicate(timeout=60)[1]
    assert process.returncode == 0, notes
    assert b"tokens/s" in notes and b"Traceback" not in notes
