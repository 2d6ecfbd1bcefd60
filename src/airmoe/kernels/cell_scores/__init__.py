"""Fine scoring (Alg. 1, line 10) as one dense product per cell."""

from __future__ import annotations

from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.cell_scores import reference
from airmoe.kernels.cells import Cells
from airmoe.kernels.noise import Noise
from airmoe.kernels.precision import own_precision


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
        from airmoe.kernels.cell_scores.operator import run

        return run(hidden, centroids, inverse_norms, cells, noise)
    return reference.CellScores.apply(  # type: ignore[no-any-return]
        hidden, centroids, inverse_norms, cells.token_ids, cells.offsets, cells.pools, noise
    )
