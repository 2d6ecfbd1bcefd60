"""What training minimises: the language loss, and the routers' losses at their weights.

Both add up. The Hugging Face Trainer passes `num_items_in_batch`, the targets of an accumulation
window over all ranks; it multiplies a loss by the number of ranks, gradients are averaged over
ranks and summed over micro-batches. With that number given, the sum over all of them is

- the mean of the language loss over the window's targets, and
- the mean of each router loss over micro-batches, weighted by their targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from airmoe.distributed import all_reduce_sum, world_size
from airmoe.kernels.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy, token_chunks
from airmoe.losses import load_balance_loss, router_z_loss, shortlist_balance_loss
from airmoe.model.configuration import AirMoeConfig
from airmoe.routers.base import run_eagerly
from airmoe.routers.routing import Routing

# Name in the model's output -> (loss of one routing, field of the config that weighs it).
ROUTER_LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "load_balance_loss": (load_balance_loss, "load_balance_weight"),
    "shortlist_balance_loss": (shortlist_balance_loss, "shortlist_balance_weight"),
    "router_z_loss": (router_z_loss, "router_z_weight"),
}


def weighted_losses(config: AirMoeConfig) -> dict[str, float]:
    """The router losses that count, and how much."""
    weights = {name: getattr(config, field) for name, (_, field) in ROUTER_LOSSES.items()}
    return {name: weight for name, weight in weights.items() if weight > 0}


def router_losses(config: AirMoeConfig, routing: Routing) -> Tensor | None:
    """Raw losses of one layer, in the order of `weighted_losses`: [n], None if n = 0."""
    losses = [ROUTER_LOSSES[name][0](routing) for name in weighted_losses(config)]
    return torch.stack(losses) if losses else None


def weighted_sum(config: AirMoeConfig, layer_losses: Tensor | None) -> Tensor | None:
    """What the router losses [MoE layers, n] add to any loss of one micro-batch, with gradient."""
    if layer_losses is None:
        return None
    weights, losses = weighted_losses(config).values(), layer_losses.sum(0).unbind()
    weighted = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
    return torch.stack(weighted).sum()


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

    hidden [B, L, D], head from D to V, labels [B, L], layer_losses [MoE layers, n]. The router
    losses are summed over layers in `loss` (a layer's pull must not depend on how many there are)
    and averaged by name, for logs.
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
            # Of all ranks, because each router loss is already that of the global micro-batch.
            share = all_reduce_sum(num_targets).to(torch.float32) / (world_size() * window)
        for column, (name, weight) in enumerate(weighted_losses(config).items()):
            loss = loss + share * weight * layer_losses[:, column].sum()
            named[name] = layer_losses[:, column].detach().mean()
    # A copy: the Trainer scales `loss` in place.
    return {"loss": loss, "language_loss": language.detach().clone(), **named}


def _cross_entropy(hidden: Tensor, head: nn.Module, num_words: int, targets: Tensor) -> Tensor:
    """Summed over hidden [T, D] and targets [T], never with the logits of all tokens.

    A head that does more than one product (one with an adapter) has to be called: a few tokens at a
    time too, and once more in backward.
    """
    hooked = head._forward_hooks or head._forward_pre_hooks
    if type(head) is nn.Linear and head.bias is None and not hooked:
        return linear_cross_entropy(hidden, head.weight, targets)

    def of(states: Tensor, labels: Tensor) -> Tensor:
        logits = head(states.masked_fill((labels == IGNORE_INDEX).unsqueeze(-1), 0))
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX, reduction="sum")

    summed = hidden.new_zeros((), dtype=torch.float32)
    for chunk in token_chunks(hidden, num_words):
        part: Any = checkpoint(of, hidden[chunk], targets[chunk], use_reentrant=False)
        summed = summed + part
    return summed
