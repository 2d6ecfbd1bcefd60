"""The paper's counting convention (its appendix "FLOP Analysis"), one function per operator.

An `Operation` holds the cost of one use, its formulas as text and the sizes in them: evaluating the
text gives the numbers (a test does). What the appendix leaves open, and what we take:

- backward of a product: two products of the same size; without gradient: none
- backward of attention: 2.5 times its forward (torch's counter: 5 products after 2), not halved for
  causality
- backward of elementwise operators: multiplications by the incoming gradient; an activation's own
  cost once more
- rows of a table read by index are operands of a product, and no operator of their own
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from torch.utils.flop_counter import mm_flop, sdpa_backward_flop_count, sdpa_flop_count

Kind = Literal["product", "elementwise"]

# Per element; relu is ours, the others the appendix's, which counts the operator aten.gelu,
# whatever its formula.
ACTIVATION_COSTS = {"silu": 3, "gelu": 6, "gelu_tanh": 6, "relu": 1}


@dataclass(frozen=True)
class Operation:
    """One use of an operator."""

    operator: str
    kind: Kind  # products are what torch's own counter counts
    sizes: dict[str, float]
    forward_formula: str  # in the names of `sizes`
    backward_formula: str
    forward: float = field(kw_only=True)
    backward: float = field(kw_only=True)


def product(rows: float, width: int, *, operator: str = "aten.mm", gradients: int = 2) -> Operation:
    """One token times `rows` vectors; each gradient costs another product of that size.

    `rows` is a mean where experts choose tokens, hence no whole number.
    """
    each = mm_flop((1, width), (width, rows))
    return Operation(
        operator,
        "product",
        {"rows": rows, "width": width},
        "2*rows*width",
        f"{gradients}*2*rows*width" if gradients else "0",
        forward=each,
        backward=gradients * each,
    )


def attention_products(heads: int, length: int, head_dim: int) -> Operation:
    """One query token against all `length` keys and values, none of them masked."""
    query, keys = (1, heads, 1, head_dim), (1, heads, length, head_dim)
    return Operation(
        "aten.scaled_dot_product_attention",
        "product",
        {"heads": heads, "length": length, "head_dim": head_dim},
        "4*heads*length*head_dim",
        "10*heads*length*head_dim",
        forward=sdpa_flop_count(query, keys, keys),
        backward=sdpa_backward_flop_count(query, query, keys, keys),
    )


def attention_softmax(heads: int, length: int) -> Operation:
    """The rest of the appendix's formula for attention."""
    return Operation(
        "aten.scaled_dot_product_attention",
        "elementwise",
        {"heads": heads, "length": length},
        "2*heads*length",
        "5*heads*length",
        forward=2 * heads * length,
        backward=5 * heads * length,
    )


def softmax(size: int, rows: int = 1) -> Operation:
    """`rows` softmaxes over `size` each."""
    return Operation(
        "aten._softmax",
        "elementwise",
        {"rows": rows, "size": size},
        "rows*(2*size + 1)",
        "5*rows*size",
        forward=rows * (2 * size + 1),
        backward=5 * rows * size,
    )


def log_sum_exp(size: int, rows: int = 1) -> Operation:
    """exp, sum (two per element), log; backward: the probabilities times the gradient."""
    return Operation(
        "aten.logsumexp",
        "elementwise",
        {"rows": rows, "size": size},
        "rows*(3*size + 1)",
        "2*rows*size",
        forward=rows * (3 * size + 1),
        backward=2 * rows * size,
    )


def add(size: int) -> Operation:
    """Also of jitter; what draws it is no arithmetic of the convention."""
    return _elementwise("aten.add", size, 1, 0)


def multiply(size: float, *, gradient: bool = True) -> Operation:
    """Gradients of both factors, or of none."""
    return _elementwise("aten.mul", size, 1, 2 if gradient else 0)


def activation(name: str, size: float) -> Operation:
    cost = ACTIVATION_COSTS[name]
    return _elementwise(f"aten.{name}", size, cost, cost + 1)


def rotate(size: int) -> Operation:
    """Rotary embedding: x * cos + rotated x * sin, and the same back."""
    return _elementwise("aten.mul, aten.mul, aten.add", size, 3, 3)


def scatter(size: int, *, backward: bool = False) -> Operation:
    """gather, index_add, scatter and related: one unit per affected element."""
    return _elementwise("aten.index_add", size, 1, 1 if backward else 0)


def mean_over_tokens(size: int) -> Operation:
    """One token's share of a mean, and its gradient's factor."""
    return _elementwise("aten.mean", size, 1, 1)


def normalize(size: int, rows: int, *, backward: bool = True) -> Operation:
    """x / |x|: square, sum (two per element), divide, and one root per row."""
    return Operation(
        "aten.linalg_vector_norm, aten.div",
        "elementwise",
        {"rows": rows, "size": size},
        "rows*(4*size + 1)",
        "4*rows*size" if backward else "0",
        forward=rows * (4 * size + 1),
        backward=4 * rows * size if backward else 0,
    )


def rms_norm(size: int) -> Operation:
    return _elementwise("aten.rms_norm", size, 5, 8)


def layer_norm(size: int) -> Operation:
    """With weight and bias."""
    return _elementwise("aten.native_layer_norm", size, 7, 8)


def top_k(size: int, chosen: int, *, lists: int = 1, gradient: bool = False) -> Operation:
    """The best of each of `lists`; a gradient is scattered back to those chosen."""
    return Operation(
        "aten.topk",
        "elementwise",
        {"lists": lists, "size": size, "chosen": chosen},
        "lists*size*log2(chosen + 1)",
        "lists*chosen" if gradient else "0",
        forward=lists * size * math.log2(chosen + 1),
        backward=lists * chosen if gradient else 0,
    )


def _elementwise(operator: str, size: float, forward: int, backward: int) -> Operation:
    return Operation(
        operator,
        "elementwise",
        {"size": size},
        f"{forward}*size",
        f"{backward}*size",
        forward=forward * size,
        backward=backward * size,
    )
