"""Stage 1 of 9: bring a corpus onto this machine and take stock of it.

    uv run python download_data.py                          WikiText-103 (192 MB to fetch, 740 MB on disk, minutes)
    uv run python download_data.py --size local             the documentation already here (no network, seconds)
    uv run python download_data.py --input book.txt notes/  your own files, read where they lie

Reads: mirrors, addresses, a hub, or local files (.txt, .md, .raw, .jsonl, .jsonl.gz, .parquet).
Writes: data/CORPUS/raw/ with the files and manifest.json (sources, sizes, sha256, documents per split). What is already
there is verified, not fetched again; what is damaged is named and repaired; an interrupted download is continued.
Proxy variables are honoured; HF_ENDPOINT names another address of the hub.
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import Config, flag_of, parse_config
from support.common import FolderLock, Progress, UserError, read_json, run_main

if TYPE_CHECKING:
    from support.sources import Source

USES = ("run.corpus", "run.variant", "run.data_dir", "data")
CORPUS_OF_SIZE = {"full": "wikitext103", "small": "wikitext2", "local": "local"}
SIZE_OF_CORPUS = {corpus: size for size, corpus in CORPUS_OF_SIZE.items()}
OWN_CORPUS = "custom"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to bring (default: the preset's corpus)")
    choice = what.add_mutually_exclusive_group()
    choice.add_argument("--size", choices=CORPUS_OF_SIZE, help="WikiText-103, WikiText-2, or docstrings found on this machine")
    choice.add_argument("--input", nargs="+", metavar="PATH", help="your own files or folders; nothing is copied")
    choice.add_argument("--url", nargs="+", help="https addresses of such files, or of zips of them")
    choice.add_argument("--hub", nargs="+", metavar="SET", help="data sets of a hub, each [NAME=]OWNER/SET[@REVISION][:FOLDER]")
    what.add_argument("--sha256", nargs="+", metavar="HEX", help="the checksum of each --url")
    what.add_argument("--mirror", metavar="URL", help="an address to try first for WikiText; its pinned checksum still holds")
    what.add_argument("--archive", metavar="FILE", help="WikiText's zip, or with --corpus NAME a zip of your own, from disk")


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=USES, add_arguments=add_arguments)
    config = config.with_settings({"corpus": corpus_name(config, args)})

    if not (args.size or args.input or args.url or args.hub or args.archive) and (names := mixed_names(config)):
        print(f"corpus {config.run.corpus} is a mix of {', '.join(names)}: nothing to bring")
        return finish(config, argv)
    source = choose_source(config, args)
    with FolderLock(config.corpus_dir, f"corpus {config.run.corpus}"):
        manifest = recorded_manifest(config)
        config = keep_settings(config, source, manifest, args.given)
        if manifest is None or not is_current(config, source, manifest):
            manifest = bring(config, source)
    print_summary(config, manifest)
    return finish(config, argv)


def finish(config: Config, argv: Sequence[str] | None) -> int:
    if argv is None:  # else another program goes on by itself
        print(f"next: {config.command('train_tokenizer.py')}")
    return 0


def corpus_name(config: Config, args: argparse.Namespace) -> str:
    """--corpus, else the name that belongs to what is asked for, else the preset's."""
    if "corpus" in args.given:
        return args.given["corpus"]
    if args.size:
        return CORPUS_OF_SIZE[args.size]
    return OWN_CORPUS if args.input or args.url or args.hub else config.run.corpus


def choose_source(config: Config, args: argparse.Namespace) -> "Source":
    """The source that the flags ask for. Raises UserError where they do not go together."""
    from support import hub, sources

    name = config.run.corpus
    built_in = args.size or (None if args.input or args.url or args.hub else SIZE_OF_CORPUS.get(name))
    check_flags(args, built_in)
    if args.input:
        return sources.Input(tuple(map(Path, args.input)), own_folders(config))
    if args.url:
        return sources.Addresses(tuple(args.url), tuple(args.sha256 or ()))
    if args.hub:
        return sources.Hub(tuple(map(hub.HubSet.parse, args.hub)))
    if built_in == "local":
        return sources.Local()
    if built_in:
        return sources.WikiText(built_in, args.mirror, Path(args.archive) if args.archive else None)
    if args.archive:
        return sources.Archive(Path(args.archive))
    if name == "sydsgpt":
        return sources.Hub(hub.SYDSGPT)
    return recorded_source(config)


def check_flags(args: argparse.Namespace, built_in: str | None) -> None:
    """Raises UserError for flags that would be without effect, and for checksums that cannot be right."""
    wikitext = built_in in ("full", "small")
    if args.mirror and not wikitext:
        raise UserError(
            "--mirror goes with WikiText (--size full or small); name other addresses with --url, a hub's with HF_ENDPOINT"
        )
    if args.archive and (args.input or args.url or args.hub or built_in == "local"):
        raise UserError(
            "--archive stands for WikiText's zip (--size full or small) or, with --corpus NAME, for one of your own"
        )
    if args.sha256 and not args.url:
        raise UserError("--sha256 belongs to --url")
    if args.sha256 and len(args.sha256) != len(args.url):
        raise UserError(f"--sha256 has {len(args.sha256)} values for {len(args.url)} addresses; give one for each --url")
    wrong = next((value for value in args.sha256 or () if not re.fullmatch("[0-9a-fA-F]{64}", value)), None)
    if wrong:
        raise UserError(f"--sha256 {wrong} is no sha256 (64 hexadecimal digits)")


