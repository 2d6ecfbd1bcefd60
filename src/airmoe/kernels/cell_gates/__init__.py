"""Gates of cells in one go: fine scores, the K best, their softmax (Alg. 1, line 10; Eq. 2).

The definition is `cell_scores` followed by `top_k_gates`, or by `routers.gating.expert_choice`;
here scores are not kept unless the products are float32. For one row per token, on Triton only: on
a CPU the two steps are the faster way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.kernels.cells import Cells
from airmoe.kernels.noise import Noise
from airmoe.kernels.precision import own_precision


@dataclass(frozen=True)
class CellGates:
    """What routing needs of the candidates of every token."""

    gates: Tensor  # [N, M], 0 = not chosen
    log_z: Tensor  # [N] logsumexp over all M candidates, 0 for tokens that do not count
    _probs: Tensor  # [E] zeros that carry the gradient of `expert_probs`, empty without one
    _scores: Tensor  # [N, M] where they are kept, else empty
    _operands: tuple[Tensor, Tensor, Tensor | None, Noise | None]
    _cells: Cells
    _valid: Tensor  # [T]
    _centroids_version: int | None

    def expert_probs(self) -> Tensor:
        """[E] mean over valid tokens of the softmax over their candidates, differentiable."""
        from airmoe.kernels.cell_gates.statistics import probs_per_entry

        self._check_current()
        hidden, centroids, inverse_norms, noise = self._operands
        cells, tiles = self._cells, self._cells.row_tiles()
        with torch.no_grad():
            sums = probs_per_entry(
                hidden, centroids, inverse_norms,
                None if noise is None else noise.row_keys, 0.0 if noise is None else noise.std,
                tiles.cells, tiles.first_rows, tiles.rows, tiles.block,
                cells.offsets, cells.token_ids, cells.pools, self._scores.detach(),
                self.log_z.detach(), self._valid,
            )  # fmt: skip
            values = cells.reverse_index(centroids.shape[0]).sum_by_expert(sums)
        sums = self._probs + values if self._probs.numel() else values
        return sums / self._valid.sum().clamp_min(1)

    def _check_current(self) -> None:
        """Where scores were not kept they are made again, of what they were made of."""
        self._cells.check_current()
        if torch.compiler.is_compiling() or self._scores.numel():
            return
        if _version(self._operands[1]) != self._centroids_version:
            raise RuntimeError(
                "This routing is of an earlier moment: its centroids have changed since. Read "
                "probabilities before the optimizer's step, or route again."
            )


def _version(tensor: Tensor) -> int | None:
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version


@own_precision
def cell_gates(
    hidden: Tensor,
    centroids: Tensor,
    cells: Cells,
    valid: Tensor,
    top_k: int | None,
    *,
    capacity: Tensor | None = None,
    inverse_norms: Tensor | None = None,
    noise: Noise | None = None,
) -> CellGates:
    """hidden [T, D], centroids [E, D], one cell per token; valid [T] bool.

    Without `top_k` experts choose: each takes its `capacity` (0-dim) most probable tokens, and a
    gate is the probability among all M candidates.

    Gates have the dtype of the products: the wider of hidden's and the centroids'.
    """
    import airmoe.kernels.cell_gates.operator  # noqa: F401 (registers the operator)

    assert (top_k is None) != (capacity is None), "either tokens choose or experts do"
    valid = valid.contiguous()
    work = torch.promote_types(hidden.dtype, centroids.dtype)
    if work != hidden.dtype or work != centroids.dtype:
        work = torch.promote_types(work, torch.float32)
    hidden, centroids = hidden.to(work).contiguous(), centroids.to(work).contiguous()
    tiles, reverse = cells.row_tiles(), cells.reverse_index(centroids.shape[0])
    gates, log_z, probs, scores = torch.ops.airmoe.cell_gates(
        hidden, centroids, inverse_norms,
        None if noise is None else noise.row_keys, 0.0 if noise is None else noise.std,
        tiles.cells, tiles.first_rows, tiles.rows, tiles.block, cells.offsets, cells.token_ids,
        cells.pools, reverse.entries, reverse.starts, valid, top_k, capacity,
        torch.is_grad_enabled(),
    )  # fmt: skip
    operands = (hidden.detach(), centroids.detach(), inverse_norms, noise)
    version = _version(operands[1])
    return CellGates(gates, log_z, probs, scores, operands, cells, valid, version)
