"""What training minimises: the language loss plus the routers' losses at their weights.

Losses add up over ranks and micro-batches. A training loop passes `num_items_in_batch`, the targets
of an accumulation window on all ranks, and multiplies each loss by the number of ranks, over which
gradients are averaged. The window's sum is then

- the mean of the language loss over the window's targets, plus
- the mean of each router loss over micro-batches, weighted by their targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

from airmoe.distributed import all_reduce_sum, world_size
from airmoe.kernels.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy, token_chunks
from airmoe.losses import load_balance_loss, router_z_loss, shortlist_balance_loss
from airmoe.model.blocks import is_one_product
from airmoe.model.configuration import AirMoeConfig
from airmoe.routers.base import Router, run_eagerly
from airmoe.routers.routing import Routing
from airmoe.routers.tracking import Tracking, track_optimizer

# Name in the model's output -> (loss of one routing, field of the config that weighs it).
ROUTER_LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "load_balance_loss": (load_balance_loss, "load_balance_weight"),
    "shortlist_balance_loss": (shortlist_balance_loss, "shortlist_balance_weight"),
    "router_z_loss": (router_z_loss, "router_z_weight"),
}


def weighted_losses(config: AirMoeConfig) -> dict[str, float]:
    """The router losses with a weight above 0, and their weights."""
    weights = {name: getattr(config, field) for name, (_, field) in ROUTER_LOSSES.items()}
    return {name: weight for name, weight in weights.items() if weight > 0}


def router_losses(config: AirMoeConfig, routing: Routing) -> Tensor | None:
    """Raw losses of one layer, in the order of `weighted_losses`: [n], None if n = 0."""
    losses = [ROUTER_LOSSES[name][0](routing) for name in weighted_losses(config)]
    return torch.stack(losses) if losses else None


def weighted_sum(config: AirMoeConfig, layer_losses: Tensor | None) -> Tensor | None:
    """The weighted sum of router losses [MoE layers, n] of one micro-batch, with gradient."""
    if layer_losses is None:
        return None
    losses = zip(weighted_losses(config).values(), layer_losses.sum(0).unbind(), strict=True)
    return torch.stack([weight * loss for weight, loss in losses]).sum()


@run_eagerly
def model_losses(
    config: AirMoeConfig,
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    layer_losses: Tensor | None,
    num_items_in_batch: Tensor | int | None,
) -> dict[str, Tensor]:
    """Losses by their name in the model's output; all but `loss` are detached.

    hidden [B, L, D], head from D to V, labels [B, L], layer_losses [MoE layers, n]. In `loss` the
    router losses are summed over layers, so that a layer's gradient does not depend on how many
    there are; by name, for logs, they are averaged.
    """
    # The token at position i predicts the one at i + 1; the last predicts nothing.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten().to(hidden.device)
    num_targets = (targets != IGNORE_INDEX).sum()
    window = num_targets if num_items_in_batch is None else num_items_in_batch
    window = window.clamp(min=1) if isinstance(window, Tensor) else max(window, 1)
    summed = _cross_entropy(hidden.flatten(0, 1), head, config.vocab_size, targets)
    loss = language = summed / window
    named: dict[str, Tensor] = {}
    if layer_losses is not None:
        share: Tensor | float = 1.0
        if num_items_in_batch is not None:
            # Targets of all ranks, because a router loss is already that of the global micro-batch.
            share = all_reduce_sum(num_targets).to(torch.float32) / (world_size() * window)
        for column, (name, weight) in enumerate(weighted_losses(config).items()):
            loss = loss + share * weight * layer_losses[:, column].sum()
            named[name] = layer_losses[:, column].detach().mean()
    # A copy: the Trainer scales `loss` in place.
    return {"loss": loss, "language_loss": language.detach().clone(), **named}


def _cross_entropy(hidden: Tensor, head: nn.Module, num_words: int, targets: Tensor) -> Tensor:
    """Summed over hidden [T, D] and targets [T], never with the logits of all tokens.

    A head that is more than one product (with an adapter, say) is called for a few tokens at a
    time, and again in backward.
    """
    if is_one_product(head, hidden):
        return linear_cross_entropy(hidden, cast(nn.Linear, head).weight, targets)

    def of(states: Tensor, labels: Tensor) -> Tensor:
        logits = head(states.masked_fill((labels == IGNORE_INDEX).unsqueeze(-1), 0))
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX, reduction="sum")

    summed = hidden.new_zeros((), dtype=torch.float32)
    for chunk in token_chunks(hidden, num_words):
        part: Any = checkpoint(of, hidden[chunk], targets[chunk], use_reentrant=False)
        summed = summed + part
    return summed


class TrackOptimizerCallback(TrainerCallback):
    """Tells the routers of each optimizer step: Trainer(..., callbacks=[TrackOptimizerCallback()]).

    The Trainer creates its optimizer when training begins, too late to call `track_optimizer`
    yourself. Tracking ends with the training. A model without our routers is left alone.
    """

    def __init__(self) -> None:
        self._tracking: Tracking | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        model = found["model"]
        if any(isinstance(module, Router) for module in model.modules()):
            self._tracking = track_optimizer(model, found["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if self._tracking is not None:
            self._tracking.remove()
            self._tracking = None
