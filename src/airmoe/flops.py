"""The FLOP ledger: what one token costs, operator by operator, counted twice.

*Algorithmic* is the paper's convention: M candidates scored, K experts run. *Executed* is what our
kernels compute: where tokens share a pool, all experts of that pool. Everything follows from the
settings of a model and its routers, each of which states its own terms; no model is built.

An `Operation` is the cost of one use, by the formulas of the paper's appendix "FLOP Analysis". What
the appendix leaves open, and what we take:

- backward of a product: two products of the same size; without gradient: none
- backward of attention: 2.5 times its forward (torch's counter: 5 products after 2), not halved for
  causality
- backward of elementwise operators: multiplications by the incoming gradient; an activation's own
  cost once more
- rows of a table read by index are operands of a product, and no operator of their own
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from airmoe.config import check_count, config
from airmoe.errors import ConfigError
from airmoe.kernels.token_experts import GATED, Activation, is_gated

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

# FLOPs per element, forward and backward. Of the activations relu is ours, the others are the
# appendix's, which counts the operator aten.gelu, whatever its formula.
ELEMENTWISE = {
    "add": (1, 0),  # also jitter; the convention does not count drawing random numbers
    "rotate": (3, 3),  # x * cos + rotated x * sin, and the same back
    "mean over tokens": (1, 1),  # one token's share of a mean, and its gradient's factor
    "RMS norm": (5, 8),
    "layer norm": (7, 8),  # with weight and bias
    "silu": (3, 4),
    "gelu": (6, 7),
    "gelu_tanh": (6, 7),
    "relu": (1, 2),
}


@dataclass(frozen=True)
class Cost:
    """FLOPs of forward and backward."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True)
class Operation(Cost):
    """One use of an operator."""

    kind: Kind = "elementwise"  # products are what torch's own counter counts


def product(rows: float, width: int, *, gradients: int = 2) -> Operation:
    """One token times `rows` vectors; each gradient costs another product of that size.

    Where experts choose tokens, `rows` is a mean and may be a fraction.
    """
    return Operation(2 * rows * width, gradients * 2 * rows * width, "product")


def elementwise(name: str, size: float) -> Operation:
    """An operator of the table above."""
    forward, backward = ELEMENTWISE[name]
    return Operation(forward * size, backward * size)


def softmax(size: int, rows: int = 1) -> Operation:
    """`rows` softmaxes over `size` each."""
    return Operation(rows * (2 * size + 1), 5 * rows * size)


def log_sum_exp(size: int, rows: int = 1) -> Operation:
    """exp, sum (two per element), log; backward: the probabilities times the gradient."""
    return Operation(rows * (3 * size + 1), 2 * rows * size)


def multiply(size: float, *, gradient: bool = True) -> Operation:
    """Gradients of both factors, or of none."""
    return Operation(size, 2 * size if gradient else 0)


def scatter(size: int, *, backward: bool = False) -> Operation:
    """gather, index_add, scatter and related: one unit per affected element."""
    return Operation(size, size if backward else 0)


def normalize(size: int, rows: int, *, backward: bool = True) -> Operation:
    """x / |x|: square, sum (two per element), divide, and one root per row."""
    return Operation(rows * (4 * size + 1), 4 * rows * size if backward else 0)


def top_k(size: int, chosen: int, *, lists: int = 1, gradient: bool = False) -> Operation:
    """The best of each of `lists`; a gradient is scattered back to those chosen."""
    return Operation(lists * size * math.log2(chosen + 1), lists * chosen if gradient else 0)


@dataclass(frozen=True)
class Term:
    """An operator used `times` per token; None in a column that does not use it."""

    part: Part
    name: str
    algorithmic: Operation | None
    executed: Operation | None
    times: float = 1.0

    def cost(self, column: Column, kind: Kind | None = None) -> Cost:
        """Nothing if the operator is not used, or is of another kind."""
        operation: Operation | None = getattr(self, column)
        if operation is None or kind not in (None, operation.kind):
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
            rule = f"must be a multiple of tokens_per_micro_batch x devices = {together}"
            remedy = "Change one of them."
            raise ConfigError("workload.tokens_per_step", self.tokens_per_step, rule, remedy)

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


@dataclass(frozen=True)
class Ledger:
    """All terms of one model under one workload."""

    terms: tuple[Term, ...]

    def cost(self, column: Column, part: Part | None = None, kind: Kind | None = None) -> Cost:
        """Per token: of everything, of one part, or of products or elementwise operators only."""
        chosen = (term.cost(column, kind) for term in self.terms if part in (None, term.part))
        return sum(chosen, Cost())

    def parts(self) -> tuple[Part, ...]:
        """The parts that this model has, in the order of `PARTS`."""
        there = {term.part for term in self.terms}
        return tuple(part for part in PARTS if part in there)

    def run(self, tokens: int, column: Column = "algorithmic") -> float:
        """FLOPs of training on so many tokens."""
        return tokens * self.cost(column).total

    def to_json(self, tokens: int | None = None) -> dict[str, Any]:
        """Everything as plain numbers and text; with a run's length in tokens, also its totals."""
        run = {column: self.run(tokens, column) for column in COLUMNS} if tokens else None
        return {
            "flops_per_token": {column: _numbers(self.cost(column)) for column in COLUMNS},
            "run": run and {"tokens": tokens, "flops": run},
            "parts": {
                part: {column: _numbers(self.cost(column, part)) for column in COLUMNS}
                for part in self.parts()
            },
            "terms": [dataclasses.asdict(term) for term in self.terms],
        }


