"""Fine scoring (Alg. 1, line 10) as one dense product per cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import (
    Gradient,
    chunks,
    operator,
    own_precision,
    use_triton,
    without_autograd,
)
from airmoe.kernels.cells import MANY_ROWS, CellLayout, Cells, RowAdder, read_rows
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
        if hidden.dtype != centroids.dtype:
            hidden, centroids = hidden.float(), centroids.float()
        tables = hidden.contiguous(), centroids.contiguous(), inverse_norms
        layout = cells.layout(centroids.shape[0])
        return cell_scores_op(*ScoreInputs(*tables, *noise_operands(noise), layout).operands())
    operands = hidden, centroids, inverse_norms, cells, noise
    if not torch.is_grad_enabled():
        return without_autograd(_CellScores, *operands)
    return _CellScores.apply(*operands)  # type: ignore[no-any-return]


class _CellScores(torch.autograd.Function):
    """scores[row] = (hidden[token] @ centroids[pool].T) * inverse_norms[pool] + jitter."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        centroids: Tensor,
        inverse_norms: Tensor | None,
        cells: Cells,
        noise: Noise | None,
    ) -> Tensor:
        token_ids, pools, ctx.spans = cells.token_ids, cells.pools, cells.spans
        work = torch.promote_types(hidden.dtype, torch.float32)
        scores = hidden.new_empty(token_ids.shape[0], pools.shape[1], dtype=work)  # [N, M]
        for cell, start, stop in ctx.spans:
            rows = slice(start, stop)
            pool, tokens = pools[cell], token_ids[rows]
            own = read_rows(centroids, pool).to(work)
            tokens_hidden = hidden.index_select(0, tokens).to(work)
            part = torch.mm(tokens_hidden, own.T, out=scores[rows])
            if inverse_norms is not None:
                part *= inverse_norms.index_select(0, pool)
            if noise is not None:
                part += noise.rows(tokens, pool)
        ctx.save_for_backward(hidden, centroids, inverse_norms, token_ids, pools)
        return scores

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        hidden, centroids, inverse_norms, token_ids, pools = ctx.saved_tensors
        work = grad_scores.dtype
        want_hidden, want_centroids = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=work)
        # The gradient of w / |w|; it goes through the norm once, at the end.
        grad_unit = RowAdder(centroids, pools.shape[1], work) if want_centroids else None
        for cell, start, stop in ctx.spans:
            rows = slice(start, stop)
            pool, tokens = pools[cell], token_ids[rows]
            part = grad_scores[rows]
            if grad_unit is not None:
                grad_unit.add(pool, part, hidden.index_select(0, tokens).to(work))
            if want_hidden:
                if inverse_norms is not None:
                    part = part * inverse_norms.index_select(0, pool)
                own = read_rows(centroids, pool).to(work)
                grad_hidden.index_add_(0, tokens, part @ own)
        found_hidden = grad_hidden.to(hidden.dtype) if want_hidden else None
        if grad_unit is None:
            return found_hidden, None, None, None, None
        grad_centroids = _through_norm(grad_unit.total, centroids, inverse_norms)
        return found_hidden, grad_centroids.to(centroids.dtype), None, None, None


def _through_norm(grad_unit: Tensor, centroids: Tensor, inverse_norms: Tensor | None) -> Tensor:
    """Gradient of w from that of w / |w|: drop the radial part, divide by the norm. In place."""
    if inverse_norms is None:
        return grad_unit
    for rows in chunks(grad_unit.shape[0], ROW_CHUNK):
        part = grad_unit[rows]
        scale = inverse_norms[rows].to(part.dtype).unsqueeze(-1)
        unit = centroids[rows].to(part.dtype) * scale
        radial = (part * unit).sum(-1, keepdim=True)
        part.addcmul_(unit, radial, value=-1).mul_(scale)
    return grad_unit


@dataclass(frozen=True)
class ScoreInputs:
    """The operands of scoring."""

    hidden: Tensor  # [T, D]
    centroids: Tensor  # [E, D], of the same dtype
    inverse_norms: Tensor | None  # [E]
    row_keys: Tensor | None  # [T] of the jitter
    noise_std: float
    layout: CellLayout

    # As operators take it.
    SCHEMA: ClassVar[str] = (
        "Tensor hidden, Tensor centroids, Tensor? inverse_norms, Tensor? row_keys, "
        "float noise_std, Tensor[] layout"
    )

    @property
    def kept(self) -> bool:
        """Whether scores are kept for the backward: where making them again is slow (float32
        products), or where there are so few that they take little memory."""
        return self.hidden.dtype == torch.float32 or self.layout.num_rows < MANY_ROWS

    def operands(self) -> tuple[Any, ...]:
        """The arguments of `SCHEMA`."""
        noise = self.row_keys, self.noise_std
        return self.hidden, self.centroids, self.inverse_norms, *noise, self.layout.tensors()

    @classmethod
    def of(cls, *operands: Any) -> ScoreInputs:
        """From the arguments of an operator that begin with those of `SCHEMA`."""
        hidden, centroids, inverse_norms, row_keys, noise_std, layout, *_others = operands
        return cls(hidden, centroids, inverse_norms, row_keys, noise_std, CellLayout.of(layout))


def _empty_scores(*operands: Any) -> Tensor:
    """[N, M] float32."""
    scored = ScoreInputs.of(*operands)
    shape = scored.layout.num_rows, scored.layout.pool_width
    return scored.hidden.new_empty(shape, dtype=torch.float32)


cell_scores_op = operator(
    f"cell_scores({ScoreInputs.SCHEMA}) -> Tensor scores",
    "cell_scores_triton",
    fake=_empty_scores,
    gradient=Gradient(of=("hidden", "centroids")),
)
