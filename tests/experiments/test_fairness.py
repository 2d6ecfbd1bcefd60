"""Unfair comparisons are refused: by which rule, between which runs, and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from airmoe.errors import ConfigError
from airmoe.experiments.fairness import ALL_RULES, Rule, Violation, check_fair, violations
from airmoe.experiments.suites.variants import SUITES
from airmoe.training import RunConfig, override, preset

Runs = dict[str, RunConfig]


@pytest.fixture
def runs() -> Runs:
    """E = 1024, K = 32, G = 64, M = 256, and their equals."""
    return dict(SUITES["main"].variants(preset("tiny")))


def changed(run: RunConfig, *assignments: str) -> RunConfig:
    return override(run, assignments)


def only(runs: Runs) -> Violation:
    (found,) = violations(runs)
    return found


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("size", ["tiny", "small", "large-c5"])
def test_the_suites_are_fair(name: str, size: str) -> None:
    variants = SUITES[name].variants(preset(size))
    assert len(variants) >= 5
    assert violations(variants, SUITES[name].rules) == []
    check_fair(variants, SUITES[name].rules)


ROUTER = "model.router_options"
REMEDIES = {
    Rule.ACTIVE: "Give all the same model.num_experts_per_tok (PEER: heads x experts per head",
    Rule.STRUCTURE: "Give all as many codewords (num_codewords) as clusters",
    Rule.CANDIDATES: "(exact routing and PEER are exempt)",
    Rule.PARAMETERS: "Give coarse ceil(E / K) = 32 experts",
    Rule.REST: "Give all the same ",
}


@pytest.mark.parametrize(
    ("variant", "options", "rule", "found"),
    [
        ("exact", "model.num_experts_per_tok=8", "ACTIVE", "32 in air ... 8 x 1 = 8 in exact"),
        ("peer", "model.num_experts_per_tok=64", "ACTIVE", "32 in air ... 8 x 1 = 64 in peer"),
        (
            "hierarchical",
            f"{ROUTER}.num_clusters=128 {ROUTER}.num_selected_clusters=32",
            "STRUCTURE",
            "64 codewords in air ... 128 clusters in hierarchical",
        ),
        (
            "air",
            f"{ROUTER}.shortlist_size=512",
            "CANDIDATES",
            "512 in air ... 16 x 16 = 256 in hierarchical",
        ),
        (
            "coarse",
            "model.num_experts=128",
            "PARAMETERS",
            "128 experts x 32 in coarse ... 1024 experts x 1, 32 active in air",
        ),
        ("air", "data.block_size=64", "REST", "data.block_size 64 in air; 128 in peer, hier"),
        ("peer", "training.batch_size=8", "REST", "4 in air, hierarchical, exact, coarse; 8 in p"),
        ("air", 'data.corpus="c5"', "REST", 'data.corpus "c5" in air; "python-docs" in'),
        ("coarse", "model.hidden_size=64", "REST", "model.hidden_size 128 in ... 64 in coarse"),
        ("air", "model.moe_layers=[0]", "REST", "model.moe_layers [0] in air; [1] in"),
        ("peer", f"{ROUTER}.jitter_std=0.1", "REST", "jitter_std 0.01 in ... 0.1 in peer"),
    ],
)
def test_one_difference_breaks_one_rule(
    variant: str, options: str, rule: str, found: str, runs: Runs
) -> None:
    runs[variant] = changed(runs[variant], *options.split())
    broken = {one.rule: str(one) for one in violations(runs)}
    if rule == "ACTIVE":  # what has another K has another coarse equivalent too
        broken.pop(Rule.PARAMETERS, None)
    assert list(broken) == [Rule[rule]]
    text = broken[Rule[rule]]
    assert text.startswith(f"{Rule[rule]}: ") and "\n" not in text
    for part in (*found.split(" ... "), REMEDIES[Rule[rule]]):
        assert part in text, text
    with pytest.raises(ConfigError, match="must be a fair comparison") as caught:
        check_fair(runs)
    assert text in str(caught.value)


def test_more_experts_are_more_neurons(runs: Runs) -> None:
    runs["peer"] = changed(runs["peer"], "model.num_experts=4096")
    first, second = violations(runs)
    assert "1024 experts x 1 in air, hierarchical, exact; 4096 experts x 1 in peer" in str(first)
    assert (first.rule, second.rule) == (Rule.PARAMETERS, Rule.PARAMETERS)
    assert "4096 experts x 1, 32 active in peer" in str(second)
    assert "Give coarse ceil(E / K) = 128 experts of K x size = 32 neurons." in str(second)


def test_a_coarse_model_rounds_its_experts_up(runs: Runs) -> None:
    """ceil(E / K): 4100 experts, 32 active, make 129."""
    granular = changed(runs["exact"], "model.num_experts=4100")
    coarse = changed(runs["coarse"], "model.num_experts=129")
    assert violations({"exact": granular, "coarse": coarse}) == []
    assert "= 129 experts" in str(only({"exact": granular, "coarse": runs["coarse"]}))


def test_only_the_rules_of_a_suite_are_asked(runs: Runs) -> None:
    runs["air"] = changed(runs["air"], f"{ROUTER}.num_codewords=32", f"{ROUTER}.shortlist_size=128")
    found = [violation.rule for violation in violations(runs)]
    assert found == [Rule.STRUCTURE, Rule.CANDIDATES]
    assert violations(runs, SUITES["codebook"].rules) == []


def test_how_closely_a_run_is_watched_does_not_matter(runs: Runs) -> None:
    runs["air"] = changed(runs["air"], "training.log_every=7", "training.seed=7")
    assert violations(runs) == []


def test_experts_that_choose_need_no_balance_loss(runs: Runs) -> None:
    runs["takers"] = changed(
        runs["air"], "model.router_options.gate=expert_choice", "model.load_balance_weight=0.0"
    )
    assert violations(runs) == []
    runs["exact"] = changed(runs["exact"], "model.load_balance_weight=0.0")
    assert only(runs).what == "model.load_balance_weight"


def test_defaults_are_filled_in(runs: Runs) -> None:
    """A setting that is left out equals the same setting spelled out."""
    left_out = {
        name: value for name, value in runs["air"].model.items() if name != "expert_activation"
    }
    runs["air"] = dataclasses.replace(runs["air"], model=left_out)
    assert violations(runs) == []
    runs["air"] = changed(runs["air"], 'model.expert_activation="gelu"')
    assert 'model.expert_activation "gelu" in air; "swiglu" in peer' in str(only(runs))


def test_the_documentation_lists_the_rules_and_who_keeps_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "suites.md").read_text(encoding="utf-8")
    table = page.partition("| rule |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert [row[0] for row in rows] == [str(rule) for rule in ALL_RULES]
    for rule, row in zip(ALL_RULES, rows, strict=True):
        keep = [name for name, suite in SUITES.items() if rule in suite.rules]
        assert row[-1] == ("all" if len(keep) == len(SUITES) else ", ".join(f"`{n}`" for n in keep))
