"""The terms of the FLOP ledger: the paper's counting convention, and what a router states.

An `Operation` holds the cost of one use: a formula for each direction and the sizes in it (the
paper's appendix "FLOP Analysis"). What the appendix leaves open, and what we take:

- backward of a product: two products of the same size; without gradient: none
- backward of attention: 2.5 times its forward (torch's counter: 5 products after 2), not halved for
  causality
- backward of elementwise operators: multiplications by the incoming gradient; an activation's own
  cost once more
- rows of a table read by index are operands of a product, and no operator of their own
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from airmoe.config import check_count, config
from airmoe.errors import ConfigError

Kind = Literal["product", "elementwise"]
Column = Literal["algorithmic", "executed"]
Part = Literal[
    "head",
    "attention projections",
    "sdpa",
    "ffn",
    "norms",
    "embedding, rotation, residuals",
    "router coarse",
    "router refresh",
    "router fine",
    "experts",
    "balance losses",
    "loss",
]
COLUMNS: tuple[Column, ...] = get_args(Column)
PARTS: tuple[Part, ...] = get_args(Part)
COARSE: Part = "router coarse"
REFRESH: Part = "router refresh"
FINE: Part = "router fine"
BALANCE: Part = "balance losses"

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
    forward: float
    backward: float


def _operation(
    operator: str, forward: str, backward: str, kind: Kind = "elementwise", **sizes: float
) -> Operation:
    """The formulas are what is computed, so that the ledger can show them."""
    names = {"log2": math.log2, **sizes}
    numbers = (eval(formula, {"__builtins__": {}}, names) for formula in (forward, backward))
    return Operation(operator, kind, sizes, forward, backward, *numbers)


def product(rows: float, width: int, *, operator: str = "aten.mm", gradients: int = 2) -> Operation:
    """One token times `rows` vectors; each gradient costs another product of that size.

    `rows` is a mean where experts choose tokens, hence no whole number.
    """
    backward = f"{gradients}*2*rows*width" if gradients else "0"
    return _operation(operator, "2*rows*width", backward, "product", rows=rows, width=width)


def attention_products(heads: int, length: int, head_dim: int) -> Operation:
    """One query token against all `length` keys and values, none of them masked."""
    return _operation(
        "aten.scaled_dot_product_attention",
        "4*heads*length*head_dim",
        "10*heads*length*head_dim",
        "product",
        heads=heads,
        length=length,
        head_dim=head_dim,
    )


def attention_softmax(heads: int, length: int) -> Operation:
    """The rest of the appendix's formula for attention."""
    operator = "aten.scaled_dot_product_attention"
    return _operation(operator, "2*heads*length", "5*heads*length", heads=heads, length=length)


def softmax(size: int, rows: int = 1) -> Operation:
    """`rows` softmaxes over `size` each."""
    return _operation("aten._softmax", "rows*(2*size + 1)", "5*rows*size", rows=rows, size=size)


def log_sum_exp(size: int, rows: int = 1) -> Operation:
    """exp, sum (two per element), log; backward: the probabilities times the gradient."""
    return _operation("aten.logsumexp", "rows*(3*size + 1)", "2*rows*size", rows=rows, size=size)


def add(size: int) -> Operation:
    """Also of jitter; what draws it is no arithmetic of the convention."""
    return _operation("aten.add", "1*size", "0*size", size=size)


def multiply(size: float, *, gradient: bool = True) -> Operation:
    """Gradients of both factors, or of none."""
    return _operation("aten.mul", "1*size", "2*size" if gradient else "0*size", size=size)


def activation(name: str, size: float) -> Operation:
    cost = ACTIVATION_COSTS[name]
    return _operation(f"aten.{name}", f"{cost}*size", f"{cost + 1}*size", size=size)


def rotate(size: int) -> Operation:
    """Rotary embedding: x * cos + rotated x * sin, and the same back."""
    return _operation("aten.mul, aten.mul, aten.add", "3*size", "3*size", size=size)


def scatter(size: int, *, backward: bool = False) -> Operation:
    """gather, index_add, scatter and related: one unit per affected element."""
    return _operation("aten.index_add", "1*size", "1*size" if backward else "0*size", size=size)


def mean_over_tokens(size: int) -> Operation:
    """One token's share of a mean, and its gradient's factor."""
    return _operation("aten.mean", "1*size", "1*size", size=size)


def normalize(size: int, rows: int, *, backward: bool = True) -> Operation:
    """x / |x|: square, sum (two per element), divide, and one root per row."""
    formula = "4*rows*size" if backward else "0"
    operator = "aten.linalg_vector_norm, aten.div"
    return _operation(operator, "rows*(4*size + 1)", formula, rows=rows, size=size)


def rms_norm(size: int) -> Operation:
    return _operation("aten.rms_norm", "5*size", "8*size", size=size)


def layer_norm(size: int) -> Operation:
    """With weight and bias."""
    return _operation("aten.native_layer_norm", "7*size", "8*size", size=size)


def top_k(size: int, chosen: int, *, lists: int = 1, gradient: bool = False) -> Operation:
    """The best of each of `lists`; a gradient is scattered back to those chosen."""
    forward, backward = "lists*size*log2(chosen + 1)", "lists*chosen" if gradient else "0"
    return _operation("aten.topk", forward, backward, lists=lists, size=size, chosen=chosen)


@dataclass(frozen=True)
class Cost:
    """FLOPs per token."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True)
class Term:
    """An operator used `times` per token; None in the column that does without it."""

    part: Part
    name: str
    algorithmic: Operation | None
    executed: Operation | None
    times: float = 1.0

    def cost(self, column: Column) -> Cost:
        operation: Operation | None = getattr(self, column)
        if operation is None:
            return Cost()
        return Cost(self.times * operation.forward, self.times * operation.backward)


def both(part: Part, name: str, operation: Operation, times: float = 1.0) -> Term:
    """A term that the algorithm and our kernels share."""
    return Term(part, name, operation, operation, times)


@config
class Workload:
    """One optimizer step. Work done once per step or micro-batch is shared by its tokens."""

    label: ClassVar[str] = "workload"

    sequence_length: int
    tokens_per_step: int  # the effective batch, over all devices and micro-batches
    tokens_per_micro_batch: int  # of one device
    devices: int = 1  # each refreshes its own shortlists

    def check(self) -> None:
        for name in ("sequence_length", "tokens_per_step", "tokens_per_micro_batch", "devices"):
            check_count(f"workload.{name}", getattr(self, name))
        together = self.tokens_per_micro_batch * self.devices
        if self.tokens_per_step % together:
            raise ConfigError(
                "workload.tokens_per_step",
                self.tokens_per_step,
                f"must be a multiple of tokens_per_micro_batch x devices = {together}",
                "Change one of them.",
            )

    @property
    def steps_per_token(self) -> float:
        """Of all devices: each does for itself what is done once per step."""
        return self.devices / self.tokens_per_step

    @property
    def micro_batches_per_token(self) -> float:
        return 1 / self.tokens_per_micro_batch


@dataclass(frozen=True)
class RouterLosses:
    """Which of the router losses have a weight, and so are computed."""

    load_balance: bool = False
    shortlist_balance: bool = False
    router_z: bool = False


@dataclass(frozen=True)
class RouterCount:
    """A router's own terms, and how many experts a token then has."""

    terms: tuple[Term, ...]
    active: float  # K
    executed: float  # in cells: all of the pool
    experts_operator: str
