"""Experts over cells (Eq. 1): per cell a few dense products, no per-token gather."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import Gradient, operator, own_precision, use_triton, without_autograd
from airmoe.kernels.cells import CellLayout, Cells, RowAdder, read_rows
from airmoe.kernels.token_experts import (
    GATED,
    PLAIN,
    PLAIN_BACKWARD,
    ExpertTables,
    activate,
    backward_follows,
    empty_pre,
)

SPARSE_CELL_ROWS = 4  # a cell with so few rows skips the experts that none of them chose


@own_precision
def cell_experts(
    hidden: Tensor,
    tables: ExpertTables,
    gates: Tensor,
    cells: Cells,
    *,
    counts: Tensor | None = None,
    training: bool = False,
) -> Tensor:
    """Sum over each token's rows of its gated experts: [T, D] in the dtype of `hidden`.

    hidden [T, D], gates [N, M]. Experts with gate 0 add nothing but are computed: the price of
    dense products. With `counts` [G, M], how many rows of a cell have a gate for each of its
    experts, Triton's backward skips those without. Without gradients a CPU skips what small cells
    did not choose, but not in `training`: that forward may be the first of activation
    checkpointing, and must sum in the same order as its recomputation.
    """
    gate, up, down = tables.gate, tables.up, tables.down
    if not use_triton(hidden, gate, up, down):
        pools, keep = cells.pools, training or torch.is_grad_enabled()
        if tables.size > 1:
            pools = tables.neurons(pools)
            gates = gates.repeat_interleave(tables.size, dim=-1)  # [N, neurons]
        operands = hidden, gate, up, down, gates, pools, cells, tables.activation, keep
        if not keep:
            return without_autograd(_CellExperts, *operands)
        return _CellExperts.apply(*operands)  # type: ignore[no-any-return]
    keep = backward_follows(hidden, gate, up, down, gates)
    tables = tables.contiguous()
    layout = cells.layout(up.shape[0] if keep and tables.size == 1 else None)
    if tables.size > 1:
        layout = replace(layout, pools=tables.neurons(layout.pools))
    return cell_experts_op(
        hidden.contiguous(), tables.gate, tables.up, tables.down, gates, layout.tensors(),
        counts if keep else None, tables.activation, tables.size, keep,
    )[0]  # fmt: skip


class _CellExperts(torch.autograd.Function):
    """output[token] += (act(hidden @ up[pool].T) * gates) @ down[pool], cell by cell.

    Pools [G, neurons] and gates [N, neurons] are those of single neurons.
    The pre-activations [N, neurons] are kept for the backward: on a CPU keeping them is cheaper
    than forming them again. Weight gradients of all cells are summed into one [E, D] buffer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        gate: Tensor | None,
        up: Tensor,
        down: Tensor,
        gates: Tensor,
        pools: Tensor,
        cells: Cells,
        activation: str,
        keep: bool,
    ) -> Tensor:
        keep = keep and any(ctx.needs_input_grad)
        work = hidden.dtype
        # A token may have many rows: their sum is kept in float32 whatever the products are in.
        output = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        tables = {"up": up} if gate is None else {"up": up, "gate": gate}
        num_kept = cells.token_ids.shape[0] if keep else 0
        pre_up = hidden.new_empty(num_kept, pools.shape[1])
        pre = {"up": pre_up} if gate is None else {"up": pre_up, "gate": torch.empty_like(pre_up)}
        for cell, start, stop in cells.spans:
            rows = slice(start, stop)
            tokens, pool = cells.token_ids[rows], pools[cell]
            states = hidden.index_select(0, tokens)
            weights = gates[rows].to(work)
            decoding = not keep and states.shape[0] <= SPARSE_CELL_ROWS
            if decoding:  # most of the pool is not chosen
                chosen = weights.any(0).nonzero().squeeze(-1)
                pool, weights = pool.index_select(0, chosen), weights.index_select(1, chosen)
            own = {}
            for name, table in tables.items():
                own[name] = pre[name][rows] if keep else hidden.new_empty(weights.shape)
                torch.mm(states, read_rows(table, pool).to(work).T, out=own[name])
            weighted = activate(activation, **own) * weights
            if not math.isfinite(weighted.sum().item()):
                # Experts that were not chosen add nothing, even if they overflow: act(0) is 0.
                for part in own.values():
                    part.masked_fill_(weights == 0, 0)
                weighted = activate(activation, **own) * weights
            if decoding and pool.numel() and down.dtype == work == torch.float32:
                # Reads the rows without a copy: a third of the time.
                ids = pool.expand(weighted.shape)
                part = F.embedding_bag(ids, down, per_sample_weights=weighted, mode="sum")
            else:
                part = weighted @ read_rows(down, pool).to(work)
            output.index_add_(0, tokens, part.to(output.dtype))
        ctx.activation, ctx.spans = activation, cells.spans
        layout, kept = (cells.token_ids, pools), (pre["up"], pre.get("gate"))
        ctx.save_for_backward(hidden, gate, up, down, gates, *layout, *kept)
        return output.to(work)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, gates, token_ids, pools, pre_up, pre_gate = ctx.saved_tensors
        activation, work = ctx.activation, hidden.dtype
        grad_output = grad_output.to(work)
        grad_hidden = torch.zeros_like(
            hidden, dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        grad_gates = torch.empty_like(gates)
        tables = {"gate": gate, "up": up, "down": down}
        neurons = pools.shape[1]
        # Frozen weights get no gradient, and no buffer of their size.
        wanted = dict(zip(tables, ctx.needs_input_grad[1:4], strict=True))
        sums = {key: RowAdder(tables[key], neurons, work) for key, want in wanted.items() if want}
        for cell, start, stop in ctx.spans:
            rows = slice(start, stop)
            tokens, pool = token_ids[rows], pools[cell]
            states = hidden.index_select(0, tokens)
            tokens_grad = grad_output.index_select(0, tokens)
            weights = gates[rows].to(work)
            grad_weighted = tokens_grad @ read_rows(down, pool).to(work).T  # [rows, neurons]
            if not math.isfinite(grad_weighted.sum().item()):
                grad_weighted.masked_fill_(weights == 0, 0)
            active, grads = _activation_backward(
                activation,
                pre_up[rows],
                pre_gate[rows] if pre_gate is not None else None,
                grad_weighted * weights,
            )
            if "down" in sums:
                sums["down"].add(pool, active * weights, tokens_grad)
            grad_gates[rows] = grad_weighted.mul_(active).to(gates.dtype)
            for key, grad in grads.items():
                if key in sums:
                    sums[key].add(pool, grad, states)
                part = grad @ read_rows(tables[key], pool).to(work)
                grad_hidden.index_add_(0, tokens, part.to(grad_hidden.dtype))
        found = [sums[key].total.to(tables[key].dtype) if key in sums else None for key in tables]
        return grad_hidden.to(work), *found, grad_gates, *(None,) * 4


def _activation_backward(
    activation: str, up: Tensor, gate: Tensor | None, grad: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """(activated values, gradients of the pre-activations by table)."""
    if gate is None:
        return PLAIN[activation](up), {"up": PLAIN_BACKWARD[activation](grad, up)}
    plain = PLAIN[GATED[activation]](gate)
    grad_gate = PLAIN_BACKWARD[GATED[activation]](grad * up, gate)
    return plain * up, {"up": grad * plain, "gate": grad_gate}


def _empty_results(hidden: Tensor, gate: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    layout, keep = CellLayout.of(rest[3]), rest[-1]
    pre = empty_pre(hidden, gate, (layout.num_rows, layout.pool_width), keep)
    return torch.empty_like(hidden), *pre


# The output [T, D], and the pre-activations of up and gate [N, neurons], empty where not kept. The
# layout's pools are neurons. Only the backward reads `counts`.
cell_experts_op = operator(
    "cell_experts(Tensor hidden, Tensor? gate, Tensor up, Tensor down, Tensor gates, "
    "Tensor[] layout, Tensor? counts, str activation, SymInt expert_size, bool keep) "
    "-> (Tensor output, Tensor pre_up, Tensor pre_gate)",
    "cell_experts_triton",
    fake=_empty_results,
    gradient=Gradient(of=("hidden", "gate", "up", "down", "gates"), saved=("pre_up", "pre_gate")),
)
