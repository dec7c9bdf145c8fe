"""Token files and which windows belong to which step.

A window is `block_size` input tokens and the same number of targets, shifted by one. Which windows a step trains on is a
pure function of (seed, step), so no reader position is ever saved and resuming takes no time. Only NumPy's raw Philox stream
is drawn from, because NumPy guarantees that one across versions, and mapped to windows here.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import Config, ModelConfig, TrainConfig
from support.common import UserError, misfit, read_json

IGNORED_TARGET = -100  # what cross_entropy leaves out
PADDING = -1  # an offset that stands for no window: a row of ignored targets, so that batches keep one shape

# What is read of meta.json here.
META = {
    "format": (1,),
    "dtype": ("uint16", "uint32"),
    "vocab_size": int,
    "tokenizer_sha256": str,
    "splits": {str: {"file": str, "tokens": int}},
    "fingerprint": str,
}

# Streams of random numbers drawn from one seed; a stream and a position in it never meet another use.
WINDOW_STREAM, SHUFFLE_STREAM, MICRO_STEP_STREAM, SAMPLE_STREAM = range(4)


def _strays(meta: dict[str, Any], split: str) -> bool:
    """Whether a split's file would lie outside the folder of meta.json."""
    name = meta["splits"][split]["file"]
    return Path(name).name != name or "\0" in name


class TokenData:
    """The token files of one corpus and vocabulary, checked against their meta.json."""

    def __init__(self, folder: Path, meta: dict[str, Any], command: str) -> None:
        self.folder, self.meta, self.command = folder, meta, command
        self.fingerprint: str = meta["fingerprint"]
        self.vocab_size: int = meta["vocab_size"]
        self.dtype = np.dtype(meta["dtype"]).newbyteorder("<")

    @classmethod
    def load(cls, config: Config) -> "TokenData":
        """Opens the token files of `config`. Raises UserError naming the command that makes them when they are not usable."""
        command = config.command("prepare_data.py")
        path = config.tokens_dir / "meta.json"
        meta = read_json(path, command)
        problem = misfit(meta, META) or next(
            (f"splits.{n}.file leads elsewhere" for n in meta["splits"] if _strays(meta, n)), None
        )
        if problem is not None:
            raise UserError(f"{path} is damaged or of another format ({problem}); make it again with: {command}")
        data = cls(config.tokens_dir, meta, command)
        for name in meta["splits"]:
            data._check_size(name)
        return data

    def _check_size(self, name: str) -> None:
        path = self.path(name)
        expected = self.num_tokens(name) * self.dtype.itemsize
        if not path.exists():
            raise UserError(f"{path} is missing; run: {self.command}")
        if path.stat().st_size != expected:
            found = path.stat().st_size
            raise UserError(f"{path} has {found:,} bytes, expected {expected:,}; make it again with: {self.command}")

    def path(self, name: str) -> Path:
        return self.folder / self.meta["splits"][name]["file"]

    def num_tokens(self, name: str) -> int:
        if name not in self.meta["splits"]:
            raise UserError(f"{self.folder / 'meta.json'} knows no split {name}; run: {self.command}")
        return self.meta["splits"][name]["tokens"]

    def split(self, name: str) -> np.ndarray:
        """The ids of a split, mapped from its file, read-only."""
        if self.num_tokens(name) == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path(name), dtype=self.dtype, mode="r")

    def check_ids(self, name: str) -> None:
        """Raises UserError when an id has no row in the model: on a GPU that would be an obscure crash long after."""
        with open(self.path(name), "rb") as file:
            while chunk := file.read(1 << 24):
                largest = int(np.frombuffer(chunk, self.dtype).max())
                if largest >= self.vocab_size:
                    found = f"holds the id {largest:,}, but the vocabulary has {self.vocab_size:,} tokens"
                    raise UserError(f"{self.path(name)} {found}; make it again with: {self.command}")

    def fit(self, model: ModelConfig) -> ModelConfig:
        """The model's settings with what the vocabulary decides. In GPT-2's the last token stands between documents."""
        gpt2 = self.meta.get("tokenizer_kind") == "gpt2"
        bos_id = self.vocab_size - 1 if model.document_mask and gpt2 else model.bos_id
        return dataclasses.replace(model, vocab_size=self.vocab_size, bos_id=bos_id)

    def require_window(self, name: str, block_size: int) -> None:
        """Raises UserError when a split is shorter than one window."""
        present, needed = self.num_tokens(name), block_size + 1
        if present < needed:
            found = f"the {name} split in {self.folder} has {present:,} tokens, but block_size {block_size} needs {needed:,}"
            share = " (or give stage 1 a larger --val-fraction)" if name == "val" else ""
            shorter = f", or train with --block-size {present - 1} or less" if present > 1 else ""
            raise UserError(f"{found}; bring more text{share}{shorter}")