def recorded_source(config: Config) -> "Source":
    """The source of a corpus that exists already, from its manifest."""
    from support import sources
    from support.manifest import manifest_path

    path = manifest_path(config)
    if not path.exists():
        known = ", ".join([*SIZE_OF_CORPUS, "sydsgpt"])
        missing = f"there is no corpus {config.run.corpus!r} yet (built in: {known})"
        raise UserError(f"{missing}; name its files with --input, --url, --hub or --archive")
    record = read_json(path, config.command("download_data.py", "--input", "PATH")).get("source", {})
    try:
        return sources.of_record(record, own_folders(config))
    except (TypeError, AttributeError):
        raise UserError(
            f"{path} does not say where the corpus came from; name its files with --input, --url or --hub"
        ) from None


def own_folders(config: Config) -> tuple[Path, ...]:
    """Our output, which is never input, even where it lies inside a folder of the user's."""
    return Path(config.run.data_dir), Path(config.run.checkpoint_dir)


# ----------------------------------------------------------------------------------------------------------------------
# What is there already


def mixed_names(config: Config) -> list[str]:
    """The corpora that this one is a mix of; none where it is no whole mix, or is not there."""
    from support.manifest import check_manifest, manifest_path

    try:
        manifest = read_json(manifest_path(config), "")
        check_manifest(manifest)
    except (UserError, KeyError, TypeError, ValueError):  # what is wrong is said where it is taken stock of again
        return []
    return [entry["name"] for entry in manifest.get("mix", [])]


def recorded_manifest(config: Config) -> dict[str, Any] | None:
    """The manifest of an earlier call; None where there is none, or, after saying so, where it cannot be used."""
    from support.manifest import check_manifest, manifest_path

    path = manifest_path(config)
    if not path.exists():
        return None
    try:
        manifest = read_json(path, "")
        check_manifest(manifest)
        if "mix" in manifest:
            raise ValueError("it is that of a mix")
    except (UserError, KeyError, TypeError, ValueError) as error:
        print(f"{path} cannot be used ({error}); taking stock again", flush=True)
        return None
    return manifest


def keep_settings(config: Config, source: "Source", manifest: dict[str, Any] | None, given: dict[str, Any]) -> Config:
    """A corpus keeps the settings it was made with, as far as the command line names no others."""
    if manifest is None or not source.made(manifest["source"], config.raw_dir):
        return config
    recorded = manifest["settings"]
    kept = {name: value for name, value in recorded.items() if name not in given and value != getattr(config.data, name)}
    for name, value in kept.items():
        print(f"kept from the corpus: {name} = {value!r} ({flag_of(name)} changes it)")
    return config.with_settings(kept)


def is_current(config: Config, source: "Source", manifest: dict[str, Any]) -> bool:
    """Whether the corpus is complete, unharmed and what is asked for; says why where it is not, and removes what is damaged."""
    damaged = find_damage(config, manifest)
    reasons = differences(config, source, manifest)
    reasons += [f"{config.raw_dir / name} {problem}" for name, problem in damaged.items()]
    for reason in reasons:
        print(reason, flush=True)
    for name in damaged:
        if not Path(name).is_absolute() and ".." not in Path(name).parts:  # ours; the user's own files are only read
            (config.raw_dir / name).unlink(missing_ok=True)  # so that it is brought again
    if not reasons:
        print(f"verified: all files are as recorded ({len(manifest['files']):,}), nothing to bring")
    return not reasons


def differences(config: Config, source: "Source", manifest: dict[str, Any]) -> list[str]:
    """Where a manifest is not about what is asked for now."""
    from support import sources

    reasons = []
    if not source.made(manifest["source"], config.raw_dir):
        reasons.append(f"corpus {config.run.corpus} came from somewhere else; it will be replaced")
    settings = dataclasses.asdict(config.data)
    changed = [name for name in settings if manifest["settings"].get(name) != settings[name]]
    if changed:
        reasons.append(f"changed settings: {', '.join(changed)}; taking stock again")
    if isinstance(source, sources.Input) and not reasons:
        before, now = {f["path"] for f in manifest["files"]}, {f.path for f in source.list_files()}
        reasons += [f"new file: {path}" for path in sorted(now - before)] + [f"gone: {path}" for path in sorted(before - now)]
    return reasons


def find_damage(config: Config, manifest: dict[str, Any]) -> dict[str, str]:
    """What is wrong with each missing, truncated or changed file, by its path in the manifest; all files are hashed."""
    from support.fetch import describe_damage

    damaged = {}
    files = manifest["files"]
    with Progress(sum(f["bytes"] for f in files), "verifying", "B", scale=True) as progress:
        for file in files:
            path = config.raw_dir / file["path"]
            problem = describe_damage(path, file["bytes"], file["sha256"])
            if problem:
                damaged[file["path"]] = problem
            progress.update(file["bytes"], path.name)
    return damaged


def bring(config: Config, source: "Source") -> dict[str, Any]:
    """Lets the source bring its files and takes stock of them."""
    from support.manifest import build_manifest

    config.raw_dir.mkdir(parents=True, exist_ok=True)
    files = source.collect(config.raw_dir)
    return build_manifest(config, source.describe(config.raw_dir), files)


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("s" if n != 1 else "")


def print_summary(config: Config, manifest: dict[str, Any]) -> None:
    files = manifest["files"]
    for note in manifest.get("notes", []):
        print(note)
    for file in files[:10]:
        print(f"  {file['path']}: {file['bytes']:,} bytes, {counted(file['documents'], 'document')}, split {file['split']}")
    if len(files) > 10:
        print(f"  ... and {len(files) - 10:,} more files")
    documents = ", ".join(f"{split} {n:,}" for split, n in manifest["documents"].items())
    count = counted(len(files), "file")
    print(f"corpus {config.run.corpus} in {config.raw_dir}: {count}, {sum(f['bytes'] for f in files):,} bytes")
    print(f"documents: {documents}")
    print(f"fingerprint: {manifest['fingerprint']}")


if __name__ == "__main__":
    run_main(main)
