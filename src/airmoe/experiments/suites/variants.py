"""The four suites: what each compares, made from one run with AIR."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from airmoe.errors import ConfigError
from airmoe.experiments.fairness import ALL_RULES, Rule
from airmoe.model import AirMoeConfig, with_method
from airmoe.routers import AirRouter
from airmoe.training import RunConfig
from airmoe.training.presets import air_model, method_variant, with_model

Variants = dict[str, RunConfig]

MAIN = ("air", "peer", "hierarchical", "exact", "coarse")
# Options of the router, and of the model: the paper's expert choice replaces load balancing.
ABLATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "air": ({}, {}),
    "no_projection": ({"normalize_centroids": False}, {}),
    "static": ({"codebook": "static"}, {}),
    "expert_choice": ({"gate": "expert_choice"}, {"load_balance_weight": 0.0}),
    "euclidean": ({"codebook": "euclidean"}, {}),
}
# L(Q) = a / Q^b + c has three constants, which fit almost any few points.
FEWEST_GRANULARITIES = 5


def ablation_variants(base: RunConfig) -> Variants:
    """AIR with one of its parts removed or replaced."""
    model = air_model(base)
    return {
        name: with_model(base, _changed(model, options, **fields))
        for name, (options, fields) in ABLATIONS.items()
    }


def granularity_variants(base: RunConfig) -> Variants:
    """The same neurons in fewer and larger experts: Q = d_standard / d_expert (Eq. 3).

    From Q = 1, the coarse model, to the run's own Q = K. Active and all neurons stay equal, and so
    do candidates per active expert and the number of codewords: every expert is in as many
    shortlists as before, so only the granularity changes. Where codewords and candidates together
    are no fewer than the experts, two stages save nothing and all experts are scored instead.
    """
    model = air_model(base)
    experts, active = model.num_experts, model.num_experts_per_tok
    if experts % active:
        rule = (
            f"must be a multiple of num_experts_per_tok = {active} in this suite, because coarser "
            "experts must have as many neurons in all"
        )
        raise ConfigError("model.num_experts", experts, rule, "Change one of them.")
    return {
        f"q{level}": with_model(base, _at_granularity(model, level))
        for level in _granularities(active)
    }


def codebook_variants(base: RunConfig) -> Variants:
    """Half, the same and twice the codewords and shortlists."""
    model = air_model(base)
    router = _air(model)
    sizes = product(_around(router.num_codewords), _around(router.shortlist_size))
    return {
        f"g{codewords}-m{size}": with_model(
            base, _changed(model, {"num_codewords": codewords, "shortlist_size": size})
        )
        for codewords, size in sizes
        if router.top_k <= size <= router.num_experts
    }


@dataclass(frozen=True)
class Suite:
    """A comparison: its variants of a run with AIR, and the rules that keep it fair."""

    variants: Callable[[RunConfig], Variants]
    rules: Sequence[Rule] = ALL_RULES


# Granularity and codebook vary the sizes of the two stages by design.
WITHOUT_SIZES = tuple(rule for rule in Rule if rule not in (Rule.STRUCTURE, Rule.CANDIDATES))
SUITES = {
    "main": Suite(lambda base: {name: method_variant(base, name) for name in MAIN}),
    "ablations": Suite(ablation_variants),
    "granularity": Suite(granularity_variants, WITHOUT_SIZES),
    "codebook": Suite(codebook_variants, WITHOUT_SIZES),
}


def _granularities(active: int) -> list[int]:
    """1, 4, 16 ... up to K; by factors of 2 where that would be too few points for a fit."""
    for factor in (4, 2):
        powers = [factor**power for power in range(active.bit_length())]
        levels = sorted({level for level in powers if active % level == 0} | {active})
        if len(levels) >= FEWEST_GRANULARITIES:
            break
    return levels


def _at_granularity(model: AirMoeConfig, level: int) -> AirMoeConfig:
    if level == 1:
        return with_method(model, "coarse")
    router, active = _air(model), model.num_experts_per_tok
    shortlist_size = math.ceil(router.shortlist_size * level / active)
    changed = _changed(
        model,
        {"shortlist_size": shortlist_size},
        num_experts=model.num_experts * level // active,
        num_experts_per_tok=level,
        expert_size=model.expert_size * active // level,
    )
    if router.num_codewords + shortlist_size < changed.num_experts:
        return changed
    exact = with_method(changed, "exact")
    if exact.expert_size > 1:  # each expert one product with its tokens, no row fetched per token
        exact.experts = "coarse"
    return exact


def _around(count: int) -> list[int]:
    return sorted({max(1, count // 2), count, 2 * count})


def _air(model: AirMoeConfig) -> AirRouter.Config:
    router = model.router_config()
    assert isinstance(router, AirRouter.Config)
    return router


def _changed(model: AirMoeConfig, options: dict[str, Any], **fields: Any) -> AirMoeConfig:
    """A checked copy with other options of AIR, and other fields of the model.

    Sizes that AIR derived from the number of experts do not follow when that changes.
    """
    router, changed = _air(model), copy.deepcopy(model)
    sizes = {"num_codewords": router.num_codewords, "shortlist_size": router.shortlist_size}
    changed.router_options = {**sizes, **model.router_options, **options}
    for name, value in fields.items():
        setattr(changed, name, value)
    changed.check()
    return changed
