"""The four suites: what each compares, made from one run with AIR."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from airmoe.errors import ConfigError
from airmoe.experiments.fairness import ALL_RULES, Rule
from airmoe.model import AirMoeConfig, with_method
from airmoe.routers import AirRouter
from airmoe.training import RunConfig, model_options

Variants = dict[str, RunConfig]

MAIN = ("air", "peer", "hierarchical", "exact", "coarse")
ABLATIONS: dict[str, dict[str, Any]] = {  # options of the router
    "air": {},
    "no_projection": {"normalize_centroids": False},
    "static": {"codebook": "static"},
    "expert_choice": {"gate": "expert_choice"},
    "euclidean": {"codebook": "euclidean"},
}
# Of the model. The paper's expert choice stands in the place of load balancing.
ABLATED_MODELS: dict[str, dict[str, Any]] = {"expert_choice": {"load_balance_weight": 0.0}}
# L(Q) = a / Q^b + c has three constants: fewer points than this would fit whatever they say.
FEWEST_GRANULARITIES = 5


@dataclass(frozen=True)
class Suite:
    """A comparison: its variants of a run with AIR, and the rules that keep it fair."""

    variants: Callable[[RunConfig], Variants]
    rules: Sequence[Rule]


def main_variants(base: RunConfig) -> Variants:
    """AIR and its rivals at equal budgets."""
    return {name: method_variant(base, name) for name in MAIN}


def method_variant(base: RunConfig, method: str) -> RunConfig:
    """The same run with another way of routing."""
    return with_model(base, with_method(model_of(base), method))


def ablation_variants(base: RunConfig) -> Variants:
    """AIR with one of its parts taken away or replaced."""
    model = model_of(base)
    return {
        name: with_model(base, _routed(model, options, **ABLATED_MODELS.get(name, {})))
        for name, options in ABLATIONS.items()
    }


def granularity_variants(base: RunConfig) -> Variants:
    """The same neurons in fewer and larger experts: Q = d_standard / d_expert (Eq. 3).

    From Q = 1, the coarse model, to the run's own Q = K. Active and all neurons stay equal, and so
    do candidates per active expert and the number of codewords: every expert is in as many
    shortlists as before, so only the granularity changes. Where codewords and candidates together
    are no fewer than the experts, two stages save nothing and all experts are scored instead.
    """
    model = model_of(base)
    experts, active = model.num_experts, model.num_experts_per_tok
    if experts % active:
        raise ConfigError(
            "model.num_experts",
            experts,
            f"must be a multiple of num_experts_per_tok = {active} in this suite, because coarser "
            "experts must have as many neurons in all",
            "Change one of them.",
        )
    return {
        f"q{level}": with_model(base, _at_granularity(model, level))
        for level in _granularities(active)
    }


def codebook_variants(base: RunConfig) -> Variants:
    """Half, the same and twice the codewords and shortlists."""
    model = model_of(base)
    router = _air(model)
    variants: Variants = {}
    for codewords, size in product(_around(router.num_codewords), _around(router.shortlist_size)):
        if router.top_k <= size <= router.num_experts:
            options = {"num_codewords": codewords, "shortlist_size": size}
            variants[f"g{codewords}-m{size}"] = with_model(base, _routed(model, options))
    return variants


WITHOUT_STRUCTURE = tuple(
    rule for rule in ALL_RULES if rule not in (Rule.STRUCTURE, Rule.CANDIDATES)
)
SUITES: dict[str, Suite] = {
    "main": Suite(main_variants, ALL_RULES),
    "ablations": Suite(ablation_variants, ALL_RULES),
    # These vary the sizes of the two stages by design.
    "granularity": Suite(granularity_variants, WITHOUT_STRUCTURE),
    "codebook": Suite(codebook_variants, WITHOUT_STRUCTURE),
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
    changed = _routed(
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


def model_of(base: RunConfig) -> AirMoeConfig:
    model = base.model_config(vocab_size=2, eos_id=1)  # any vocabulary: it is not kept
    if model.router != "air":
        raise ConfigError(
            "model.router",
            model.router,
            "must be 'air', because the other methods are made from it",
            "Leave it out.",
        )
    return model


def _air(model: AirMoeConfig) -> AirRouter.Config:
    router = model.router_config()
    assert isinstance(router, AirRouter.Config)
    return router


def _routed(model: AirMoeConfig, options: dict[str, Any], **fields: Any) -> AirMoeConfig:
    """A checked copy with other options of AIR, and other fields of the model."""
    changed = copy.deepcopy(model)
    changed.router_options = {**_sizes(model), **model.router_options, **options}
    for name, value in fields.items():
        setattr(changed, name, value)
    changed.check()
    return changed


def _sizes(model: AirMoeConfig) -> dict[str, int]:
    """What the router derived from the number of experts must not follow when that changes."""
    router = _air(model)
    return {"num_codewords": router.num_codewords, "shortlist_size": router.shortlist_size}


def with_model(base: RunConfig, model: AirMoeConfig) -> RunConfig:
    options = model_options(model)
    if "vocab_size" in base.model:
        options["vocab_size"] = base.model["vocab_size"]
    return dataclasses.replace(base, model=options)
