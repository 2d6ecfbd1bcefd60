"""Fine scoring (Alg. 1, line 10) as one dense product per cell."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from airmoe.kernels.cell_scores import batched, reference
from airmoe.kernels.cells import Cells
from airmoe.kernels.noise import Noise
from airmoe.kernels.precision import own_precision


def implementation(device_type: str) -> Literal["reference", "batched"]:
    """Which file computes on such a device: cell by cell suits a CPU, groups of cells a GPU."""
    return "reference" if device_type == "cpu" else "batched"


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
    batch = implementation(hidden.device.type) == "batched"
    function = batched.CellScores if batch else reference.CellScores
    return function.apply(  # type: ignore[no-any-return]
        hidden, centroids, inverse_norms, cells.token_ids, cells.offsets, cells.pools, noise
    )


__all__ = ["cell_scores", "implementation"]
