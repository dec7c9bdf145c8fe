"""Which windows a step trains on, what is in a batch, and which token files are refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from tiny_corpus import make_tiny_corpus

from config import PRESETS, ModelConfig, TrainConfig, make_config
from dataset import (
    IGNORED_TARGET,
    PADDING,
    TokenData,
    WindowReader,
    count_steps,
    derived_seed,
    eval_windows,
    in_batches,
    train_windows,
    windows_per_pass,
)
from support.common import UserError

EPOCH = TrainConfig(batch_size=3, grad_accum_steps=2, sampling="epoch", max_iters=0, max_epochs=2.0)
RANDOM = TrainConfig(batch_size=3, grad_accum_steps=2)


def all_steps(seed: int, num_tokens: int, train: TrainConfig, block_size: int) -> list[np.ndarray]:
    steps = range(count_steps(num_tokens, train, block_size))
    return [train_windows(seed, step, num_tokens, train, block_size) for step in steps]


def test_windows_of_a_step_are_the_same_for_ever():
    """A change of the stream, the mapping or the key would bend every run that is resumed with a newer version."""
    assert train_windows(1337, 0, 1_000_000, RANDOM, 512).tolist() == GOLDEN_RANDOM
    assert train_windows(1337, 7, 1_000_000, EPOCH, 512).tolist() == GOLDEN_EPOCH
    assert derived_seed(1337, 2, (7, 3)) == GOLDEN_SEED


def test_random_windows_reach_every_offset_and_differ_between_steps():
    """An off-by-one range would never train on the last token, or read beyond it."""
    drawn = np.concatenate([train_windows(5, step, 40, RANDOM, 32) for step in range(200)])
    assert set(drawn) == set(range(40 - 32))
    assert train_windows(5, 1, 10**6, RANDOM, 32).tolist() != train_windows(5, 2, 10**6, RANDOM, 32).tolist()
    assert train_windows(5, 1, 10**6, RANDOM, 32).tolist() != train_windows(6, 1, 10**6, RANDOM, 32).tolist()


@pytest.mark.parametrize("num_tokens", [33, 64, 65, 1000, 1025])
def test_a_pass_makes_every_token_but_the_first_a_target_once(num_tokens: int):
    """Leftover tokens, a short last micro-batch or the border between passes could be dropped or used twice."""
    passes = 3
    train = dataclasses.replace(EPOCH, max_epochs=float(passes))
    offsets = np.concatenate(all_steps(1, num_tokens, train, 32))
    used = offsets[offsets != PADDING]
    per_pass = windows_per_pass(num_tokens, 32)
    assert len(used) == passes * per_pass
    for one in used.reshape(passes, per_pass):
        targets = [t for o in one for t in range(o + 1, min(o + 33, num_tokens))]
        assert sorted(targets) == list(range(1, num_tokens))


def test_every_pass_has_another_order_and_every_run_the_same():
    """One order for all passes shows as waves in the loss."""
    orders = np.concatenate(all_steps(1, 40 * 32, EPOCH, 32))[: 2 * 40].reshape(2, 40)
    assert orders[0].tolist() != orders[1].tolist() and sorted(orders[0]) == sorted(orders[1])
    assert np.concatenate(all_steps(1, 40 * 32, EPOCH, 32)).tolist()[:80] == orders.ravel().tolist()


def test_the_vocabulary_says_what_a_document_begins_with(tmp_path: Path):
    """A mask that looks for our <BOS> in GPT-2's vocabulary, or a setting of it in runs that use no mask."""
    for kind, mask, expected in (("gpt2", True, 50_256), ("gpt2", False, 2), ("word", True, 2)):
        meta = {"fingerprint": "", "vocab_size": 50_257, "dtype": "uint16", "splits": {}, "tokenizer_kind": kind}
        fitted = TokenData(tmp_path, meta, "").fit(ModelConfig(document_mask=mask))
        assert (fitted.vocab_size, fitted.bos_id) == (50_257, expected)


@pytest.mark.parametrize("train", [RANDOM, EPOCH], ids=["random", "epoch"])
def test_cutting_a_step_into_other_micro_batches_keeps_its_windows(train: TrainConfig):
    """Micro-batches and ranks only partition a step; drawing per micro-batch would tie the data to the machine."""
    other = dataclasses.replace(train, batch_size=1, grad_accum_steps=6)
    assert train_windows(3, 4, 5000, train, 32).tolist() == train_windows(3, 4, 5000, other, 32).tolist()


def reader_of(tokens: np.ndarray, folder: Path, block_size: int) -> WindowReader:
    tokens.tofile(folder / "train.bin")
    splits = {"train": {"file": "train.bin", "tokens": len(tokens)}}
    meta = {"fingerprint": "", "vocab_size": 2**32, "dtype": tokens.dtype.name, "splits": splits}
    return WindowReader(TokenData(folder, meta, ""), "train", block_size)


def test_targets_are_shifted_by_one_and_padded_with_ignored_ones(tmp_path: Path):
    """A window at the end of the tokens, or none at all, must not wrap around or score what is not there."""
    reader, offsets = reader_of(np.arange(100, 110, dtype=np.uint16), tmp_path, 4), np.array([0, 7, PADDING, 5])
    x, y = reader.read(offsets)
    assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
    assert x[0].tolist() == [100, 101, 102, 103] and y[0].tolist() == [101, 102, 103, 104]
    assert x[1, :3].tolist() == [107, 108, 109] and y[1].tolist() == [108, 109, IGNORED_TARGET, IGNORED_TARGET]
    assert y[2].tolist() == [IGNORED_TARGET] * 4 and y[3].tolist() == [106, 107, 108, 109]
    assert reader.count_targets(offsets) == int((y != IGNORED_TARGET).sum()) == 10


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint16, 65_535), (np.uint32, 65_536), (np.uint32, 2**31)])
def test_large_ids_arrive_whole(dtype: type, largest: int, tmp_path: Path):
    """A signed 16-bit view turns 65,535 into -1."""
    x, y = reader_of(np.array([0, largest, 1], dtype), tmp_path, 2).read(np.array([0]))
    assert x.tolist() == [[0, largest]] and y.tolist() == [[largest, 1]]


