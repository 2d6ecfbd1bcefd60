"""Fine scoring for many cells at once: what reference.py does, in batched products.

Sums into centroids that several cells share are in no fixed order on a GPU, unless
`torch.use_deterministic_algorithms` asks for one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.cells.groups import (
    GROUP_BYTES,
    add_rows,
    gather,
    make_groups,
    put_rows,
    with_zero_row,
    without_last_row,
)
from airmoe.kernels.noise import Noise
from airmoe.kernels.precision import own_precision


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
        (num_tokens, dim), pool_size = hidden.shape, pools.shape[1]
        groups = make_groups(
            token_ids,
            offsets,
            num_tokens,
            table_bytes=pool_size * dim * work.itemsize,
            row_bytes=max(pool_size, dim) * work.itemsize,
        )
        padded_hidden = with_zero_row(hidden, work)
        scores = torch.empty(
            token_ids.shape[0] + 1, pool_size, dtype=work, device=hidden.device
        )  # [N + 1, M]
        for group in groups:
            pool = pools.index_select(0, group.cells)  # [cells, M]
            tokens_hidden = gather(padded_hidden, group.tokens, work)  # [cells, length, D]
            part = torch.bmm(tokens_hidden, gather(centroids, pool, work).mT)
            if inverse_norms is not None:
                part *= inverse_norms[pool].unsqueeze(1)
            if noise is not None:
                real_tokens = group.tokens.clamp(max=num_tokens - 1)  # padding has no stream
                part += noise.pairs(real_tokens.unsqueeze(-1), pool.unsqueeze(1))
            put_rows(scores, group.rows, part)
        ctx.groups = groups
        ctx.save_for_backward(hidden, centroids, inverse_norms, pools)
        return without_last_row(scores)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        hidden, centroids, inverse_norms, pools = ctx.saved_tensors
        work = grad_scores.dtype
        want_hidden, want_centroids = ctx.needs_input_grad[:2]
        padded_hidden, padded_grad = (with_zero_row(t, work) for t in (hidden, grad_scores))
        grad_hidden = torch.zeros_like(padded_hidden) if want_hidden else None
        # The gradient of the scaled rows; the norm is dealt with once, at the end.
        wide = torch.promote_types(centroids.dtype, torch.float32)
        grad_unit = torch.zeros_like(centroids, dtype=wide) if want_centroids else None
        for group in ctx.groups:
            pool = pools.index_select(0, group.cells)  # [cells, M]
            part = gather(padded_grad, group.rows, work)  # [cells, length, M]
            if grad_unit is not None:
                tokens_hidden = gather(padded_hidden, group.tokens, work)
                add_rows(grad_unit, pool, torch.bmm(part.mT, tokens_hidden))
            if grad_hidden is not None:
                if inverse_norms is not None:
                    part *= inverse_norms[pool].unsqueeze(1)
                add_rows(grad_hidden, group.tokens, torch.bmm(part, gather(centroids, pool, work)))
        if grad_unit is not None:
            _through_norm(grad_unit, centroids, inverse_norms)
        return (
            None if grad_hidden is None else grad_hidden[:-1].to(hidden.dtype),
            None if grad_unit is None else grad_unit.to(centroids.dtype),
            *(None,) * 5,
        )


def _through_norm(grad_unit: Tensor, centroids: Tensor, inverse_norms: Tensor | None) -> None:
    """reference.through_norm in few launches: its chunks are made for the cache of a CPU."""
    if inverse_norms is None:
        return
    chunk = max(1, GROUP_BYTES // (grad_unit.shape[1] * grad_unit.element_size()))
    parts = zip(*(t.split(chunk) for t in (grad_unit, centroids, inverse_norms)), strict=True)
    for part, rows, inverse in parts:
        scale = inverse.to(part.dtype).unsqueeze(-1)
        unit = rows.to(part.dtype) * scale
        radial = (part * unit).sum(-1, keepdim=True)
        part.addcmul_(unit, radial, value=-1).mul_(scale)