class WindowReader:
    """Reads windows of one split.

    By plain reads, not through a memory map: pages of a map count as resident memory once touched, and the system may map
    megabytes around each, until a long run holds the whole file.
    """

    def __init__(self, data: TokenData, split: str, block_size: int) -> None:
        self.block_size, self.dtype, self.num_tokens = block_size, data.dtype, data.num_tokens(split)
        self._file = open(data.path(split), "rb", buffering=0)
        self._repair = f"make it again with: {data.command}"

    def read(self, offsets: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 (B, T), of the windows that begin at `offsets` (B,).

        Targets behind the end of the tokens, and all of a PADDING row, are IGNORED_TARGET. Raises UserError where the file has
        become shorter than it was.
        """
        ids = np.zeros((len(offsets), self.block_size + 1), self.dtype)
        for row, offset in zip(ids, offsets, strict=True):
            if offset != PADDING:
                self._fill(row, int(offset))
        x, y = ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)
        y[np.arange(self.block_size) >= self._targets(offsets)[:, None]] = IGNORED_TARGET
        return torch.from_numpy(x), torch.from_numpy(y)

    def _fill(self, row: np.ndarray, offset: int) -> None:
        """Reads ids into `row`, as many as there are from `offset` on."""
        left = memoryview(row).cast("B")[: (self.num_tokens - offset) * self.dtype.itemsize]
        self._file.seek(offset * self.dtype.itemsize)
        while left:
            count = self._file.readinto(left)
            if not count:  # ids that are missing would be trained on as zeros
                raise UserError(f"{self._file.name} was cut short while it was in use; {self._repair}")
            left = left[count:]

    def _targets(self, offsets: np.ndarray) -> np.ndarray:
        """Targets in each of the windows at `offsets` that are not ignored."""
        return np.where(offsets == PADDING, 0, np.minimum(self.block_size, self.num_tokens - 1 - offsets))

    def count_targets(self, offsets: np.ndarray) -> int:
        """Targets in all these windows together."""
        return int(self._targets(offsets).sum())


# ----------------------------------------------------------------------------------------------------------------------
# Which windows


def random_raw(seed: int, stream: int, position: tuple[int, int], count: int) -> np.ndarray:
    """`count` raw 64-bit numbers that belong to (seed, stream, position)."""
    key = np.array([seed, stream], np.uint64)
    # The generator counts up in the first word, so different positions never overlap.
    counter = np.array([0, 0, *position], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def derived_seed(seed: int, stream: int, position: tuple[int, int]) -> int:
    """A 63-bit seed for torch that belongs to (seed, stream, position): dropout of a micro-step on whichever rank it runs."""
    return int(random_raw(seed, stream, position, 1)[0] >> np.uint64(1))


def train_windows(seed: int, step: int, num_tokens: int, train: TrainConfig, block_size: int) -> np.ndarray:
    """Offsets (batch_size * grad_accum_steps,) of the windows of update `step`; micro-step m takes the m-th batch_size of them.

    Beyond the end of a run measured in passes the offsets are PADDING.
    """
    count = train.batch_size * train.grad_accum_steps
    if train.sampling == "random":
        choices = num_tokens - block_size  # a window has block_size + 1 tokens
        raw = random_raw(seed, WINDOW_STREAM, (step, 0), count)
        return np.array([int(r) * choices >> 64 for r in raw], np.int64)
    position = step * count + np.arange(count)
    offsets = _epoch_offsets(seed, position, windows_per_pass(num_tokens, block_size), block_size)
    return np.where(position < total_windows(num_tokens, train, block_size), offsets, PADDING)


def windows_per_pass(num_tokens: int, block_size: int) -> int:
    """Non-overlapping windows that make every token but the first a target once; the last may be short."""
    return -(-(num_tokens - 1) // block_size)


def total_windows(num_tokens: int, train: TrainConfig, block_size: int) -> float:
    """Windows of a run: as many as `max_epochs` passes have, without end where the run is measured in steps."""
    if train.max_iters:
        return math.inf
    return math.ceil(train.max_epochs * windows_per_pass(num_tokens, block_size))


def count_steps(num_tokens: int, train: TrainConfig, block_size: int) -> int:
    """Updates of the whole schedule."""
    windows = total_windows(num_tokens, train, block_size)
    return train.max_iters or -(-windows // (train.batch_size * train.grad_accum_steps))


def _epoch_offsets(seed: int, position: np.ndarray, per_pass: int, block_size: int) -> np.ndarray:
    """Offsets of the windows at these positions in the endless sequence of shuffled passes."""
    offsets = np.empty(len(position), np.int64)
    number = position // per_pass
    for one in np.unique(number):
        here = number == one
        offsets[here] = _shuffled(seed, int(one), per_pass)[position[here] % per_pass] * block_size
    return offsets


@functools.lru_cache(maxsize=2)  # a step can lie across the border of two passes
def _shuffled(seed: int, number: int, count: int) -> np.ndarray:
    """The order of windows 0..count-1 in pass `number`: sorted by random keys."""
    return np.argsort(random_raw(seed, SHUFFLE_STREAM, (number, 0), count), kind="stable")


def eval_windows(num_tokens: int, block_size: int, count: int) -> np.ndarray:
    """Offsets of `count` non-overlapping windows spread evenly over a split; 0: of all, the short last one included."""
    every = windows_per_pass(num_tokens, block_size)
    if count == 0 or count >= every:
        return np.arange(every) * block_size
    whole = (num_tokens - 1) // block_size
    return np.arange(count) * whole // count * block_size


def in_batches(offsets: np.ndarray, batch_size: int, multiple: int = 1) -> np.ndarray:
    """Offsets as (batches, batch_size), a multiple of `multiple` batches, filled up with PADDING.

    One shape for all of them, so that nothing is compiled twice.
    """
    batches = -(-len(offsets) // (batch_size * multiple)) * multiple
    padded = np.full(batches * batch_size, PADDING, np.int64)
    padded[: len(offsets)] = offsets
    return padded.reshape(batches, batch_size)
