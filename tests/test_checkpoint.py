"""Checkpoints survive whatever happens while they are written, and nothing but a checkpoint is read as one."""

import errno
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_corpus import byte_tokenizer

import checkpoint as ck
from config import make_config
from model import GPT
from support.common import UserError

TINY_MODEL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 16, "checkpoint_dir": ""}


def make(step: int, checkpoint_dir: str = "checkpoints") -> dict[str, Any]:
    """A whole checkpoint of a tiny model whose step can be told from its content."""
    config = make_config("quick", {**TINY_MODEL, "checkpoint_dir": checkpoint_dir})
    torch.manual_seed(step)
    stored = {"settings": config.to_dict(), "tokenizer": byte_tokenizer().to_json(), "data_fingerprint": "f"}
    stored |= {"progress": {"best_val_loss": float("inf")}, "environment": {}}
    weights = dict(GPT(config.model).state_dict())
    optimizer = {"optimizer": {}, "scaler": None}
    return {"iter": step, "model": weights, "optimizer": optimizer, "train_loss": 1.0, "val_loss": 2.0, "config": stored}


def steps_of(folder: Path) -> dict[str, int]:
    """Step in each checkpoint file, each read as strictly as anyone may read it."""
    paths = sorted(folder.glob("checkpoint_*.pt"))
    return {p.stem.removeprefix("checkpoint_"): torch.load(p, weights_only=True)["iter"] for p in paths}


