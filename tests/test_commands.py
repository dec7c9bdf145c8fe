"""What every command promises: help without torch, mistakes in one line, missing inputs that name the command making them."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT, assert_user_error

from config import PRESETS

STAGES = {
    "download_data.py": 1,
    "train_tokenizer.py": 2,
    "prepare_data.py": 3,
    "test_model.py": 4,
    "train.py": 5,
    "generate.py": 6,
    "evaluate.py": 7,
    "export.py": 8,
    "report.py": 9,
}
COMMANDS = [*STAGES, "pipeline.py", "config.py"]
# Arguments without which a command is refused before it looks for its input.
REQUIRED = {"generate.py": ["--prompt", "x"], "export.py": ["--out", "out"], "report.py": ["quick"]}


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", COMMANDS)
def test_help_is_complete_and_imports_neither_torch_nor_numpy(script: str) -> None:
    """A --help that takes ten seconds because parsing comes after the imports; presets or defaults that it hides."""
    result = run_python(f"""
import runpy, sys
sys.argv = [{script!r}, "--help"]
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {{"torch", "numpy", "transformers", "matplotlib", "pyarrow"}} & set(sys.modules)
assert not heavy, heavy
""")
    assert result.returncode == 0, result.stderr
    assert all(preset in result.stdout for preset in PRESETS)
    if script in STAGES:
        first = next(line for line in result.stdout.splitlines() if line and not line.startswith("usage"))
        assert first.startswith(f"Stage {STAGES[script]} of 9: "), first


@pytest.mark.parametrize("script", COMMANDS)
def test_a_typo_in_a_flag_names_the_nearest_flag(stage, script: str) -> None:
    """A stage with a parser of its own that ignores or mangles unknown flags."""
    assert_user_error(stage(script, "--presett", "quick"), "--presett", "--preset")
    assert_user_error(stage(script, "--preset", "nosuch"), "nosuch", "wikitext103")


@pytest.mark.parametrize(
    ("script", "fragment"),
    [
        ("train_tokenizer.py", "uv run python download_data.py --preset quick"),
        ("prepare_data.py", "uv run python download_data.py --preset quick"),
        ("train.py", "uv run python"),
        ("generate.py", "uv run python train.py --preset quick"),
        ("evaluate.py", "uv run python train.py --preset quick"),
        ("export.py", "uv run python train.py --preset quick"),
        ("report.py", "quick"),
    ],
)
def test_a_missing_input_names_the_command_that_makes_it(stage, tmp_path, script: str, fragment: str) -> None:
    """A bare FileNotFoundError, or folders left behind by a stage that had nothing to read."""
    assert_user_error(stage(script, "--preset", "quick", *REQUIRED.get(script, [])), fragment)
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"] == []


def test_no_module_imports_a_stage_and_no_stage_imports_another() -> None:
    """A layering that grows circular: stages know modules, modules know no stage, only the pipeline knows the stages."""
    stages = {script.removesuffix(".py") for script in STAGES}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]:
        if path.name == "pipeline.py":
            continue
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert not imported & stages, (path.name, imported & stages)
