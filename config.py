"""Every setting of the pipeline: frozen dataclass sections, named presets, and command-line flags made from the fields.

A field's name is its flag (`batch_size` is `--batch-size`) and its JSON key, so one search finds every use.
Order of precedence: default < preset < flag; `train.py --resume` puts the checkpoint between preset and flag.

    uv run python config.py                        the resolved settings of a preset, tokens per step, parameters
    uv run python config.py --show CHECKPOINT      the settings and the progress stored in a checkpoint

Standard library only, so that `--help` answers at once.
"""

import argparse
import dataclasses
import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# Ids of the special tokens in every tokenizer trained here; GPT-2's vocabulary has its own single separator.
SPECIAL_TOKENS = ("<PAD>", "<UNK>", "<BOS>", "<EOS>")
GPT2_VOCAB_SIZE = 50_257


def setting(default: Any, text: str, *, choices: Sequence[str] = (), flag: bool = True) -> Any:
    """A dataclass field that carries what its command-line flag needs: help text with units, and allowed values."""
    return field(default=default, metadata={"help": text, "choices": tuple(choices), "flag": flag})


def _require(ok: bool, name: str, value: object, bound: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}, but it must be {bound}")


def _require_positive(section: object, *names: str) -> None:
    for name in names:
        _require(getattr(section, name) > 0, name, getattr(section, name), "above 0")


def _require_at_least(section: object, bound: float, *names: str) -> None:
    for name in names:
        _require(getattr(section, name) >= bound, name, getattr(section, name), f"at least {bound}")


def _require_fraction(section: object, *names: str) -> None:
    for name in names:
        _require(0.0 <= getattr(section, name) < 1.0, name, getattr(section, name), "at least 0 and below 1")


