"""What a model makes of a whole split: the loss of every token, summed by document, and the figures that follow from it.

loss                  nats per token = summed loss / scored tokens
perplexity            per token = exp(loss)
perplexity per word   exp(summed loss / whitespace-separated words of the text as read)
bits per byte         summed loss / (ln 2 * UTF-8 bytes of the documents' text)

The first two depend on the tokenizer, so only figures per word or byte compare models with different ones. Documents are
packed, as in training: a window looks across their boundaries unless they are scored separately, or the model masks others.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from corpus import Corpus
from dataset import IGNORED_TARGET, TokenData
from model import GPT
from support.common import Progress, UserError, misfit
from tokenizer import BPETokenizer

LOGITS_PER_BATCH = 1 << 26  # fp32 logits held at once: 256 MB, and as much again inside the loss
RESAMPLES_AT_ONCE = 50

# ----------------------------------------------------------------------------------------------------------------------
# The text to score


@dataclass(frozen=True)
class ScoredText:
    """The ids of a split and its documents: document d is `ids[starts[d] : starts[d + 1]]` (D + 1 starts).

    `words` and `bytes` (D,) are those of the documents' text, which may hold more than the ids can express (<UNK>).
    """

    ids: np.ndarray
    starts: np.ndarray
    words: np.ndarray
    bytes: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document(self, d: int) -> np.ndarray:
        return self.ids[self.starts[d] : self.starts[d + 1]]


def document_starts(ids: np.ndarray, tokenizer: BPETokenizer) -> np.ndarray:
    """Where documents begin, and the end: at each <BOS>, or behind each end-of-text where that is the only marker."""
    marks = np.flatnonzero(ids == tokenizer.eos_id) + 1 if tokenizer.kind == "gpt2" else np.flatnonzero(ids == tokenizer.bos_id)
    return np.union1d(marks, [0, len(ids)])


def text_from_tokens(data: TokenData, split: str, tokenizer: BPETokenizer) -> ScoredText:
    """The split as encoded. Words and bytes of a document come from its decoded ids, their sums from meta.json."""
    ids, entry = data.split(split), data.meta["splits"][split]
    if (problem := misfit(entry, {"words": int, "scored_bytes": int}, f"splits.{split}")) is not None:
        raise UserError(f"{data.folder / 'meta.json'} is damaged ({problem}); make it again with: {data.command}")
    starts, counts = document_starts(ids, tokenizer), []
    with Progress(len(starts) - 1, "counting words", "document", scale=True) as progress:
        for a, b in itertools.pairwise(starts.tolist()):
            text = tokenizer.decode(ids[a:b].tolist())
            counts.append((len(text.split()), len(text.encode("utf-8"))))
            progress.update()
    # Characters without a token are missing from decoded text, so the documents' shares are scaled to the true sums.
    totals = np.array([entry["words"], entry["scored_bytes"]], np.float64)
    table = np.array(counts, np.float64).reshape(-1, 2)
    words, num_bytes = (table * totals / np.maximum(table.sum(axis=0), 1)).T
    return ScoredText(ids, starts, words, num_bytes, str(data.path(split)))


def text_from_corpus(corpus: Corpus, split: str, tokenizer: BPETokenizer, detokenise: bool = False) -> ScoredText:
    """The split encoded anew with `tokenizer`; words and bytes are those of the text as it was before `detokenise`."""
    documents, words, num_bytes = [], [], []
    with Progress(corpus.documents.get(split), "encoding", "document", scale=True) as progress:
        for text in corpus.iter_documents(split):
            words.append(len(text.split()))
            num_bytes.append(len(tokenizer.scored_text(text).encode("utf-8", "replace")))
            ids = tokenizer.encode(detokenise_wikitext(text) if detokenise else text)
            documents.append(np.array(tokenizer.wrap_document(ids), np.uint32))
            progress.update()
    starts = np.cumsum([0, *map(len, documents)])
    ids = np.concatenate([np.empty(0, np.uint32), *documents])
    how = "detokenised and encoded anew" if detokenise else "encoded anew"
    return ScoredText(ids, starts, np.array(words, float), np.array(num_bytes, float), f"the corpus's text, {how}")


# WikiText separates punctuation with spaces and writes " @-@ " inside numbers and compounds. Order matters.
DETOKENISER = (
    (r" @([-,.])@ ", r"\1"),
    (r" ([,.:;!?%)\]}])", r"\1"),
    (r"([(\[{$£]) ", r"\1"),
    (r" (n't|'(?:s|t|re|ve|m|ll|d)\b)", r"\1"),
    (r"s '(?= )", r"s'"),
    (r'" ([^"\n]*) "', r'"\1"'),
    (r" ' ([^'\n]*) '(?= )", r" '\1'"),
    (r" ° ", r"°"),
    (r"(?m)^ (=[= ]*) (.+?) ([= ]*=) ?$", lambda m: f"{m[1].replace(' ', '')} {m[2]} {m[3].replace(' ', '')}"),
    (r"(?m)^ | $", ""),
)


def detokenise_wikitext(text: str) -> str:
    """WikiText's spaced-out text as people write it, for models trained on ordinary text.

    `a 20 @.@ 5 m ( " long " ) jump , he said .` becomes `a 20.5 m ("long") jump, he said.`
    """
    for pattern, replacement in DETOKENISER:
        text = re.sub(pattern, replacement, text)
    return text


# ----------------------------------------------------------------------------------------------------------------------
# Scoring


def plan_windows(first: int, last: int, block_size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over the tokens [first, last): (start, end, first scored target); each reads [start, end) and predicts one on.

    Every token but the first is scored exactly once; from the second window on with at least block_size - stride tokens of
    context. `stride` equal to `block_size` is plain chunking.
    """
    scored = first + 1
    for start in range(first, max(first + 1, last), stride):
        end = min(start + block_size, last - 1)
        if scored <= end:
            yield start, end, scored
        scored = end + 1
        if end == last - 1:
            return


