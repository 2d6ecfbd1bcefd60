"""Fine scoring (Alg. 1, line 10) as one dense product per cell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import own_precision, use_triton
from airmoe.kernels.cells import Cells, RowAdder, RowReader, nonempty_cells
from airmoe.kernels.noise import Noise, noise_operands

ROW_CHUNK = 1024  # rows projected at once: temporaries stay in the cache


@own_precision
def cell_scores(
    hidden: Tensor,
    centroids: Tensor,
    cells: Cells,
    *,
    inverse_norms: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Logits of every row against its cell's pool: [N, M], float32 or wider.

    hidden [T, D], centroids [E, D]. With `inverse_norms` [E] = 1/|w_e| the logits are those of the
    unit-norm centroids; the gradient goes through the norm although the value was cached. Jitter
    is a function of (token, expert), the same wherever the pair is met.
    """
    if use_triton(hidden, centroids):
        from airmoe.kernels.cell_scores_triton import cell_scores_op

        if hidden.dtype != centroids.dtype:
            hidden, centroids = hidden.float(), centroids.float()
        layout = cells.layout(centroids.shape[0]).tensors()
        hidden, centroids = hidden.contiguous(), centroids.contiguous()
        return cell_scores_op(hidden, centroids, inverse_norms, *noise_operands(noise), layout)
    return _CellScores.apply(  # type: ignore[no-any-return]
        hidden, centroids, inverse_norms, cells.token_ids, cells.offsets, cells.pools, noise
    )


class _CellScores(torch.autograd.Function):
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
        read = RowReader(centroids, pools.shape[1], work)
        for cell, rows in nonempty_cells(offsets):
            pool, tokens = pools[cell], token_ids[rows]
            tokens_hidden = hidden.index_select(0, tokens).to(work)
            part = torch.mm(tokens_hidden, read(pool).T, out=scores[rows])
            if inverse_norms is not None:
                part *= inverse_norms.index_select(0, pool)
            if noise is not None:
                part += noise.rows(tokens, pool)
        ctx.save_for_backward(hidden, centroids, inverse_norms, token_ids, offsets, pools)
        return scores

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        hidden, centroids, inverse_norms, token_ids, offsets, pools = ctx.saved_tensors
        work = grad_scores.dtype
        want_hidden, want_centroids = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=work)
        read = RowReader(centroids, pools.shape[1], work)
        # The gradient of the scaled rows; the norm is dealt with once, at the end.
        unit = RowAdder(centroids, pools.shape[1], work) if want_centroids else None
        for cell, rows in nonempty_cells(offsets):
            pool, tokens = pools[cell], token_ids[rows]
            part = grad_scores[rows]
            if unit is not None:
                unit.add(pool, part, hidden.index_select(0, tokens).to(work))
            if want_hidden:
                if inverse_norms is not None:
                    part = part * inverse_norms.index_select(0, pool)
                grad_hidden.index_add_(0, tokens, part @ read(pool))
        grad_centroids = None
        if unit is not None:
            grad_centroids = _through_norm(unit.total, centroids, inverse_norms).to(centroids.dtype)
        return grad_hidden.to(hidden.dtype) if want_hidden else None, grad_centroids, *(None,) * 5


def _through_norm(grad_unit: Tensor, centroids: Tensor, inverse_norms: Tensor | None) -> Tensor:
    """Gradient of w from that of w / |w|: drop the radial part, divide by the norm. In place."""
    if inverse_norms is None:
        return grad_unit
    for start in range(0, grad_unit.shape[0], ROW_CHUNK):
        part = grad_unit[start : start + ROW_CHUNK]
        scale = inverse_norms[start : start + ROW_CHUNK].to(part.dtype).unsqueeze(-1)
        unit = centroids[start : start + ROW_CHUNK].to(part.dtype) * scale
        radial = (part * unit).sum(-1, keepdim=True)
        part.addcmul_(unit, radial, value=-1).mul_(scale)
    return grad_unit
