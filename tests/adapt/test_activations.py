"""What `calibrate` reads: whole texts held out, and even, bounded samples without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from airmoe.adapt.activations import Sample, collect, hold_out, next_token_loss
from airmoe.adapt.fitting import AirLayer
from tests.adapt.models import air, build, calibrated, ids, swap, swapped_routers


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


def test_a_batch_is_cut_by_its_ids() -> None:
    """Whatever comes before them, and only what has a row for each sequence."""
    rows, sizes = torch.arange(12).view(4, 3), torch.arange(9)
    given = {"sizes": sizes, "cache": torch.zeros(1, 5), "input_ids": rows, "mask": rows > 0}
    learned, held_out = hold_out([given])
    for place, part in enumerate((*learned, *held_out)):
        assert torch.equal(part["input_ids"], rows[place : place + 1])
        assert torch.equal(part["mask"], rows[place : place + 1] > 0)
        assert part["sizes"] is sizes and part["cache"] is given["cache"]
    learned, held_out = hold_out([{"sizes": sizes[:2], "inputs_embeds": torch.zeros(4, 3, 5)}])
    assert len(learned) == 3 and held_out[0]["inputs_embeds"].shape == (1, 3, 5)
    learned, _ = hold_out([{"input_ids": rows[:1], "cache": torch.zeros(4, 5)}])
    assert learned == []


def test_a_sample_is_even_and_bounded() -> None:
    sample = Sample(torch.empty(1, 1), limit=50, seed=0)
    for start in range(0, 4000, 40):
        sample.add(torch.arange(start, start + 40.0).unsqueeze(-1))
    rows = sample.rows().squeeze(-1)
    assert rows.shape == (50,) and len(set(rows.tolist())) == 50
    assert torch.equal(rows, rows.sort().values)
    assert 1500 < rows.mean() < 2500 and rows.min() < 400 and rows.max() > 3600


def test_samples_leave_padding_out() -> None:
    model = swap(build("mixtral").eval())
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
    real = torch.cat([hidden.reshape(-1, 32)[mask.flatten() != 0] for hidden in seen[:5]])
    torch.testing.assert_close(everything[0], real, rtol=0, atol=0)
    assert [len(rows) for rows in few] == [23, 23]


def test_a_router_s_own_mask_counts() -> None:
    """The mask a layer passes to its router, though no batch had an attention mask."""
    router = air(dim=60).build().eval()
    real = torch.arange(36) % 3 != 0

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = router

        def forward(self, input_ids: torch.Tensor) -> None:
            self.router(torch.nn.functional.one_hot(input_ids.flatten(), 60).float(), mask=real)

    batch = {"input_ids": ids(1)}
    with torch.no_grad():
        (rows,) = collect(Model(), [AirLayer(router)], [batch], limit=100, seed=0)
    assert torch.equal(rows.argmax(-1), ids(1).flatten()[real])


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
