"""Sampling the hidden states of routers: even, bounded, without padding, whole texts held out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import airmoe
from airmoe import AirRouter
from airmoe.adapt.activations import Sample, collect, hold_out, next_token_loss
from airmoe.adapt.fitting import AirLayer
from tests.adapt.models import BATCHES, calibrated, ids


def test_a_sample_is_even_and_bounded() -> None:
    sample = Sample(50, seed=0)
    for start in range(0, 4000, 40):
        sample.add(torch.arange(start, start + 40.0).unsqueeze(-1))
    rows = sample.rows().squeeze(-1)
    assert rows.shape == (50,) and len(set(rows.tolist())) == 50
    assert torch.equal(rows, rows.sort().values)
    assert 1500 < rows.mean() < 2500 and rows.min() < 400 and rows.max() > 3600


def test_whole_texts_are_held_out() -> None:
    """Every fourth batch, of fewer the last, of one its sequences: never a token of a text."""
    rows = torch.arange(8 * 3).view(8, 3)
    eight = [part for part in rows.split(1)]
    for given, expected in (
        (eight, [3, 7]),
        (eight[:3], [2]),
        ([rows], [3, 7]),
        ([rows[:2]], [1]),
        ([{"input_ids": rows, "attention_mask": rows > 0, "use_cache": False}], [3, 7]),
    ):
        learned, held_out = hold_out(given)
        ids_of = [b if isinstance(b, Tensor) else b["input_ids"] for b in (*learned, *held_out)]
        kept = torch.cat(ids_of[len(learned) :])
        assert torch.equal(kept, rows[expected])
        assert sorted(torch.cat(ids_of)[:, 0].tolist()) == rows[: len(ids_of), 0].tolist()


def test_a_batch_is_cut_by_its_ids() -> None:
    """Whatever comes before them, and only what has a row for each sequence."""
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


def test_a_router_s_own_mask_counts() -> None:
    """The mask a layer passes to its router, though no batch had an attention mask."""
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
