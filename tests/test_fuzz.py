"""Random settings and overrides: refused in one line, or taken exactly as given."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from airmoe import ConfigError
from airmoe.model import METHODS
from airmoe.training import method_run
from airmoe.training.config import SECTIONS
from tests.test_config_errors import CONFIGS, GOOD

ROUTER_CONFIGS = 200
OVERRIDES = 280
LONGEST = 2_000  # characters of a message
TINY = method_run("tiny", "air").to_json()
# By the type of what stands there: values that may well be right.
PLAUSIBLE: dict[type, tuple[Any, ...]] = {
    int: (1, 2, 3, 4, 6, 8, 9, 12, 16, 36, 64),
    float: (0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0, 2.0),
    bool: (True, False),
    str: ("euclidean", "static", "xavier", "unit", "expert_choice", "bf16", "swiglu", "gelu"),
}


# Each has broken a real reader somewhere: what JSON allows is far more than what a reader expects.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    3,
    2**63,
    -(2**63),
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "7",
    "nan",
    "../../etc",
    "\0",
    "\ud800",
    "\x1b[31mred",
    [],
    [0],
    {},
    {"a": 1},
)


def assert_explained(error: ConfigError, what: object, fields: Sequence[str] = ()) -> None:
    """One line of readable length that names the field (one of these, where given) and the rule."""
    assert not fields or error.field.rpartition(".")[2] in fields, error
    message = str(error)
    assert error.field and error.rule and "\n" not in message, (what, message)
    assert len(message) < LONGEST, (what, message[:200])


def is_same(given: object, kept: object) -> bool:
    """Equal in value and type: True is not 1, and 4.0 is not 4."""
    if isinstance(given, float) and math.isnan(given):
        return isinstance(kept, float) and math.isnan(kept)
    return type(given) is type(kept) and given == kept


@pytest.mark.parametrize("name", GOOD)
def test_random_router_configs(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(CONFIGS[name])]
    taken = 0
    for seed in range(ROUTER_CONFIGS // len(GOOD)):
        chance = random.Random(f"{name} {seed}")
        changed = {
            field: _random_value(chance, getattr(CONFIGS[name](**GOOD[name]), field))
            for field in chance.sample(fields, chance.choice((1, 2, 3)))
        }
        options = {**GOOD[name], **changed}
        try:
            router = CONFIGS[name](**options).build()
        except ConfigError as error:
            assert_explained(error, options.keys(), fields)
            continue
        taken += 1
        for field, value in options.items():
            assert is_same(value, getattr(router.config, field)), field
        _check_routing(router)
    assert taken > 3, "too few of them reach the router"


def _random_value(chance: random.Random, before: object) -> Any:
    """One of the same type as before, or, every third time, anything."""
    if chance.random() < 0.35:
        return chance.choice(HOSTILE)
    return chance.choice(PLAUSIBLE.get(type(before), HOSTILE))


def _check_routing(router: Any) -> None:
    """It routes as its settings say, and the same way twice."""
    config, hidden = router.config, torch.randn(24, router.config.dim)
    for mode in (router.train(), router.eval()):
        mode.observe(hidden)
        routing = mode(hidden)
        again = mode(hidden).to_token_routing()
        chosen = routing.to_token_routing()
        assert torch.equal(chosen.expert_ids, again.expert_ids)
        assert torch.equal(chosen.weights, again.weights)
        assert torch.isfinite(chosen.weights).all()
        assert int(chosen.expert_ids.min()) >= 0 and int(chosen.expert_ids.max()) < (
            config.num_experts
        )
        if getattr(config, "gate", "token_choice") == "token_choice" and hasattr(router, "gate"):
            assert chosen.expert_ids.shape[1] == config.top_k


@pytest.mark.parametrize("method", METHODS)
def test_random_overrides(method: str) -> None:
    taken = 0
    for seed in range(-(-OVERRIDES // len(METHODS))):
        chance = random.Random(f"{method} {seed}")
        assignment, path, value = _random_assignment(chance)
        try:
            config = method_run("tiny", method, [assignment])
        except ConfigError as error:
            assert_explained(error, path)
            continue
        taken += 1
        # Other methods are made from the run with AIR: what they have no use for is left out.
        if method == "air" and len(path) == 2:
            assert is_same(value, config.to_json()[path[0]][path[1]]), assignment[:200]
    assert taken > 5, "too few of them are settings"


def _random_assignment(chance: random.Random) -> tuple[str, list[str], Any]:
    section = chance.choice(list(SECTIONS))
    path = [section, chance.choice(SECTIONS[section])]
    if path[1] == "router_options" or chance.random() < 0.2:
        options = [field.name for field in dataclasses.fields(CONFIGS["air"])]
        path = ["model", "router_options", chance.choice(options)]
    before: Any = TINY
    for name in path:
        before = (before or {}).get(name)
    value = _random_value(chance, before)
    if chance.random() < 0.05:
        path[-1] += "x"
    return f"{'.'.join(path)}={json.dumps(value)}", path, value
