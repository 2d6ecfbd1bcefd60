"""How close is close enough, the same rule as in the tests.

    |fast - exact64| <= 2 x max |plain - exact64| + floor x max |exact64|

`plain` is the plain formula in the dtype of the fast one. The floor stands for sums taken in
another order: 8 eps in float32, and in half precision one rounding of the largest entry.
Choices must be the best K up to ties: scores closer than the rounding of the plain formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

JITTER_SIGMAS = 7.0  # no draw of a million lies further out


class WrongAnswerError(AssertionError):
    """A contender does not compute what it says; it gets no time."""


@dataclass(frozen=True)
class Deviation:
    """How far a result is from the definition in float64."""

    what: str
    error: float  # largest difference
    allowed: float
    size: float  # largest entry of the definition

    @property
    def share(self) -> float:
        """The error as a share of the allowed one; 1 is the limit."""
        return self.error / self.allowed if self.allowed else 0.0

    @property
    def complaint(self) -> str | None:
        if self.error <= self.allowed:  # not so for NaN
            return None
        return f"{self.what}: error {self.error:.2e}, allowed {self.allowed:.2e}"


def floor(dtype: torch.dtype) -> float:
    """Relative to the largest entry."""
    return max(8 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(dtype).eps)


def deviation(what: str, fast: Tensor, exact: Tensor, plain: Tensor) -> Deviation:
    """`fast` against `exact` (float64), allowed what `plain` of the same dtype makes likely."""
    low, high = exact.detach().aminmax()
    size = max(-low.item(), high.item())
    allowed = 2 * _distance(plain, exact) + floor(plain.dtype) * size
    return Deviation(what, _distance(fast, exact), allowed, size)


def demand(found: Deviation) -> Deviation:
    """Raise where the error is too large."""
    if found.complaint is not None:
        raise WrongAnswerError(found.complaint)
    return found


def _distance(left: Tensor, right: Tensor) -> float:
    """Largest difference; NaN where one is. These may be gigabytes, hence few temporaries."""
    low, high = (left.detach() - right.detach()).aminmax()
    return max(-low.item(), high.item())


def demand_best(
    what: str, chosen: Tensor, exact: Tensor, plain: Tensor, slack: float = 0.0
) -> None:
    """`chosen` [..., K] are distinct and the K largest of `exact` [..., E] up to ties."""
    count = chosen.shape[-1]
    if (chosen.sort(-1).values.diff(dim=-1) == 0).any():
        raise WrongAnswerError(f"{what}: chosen twice")
    finite = exact.isfinite()
    rounding = (plain.double() - exact)[finite].abs().max().item()
    slack += 4 * rounding + 2 * floor(plain.dtype) * exact[finite].abs().max().item()
    last = exact.topk(count, dim=-1).values[..., -1:]
    worst = (last - exact.gather(-1, chosen)).max().item()
    if not worst <= slack:
        raise WrongAnswerError(f"{what}: one is {worst:.2e} below the last of the best {count}")


def demand_jitter(weights: Tensor, logits: Tensor, std: float) -> float:
    """The jitter of weights [..., K] against jitter-free logits; raises where it is not `std`."""
    drawn = weights.double().log() - logits.log_softmax(-1)
    measured = (drawn - drawn.mean(-1, keepdim=True)).std().item()
    if not 0.7 * std < measured < 1.3 * std:
        raise WrongAnswerError(f"jitter {measured:.2e}, expected {std:.2e}")
    return measured
