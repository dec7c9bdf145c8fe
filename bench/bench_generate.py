"""Decoding speed beside Hugging Face transformers: one sequence, greedy, the 126-million-parameter shape with random weights.

    uv run python bench/bench_generate.py [--tokens 256] [--rounds 3] [--threads N]

One run measures all, round by round, so that a machine's moods meet each of them; the best round counts. Ours is the path
that generate.py takes (static cache, greedy, window of 512), as it is and with `--compile on`, whose compilation is timed
apart. The peer is the same weights as a GPT2LMHeadModel in fp32 and in bf16 with its default cache, under inference_mode.
Printed with each: tokens/s, the bytes of weights read a token, and the share of the limit that reading them once a token at
this machine's measured bandwidth sets.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ComputeConfig, ModelConfig, SampleConfig
from model import GPT
from support.compiled import CompiledDecoder, RowLinear
from support.device import resolve_device
from support.hf_gpt2 import to_hf_config, to_hf_state
from support.inference import Float16Linear, Int8Linear, LeanDecoder, has_fbgemm, replace_linears
from support.sampling import Decoder, generate_batch

PROMPT_TOKENS = 16


def read_bandwidth() -> float:
    """Bytes/s at which all threads together read a 512 MB array; the best of several passes."""
    data = torch.ones(128 * 1024 * 1024)
    seconds = []
    for _ in range(8):
        t0 = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - t0)
    return data.numel() * 4 / min(seconds)


def weights_per_token(config: ModelConfig) -> int:
    """Numbers in the matrices that every token multiplies with: the blocks' and the head's."""
    return 12 * config.n_layer * config.n_embd**2 + config.vocab_size * config.n_embd


def our_writer(decoder: Decoder) -> Callable[[torch.Tensor, int], list[int]]:
    def write(prompt: torch.Tensor, count: int) -> list[int]:
        return [ids.item() for ids in generate_batch(decoder, prompt, count, SampleConfig(temperature=0.0))]

    return write


def peer_writer(model: GPT, dtype: torch.dtype) -> Callable[[torch.Tensor, int], list[int]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {k: v for k, v in to_hf_config(model.config, 2, 3).items() if k not in ("model_type", "torch_dtype")}
    peer = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    peer.load_state_dict(to_hf_state(model.state_dict(), model.config), strict=False)
    peer.tie_weights()
    peer = peer.to(dtype)

    @torch.inference_mode()
    def write(prompt: torch.Tensor, count: int) -> list[int]:
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return peer.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, prompt.shape[1] :].tolist()

    return write


def writers(model: GPT) -> dict[str, tuple[Callable[[torch.Tensor, int], list[int]], int]]:
    """Each way to write, with its bytes per weight; the compiled ones in the end, whose compilation is timed apart."""

    def small(kind: Callable[[torch.nn.Linear], torch.nn.Module]) -> GPT:
        return replace_linears(copy.deepcopy(model), kind)

    compiled = ("float16", torch.float16, Float16Linear if has_fbgemm() else None), ("int8", torch.int8, Int8Linear)
    found = {
        "transformers, float32": (peer_writer(model, torch.float32), 4),
        "transformers, bfloat16": (peer_writer(model, torch.bfloat16), 2),
        "ours, float32": (our_writer(LeanDecoder(copy.deepcopy(model))), 4),
        "ours, bfloat16": (our_writer(LeanDecoder(copy.deepcopy(model).bfloat16())), 2),
    }
    if has_fbgemm():
        found["ours, float16 weights (default)"] = (our_writer(LeanDecoder(small(Float16Linear))), 2)
    found["ours, int8 weights"] = (our_writer(LeanDecoder(small(Int8Linear))), 1)
    for name, dtype, several in compiled:
        decoder = CompiledDecoder(small(partial(RowLinear, dtype=dtype, several=several)))
        print(f"compiled for {name} weights in {decoder.compile_seconds:.1f} s")
        found[f"ours, {name} weights, compiled"] = (our_writer(decoder), dtype.itemsize)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens a text")
    parser.add_argument("--rounds", type=int, default=3, help="texts each way writes; the fastest counts")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: all)")
    args = parser.parse_args()
    device = resolve_device(ComputeConfig(device="cpu", threads=args.threads))
    torch.manual_seed(1)
    model = GPT(ModelConfig()).eval()
    prompt = torch.randint(4, model.config.vocab_size, (1, PROMPT_TOKENS))
    ways, best = writers(model), {}
    for round_number in range(args.rounds):
        for name, (write, _) in ways.items():
            write(prompt, 8)
            t0 = time.perf_counter()
            assert len(write(prompt, args.tokens)) == args.tokens
            rate = args.tokens / (time.perf_counter() - t0)
            best[name] = max(best.get(name, 0.0), rate)
            print(f"round {round_number + 1}: {name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
    report(device.line, best, {name: size for name, (_, size) in ways.items()}, weights_per_token(model.config))


def report(machine: str, best: dict[str, float], sizes: dict[str, int], weights: int) -> None:
    bandwidth = read_bandwidth()
    peer = max(rate for name, rate in best.items() if name.startswith("transformers"))
    print(f"{machine}; torch {torch.__version__}; reads {bandwidth / 1e9:.1f} GB/s")
    print(f"{'':34}{'tokens/s':>9}{'x best peer':>13}{'MB/token':>10}{'limit':>8}{'share':>8}")
    for name, rate in best.items():
        limit = bandwidth / (weights * sizes[name])
        megabytes = weights * sizes[name] / 1e6
        print(f"{name:34}{rate:9.1f}{rate / peer:13.2f}{megabytes:10.0f}{limit:8.1f}{rate / limit:8.0%}")


if __name__ == "__main__":
    main()