# ----------------------------------------------------------------------------------------------------------------------
# Writing


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (0, {"best": 2, "latest": 5}),
        (1, {"best": 2, "latest": 5, "prev1": 4}),
        (2, {"best": 2, "latest": 5, "prev1": 4, "prev2": 3}),
        (3, {"best": 2, "latest": 5, "prev1": 4, "prev2": 3, "prev3": 2}),
    ],
)
@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_rotation(keep: int, expected: dict, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rotation that deletes the best or the latest, or a limit of one that deletes all."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    for step in range(1, 6):
        ck.write_checkpoint(make(step), tmp_path, keep, best=step == 2)
    assert steps_of(tmp_path) == expected
    assert not [*tmp_path.glob("*.tmp"), *tmp_path.glob("*.new")]


def test_lowering_keep_removes_the_older_ones_only(tmp_path: Path):
    """Old files that a smaller --keep-checkpoints no longer counts stay for ever, or take the latest with them."""
    for step in range(1, 5):
        ck.write_checkpoint(make(step), tmp_path, 3, best=step == 1)
    ck.write_checkpoint(make(5), tmp_path, 1)
    assert steps_of(tmp_path) == {"best": 1, "latest": 5, "prev1": 4}


def test_order_of_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A missing fsync loses the file in a power cut, which no kill can show: the calls themselves are checked."""
    ck.write_checkpoint(make(1), tmp_path, 1)
    calls = []
    folder = os.open(tmp_path, os.O_RDONLY)

    def recording(name: str, describe: Callable[..., str]) -> None:
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, **k: (calls.append(describe(*a)), original(*a, **k))[1])

    def what(fd: int) -> str:
        return "fsync folder" if os.path.samestat(os.fstat(fd), os.fstat(folder)) else "fsync file"

    recording("fsync", what)
    recording("link", lambda a, b: f"link {Path(a).name} {Path(b).name}")
    recording("replace", lambda a, b: f"replace {Path(a).name} {Path(b).name}")
    ck.write_checkpoint(make(2), tmp_path, 1, best=True)
    os.close(folder)
    assert calls == [
        "fsync file",  # the new content is on the disk before any name moves
        "replace checkpoint_latest.new.tmp checkpoint_latest.new",
        "fsync folder",
        "link checkpoint_latest.new checkpoint_best.pt.tmp",
        "replace checkpoint_best.pt.tmp checkpoint_best.pt",
        "link checkpoint_latest.pt checkpoint_prev1.pt.tmp",
        "replace checkpoint_prev1.pt.tmp checkpoint_prev1.pt",
        "fsync folder",  # best and prev1 have their names before latest moves on
        "replace checkpoint_latest.new checkpoint_latest.pt",
        "fsync folder",
    ]


def _killed_write(folder: str, at_call: int) -> None:
    """Writes a checkpoint in a process that is killed just before its `at_call`-th system call that matters."""
    count = 0

    def counting(original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "link", "replace"):
        setattr(os, name, counting(getattr(os, name)))
    Path.unlink = counting(Path.unlink)
    torch.save = counting(torch.save)
    ck.write_checkpoint(make(9), Path(folder), 2, best=True)


def test_killed_at_any_call_leaves_latest_and_one_readable_checkpoint_each(tmp_path: Path):
    """Between two renames there must be no instant without a latest, nor one in which best is half there."""
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)  # a forked child has no thread pool
    for at_call in range(1, 40):
        folder = tmp_path / str(at_call)
        folder.mkdir()
        for step in (6, 7, 8):
            ck.write_checkpoint(make(step), folder, 2, best=step == 6)
        process = context.Process(target=_killed_write, args=(str(folder), at_call))
        process.start()
        process.join()
        steps = steps_of(folder)  # raises where a file is half-written
        assert steps["latest"] in (8, 9) and steps["best"] in (6, 9)
        assert steps["latest"] == 8 or steps["best"] == 9, "latest says that best is new, but it is not"
        assert set(steps.values()) >= {7, 8} or steps["latest"] == 9
        ck.remove_temporaries(folder)
        ck.write_checkpoint(make(10), folder, 2)
        assert steps_of(folder)["latest"] == 10 and len(set(steps_of(folder).values())) >= 3
        if process.exitcode == 0:
            break
    assert process.exitcode == 0 and at_call > 10


def _limited_write(folder: str, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        ck.write_checkpoint(make(9), Path(folder), 2, best=True)
    except OSError as error:
        os._exit(3 if error.errno == errno.EFBIG else 4)
    os._exit(0)


@pytest.mark.parametrize("limit", [0, 1000, 50_000, 170_000])
def test_a_write_that_fails_half_way_changes_nothing(limit: int, tmp_path: Path):
    """A full disk inside torch.save ends in a C++ error, or takes the old checkpoints with it."""
    for step in (7, 8):
        ck.write_checkpoint(make(step), tmp_path, 2, best=step == 7)
    before = steps_of(tmp_path)
    torch.set_num_threads(1)
    process = multiprocessing.get_context("fork").Process(target=_limited_write, args=(str(tmp_path), limit))
    process.start()
    process.join()
    assert process.exitcode == 3
    assert steps_of(tmp_path) == before and len(list(tmp_path.iterdir())) == len(before)


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Filling the disk to the last byte before failing hurts every other program on the machine."""
    ck.write_checkpoint(make(1), tmp_path, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"no space left on the disk of .*: a checkpoint needs about"):
        ck.write_checkpoint(make(2), tmp_path, 2)
    assert steps_of(tmp_path) == {"latest": 1}


def test_size_of_tied_weights_counts_once():
    """Counting the tied head twice asks for room that is not needed."""
    state = make(1)
    written = sum(t.numel() * 4 for name, t in state["model"].items() if name != "lm_head.weight")
    assert ck.tensor_bytes(state) == written


# ----------------------------------------------------------------------------------------------------------------------
# Reading


class _Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("run-by-the-unpickler",)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.unlink(), "is missing"),
        (lambda p: p.write_bytes(b""), "is damaged"),
        (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "is damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:1000]), "is damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2] + bytes(p.stat().st_size // 2)), "is damaged"),
        (lambda p: p.write_bytes(pickle.dumps(_Harmful())), "is damaged"),
        (lambda p: torch.save(_Harmful(), p), "is damaged"),
        (lambda p: torch.save([1, 2], p), "no checkpoint of this program"),
        (lambda p: torch.save({"model": {}, "iter_num": 3, "best_val_loss": 1.0}, p), "no checkpoint of this program"),
        (lambda p: torch.save({**make(1), "iter": "3"}, p), "no checkpoint of this program"),
        (lambda p: torch.save({**make(1), "config": {}}, p), "no checkpoint of this program"),
    ],
    ids=[
        "missing",
        "empty",
        "text",
        "head",
        "one byte short",
        "zeroed",
        "pickle",
        "code",
        "list",
        "nanogpt",
        "iter",
        "config",
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(
    damage: Callable, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Damaged bytes taken for weights, a traceback of the unpickler, or foreign code that runs."""
    monkeypatch.chdir(tmp_path)
    ck.write_checkpoint(make(1), tmp_path, 0)
    path = tmp_path / "checkpoint_latest.pt"
    damage(path)
    with pytest.raises(UserError, match=says) as caught:
        ck.load_checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("run-by-the-unpickler").exists()


@pytest.mark.parametrize("verify", [True, False])
def test_what_cannot_be_opened_is_not_called_damaged(tmp_path: Path, verify: bool):
    """`is damaged ...; train again` of a good checkpoint whose permissions, or whose disk, keep it from being read."""
    path = tmp_path / "checkpoint_latest.pt"
    path.symlink_to(path.name)
    with pytest.raises(UserError, match=r"checkpoint_latest\.pt: .*check the path") as caught:
        ck.load_checkpoint(path, verify=verify)
    assert not isinstance(caught.value, ck.DamagedCheckpoint)


def test_wrapper_prefixes_are_taken_off(tmp_path: Path):
    """Keys saved from a compiled or distributed model would not match, and a lax load would leave random weights."""
    state = make(1)
    state["model"] = {"module._orig_mod." + name: t for name, t in state["model"].items()}
    torch.save(state, tmp_path / "a.pt")
    assert ck.load_checkpoint(tmp_path / "a.pt")["model"].keys() == make(1)["model"].keys()


def test_newest_readable_skips_with_reasons_and_promote_keeps_good_ones(tmp_path: Path):
    """After a damaged latest, rotation must not push the good older ones out in favour of the damaged one."""
    for step in (1, 2, 3):
        ck.write_checkpoint(make(step), tmp_path, 2)
    latest = tmp_path / "checkpoint_latest.pt"
    latest.write_bytes(b"torn")
    path, found, skipped = ck.newest_readable(tmp_path, "start")
    assert path.name == "checkpoint_prev1.pt" and found["iter"] == 2
    assert len(skipped) == 1 and "checkpoint_latest.pt is damaged" in skipped[0]
    ck.promote(path, tmp_path)
    assert steps_of(tmp_path) == {"latest": 2, "prev1": 2, "prev2": 1}
    assert (tmp_path / "checkpoint_latest.damaged").read_bytes() == b"torn"
    ck.write_checkpoint(make(4), tmp_path, 2)
    assert steps_of(tmp_path) == {"latest": 4, "prev1": 2, "prev2": 1}


def test_a_flipped_bit_is_noticed_on_resume(tmp_path: Path):
    """torch.load takes a weight with a flipped bit for a weight; training on with it would ruin the run unseen."""
    for step in (1, 2):
        ck.write_checkpoint(make(step), tmp_path, 2)
    latest = tmp_path / "checkpoint_latest.pt"
    data = bytearray(latest.read_bytes())
    data[len(data) // 2] ^= 0x10
    latest.write_bytes(data)
    path, _, skipped = ck.newest_readable(tmp_path, "start")
    assert path.name == "checkpoint_prev1.pt" and "checksum" in skipped[0]


def test_newest_readable_says_when_there_is_none(tmp_path: Path):
    """Starting over in silence."""
    with pytest.raises(UserError, match=r"there is no checkpoint in .*; start the run with: START"):
        ck.newest_readable(tmp_path, "START")
    (tmp_path / "checkpoint_latest.pt").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read: skipped: .*START"):
        ck.newest_readable(tmp_path, "START")


def test_find_checkpoint(tmp_path: Path):
    """Commands that read a run take its best, and list the runs there are when there is none."""
    config = make_config("quick", {"checkpoint_dir": str(tmp_path)})
    with pytest.raises(
        UserError, match=r"there is no checkpoint in .*quick; run: uv run python train.py --preset quick [^;]*$"
    ):
        ck.find_checkpoint(config)
    ck.write_checkpoint(make(1), tmp_path / "other", 0)
    with pytest.raises(UserError, match=r"in .*quick; runs that exist: --run other; to train"):
        ck.find_checkpoint(config)
    ck.write_checkpoint(make(1), tmp_path / "quick", 0)
    assert ck.find_checkpoint(config).name == "checkpoint_latest.pt"
    ck.write_checkpoint(make(2), tmp_path / "quick", 0, best=True)
    assert ck.find_checkpoint(config).name == "checkpoint_best.pt"
    assert ck.find_checkpoint(config, "somewhere.pt") == Path("somewhere.pt")
    assert ck.find_checkpoint(config, str(tmp_path / "other")) == tmp_path / "other" / "checkpoint_latest.pt"


def test_load_model_gives_identical_logits(tmp_path: Path):
    """A load that is not the inverse of the save."""
    state = make(1)
    ck.write_checkpoint(state, tmp_path, 0)
    loaded = ck.load_model(tmp_path / "checkpoint_latest.pt", make_config("quick", {"device": "cpu"}).compute)
    model = GPT(loaded.config.model)
    model.load_state_dict(state["model"])
    idx = torch.arange(12)[None]
    assert torch.equal(loaded.model(idx)[0], model.eval()(idx)[0])
    assert not loaded.model.training and loaded.tokenizer.sha256 == byte_tokenizer().sha256
