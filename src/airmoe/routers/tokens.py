"""Checked input of routers and codebooks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.norms import finite_rows


@dataclass(frozen=True)
class Tokens:
    """Hidden states in which rows that do not count are set to 0, so that they spoil nothing."""

    hidden: Tensor  # [T, D]
    valid: Tensor  # [T] bool
    mask: Tensor | None = None  # [T] bool, of the caller

    @property
    def shape(self) -> torch.Size:
        """[T, D]"""
        return self.hidden.shape

    @property
    def bad(self) -> Tensor:
        """[T] bool: those that should count, but hold NaN, infinity or huge values."""
        return ~self.valid if self.mask is None else self.mask & ~self.valid

    def detach(self) -> Tokens:
        return Tokens(self.hidden.detach(), self.valid, self.mask)

    @property
    def weights(self) -> Tensor:
        """[T] float32, 1 / (number of valid tokens) for each valid token, else 0."""
        valid = self.valid.float()
        return valid / valid.sum().clamp_min(1)


def read_tokens(
    label: str, dim: int, hidden: Tensor | Tokens, mask: Tensor | None, *, own: bool = True
) -> Tokens:
    """Check hidden [T, dim] and mask [T], and find the tokens that count.

    What was read before is returned as it is.

    Masked tokens do not, nor do those whose squared norm is no finite float32: NaN, infinity and
    values beyond 1e19 would spoil sums that others share. Whoever is done with them at once, and
    records no gradient, needs no states of its `own`: copying them takes longer on a CPU than
    scoring them does. (A GPU would have to wait for the answer whether there is anything to set.)
    """
    if isinstance(hidden, Tokens):
        return hidden
    if hidden.ndim != 2 or hidden.shape[1] != dim:
        raise ConfigError(
            f"{label}.hidden",
            tuple(hidden.shape),
            f"must have shape [tokens, dim = {dim}]",
            "Flatten leading dimensions, or build with the model's width.",
        )
    if not hidden.is_floating_point():
        raise ConfigError(
            f"{label}.hidden", hidden.dtype, "must be real floating point", "Cast it first."
        )
    valid = finite_rows(hidden)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != hidden.shape[:1]:
            raise ConfigError(
                f"{label}.mask",
                (tuple(mask.shape), mask.dtype),
                f"must be a bool tensor of shape [{hidden.shape[0]}]",
                "Give True for real tokens and False for padding.",
            )
        valid = valid & mask
    asks = not own and hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    if asks and bool(valid.all()):
        return Tokens(hidden, valid, mask)
    return Tokens(torch.where(valid.unsqueeze(-1), hidden, 0), valid, mask)
