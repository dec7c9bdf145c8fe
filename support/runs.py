"""What the folder of a run holds, read for people to look at: records, settings, evaluations, and how its vocabulary looks.

Nothing here is strict: what is missing or damaged is left out with a note, so that a run can be looked at while it goes on, or
after half of it was lost.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import Config
from support.common import UserError
from support.metrics import read_metrics

MAX_STEP = 10**15  # a greater one is no step
TOKENS_LOOKED_AT = 50_000  # of the validation split, to see how the vocabulary is used


# ----------------------------------------------------------------------------------------------------------------------
# Reading runs


@dataclass
class Run:
    """What was found in a run's folder. `notes` says what a reader should know about what was not."""

    label: str
    folder: Path
    train: list[dict[str, Any]] = field(default_factory=list)
    eval: list[dict[str, Any]] = field(default_factory=list)
    sample: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)  # by split: what evaluate.py wrote
    settings: dict[str, Any] = field(default_factory=dict)
    config: Config | None = None
    max_iters: int = 0  # steps of the whole schedule; 0: not known
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((int(records[-1]["step"]) for records in (self.train, self.eval) if records), default=0)

    @property
    def complete(self) -> bool:
        return 0 < self.max_iters <= self.last_step


def is_run_folder(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "metrics.jsonl").exists() or any(folder.glob("checkpoint_*.pt")))


def find_run_folders(names: Sequence[str], checkpoint_dir: Path) -> list[Path]:
    """The folders of the named runs, each once. Raises UserError listing the runs that exist for a name that is none."""
    folders: list[Path] = []
    for name in names:
        candidates = [folder for folder in (checkpoint_dir / name, Path(name)) if is_run_folder(folder)]
        if not candidates:
            raise UserError(f"there is no run {name!r} in {checkpoint_dir}; {existing_runs(checkpoint_dir)}")
        if not any(candidates[0].samefile(known) for known in folders):
            folders.append(candidates[0])
    if not folders:
        raise UserError(f"name one run or several; {existing_runs(checkpoint_dir)}")
    return folders


def existing_runs(checkpoint_dir: Path) -> str:
    folders = sorted(checkpoint_dir.iterdir()) if checkpoint_dir.is_dir() else []
    names = [folder.name for folder in folders if is_run_folder(folder)]
    if names:
        return "runs there: " + ", ".join(names)
    return "there are no runs there yet; train.py makes one, --checkpoint-dir names another folder"


def read_run(folder: Path, label: str) -> Run:
    run = Run(label, folder)
    sort_metrics(run)
    for path in sorted(folder.glob("evaluation_*.json")):
        run.evaluations[path.stem.removeprefix("evaluation_")] = read_optional_json(run, path)
    run.settings = read_optional_json(run, folder / "config.json") or settings_of_checkpoint(run)
    try:
        run.config = Config.from_dict(run.settings) if run.settings else None
    except ValueError as error:
        run.notes.append(f"The settings are of another version, so some figures are left out: {error}.")
    run.max_iters = planned_steps(run)
    if not run.train and not run.eval:
        run.notes.append("There is nothing in metrics.jsonl yet.")
    bad = sum(not math.isfinite(number(record.get("loss"))) for record in run.train)
    if bad:
        run.notes.append(f"The training loss was not a finite number in {bad} of {len(run.train):,} records (marked \u00d7).")
    return run


def planned_steps(run: Run) -> int:
    """Steps of the whole schedule; where it is given in passes, the prepared tokens decide. 0 where it is not known."""
    if run.config is None or run.config.train.max_iters:
        return run.config.train.max_iters if run.config else 0
    split = table_in(table_in(read_optional_json(run, run.config.tokens_dir / "meta.json"), "splits"), "train")
    if not number(split.get("tokens")) > run.config.model.block_size:
        return 0
    from dataset import count_steps

    return count_steps(int(split["tokens"]), run.config.train, run.config.model.block_size)


