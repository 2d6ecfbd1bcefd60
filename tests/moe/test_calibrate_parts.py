"""The parts of calibration: measures, trials and sampling, each against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import airmoe
from airmoe import AirRouter, metrics
from airmoe.moe.swap import trials
from airmoe.moe.swap.activations import Sample, collect, hold_out, next_token_loss
from airmoe.moe.swap.codebook import new_codebook
from airmoe.moe.swap.layers import AirLayer, SwappedLayer
from airmoe.moe.swap.trials import fit, measure, recalls, sizes_to_try
from tests.moe.families import BATCHES, BUILD, calibrated, ids, swapped_routers


def test_measures_against_those_of_the_metrics() -> None:
    """An AirRouter's numbers are airmoe.metrics', token by token."""
    hidden = torch.randn(200, 16)
    config = AirRouter.Config(dim=16, num_experts=32, top_k=4, num_codewords=6, shortlist_size=8)
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
    layer, hidden = SwappedLayer("router", router), torch.randn(50, 32)
    whole = measure(layer, router.codebook, hidden, 9)
    (trial,) = recalls(layer, router.codebook, hidden, [9])
    monkeypatch.setattr(trials, "CHUNK_ELEMENTS", 7 * 16)
    parts = measure(layer, router.codebook, hidden, 9)
    for name in ("overlap", "mass_recall", "bound"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=1e-6)
    (again,) = recalls(layer, router.codebook, hidden, [9])
    assert again.overlap == pytest.approx(trial.overlap, abs=1e-6)
    assert again.mass_recall == pytest.approx(trial.mass_recall, abs=1e-6)


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


def test_a_router_s_own_mask_counts() -> None:
    """Padding that a layer of ours was told of, though no batch had an attention mask."""
    router = AirRouter.Config(
        dim=60, num_experts=8, top_k=2, num_codewords=2, shortlist_size=4
    ).build()
    real = torch.arange(36) % 3 != 0

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = router

        def forward(self, input_ids: torch.Tensor) -> None:
            self.router(torch.nn.functional.one_hot(input_ids.flatten(), 60).float(), mask=real)

    (rows,) = collect(Model(), [AirLayer("router", router)], [ids(1)], limit=100, seed=0)
    assert torch.equal(rows.argmax(-1), ids(1).flatten()[real])


def test_the_most_tokens_that_are_kept() -> None:
    report = airmoe.calibrate(calibrated("mixtral"), BATCHES, passes=1, max_tokens=60)
    assert (report.num_fitted, report.num_measured) == (45, 15)


def test_labels_are_left_out() -> None:
    model, seen = calibrated("mixtral"), []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(sorted(kwargs)), with_kwargs=True
    )
    airmoe.calibrate(model, [{"input_ids": ids(1), "labels": ids(1)}], passes=1)
    handle.remove()
    assert seen and all(names == ["input_ids"] for names in seen)


def test_a_batch_is_cut_by_its_ids() -> None:
    """Whatever stands before them, and only what has a row for each sequence."""
    rows, sizes = torch.arange(12).view(4, 3), torch.arange(4)
    given = {"sizes": sizes, "cache": torch.zeros(1, 5), "input_ids": rows, "mask": rows > 0}
    learned, held_out = hold_out([given])
    parts: list[Any] = [*learned, *held_out]
    for place, part in enumerate(parts):
        assert torch.equal(part["input_ids"], rows[place : place + 1])
        assert torch.equal(part["mask"], rows[place : place + 1] > 0)
        assert part["sizes"] is sizes and part["cache"] is given["cache"]
    learned, held_out = hold_out([{"sizes": sizes[:2], "inputs_embeds": torch.zeros(4, 3, 5)}])
    last: Any = held_out[0]
    assert len(learned) == 3 and last["inputs_embeds"].shape == (1, 3, 5)
    with pytest.raises(airmoe.ConfigError, match="single sequence"):
        hold_out([{"input_ids": rows[:1], "cache": torch.zeros(4, 5)}])


def test_the_loss_leaves_padding_out() -> None:
    model, text = calibrated("mixtral").eval(), ids(1)
    mask = torch.ones_like(text)
    mask[0, -3:] = 0
    with torch.no_grad():
        logits = model(text, attention_mask=mask).logits[:, :-1]
    real = mask[:, 1:].bool()
    expected = torch.nn.functional.cross_entropy(logits[real], text[:, 1:][real])
    found = next_token_loss(model, [{"input_ids": text, "attention_mask": mask}])
    assert found == pytest.approx(float(expected), rel=1e-5)
