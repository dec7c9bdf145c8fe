"""Stage 6 of 9: text from a trained model, streamed to the terminal.

Reads a checkpoint (it holds the tokenizer too) or a Hugging Face GPT-2 folder; writes nothing. Takes the run's best checkpoint
unless told otherwise. Checksums are compared first. A 126-million-parameter model writes 100 to 200 tokens a second on two CPU
cores. `--compile on` is faster on CPUs, after half a minute of compiling, or some seconds where it was done before.

    uv run python generate.py --prompt "The history of"              one text
    uv run python generate.py --interactive                          a prompt a line; an empty line goes on with the last text
    uv run python generate.py --checkpoint FILE --num-samples 4 --json
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import ComputeConfig, Config, parse_config
from support.common import UserError, run_main

if TYPE_CHECKING:
    from support.sampling import Decoder
    from tokenizer import BPETokenizer

USES = ["run", "compute", "sample"]
SIDE_BY_SIDE = 32  # texts of a batch: the more, the more memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="text to go on from [a document's start]")
    source.add_argument("--prompt-file", metavar="PATH", help="read the prompt from this file, - is standard input")
    source.add_argument("--interactive", action="store_true", help="ask for prompts; Ctrl-C cancels a text, Ctrl-D leaves")
    parser.add_argument("--checkpoint", metavar="PATH", help="checkpoint file or Hugging Face GPT-2 folder [the run's best]")
    parser.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help=f"texts to write, {SIDE_BY_SIDE} side by side [1]"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of a document")
    parser.add_argument("--no-trailing-space", action="store_true", help="word tokenizer: the prompt's last word may go on")
    parser.add_argument("--no-cache", action="store_true", help="read the whole context for every token (slow; the same text)")
    parser.add_argument("--quantize", choices=("none", "int8"), default="none", help="weights in 8 bits, faster on CPUs [none]")
    parser.add_argument("--json", action="store_true", help="one JSON object a text on standard output")


def check_arguments(args: argparse.Namespace, compute: ComputeConfig) -> None:
    if args.num_samples < 1:
        raise UserError(f"--num-samples is {args.num_samples}, but it must be at least 1")
    if "" in args.stop:
        raise UserError("--stop is empty, so no text could ever be written; give the text to stop at")
    if args.interactive and (args.json or args.num_samples > 1):
        raise UserError("--interactive writes one text a prompt; leave out --json and --num-samples")
    if compute.compile == "on" and (args.num_samples > 1 or args.no_cache):
        raise UserError("--compile on is for one text at a time, with the cache; leave out --num-samples and --no-cache")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt as text. Raises UserError where the file is missing or not UTF-8."""
    if args.prompt_file is None:
        return args.prompt or ""
    try:
        data = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt in {args.prompt_file} is not UTF-8 ({error.reason} at byte {error.start})") from None


def encode_prompt(tokenizer: "BPETokenizer", text: str, trailing_space: bool) -> list[int]:
    """A document's start, then the prompt: every document was trained on behind its start marker (or separator)."""
    return [tokenizer.bos_id, *tokenizer.encode_prompt(text, trailing_space=trailing_space)]


