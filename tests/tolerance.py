"""How close is close enough: derived from the error of the plain formula, never guessed.

    |fast - exact64| <= 2 x max |plain32 - exact64| + FLOOR x max |exact64|

`plain32` is the oracle run in float32. The floor stands for the few roundings by which a sum taken
in another order may differ when the plain formula happens to round luckily.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

FLOOR = 8 * torch.finfo(torch.float32).eps  # about 1e-6, relative to the largest entry


def allowed_error(exact: Tensor, plain: Tensor, logits: float = 0.0) -> float:
    """The bound for a float32 result whose plain float32 formula gave `plain`.

    For tensors of a few entries made of softmax weights give the size of the largest logit: the
    rounding of a logit z, eps |z|, is a relative error of its weight, so the floor grows with it.
    """
    if exact.numel() == 0:
        return 0.0
    plain_error = (plain.detach().double() - exact.detach()).abs().max().item()
    return 2 * plain_error + FLOOR * (1 + logits) * exact.detach().abs().max().item()


def assert_close(
    actual: Tensor, exact: Tensor, plain: Tensor, what: str, logits: float = 0.0
) -> None:
    """Compare a library result with the oracle in float64 (`exact`) and float32 (`plain`)."""
    assert exact.dtype == torch.float64, f"{what}: the oracle must run in float64"
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    assert torch.isfinite(exact).all(), f"{what}: the oracle is not finite"
    assert torch.isfinite(actual).all(), f"{what}: not finite: {actual}"
    if exact.numel() == 0:
        return
    error = (actual.detach().double() - exact.detach()).abs().max().item()
    bound = allowed_error(exact, plain, logits)
    assert error <= bound, f"{what}: error {error:.3e}, allowed {bound:.3e}"


def assert_top_k(
    chosen: Iterable[int], scores: Tensor, top_k: int, slack: float, what: str
) -> None:
    """`chosen` are K distinct positions of `scores`, the largest ones up to ties within `slack`."""
    ids = list(chosen)
    assert len(ids) == top_k, f"{what}: {len(ids)} chosen, expected exactly {top_k}"
    assert len(set(ids)) == top_k, f"{what}: repeated choice in {sorted(ids)}"
    values = scores.detach().double()
    kth = values.sort(descending=True).values[top_k - 1].item()
    worst = values[ids].min().item()
    assert worst >= kth - slack, f"{what}: chose a score {kth - worst:.3e} below the K-th largest"
    missed = torch.ones_like(values, dtype=torch.bool)
    missed[ids] = False
    if missed.any():
        best_missed = values[missed].max().item()
        assert best_missed <= worst + slack, (
            f"{what}: missed {best_missed:.3e} > chosen {worst:.3e}"
        )


def score_slack(exact: Tensor, plain: Tensor) -> float:
    """Scores closer than this count as tied: twice the error allowed to each of the two."""
    return 2 * allowed_error(exact, plain)
