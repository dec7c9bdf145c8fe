"""All stages of one preset in order: from raw text to sampled text with one command.

Each stage is skipped when what it would write is already there and current, so the same command continues after an
interruption. Reads and writes what the stages do; ends with a summary of the run.

    uv run python pipeline.py                               the `quick` preset: minutes on two CPU cores, no network
    uv run python pipeline.py --input notes/ --corpus mine  the same on your own text
    uv run python pipeline.py --preset wikitext103          the published recipe
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Sequence
from typing import Any

from config import SECTIONS, Config, arguments_for, flag_of, make_config, parse_config, section_of
from support.common import UserError, format_duration, run_main

CUSTOM_CORPUS = "custom"
STAGES = ("download_data", "train_tokenizer", "prepare_data", "test_model", "train", "evaluate", "generate", "report")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("source of the text (stage 1)")
    group.add_argument("--input", nargs="+", metavar="PATH", help="your own files or folders, as a corpus of its own")
    group.add_argument("--url", nargs="+", metavar="URL", help="files of the same kinds, or a zip of them, to download")
    group.add_argument("--hub", nargs="+", metavar="SET", help="parquet data sets of a hub, as in download_data.py")
    group.add_argument("--sha256", nargs="+", metavar="HEX", help="the checksum of each --url")
    group.add_argument("--archive", metavar="FILE", help="the corpus's own archive, already on this machine")
    group.add_argument("--mirror", metavar="URL", help="one more address to try first")
    parser.add_argument("--prompt", metavar="TEXT", help="what the sample at the end goes on from [a document's start]")
    parser.add_argument("--skip-checks", action="store_true", help="leave out stage 4, the checks of this installation")
    parser.add_argument("--overwrite", action="store_true", help="train anew where the run already has checkpoints")


def stage_arguments(config: Config, settings: dict[str, Any], uses: Sequence[str]) -> list[str]:
    """The command line of a stage: the preset and those of the given settings that the stage takes."""
    sections = {name: section_of(name) for name in settings}
    taken = {name: v for name, v in settings.items() if sections[name] in uses or f"{sections[name]}.{name}" in uses}
    return ["--preset", config.preset, *arguments_for(taken)]


def source_arguments(args: argparse.Namespace) -> list[str]:
    arguments = []
    for name in ("input", "url", "hub", "sha256", "archive", "mirror"):
        value = getattr(args, name)
        if value:
            arguments += [flag_of(name), *([value] if isinstance(value, str) else value)]
    return arguments


def extra_arguments(stage: str, config: Config, args: argparse.Namespace) -> list[str]:
    """What a stage is told beyond its settings."""
    if stage == "download_data":
        return source_arguments(args)
    if stage == "train":
        if args.overwrite:
            return ["--overwrite"]
        return ["--resume"] if any(config.run_dir.glob("checkpoint_*.pt")) else []
    if stage == "generate":
        return ["--prompt", args.prompt] if args.prompt else []
    if stage == "report":
        # The page needs nothing but the standard library; the PNG files beside it need an optional package.
        pictures = [] if importlib.util.find_spec("matplotlib") else ["--no-png"]
        return [config.run_name, *pictures]
    return []


def run_stage(stage: str, config: Config, args: argparse.Namespace, settings: dict[str, Any]) -> None:
    module = importlib.import_module(stage)
    title = module.__doc__.strip().split("\n")[0]
    print(f"\n== {title}", flush=True)
    t0 = time.monotonic()
    arguments = stage_arguments(config, settings, module.USES) + extra_arguments(stage, config, args)
    code = module.main(arguments)
    if code != 0:
        raise UserError(f"{stage}.py ended with code {code}; its messages above say why")
    print(f"== done in {format_duration(time.monotonic() - t0)}", flush=True)


def summary(config: Config) -> str:
    """Parameters, tokens seen, losses and speed of the finished run, and the commands to go on with."""
    from checkpoint import find_checkpoint, load_checkpoint

    path = find_checkpoint(config, None)
    checkpoint = load_checkpoint(path)
    stored = Config.from_dict(checkpoint["config"]["settings"])
    progress = checkpoint["config"]["progress"]
    evaluation = json.loads((config.run_dir / "evaluation_val.json").read_text(encoding="utf-8"))
    tokens_per_s = progress["tokens_seen"] / progress["elapsed_s"]
    model = stored.model
    shape = f"{model.n_layer} layers x {model.n_embd} wide x {model.n_head} heads, block {model.block_size}"
    rows = [
        ("run", f"{config.run_dir} (preset {config.preset}, corpus {config.run.corpus})"),
        ("parameters", f"{model.num_params:,} ({shape}, vocabulary {model.vocab_size:,})"),
        ("tokens seen", f"{progress['tokens_seen']:,} in {checkpoint['iter']:,} steps, {tokens_per_s:,.0f} tokens/s"),
        ("validation", f"loss {evaluation['loss']:.4f}, perplexity {evaluation['perplexity']:.2f} per token"),
        ("bits per byte", f"{evaluation['bits_per_byte']:.4f} on the whole validation split"),
        ("checkpoint", str(path)),
        ("report", str(config.run_dir / "report.html")),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def next_commands(config: Config) -> str:
    return "\n".join(
        [
            "Go on with:",
            "  " + config.command("generate.py", "--interactive"),
            "  " + config.command("evaluate.py", "--split test"),
            "  " + config.command("export.py", f"--out {config.run_name}-hf"),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=list(SECTIONS), default_preset="quick", add_arguments=add_arguments)
    settings = dict(args.given)
    if (args.input or args.url or args.hub) and "corpus" not in settings:
        settings["corpus"] = CUSTOM_CORPUS
        config = make_config(config.preset, settings)
    t0 = time.monotonic()
    for stage in STAGES:
        if stage == "test_model" and (args.skip_checks or config.run_dir.exists()):
            continue
        run_stage(stage, config, args, settings)
    print(f"\n== Summary, {format_duration(time.monotonic() - t0)} in all\n{summary(config)}\n\n{next_commands(config)}")
    return 0


if __name__ == "__main__":
    run_main(main)