def _numbers(cost: Cost) -> dict[str, float]:
    return vars(cost) | {"total": cost.total}


def count_flops(model: Any, workload: Workload) -> Ledger:
    """The ledger of an `AirMoeConfig`: one token of training, without the optimizer."""
    num_layers, num_moe = model.num_hidden_layers, len(model.moe_layers or ())
    norm, ffn_size = elementwise("RMS norm", model.hidden_size), model.intermediate_size
    terms = [
        *_embedding(model),
        *_attention(model, workload.sequence_length),
        *_neurons("ffn", model.hidden_size, "swiglu", ffn_size, ffn_size, num_layers - num_moe),
        *(_mixtures(model, workload, num_moe) if num_moe else ()),
        both("norms", "before attention, before ffn, last", norm, 2 * num_layers + 1),
        both("head", "logits", product(model.vocab_size, model.hidden_size)),
        both("loss", "cross-entropy", softmax(model.vocab_size)),
    ]
    return Ledger(tuple(term for term in terms if term.times))


def _embedding(model: Any) -> Iterator[Term]:
    part: Part = "embedding, rotation, residuals"
    dim, num_layers = model.hidden_size, model.num_hidden_layers
    yield both(part, "embedding", scatter(dim, backward=True))
    yield both(part, "residuals", elementwise("add", dim), 2 * num_layers)
    rotated = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    yield both(part, "rotary positions", elementwise("rotate", rotated), num_layers)


def _attention(model: Any, length: int) -> Iterator[Term]:
    dim, num_layers = model.hidden_size, model.num_hidden_layers
    heads, head_dim = model.num_attention_heads, model.head_dim
    key_size = model.num_key_value_heads * head_dim
    part: Part = "attention projections"
    yield both(part, "queries", product(heads * head_dim, dim), num_layers)
    yield both(part, "keys", product(key_size, dim), num_layers)
    yield both(part, "values", product(key_size, dim), num_layers)
    yield both(part, "output", product(dim, heads * head_dim), num_layers)
    # One query token against all `length` keys and values, none of them masked.
    pairs = heads * length
    products = Operation(4 * pairs * head_dim, 10 * pairs * head_dim, "product")
    yield both("sdpa", "products", products, num_layers)
    yield both("sdpa", "softmax", Operation(2 * pairs, 5 * pairs), num_layers)


def _mixtures(model: Any, workload: Workload, num_layers: int) -> Iterator[Term]:
    """Router, experts and norm of every mixture-of-experts layer."""
    losses = RouterLosses(
        load_balance=model.load_balance_weight > 0,
        shortlist_balance=model.shortlist_balance_weight > 0,
        router_z=model.router_z_weight > 0,
    )
    layer = count_layer(
        model.router_config(), workload, model.expert_activation, model.expert_size, losses
    )
    terms = list(layer.terms)
    if model.moe_post_norm == "layernorm":
        norm = elementwise("layer norm", model.hidden_size)
        terms.append(both("norms", "after the experts", norm))
    for term in terms:
        yield dataclasses.replace(term, times=num_layers * term.times)


def count_layer(
    router: Any,
    workload: Workload,
    activation: Activation,
    expert_size: int = 1,
    losses: RouterLosses | None = None,
) -> Ledger:
    """The ledger of one layer: a router with these settings and its experts, without a norm."""
    count = router.count_flops(workload, losses or RouterLosses())
    return Ledger((*count.terms, *_experts(router.dim, expert_size, activation, count)))


def _experts(dim: int, size: int, kind: Activation, count: RouterCount) -> Iterator[Term]:
    active, executed = count.active * size, count.executed * size  # neurons
    yield from _neurons("experts", dim, kind, active, executed)
    yield Term("experts", "routing weights", multiply(active), multiply(executed))


def _neurons(
    part: Part, dim: int, kind: Activation, active: float, executed: float, times: float = 1.0
) -> Iterator[Term]:
    """A feed-forward network of so many neurons in either column."""
    gated = is_gated(kind)
    for name in ("gate", "up", "down") if gated else ("up", "down"):
        yield Term(part, name, product(active, dim), product(executed, dim), times)
    name = GATED.get(kind, kind)
    yield Term(part, name, elementwise(name, active), elementwise(name, executed), times)
    if gated:
        yield Term(part, "gate * up", multiply(active), multiply(executed), times)
