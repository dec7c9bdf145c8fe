"""Stage 7 of 9: loss, perplexity and bits per byte of a model over every token of a split.

Reads checkpoints (or Hugging Face GPT-2 folders) and the token files; where those were made with another tokenizer, the text in
data/CORPUS/raw/ is encoded anew. Writes evaluation_SPLIT.json beside the checkpoint when it scores one. Takes the run's best
checkpoint and the corpus it was trained on unless told otherwise. A few minutes for 250,000 tokens and 126 million parameters
on two CPU cores, seconds on a GPU.

    uv run python evaluate.py                                       the validation split
    uv run python evaluate.py --split test --stride 128             the test split, each token with more context
    uv run python evaluate.py --checkpoint A.pt B.pt GPT2_FOLDER --by-document 5
"""

import argparse
import contextlib
import itertools
import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import Config, parse_config
from support.common import UserError, run_main, write_json

if TYPE_CHECKING:
    import numpy as np

    from checkpoint import LoadedModel
    from support.scoring import ScoredText, Scores
    from tokenizer import BPETokenizer

USES = ["run", "compute"]
FEW_DOCUMENTS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", choices=("train", "val", "test"), default="val", help="which part of the corpus [val]")
    parser.add_argument(
        "--checkpoint", nargs="+", default=[None], metavar="PATH", help="checkpoints or GPT-2 folders [the run's best]"
    )
    parser.add_argument(
        "--stride", type=int, default=0, metavar="N", help="tokens between windows (0: the block; less is slower)"
    )
    parser.add_argument("--separate-documents", action="store_true", help="no window looks across a document's beginning")
    parser.add_argument("--detokenize", action="store_true", help="undo WikiText's spacing first, for models of ordinary text")
    parser.add_argument("--quantize", choices=("none", "int8"), default="none", help="what generate.py --quantize costs [none]")
    parser.add_argument("--by-document", type=int, default=0, metavar="N", help="list the N best and worst documents")


def names() -> Iterator[str]:
    """A, B, ... Z, AA, AB, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_uppercase, repeat=length))


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Evaluation:
    """One model's scores on one split, with what decides whether they compare to another's. `name` is a letter or two."""

    name: str
    tokenizer: "BPETokenizer"
    text: "ScoredText"
    scores: "Scores"
    resampled: "np.ndarray"
    block_size: int
    stride: int

    @property
    def unknown(self) -> int:
        """How many of the tokens are <UNK>."""
        return 0 if self.tokenizer.unk_id is None else int((self.text.ids == self.tokenizer.unk_id).sum())

    def record(self) -> dict[str, Any]:
        """What evaluation_SPLIT.json holds; a figure beyond all numbers is null, since JSON has no infinity."""
        from support.scoring import FIGURES, interval

        scores = self.scores
        bounds = {name: [finite(x) for x in interval(self.resampled[:, i])] for i, name in enumerate(FIGURES)}
        return {
            **{name: finite(value) for name, value in scores.figures().items()},
            "intervals": bounds,
            "tokens": int(scores.tokens.sum()),
            "unk_tokens": self.unknown,
            "words": round(scores.words.sum()),
            "bytes": round(scores.bytes.sum()),
            "documents": len(self.text),
            "block_size": self.block_size,
            "stride": self.stride,
            "source": self.text.source,
            "tokenizer_sha256": self.tokenizer.sha256,
        }


# ----------------------------------------------------------------------------------------------------------------------
# One model


def data_config(config: Config, given: dict[str, Any], loaded: "LoadedModel") -> Config:
    """Where the text is: flags, else the corpus that the model was trained on."""
    if not loaded.checkpoint:
        return config
    stored = loaded.config.run
    names = ("corpus", "variant", "data_dir")
    return config.with_settings({name: getattr(stored, name) for name in names if name not in given})


def open_text(config: Config, split: str, tokenizer: "BPETokenizer", detokenise: bool) -> "ScoredText":
    """The split in the tokenizer's ids: from the token files if they are in them, else from the text."""
    from dataset import TokenData
    from support.manifest import load_corpus
    from support.scoring import text_from_corpus, text_from_tokens

    if not detokenise and (config.tokens_dir / "meta.json").exists():
        data = TokenData.load(config)
        if data.meta["tokenizer_sha256"] == tokenizer.sha256:
            data.check_ids(split)
            return text_from_tokens(data, split, tokenizer)
    return text_from_corpus(load_corpus(config), split, tokenizer, detokenise)


def evaluate(args: argparse.Namespace, config: Config, name: str, loaded: "LoadedModel", text: "ScoredText") -> Evaluation:
    """Scores every token of `text`. Raises UserError where there is none, or the stride does not fit the model."""
    from support.inference import prepare
    from support.scoring import require_text, score

    require_text(text, args.split)
    block_size = loaded.model.config.block_size
    stride = args.stride or block_size
    if not 0 < stride <= block_size:
        raise UserError(f"--stride is {args.stride}, but it must be from 1 to the model's block of {block_size} (0: the block)")
    precision = loaded.device.autocast()
    if args.quantize != "none":
        prepare(loaded, config.compute.dtype, args.quantize)
        precision = contextlib.nullcontext()
    scores = score(loaded.model, text, loaded.tokenizer, stride, args.separate_documents, precision)
    return Evaluation(name, loaded.tokenizer, text, scores, scores.resampled(config.run.seed), block_size, stride)


# ----------------------------------------------------------------------------------------------------------------------
# Printing


LABELS = {
    "loss": "loss, nats per token",
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "bits_per_byte": "bits per byte",
}


