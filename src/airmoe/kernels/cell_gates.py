"""Gates of cells in one go: fine scores, the K best, their softmax (Alg. 1, line 10; Eq. 2).

The definition is `cell_scores` followed by `top_k_gates`, or by the routers' `expert_choice_gates`;
here scores are not kept unless the products are float32. For one row per token, on Triton only: on
a CPU the two steps are the faster way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.backend import operator, own_precision
from airmoe.kernels.cells import Cells
from airmoe.kernels.layout import CellLayout
from airmoe.kernels.noise import Noise, noise_of, noise_operands


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
        self._check_current()
        hidden, centroids, inverse_norms, noise = self._operands
        with torch.no_grad():
            sums = probs_per_entry_op(
                hidden, centroids, inverse_norms, *noise_operands(noise),
                self._cells.layout().tensors(), self._scores.detach(), self.log_z.detach(),
                self._valid,
            )  # fmt: skip
            values = self._cells.reverse_index(centroids.shape[0]).sum_by_expert(sums)
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
    assert (top_k is None) != (capacity is None), "either tokens choose or experts do"
    valid = valid.contiguous()
    work = torch.promote_types(hidden.dtype, centroids.dtype)
    if work != hidden.dtype or work != centroids.dtype:
        work = torch.promote_types(work, torch.float32)
    hidden, centroids = hidden.to(work).contiguous(), centroids.to(work).contiguous()
    gates, log_z, probs, scores = cell_gates_op(
        hidden, centroids, inverse_norms, *noise_operands(noise),
        cells.layout(centroids.shape[0]).tensors(), valid, top_k, capacity,
        torch.is_grad_enabled(),
    )  # fmt: skip
    operands = (hidden.detach(), centroids.detach(), inverse_norms, noise)
    version = _version(operands[1])
    return CellGates(gates, log_z, probs, scores, operands, cells, valid, version)


@operator("airmoe::cell_gates")
def cell_gates_op(
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    row_keys: Tensor | None,
    noise_std: float,
    layout: list[Tensor],
    valid: Tensor,
    top_k: int | None,
    capacity: Tensor | None,
    carry_probs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gates, log Z, `probs` and the scores where they are kept, else nothing.

    `probs` is zero. It carries a gradient: the sums of the probabilities are computed only when
    somebody reads them, added to it, and their gradient then arrives here with the others, so that
    hidden states and centroids are multiplied once for all of them.
    """
    from airmoe.kernels.cell_gates_triton import make_gates
    from airmoe.kernels.expert_choice_triton import gates_of_experts_choice

    scored = _scored(hidden, centroids, inverse_norms, row_keys, noise_std, layout)
    if top_k is not None:
        gates, log_z, scores = make_gates(scored, valid, top_k)
    else:
        assert capacity is not None
        gates, log_z, scores = gates_of_experts_choice(scored, valid, capacity)
    probs = log_z.new_zeros(centroids.shape[0] if carry_probs else 0)
    return gates, log_z, probs, log_z.new_empty(0) if scores is None else scores


@operator("airmoe::cell_gates_backward")
def cell_gates_backward_op(
    grad_gates: Tensor | None,
    grad_log_z: Tensor | None,
    grad_probs: Tensor | None,
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    row_keys: Tensor | None,
    noise_std: float,
    layout: list[Tensor],
    valid: Tensor,
    gates: Tensor,
    log_z: Tensor,
    scores: Tensor,
    over_all: bool,
    want_hidden: bool,
    want_centroids: bool,
) -> tuple[Tensor, Tensor]:
    from airmoe.kernels import cell_gates_triton as triton

    scored = _scored(hidden, centroids, inverse_norms, row_keys, noise_std, layout)
    kept = scores if triton.keeps_scores(hidden) else None
    outputs = triton.Outputs(gates, log_z, kept, over_all)
    upstream = triton.Upstream(grad_gates, grad_log_z, grad_probs)
    grads = triton.score_grads(scored, valid, outputs, upstream)
    return triton.backward(scored, grads, want_hidden, want_centroids)


