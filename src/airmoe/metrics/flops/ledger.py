"""The ledger: terms of a language model (Llama's decoder, with experts in some of its layers)
and their sums, per token, by part, forward and backward, in both columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from airmoe.flops import (
    COLUMNS,
    PARTS,
    Column,
    Cost,
    Kind,
    Operation,
    Part,
    RouterCount,
    RouterLosses,
    Term,
    Workload,
    activation,
    add,
    attention_products,
    attention_softmax,
    both,
    layer_norm,
    multiply,
    product,
    rms_norm,
    rotate,
    scatter,
    softmax,
)
from airmoe.kernels.token_experts import GATED, Activation, is_gated
from airmoe.moe.layer import PostNorm
from airmoe.routers import RouterConfig


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
        return sum(chosen, Cost())

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


def _numbers(cost: Cost) -> dict[str, float]:
    return {"forward": cost.forward, "backward": cost.backward, "total": cost.total}


class LanguageModelConfig(Protocol):
    """What the ledger reads of `AirMoeConfig` (which stands above this package)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    moe_layers: list[int] | None
    moe_post_norm: PostNorm
    expert_activation: Activation
    expert_size: int
    load_balance_weight: float
    shortlist_balance_weight: float
    router_z_weight: float

    def router_config(self) -> RouterConfig: ...


def count_flops(config: LanguageModelConfig, workload: Workload) -> Ledger:
    """Per token of training; the optimizer's own arithmetic is in no column."""
    num_layers, num_moe = config.num_hidden_layers, len(config.moe_layers or ())
    terms = [
        *_embedding(config),
        *_attention(config, workload.sequence_length),
        *_feed_forward(config.hidden_size, config.intermediate_size, num_layers - num_moe),
        *(_mixtures(config, workload, num_moe) if num_moe else ()),
        both("norms", "before attention, before ffn, last", rms_norm(config.hidden_size),
             2 * num_layers + 1),
        both("head", "logits", product(config.vocab_size, config.hidden_size)),
        both("loss", "cross-entropy", softmax(config.vocab_size)),
    ]  # fmt: skip
    return Ledger(tuple(term for term in terms if term.times))


def _embedding(config: LanguageModelConfig) -> Iterator[Term]:
    part, dim, num_layers = (
        "embedding, rotation, residuals",
        config.hidden_size,
        config.num_hidden_layers,
    )
    yield both(part, "embedding", scatter(dim, backward=True))
    yield both(part, "residuals", add(dim), 2 * num_layers)
    heads, key_heads, head_dim = _heads(config)
    rotated = (heads + key_heads) * head_dim
    yield both(part, "rotary positions", rotate(rotated), num_layers)


def _attention(config: LanguageModelConfig, length: int) -> Iterator[Term]:
    dim, num_layers = config.hidden_size, config.num_hidden_layers
    heads, key_heads, head_dim = _heads(config)
    part = "attention projections"
    yield both(part, "queries", product(heads * head_dim, dim), num_layers)
    yield both(part, "keys", product(key_heads * head_dim, dim), num_layers)
    yield both(part, "values", product(key_heads * head_dim, dim), num_layers)
    yield both(part, "output", product(dim, heads * head_dim), num_layers)
    yield both("sdpa", "products", attention_products(heads, length, head_dim), num_layers)
    yield both("sdpa", "softmax", attention_softmax(heads, length), num_layers)


def _heads(config: LanguageModelConfig) -> tuple[int, int, int]:
    """Query heads, key and value heads, their width; Llama's config fills in what was left out."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


def _feed_forward(dim: int, size: int, num_layers: int) -> Iterator[Term]:
    for name in ("gate", "up"):
        yield both("ffn", name, product(size, dim), num_layers)
    yield both("ffn", "down", product(dim, size), num_layers)
    yield both("ffn", "silu", activation("silu", size), num_layers)
    yield both("ffn", "gate * up", multiply(size), num_layers)


def _mixtures(config: LanguageModelConfig, workload: Workload, num_layers: int) -> Iterator[Term]:
    """Router, experts and norm of every mixture-of-experts layer."""
    losses = RouterLosses(
        load_balance=config.load_balance_weight > 0,
        shortlist_balance=config.shortlist_balance_weight > 0,
        router_z=config.router_z_weight > 0,
    )
    layer = count_layer(
        config.router_config(), workload, config.expert_activation, config.expert_size, losses
    )
    terms = list(layer.terms)
    if config.moe_post_norm == "layernorm":
        terms.append(both("norms", "after the experts", layer_norm(config.hidden_size)))
    for term in terms:
        yield dataclasses.replace(term, times=num_layers * term.times)


def count_layer(
    config: RouterConfig,
    workload: Workload,
    activation: Activation,
    expert_size: int = 1,
    losses: RouterLosses | None = None,
) -> Ledger:
    """Per token of one layer: router and experts of so many neurons, without a norm."""
    router = config.count_flops(workload, losses or RouterLosses())
    return Ledger((*router.terms, *_experts(config.dim, expert_size, activation, router)))


def _experts(dim: int, size: int, kind: Activation, router: RouterCount) -> Iterator[Term]:
    active, executed = router.active * size, router.executed * size  # neurons
    gated = is_gated(kind)
    for name in ("gate", "up", "down") if gated else ("up", "down"):
        ours = product(executed, dim, operator=router.experts_operator)
        yield Term("experts", name, product(active, dim), ours)
    name = GATED.get(kind, kind)
    yield Term("experts", name, activation(name, active), activation(name, executed))
    if gated:
        yield Term("experts", "gate * up", multiply(active), multiply(executed))
    yield Term("experts", "routing weights", multiply(active), multiply(executed))