class _Section:
    """Checks what holds for every section: declared choices and finite numbers."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata.get("choices")
            if choices:
                _require(value in choices, f.name, value, "one of " + ", ".join(choices))
            if isinstance(value, float):
                _require(math.isfinite(value), f.name, value, "a finite number")
            elif isinstance(value, int):
                _require(-(2**63) <= value < 2**63, f.name, value, "a number of 64 bits")
            elif isinstance(value, str) and not f.name.endswith("_dir"):  # a path may be any bytes
                _require(not re.search("[\ud800-\udfff]", value), f.name, value, "text in UTF-8")
        self.check()

    def check(self) -> None:
        """Raises ValueError naming the field and its bound."""


@dataclass(frozen=True)
class RunConfig(_Section):
    """What several stages share: where things lie, and the seed."""

    corpus: str = setting("wikitext103", "name of the corpus, a folder under the data folder")
    variant: str = setting("", "keep tokenizer and tokens under data/CORPUS/VARIANT/, so one corpus carries several")
    run: str = setting("", "name of the run, a folder under the checkpoint folder (default: made from preset and corpus)")
    data_dir: str = setting("data", "folder of all corpora")
    checkpoint_dir: str = setting("checkpoints", "folder of all runs")
    seed: int = setting(1337, "seed of every random draw")

    def check(self) -> None:
        for name in ("corpus", "variant", "run"):
            value = getattr(self, name)
            plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is not None
            optional = name != "corpus" and value == ""
            _require(plain or optional, name, value, "a plain name of letters, digits, '.', '_' and '-'")
        for name in ("data_dir", "checkpoint_dir"):
            value = getattr(self, name)
            _require("\0" not in value and not re.search("[\ud800-\udc7f]", value), name, value, "a path")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2**63 - 1")


@dataclass(frozen=True)
class DataConfig(_Section):
    """How documents are read and split; stage 1 writes these into the manifest, later stages follow it."""

    text_field: str = setting("text", "field (.jsonl) or column (.parquet) that holds a document's text")
    document_separator: str = setting("", "cut .txt and .md files into documents at this string (default: a file is one)")
    val_fraction: float = setting(0.02, "share of documents for validation where the corpus brings no splits")
    test_fraction: float = setting(0.02, "share of documents for test where the corpus brings no splits")
    errors: str = setting(
        "strict",
        "bytes that are not UTF-8: stop and name the place, or replace and count",
        choices=("strict", "replace"),
    )
    split_unit: str = setting(
        "document",
        "what a split is made of: whole documents, or chunks of block_size tokens (documents then straddle the splits)",
        choices=("document", "chunk"),
    )
    shuffle_seed: int = setting(-1, "order blocks, and the documents in each, by a hash with this seed (-1: as they lie)")
    keep_fraction: float = setting(1.0, "share of the documents that is kept, drawn by hash")

    def check(self) -> None:
        _require_fraction(self, "val_fraction", "test_fraction")
        _require(-1 <= self.shuffle_seed < 2**63, "shuffle_seed", self.shuffle_seed, "from -1 to 2**63 - 1")
        _require(0.0 < self.keep_fraction <= 1.0, "keep_fraction", self.keep_fraction, "above 0 and at most 1")
        total = self.val_fraction + self.test_fraction
        _require(total < 1.0, "val_fraction + test_fraction", total, "below 1")
        _require(self.text_field != "", "text_field", self.text_field, "a field name")


@dataclass(frozen=True)
class TokenizerConfig(_Section):
    """What decides the vocabulary."""

    tokenizer_kind: str = setting(
        "word", "splitter: word (whitespace-normalised), byte (lossless), gpt2", choices=("word", "byte", "gpt2")
    )
    vocab_size: int = setting(16_384, "tokens in the vocabulary, special tokens included")
    min_frequency: int = setting(2, "merge no pair seen less often than this")
    sample_mb: float = setting(100.0, "megabytes of training text the tokenizer learns from; a smaller corpus is used whole")

    def check(self) -> None:
        _require(
            len(SPECIAL_TOKENS) < self.vocab_size <= 2**31,
            "vocab_size",
            self.vocab_size,
            f"above the {len(SPECIAL_TOKENS)} special tokens",
        )
        _require_at_least(self, 1, "min_frequency")
        _require_positive(self, "sample_mb")
        if self.tokenizer_kind == "byte":
            least = len(SPECIAL_TOKENS) + 256
            _require(self.vocab_size >= least, "vocab_size", self.vocab_size, f"at least {least} for tokenizer_kind byte")


@dataclass(frozen=True)
class ModelConfig(_Section):
    """Only what decides parameter shapes and forward(); stored in every checkpoint."""

    n_layer: int = setting(16, "transformer blocks")
    n_head: int = setting(12, "attention heads per block")
    n_embd: int = setting(768, "width of the residual stream")
    block_size: int = setting(512, "maximum context, in tokens")
    dropout: float = setting(0.0, "dropout probability, in training only")
    bias: bool = setting(False, "biases on the linear layers (the layer norms always have gain and bias)")
    tied_head: bool = setting(True, "token embedding and output head are one matrix")
    activation: str = setting(
        "gelu",
        "MLP non-linearity: exact GELU, its tanh form, squared ReLU, or SwiGLU (2/3 of the width, three matrices)",
        choices=("gelu", "gelu_tanh", "relu2", "swiglu"),
    )
    position: str = setting("learned", "positions: a learned embedding, or rotary", choices=("learned", "rotary"))
    norm: str = setting(
        "layernorm",
        "normalisation: layer norm, RMSNorm with gain, or RMSNorm without parameters",
        choices=("layernorm", "rmsnorm", "rmsnorm_plain"),
    )
    qk_norm: bool = setting(False, "RMSNorm on queries and keys, per head (with gain where norm is rmsnorm)")
    embedding_norm: bool = setting(False, "normalise the token embedding before the first block, without parameters")
    zero_init: bool = setting(False, "start the projections that feed the residual stream at zero")
    logit_softcap: float = setting(0.0, "squash logits to plus or minus this with tanh (0: off)")
    document_mask: bool = setting(False, "attention stays inside documents, where a window holds several")
    # No flags: the vocabulary is an artifact, read from the token files (or the checkpoint).
    vocab_size: int = setting(16_384, "tokens in the vocabulary", flag=False)
    bos_id: int = setting(2, "token that a document begins with, read by document_mask alone", flag=False)

    def check(self) -> None:
        _require_positive(self, "n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        _require_fraction(self, "dropout")
        _require_at_least(self, 0, "logit_softcap")
        _require(self.n_layer <= 10_000, "n_layer", self.n_layer, "at most 10,000")
        bound = f"divisible by n_head ({self.n_head})"
        _require(self.n_embd % self.n_head == 0, "n_embd", self.n_embd, bound)
        if self.position == "rotary":
            _require(self.head_dim % 2 == 0, "n_embd / n_head", self.head_dim, "even for position rotary")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def mlp_hidden(self) -> int:
        """Width inside the MLP: 4 * n_embd; for swiglu 2/3 of it (the same parameters), up to a multiple of 64."""
        return -(-8 * self.n_embd // (3 * 64)) * 64 if self.activation == "swiglu" else 4 * self.n_embd

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix: the next multiple of 64, which matrix kernels like; never sampled, never scored."""
        return -(-self.vocab_size // 64) * 64

    @property
    def num_params(self) -> int:
        """Parameters as advertised: padding rows are not counted, a tied head is counted once."""
        C, biases = self.n_embd, int(self.bias)
        norm = {"layernorm": 2 * C, "rmsnorm": C, "rmsnorm_plain": 0}[self.norm]
        qk_gains = 2 * self.head_dim if self.qk_norm and self.norm == "rmsnorm" else 0
        attention = 4 * C * C + biases * (3 * C + C) + qk_gains
        hidden_in = self.mlp_hidden * (2 if self.activation == "swiglu" else 1)
        mlp = hidden_in * C + self.mlp_hidden * C + biases * (hidden_in + C)
        block = 2 * norm + attention + mlp
        positions = self.block_size * C if self.position == "learned" else 0
        embeddings = self.vocab_size * C * (1 if self.tied_head else 2) + positions
        return embeddings + self.n_layer * block + norm


@dataclass(frozen=True)
class TrainConfig(_Section):
    """The optimisation recipe and its book-keeping. A step is one optimizer update, and counts are in steps."""

    batch_size: int = setting(8, "sequences per micro-batch")
    grad_accum_steps: int = setting(8, "micro-batches per step, over all ranks together")
    max_iters: int = setting(4_000, "steps of the whole schedule (0: as many as max_epochs passes need)")
    max_epochs: float = setting(0.0, "passes over the training tokens, where max_iters is 0")
    sampling: str = setting("random", "windows at random offsets, or every window once per pass", choices=("random", "epoch"))

    optimizer: str = setting(
        "adamw",
        "AdamW; Muon for the hidden matrices with AdamW for the rest; AdamW in GaLore's low-rank space for the hidden matrices",
        choices=("adamw", "muon", "galore"),
    )
    learning_rate: float = setting(2.5e-4, "peak learning rate")
    muon_learning_rate: float = setting(0.0, "peak learning rate of Muon's matrices, on AdamW's scale (0: learning_rate)")
    muon_momentum: float = setting(0.95, "Muon: momentum")
    galore_rank: int = setting(128, "GaLore: rank of the projection, clipped to each matrix")
    galore_update_gap: int = setting(200, "GaLore: steps between new projections")
    galore_scale: float = setting(0.25, "GaLore: factor on the update that comes back from the low-rank space")
    lr_schedule: str = setting(
        "cosine",
        "after warm-up: cosine to the end, or warm-up/stable/decay (the peak, then linear in the last decay_ratio)",
        choices=("cosine", "wsd"),
    )
    decay_ratio: float = setting(0.2, "lr_schedule wsd: share of all steps in which the learning rate falls")
    min_lr_ratio: float = setting(0.1, "final learning rate as a share of the peak")
    initial_lr: float = setting(0.0, "learning rate of the first step; 0: warm-up is peak * (k + 1) / warm-up")
    warmup_iters: int = setting(200, "warm-up steps")
    warmup_ratio: float = setting(0.0, "warm-up as a share of all steps, where it is not 0 (instead of warmup_iters)")
    beta1: float = setting(0.9, "AdamW: decay of the first moment")
    beta2: float = setting(0.95, "AdamW: decay of the second moment")
    eps: float = setting(1e-8, "AdamW: term in the denominator")
    weight_decay: float = setting(0.1, "decoupled weight decay")
    decay_all: bool = setting(False, "decay every parameter, not the matrices only")
    grad_clip: float = setting(1.0, "clip the gradient's global norm to this (0: off)")

    eval_interval: int = setting(100, "steps between evaluations; there is one before the first step and one after the last")
    eval_windows: int = setting(240, "fixed validation windows of an evaluation (0: the whole split)")
    eval_batch_size: int = setting(0, "sequences per evaluation batch (0: batch_size); does not change the loss")
    log_interval: int = setting(10, "steps between train records in metrics.jsonl")
    checkpoint_interval: int = setting(100, "steps between checkpoints")
    checkpoint_minutes: float = setting(15.0, "most minutes between checkpoints (0: by steps alone)")
    keep_checkpoints: int = setting(2, "older checkpoints kept beside latest and best")
    max_bad_steps: int = setting(10, "stop after so many steps in a row with a non-finite loss or gradient")
    sample_tokens: int = setting(0, "tokens of sample text written at each evaluation (0: only at the end of the run)")
    sample_prompt: str = setting("", "prompt of these samples (default: a document's start)")

    def check(self) -> None:
        _require_positive(self, "batch_size", "grad_accum_steps", "learning_rate", "eps")
        _require_positive(self, "eval_interval", "log_interval", "checkpoint_interval", "max_bad_steps")
        _require_at_least(self, 0, "max_iters", "max_epochs", "warmup_iters", "initial_lr", "weight_decay", "grad_clip")
        _require_at_least(self, 0, "eval_windows", "eval_batch_size", "checkpoint_minutes", "keep_checkpoints")
        _require_at_least(self, 0, "sample_tokens")
        _require_at_least(self, 0, "muon_learning_rate")
        _require_positive(self, "galore_rank", "galore_update_gap", "galore_scale")
        _require(self.keep_checkpoints <= 10_000, "keep_checkpoints", self.keep_checkpoints, "at most 10,000")
        sequences = self.batch_size * self.grad_accum_steps
        _require(sequences <= 2**24, "batch_size * grad_accum_steps", sequences, f"at most {2**24:,} sequences a step")
        _require_fraction(self, "beta1", "beta2", "warmup_ratio", "decay_ratio", "muon_momentum")
        _require(0.0 <= self.min_lr_ratio <= 1.0, "min_lr_ratio", self.min_lr_ratio, "from 0 to 1")
        _require(self.initial_lr <= self.learning_rate, "initial_lr", self.initial_lr, "at most learning_rate")
        if self.max_iters == 0:
            _require(self.max_epochs > 0, "max_epochs", self.max_epochs, "above 0 where max_iters is 0")
        elif self.warmup_ratio == 0:
            bound = f"below max_iters ({self.max_iters}); lower --warmup-iters or raise --max-iters"
            _require(self.warmup_iters < self.max_iters, "warmup_iters", self.warmup_iters, bound)


@dataclass(frozen=True)
class ComputeConfig(_Section):
    """What to compute on and how: nothing here changes the mathematics, only its speed and rounding."""

    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = setting(
        "auto", "precision: auto takes what the device does fast", choices=("auto", "bfloat16", "float16", "float32")
    )
    threads: int = setting(0, "CPU threads (0: all that this process may use)")
    compile: str = setting("auto", "torch.compile: auto falls back to eager, on insists", choices=("auto", "on", "off"))
    compile_mode: str = setting(
        "default",
        "mode of torch.compile",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    attention: str = setting("fused", "fused kernel, or softmax(q k^T / sqrt(d)) v written out", choices=("fused", "reference"))
    deterministic: bool = setting(False, "insist on repeatable kernels on CUDA too (on the CPU they always are)")
    shard_optimizer: bool = setting(False, "with several processes: deal the optimizer state out instead of keeping copies")

    def check(self) -> None:
        ok = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) is not None
        _require(ok, "device", self.device, "auto, cpu, cuda, cuda:N or mps")
        _require(0 <= self.threads <= 4_096, "threads", self.threads, "from 0 to 4,096")


@dataclass(frozen=True)
class SampleConfig(_Section):
    """How text is drawn from the model."""

    max_new_tokens: int = setting(200, "tokens to generate at most")
    temperature: float = setting(0.8, "sharpens (below 1) or flattens (above 1) the distribution; 0 is greedy")
    top_k: int = setting(50, "draw from the k most likely tokens (0: off)")
    top_p: float = setting(1.0, "draw from the smallest set of tokens with this much probability (1: off)")
    min_p: float = setting(0.0, "draw from the tokens with at least this share of the likeliest one's probability (0: off)")
    repetition_penalty: float = setting(1.0, "above 1 makes tokens that were there already less likely (1: off)")

    def check(self) -> None:
        _require_at_least(self, 0, "temperature", "top_k")
        _require_positive(self, "max_new_tokens", "repetition_penalty")
        _require_fraction(self, "min_p")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")


@dataclass(frozen=True)
class Config:
    """All settings of one command. Sections are frozen; derived paths and counts are properties."""

    preset: str = "wikitext103"
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    @property
    def corpus_dir(self) -> Path:
        return Path(self.run.data_dir) / self.run.corpus

    @property
    def raw_dir(self) -> Path:
        return self.corpus_dir / "raw"

    @property
    def tokenizer_path(self) -> Path:
        return self.corpus_dir / self.run.variant / "tokenizer.json"

    @property
    def tokenizer_meta_path(self) -> Path:
        return self.corpus_dir / self.run.variant / "tokenizer_meta.json"

    @property
    def tokens_dir(self) -> Path:
        return self.corpus_dir / self.run.variant / "tokens"

    @property
    def run_name(self) -> str:
        """The run's folder: --run, else the preset's name, with corpus and variant where they are not the preset's own."""
        if self.run.run:
            return self.run.run
        own_corpus = PRESETS.get(self.preset, {}).get("corpus", RunConfig.corpus)
        parts = [self.preset, "" if self.run.corpus == own_corpus else self.run.corpus, self.run.variant]
        return "-".join(part for part in parts if part)

    @property
    def run_dir(self) -> Path:
        return Path(self.run.checkpoint_dir) / self.run_name

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.grad_accum_steps * self.model.block_size

    def with_settings(self, settings: dict[str, Any]) -> "Config":
        """A copy with the given fields (flat names, as in flags) replaced; every check runs again. Raises ValueError."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            changes.setdefault(section_of(name), {})[name] = value
        sections = {name: dataclasses.replace(getattr(self, name), **values) for name, values in changes.items()}
        return dataclasses.replace(self, **sections)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, as stored in checkpoints and config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """The inverse of to_dict. Raises ValueError on unknown names or values of a wrong type."""
        if not isinstance(values, dict) or not isinstance(values.get("preset"), str):
            raise ValueError("stored settings have no preset")
        if values["preset"] not in PRESETS:
            raise ValueError(f"stored preset {values['preset'][:40]!r} is unknown to this version")
        sections = {}
        for name, section in SECTIONS.items():
            stored = values.get(name, {})
            known = {f.name: f.type for f in dataclasses.fields(section)}
            if not isinstance(stored, dict):
                raise ValueError(f"stored section {name} is not a table")
            for key, value in stored.items():
                if key not in known:
                    raise ValueError(f"stored setting {name}.{key} is unknown to this version")
                number_for_float = known[key] is float and type(value) is int
                if not (type(value) is known[key] or number_for_float):
                    raise ValueError(f"stored setting {name}.{key} is {value!r}, expected {known[key].__name__}")
            sections[name] = section(**stored)
        return cls(preset=values["preset"], **sections)

    def command(self, script: str, *arguments: str, launcher: str = "python") -> str:
        """The shell command that runs `script` on this corpus and run, with every flag that is needed to select them."""
        default_preset = "quick" if script == "pipeline.py" else DEFAULT_PRESET
        parts = ["uv run", launcher, script]
        if self.preset != default_preset:
            parts += ["--preset", self.preset]
        base = make_config(self.preset).run
        selecting = ["corpus", "variant", "data_dir"]
        if script in ("pipeline.py", "train.py", "generate.py", "evaluate.py", "export.py"):
            selecting += ["run", "checkpoint_dir"]
        elif script == "report.py":  # names its runs as arguments
            selecting = ["checkpoint_dir"]
        for name in selecting:
            if getattr(self.run, name) != getattr(base, name):
                parts += [flag_of(name), shell_quote(str(getattr(self.run, name)))]
        return " ".join([*parts, *arguments])

    def command_again(self, script: str, given: Mapping[str, Any]) -> str:
        """`command` with the settings `given` on a command line besides."""
        selecting = [f.name for f in dataclasses.fields(RunConfig) if f.name != "seed"]
        others = {name: value for name, value in given.items() if name not in selecting}
        return self.command(script, *map(shell_quote, arguments_for(others)))


SECTIONS: dict[str, type] = {
    f.name: f.default_factory for f in dataclasses.fields(Config) if f.default_factory is not dataclasses.MISSING
}

DEFAULT_PRESET = "wikitext103"

# What learns most from few tokens, measured by bench/bench_recipes.py; the architecture is NanoChat's, exactly.
FAST_RECIPE: dict[str, Any] = {
    "position": "rotary",
    "norm": "rmsnorm_plain",
    "embedding_norm": True,
    "qk_norm": True,
    "activation": "relu2",
    "zero_init": True,
    "sampling": "epoch",
    "optimizer": "muon",
    "lr_schedule": "wsd",
    "decay_ratio": 0.4,
    "min_lr_ratio": 0.05,
}

PRESETS: dict[str, dict[str, Any]] = {
    # The whole pipeline in minutes on two CPU cores, on the documentation already on the machine. With so few tokens the
    # recipe decides.
    "quick": {
        **FAST_RECIPE,
        "corpus": "local",
        "tokenizer_kind": "byte",
        "vocab_size": 4_096,
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 256,
        "block_size": 256,
        "batch_size": 16,
        "grad_accum_steps": 1,
        "max_iters": 420,
        "learning_rate": 6e-3,
        "warmup_iters": 10,
        "eval_interval": 105,
        "eval_windows": 120,
        "checkpoint_interval": 105,
    },
    # A smoke run of the WikiText recipe: the same stages on the 11 MB corpus, a small model.
    "wikitext2": {
        "corpus": "wikitext2",
        "vocab_size": 8_192,
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "block_size": 256,
        "batch_size": 16,
        "grad_accum_steps": 2,
        "max_iters": 1_000,
        "warmup_iters": 100,
        "learning_rate": 1e-3,
    },
    # The published 126,273,024-parameter run: 8 * 8 * 512 = 32,768 tokens a step, 4,000 steps. The defaults are this recipe.
    "wikitext103": {},
    # The same data, tokens a step, steps and (without learned positions and norms a little less) parameters, our recipe.
    # The learning rate is `quick`'s 6e-3 at 256 wide times sqrt(256 / 768): Muon's update of a matrix has the spectral norm
    # 0.2 * sqrt(width) * learning rate, and what carries over between widths is a constant one (Yang, Simon & Bernstein 2023,
    # arXiv 2310.17813, condition 1). Not tuned at this size, nor for this many steps.
    "wikitext103-fast": {
        **FAST_RECIPE,
        "learning_rate": 3.5e-3,
        "warmup_iters": 100,
    },
    # The published 163,823,616-parameter run: 2 * 64 * 2,048 = 262,144 tokens a step, one pass.
    "sydsgpt": {
        "corpus": "sydsgpt",
        "shuffle_seed": 42,
        "keep_fraction": 0.5,
        "tokenizer_kind": "gpt2",
        "vocab_size": GPT2_VOCAB_SIZE,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "block_size": 2_048,
        "dropout": 0.1,
        "bias": True,
        "tied_head": False,
        "activation": "gelu_tanh",
        "batch_size": 2,
        "grad_accum_steps": 64,
        "max_iters": 0,
        "max_epochs": 1.0,
        "sampling": "epoch",
        "optimizer": "galore",
        "learning_rate": 1e-4,
        "initial_lr": 1e-6,
        "warmup_ratio": 0.02,
        "beta2": 0.999,
        "eps": 1e-6,
        "weight_decay": 0.05,
        "decay_all": True,
        "eval_interval": 156,
        "checkpoint_interval": 156,
        "sample_tokens": 200,
        "sample_prompt": "Once upon a time",
        "max_new_tokens": 1_000,
        "temperature": 1.5,
        "top_k": 40,
    },
}


def section_of(name: str) -> str:
    for section_name, section in SECTIONS.items():
        if any(f.name == name and f.metadata["flag"] for f in dataclasses.fields(section)):
            return section_name
    raise ValueError(f"there is no setting named {name!r}")


def arguments_for(settings: Mapping[str, Any]) -> list[str]:
    """The command-line arguments that give these settings."""
    arguments = []
    for name, value in settings.items():
        if isinstance(value, bool):
            arguments.append(flag_of(name) if value else "--no-" + flag_of(name)[2:])
        else:
            arguments.append(f"{flag_of(name)}={value}")
    return arguments


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def shell_quote(text: str) -> str:
    """Quotes an argument for display, readable by POSIX shells and by cmd.exe."""
    return text if re.fullmatch(r"[\w./:=@%+,-]+", text) else '"' + text.replace('"', '\\"') + '"'


def make_config(preset: str, settings: dict[str, Any] | None = None) -> Config:
    """The resolved settings of a preset with the given fields on top. Raises ValueError naming the field and the bound.

    Until token files exist, the model's vocabulary is the one asked of the tokenizer.
    """
    config = Config(preset=preset).with_settings({**PRESETS[preset], **(settings or {})})
    if config.tokenizer.tokenizer_kind == "gpt2" and config.tokenizer.vocab_size != GPT2_VOCAB_SIZE:
        tokenizer = dataclasses.replace(config.tokenizer, vocab_size=GPT2_VOCAB_SIZE)
        config = dataclasses.replace(config, tokenizer=tokenizer)
    model = dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size)
    return dataclasses.replace(config, model=model)


class _Parser(argparse.ArgumentParser):
    """Ends every mistake with one line and exit code 2, and names the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"error: {line} (see --help)\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        argv = [_dashed(a) for a in argv]
        if any("\0" in a for a in argv):
            self.error("an argument holds a NUL character")
        # Before argparse complains about arguments that are missing: a typo is the likelier cause.
        flags = argv[: argv.index("--")] if "--" in argv else argv
        for name, _, value in (a.partition("=") for a in flags if a.startswith("--")):
            if value == "--":  # argparse would make it an empty list
                self.error(f"argument {name}: its value cannot be --")
            if name not in self._option_string_actions:
                near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.5)
                self.error(f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else ""))
        args, unknown = self.parse_known_args(argv)
        if unknown:
            hint = f"; did you mean --input {unknown[0]}?" if "--input" in self._option_string_actions else ""
            self.error(f"unexpected argument {unknown[0]}{hint}")
        return args


