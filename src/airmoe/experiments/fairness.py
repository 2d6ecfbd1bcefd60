"""When runs may be compared: the paper's rules (its appendix on MoE configurations) as checks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from airmoe.errors import ConfigError
from airmoe.model import AirMoeConfig
from airmoe.routers import AirRouter, HierarchicalRouter, PeerRouter
from airmoe.training import MODEL_OPTIONS, RunConfig


class Rule(StrEnum):
    """What must hold within a run, or be equal between runs."""

    FEASIBLE = "intra-method constraints"
    ACTIVE = "A, equal active experts"
    STRUCTURE = "B, equal coarse structure"
    CANDIDATES = "C, equal candidate pool"
    PARAMETERS = "D, coarse equivalence"
    REST = "E, everything else equal"


ALL_RULES = tuple(Rule)

# Of the model, what the other rules look after or what belongs to one router only.
ROUTING_OPTIONS = frozenset(
    {
        "router",
        "router_options",
        "experts",
        "num_experts",
        "num_experts_per_tok",
        "expert_size",
        "shortlist_balance_weight",
    }
)
# Of the recipe, what only says how closely a run is watched, and the seed, which has its own check.
WATCHING_OPTIONS = frozenset(
    {"seed", "log_every", "save_every", "keep_checkpoints", "quality_tokens", "track"}
)


@dataclass(frozen=True)
class Violation:
    """A rule, the runs that break it with what they have, and what to do."""

    rule: Rule
    what: str
    values: Mapping[str, str]  # run -> what it has
    remedy: str

    def __str__(self) -> str:
        """One line; runs that have the same stand together."""
        runs: dict[str, list[str]] = {}
        for name, value in self.values.items():
            runs.setdefault(value, []).append(name)
        found = "; ".join(f"{value} in {', '.join(names)}" for value, names in runs.items())
        return f"{self.rule}: {self.what} {found}. {self.remedy}"


@dataclass(frozen=True)
class Amount:
    """What a run has: the number to compare and how it comes about."""

    number: object
    text: str


Models = Mapping[str, AirMoeConfig]


def violations(runs: Mapping[str, RunConfig], rules: Sequence[Rule] = ALL_RULES) -> list[Violation]:
    """Everything that makes it unfair to compare these runs; empty when nothing does.

    Runs whose model cannot be built are named by the first rule and left out of the others.
    """
    models: dict[str, AirMoeConfig] = {}
    found: list[Violation] = []
    for name, run in runs.items():
        try:
            models[name] = run.model_config(vocab_size=2, eos_id=1)
        except ConfigError as error:
            if Rule.FEASIBLE in rules:
                values = {name: f"{error.value!r} ({error.rule})"}
                found.append(Violation(Rule.FEASIBLE, error.field, values, error.remedy))
    for rule in rules:
        if rule in CHECKS:
            found += CHECKS[rule](models)
    if Rule.REST in rules:
        found += _unequal_rest({name: runs[name] for name in models}, models)
    return found


def check_fair(runs: Mapping[str, RunConfig], rules: Sequence[Rule] = ALL_RULES) -> None:
    """Raise one `ConfigError` that names every violation."""
    found = violations(runs, rules)
    if found:
        names = ", ".join(runs)
        remedy = " ".join(str(violation) for violation in found)
        raise ConfigError("suite", names, "must be a fair comparison", remedy)


def is_coarse(model: AirMoeConfig) -> bool:
    """The standard mixture: each token goes to one large expert."""
    return model.experts == "coarse" and model.num_experts_per_tok == 1


def _active(models: Models) -> Iterator[Violation]:
    """Rule A. Neurons decide, so that one expert of K neurons equals K experts of one."""

    def amount(model: AirMoeConfig) -> Amount:
        count, size = model.num_experts_per_tok, model.expert_size
        router = model.router_config()
        if isinstance(router, PeerRouter.Config):
            each = f"{router.num_heads} heads x {count // router.num_heads}"
        else:
            each = str(count)
        return Amount(count * size, f"{each} x {size} = {count * size}")

    remedy = (
        "Give all the same model.num_experts_per_tok (PEER: heads x experts per head, coarse: 1 "
        "expert of K x size neurons)."
    )
    amounts = {name: amount(model) for name, model in models.items()}
    yield from _unequal(Rule.ACTIVE, "active experts x neurons", amounts, remedy)


def _structure(models: Models) -> Iterator[Violation]:
    """Rule B, of the routers with two stages."""
    amounts: dict[str, Amount] = {}
    for name, model in models.items():
        router = model.router_config()
        if isinstance(router, AirRouter.Config):
            amounts[name] = Amount(router.num_codewords, f"{router.num_codewords} codewords")
        elif isinstance(router, HierarchicalRouter.Config):
            amounts[name] = Amount(router.num_clusters, f"{router.num_clusters} clusters")
    remedy = "Give all as many codewords (num_codewords) as clusters (num_clusters)."
    yield from _unequal(Rule.STRUCTURE, "coarse stages of", amounts, remedy)


def _candidates(models: Models) -> Iterator[Violation]:
    """Rule C. Exempt: exact and coarse routing score everything, PEER has its own structure."""
    amounts: dict[str, Amount] = {}
    for name, model in models.items():
        router = model.router_config()
        if isinstance(router, AirRouter.Config):
            pool, text = router.shortlist_size, str(router.shortlist_size)
        elif isinstance(router, HierarchicalRouter.Config):
            each = router.num_experts // router.num_clusters
            pool = router.num_selected_clusters * each
            text = f"{router.num_selected_clusters} x {each} = {pool}"
        else:
            continue
        amounts[name] = Amount(pool, text)
    remedy = (
        "Make shortlist_size equal num_selected_clusters x num_experts / num_clusters "
        "(exact routing and PEER are exempt)."
    )
    yield from _unequal(Rule.CANDIDATES, "candidates scored per token:", amounts, remedy)


def _parameters(models: Models) -> Iterator[Violation]:
    """Rule D; and granular models among themselves have the same number of neurons."""
    granular = {name: model for name, model in models.items() if not is_coarse(model)}
    neurons = {
        name: Amount(
            model.num_experts * model.expert_size,
            f"{model.num_experts} experts x {model.expert_size}",
        )
        for name, model in granular.items()
    }
    remedy = "Give all the same model.num_experts x model.expert_size."
    yield from _unequal(Rule.PARAMETERS, "neurons of", neurons, remedy)
    for name, model in models.items():
        if is_coarse(model):
            yield from _not_equivalent(name, model, granular)


def _not_equivalent(name: str, coarse: AirMoeConfig, granular: Models) -> Iterator[Violation]:
    """The first granular model to which a coarse one is no equivalent, if any."""
    for other, model in granular.items():
        active, size = model.num_experts_per_tok, model.expert_size
        experts, neurons = math.ceil(model.num_experts / active), active * size
        if (coarse.num_experts, coarse.expert_size) != (experts, neurons):
            values = {
                name: f"{coarse.num_experts} experts x {coarse.expert_size}",
                other: f"{model.num_experts} experts x {size}, {active} active",
            }
            remedy = f"Give {name} ceil(E / K) = {experts} experts of K x size = {neurons} neurons."
            yield Violation(Rule.PARAMETERS, "neurons of", values, remedy)
            return


CHECKS: dict[Rule, Callable[[Models], Iterator[Violation]]] = {
    Rule.ACTIVE: _active,
    Rule.STRUCTURE: _structure,
    Rule.CANDIDATES: _candidates,
    Rule.PARAMETERS: _parameters,
}


def _unequal_rest(runs: Mapping[str, RunConfig], models: Models) -> Iterator[Violation]:
    """Rule E: text, recipe and dense body, option by option; then the seeds."""
    amounts: dict[str, dict[str, Amount]] = {}
    for name, run in runs.items():
        for option, value in _shared_options(run, models[name]).items():
            amounts.setdefault(option, {})[name] = Amount(json.dumps(value), json.dumps(value))
    for option, of_runs in amounts.items():
        yield from _unequal(Rule.REST, option, of_runs, f"Give all the same {option}.")
    yield from _unequal_seeds(runs)


def _shared_options(run: RunConfig, model: AirMoeConfig) -> dict[str, object]:
    """What must be equal, by the path under which a user sets it; defaults filled in."""
    # Where experts choose, their choice stands in the place of load balancing.
    own = ROUTING_OPTIONS if model.routes_causally else {*ROUTING_OPTIONS, "load_balance_weight"}
    body = {f"model.{name}": getattr(model, name) for name in MODEL_OPTIONS if name not in own}
    recipe = {
        f"training.{name}": value
        for name, value in dataclasses.asdict(run.training).items()
        if name not in WATCHING_OPTIONS
    }
    text = {f"data.{name}": value for name, value in dataclasses.asdict(run.data).items()}
    jitter = {"model.router_options.jitter_std": model.router_config().jitter_std}
    return {**text, **recipe, **body, **jitter}


def _unequal_seeds(runs: Mapping[str, RunConfig]) -> Iterator[Violation]:
    """Runs that differ in nothing but the seed are one variant; each needs the same seeds."""
    seeds: dict[str, set[int]] = {}
    variants: dict[str, str] = {}
    for name, run in runs.items():
        settings = run.to_json()
        seed = settings["training"].pop("seed")
        variants[name] = json.dumps(settings, sort_keys=True)
        seeds.setdefault(variants[name], set()).add(seed)
    amounts = {
        name: Amount(frozenset(seeds[variant]), ", ".join(map(str, sorted(seeds[variant]))))
        for name, variant in variants.items()
    }
    yield from _unequal(Rule.REST, "training.seed", amounts, "Run every variant with every seed.")


def _unequal(
    rule: Rule, what: str, amounts: Mapping[str, Amount], remedy: str
) -> Iterator[Violation]:
    if len({amount.number for amount in amounts.values()}) > 1:
        yield Violation(rule, what, {name: a.text for name, a in amounts.items()}, remedy)
