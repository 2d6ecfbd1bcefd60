"""Looks inside a trained AIR model: which tokens share a codeword, and how one token is routed.

Trains nothing. By default it opens the model that `make demo` leaves and reads text from the
documentation inside this Python.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from airmoe import AirRouter, CellRouting, ConfigError, MoELayer
from airmoe.metrics import dead_experts, routing_quality
from airmoe.model.modeling import AirMoeDecoderLayer
from airmoe.training.trained import load_trained

NUM_TOKENS, SHOWN_CELLS = 4096, 8


@dataclass(frozen=True)
class Routed:
    """Some text, as it arrives at the model's mixture of experts."""

    tokens: list[str]
    hidden: Tensor  # [T, D]
    router: AirRouter
    routing: CellRouting

    def cell(self, codeword: int) -> Tensor:
        """The tokens of a cell. -> [n]"""
        start, stop = self.routing.offsets[codeword : codeword + 2].tolist()
        return self.routing.token_ids[start:stop]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo/air"))
    parser.add_argument("--text", type=Path, help="a text file to route")
    arguments = parser.parse_args()
    topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    text = arguments.text.read_text(encoding="utf-8") if arguments.text else topics
    console = Console(highlight=False)
    with torch.no_grad():
        routed = route(arguments.run, text)
        cell = show_cells(routed, console)
        show_token(routed, cell, console)
        show_quality(routed, console)


def route(run: Path, text: str) -> Routed:
    """Run the model on the text and keep what its first mixture of experts receives."""
    trained = load_trained(run)
    blocks = [block for block in trained.model.modules() if isinstance(block, AirMoeDecoderLayer)]
    block = next((block for block in blocks if isinstance(block.mlp, MoELayer)), None)
    router = getattr(block and block.mlp, "router", None)
    if block is None or not isinstance(router, AirRouter):
        raise ConfigError("run", str(run), "must be a run with AIR", "Train it with --method air.")
    ids = trained.tokenizer.encode(text)[:NUM_TOKENS]
    length = min(len(ids), trained.run.config.data.block_size)
    ids = ids[: len(ids) // length * length]
    received: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        received.append(output)

    hook = block.post_attention_layernorm.register_forward_hook(keep)
    trained.model(torch.tensor(ids, device=trained.model.device).view(-1, length))
    hook.remove()
    hidden = received[0].flatten(0, 1)  # [T, D]
    routing = router(hidden)
    assert isinstance(routing, CellRouting)
    return Routed([trained.tokenizer.decode([i]) for i in ids], hidden, router, routing)


def show_cells(routed: Routed, console: Console) -> int:
    """Which tokens share a codeword; -> a cell of average size."""
    sizes = routed.routing.cell_counts  # [G]
    by_size = sizes.argsort(descending=True)
    used = int((sizes > 0).sum())
    console.print(
        f"[bold]Coarse.[/bold] {len(routed.tokens):,} tokens fall into {used} of {len(sizes)} "
        "cells, one per codeword. All tokens of a cell share a shortlist of "
        f"{routed.router.config.shortlist_size} experts."
    )
    table = Table("cell", "tokens", "most frequent")
    for cell in by_size[: used : max(1, used // SHOWN_CELLS)].tolist():
        found = Counter(routed.tokens[i] for i in routed.cell(cell).tolist())
        words = "  ".join(repr(word)[1:-1] for word, _ in found.most_common(8))
        table.add_row(str(cell), str(int(sizes[cell])), escape(words))
    console.print(table)
    return int(by_size[used // 2])


def show_token(routed: Routed, cell: int, console: Console) -> None:
    """The fine stage, for one token of a cell."""
    config, token = routed.router.config, int(routed.cell(cell)[0])
    listed = routed.routing.to_token_routing()
    logits = routed.router.full_logits(routed.hidden[token].unsqueeze(0)).squeeze(0)  # [E]
    chosen, weights = listed.expert_ids[token], listed.weights[token]
    best = logits.topk(config.top_k).indices
    kept = int(torch.isin(best, chosen).sum())
    before = "".join(routed.tokens[max(0, token - 8) : token])
    console.print(
        f"\n[bold]Fine.[/bold] One token of cell {cell}: {escape(repr(routed.tokens[token]))}, "
        f"after {escape(repr(before))}. Of its {config.shortlist_size} candidates "
        f"it keeps {config.top_k}; {kept} of them are among the {config.top_k} best "
        f"of all {config.num_experts:,}."
    )
    table = Table("expert", "logit", "rank among all", "weight")
    order = weights.argsort(descending=True)
    for place in order[:: max(1, config.top_k // 4)].tolist():
        expert = int(chosen[place])
        rank = int((logits > logits[expert]).sum()) + 1
        table.add_row(
            str(expert), f"{logits[expert]:.2f}", str(rank), f"{float(weights[place]):.4f}"
        )
    console.print(table)


def show_quality(routed: Routed, console: Console) -> None:
    """The whole text, beside exact routing."""
    config, quality = routed.router.config, routing_quality(routed.router, routed.hidden)
    candidates = config.shortlist_size / config.num_experts
    scores = config.num_codewords + config.shortlist_size
    table = Table("all tokens", "AIR", "exact", "random candidates")
    found, mass = quality.overlap.nanmean(), quality.mass_recall.nanmean()
    table.add_row(
        f"share of the exact top {config.top_k}", f"{found:.3f}", "1", f"{candidates:.3f}"
    )
    table.add_row("routing probability on the candidates", f"{mass:.3f}", "1", "")
    table.add_row("scores per token", f"{scores:,}", f"{config.num_experts:,}", "")
    unused = dead_experts(routed.routing.expert_counts)
    table.add_row("experts that no token chose", f"{unused:.1%}", "", "")
    console.print()
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"routing_tour: {error}") from None
