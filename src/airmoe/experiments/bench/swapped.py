"""What a swapped router costs on a CPU beside the stock one.

The router alone, without gradients, one thread. Times are those of the processor, the shortest of
many, stock and swapped in turns, so that whatever else the machine does counts as little as
possible.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor, nn

from airmoe.adapt import calibrate, swap_routers

ROUTER = "model.layers.0.mlp.gate"


@dataclass(frozen=True)
class SwapCase:
    dim: int
    num_experts: int
    top_k: int
    num_codewords: int
    shortlist_size: int
    batches: tuple[int, ...] = (4096, 64, 1)  # tokens


CASES = (
    SwapCase(2048, 128, 8, 16, 32),
    SwapCase(2048, 512, 8, 16, 64),
    SwapCase(1024, 8, 2, 4, 4),
)
TOY = (SwapCase(32, 16, 4, 4, 8, (8,)),)


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
    for case in TOY if quick else CASES:
        contenders = routers(case)
        for num_tokens in case.batches:
            stock, swapped = milliseconds(contenders, torch.randn(num_tokens, case.dim))
            shape = (case.num_experts, case.dim, case.num_codewords, case.shortlist_size)
            cells = [*(f"{number:,}" for number in (*shape, num_tokens)), f"{stock:.3g}"]
            row = " | ".join([*cells, f"{swapped:.3g}", f"{swapped / stock:.2g}"])
            console.print(f"| {row} |", highlight=False)
    torch.set_num_threads(threads)
