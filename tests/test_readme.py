"""The README's commands, run in its order at a tiny size. What needs a GPU, the network or hours says so there."""

import re
import subprocess
import sys

from conftest import ROOT
from test_pipeline import TINY, write_corpus

SMALL_MODEL = [
    "--n-layer",
    "1",
    "--n-head",
    "2",
    "--n-embd",
    "32",
    "--block-size",
    "32",
    "--batch-size",
    "1",
    "--compile",
    "off",
]
# train.py takes no vocabulary size, the first flag of TINY.
TINY_TORCHRUN = [*TINY[2:], "--batch-size", "2", "--grad-accum-steps", "2"]


def readme_commands() -> list[str]:
    """Every command line of the README's code blocks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def runnable(line: str) -> bool:
    return "needs " not in line and line.partition("#")[0].strip() != "uv run pytest"


def at_a_tiny_size(line: str) -> list[str]:
    """The process that a README line stands for, with flags behind it that make it small."""
    words = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', line.partition("#")[0])]
    assert words[:2] == ["uv", "run"], line
    if words[2] == "torchrun":
        script = words.index("train.py")
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words[3:script],
            str(ROOT / "train.py"),
            *words[script + 1 :],
            *TINY_TORCHRUN,
        ]
    assert words[2] == "python", line
    script, arguments = words[3], words[4:]
    if "--estimate" in arguments or "--overfit-batch" in arguments:
        arguments = [*arguments, *SMALL_MODEL]
    elif script == "pipeline.py":
        arguments = [*arguments, *TINY, "--skip-checks"]
    elif script == "prepare_data.py":
        arguments = [*arguments, "--block-size", "32"]
    return [sys.executable, str(ROOT / script), *arguments]


def test_every_command_of_the_readme_works(tmp_path) -> None:
    """A renamed flag, a changed default or a moved file that leaves the front door broken."""
    commands = readme_commands()
    assert len(commands) > 20, "the README's code blocks were not found"
    write_corpus(tmp_path / "book.txt")
    for line in filter(runnable, commands):
        result = subprocess.run(
            at_a_tiny_size(line),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=400,
            stdin=subprocess.DEVNULL,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
