"""Stage 8 of 9: a checkpoint in the formats other programs read.

`--format hf` writes a folder that transformers (AutoModelForCausalLM, AutoTokenizer) loads with no code of ours: the same
logits, ids and greedy text. The WikiText and SydsGPT recipes become a GPT-2, rotary ones a Qwen3 or a NanoChat where that is
exactly equal. `--format safetensors` writes the bare weights under our names. Reads the run's best checkpoint unless told
otherwise. Seconds; the folder takes 4 bytes a parameter.

    uv run python export.py --out my-model
    uv run python export.py --out weights --format safetensors --checkpoint checkpoints/wikitext103/checkpoint_latest.pt
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import SPECIAL_TOKENS, parse_config
from support.common import UserError, atomic_write, run_main, write_json, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from checkpoint import LoadedModel
    from tokenizer import BPETokenizer

USES = ["run"]
BESIDE_WEIGHTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--checkpoint", metavar="PATH", help="checkpoint file [the run's best]")
    parser.add_argument(
        "--format", choices=("hf", "safetensors"), default="hf", help="Hugging Face folder or bare weights [hf]"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier export")


def require_free(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; name a folder")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names and not overwrite:
        raise UserError(f"--out {folder} is not empty; name another folder, or add --overwrite")
    foreign = sorted(names.intersection(BESIDE_WEIGHTS))
    if foreign and not names.intersection(("model.safetensors", "model.safetensors.tmp")):  # a run's folder, a corpus's
        raise UserError(f"--out {folder} holds {', '.join(foreign)}, which no export wrote; name another folder")


def write_weights(folder: Path, state: dict[str, "Tensor"], metadata: dict[str, str]) -> None:
    """model.safetensors. What an earlier export left beside it goes once the new weights are written, and before they get
    their name: killed whenever, no folder has the settings or the tokenizer of one model and the weights of another.
    """
    from support.hf_gpt2 import write_safetensors

    with atomic_write(folder / "model.safetensors") as file:
        write_safetensors(file, state, metadata)
        for name in BESIDE_WEIGHTS:
            (folder / name).unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face


def tokenizer_settings(tokenizer: "BPETokenizer", block_size: int) -> dict[str, Any]:
    """`tokenizer_config.json`: text that spells a special token is text, and decoding changes no spaces."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.kind == "gpt2":
        end = tokenizer.tokens[tokenizer.eos_id].decode("utf-8")
        return {**settings, "bos_token": end, "eos_token": end, "unk_token": end}
    pad, unk, bos, eos = SPECIAL_TOKENS
    return {**settings, "pad_token": pad, "unk_token": unk, "bos_token": bos, "eos_token": eos}


def generation_settings(tokenizer: "BPETokenizer") -> dict[str, Any]:
    """`generation_config.json`. The padding token is never drawn, as in generate.py."""
    settings = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    if tokenizer.pad_id is None:
        return {**settings, "pad_token_id": tokenizer.eos_id}
    return {**settings, "pad_token_id": tokenizer.pad_id, "suppress_tokens": [tokenizer.pad_id]}


def standard_layout(loaded: "LoadedModel") -> tuple[dict[str, Any], dict[str, "Tensor"]]:
    """config.json and weights of the standard architecture that equals this model. Raises UserError where none does."""
    from support.hf_gpt2 import not_gpt2, to_hf_config, to_hf_state
    from support.hf_modern import SETTINGS, differences, to_modern_config, to_modern_state

    config, tokenizer, state = loaded.config.model, loaded.tokenizer, loaded.model.state_dict()
    obstacles = {"gpt2": not_gpt2(config)} | {name: differences(config, name) for name in SETTINGS}
    if not obstacles["gpt2"]:
        return to_hf_config(config, tokenizer.bos_id, tokenizer.eos_id), to_hf_state(state, config)
    for name in SETTINGS:
        if not obstacles[name]:
            settings = to_modern_config(config, name, tokenizer.bos_id, tokenizer.eos_id)
            return settings, to_modern_state(state, config, name)
    reasons = "; ".join(f"no {name}: {', '.join(found)}" for name, found in obstacles.items())
    raise UserError(f"no standard architecture equals this model ({reasons}); use --format safetensors for its bare weights")


def write_hf(loaded: "LoadedModel", folder: Path) -> list[str]:
    """Writes the folder; config.json last, since without it nothing takes the folder for a model. Returns the file names."""
    settings, state = standard_layout(loaded)
    write_weights(folder, state, {"format": "pt"})
    write_text(folder / "tokenizer.json", loaded.tokenizer.to_json())
    write_json(folder / "tokenizer_config.json", tokenizer_settings(loaded.tokenizer, loaded.config.model.block_size))
    write_json(folder / "generation_config.json", generation_settings(loaded.tokenizer))
    write_json(folder / "config.json", settings)
    return ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]


# ----------------------------------------------------------------------------------------------------------------------
# Bare weights


def write_bare(loaded: "LoadedModel", folder: Path) -> list[str]:
    """The state dict under our names, a tied matrix once, with the settings in the header; tokenizer.json beside it."""
    state = dict(loaded.model.state_dict())
    if loaded.config.model.tied_head:
        del state["lm_head.weight"]
    settings = {"format": "pt", "model_config": json.dumps(loaded.config.to_dict()["model"])}
    write_weights(folder, state, settings)
    write_text(folder / "tokenizer.json", loaded.tokenizer.to_json())
    return ["model.safetensors", "tokenizer.json"]


def main(argv: Sequence[str] | None = None) -> int:
    config, args = parse_config(argv, doc=__doc__, uses=USES, add_arguments=add_arguments)
    folder = Path(args.out)
    require_free(folder, args.overwrite)

    from checkpoint import find_checkpoint, load_model
    from config import ComputeConfig

    path = find_checkpoint(config, args.checkpoint)
    loaded = load_model(path, ComputeConfig(device="cpu", dtype="float32"))
    names = write_hf(loaded, folder) if args.format == "hf" else write_bare(loaded, folder)
    megabytes = sum((folder / name).stat().st_size for name in names) / 1e6
    print(f"{path}, {loaded.config.model.num_params:,} parameters, vocabulary {loaded.tokenizer.vocab_size:,}")
    print(f"wrote {folder}: {', '.join(names)} ({megabytes:,.1f} MB)")
    if args.format == "hf":
        if loaded.config.model.document_mask:
            print("its attention stays inside documents: elsewhere, give it one document at a time")
        print(f"load it with transformers: AutoModelForCausalLM and AutoTokenizer, each .from_pretrained({str(folder)!r})")
        start = loaded.tokenizer.tokens[loaded.tokenizer.bos_id].decode()
        print(f"generate.py begins each text with {start}, which the tokenizer of transformers does not: put it in front")
    return 0


if __name__ == "__main__":
    run_main(main)
