"""How evenly experts and codewords are used, and how stale the shortlists are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.metrics.quality import router_mode
from airmoe.routers.air import AirRouter

REMEDY = "Give routing.expert_counts or routing.cell_counts, summed over batches."


def usage_entropy(counts: Tensor) -> Tensor:
    """Entropy in nats of the usage distribution counts / sum(counts): ln E at perfect balance.

    counts [E] or [G] are summed over batches and ranks. The result is a 0-d float64 tensor on their
    device, so that a training loop need not synchronise; NaN if nothing was counted.
    """
    _check_counts(counts)
    total = counts.sum(dtype=torch.float64)
    return torch.special.entr(counts.to(torch.float64) / total).sum()


def dead_experts(counts: Tensor) -> Tensor:
    """Fraction in [0, 1] of experts that got no token; a 0-d float64 tensor."""
    _check_counts(counts)
    return (counts == 0).to(torch.float64).mean()


@dataclass(frozen=True, kw_only=True)
class CodewordUsage:
    """How evenly codewords (or clusters) are used."""

    entropy: float  # nats, at most ln G
    perplexity: float  # exp(entropy): that many equally used codewords have this entropy
    unused: float  # fraction in [0, 1] of codewords that got no token


def codeword_usage(counts: Tensor) -> CodewordUsage:
    """Usage of the codewords (or clusters) from their token counts [G]."""
    entropy = usage_entropy(counts)
    return CodewordUsage(
        entropy=float(entropy),
        perplexity=float(entropy.exp()),
        unused=float(dead_experts(counts)),
    )


@torch.no_grad()
def shortlist_staleness(router: AirRouter) -> float:
    """Fraction of the training shortlists' entries that a rebuild now would replace.

    The codebook moves with every micro-batch, the shortlists only after an optimizer step (Alg. 3).
    The comparison uses the jitter of the lists in use, so only real movement counts: 0 right after
    a rebuild, and without a tracked optimizer, when every forward rebuilds. NaN before the first.
    """
    if not router.tracked and int(router.micro_batches) > 0:
        return 0.0
    if router.built_at is None:
        return float("nan")
    # Not `router.shortlists()`, which rebuilds stale lists.
    used = router.training_lists.experts  # [G, M], ascending
    with router_mode(router, training=True):  # jitter as in training
        fresh = router.rebuild_shortlists()  # [G, M], ascending
    place = torch.searchsorted(fresh, used).clamp(max=fresh.shape[1] - 1)  # [G, M]
    replaced = fresh.gather(1, place) != used
    return float(replaced.to(torch.float64).mean())


def unlisted_experts(shortlists: Tensor, num_experts: int) -> float:
    """Fraction of experts in none of the shortlists [G, M], which no token can choose."""
    listed = torch.zeros(num_experts, dtype=torch.bool, device=shortlists.device)
    listed[shortlists.flatten()] = True
    return float((~listed).to(torch.float64).mean())


def _check_counts(counts: Tensor) -> None:
    if not isinstance(counts, Tensor):
        rule = "must be a tensor of tokens per expert or codeword"
        raise ConfigError("counts", type(counts).__qualname__, rule, REMEDY)
    if counts.dim() != 1 or counts.numel() == 0:
        shape = tuple(counts.shape)
        rule = "must be [num_experts] or [num_codewords]"
        raise ValueError(f"counts: got shape {shape}, {rule}. {REMEDY}")
