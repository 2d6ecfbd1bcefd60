"""Fitting and measuring: trials by their definitions, and what a report suggests from them."""

from __future__ import annotations

from dataclasses import asdict, astuple
from typing import Any

import pytest
import torch

from airmoe import AirRouter, metrics
from airmoe.adapt import CalibrationReport, LayerReport, Trial, fitting
from airmoe.adapt.calibration import cheapest
from airmoe.adapt.fitting import AirLayer, fit, measure, sizes_to_try
from airmoe.adapt.shortlist_router import ScaledCodebook
from tests.adapt.models import BUILD, calibrated, swapped_routers


def air_router(**changes: Any) -> AirRouter:
    sizes = {"dim": 8, "num_experts": 32, "top_k": 4, "num_codewords": 6, "shortlist_size": 8}
    return AirRouter.Config(**{**sizes, **changes}).build().eval()


@torch.no_grad()
@pytest.mark.parametrize("family", BUILD)
def test_overlaps_are_what_routing_gives(family: str) -> None:
    """For every size; groups make it matter what else is a candidate."""
    router, hidden = swapped_routers(calibrated(family))[0], torch.randn(80, 32)
    exact = router.full_logits(hidden)
    right = router.select(exact, exact.dtype)[1]
    trials = measure(router, router.codebook, hidden, [8, 11, 16])
    masses = router.masses(exact)
    for trial in trials:
        router.shortlist_size = trial.shortlist_size
        logits, _, chosen = router.eval()(hidden)
        share = (right[:, :, None] == chosen[:, None]).any(-1).float().mean()
        assert trial.overlap == pytest.approx(float(share), abs=1e-6)
        kept = masses.masked_fill(logits == -torch.inf, 0).sum(-1).mean()
        assert trial.mass_recall == pytest.approx(float(kept), abs=1e-6)
    assert trials[-1].overlap == trials[-1].mass_recall == 1 and trials[-1].scored == 16


@torch.no_grad()
@pytest.mark.parametrize("family", BUILD)
def test_the_bound_holds(family: str) -> None:
    """For softmax and sigmoid, with bias and groups; near the codeword, where it says something."""
    router = swapped_routers(calibrated(family))[0]
    near = router.codebook.representatives()
    hidden = near.repeat(10, 1) + 0.02 * torch.randn(40, 32)
    trials = [measure(router, router.codebook, token, [8])[0] for token in hidden.split(1)]
    assert all(0 < trial.bound <= trial.mass_recall + 1e-6 for trial in trials)
    assert sum(t.bound for t in trials) > 0.3 * sum(t.mass_recall for t in trials)


def test_scales_are_mean_projections() -> None:
    """Of each codeword's own tokens; without any, of all. Not lengths: tokens point elsewhere."""
    codebook = ScaledCodebook(3, 2)
    codebook.codewords.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    codebook.measure_scales(torch.tensor([[2.0, 1.0], [4.0, -3.0], [3.0, 6.0]]))
    torch.testing.assert_close(codebook.scales, torch.tensor([3.0, 6.0, 4.0]))


@pytest.mark.parametrize("family", BUILD)
def test_masses_are_the_distribution_of_the_weights(family: str) -> None:
    router = swapped_routers(calibrated(family))[0]
    logits = torch.randn(10, 16)
    shares = logits.sigmoid() if family == "deepseek_v3" else logits.exp()
    expected = shares / shares.sum(-1, keepdim=True)
    torch.testing.assert_close(router.masses(logits), expected, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["spherical", "euclidean", "static"])
def test_measures_of_an_air_router_are_those_of_the_metrics(kind: str) -> None:
    router, hidden = air_router(dim=16, codebook=kind), torch.randn(200, 16)
    layer = AirLayer(router)
    codebook = fit(layer, hidden, 6, passes=3, seed=1)
    router.codebook.load_state_dict(codebook.state_dict())
    assert codebook.kind == kind
    for tokens in (hidden, *hidden[:20].split(1)):
        (found,) = measure(layer, codebook, tokens, [8])
        for value, metric in (
            (found.overlap, metrics.overlap),
            (found.mass_recall, metrics.mass_recall),
            (found.bound, metrics.mass_recall_bound),
        ):
            assert value == pytest.approx(float(metric(router, tokens).mean()), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_chunks_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router, hidden = swapped_routers(calibrated(family))[0], torch.randn(50, 32)
    (whole,) = measure(router, router.codebook, hidden, [9])
    monkeypatch.setattr(fitting, "CHUNK_ELEMENTS", 7 * 16)
    (parts,) = measure(router, router.codebook, hidden, [9])
    assert astuple(parts) == pytest.approx(astuple(whole), abs=1e-6)


def test_sizes_from_the_smallest_to_all() -> None:
    """Every one where experts are few, else by steps of sqrt(2), the present one among them."""
    assert sizes_to_try(swapped_routers(calibrated("mixtral"))[0]) == [*range(2, 17)]
    router = swapped_routers(calibrated("deepseek_v3"))[0]  # two of each group at least
    assert sizes_to_try(router) == [*range(8, 17)]
    many = AirLayer(air_router(num_experts=200, top_k=5, shortlist_size=33))
    assert sizes_to_try(many) == [5, 7, 10, 14, 20, 28, 33, 40, 57, 80, 113, 160, 200]


def trial(sizes: tuple[int, int], overlap: float, mass_recall: float = 0.5) -> Trial:
    return Trial(*sizes, overlap, mass_recall, bound=0.1, scored=sum(sizes))


def report(*trials: tuple[Trial, ...], criterion: Any = "overlap") -> CalibrationReport:
    """Of layers with these trials, of which the first is of their own sizes."""
    layers = [
        LayerReport(
            **asdict(tried[0]),
            name=f"layer {number}",
            num_experts=64,
            trials=tried,
            suggestion=cheapest(tried, 0.9, criterion),
        )
        for number, tried in enumerate(trials)
    ]
    return CalibrationReport(tuple(layers), 30, 10, 0.9, criterion)


FIRST = (trial((4, 8), 0.95), trial((4, 16), 0.97, 0.92), trial((8, 32), 1.0, 0.99))
SECOND = (trial((4, 8), 0.7), trial((4, 16), 0.91, 0.8), trial((8, 32), 0.99, 0.98))


def test_the_worst_layer_decides_what_is_suggested() -> None:
    both = report(FIRST, SECOND)
    assert both.layers[0].suggestion is FIRST[0] and both.layers[1].suggestion is SECOND[1]
    assert both.suggestion is SECOND[1]
    assert "num_codewords=4, shortlist_size=16 (worst layer 0.910), 20 products" in str(both)
    assert report(FIRST, SECOND, criterion="mass_recall").suggestion is SECOND[2]


def test_sizes_that_were_not_tried_everywhere_are_not_suggested() -> None:
    assert report(FIRST, SECOND[2:]).suggestion is SECOND[2]
    unlike = report(FIRST, (trial((2, 5), 1.0),))
    assert unlike.suggestion is None
    assert "No one pair of sizes was tried in all layers" in str(unlike)
