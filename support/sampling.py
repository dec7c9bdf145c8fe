"""How text is drawn from a model: one next token from logits, and a sequence of them with or without a key-value cache.

A context is at most `block_size` tokens. When one more would not fit, the last block_size // 2 tokens are kept and read again
from position 0: one rule for both paths, so the cache changes the speed and never the text.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from config import SampleConfig
from model import GPT, KVCache
from support.common import UserError

# ----------------------------------------------------------------------------------------------------------------------
# One token


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Makes tokens that were seen already less likely: positive logits are divided by `penalty`, negative ones multiplied.

    `logits` is (B, V), `seen` (B, T) ids in any order, repeats allowed. Source: CTRL, Keskar et al. 2019, section 4.1.
    """
    scores = logits.gather(1, seen)  # (B, T)
    return logits.scatter(1, seen, torch.where(scores > 0, scores / penalty, scores * penalty))


def sampling_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The distribution the next token is drawn from: (probabilities, ids), both (B, K), the most likely first.

    Exactly `top_k` tokens stay, ties at the edge included (0: all; above V: V). Of these, `top_p` keeps the smallest set that
    reaches that much probability (Holtzman et al. 2020) and `min_p` those with at least that share of the first one's
    probability. The most likely token always stays.
    """
    k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
    scores, ids = torch.topk(logits.double(), k, dim=-1, sorted=True)
    # The largest score becomes 0 before the division: a tiny temperature then gives 0 and -inf, never inf - inf or 0 / 0.
    probs = torch.softmax((scores - scores[:, :1]) / temperature, dim=-1)
    if top_p < 1.0:
        before = probs.cumsum(dim=-1) - probs  # probability of everything more likely; 0 for the first, so it stays
        probs = probs.masked_fill(before >= top_p, 0.0)
    if min_p > 0.0:
        probs = probs.masked_fill(probs < min_p * probs[:, :1], 0.0)
    return probs, ids


def next_token(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws one id a row from logits (B, V); returns (B,). Temperature 0 takes the most likely one and draws nothing."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    probs, ids = sampling_probabilities(logits, temperature, top_k, top_p, min_p)
    choice = torch.multinomial(probs, 1, generator=generator)  # (B, 1); weights need no normalising
    return ids.gather(1, choice).squeeze(1)


# ----------------------------------------------------------------------------------------------------------------------
# A sequence


class Decoder(Protocol):
    """What `generate_batch` needs of a model. Ids come and logits may go on any device."""

    block_size: int

    def prefill(self, idx: Tensor) -> Tensor:
        """Starts over with the context `idx` (B, T), T <= block_size; returns the logits (B, V) behind its last token."""

    def step(self, ids: Tensor) -> Tensor:
        """Appends one id a row, (B,), to the context, which holds fewer than block_size; returns logits (B, V)."""


class CachedDecoder:
    """The context's keys and values are kept, so that a step costs one token's work."""

    def __init__(self, model: GPT) -> None:
        self.model, self.block_size = model, model.config.block_size
        self._cache: KVCache | None = None

    @torch.inference_mode()
    def prefill(self, idx: Tensor) -> Tensor:
        if self._cache is None or self._cache.k[0].shape[0] != idx.shape[0]:
            self._cache = self._new_cache(idx.shape[0])
        self._cache.length = 0
        return self._read(idx)

    def _new_cache(self, batch_size: int) -> KVCache:
        weight = self.model.transformer.wte.weight
        return KVCache(self.model.config, batch_size, weight.device, weight.dtype)

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        return self._read(ids[:, None])

    def _read(self, idx: Tensor) -> Tensor:
        idx = idx.to(self.model.transformer.wte.weight.device)
        return self.model(idx, cache=self._cache, last_only=True)[0][:, -1]


class UncachedDecoder:
    """The whole context is read again for every token: the check on the cached path."""

    def __init__(self, model: GPT) -> None:
        self.model, self.block_size = model, model.config.block_size
        self._context: Tensor | None = None

    @torch.inference_mode()
    def prefill(self, idx: Tensor) -> Tensor:
        self._context = idx
        return self.model(idx.to(self.model.transformer.wte.weight.device), last_only=True)[0][:, -1]

    def step(self, ids: Tensor) -> Tensor:
        return self.prefill(torch.cat([self._context, ids[:, None]], dim=1))


def generate_batch(
    decoder: Decoder,
    idx: Tensor,
    max_new_tokens: int,
    sample: SampleConfig,
    *,
    generator: torch.Generator | None = None,
    never: Sequence[int] = (),
) -> Iterator[Tensor]:
    """Continues every row of `idx` (B, T), T >= 1, on the CPU; yields the next ids (B,) `max_new_tokens` times.

    Only the last `block_size` tokens are read, and count as seen for the repetition penalty. Ids in `never` are not drawn.
    Drawing happens on the CPU, so a seed means the same on every device. The caller stops by closing the iterator.
    """
    block_size, length = decoder.block_size, min(idx.shape[1], decoder.block_size)
    context = idx[:, -block_size:]
    logits = decoder.prefill(context)
    for remaining in reversed(range(max_new_tokens)):
        ids = _draw(logits, context, sample, generator, never)
        yield ids
        if remaining == 0:
            return
        context = torch.cat([context, ids[:, None]], dim=1)[:, -block_size:]
        if length < block_size:
            length += 1
            logits = decoder.step(ids)
        else:
            length = max(1, block_size // 2)
            logits = decoder.prefill(context[:, -length:])


def _draw(
    logits: Tensor, context: Tensor, sample: SampleConfig, generator: torch.Generator | None, never: Sequence[int]
) -> Tensor:
    logits = logits.float().cpu()
    if logits.sum().isnan():
        raise UserError("the model's output is not a number; damaged weights, or too low a precision (--dtype float32)")
    if sample.repetition_penalty != 1.0:
        logits = penalise_repeats(logits, context, sample.repetition_penalty)
    if never:
        logits = logits.index_fill(1, torch.tensor(never), float("-inf"))
    return next_token(logits, sample.temperature, sample.top_k, sample.top_p, sample.min_p, generator)


def generate(
    model: GPT,
    ids: Sequence[int],
    max_new_tokens: int,
    sample: SampleConfig,
    *,
    seed: int = 0,
    stop_ids: Iterable[int] = (),
    never: Sequence[int] = (),
    use_cache: bool = True,
) -> Iterator[int]:
    """Continues one sequence (at least one id); yields ids until `max_new_tokens` or one of `stop_ids`, which is not yielded.

    Dropout is off meanwhile; the model goes back to the mode it was in.
    """
    decoder = CachedDecoder(model) if use_cache else UncachedDecoder(model)
    generator = torch.Generator().manual_seed(seed)
    idx = torch.tensor([list(ids)], dtype=torch.long)
    stop_ids, was_training = set(stop_ids), model.training
    model.eval()
    try:
        for drawn in generate_batch(decoder, idx, max_new_tokens, sample, generator=generator, never=never):
            if drawn.item() in stop_ids:
                return
            yield drawn.item()
    finally:
        model.train(was_training)


# ----------------------------------------------------------------------------------------------------------------------
# Text


class StopFilter:
    """Passes text on until one of `stops` appears, however it is spread over the pieces; `hit` tells that one did.

    Text that may be the beginning of a stop is held back until that is clear: with the stop `</b>`, the pieces "a<", "b<",
    "/b>c" come out as "a", "<b", "".
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.hit = stops, "", False

    def push(self, piece: str) -> str:
        self.held += piece
        found = [at for at in map(self.held.find, self.stops) if at >= 0]
        self.hit = bool(found)
        ready = min(found) if found else len(self.held) - _possible_beginning(self.held, self.stops)
        text, self.held = self.held[:ready], self.held[ready:]
        return text

    def flush(self) -> str:
        """What is still held back, once no more text comes."""
        text, self.held = self.held, ""
        return text


def _possible_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), 0)
