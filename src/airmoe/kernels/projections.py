"""What follows joined projections: SwiGLU after gate and up, rotary heads after q, k and v.

One product computes several projections of the same input, side by side. The operators here write
the gradients side by side as well, in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe.kernels.backend import Gradient, operator, use_triton, with_kernel

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values [B, L, heads, W]


@with_kernel("projections_triton", gradient=Gradient(of=("joined",)))
def swiglu(joined: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side: [.., 2 F] -> [.., F]."""
    gate, up = joined.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_heads(joined: Tensor, cos: Tensor, sin: Tensor, num_kv_heads: int) -> Heads:
    """Queries and keys with Llama's rotary positions, and values, in the dtype of `joined`.

    joined [B, L, (H + 2 H_kv) W] has them side by side; cos and sin [1 or B, L, W] are constants.
    """
    if use_triton(joined, cos, sin):
        return rotary_heads_op(joined, cos, sin, num_kv_heads)
    heads = joined.unflatten(-1, (-1, cos.shape[-1]))
    turned, values = heads.tensor_split([heads.shape[2] - num_kv_heads], dim=2)
    first, second = turned.chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    turned = turned * cos.unsqueeze(2) + across * sin.unsqueeze(2)
    queries, keys = turned.to(joined.dtype).tensor_split([-num_kv_heads], dim=2)
    return queries, keys, values


def _empty_heads(joined: Tensor, cos: Tensor, _: Tensor, num_kv_heads: int) -> Heads:
    batch, length, width = *joined.shape[:2], cos.shape[-1]
    num_heads = joined.shape[2] // width - 2 * num_kv_heads
    queries = joined.new_empty(batch, length, num_heads, width)
    keys, values = (joined.new_empty(batch, length, num_kv_heads, width) for _ in range(2))
    return queries, keys, values


def _empty_joined(queries: Tensor, keys: Tensor, *_: Tensor) -> Tensor:
    num_heads = queries.shape[2] + 2 * keys.shape[2]
    return queries.new_empty(*queries.shape[:2], num_heads * queries.shape[3])


rotary_heads_op = operator(
    "rotary_heads(Tensor joined, Tensor cos, Tensor sin, SymInt num_kv_heads) "
    "-> (Tensor, Tensor, Tensor)",
    "projections_triton",
    fake=_empty_heads,
)
_joined_gradient_op = operator(
    "rotary_heads_backward(Tensor grad_queries, Tensor grad_keys, Tensor grad_values, Tensor cos, "
    "Tensor sin) -> Tensor",
    "projections_triton",
    fake=_empty_joined,
)


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: Heads) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _joined_gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return _joined_gradient_op(*grads, *ctx.saved_tensors), None, None, None


rotary_heads_op.register_autograd(_joined_gradient, setup_context=_save_angles)