def note(line: str) -> None:
    """Remarks go to standard error: standard output is the text alone."""
    print(line, file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Texts


@dataclass
class Text:
    """One continuation: its ids, its text, and why it ended (`length`, `eos` or `stop`)."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = "length"


class Writer:
    """Draws texts from one model with one set of settings; a seed fixes the whole sequence of its texts."""

    def __init__(self, decoder: "Decoder", tokenizer: "BPETokenizer", config: Config, args: argparse.Namespace) -> None:
        import torch

        self.decoder, self.tokenizer, self.sample = decoder, tokenizer, config.sample
        self.stops = args.stop
        self.stop_id = None if args.ignore_eos else tokenizer.eos_id
        self.never = [] if tokenizer.pad_id is None else [tokenizer.pad_id]
        self.generator = torch.Generator().manual_seed(config.run.seed)

    def draw(self, prompt_ids: list[int], batch_size: int) -> Iterator[list[int]]:
        """The next id of each of `batch_size` texts, again and again."""
        import torch

        from support.sampling import generate_batch

        idx = torch.tensor([prompt_ids] * batch_size, dtype=torch.long)
        settings = {"generator": self.generator, "never": self.never}
        for ids in generate_batch(self.decoder, idx, self.sample.max_new_tokens, self.sample, **settings):
            yield ids.tolist()

    def stream(self, prompt_ids: list[int], result: Text) -> Iterator[str]:
        """The pieces of one text as they come; `result` is filled in on the way."""
        from support.sampling import StopFilter

        stop = StopFilter(self.stops)
        for piece in self.tokenizer.decode_stream(self._ids_of_one(prompt_ids, result)):
            yield self._append(result, stop.push(piece))
            if stop.hit:
                result.finish = "stop"
                return
        yield self._append(result, stop.flush())

    def _append(self, result: Text, piece: str) -> str:
        result.text += piece
        return piece

    def _ids_of_one(self, prompt_ids: list[int], result: Text) -> Iterator[int]:
        for (i,) in self.draw(prompt_ids, 1):
            if i == self.stop_id:
                result.finish = "eos"
                return
            result.ids.append(i)
            yield i

    def batch(self, prompt_ids: list[int], batch_size: int) -> list[Text]:
        """`batch_size` texts drawn side by side; ends when all have ended."""
        texts = [Text() for _ in range(batch_size)]
        running = set(range(batch_size))
        for ids in self.draw(prompt_ids, batch_size):
            running -= {row for row in running if self._ends(texts[row], ids[row])}
            if not running:
                break
        for text in texts:
            text.text = self._until_stop(text.ids)
        return texts

    def _ends(self, text: Text, i: int) -> bool:
        """Takes the id `i` into `text`; True where the text ends there."""
        if i == self.stop_id:
            text.finish = "eos"
        else:
            text.ids.append(i)
            if self.stops and any(stop in self.tokenizer.decode(text.ids) for stop in self.stops):
                text.finish = "stop"
        return text.finish != "length"

    def _until_stop(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids)
        return text[: min((at for at in map(text.find, self.stops) if at >= 0), default=len(text))]


# ----------------------------------------------------------------------------------------------------------------------
# The command


def write_samples(writer: Writer, prompt: str, prompt_ids: list[int], args: argparse.Namespace, seed: int) -> int:
    """Prints `--num-samples` texts: one as it comes, several batch by batch. Returns the tokens drawn."""
    shown = writer.tokenizer.decode(prompt_ids)
    if args.num_samples == 1 and not args.json:
        return len(print_stream(writer, prompt_ids, shown).ids)
    drawn = 0
    for first in range(0, args.num_samples, SIDE_BY_SIDE):
        texts = writer.batch(prompt_ids, min(SIDE_BY_SIDE, args.num_samples - first))
        for number, text in enumerate(texts, first):
            line = as_json(prompt, number, text, seed) if args.json else f"--- sample {number + 1}\n{shown}{text.text}"
            print(line, flush=True)
        drawn += sum(len(text.ids) for text in texts)
    return drawn


def print_stream(writer: Writer, prompt_ids: list[int], shown: str) -> Text:
    """Prints one text as it is drawn, behind what it goes on from. Ctrl-C leaves the terminal on a line of its own."""
    result = Text()
    print(shown, end="", flush=True)
    try:
        for piece in writer.stream(prompt_ids, result):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    return result


def as_json(prompt: str, number: int, text: Text, seed: int) -> str:
    fields: dict[str, Any] = {"prompt": prompt, "sample": number, "text": text.text, "tokens": len(text.ids)}
    return json.dumps({**fields, "finish": text.finish, "seed": seed}, ensure_ascii=False)


def interact(writer: Writer, args: argparse.Namespace) -> tuple[int, float]:
    """Reads prompts until the input ends. Returns the tokens drawn, and the seconds that took."""
    note("A prompt a line; an empty line goes on with the last text, Ctrl-C cancels a text, Ctrl-D leaves.")
    enable_line_history()
    context, drawn, seconds = [writer.tokenizer.bos_id], 0, 0.0
    while (line := read_line()) is not None:
        if line.strip():
            context = encode_prompt(writer.tokenizer, line, not args.no_trailing_space)
        result, t0 = Text(), time.perf_counter()
        try:
            for piece in writer.stream(context, result):
                print(piece, end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            print(" [cancelled]", flush=True)
        context, drawn, seconds = context + result.ids, drawn + len(result.ids), seconds + time.perf_counter() - t0
    return drawn, seconds


def read_line() -> str | None:
    """The next line, None at the end of the input. Ctrl-C drops the line that is being typed."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


def enable_line_history() -> None:
    """Arrow keys bring earlier prompts back, where Python has readline (not on Windows, whose console does it itself)."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return


def remarks(prompt_ids: list[int], tokenizer: "BPETokenizer", block_size: int, top_k: int) -> list[str]:
    """What is done otherwise than a reader of the command might think."""
    lines, unknown = [], prompt_ids.count(tokenizer.unk_id)
    if len(prompt_ids) > block_size:
        lines.append(f"the prompt has {len(prompt_ids):,} tokens; the first {len(prompt_ids) - block_size:,} are not read")
    if unknown:
        lines.append(f"{unknown:,} characters of the prompt are not in the vocabulary; the model reads them as <UNK>")
    if top_k > tokenizer.vocab_size:
        lines.append(f"--top-k {top_k:,} is above the vocabulary, so all of its {tokenizer.vocab_size:,} tokens stay")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=USES, add_arguments=add_arguments)
    check_arguments(args, config.compute)
    prompt = read_prompt(args)

    from support.inference import open_decoder

    decoder, tokenizer, line = open_decoder(config, args.checkpoint, quantize=args.quantize, use_cache=not args.no_cache)
    note(line)
    writer = Writer(decoder, tokenizer, config, args)
    prompt_ids = encode_prompt(tokenizer, prompt, not args.no_trailing_space)
    for line in remarks(prompt_ids, tokenizer, decoder.block_size, config.sample.top_k):
        note(line)
    if args.interactive:
        drawn, seconds = interact(writer, args)
    else:
        t0 = time.perf_counter()
        drawn = write_samples(writer, prompt, prompt_ids, args, config.run.seed)
        seconds = time.perf_counter() - t0
    if drawn:
        note(f"{drawn:,} tokens in {seconds:.1f} s, {drawn / seconds:,.1f} tokens/s")
    return 0


if __name__ == "__main__":
    run_main(main)
