"""The parts of calibration: measures, trials and sampling, each against its definition."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch

from airmoe import AirRouter, metrics
from airmoe.adapt import fitting
from airmoe.adapt.fitting import AirLayer, CalibratedLayer, fit, measure, sizes_to_try
from airmoe.adapt.shortlist_router import new_codebook
from tests.adapt.models import BUILD, calibrated, swapped_routers


def test_measures_against_those_of_the_metrics() -> None:
    """An AirRouter's numbers are airmoe.metrics'."""
    hidden = torch.randn(200, 16)
    config = AirRouter.Config(dim=16, num_experts=32, top_k=4, num_codewords=6, shortlist_size=8)
    router = config.build().eval()
    layer = AirLayer("router", router)
    codebook = fit(layer, hidden, 6, passes=3, seed=1)
    layer.install(codebook)
    for tokens in (hidden, *hidden[:20].split(1)):
        (found,) = measure(layer, codebook, tokens, [8])
        for value, metric in (
            (found.overlap, metrics.overlap),
            (found.mass_recall, metrics.mass_recall),
            (found.bound, metrics.mass_recall_bound),
        ):
            assert value == pytest.approx(float(metric(router, tokens).mean()), abs=1e-5)


@pytest.mark.parametrize("family", BUILD)
def test_overlaps_are_what_routing_gives(family: str) -> None:
    """For every size; groups make it matter what else is a candidate."""
    router = swapped_routers(calibrated(family))[0]
    layer, hidden = CalibratedLayer("router", router), torch.randn(80, 32)
    exact = router.full_logits(hidden)
    right = router.select(exact, exact.dtype)[1]
    trials = measure(layer, router.codebook, hidden, [8, 11, 16])
    for trial in trials:
        router.shortlist_size = trial.shortlist_size
        with torch.no_grad():
            _, _, chosen = router.eval()(hidden)
        share = (right[:, :, None] == chosen[:, None]).any(-1).float().mean()
        assert trial.overlap == pytest.approx(float(share), abs=1e-6)
    assert trials[-1].overlap == trials[-1].mass_recall == 1 and trials[-1].scored == 16


@pytest.mark.parametrize("family", BUILD)
def test_the_bound_holds(family: str) -> None:
    """For softmax and sigmoid, with bias and groups; near the codeword, where it says something."""
    router = swapped_routers(calibrated(family))[0]
    layer = CalibratedLayer("router", router)
    near = router.codebook.representatives()
    hidden = near.repeat(10, 1) + 0.02 * torch.randn(40, 32)
    trials = [measure(layer, router.codebook, token, [8])[0] for token in hidden.split(1)]
    assert all(0 < trial.bound <= trial.mass_recall + 1e-6 for trial in trials)
    assert sum(t.bound for t in trials) > 0.3 * sum(t.mass_recall for t in trials)


def test_scales_are_mean_projections() -> None:
    """Of each codeword's own tokens; without any, of all. Not lengths: tokens point elsewhere."""
    codebook = new_codebook(3, 2)
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


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    router = swapped_routers(calibrated("deepseek_v3"))[0]
    layer, hidden = CalibratedLayer("router", router), torch.randn(50, 32)
    (whole,) = measure(layer, router.codebook, hidden, [9])
    monkeypatch.setattr(fitting, "CHUNK_ELEMENTS", 7 * 16)
    (parts,) = measure(layer, router.codebook, hidden, [9])
    assert astuple(parts) == pytest.approx(astuple(whole), abs=1e-6)


def test_sizes_among_many_experts() -> None:
    config = AirRouter.Config(dim=4, num_experts=200, top_k=5, num_codewords=2, shortlist_size=33)
    sizes = sizes_to_try(AirLayer("router", config.build()))
    assert sizes == [5, 7, 10, 14, 20, 28, 33, 40, 57, 80, 113, 160, 200]


def test_a_codebook_keeps_its_seed() -> None:
    router = AirRouter.Config(
        dim=4, num_experts=8, top_k=2, num_codewords=2, shortlist_size=4
    ).build()
    layer, seed = AirLayer("router", router), int(router.codebook.seed)
    fitted = fit(layer, torch.randn(20, 4), 2, passes=2, seed=0)
    layer.install(fitted)
    assert int(router.codebook.seed) == seed != int(fitted.seed)
    assert torch.equal(router.codebook.codewords, fitted.codewords)
