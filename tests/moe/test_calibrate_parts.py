"""The parts of calibration: measures, trials and sampling, each against its definition."""

from __future__ import annotations

import pytest
import torch

from airmoe import AirRouter, metrics
from airmoe.moe.swap.activations import Sample
from airmoe.moe.swap.layers import AirLayer, SwappedLayer
from airmoe.moe.swap.trials import fit, measure, recalls
from tests.moe.families import BUILD, calibrated, swapped_routers


def test_measures_against_those_of_the_metrics() -> None:
    """An AirRouter's numbers are airmoe.metrics', token by token, also with several probes."""
    hidden = torch.randn(200, 16)
    for probes in (1, 2):
        config = AirRouter.Config(
            dim=16, num_experts=32, top_k=4, num_codewords=6, shortlist_size=8, probes=probes
        )
        router = config.build().eval()
        layer = AirLayer("router", router)
        codebook = fit(layer, hidden, 6, passes=3, seed=1)
        layer.install(codebook)
        found = measure(layer, codebook, hidden, 8)
        close = {"rtol": 0, "atol": 1e-5}
        torch.testing.assert_close(found.overlap, metrics.overlap(router, hidden), **close)
        torch.testing.assert_close(found.mass_recall, metrics.mass_recall(router, hidden), **close)
        torch.testing.assert_close(found.bound, metrics.mass_recall_bound(router, hidden), **close)
        (trial,) = recalls(layer, codebook, hidden, [8])
        assert trial.mass_recall == pytest.approx(float(found.mass_recall.mean()), abs=1e-6)
        assert trial.overlap == pytest.approx(float(found.overlap.mean()), abs=1e-6)


@pytest.mark.parametrize("family", BUILD)
def test_trials_are_what_routing_gives(family: str) -> None:
    """All sizes at once against one size at a time; groups make that a difference."""
    router = swapped_routers(calibrated(family))[0]
    layer = SwappedLayer("router", router)
    hidden = torch.randn(80, 32)
    trials = recalls(layer, router.codebook, hidden, [8, 11, 16])
    for trial in trials:
        quality = measure(layer, router.codebook, hidden, trial.shortlist_size)
        assert trial.overlap == pytest.approx(float(quality.overlap.mean()), abs=1e-6)
        assert trial.mass_recall == pytest.approx(float(quality.mass_recall.mean()), abs=1e-6)
    assert trials[-1].overlap == 1 and trials[-1].scored == 16
    exact = router.full_logits(hidden)
    with torch.no_grad():
        _, _, chosen = router(hidden)
    right = router.select(exact, exact.dtype)[1]
    share = (right[:, :, None] == chosen[:, None]).any(-1).float().mean()
    assert recalls(layer, router.codebook, hidden, [8])[0].overlap == pytest.approx(float(share))


@pytest.mark.parametrize("family", BUILD)
def test_the_bound_holds(family: str) -> None:
    """For softmax and sigmoid, with bias and groups; near the codeword, where it says something."""
    router = swapped_routers(calibrated(family))[0]
    layer = SwappedLayer("router", router)
    reach = router.codebook.representatives()
    hidden = reach.repeat(30, 1) + 0.02 * torch.randn(120, 32)
    quality = measure(layer, router.codebook, hidden, 8)
    assert (quality.bound <= quality.mass_recall + 1e-6).all()
    assert quality.bound.mean() > 0.3 * quality.mass_recall.mean()


def test_a_sample_is_even_and_bounded() -> None:
    sample = Sample(50, seed=0)
    for start in range(0, 4000, 40):
        sample.add(torch.arange(start, start + 40.0).unsqueeze(-1))
    rows = sample.rows().squeeze(-1)
    assert rows.shape == (50,) and len(set(rows.tolist())) == 50
    assert torch.equal(rows, rows.sort().values)
    assert 1500 < rows.mean() < 2500 and rows.min() < 400 and rows.max() > 3600
