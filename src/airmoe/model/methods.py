"""The methods that the paper compares: turn an AIR config into any of them, at an equal budget.

The paper's rules of fairness: equal active experts, equal coarse structure (as many clusters as
AIR has codewords), equal candidates scored, and for the coarse model equal parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

from airmoe.config import did_you_mean
from airmoe.errors import ConfigError
from airmoe.model.configuration import AirMoeConfig
from airmoe.routers import ADD_YOURS, ROUTERS, AirRouter

METHODS = ("air", "exact", "peer", "hierarchical", "expert_choice", "coarse", "dense")
PEER_HEADS = 8  # the paper's P


def with_method(config: AirMoeConfig, name: str) -> AirMoeConfig:
    """The same model with another method; `config` itself must use AIR.

    "exact" scores all experts, "coarse" has a few large experts, "dense" has none. A router added
    to `ROUTERS` is a method too, with the settings of its `for_budget`.
    """
    check_method("with_method.name", name)
    if config.router != "air":
        rule = "must be 'air', because the other methods derive their budgets from its shortlists"
        remedy = "Start from model_size(...) or from your own config with AIR."
        raise ConfigError("with_method.config.router", config.router, rule, remedy)
    if name == "air":
        return _changed(config)
    if name == "dense":
        return _changed(config, moe_layers=[])
    if name == "exact":
        return _routed(config, "topk")
    if name == "peer":
        return _routed(config, "peer", num_heads=PEER_HEADS)
    if name == "hierarchical":
        return _routed(config, "hierarchical", **_cluster_options(config))
    if name == "coarse":
        active = config.num_experts_per_tok
        return _changed(
            _routed(config, "topk"),
            experts="coarse",
            num_experts=math.ceil(config.num_experts / active),
            num_experts_per_tok=1,
            expert_size=config.expert_size * active,
        )
    return _routed(config, name)  # expert_choice, or a router that was added


def check_method(field: str, name: str) -> None:
    """One of `METHODS`, or a router that was added to `ROUTERS`."""
    # Every router of the library has a method; that of "topk" is called "exact".
    added = [router for router in ROUTERS if router not in (*METHODS, "topk")]
    known = (*METHODS, *added)
    if name not in known:
        remedy = f"{did_you_mean(name, known)}{ADD_YOURS}"
        raise ConfigError(field, name, f"must be one of {', '.join(known)}", remedy)


def _routed(config: AirMoeConfig, router: str, **options: Any) -> AirMoeConfig:
    """Another router, which keeps those of AIR's options that it has too (such as jitter_std)."""
    known = {field.name for field in dataclasses.fields(ROUTERS[router].Config)}
    kept = {name: value for name, value in config.router_options.items() if name in known}
    options = {**kept, **options}
    changed = _changed(config, router=router, router_options=options, shortlist_balance_weight=0.0)
    if changed.has_shortlists:
        return _changed(changed, shortlist_balance_weight=config.shortlist_balance_weight)
    return changed


def _cluster_options(config: AirMoeConfig) -> dict[str, int]:
    """As many clusters as codewords, and per token so many that they hold AIR's M candidates."""
    air = config.router_config()
    assert isinstance(air, AirRouter.Config)
    selected, rest = divmod(air.shortlist_size * air.num_codewords, air.num_experts)
    if rest or not selected:
        rule = (
            "must be a whole number of clusters of num_experts / num_codewords = "
            f"{air.num_experts / air.num_codewords:g} experts, for equally many candidates"
        )
        field = "model.router_options.shortlist_size"
        raise ConfigError(field, air.shortlist_size, rule, "Choose a multiple of that.")
    return {"num_clusters": air.num_codewords, "num_selected_clusters": selected}


def _changed(config: AirMoeConfig, **fields: Any) -> AirMoeConfig:
    """A checked copy."""
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(changed, name, value)
    changed.check()
    return changed