@operator("airmoe::probs_per_entry")
def probs_per_entry_op(
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    row_keys: Tensor | None,
    noise_std: float,
    layout: list[Tensor],
    scores: Tensor,
    log_z: Tensor,
    valid: Tensor,
) -> Tensor:
    """Sum over each cell's valid rows of the softmax over their candidates: [G, M] float32."""
    from airmoe.kernels import cell_gates_triton as triton

    scored = _scored(hidden, centroids, inverse_norms, row_keys, noise_std, layout)
    kept = scores if triton.keeps_scores(hidden) else None
    return triton.probs_per_entry(scored, kept, log_z, valid)


def _scored(
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    row_keys: Tensor | None,
    noise_std: float,
    layout: list[Tensor],
) -> Any:
    from airmoe.kernels.cell_scores_triton import Scored

    noise = noise_of(row_keys, noise_std)
    return Scored(hidden, centroids, inverse_norms, noise, CellLayout.of(layout))


@cell_gates_op.register_fake
def _(hidden: Tensor, centroids: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    layout = CellLayout.of(rest[3])
    shape = (layout.num_rows, layout.pool)
    kept = shape if hidden.dtype == torch.float32 else 0
    return (
        hidden.new_empty(shape),
        hidden.new_empty(shape[0], dtype=torch.float32),
        hidden.new_empty(centroids.shape[0] if rest[-1] else 0, dtype=torch.float32),
        hidden.new_empty(kept, dtype=torch.float32),
    )


@cell_gates_backward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    (hidden, centroids), (want_hidden, want_centroids) = inputs[3:5], inputs[-2:]
    return (
        torch.empty_like(hidden) if want_hidden else hidden.new_empty(0),
        torch.empty_like(centroids) if want_centroids else hidden.new_empty(0),
    )


@probs_per_entry_op.register_fake
def _(*inputs: Any) -> Tensor:
    pools = CellLayout.of(inputs[5]).pools
    return pools.new_empty(pools.shape, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, centroids, norms, keys, ctx.noise_std, layout, valid, top_k, _capacity, _carry = inputs
    gates, log_z, _probs, scores = output
    ctx.over_all = top_k in (1, None)  # gates are probabilities among all candidates
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, centroids, norms, keys, valid, gates, log_z, scores, *layout)


def _backward(
    ctx: Any,
    grad_gates: Tensor | None,
    grad_log_z: Tensor | None,
    grad_probs: Tensor | None,
    _grad_scores: None,
) -> tuple[Any, ...]:
    hidden, centroids, norms, keys, *outputs = ctx.saved_tensors[:8]
    layout = list(ctx.saved_tensors[8:])
    upstream = [
        None if grad is None else grad.contiguous() for grad in (grad_gates, grad_log_z, grad_probs)
    ]
    wanted = ctx.needs_input_grad[:2]
    found: tuple[Tensor | None, ...] = (None, None)
    if any(grad is not None for grad in upstream):
        grads = cell_gates_backward_op(
            *upstream, hidden, centroids, norms, keys, ctx.noise_std, layout, *outputs,
            ctx.over_all, *wanted,
        )  # fmt: skip
        found = tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *found, None, None, None, [None] * len(layout), None, None, None, None


cell_gates_op.register_autograd(_backward, setup_context=_setup)


@operator("airmoe::counts_per_entry")
def counts_per_entry(gates: Tensor, offsets: Tensor, pools: Tensor) -> Tensor:
    """How many rows of each cell chose each of its experts: [G, M] int32."""
    from airmoe.kernels import layout_triton

    return layout_triton.counts_per_entry(gates, offsets, pools)


@counts_per_entry.register_fake
def _(gates: Tensor, offsets: Tensor, pools: Tensor) -> Tensor:
    return pools.new_empty(pools.shape, dtype=torch.int32)
