"""Loss and routing health over whole splits, exact to the token; the test split at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from airmoe.config import check_count
from airmoe.data import Prepared
from airmoe.distributed import all_reduce_sum, on_first_rank, rank, world_size
from airmoe.files import write_json
from airmoe.model import AirMoeForCausalLM
from airmoe.training.checkpoints import best_checkpoint, check_checkpoint, step_of
from airmoe.training.devices import autocast_of
from airmoe.training.run_folder import RunFolder
from airmoe.training.state import load_model
from airmoe.training.watch import RoutingWatch, uncompiled


@dataclass(frozen=True)
class Evaluation:
    """The result of one pass over held-out blocks."""

    loss: float  # nats per token
    tokens: int  # predicted ones: a block's first token has no prediction
    routing: dict[str, float]
    usage: dict[str, Tensor] = field(default_factory=dict)  # see RoutingWatch.usage

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # beyond that a float overflows

    def numbers(self) -> dict[str, float]:
        return {"loss": self.loss, "perplexity": self.perplexity, **self.routing}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    blocks: Any,
    *,
    batch_size: int,
    quality_tokens: int,
    autocast: AbstractContextManager[Any] | None = None,
    on_batch: Any | None = None,
) -> Evaluation:
    """Every block once, split over the ranks; usage over all tokens, quality on a sample."""
    check_count("evaluate.quality_tokens", quality_tokens)
    device = next(model.parameters()).device
    watch = RoutingWatch(model, quality_tokens)
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, predicted tokens
    try:
        with watch.on(), uncompiled(), autocast or nullcontext():
            for batch, counts in _batches(blocks, batch_size):
                if not counts:
                    watch.stop()  # for good: such batches come last
                loss, tokens = _summed_loss(model, batch.to(device))
                if counts:
                    total += torch.stack([loss.double(), tokens.double()])
                if on_batch is not None:
                    on_batch()
            routing = watch.numbers()
    finally:
        model.train(training)
    loss_sum, tokens_everywhere = all_reduce_sum(total).tolist()
    return Evaluation(loss_sum / tokens_everywhere, int(tokens_everywhere), routing, watch.usage())


def num_batches(blocks: Any, batch_size: int) -> int:
    """Forwards per rank: all ranks run equally many, because sharded parameters are gathered."""
    return math.ceil(math.ceil(len(blocks) / batch_size) / world_size())


def _batches(blocks: Any, batch_size: int) -> Iterator[tuple[Tensor, bool]]:
    """This rank's batches, and whether each counts or only keeps step with the other ranks."""
    starts = [*range(rank() * batch_size, len(blocks), world_size() * batch_size)]
    missing = num_batches(blocks, batch_size) - len(starts)
    for place, start in enumerate(starts + missing * [0]):
        chosen = range(start, min(start + batch_size, len(blocks)))
        batch = torch.stack([blocks[index]["input_ids"] for index in chosen])  # [batch, block]
        yield batch, place < len(starts)


def _summed_loss(model: nn.Module, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the token losses of a batch, and how many there are."""
    predicted = input_ids.shape[0] * (input_ids.shape[1] - 1)
    output = model(input_ids=input_ids, labels=input_ids, use_cache=False)
    return output.loss.float() * predicted, torch.tensor(predicted, device=input_ids.device)


def is_untested(run: RunFolder, prepared: Prepared) -> bool:
    """Whether its text has a test split, of a block at least, that was not measured yet."""
    split = prepared.manifest.splits.get("test")
    long_enough = split is not None and split.tokens >= run.config.data.block_size
    return long_enough and not run.test.exists()


def measure_test(
    run: RunFolder, prepared: Prepared, model: AirMoeForCausalLM, console: Console
) -> None:
    """Load the best weights into `model`, write their test.json; every process must call it."""
    options = run.config.training
    blocks = prepared.blocks("test", run.config.data.block_size)
    if rank() == 0:
        console.print(f"Measuring the test split, {len(blocks):,} blocks", highlight=False)
    best = best_checkpoint(run.path)
    on_first_rank(lambda: check_checkpoint(best, run.sha256(), to_resume=False))
    load_model(best, model)
    device = next(model.parameters()).device
    result = evaluate(
        model,
        blocks,
        batch_size=options.sequences,
        quality_tokens=options.quality_tokens,
        autocast=autocast_of(options.precision, device),
    )
    if rank() == 0:
        write_json(run.test, {"step": step_of(best), "tokens": result.tokens, **result.numbers()})
        console.print(f"test  loss {result.loss:.3f}  ppl {result.perplexity:.2f}", highlight=False)
