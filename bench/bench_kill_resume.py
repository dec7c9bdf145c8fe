"""Kills real training processes, again and again, and compares what comes out with runs that were never killed.

    uv run python bench/bench_kill_resume.py --kills 100

Every run is trained to its end through kills (SIGKILL) at random instants: while it starts, steps, evaluates, and, aimed,
inside a save: at a random write, fsync, link or rename. After each kill every checkpoint file must be readable. Printed: the
kills survived, the most steps lost by one, and whether final weights, optimizer and recorded losses are identical.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny_corpus import TINY_RUN, make_tiny_corpus  # noqa: E402
from training_process import TrainingProcess  # noqa: E402

SAVE_EVERY = 5
PATIENCE_S = 1_800  # for a run that compiles on a busy machine
STEPS = 60
VARIANTS = {
    "adamw fp32": ("--dtype", "float32"),
    "muon bf16, epochs, dropout": ("--dtype", "bfloat16", "--optimizer", "muon", "--sampling", "epoch", "--dropout", "0.1"),
    "galore fp32": ("--optimizer", "galore", "--galore-rank", "8", "--galore-update-gap", "7"),
    "adamw fp16 with scaler, copies kept: 0": ("--dtype", "float16", "--dropout", "0.1", "--keep-checkpoints", "0"),
}
COMPILED = {"adamw bf16, compiled": ("--dtype", "bfloat16", "--compile", "on", "--dropout", "0.1", "--n-layer", "1")}

# What a save does, and about how often: a run's process is killed at the n-th of these calls.
CALLS_OF_A_SAVE = {"write": 400, "fsync": 5, "link": 4, "replace": 4}
KILL_INSIDE_SAVE = """
import os, signal, checkpoint
left = {count}
def counted(original):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return call
owner = checkpoint._PatientWriter if {name!r} == "write" else os
setattr(owner, {name!r}, counted(getattr(owner, {name!r})))
"""


@dataclass
class Tally:
    """What came of all kills so far."""

    kills: int = 0
    inside_saves: int = 0
    before_first_save: int = 0
    steps_lost: list[int] = field(default_factory=list)
    runs: int = 0
    different: list[str] = field(default_factory=list)


def arguments(name: str, flags: tuple[str, ...]) -> list[str]:
    return [*TINY_RUN, "--max-iters", str(STEPS), "--checkpoint-interval", str(SAVE_EVERY), "--run", name, *flags]


def records(run_dir: Path) -> list[dict]:
    """The whole lines of metrics.jsonl."""
    path, found = run_dir / "metrics.jsonl", []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the torn last line of a killed process
    return found


def last_step(run_dir: Path) -> int:
    return max((record["step"] for record in records(run_dir)), default=0)


def check_readable(run_dir: Path) -> int:
    """Step that a resume goes on from, -1 where there is none yet. Raises where any file is not a whole checkpoint."""
    from checkpoint import load_checkpoint

    steps = {path.name: load_checkpoint(path, verify=True)["iter"] for path in run_dir.glob("checkpoint_*.pt")}
    # Inside the very first save, best has its name before latest; a resume takes that one then.
    first_save = steps == {"checkpoint_best.pt": 0}
    assert not steps or "checkpoint_latest.pt" in steps or first_save, f"there is an instant without a latest: {steps}"
    return steps.get("checkpoint_latest.pt", 0 if first_save else -1)


def start(folder: Path, name: str, flags: tuple[str, ...], before: str = "") -> TrainingProcess:
    resume = ["--resume"] if any((folder / "checkpoints" / name).glob("checkpoint_*.pt")) else []
    return TrainingProcess(folder, [*arguments(name, flags), *resume], before=before)


def killed_at_random(folder: Path, name: str, flags: tuple[str, ...], draw: random.Random) -> bool:
    """Starts or resumes the run and kills it at a random instant. False where it came to its end before."""
    process, run_dir = start(folder, name, flags), folder / "checkpoints" / name
    if draw.random() < 0.2:  # while it starts, or just after
        time.sleep(draw.uniform(0, 1.5))
    else:
        goal = last_step(run_dir) + draw.randint(0, 12)
        process.wait_until(lambda _: last_step(run_dir) >= goal, PATIENCE_S, or_end=True)
        time.sleep(draw.uniform(0, 0.03))
    process.signal(signal.SIGKILL)
    return process.wait(PATIENCE_S) == -signal.SIGKILL


def killed_inside_save(folder: Path, name: str, flags: tuple[str, ...], draw: random.Random) -> bool:
    """The same at a random call of one of the next few saves."""
    call, often = draw.choice(list(CALLS_OF_A_SAVE.items()))
    code = KILL_INSIDE_SAVE.format(name=call, count=draw.randint(1, 3 * often))
    return start(folder, name, flags, code).wait(PATIENCE_S) == -signal.SIGKILL


def run_through_kills(folder: Path, name: str, flags: tuple[str, ...], draw: random.Random, tally: Tally, kills: int) -> None:
    """Kills the run until `kills` are reached in all or it came to its end; then lets it end."""
    run_dir, attempts = folder / "checkpoints" / name, 0
    while tally.kills < kills and last_step(run_dir) < STEPS:
        attempts += 1
        inside = draw.random() < 0.4
        if not (killed_inside_save if inside else killed_at_random)(folder, name, flags, draw):
            break
        saved = check_readable(run_dir)
        tally.kills += 1
        tally.inside_saves += inside
        if saved < 0:
            tally.before_first_save += 1
        tally.steps_lost.append(last_step(run_dir) - max(0, saved))
    process = start(folder, name, flags)
    assert process.wait(PATIENCE_S) == 0, process.output()


def differences(folder: Path, a: str, b: str) -> list[str]:
    """In what two finished runs differ: nothing, if a resume is exact."""
    import torch

    from checkpoint import load_checkpoint, tensors_of

    one, other = (load_checkpoint(folder / "checkpoints" / name / "checkpoint_latest.pt") for name in (a, b))
    found = []
    for key in ("model", "optimizer"):
        pairs = zip(tensors_of(one[key]), tensors_of(other[key]), strict=True)
        if not all(torch.equal(x, y) for x, y in pairs):
            found.append(key)
    measured = ("elapsed_s", "tokens_per_s", "mfu", "memory_bytes")
    lines = [
        [{k: v for k, v in r.items() if k not in measured} for r in records(folder / "checkpoints" / name)] for name in (a, b)
    ]
    return found + (["metrics"] if lines[0] != lines[1] else [])


def bench(folder: Path, kills: int, variants: dict[str, tuple[str, ...]], seed: int, say: Callable[[str], None]) -> Tally:
    """Runs the variants in turn until `kills` processes were killed; each run ends, and is compared with an unbroken one."""
    make_tiny_corpus(folder / "data")
    draw, tally = random.Random(seed), Tally()
    for what, flags in variants.items():
        assert start(folder, what_name(what), flags).wait(PATIENCE_S) == 0, f"the unbroken run of {what} failed"
    while tally.kills < kills:
        what, flags = list(variants.items())[tally.runs % len(variants)]
        name, before = f"run{tally.runs}", tally.kills
        run_through_kills(folder, name, flags, draw, tally, kills)
        found = differences(folder, what_name(what), name)
        tally.runs += 1
        tally.different += [f"{what}: {', '.join(found)}"] if found else []
        say(f"{what}: {tally.kills - before} kills, final state {'DIFFERS in ' + ', '.join(found) if found else 'identical'}")
    return tally


def what_name(what: str) -> str:
    """A run's name out of a variant's words."""
    return "unbroken-" + "".join(c if c.isalnum() else "-" for c in what)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="processes to kill [100]")
    parser.add_argument("--compiled-kills", type=int, default=3, metavar="N", help="of them in a compiled run [3]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants [0]")
    args = parser.parse_args()
    tallies = []
    for variants, kills in ((VARIANTS, args.kills - args.compiled_kills), (COMPILED, args.compiled_kills)):
        with tempfile.TemporaryDirectory() as folder:
            tallies.append(bench(Path(folder), kills, variants, args.seed, lambda line: print(line, flush=True)))
    lost = [steps for tally in tallies for steps in tally.steps_lost]
    print(
        f"kills survived: {sum(t.kills for t in tallies)}, {sum(t.inside_saves for t in tallies)} of them aimed inside a save"
    )
    print(f"runs: {sum(t.runs for t in tallies)}, each trained to its end of {STEPS} steps through its kills")
    print(f"most steps lost by a kill: {max(lost)} (saved every {SAVE_EVERY} steps)")
    different = [line for tally in tallies for line in tally.different]
    print(f"final weights, optimizer and metrics identical: {'NO: ' + '; '.join(different) if different else 'yes'}")
    return 1 if different or max(lost) > SAVE_EVERY else 0


if __name__ == "__main__":
    sys.exit(main())
