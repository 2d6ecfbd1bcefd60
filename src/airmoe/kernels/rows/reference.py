"""Sparse products over per-row id lists without a [rows, ids, D] tensor.

dot, weighted sum and scatter are each other's gradients:
  dot[q, j]     = <queries[q], table[ids[q, j]]>
  total[q]      = sum_j weights[q, j] * table[ids[q, j]]
  scattered[i]  = sum over all (q, j) with ids[q, j] = i of weights[q, j] * rows[q]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 1 << 17  # gathered elements held at once in `dot`: half a megabyte stays in cache


def dot(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """queries [Q, D], table [R, D], ids [Q, J] -> [Q, J]."""
    result = torch.empty(ids.shape, dtype=queries.dtype, device=queries.device)
    step = max(1, CHUNK_ELEMENTS // max(1, ids.shape[1] * queries.shape[1]))
    for start in range(0, ids.shape[0], step):
        part = slice(start, start + step)
        rows = table.index_select(0, ids[part].flatten()).to(queries.dtype)
        rows = rows.view(*ids[part].shape, queries.shape[1])  # [step, J, D]
        result[part] = torch.bmm(rows, queries[part].unsqueeze(-1)).squeeze(-1)
    return result


def total(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """weights [Q, J], table [R, D], ids [Q, J] -> [Q, D]."""
    if ids.numel() == 0:
        return torch.zeros(ids.shape[0], table.shape[1], dtype=table.dtype, device=table.device)
    return F.embedding_bag(ids, table, per_sample_weights=weights.to(table.dtype), mode="sum")


def scatter(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    """weights [Q, J], rows [Q, D], ids [Q, J] -> [num_out, D], summed in a fixed order."""
    if ids.numel() == 0:
        return torch.zeros(num_out, rows.shape[1], dtype=rows.dtype, device=rows.device)
    targets, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(num_out, device=ids.device)
    return F.embedding_bag(
        order.div(ids.shape[1], rounding_mode="floor"),
        rows,
        torch.searchsorted(targets, bounds),
        per_sample_weights=weights.flatten()[order].to(rows.dtype),
        mode="sum",
    )
