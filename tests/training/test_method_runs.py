"""The same words give every method the same budget."""

from __future__ import annotations

import pytest

from airmoe.errors import ConfigError
from airmoe.experiments.suites import make_plan
from airmoe.model import METHODS
from airmoe.training import PRESETS, method_run, preset

SIZES = [
    ["model.num_experts=4096"],
    ["model.num_experts_per_tok=64"],
    ["model.num_experts_per_tok=64", "model.num_experts=1024"],
    ["model.router_options.num_codewords=32", "model.router_options.shortlist_size=256"],
    ["model.expert_size=2", "model.hidden_size=64", "model.router_options.jitter_std=0.05"],
    ["training.steps=7", "data.block_size=64", "model.vocab_size=2048"],
]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_with_nothing_assigned_it_is_the_preset(name: str, method: str) -> None:
    assert method_run(name, method) == preset(name, method)


@pytest.mark.parametrize("assigned", SIZES, ids=" ".join)
def test_methods_are_those_of_the_suite(assigned: list[str]) -> None:
    runs = {run.variant: run.config for run in make_plan("main", "tiny", assigned).runs}
    for method, config in runs.items():
        assert method_run("tiny", method, assigned).model == config.model, method


def test_options_of_the_method_s_own_router() -> None:
    peer = method_run("tiny", "peer", ["model.router_options.num_heads=4"])
    assert peer.model["router_options"]["num_heads"] == 4
    whole = method_run("tiny", "peer", ['model.router_options={"num_heads": 2}'])
    assert whole.model["router_options"] == {"num_heads": 2}
    later = ['model.router_options={"num_heads": 2}', "model.router_options.jitter_std=0.3"]
    mixed = method_run("tiny", "peer", later).model["router_options"]
    assert mixed == {"num_heads": 2, "jitter_std": 0.3}
    room = method_run("tiny", "expert_choice", ["model.router_options.capacity_factor=2.0"])
    assert room.model["router_options"]["capacity_factor"] == 2.0
    shared = method_run("tiny", "peer", ["model.router_options.jitter_std=0.5"])
    assert shared.model["router_options"]["jitter_std"] == 0.5


@pytest.mark.parametrize("method", ["exact", "peer", "coarse", "expert_choice", "dense"])
def test_sizes_that_the_lists_of_the_preset_do_not_fit(method: str) -> None:
    run = method_run("tiny", method, ["model.num_experts=64"])
    assert run.model["num_experts"] == (2 if method == "coarse" else 64)
    for needs_lists in ("air", "hierarchical"):
        with pytest.raises(ConfigError, match=r"model\.router_options\.shortlist_size: got 256"):
            method_run("tiny", needs_lists, ["model.num_experts=64"])
    sizes = ["model.num_experts=64", "model.router_options.shortlist_size=99"]
    with pytest.raises(ConfigError, match=r"model\.router_options\.shortlist_size: got 99"):
        method_run("tiny", method, sizes)


def test_air_takes_any_router() -> None:
    run = method_run("tiny", "air", ["model.router=topk"])
    assert run.model["router"] == "topk"


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.router: got 'topk', must be 'air'"):
        method_run("tiny", "peer", ["model.router=topk"])
    with pytest.raises(ConfigError, match="nonsense"):
        method_run("tiny", "peer", ["model.router_options.nonsense=1"])
    with pytest.raises(ConfigError, match="method: got 'magic'"):
        method_run("tiny", "magic")
