"""What a swapped router costs on a CPU beside the stock one.

The router alone, without gradients, one thread. Times are those of the processor, the shortest of
many, stock and swapped in turns, so that whatever else the machine does counts as little as
possible.
"""

from __future__ import annotations

import copy
import time
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from airmoe.adapt import calibrate, swap_routers

ROUTER = "model.layers.0.mlp.gate"
TOKENS = (4096, 64, 1)  # per batch


class SwapCase(NamedTuple):
    num_experts: int
    dim: int
    num_codewords: int
    shortlist_size: int
    top_k: int


CASES = (SwapCase(128, 2048, 16, 32, 8), SwapCase(512, 2048, 16, 64, 8), SwapCase(8, 1024, 4, 4, 2))
TOY = SwapCase(16, 32, 4, 8, 4)


def routers(case: SwapCase) -> tuple[nn.Module, nn.Module]:
    """A stock router of random weights, and a copy of it swapped and calibrated."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=500,
        hidden_size=case.dim,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        num_experts=case.num_experts,
        num_experts_per_tok=case.top_k,
    )
    stock = Qwen3MoeForCausalLM(config).eval()
    swapped = copy.deepcopy(stock)
    swap_routers(swapped, num_codewords=case.num_codewords, shortlist_size=case.shortlist_size)
    calibrate(swapped, [torch.randint(500, (8, 64))])
    return stock.get_submodule(ROUTER), swapped.get_submodule(ROUTER)


@torch.no_grad()
def milliseconds(contenders: tuple[nn.Module, ...], hidden: Tensor) -> list[float]:
    """The shortest time of each for hidden [T, D], after one round that does not count."""
    shortest = [float("inf")] * len(contenders)
    for turn in range(1 + max(20, 3000 // len(hidden))):
        for place, router in enumerate(contenders):
            start = time.process_time()
            router(hidden)
            if turn:
                shortest[place] = min(shortest[place], time.process_time() - start)
    return [1e3 * seconds for seconds in shortest]


def compare_swapped(console: Console, *, quick: bool = False) -> None:
    """Print a Markdown table, a row per case and batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    console.print("| experts | D | G | M | tokens | stock, ms | swapped, ms | times stock |")
    console.print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for case in (TOY,) if quick else CASES:
        contenders = routers(case)
        for num_tokens in (8,) if quick else TOKENS:
            stock, swapped = milliseconds(contenders, torch.randn(num_tokens, case.dim))
            sizes = " | ".join(f"{size:,}" for size in (*case[:4], num_tokens))
            times = f"{stock:.3g} | {swapped:.3g} | {swapped / stock:.2g}"
            console.print(f"| {sizes} | {times} |", highlight=False)
    torch.set_num_threads(threads)