def _dashed(argument: str) -> str:
    """`--batch_size=8` as `--batch-size=8`; values are left alone."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _add_field(group: Any, f: dataclasses.Field, value: Any) -> None:
    text = f.metadata["help"].replace("%", "%%")
    shown = "none" if value == "" else f"{value:g}" if isinstance(value, float) else str(value)
    if f.type is bool:
        group.add_argument(
            flag_of(f.name),
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=f"{text} [{'on' if value else 'off'}]",
        )
        return
    choices = f.metadata["choices"] or None
    metavar = "|".join(choices) if choices else {int: "N", float: "X", str: "TEXT"}[f.type]
    group.add_argument(
        flag_of(f.name),
        type=f.type,
        choices=choices,
        metavar=metavar,
        default=argparse.SUPPRESS,
        help=f"{text} [{shown}]",
    )


def _selected_fields(uses: Sequence[str]) -> dict[str, list[dataclasses.Field]]:
    """`uses` names whole sections ("train") or single fields ("run.corpus")."""
    selected: dict[str, list[dataclasses.Field]] = {}
    for use in uses:
        section, _, name = use.partition(".")
        fields = [f for f in dataclasses.fields(SECTIONS[section]) if f.metadata["flag"]]
        selected.setdefault(section, []).extend(f for f in fields if name in ("", f.name))
    return selected


def parse_config(
    argv: Sequence[str] | None,
    *,
    doc: str,
    uses: Sequence[str],
    default_preset: str = DEFAULT_PRESET,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[Config, argparse.Namespace]:
    """Parses a stage's command line.

    `doc` is the stage's docstring (its first line heads --help). `uses` names the sections or "section.field"s it shows.
    `add_arguments` adds what is no setting (--resume, --prompt). Returns the resolved Config and a namespace with those
    arguments and `given`: the settings named on the command line, by field name. Ends the process with code 2 and one
    line on a mistake.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    preset = _peek_preset(argv, default_preset)
    presets = "presets: " + ", ".join(PRESETS)
    parser = _Parser(
        prog=Path(sys.argv[0]).name,
        usage="%(prog)s [--preset NAME] [FLAGS]",
        description=doc.strip(),
        epilog=f"Values in [brackets] are those of preset {preset}. {presets}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset", choices=list(PRESETS), default=default_preset, metavar="NAME", help=f"{presets} [{default_preset}]"
    )
    if add_arguments:
        add_arguments(parser)
    shown = make_config(preset if preset in PRESETS else default_preset)
    selected = _selected_fields(uses)
    for section, fields in selected.items():
        group = parser.add_argument_group(f"{section} settings")
        for f in fields:
            _add_field(group, f, getattr(getattr(shown, section), f.name))
    args = parser.parse(argv)
    names = [f.name for fields in selected.values() for f in fields]
    args.given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if args.given.get("max_epochs") and "max_iters" not in args.given:
        args.given["max_iters"] = 0  # else the preset's number of steps would make --max-epochs a flag without effect
    now = args.given
    if getattr(args, "resume", False):
        # The rest goes on top of the checkpoint's settings, and is checked with them; now only its place is needed.
        now = {name: value for name, value in now.items() if section_of(name) == "run"}
    try:
        return make_config(args.preset, now), args
    except ValueError as error:
        parser.error(str(error))


