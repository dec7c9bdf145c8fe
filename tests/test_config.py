"""Settings: precedence, flags made from fields, checks that name the field and the bound."""

import dataclasses
import json

import pytest
import torch
from conftest import ROOT, assert_user_error

import config as settings
from config import PRESETS, SECTIONS, Config, ModelConfig, make_config, parse_config
from model import GPT
from support.hf_modern import NANOCHAT, differences


def parse(*argv: str, uses: tuple[str, ...] = tuple(SECTIONS)) -> Config:
    return parse_config(list(argv), doc="Stage 0 of 9: a test.", uses=uses)[0]


def test_precedence_is_default_then_preset_then_flag() -> None:
    """A preset that overrides a flag, or a flag that resets the preset's other values."""
    assert parse().train.max_iters == 4_000
    assert parse("--preset", "wikitext2").train.max_iters == PRESETS["wikitext2"]["max_iters"]
    config = parse("--max-iters=7000", "--preset", "wikitext2")
    assert config.train.max_iters == 7_000
    assert config.model.n_layer == PRESETS["wikitext2"]["n_layer"]


def test_underscores_and_dashes_name_the_same_flag_and_leave_values_alone() -> None:
    """A value that contains an underscore being rewritten along with its flag."""
    assert parse("--batch_size", "3").train.batch_size == 3
    assert parse("--data_dir=my_data").run.data_dir == "my_data"


def test_only_the_flags_that_were_given_are_reported_as_given() -> None:
    """A default counted as the user's wish, which on a resume would overrule the checkpoint."""
    _, args = parse_config(["--batch-size", "8", "--no-tied-head"], doc="x", uses=list(SECTIONS))
    assert args.given == {"batch_size": 8, "tied_head": False}


