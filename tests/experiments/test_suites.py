"""What each suite plans, and what it refuses; nothing is trained here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe import ROUTERS, TopKRouter
from airmoe.errors import ConfigError
from airmoe.experiments.suites import Plan, make_plan
from airmoe.experiments.suites.folder import differences
from airmoe.model import AirMoeForCausalLM
from tests.training.command import airmoe, assert_one_line


def models(plan: Plan) -> dict[str, dict[str, Any]]:
    return {run.variant: run.config.model for run in plan.runs}


def sizes(model: dict[str, Any]) -> tuple[Any, ...]:
    """Router, experts, K, neurons; then codewords and shortlists where it has them."""
    names = ("num_codewords", "shortlist_size")
    options = [model["router_options"][name] for name in names if name in model["router_options"]]
    return (
        model["router"],
        model["num_experts"],
        model["num_experts_per_tok"],
        model["expert_size"],
        *options,
    )


def test_main() -> None:
    plan = make_plan("main", "small")
    assert {name: sizes(model) for name, model in models(plan).items()} == {
        "air": ("air", 65_536, 512, 1, 1024, 2048),
        "peer": ("peer", 65_536, 512, 1),
        "hierarchical": ("hierarchical", 65_536, 512, 1),
        "exact": ("topk", 65_536, 512, 1),
        "coarse": ("topk", 128, 1, 512),
    }
    assert models(plan)["peer"]["router_options"] == {"num_heads": 8}
    assert models(plan)["hierarchical"]["router_options"] == {
        "num_clusters": 1024,
        "num_selected_clusters": 32,
    }
    assert [run.folder for run in plan.runs][:2] == ["air-seed42", "peer-seed42"]


def test_more_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTERS, "own", TopKRouter)
    plan = make_plan("main", "tiny", also=["expert_choice", "own"])
    assert [run.variant for run in plan.runs][-3:] == ["coarse", "expert_choice", "own"]
    assert [models(plan)[name]["router"] for name in ("expert_choice", "own")] == [
        "expert_choice",
        "own",
    ]
    with pytest.raises(ConfigError, match="must be a fair comparison"):
        make_plan("main", "tiny", also=["dense"])
    with pytest.raises(ConfigError, match="also: got 'peer', is in this suite already"):
        make_plan("main", "tiny", also=["peer"])
    with pytest.raises(ConfigError, match=r"got 'other', must be one of air, .*, own"):
        make_plan("main", "tiny", also=["other"])


def test_ablations_change_one_thing_each() -> None:
    plan = make_plan("ablations", "tiny")
    air, *others = plan.runs
    assert air.config.model["router_options"] == {"num_codewords": 64, "shortlist_size": 256}
    found = {run.variant: differences(air.config.to_json(), run.config.to_json()) for run in others}
    assert found == {
        "no_projection": "model.router_options.normalize_centroids = nothing (now false)",
        "static": 'model.router_options.codebook = nothing (now "static")',
        # The gate stands in the place of load balancing.
        "expert_choice": "model.load_balance_weight = 0.01 (now 0.0), "
        'model.router_options.gate = nothing (now "expert_choice")',
        "euclidean": 'model.router_options.codebook = nothing (now "euclidean")',
    }


def test_granularity_keeps_the_neurons() -> None:
    tiny = models(make_plan("granularity", "tiny"))
    assert {name: sizes(model) for name, model in tiny.items()} == {
        "q1": ("topk", 32, 1, 32),
        "q2": ("topk", 64, 2, 16),  # 64 codewords and 16 candidates: no fewer than the experts
        "q4": ("air", 128, 4, 8, 64, 32),
        "q8": ("air", 256, 8, 4, 64, 64),
        "q16": ("air", 512, 16, 2, 64, 128),
        "q32": ("air", 1024, 32, 1, 64, 256),
    }
    small = models(make_plan("granularity", "small"))
    assert {name: sizes(model) for name, model in small.items()} == {
        "q1": ("topk", 128, 1, 512),
        "q4": ("topk", 512, 4, 128),  # 1024 codewords would be more work than 512 experts
        "q16": ("air", 2048, 16, 32, 1024, 64),
        "q64": ("air", 8192, 64, 8, 1024, 256),
        "q256": ("air", 32_768, 256, 2, 1024, 1024),
        "q512": ("air", 65_536, 512, 1, 1024, 2048),
    }
    kinds = [small[name]["experts"] for name in ("q1", "q4", "q16")]
    assert kinds == ["coarse", "coarse", "granular"]
    for model in small.values():
        assert model["num_experts"] * model["expert_size"] == 65_536
        assert model["num_experts_per_tok"] * model["expert_size"] == 512


def test_codebook_leaves_out_what_cannot_be() -> None:
    plan = make_plan("codebook", "tiny")
    assert len(plan.runs) == 9
    variant = models(plan)["g128-m512"]
    assert sizes(variant) == ("air", 1024, 32, 1, 128, 512)
    tight = ["model.num_experts=256", "model.router_options.shortlist_size=128"]
    names = [run.variant for run in make_plan("codebook", "tiny", tight).runs]
    assert names == [
        f"g{codewords}-{lists}" for codewords in (32, 64, 128) for lists in ("m64", "m128", "m256")
    ]


TOY = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=2", "model.num_experts=64", "model.num_experts_per_tok=8"),
    "model.router_options.shortlist_size=32",
]


@pytest.mark.parametrize(
    ("suite", "codewords"), [("main", 8), ("ablations", 8), ("granularity", 32), ("codebook", 8)]
)
def test_every_variant_is_a_model_that_learns(suite: str, codewords: int) -> None:
    plan = make_plan(suite, "tiny", [*TOY, f"model.router_options.num_codewords={codewords}"])
    token_ids = torch.randint(64, (8, 32))
    for run in plan.runs:
        model = AirMoeForCausalLM(run.config.model_config(64, 0))
        loss = model(token_ids, labels=token_ids).loss
        loss.backward()
        assert loss.isfinite(), run.variant
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    if (suite, codewords) == ("granularity", 32):
        # 32 codewords and 8 candidates for 16 experts: all are scored.
        assert sizes(models(plan)["q2"]) == ("topk", 16, 2, 4)
        assert models(plan)["q2"]["experts"] == "coarse"


def test_overrides_reach_every_run_and_the_rivals_follow() -> None:
    overrides = ["training.log_every=7", "model.router_options.shortlist_size=128"]
    plan = make_plan("main", "tiny", [*overrides, "model.vocab_size=5000", 'data.corpus="c5"'])
    assert {run.config.training.log_every for run in plan.runs} == {7}
    assert {run.config.data.corpus for run in plan.runs} == {"c5"}
    assert {run.config.model["vocab_size"] for run in plan.runs} == {5000}
    assert (
        models(plan)["hierarchical"]["router_options"]["num_selected_clusters"] == 8
    )  # of 16 experts


def test_seeds_and_budgets() -> None:
    plan = make_plan("ablations", "tiny", ["training.seed=7"], num_seeds=2, tokens=5000)
    assert [run.folder for run in plan.runs][4:6] == ["euclidean-seed7", "air-seed8"]
    assert [run.config.training.seed for run in plan.runs] == [7] * 5 + [8] * 5
    lengths = {(run.config.training.steps, run.config.training.epochs) for run in plan.runs}
    assert lengths == {(9, None)}  # 9 whole steps of 512
    epochs = make_plan("main", "tiny", epochs=2).runs[0].config.training
    assert (epochs.steps, epochs.epochs) == (None, 2)
    assert make_plan("main", "tiny").runs[0].config.training.steps == 360


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["mian", "tiny"], ["suite: got 'mian'", "main, ablations, granularity, codebook"]),
        (["main", "tinny"], ["preset: got 'tinny'"]),
        (["main", "tiny", "--seeds", "0"], ["seeds: got 0"]),
        (["main", "tiny", "--tokens", "0"], ["tokens: got 0"]),
        (["main", "tiny", "--epochs", "0"], ["epochs: got 0"]),
        (["main", "tiny", "--tokens", "511"], ["tokens: got 511", "one step of 512 tokens"]),
        (["main", "tiny", "--tokens", "600"], ["budget: got '1 steps'", "the warm-up, 1 steps"]),
        (
            ["main", "tiny", "training.warmup=0.9", "--tokens", "2560"],
            ["got '5 steps'", "longer than the warm-up, 5 steps (training.warmup = 0.9)"],
        ),
        (["main", "tiny", "--tokens", "5000", "--epochs", "1"], ["cannot be given with --tokens"]),
        (
            ["main", "tiny", "training.steps=9", "--tokens", "5000"],
            ["overrides: got 'training.steps=9'", "cannot be given with --tokens"],
        ),
        (["main", "tiny", "model.router=topk"], ["model.router: got 'topk'", "must be 'air'"]),
        (
            ["main", "tiny", "model.router_options.shortlist_size=8"],
            ["must be >= num_experts_per_tok = 32"],
        ),
        (
            ["granularity", "tiny", "model.num_experts=4100"],
            ["model.num_experts: got 4100", "must be a multiple of num_experts_per_tok = 32"],
        ),
        (
            ["main", "small", "--tokens", "100000", "training.precision=fp16"],
            ["training.precision: got 'fp16'"],
        ),
    ],
)
def test_wrong_suites(arguments: list[str], parts: list[str], tmp_path: Path) -> None:
    assert_one_line(airmoe("suite", *arguments, "--out", "out", cwd=tmp_path), 2, *parts)
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "out" / "suite.json").exists()
