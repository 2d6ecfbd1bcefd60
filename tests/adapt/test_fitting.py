"""The parts of calibration: held-out batches, samples, measures and trials by their definitions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from airmoe.adapt import CalibrationReport, LayerReport, Trial
from airmoe.adapt.fitting import collect, hold_out, measure, next_token_loss, sizes_to_try
from airmoe.adapt.shortlist_router import ScaledCodebook
from tests.adapt.models import BUILD, build, calibrated, ids, swap, swapped_routers


def test_whole_texts_are_held_out() -> None:
    """Every fourth batch, of fewer the last, of one its sequences: never a token of a text."""
    rows = torch.arange(8 * 3).view(8, 3)
    eight, text = [*rows.split(1)], {"input_ids": rows, "attention_mask": rows > 0}
    cases: list[tuple[Any, list[int]]] = [
        (eight, [3, 7]),
        (eight[:3], [2]),
        (iter(eight), [3, 7]),
        ([rows], [3, 7]),
        ([rows[:2]], [1]),
        ([{**text, "labels": rows, "use_cache": False}], [3, 7]),
    ]
    for given, expected in cases:
        learned, held_out = hold_out(given)
        inputs = [batch["input_ids"] for batch in (*learned, *held_out)]
        kept = torch.cat(inputs[len(learned) :])
        assert torch.equal(kept, rows[expected])
        assert sorted(torch.cat(inputs)[:, 0].tolist()) == rows[: len(inputs), 0].tolist()
        for batch in (*learned, *held_out):
            real = batch["input_ids"] > 0
            assert "labels" not in batch and torch.equal(batch.get("attention_mask", real), real)


def test_samples_come_from_all_batches_and_leave_padding_out() -> None:
    model = build("mixtral").eval()
    swap(model)
    routers = swapped_routers(model)
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[0, :4] = 0
    batches = [{"input_ids": ids(seed), "attention_mask": mask} for seed in range(5)]
    seen: list[torch.Tensor] = []
    handle = routers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        everything = collect(model, routers, batches, limit=1000, seed=0)
        few = collect(model, routers, batches, limit=23, seed=0)
    handle.remove()
    real = [hidden.reshape(-1, 32)[mask.flatten() != 0] for hidden in seen[:5]]
    torch.testing.assert_close(everything[0], torch.cat(real), rtol=0, atol=0)
    assert [len(rows) for rows in few] == [23, 23]
    found = [[bool((part == row).all(-1).any()) for part in real] for row in few[0]]
    places = [row.index(True) for row in found]
    assert places == sorted(places)
    assert [places.count(batch) for batch in range(5)] == [5, 5, 5, 5, 3]


def test_the_loss_leaves_padding_out() -> None:
    model, text = calibrated("mixtral"), ids(1)
    mask = torch.ones_like(text)
    mask[0, -3:] = 0
    with torch.no_grad():
        logits = model(text, attention_mask=mask).logits[:, :-1]
        found = next_token_loss(model, [{"input_ids": text, "attention_mask": mask}])
        embedded = {"inputs_embeds": model.get_input_embeddings()(text)}
        assert next_token_loss(model, [embedded]) is None
        assert next_token_loss(model.model, [{"input_ids": text}]) is None
    real = mask[:, 1:].bool()
    expected = torch.nn.functional.cross_entropy(logits[real], text[:, 1:][real])
    assert found == pytest.approx(float(expected), rel=1e-5)


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


def test_sizes_from_the_smallest_to_all() -> None:
    router = swapped_routers(calibrated("mixtral"))[0]
    assert sizes_to_try(router) == [2, 3, 4, 6, 8, 11, 16]
    router = swapped_routers(calibrated("deepseek_v3", size=9))[0]  # two of each group at least
    assert sizes_to_try(router) == [8, 9, 11, 16]


def test_the_worst_layer_decides_what_is_suggested() -> None:
    layers = []
    for number, overlaps in enumerate([(0.8, 0.95, 0.97, 1.0), (0.8, 0.7, 0.91, 0.99)]):
        sizes = [(8, 16), (4, 8), (4, 16), (8, 32)]
        trials = tuple(
            Trial(*pair, overlap, mass_recall=0.5, bound=0.1, scored=sum(pair))
            for pair, overlap in zip(sizes, overlaps, strict=True)
        )
        about: dict[str, Any] = {"name": f"layer {number}", "num_experts": 64, "trials": trials}
        layers.append(LayerReport(**asdict(trials[0]), **about))
    report = CalibrationReport(tuple(layers), 30, 10, 0.9)
    assert report.suggestion is layers[1].trials[2]
    assert "num_codewords=4, shortlist_size=16 (worst layer 0.910), 20 products" in str(report)