def sort_metrics(run: Run) -> None:
    """Sorts the records of metrics.jsonl into the run by kind and step.

    A torn last line is what a killed or a writing process leaves, so it is passed over; other bad lines are counted.
    """
    path = run.folder / "metrics.jsonl"
    if not path.exists():
        return
    lines = path.read_bytes().count(b"\n")  # before reading: a live run may add some in between
    records = [record for record in read_metrics(path) if 0 <= record["step"] < MAX_STEP]
    unreadable = lines - len(records)
    if unreadable > 0:
        run.notes.append(f"{unreadable:,} lines of metrics.jsonl could not be read.")
    for kind, found in (("train", run.train), ("eval", run.eval), ("sample", run.sample)):
        found.extend(sorted((r for r in records if r["kind"] == kind), key=lambda r: r["step"]))


def number(value: Any) -> float:
    """`value` as a float; NaN for whatever is not a number, or one beyond all that a run can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < 1e100 else math.nan


def table_in(values: dict[str, Any], key: str) -> dict[str, Any]:
    return values[key] if isinstance(values.get(key), dict) else {}


def read_optional_json(run: Run, path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one, with a note where the file is damaged, when there is none."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        run.notes.append(f"{path.name} is damaged and was left out.")
        return {}
    return value


def settings_of_checkpoint(run: Run) -> dict[str, Any]:
    """The settings inside a checkpoint, for a run folder that lost its config.json."""
    paths = [path for path in checkpoints_of(run) if path.is_file()]
    if not paths:
        return {}
    from checkpoint import load_checkpoint

    try:
        return table_in(load_checkpoint(paths[0])["config"], "settings")
    except UserError as error:
        run.notes.append(f"{error}.")
        return {}


def checkpoints_of(run: Run) -> list[Path]:
    return sorted(run.folder.glob("checkpoint_*.pt"))


def labels_of(folders: Sequence[Path]) -> list[str]:
    """A short, distinct name for each run: the folder's name, or the whole path where two share a name."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers


@dataclass
class Vocabulary:
    """What a tokenizer's vocabulary looks like, and how the validation text uses it."""

    label: str
    kind: str
    size: int
    lengths: Counter
    used: Counter
    longest: list[str]
    special: int
    sample: dict[str, Any]
    splits: dict[str, Any]

    @property
    def characters_per_token(self) -> float:
        total = sum(self.used.values())
        return sum(length * n for length, n in self.used.items()) / total if total else math.nan


def read_vocabularies(runs: Sequence[Run]) -> list[Vocabulary]:
    """The tokenizers of the runs, each once, labelled by the runs that use it."""
    users: dict[Path, list[Run]] = {}
    for run in runs:
        if run.config and run.config.tokenizer_path.exists():
            users.setdefault(run.config.tokenizer_path.resolve(), []).append(run)
    vocabularies = [read_vocabulary(sharing) for sharing in users.values()]
    return [vocabulary for vocabulary in vocabularies if vocabulary is not None]


def read_vocabulary(sharing: Sequence[Run]) -> Vocabulary | None:
    from tokenizer import BPETokenizer

    run = sharing[0]
    try:
        tokenizer = BPETokenizer.load(run.config.tokenizer_path)
    except UserError as error:
        run.notes.append(f"{error}.")
        return None
    texts = [tokenizer.decode_bytes([i]).decode("utf-8", "replace") for i in range(tokenizer.vocab_size)]
    meta = read_optional_json(run, run.config.tokens_dir / "meta.json")
    used = Counter(len(texts[i]) for i in validation_ids(run, meta) if i < len(texts) and texts[i])
    return Vocabulary(
        label=", ".join(other.label for other in sharing),
        kind=tokenizer.kind,
        size=tokenizer.vocab_size,
        lengths=Counter(len(text) for text in texts if text),
        used=used,
        longest=sorted(texts, key=len, reverse=True)[:40],
        special=texts.count(""),
        sample=table_in(read_optional_json(run, run.config.tokenizer_meta_path), "sample"),
        splits=table_in(meta, "splits"),
    )


def validation_ids(run: Run, meta: dict[str, Any]) -> list[int]:
    """The first ids of the validation split, or none where it was not prepared."""
    import numpy as np

    path, dtype = run.config.tokens_dir / "val.bin", meta.get("dtype")
    if dtype not in ("uint16", "uint32") or not path.exists():
        return []
    return np.fromfile(path, dtype=np.dtype(dtype).newbyteorder("<"), count=TOKENS_LOOKED_AT).tolist()