def test_field_names_are_unique_across_sections() -> None:
    """Two sections sharing a name would make one flag set the wrong one."""
    names = [f.name for section in SECTIONS.values() for f in dataclasses.fields(section) if f.metadata["flag"]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_its_checks_and_survives_storage(preset: str) -> None:
    """A preset with an impossible combination, or a setting that JSON cannot carry."""
    config = make_config(preset)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_published_parameter_counts() -> None:
    """The two advertised sizes drifting away from the presets."""
    assert make_config("wikitext103").model.num_params == 126_273_024
    assert make_config("sydsgpt").model.num_params == 163_823_616
    assert make_config("wikitext103").tokens_per_step == 32_768
    assert make_config("sydsgpt").tokens_per_step == 262_144


@pytest.mark.parametrize(
    ("flags", "field", "bound"),
    [
        (["--n-head", "5"], "n_embd", "divisible by n_head (5)"),
        (["--warmup-iters", "4000"], "warmup_iters", "below max_iters (4000)"),
        (["--vocab-size", "4"], "vocab_size", "above the 4 special tokens"),
        (["--vocab-size", "200", "--tokenizer-kind", "byte"], "vocab_size", "at least 260"),
        (["--batch-size", "0"], "batch_size", "above 0"),
        (["--learning-rate", "nan"], "learning_rate", "finite"),
        (["--dropout", "1.0"], "dropout", "below 1"),
        (["--val-fraction", "0.6", "--test-fraction", "0.5"], "val_fraction + test_fraction", "below 1"),
        (["--corpus", "../elsewhere"], "corpus", "plain name"),
        (["--device", "gpu"], "device", "cuda"),
        (["--dtype", "bf16"], "dtype", "bfloat16"),
        (["--batch-size", "eight"], "batch-size", "invalid int"),
        (["--seed"], "seed", "expected one argument"),
        (["--min-lr-ratio", "1.5"], "min_lr_ratio", "from 0 to 1"),
        (["--preset", "quik"], "preset", "quick"),
        (["--sample-prompt", "\udcff"], "sample_prompt", "UTF-8"),  # was a traceback, after the first step
        (["--threads", "1099511627776"], "threads", "from 0 to 4,096"),  # was a traceback of torch's
        (["--keep-checkpoints", "1099511627776"], "keep_checkpoints", "at most 10,000"),  # was out of memory, after step 0
        (["--grad-accum-steps", "1099511627776"], "batch_size * grad_accum_steps", "at most 16,777,216"),  # likewise
    ],
)
def test_a_wrong_value_is_one_line_that_names_field_and_bound(stage, flags: list[str], field: str, bound: str) -> None:
    """A traceback, or a message that leaves the user guessing which of 60 settings is wrong."""
    assert_user_error(stage("config.py", *flags), field, bound)


def test_an_unknown_flag_names_the_nearest_one(stage) -> None:
    """A typo silently ignored, or refused without a hint."""
    assert_user_error(stage("config.py", "--batchsize", "3"), "unknown flag --batchsize", "--batch-size")
    assert_user_error(stage("config.py", "stray"), "unexpected argument stray")


def test_printing_a_preset_shows_what_follows_from_it(stage) -> None:
    """The arithmetic a user checks first being absent or wrong."""
    output = stage("config.py").stdout
    assert "126,273,024" in output
    assert "8 x 8 x 512 = 32,768" in output
    assert "131,072,000" in output


def test_the_readme_quotes_the_presets_parameter_counts() -> None:
    """A table of presets that goes on advertising a size which a change of settings has left behind."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for preset in PRESETS:
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{preset}` |"))
        assert f"{make_config(preset).model.num_params:,}" in row, preset


def test_the_fast_preset_stays_within_the_published_runs_means() -> None:
    """A preset that learns more only because it is bigger or reads more, or that no standard architecture expresses."""
    published, fast = make_config("wikitext103"), make_config("wikitext103-fast")
    assert fast.model.num_params <= 126_300_000
    assert (fast.tokens_per_step, fast.train.max_iters) == (published.tokens_per_step, published.train.max_iters)
    assert fast.run.corpus == published.run.corpus and fast.tokenizer == published.tokenizer
    assert differences(fast.model, NANOCHAT) == []
    with torch.device("meta"):
        assert GPT(fast.model).num_params() == fast.model.num_params


def test_run_names_follow_preset_corpus_and_variant() -> None:
    """Two corpora trained with one preset overwriting each other's checkpoints."""
    assert parse().run_name == "wikitext103"
    assert parse("--corpus", "mine").run_name == "wikitext103-mine"
    assert parse("--corpus", "mine", "--variant", "v32k").run_name == "wikitext103-mine-v32k"
    assert parse("--run", "a", "--corpus", "mine").run_name == "a"


def test_the_next_command_selects_the_same_corpus_and_run() -> None:
    """A printed command that, pasted, works on another corpus than the one just made."""
    config = parse("--preset", "quick", "--corpus", "mine", "--data-dir", "my data")
    command = config.command("train.py", "--resume")
    assert command == 'uv run python train.py --preset quick --corpus mine --data-dir "my data" --resume'
    assert make_config("quick").command("pipeline.py") == "uv run python pipeline.py"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no preset"),
        ({"preset": "quick", "model": {"n_layers": 2}}, "model.n_layers"),
        ({"preset": "quick", "model": {"n_layer": "2"}}, "model.n_layer"),
        ({"preset": "quick", "model": {"n_layer": True}}, "model.n_layer"),
        ({"preset": "quick", "model": []}, "not a table"),
    ],
)
def test_stored_settings_of_a_wrong_form_are_refused(values: dict, message: str) -> None:
    """A damaged or foreign checkpoint building a model of the wrong shape."""
    with pytest.raises(ValueError, match=message):
        Config.from_dict(values)


def test_a_section_refuses_bad_values_also_when_built_in_code() -> None:
    """Checks that run only for the command line let a library caller build nonsense."""
    with pytest.raises(ValueError, match="n_embd"):
        ModelConfig(n_embd=10, n_head=3)
    with pytest.raises(ValueError, match="no setting named"):
        settings.make_config("quick").with_settings({"n_layers": 3})
