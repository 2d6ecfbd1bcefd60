"""A dense Llama made sparse: each neuron an expert, K of them per token, and what that costs.

Trains a small Llama of transformers on the documentation inside this Python (bytes, no download),
then swaps its feed-forward networks for mixtures of their own neurons with smaller and smaller K.
No weight is trained after the swap. Two minutes on a CPU; `--quick` shows that it runs.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import airmoe
from airmoe.data.python_docs import PythonDocs


@dataclass(frozen=True)
class Sizes:
    dim: int = 128
    neurons: int = 1024  # of each feed-forward network
    layers: int = 2
    length: int = 128  # bytes of a block
    batch: int = 16
    seconds: float = 40.0  # of training
    validation: int = 48  # blocks
    calibration: int = 48  # blocks
    rounds: int = 8  # of timing; the fastest counts


QUICK = Sizes(
    dim=32, neurons=128, layers=1, length=32, seconds=1.0, validation=32, calibration=64, rounds=1
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    sizes = QUICK if parser.parse_args().quick else Sizes()
    started = time.perf_counter()
    torch.manual_seed(0)
    console = Console(highlight=False)
    blocks = read_blocks(sizes)
    validation, training = blocks[: sizes.validation], blocks[sizes.validation :]
    model, steps = train(sizes, training)
    console.print(
        f"A Llama of {sizes.layers} layers with {sizes.neurons} neurons each, trained for "
        f"{steps} steps. Its neurons become experts; AIR picks K per token, which weigh 1."
    )
    models, rows = [model], [["dense", "100 %", "-", "-"]]
    for divisor in (1, 2, 4, 8, 16):
        top_k = sizes.neurons // divisor
        sparse, overlap = sparsified(model, top_k, training[: sizes.calibration], sizes)
        models.append(sparse)
        candidates = shortlist_size(top_k, sizes)
        rows.append([str(top_k), f"{100 / divisor:.4g} %", str(candidates), f"{overlap:.3f}"])
    table = Table("K", "share of neurons", "candidates", "overlap", "perplexity", "ms per token")
    for column in table.columns:
        column.justify = "right"
    seconds = fastest_forwards(models, validation[:, :-1], sizes.rounds)
    for row, one, second in zip(rows, models, seconds, strict=True):
        with torch.no_grad():
            perplexity = math.exp(float(loss_of(one, validation)))
        milliseconds = 1000 * second / validation[:, :-1].numel()
        table.add_row(*row, f"{perplexity:.2f}", f"{milliseconds:.4f}")
    console.print(table)
    console.print(
        "With all neurons the model is the dense one. Overlap: the share of the K neurons with the "
        f"largest gates that AIR finds. Done in {time.perf_counter() - started:.0f} s."
    )


def read_blocks(sizes: Sizes) -> Tensor:
    """[blocks, length + 1] bytes of text in a shuffled order."""
    text = b"\n\n".join(document.text.encode() for document in PythonDocs().documents())
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    width = sizes.length + 1
    blocks = tokens[: tokens.numel() // width * width].view(-1, width)
    return blocks[torch.randperm(blocks.shape[0])]


def train(sizes: Sizes, blocks: Tensor) -> tuple[Any, int]:
    """A dense model after some seconds of training, and its number of steps."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.dim,
        intermediate_size=sizes.neurons,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=sizes.length,
    )
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    started, step, done = time.perf_counter(), 0, 0.0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 30) * (1 - done)
        batch = blocks[torch.randint(blocks.shape[0], (sizes.batch,))]
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        done = (time.perf_counter() - started) / sizes.seconds
    return model.eval(), step


def loss_of(model: Any, blocks: Tensor) -> Tensor:
    logits = model(blocks[:, :-1], use_cache=False).logits  # [B, L, 256]
    return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())


def shortlist_size(top_k: int, sizes: Sizes) -> int:
    return min(sizes.neurons, 2 * top_k)


def sparsified(model: Any, top_k: int, blocks: Tensor, sizes: Sizes) -> tuple[Any, float]:
    """A copy with K neurons per token, calibrated on text; and the mean overlap of its layers."""
    sparse = copy.deepcopy(model)
    router = airmoe.AirRouter.Config(
        dim=sizes.dim,
        num_experts=sizes.neurons,
        top_k=top_k,
        num_codewords=sizes.neurons // 8,
        shortlist_size=shortlist_size(top_k, sizes),
        normalize_centroids=False,
        gate="binary",
    )
    airmoe.swap_ffn(sparse, layers=range(sizes.layers), router=router, from_dense=True)
    report = airmoe.calibrate(sparse, list(blocks[:, :-1].split(32)), max_tokens=4096)
    return sparse, sum(layer.overlap for layer in report.layers) / len(report.layers)


@torch.no_grad()
def fastest_forwards(models: list[Any], ids: Tensor, rounds: int) -> list[float]:
    """Seconds of each model for all ids; in turns, so that a busy machine hinders all alike."""
    fastest = [math.inf] * len(models)
    for _ in range(rounds):
        for number, model in enumerate(models):
            started = time.perf_counter()
            model(ids, use_cache=False)
            fastest[number] = min(fastest[number], time.perf_counter() - started)
    return fastest


if __name__ == "__main__":
    main()
