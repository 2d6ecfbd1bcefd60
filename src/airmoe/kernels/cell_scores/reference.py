"""Fine scoring per cell, and its gradient with the norm of the centroids kept in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.cells.reference import nonempty_cells
from airmoe.kernels.noise import Noise


class CellScores(torch.autograd.Function):
    """scores[row] = (hidden[token] @ centroids[pool].T) * inverse_norms[pool] + jitter."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        centroids: Tensor,
        inverse_norms: Tensor | None,
        token_ids: Tensor,
        offsets: Tensor,
        pools: Tensor,
        noise: Noise | None,
    ) -> Tensor:
        work = torch.promote_types(hidden.dtype, torch.float32)
        scores = torch.empty(
            token_ids.shape[0], pools.shape[1], dtype=work, device=hidden.device
        )  # [N, M]
        for cell, rows in nonempty_cells(offsets):
            pool, tokens = pools[cell], token_ids[rows]
            candidates = centroids.index_select(0, pool).to(work)  # [M, D]
            part = torch.mm(hidden.index_select(0, tokens).to(work), candidates.T, out=scores[rows])
            if inverse_norms is not None:
                part *= inverse_norms.index_select(0, pool)
            if noise is not None:
                part += noise.rows(tokens, pool)
        ctx.save_for_backward(hidden, centroids, inverse_norms, token_ids, offsets, pools)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        hidden, centroids, inverse_norms, token_ids, offsets, pools = ctx.saved_tensors
        work = grad_scores.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=work)
        grad_unit = torch.zeros_like(centroids, dtype=work)  # with respect to the scaled rows
        for cell, rows in nonempty_cells(offsets):
            pool, tokens = pools[cell], token_ids[rows]
            part = grad_scores[rows]
            grad_unit.index_add_(0, pool, part.T @ hidden.index_select(0, tokens).to(work))
            if inverse_norms is not None:
                part = part * inverse_norms.index_select(0, pool)
            grad_hidden.index_add_(0, tokens, part @ centroids.index_select(0, pool).to(work))
        grad_centroids = through_norm(grad_unit, centroids, inverse_norms)
        return (
            grad_hidden.to(hidden.dtype),
            grad_centroids.to(centroids.dtype),
            *(None,) * 5,
        )


def through_norm(grad_unit: Tensor, centroids: Tensor, inverse_norms: Tensor | None) -> Tensor:
    """Gradient of w from that of w / |w|: drop the radial part, divide by the norm. In place."""
    if inverse_norms is None:
        return grad_unit
    scale = inverse_norms.to(grad_unit.dtype).unsqueeze(-1)
    unit = centroids.to(grad_unit.dtype) * scale
    radial = (grad_unit * unit).sum(-1, keepdim=True)
    return grad_unit.addcmul_(unit, radial, value=-1).mul_(scale)
