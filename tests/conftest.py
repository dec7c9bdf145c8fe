"""Shared fixtures: stages run as real processes in an empty folder, and the places of optional development corpora."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED_CORPUS = ROOT.parent / "shared" / "corpus"

sys.path.insert(0, str(ROOT))


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `stage("train.py", "--resume", ...)` as a user would, in the folder `tmp_path`; returns the process."""

    def run(script: str, *arguments: object, timeout: float = 300, env: dict | None = None) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / script), *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small only wait for each other's threads; puts back what a run sets for its whole process."""
    import torch  # tests of the early stages do without

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def in_tiny_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """A folder of its own with a tiny corpus, for training in this process."""
    from tiny_corpus import make_tiny_corpus

    from support import device

    make_tiny_corpus(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "matmul_rate", lambda _: 1e12)  # takes longer than a tiny run


def assert_user_error(result: subprocess.CompletedProcess, *fragments: str) -> None:
    """The promise for every mistake of a user: exit code 2, one `error: ...` line that holds the fragments, no traceback."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr + result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    for fragment in fragments:
        assert fragment in lines[0], lines[0]


@pytest.fixture
def dictwiki_zip() -> Path:
    return _shared_file("dictwiki-raw-v1.zip")


@pytest.fixture
def wikitext_zip() -> Path:
    return _shared_file("wikitext-raw-valid-test.zip")


def _shared_file(name: str) -> Path:
    path = SHARED_CORPUS / name
    if not path.exists():
        pytest.skip(f"the development corpus {name} is not on this machine")
    return path
