"""Terms and their sums: per token, by part, forward and backward, in both columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from airmoe.metrics.flops.convention import Kind, Operation

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


@dataclass(frozen=True)
class Ledger:
    """All terms of one model under one workload."""

    terms: tuple[Term, ...]

    def cost(self, column: Column, part: Part | None = None, kind: Kind | None = None) -> Cost:
        """Per token: of everything, of one part, or of products or elementwise operators only."""
        chosen = (
            term.cost(column)
            for term in self.terms
            if (part is None or term.part == part) and (kind is None or _kind(term, column) == kind)
        )
        return _sum(chosen)

    def parts(self) -> tuple[Part, ...]:
        """Those that this model has."""
        there = {term.part for term in self.terms}
        return tuple(part for part in PARTS if part in there)

    def run(self, tokens: int, column: Column = "algorithmic") -> float:
        """FLOPs of training on so many tokens."""
        return tokens * self.cost(column).total

    def to_json(self, tokens: int | None = None) -> dict[str, Any]:
        """Everything there is, as plain numbers and text; with a run's length, its totals."""
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


def _kind(term: Term, column: Column) -> Kind | None:
    operation: Operation | None = getattr(term, column)
    return None if operation is None else operation.kind


def _sum(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


def _numbers(cost: Cost) -> dict[str, float]:
    return {"forward": cost.forward, "backward": cost.backward, "total": cost.total}