def test_eval_windows_are_spread_without_overlap():
    """Windows that overlap, or lie in one part, make the validation loss another number."""
    offsets = eval_windows(10_001, 32, 24)
    assert len(offsets) == 24 and np.all(np.diff(offsets) >= 32) and np.all(offsets % 32 == 0)
    assert offsets[0] == 0 and offsets[-1] > 9_000 and np.diff(offsets).max() - np.diff(offsets).min() <= 32
    every = eval_windows(10_050, 32, 0)
    assert len(every) == -(-10_049 // 32) and every.tolist() == eval_windows(10_050, 32, 10**6).tolist()


def test_in_batches_fills_up():
    """A batch of another shape is compiled again."""
    assert in_batches(np.arange(5), 2).tolist() == [[0, 1], [2, 3], [4, PADDING]]
    assert in_batches(np.arange(5), 2, multiple=2).shape == (4, 2)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_have_a_schedule(preset: str):
    """A schedule measured in passes that comes out at no step at all."""
    config = make_config(preset)
    assert count_steps(10**9, config.train, config.model.block_size) > 0


# ----------------------------------------------------------------------------------------------------------------------
# Files


@pytest.fixture
def tiny(tmp_path: Path) -> tuple:
    make_tiny_corpus(tmp_path)
    return make_config("wikitext103", {"corpus": "tiny", "data_dir": str(tmp_path)}), tmp_path / "tiny" / "tokens"


def damage_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}), encoding="utf-8")


def test_unfinished_or_damaged_token_files_are_refused(tiny: tuple):
    """Half-written or foreign token files train a model on rubbish."""
    config, folder = tiny
    whole = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(whole[:-2])
    with pytest.raises(UserError, match=r"train.bin has .* bytes, expected .* prepare_data.py --corpus tiny"):
        TokenData.load(config)
    (folder / "train.bin").write_bytes(whole)
    damage_meta(folder, dtype="float64")
    with pytest.raises(UserError, match="dtype"):
        TokenData.load(config)
    damage_meta(folder, dtype="uint16", splits=None)
    with pytest.raises(UserError, match="splits is None"):
        TokenData.load(config)
    (folder / "meta.json").unlink()
    with pytest.raises(UserError, match=r"meta.json is missing; run: uv run python prepare_data.py"):
        TokenData.load(config)


def test_ids_without_a_row_are_refused(tiny: tuple):
    """Data made with a larger vocabulary fails late, or, on a GPU, with a crash that says nothing."""
    config, folder = tiny
    damage_meta(folder, vocab_size=100)
    with pytest.raises(UserError, match=r"holds the id .* but the vocabulary has 100 tokens"):
        TokenData.load(config).check_ids("train")


def test_a_split_shorter_than_a_window_is_refused(tiny: tuple):
    """A bare index error deep in the loader."""
    data = TokenData.load(tiny[0])
    with pytest.raises(
        UserError, match=r"the val split .* has 1,399 tokens, but block_size 2048 needs 2,049.*--block-size 1398"
    ):
        data.require_window("val", 2048)
    data.require_window("val", 1398)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_resident_memory_stays_flat(tmp_path: Path):
    """Pages of a long-lived mapping count as resident, until the system kills the run."""
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from pathlib import Path
from dataset import TokenData, WindowReader
folder = Path({str(tmp_path)!r})
np.random.default_rng(0).integers(0, 99, 160_000_000, dtype=np.uint16).tofile(folder / "train.bin")  # 320 MB
meta = dict(fingerprint="", vocab_size=99, dtype="uint16", splits=dict(train=dict(file="train.bin", tokens=160_000_000)))
reader = WindowReader(TokenData(folder, meta, ""), "train", 64)
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
draw = np.random.default_rng(1)
def read(n):
    for _ in range(n): reader.read(draw.integers(0, 159_000_000, 16))
read(100); before = resident(); read(3000)
print((resident() - before) // 1_000_000)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 20, "megabytes grown over 3,000 batches that touch the whole file"


GOLDEN_RANDOM = [919145, 983897, 112932, 826311, 216582, 360164]
GOLDEN_EPOCH = [295424, 222208, 592384, 625152, 848384, 660992]
GOLDEN_SEED = 3010307431717112751


def test_a_file_cut_short_while_training_reads_it_is_an_error(tmp_path: Path) -> None:
    """Missing ids were trained on as zeros, without a word, and the loss went up."""
    make_tiny_corpus(tmp_path)
    config = make_config("quick", {"corpus": "tiny", "data_dir": str(tmp_path)})
    reader = WindowReader(TokenData.load(config), "train", 32)
    last = np.array([reader.num_tokens - 10])  # a window that the end cuts off is none
    assert reader.read(last)[1][0, 8] != IGNORED_TARGET
    path = tmp_path / "tiny" / "tokens" / "train.bin"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(UserError, match=r"train\.bin was cut short .* prepare_data\.py"):
        reader.read(last)
