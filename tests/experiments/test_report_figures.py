"""What figures show: curves over seeds, the router's health, usage maps, styles of lines."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from airmoe.experiments.report.drawing import styles_of
from airmoe.experiments.report.figures import (
    HEALTH,
    PERPLEXITY,
    REDUCTION,
    curve_figures,
    granularity_figure,
    series,
)
from airmoe.experiments.report.granularity import (
    ScalingLaw,
    fit_in_words,
    fit_scaling_law,
)
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.record import Run
from airmoe.experiments.report.usage import (
    expert_map,
    grid_shape,
    relative_usage,
    structure,
    structure_by_chance,
)
from tests.experiments.report_toys import only_group, write_suite

MAIN = ["air", "peer", "hierarchical", "exact", "coarse"]
ABLATIONS = ["no_projection", "static", "expert_choice", "euclidean"]


@pytest.mark.parametrize(
    "variants",
    [
        MAIN,
        [*MAIN, *ABLATIONS],
        ["air", "peer", "air (one)", "air (two)", "exact (one)", "coarse"],
        [f"q{2**power}" for power in range(10)],
    ],
)
def test_markers_differ(variants: list[str]) -> None:
    styles = styles_of(variants)
    assert sorted(styles) == sorted(variants)
    assert len({style["marker"] for style in styles.values()}) == len(variants)


def test_known_variants_keep_their_style() -> None:
    alone = {name: styles_of([name])[name] for name in MAIN}
    assert styles_of(["run 1", "run 2", *MAIN]).items() >= alone.items()


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """AIR has shortlists, a hierarchical router cells alone, PEER neither."""
    runs = {
        "air": {
            "perplexity": [61.0, 63.0],
            "dead_experts": [0.01, 0.03],
            "codeword_perplexity": 27.0,
            "staleness": 0.004,
        },
        "peer": {"perplexity": [64.0, 65.0], "dead_experts": 0.0},
        "hierarchical": {"perplexity": [66.0, 66.0], "codeword_perplexity": 14.0},
    }
    write_suite(tmp_path / "s", "main", runs, seeds=(42, 43))
    return only_group(tmp_path)


def test_figures_of_those_that_have_the_numbers(group: Group) -> None:
    figures = {one.name.removeprefix(f"{group.slug}-"): one for one in curve_figures(group, HEALTH)}
    assert list(figures) == ["dead-experts", "codeword-perplexity", "staleness"]
    ends = {name: one.alt.partition(" At the end: ")[2] for name, one in figures.items()}
    assert ends == {
        "dead-experts": "AIR 2, PEER 0, Hierarchical 2.",  # the mean of 1 % and 3 %
        "codeword-perplexity": "AIR 27, Hierarchical 14.",
        "staleness": "AIR 0.4.",
    }
    svg = figures["dead-experts"].svg
    assert ">dead experts (%)<" in svg and ">training tokens (k)<" in svg


def test_curves_are_means_over_seeds(group: Group) -> None:
    air = next(one for one in series(group, PERPLEXITY[0]) if one.variant == "air")
    assert air.x[-1] == 360 * 512 * 1e7
    assert air.y[-1] == pytest.approx(62.0)
    assert air.spread[-1] == pytest.approx(2**0.5)
    assert len(air.x) == 6
    assert group.runs[0].evaluations["entropy"] == [7.9] * 6  # which no figure shows


def evaluated(run: Run, variant: str, seed: int, perplexities: dict[int, int]) -> Run:
    curve = {"tokens": list(perplexities), "perplexity": list(perplexities.values())}
    return replace(run, variant=variant, seed=seed, evaluations={"step": [], **curve})


def test_reduction_is_that_of_the_seeds_that_both_have_where_both_were_evaluated(
    group: Group,
) -> None:
    runs = [
        evaluated(group.runs[0], *about)
        for about in (
            ("peer", 1, {1: 100, 2: 80, 3: 50, 5: 0}),
            ("peer", 2, {2: 160, 3: 60}),
            ("air", 2, {2: 144}),
            ("air", 1, {2: 64, 3: 55, 4: 1}),
            ("air", 3, {2: 1, 3: 1}),
            ("coarse", 1, {2: 72, 3: 55, 4: 1, 5: 1}),
            ("exact", 3, {2: 1}),
        )
    ]
    air, coarse = series(replace(group, runs=runs), REDUCTION)
    assert (air.variant, coarse.variant) == ("air", "coarse")
    # Each seed against PEER's with that seed: what both have more of does not spread.
    assert (air.x, air.y, air.spread) == ([2], pytest.approx([15.0]), pytest.approx([50**0.5]))
    assert (coarse.x, coarse.y, coarse.spread) == ([2, 3], pytest.approx([10.0, -10.0]), [0.0, 0.0])
    without_peer = [run for run in runs if run.variant != "peer"]
    assert series(replace(group, runs=without_peer), REDUCTION) == []


@pytest.mark.parametrize(
    ("grid", "share"),
    [
        (np.outer([1, 2, 8, 32], [1, 4, 5, 100, 7]), 1.0),  # a product
        (np.repeat([[1], [5], [9]], 7, axis=1), 1.0),  # rows alone
        (np.array([[0, 1], [2, 4]]), 1.0),  # none counts as half a token: 1/2 1, 2 4
        (np.array([[1, 2, 1, 2], [2, 1, 2, 1], [1, 2, 1, 2], [2, 1, 2, 1]]), 0.0),  # equal means
        (np.full((4, 4), 3), None),  # nothing to explain
    ],
)
def test_structure_is_what_rows_and_columns_explain(grid: np.ndarray, share: float | None) -> None:
    assert structure(grid) == (None if share is None else pytest.approx(share))


def test_shuffled_experts_have_the_expected_structure() -> None:
    random = np.random.default_rng(0)
    counts = random.poisson(random.lognormal(3, 1, 12 * 20))
    shares = [structure(random.permutation(counts).reshape(12, 20)) for _ in range(2000)]
    found = np.array(shares, float)
    chance = structure_by_chance(expert_map(counts.reshape(12, 20)))
    assert chance == (12 + 20 - 2) / (12 * 20 - 1)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - chance) < 4 * error


@pytest.mark.parametrize(
    ("experts", "model", "shape"),
    [
        (4096, {"router": "peer"}, (64, 64)),
        (4096, {"router": "hierarchical", "router_options": {"num_clusters": 32}}, (32, 128)),
        (128, {"router": "topk"}, (8, 16)),
        (7, {"router": "air", "router_options": {}}, (1, 7)),
    ],
)
def test_grids(experts: int, model: dict, shape: tuple[int, int]) -> None:
    assert grid_shape(experts, model) == shape


def test_maps_come_back_within_a_level() -> None:
    grid = np.random.default_rng(1).poisson(50, (30, 40))
    grid[3, 4] = 0
    found = expert_map(grid)
    back = relative_usage(found)
    assert back.shape == (30, 40)
    assert np.isnan(back[3, 4]) and np.isnan(back).sum() == (grid == 0).sum()
    used = grid > 0
    ratio = back[used] / (grid[used] / grid.mean())
    assert abs(np.log10(ratio)).max() <= 3 / 254 + 1e-12  # half of 6 decades in 254 levels


def test_large_maps_keep_evenly_spaced_rows() -> None:
    grid = np.arange(1, 1024 * 64 + 1).reshape(1024, 64)
    found = expert_map(grid)
    assert found.shape == [1024, 64]
    back = relative_usage(found)
    assert back.shape == (128, 64)
    assert back[100, 7] == pytest.approx(grid[800, 7] / grid.mean(), rel=0.03)
    assert found.structure == structure(grid)  # of all of it


# The scaling law L(Q) = a / Q^b + c: exact data gives its constants back, doubtful fits say so.


def fit(granularities: list[int], losses: list[float]) -> ScalingLaw:
    law = fit_scaling_law(granularities, losses)
    assert law is not None
    return law


@pytest.mark.parametrize(("a", "b", "c"), [(1.2, 0.5, 3.0), (0.3, 1.7, 2.5), (4.0, 0.15, 1.0)])
def test_exact_data_gives_its_constants_back(a: float, b: float, c: float) -> None:
    amounts = [1, 2, 4, 8, 16, 64]
    law = fit(amounts, [a / q**b + c for q in amounts])
    assert (law.a, law.b, law.c) == pytest.approx((a, b, c), rel=1e-5)
    assert law.residual < 1e-7
    assert law.warnings == []


def test_no_other_constants_are_better() -> None:
    amounts = np.array([1, 2, 4, 8, 16])
    losses = 0.8 / amounts**0.6 + 3 + np.array([0.01, -0.02, 0.015, -0.005, 0.0])
    law = fit(amounts.tolist(), losses.tolist())
    ours = np.sqrt(np.mean((law.a / amounts**law.b + law.c - losses) ** 2))
    assert law.residual == pytest.approx(ours)
    for a in law.a * np.array([0.98, 1, 1.02]):
        for b in law.b * np.array([0.95, 1, 1.05]):
            for c in law.c * np.array([0.995, 1, 1.005]):
                theirs = np.sqrt(np.mean((a / amounts**b + c - losses) ** 2))
                assert theirs >= ours - 1e-12


def test_three_points_fit_anything_and_it_says_so() -> None:
    assert fit_scaling_law([1, 2, 2], [4.0, 3.5, 3.3]) is None
    law = fit([1, 2, 4], [4.0, 3.5, 3.3])
    assert law.residual < 1e-6
    assert "says nothing about the law" in law.warnings[0]


def test_constants_stay_positive() -> None:
    rising = fit([1, 2, 4, 8], [3.0, 3.1, 3.2, 3.4])
    assert rising.a == 0 and rising.c == pytest.approx(3.175)
    assert "end of its range" in rising.warnings[0]
    straight = fit([1, 2, 4, 8, 16], [4.0, 3.0, 2.0, 1.0, 0.2])
    assert straight.c == 0 and straight.a > 0
    assert "end of its range" in straight.warnings[0]


def test_a_sweep_whose_losses_are_not_known(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "granularity", {"q1": 60.0, "q4": 59.0})
    group = only_group(tmp_path)
    runs = [replace(run, best={**run.best, "loss": None}) for run in group.runs]
    unknown = replace(group, runs=runs)
    assert granularity_figure(unknown) == []
    assert str(fit_in_words(unknown)).startswith("No fit")
