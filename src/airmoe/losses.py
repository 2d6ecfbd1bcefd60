"""Router losses: pure functions of one routing, with no tokens x experts tensor and no one-hot.

One normaliser rule for all of them. A trainer averages gradients over ranks (DDP, FSDP) and sums
them over micro-batches, while ranks and micro-batches hold different numbers of valid tokens. So
every loss divides a sum over this rank's valid tokens by a token count of the whole:

- `total_tokens=None`: by the valid tokens of this micro-batch over all ranks. The mean over ranks
  of value and gradient is then the loss of the global micro-batch.
- `total_tokens=n` (valid tokens of the accumulation window over all ranks): the sum over the
  window's micro-batches is the token-weighted mean of their losses. Do not divide by the number of
  micro-batches again (Alg. 3 writes L/A, which is the same when all of them are equally long).

Invalid tokens (masked or non-finite) enter neither value nor gradient; no valid token gives 0.

In a process group each of these is a collective, in training and evaluation alike: every rank must
call it, or the ranks that do will hang.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.distributed import all_reduce_sum, is_distributed, world_size
from airmoe.routers.routing import CellRouting, Routing, check_routing

# How records of runs name this convention. Older records, whose f summed to 1 (a loss K times
# weaker), lack it.
BALANCE_CONVENTION = "f sums to K"


def load_balance_loss(routing: Routing, *, total_tokens: Tensor | int | None = None) -> Tensor:
    """Load balancing E * sum_e f_e P_e: K at perfect balance, more where few experts have most.

    f_e is how often a token chose expert e, over all ranks (no gradient): the f sum to K, the
    experts per token. P_e is the mean probability of e under the softmax over each token's
    candidates (for AIR: its shortlist). With K = 1 this is the Switch loss; with exact routing it
    is transformers' `load_balancing_loss_func`. Every rank of a process group must call it, also
    in evaluation.
    """
    check_routing("load_balance_loss.routing", routing)
    return _balance(routing.expert_counts, routing.expert_probs, routing.valid, total_tokens)


def shortlist_balance_loss(
    routing: CellRouting, *, total_tokens: Tensor | int | None = None
) -> Tensor:
    """The same loss one level up, G * sum_g f_g P_g: spreads tokens over codewords or clusters.

    The f sum to the lists a token has: one in AIR, `num_selected_clusters` in hierarchical routing.
    """
    if not isinstance(routing, CellRouting):
        raise TypeError(
            f"shortlist_balance_loss: got a {type(routing).__name__}, needs a CellRouting, because "
            "only AIR and hierarchical routing have shortlists. Drop this loss for other routers."
        )
    return _balance(routing.cell_counts, routing.cell_probs, routing.valid, total_tokens)


def router_z_loss(routing: Routing, *, total_tokens: Tensor | int | None = None) -> Tensor:
    """Mean squared log partition function of the candidates (ST-MoE): keeps logits small."""
    check_routing("router_z_loss.routing", routing)
    tokens = routing.valid.sum()
    tokens_everywhere = all_reduce_sum(tokens)
    return routing.log_z.square().sum() * _per_token(tokens_everywhere, total_tokens)


def _balance(
    counts: Tensor, probs: Tensor, valid: Tensor, total_tokens: Tensor | int | None
) -> Tensor:
    """n * sum_i f_i P_i over n experts or cells; `probs` is this rank's mean over valid tokens."""
    tokens = valid.sum()
    # Joined where there is a collective only: in torch 2.11 a compiler that cuts its graphs
    # (mode="reduce-overhead") loses the counts if they are written into a joined tensor.
    choices, tokens_everywhere = counts.detach(), tokens
    if is_distributed():  # one collective for both: [n + 1]
        both = all_reduce_sum(torch.cat([choices, tokens.unsqueeze(0).to(choices.dtype)]))
        choices, tokens_everywhere = both[:-1], both[-1]
    frequency = choices.to(probs.dtype) / tokens_everywhere.clamp(min=1)  # [n], per token
    scale = tokens * _per_token(tokens_everywhere, total_tokens) * probs.shape[0]
    # The mean over no token is 0/0; this rank then adds nothing, in value or gradient.
    probs = torch.where(tokens > 0, probs, 0.0)  # [n]
    return torch.dot(frequency, probs) * scale


def _per_token(tokens_everywhere: Tensor, total_tokens: Tensor | int | None) -> Tensor | float:
    """The weight of one valid token of this rank: ranks / tokens, without reading the device."""
    # Without valid tokens nothing is summed, so any divisor will do: no 0/0. In float32, because a
    # quotient of whole numbers would take torch's default dtype.
    total = tokens_everywhere if total_tokens is None else total_tokens
    if isinstance(total, Tensor):
        if total.numel() != 1:
            raise ValueError(
                f"total_tokens: got shape {tuple(total.shape)}, must be one number, the "
                "valid tokens of the whole window. Sum it first."
            )
        return world_size() / total.detach().float().reshape(()).clamp(min=1)
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise ValueError(
            f"total_tokens: got {total!r}, must be a whole number >= 0. Give the valid "
            "tokens of the accumulation window over all ranks, or None."
        )
    return world_size() / max(total, 1)