def segments(text: ScoredText, tokenizer: BPETokenizer, separate: bool) -> list[tuple[int, int]]:
    """The stretches that windows stay inside: all of it, or each document with its start marker (or separator) before it."""
    if not separate:
        return [(0, len(text.ids))]
    back = 1 if tokenizer.kind == "gpt2" else 0
    return [(max(0, a - back), b) for a, b in itertools.pairwise(text.starts.tolist())]


@torch.inference_mode()
def token_losses(
    model: GPT, ids: np.ndarray, windows: Sequence[tuple[int, int, int]], precision: AbstractContextManager, what: str
) -> np.ndarray:
    """The loss in nats of every scored token, float32 (N,) at the token's own position; NaN where none is scored.

    Raises UserError where the model's output is not a number.
    """
    losses = np.full(len(ids), np.nan, np.float32)
    device = next(model.parameters()).device
    longest = max((end - start for start, end, _ in windows), default=1)
    batch_size = max(1, LOGITS_PER_BATCH // (longest * model.config.vocab_size))
    with Progress(sum(end + 1 - scored for _, end, scored in windows), what, "token", scale=True) as progress, precision:
        for at in range(0, len(windows), batch_size):
            group = windows[at : at + batch_size]
            x, y = _batch(ids, group)
            found = model(x.to(device), y.to(device), reduction="none")[1].view(y.shape).cpu().numpy()
            if not np.isfinite(found).all():
                raise UserError("the model's output is not a number: damaged weights, or too low a precision (--dtype float32)")
            for row, (start, end, scored) in zip(found, group, strict=True):
                losses[scored : end + 1] = row[scored - 1 - start : end - start]
            progress.update(sum(end + 1 - scored for _, end, scored in group))
    return losses


def _batch(ids: np.ndarray, windows: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 (B, T), padded on the right, where a causal model's padding changes nothing before it."""
    T = max(end - start for start, end, _ in windows)
    x = np.zeros((len(windows), T), np.int64)
    y = np.full((len(windows), T), IGNORED_TARGET, np.int64)
    for row, (start, end, scored) in enumerate(windows):
        x[row, : end - start] = ids[start:end]
        y[row, scored - 1 - start : end - start] = ids[scored : end + 1]
    return torch.from_numpy(x), torch.from_numpy(y)


def score(
    model: GPT,
    text: ScoredText,
    tokenizer: BPETokenizer,
    stride: int,
    separate: bool,
    precision: AbstractContextManager,
) -> "Scores":
    """Scores every token of `text` but those that are only context: the first one, with `separate` each document's."""
    stretches = segments(text, tokenizer, separate)
    windows = [w for first, last in stretches for w in plan_windows(first, last, model.config.block_size, stride)]
    return sum_by_document(token_losses(model, text.ids, windows, precision, "scoring"), text)


# ----------------------------------------------------------------------------------------------------------------------
# Figures


FIGURES = ("loss", "perplexity", "word_perplexity", "bits_per_byte")


@dataclass(frozen=True)
class Scores:
    """Per document, all (D,): summed loss in nats, scored tokens, words, bytes."""

    nats: np.ndarray
    tokens: np.ndarray
    words: np.ndarray
    bytes: np.ndarray

    def figures(self) -> dict[str, float]:
        sums = np.array([self.nats.sum(), self.tokens.sum(), self.words.sum(), self.bytes.sum()])
        return {name: float(value) for name, value in zip(FIGURES, _figures(sums), strict=True)}

    def resampled(self, seed: int, resamples: int = 1_000) -> np.ndarray:
        """The figures of `resamples` sets of as many documents, drawn with replacement: (resamples, 4).

        The same seed and number of documents give the same sets, so two models' rows belong together.
        """
        rng, D = np.random.default_rng(seed), len(self.nats)
        table = np.stack([self.nats, self.tokens, self.words, self.bytes], axis=1)  # (D, 4)
        counts = (rng.multinomial(D, np.full(D, 1 / D), RESAMPLES_AT_ONCE) for _ in range(resamples // RESAMPLES_AT_ONCE))
        return np.concatenate([_figures((c @ table).T).T for c in counts])


def _figures(sums: np.ndarray) -> np.ndarray:
    """(nats, tokens, words, bytes) along the first axis -> (loss, perplexity, perplexity per word, bits per byte)."""
    nats, tokens, words, num_bytes = sums
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.stack([nats / tokens, np.exp(nats / tokens), np.exp(nats / words), nats / (math.log(2) * num_bytes)])


def sum_by_document(losses: np.ndarray, text: ScoredText) -> Scores:
    """Adds up what `token_losses` found."""
    scored, begins = np.isfinite(losses), text.starts[:-1]
    nats = np.add.reduceat(np.where(scored, losses, 0.0).astype(np.float64), begins)
    return Scores(nats, np.add.reduceat(scored.astype(np.float64), begins), text.words, text.bytes)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of resampled values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def require_text(text: ScoredText, split: str) -> None:
    if len(text.ids) < 2:
        raise UserError(f"the {split} split ({text.source}) has {len(text.ids)} tokens, nothing to score; bring more text")