def _peek_preset(argv: Sequence[str], default: str) -> str:
    """The preset named in argv, needed before the parser is built so that --help shows its values."""
    for i, argument in enumerate(argv):
        if argument == "--preset" and i + 1 < len(argv):
            return argv[i + 1]
        if argument.startswith("--preset="):
            return argument.partition("=")[2]
    return default


def describe(config: Config) -> str:
    """The resolved settings, one section a line group, with what follows from them."""
    lines = [f"preset {config.preset}, run {config.run_name}"]
    for name in SECTIONS:
        section = getattr(config, name)
        values = ", ".join(f"{f.name}={getattr(section, f.name)!r}" for f in dataclasses.fields(section))
        lines.append(f"{name}: {values}")
    model, train = config.model, config.train
    lines.append(f"parameters: {model.num_params:,} (vocabulary {model.vocab_size:,}, padded to {model.padded_vocab_size:,})")
    product = f"{train.batch_size} x {train.grad_accum_steps} x {model.block_size}"
    lines.append(f"tokens per step: {product} = {config.tokens_per_step:,}")
    if train.max_iters:
        lines.append(f"total tokens: {train.max_iters:,} steps x {config.tokens_per_step:,} = {total_tokens(config):,}")
    else:
        lines.append(f"total tokens: {train.max_epochs:g} passes over the training tokens")
    return "\n".join(lines)


def total_tokens(config: Config) -> int:
    return config.train.max_iters * config.tokens_per_step


def main(argv: Sequence[str] | None = None) -> int:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--show", metavar="CHECKPOINT", help="print the settings and progress stored in this file")

    config, args = parse_config(argv, doc=__doc__, uses=list(SECTIONS), add_arguments=add_arguments)
    if args.show is None:
        print(describe(config))
        return 0
    from checkpoint import load_checkpoint, stored_config  # torch loads only when a checkpoint is asked for

    checkpoint = load_checkpoint(Path(args.show))
    print(describe(stored_config(Path(args.show), checkpoint)))
    print("progress: " + json.dumps(checkpoint["config"]["progress"]))
    return 0


if __name__ == "__main__":
    from support.common import run_main

    run_main(main)
