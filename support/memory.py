"""Running out of memory, said in one line with a way out."""

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from config import Config
from support.common import UserError


@contextlib.contextmanager
def explained_out_of_memory(config: Config) -> Iterator[None]:
    """Turns a failed allocation inside into a UserError that says what was asked, what is free, and which flags need less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        what = f"out of memory: asked for {asked[1] if asked else 'more'}, free are {free_memory() / 1e6:,.0f} MB"
        raise UserError(f"{what}; {need_less(config)}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises a type of its own on GPUs only."""
    known = ("not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in known)


def need_less(config: Config) -> str:
    if config.train.batch_size > 1:
        return f"smaller micro-batches need less: {same_tokens(config, 2)}"
    return "a smaller model (--n-layer, --n-embd), a smaller --block-size or --dtype bfloat16 needs less"


def same_tokens(config: Config, factor: int) -> str:
    """Flags that cut micro-batches into `factor` parts or more and keep the tokens of a step."""
    batch, accum = config.train.batch_size, config.train.grad_accum_steps
    parts = next((n for n in range(factor, batch + 1) if batch % n == 0), batch)
    return f"--batch-size {batch // parts} --grad-accum-steps {accum * parts} keeps {config.tokens_per_step:,} tokens a step"


def free_memory() -> int:
    """Bytes that an allocation on the device in use could still take; 0 where the system does not tell."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0
