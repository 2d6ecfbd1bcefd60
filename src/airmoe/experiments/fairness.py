"""When runs may be compared: the paper's rules (its appendix on MoE configurations) as checks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from airmoe.errors import ConfigError
from airmoe.model import AirMoeConfig
from airmoe.routers.settings import Amount
from airmoe.training import MODEL_OPTIONS, RunConfig
from airmoe.training.config import ROUTING_OPTIONS


class Rule(StrEnum):
    """What must be equal between runs."""

    ACTIVE = "A, equal active experts"
    STRUCTURE = "B, equal coarse structure"
    CANDIDATES = "C, equal candidate pool"
    PARAMETERS = "D, coarse equivalence"
    REST = "E, everything else equal"


ALL_RULES = tuple(Rule)

# May differ: what rules A to D compare, what one router only has, and how closely a run is watched;
# seeds too, because suites give every variant the same ones.
FREE_OPTIONS = frozenset(ROUTING_OPTIONS) | {
    "shortlist_balance_weight",
    *("seed", "log_every", "save_every", "keep_checkpoints", "quality_tokens", "track"),
}


@dataclass(frozen=True)
class Violation:
    """A broken rule, what the runs have, and what to do."""

    rule: Rule
    what: str
    values: Mapping[str, str]  # run -> what it has
    remedy: str

    def __str__(self) -> str:
        """One line; runs that have the same are named together."""
        runs: dict[str, list[str]] = {}
        for name, value in self.values.items():
            runs.setdefault(value, []).append(name)
        found = "; ".join(f"{value} in {', '.join(names)}" for value, names in runs.items())
        return f"{self.rule}: {self.what} {found}. {self.remedy}"


def violations(runs: Mapping[str, RunConfig], rules: Sequence[Rule] = ALL_RULES) -> list[Violation]:
    """Everything that makes it unfair to compare these runs, whatever their seeds."""
    models = {name: run.model_config(vocab_size=2, eos_id=1) for name, run in runs.items()}
    found: list[Violation] = []
    for rule, what, amount_of, remedy in COMPARED:
        amounts = {name: one for name, model in models.items() if (one := amount_of(model))}
        if len({one.number for one in amounts.values()}) > 1:
            texts = {name: one.text for name, one in amounts.items()}
            found.append(Violation(rule, what, texts, remedy))
    found += _not_equivalent(models)
    found += _unequal_rest(runs, models)
    return [one for one in found if one.rule in rules]


def check_fair(runs: Mapping[str, RunConfig], rules: Sequence[Rule] = ALL_RULES) -> None:
    """Raise one `ConfigError` that names every violation."""
    if found := violations(runs, rules):
        remedy = " ".join(map(str, found))
        raise ConfigError("suite", ", ".join(runs), "must be a fair comparison", remedy)


def is_coarse(model: AirMoeConfig) -> bool:
    """The standard mixture: each token goes to one large expert."""
    return model.experts == "coarse" and model.num_experts_per_tok == 1


def _active_neurons(model: AirMoeConfig) -> Amount:
    """Active experts times neurons: one expert of K neurons equals K experts of one."""
    active, size = model.router_config().fairness().active, model.expert_size
    return Amount(active.number * size, f"{active.text} x {size} = {active.number * size}")


def _neurons(model: AirMoeConfig) -> Amount | None:
    experts, size = model.num_experts, model.expert_size
    return None if is_coarse(model) else Amount(experts * size, f"{experts} experts x {size}")


# Rule, what it compares, of which amount of a model (None: exempt), remedy.
COMPARED: tuple[tuple[Rule, str, Callable[[AirMoeConfig], Amount | None], str], ...] = (
    (
        Rule.ACTIVE,
        "active experts x neurons",
        _active_neurons,
        "Give all the same model.num_experts_per_tok (PEER: heads x experts per head, coarse: 1 "
        "expert of K x size neurons).",
    ),
    (
        Rule.STRUCTURE,
        "coarse stages of",
        lambda model: model.router_config().fairness().structure,
        "Give all as many codewords (num_codewords) as clusters (num_clusters).",
    ),
    (
        Rule.CANDIDATES,
        "candidates scored per token:",
        lambda model: model.router_config().fairness().candidates,
        "Make shortlist_size equal num_selected_clusters x num_experts / num_clusters "
        "(exact routing and PEER are exempt).",
    ),
    (
        Rule.PARAMETERS,
        "neurons of",
        _neurons,
        "Give all the same model.num_experts x model.expert_size.",
    ),
)


def _not_equivalent(models: Mapping[str, AirMoeConfig]) -> Iterator[Violation]:
    """Rule D: each coarse model, with the first granular one that it does not match."""
    granular = {name: model for name, model in models.items() if not is_coarse(model)}
    for name, coarse in models.items():
        for other, model in granular.items() if is_coarse(coarse) else ():
            active, size = model.num_experts_per_tok, model.expert_size
            experts, neurons = math.ceil(model.num_experts / active), active * size
            if (coarse.num_experts, coarse.expert_size) == (experts, neurons):
                continue
            values = {
                name: f"{coarse.num_experts} experts x {coarse.expert_size}",
                other: f"{model.num_experts} experts x {size}, {active} active",
            }
            remedy = f"Give {name} ceil(E / K) = {experts} experts of K x size = {neurons} neurons."
            yield Violation(Rule.PARAMETERS, "neurons of", values, remedy)
            break


def _unequal_rest(
    runs: Mapping[str, RunConfig], models: Mapping[str, AirMoeConfig]
) -> Iterator[Violation]:
    """Rule E: text, recipe and dense body, option by option."""
    texts: dict[str, dict[str, str]] = {}
    for name, run in runs.items():
        for option, value in _shared_options(run, models[name]).items():
            texts.setdefault(option, {})[name] = json.dumps(value)
    for option, of_runs in texts.items():
        if len(set(of_runs.values())) > 1:
            yield Violation(Rule.REST, option, of_runs, f"Give all the same {option}.")


def _shared_options(run: RunConfig, model: AirMoeConfig) -> dict[str, Any]:
    """What must be equal, by the path under which a user sets it; defaults filled in."""
    # Where experts choose, their choice replaces load balancing.
    free = FREE_OPTIONS if model.routes_causally else {*FREE_OPTIONS, "load_balance_weight"}
    sections = {
        "data": dataclasses.asdict(run.data),
        "training": dataclasses.asdict(run.training),
        "model": {name: getattr(model, name) for name in MODEL_OPTIONS},
    }
    options = {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
        if name not in free
    }
    return options | {"model.router_options.jitter_std": model.router_config().jitter_std}
