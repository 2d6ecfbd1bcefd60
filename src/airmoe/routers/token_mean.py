"""What all tokens share: their running mean, learned without gradients beside the codebook.

Every codeword points to the side of a mean that is not zero, and experts on the other side are far
from all of them. They end in no list, get no gradient and stay there. Tokens without their mean
have no such side.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from airmoe.distributed import all_reduce_sum
from airmoe.routers.float32_state import Float32State
from airmoe.routers.tokens import Tokens

# Of a micro-batch. Slower than a codebook's usual 0.95: a mean that moves carries all routes along.
MEAN_DECAY = 0.99


class TokenMean(Float32State):
    """Decayed sum and count of the tokens of all ranks, as the codebook keeps them of its cells."""

    sums: Tensor  # [D]
    count: Tensor  # scalar, tokens per micro-batch

    def __init__(self, dim: int, decay: float = MEAN_DECAY) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("sums", torch.zeros(dim, dtype=torch.float32))
        self.register_buffer("count", torch.zeros((), dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.sums.zero_()
        self.count.zero_()

    @property
    def value(self) -> Tensor:
        """[D] a new tensor: the mean, 0 before the first token."""
        return self.sums / self.count.clamp_min(torch.finfo(torch.float32).tiny)

    @torch.no_grad()
    def update(self, tokens: Tokens) -> None:
        """One micro-batch; every rank of a process group must call it."""
        count = tokens.valid.sum().to(torch.float32)
        told = all_reduce_sum(torch.cat([tokens.hidden.float().sum(0), count.unsqueeze(0)]))
        sums, count = told[:-1], told[-1]
        # A batch without a token would only bring both nearer to 0.
        share = (1 - self.decay) * (count > 0).to(count.dtype)
        self.sums.lerp_(sums, share)
        self.count.lerp_(count, share)


def without_mean(tokens: Tokens, mean: Tensor | None) -> Tokens:
    """The same tokens less `mean` [D]; those that do not count stay 0."""
    if mean is None:
        return tokens
    moved = less(tokens.hidden, mean)
    return replace(tokens, hidden=torch.where(tokens.valid.unsqueeze(-1), moved, 0))


def less(hidden: Tensor, mean: Tensor) -> Tensor:
    """hidden - mean, in float32 or wider: nothing is rounded before it is scored."""
    return hidden.to(torch.promote_types(hidden.dtype, mean.dtype)) - mean
