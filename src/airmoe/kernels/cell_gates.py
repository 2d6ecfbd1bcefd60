"""Gates of cells in one go: fine scores, the K best, their softmax (Alg. 1, line 10; Eq. 2).

The definition is `cell_scores` followed by `top_k_gates`, or by the routers' `expert_choice_gates`;
here scores are kept only where `ScoreInputs.kept` says so. For one row per token, on Triton only:
on a CPU the two steps are faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.backend import Gradient, operator, own_precision
from airmoe.kernels.cell_scores import ScoreInputs
from airmoe.kernels.cells import Cells, version_of
from airmoe.kernels.noise import Noise, noise_operands


@dataclass(frozen=True)
class CellGates:
    """What routing needs of the candidates of every token."""

    gates: Tensor  # [N, M], 0 = not chosen
    log_z: Tensor  # [N] logsumexp over all M candidates, 0 for tokens that do not count
    _probs: Tensor  # [E] zeros that carry the gradient of `expert_probs` back; empty without one
    _scores: Tensor  # [N, M] where they are kept, else empty
    _scored: ScoreInputs  # what they were computed from
    _cells: Cells
    _valid: Tensor  # [T]
    _centroids_version: int | None

    def expert_probs(self) -> Tensor:
        """[E] mean over valid tokens of the softmax over their candidates, differentiable."""
        self._check_current()
        with torch.no_grad():
            kept = self._scores.detach(), self.log_z.detach(), self._valid
            sums = probs_per_entry_op(*self._scored.operands(), *kept)
            num_experts = self._scored.centroids.shape[0]
            values = self._cells.reverse_index(num_experts).sum_by_expert(sums)
        sums = self._probs + values if self._probs.numel() else values
        return sums / self._valid.sum().clamp_min(1)

    def _check_current(self) -> None:
        """Scores that were not kept are computed again, from operands that must be the same."""
        self._cells.check_current()
        if torch.compiler.is_compiling() or self._scores.numel():
            return
        if version_of(self._scored.centroids) != self._centroids_version:
            raise RuntimeError(
                "This routing is stale: its centroids have changed since. Read "
                "probabilities before the optimizer's step, or route again."
            )


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
    assert (top_k is None) != (capacity is None), "either tokens choose or experts do"
    valid = valid.contiguous()
    work = torch.promote_types(hidden.dtype, centroids.dtype)
    if work != hidden.dtype or work != centroids.dtype:
        work = torch.promote_types(work, torch.float32)
    hidden, centroids = hidden.to(work).contiguous(), centroids.to(work).contiguous()
    operands = hidden, centroids, inverse_norms, *noise_operands(noise)
    scored = ScoreInputs(*operands, cells.layout(centroids.shape[0]))
    carry_probs = torch.is_grad_enabled()
    gates, log_z, probs, scores = cell_gates_op(
        *scored.operands(), valid, top_k, capacity, carry_probs
    )
    hidden, centroids = hidden.detach(), centroids.detach()
    scored = replace(scored, hidden=hidden, centroids=centroids, layout=cells.layout())
    version = version_of(centroids)
    return CellGates(gates, log_z, probs, scores, scored, cells, valid, version)


def _empty_gates(*operands: Any) -> tuple[Tensor, ...]:
    scored, carry_probs = ScoreInputs.of(*operands), operands[-1]
    hidden, shape = scored.hidden, (scored.layout.num_rows, scored.layout.pool_width)
    return (
        hidden.new_empty(shape),
        hidden.new_empty(shape[0], dtype=torch.float32),
        hidden.new_empty(scored.centroids.shape[0] if carry_probs else 0, dtype=torch.float32),
        hidden.new_empty(shape if scored.kept else 0, dtype=torch.float32),
    )


# The scores are empty unless they are kept. `probs` is zero and exists for its gradient: the mean
# probabilities are computed when somebody reads them, and are then added to it. So their gradient
# arrives here together with that of the gates, and one backward serves both.
cell_gates_op = operator(
    f"cell_gates({ScoreInputs.SCHEMA}, Tensor valid, SymInt? top_k, Tensor? capacity, "
    "bool carry_probs) -> (Tensor gates, Tensor log_z, Tensor probs, Tensor scores)",
    "cell_gates_triton",
    fake=_empty_gates,
    gradient=Gradient(of=("hidden", "centroids"), saved=("gates", "log_z", "scores")),
)


def _empty_sums(*operands: Any) -> Tensor:
    pools = ScoreInputs.of(*operands).layout.pools
    return pools.new_empty(pools.shape, dtype=torch.float32)


probs_per_entry_op = operator(
    f"probs_per_entry({ScoreInputs.SCHEMA}, Tensor scores, Tensor log_z, Tensor valid) -> Tensor",
    "cell_gates_triton",
    fake=_empty_sums,
)