def table(evaluations: Sequence[Evaluation]) -> str:
    """A row a figure, a column a model, each with its 95 % interval."""
    from support.scoring import interval

    rows = [["", *(e.name for e in evaluations)]] if len(evaluations) > 1 else []
    for i, (figure, label) in enumerate(LABELS.items()):
        cells = []
        for e in evaluations:
            low, high = interval(e.resampled[:, i])
            bounds = f"  [{number(low)}, {number(high)}]" if len(e.text) > 1 else ""
            cells.append(number(e.scores.figures()[figure]) + bounds)
        rows.append([label, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def number(value: float) -> str:
    return f"{value:.4f}" if value < 100 else f"{value:,.1f}" if value < 1e6 else f"{value:.3g}"


def describe(e: Evaluation) -> str:
    """What was scored, and how."""
    scores = e.scores
    words = f"{scores.words.sum():,.0f} words, {scores.bytes.sum():,.0f} bytes"
    what = f"{scores.tokens.sum():,.0f} tokens of {len(e.text):,} documents ({words})"
    return f"{what} from {e.text.source}, windows of {e.block_size}, stride {e.stride}"


def remarks(evaluations: Sequence[Evaluation], args: argparse.Namespace) -> list[str]:
    """What a reader must know before comparing these figures with others."""
    documents = len(evaluations[0].text)
    few = f", of which {documents} are too few to tell how far others may be" if documents < FEW_DOCUMENTS else ""
    lines = [f"95 % intervals: bootstrap over documents{few}" if documents > 1 else "no intervals: there is one document"]
    if args.detokenize:
        lines.append("words and bytes are those of the text before its spacing was undone, as in published figures")
    if args.separate_documents:
        lines.append("documents are scored separately: their first tokens have no context")
    if any(e.tokenizer.kind == "word" for e in evaluations):
        lines.append("bytes are those of the whitespace-normalised text, which is what a word tokenizer can express")
    for e in evaluations:
        if e.unknown:
            lines.append(f"{e.name}: {e.unknown:,} of the tokens are <UNK>, text that it need not spell, which flatters it")
    return lines


def comparisons(first: Evaluation, other: Evaluation) -> list[str]:
    """How `other` differs from `first` over the same resampled documents, and warnings where that is no like with like."""
    from support.scoring import interval

    lines, pair = [], f"{first.name} and {other.name}"
    if len(first.text) == len(other.text) > 1:
        low, high = interval(other.resampled[:, 3] - first.resampled[:, 3])
        gap = other.scores.figures()["bits_per_byte"] - first.scores.figures()["bits_per_byte"]
        lines.append(f"{other.name} - {first.name}: {gap:+.4f} bits per byte, 95 % interval [{low:+.4f}, {high:+.4f}]")
    if other.tokenizer.sha256 != first.tokenizer.sha256:
        lines.append(f"warning: {pair} have different tokenizers; compare them per word or byte, not per token")
    sizes = [round(e.scores.bytes.sum()) for e in (first, other)]
    if sizes[0] != sizes[1]:
        lines.append(f"warning: {pair} score different text ({sizes[0]:,} and {sizes[1]:,} bytes); compare them per word")
    if (other.block_size, other.stride) != (first.block_size, first.stride):
        lines.append(f"warning: {pair} see different context (windows of {first.block_size} and {other.block_size} tokens)")
    return lines


def extremes(e: Evaluation, count: int) -> str:
    """The documents with the lowest and the highest bits per byte, each with its beginning."""
    import numpy as np

    bits = e.scores.nats / np.log(2) / np.maximum(e.scores.bytes, 1)
    order = np.argsort(bits, kind="stable")
    best = order[:count]
    lines = [f"{e.name}: documents by bits per byte"]
    for heading, chosen in (("best", best), ("worst", order[len(best) :][::-1][:count])):  # none is both
        for d in chosen:
            begin = " ".join(e.tokenizer.decode(e.text.document(d)[:60].tolist()).split())[:60]
            lines.append(f"  {heading:5}  {bits[d]:8.4f}  {e.scores.tokens[d]:9,.0f} tokens  {begin}")
    return "\n".join(lines)


def save(args: argparse.Namespace, e: Evaluation, path: Path, own_corpus: bool) -> None:
    """Keeps the figures of one checkpoint, scored as it is on the corpus it was trained on, beside it."""
    as_it_is = own_corpus and not args.detokenize and args.quantize == "none"
    if path.is_file() and as_it_is and len(args.checkpoint) == 1:
        target = path.with_name(f"evaluation_{args.split}.json")
        write_json(target, {"checkpoint": path.name, "split": args.split, **e.record()})
        print(f"wrote {target}")


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=USES, add_arguments=add_arguments)
    if args.by_document < 0:
        raise UserError(f"--by-document is {args.by_document}, but it must be at least 0")
    from support.inference import open_model, title

    evaluations, where = [], None
    for letter, explicit in zip(names(), args.checkpoint, strict=False):
        loaded, path = open_model(config, explicit)
        where = where or data_config(config, args.given, loaded)
        text = open_text(where, args.split, loaded.tokenizer, args.detokenize)
        evaluations.append(evaluate(args, config, letter, loaded, text))
        print(f"{letter}  {title(loaded, path)}: {describe(evaluations[-1])}")
    print(f"\n{table(evaluations)}\n")
    lines = remarks(evaluations, args)
    lines += [line for other in evaluations[1:] for line in comparisons(evaluations[0], other)]
    lines += [extremes(e, args.by_document) for e in evaluations if args.by_document]
    print("\n".join(lines))
    own = data_config(config, {}, loaded).run
    save(args, evaluations[0], path, (own.corpus, own.variant) == (where.run.corpus, where.run.variant))
    return 0


if __name__ == "__main__":
    run_main(main)
