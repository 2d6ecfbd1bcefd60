"""The codebook's life: its first batch, batches with nothing in them, bad tokens, freezing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import airmoe
from airmoe import Codebook
from tests.conformance.common import dense_weights
from tests.state.common import (
    CASES,
    assert_same,
    batch,
    build_layer,
    build_router,
    snapshot,
    tracked_layer,
)

KINDS = ["spherical", "euclidean", "static"]


def make_codebook(kind: str, num_codewords: int = 4, dead_below: float = 0.0) -> Codebook:
    torch.manual_seed(1)
    return Codebook(num_codewords, 8, kind, decay=0.8, dead_below=dead_below)  # type: ignore[arg-type]


EMPTY = {
    "no token": (0, None),
    "all masked": (22, torch.zeros(22, dtype=torch.bool)),
    "all NaN": (22, None),
}


@pytest.mark.parametrize("when", ["first", "after a step", "in a window"])
@pytest.mark.parametrize("what", EMPTY)
@pytest.mark.parametrize("case", [case for case in CASES if "air" in case])
def test_a_run_with_an_empty_micro_batch_equals_one_without(
    case: str, what: str, when: str
) -> None:
    count, mask = EMPTY[what]
    nothing = torch.full((count, 8), torch.nan) if what == "all NaN" else batch(5, count)

    def run(insert: bool) -> dict[str, Tensor]:
        router = build_router(case)
        optimizer = torch.optim.SGD(router.parameters(), 0.5)
        airmoe.track_optimizer(router, optimizer)
        if when != "first":
            router.observe(batch(0, 22))
            dense_weights(router(batch(0, 22))).square().sum().backward()
        if when == "after a step":
            optimizer.step()
            optimizer.zero_grad()
        if insert:
            router.observe(nothing, mask)
        router.observe(batch(1, 22))
        return {**snapshot(router, derived=False), "lists": router.shortlists().clone()}

    assert_same(run(insert=True), run(insert=False))


@pytest.mark.filterwarnings("ignore:.*without a tracked optimizer")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_bad_tokens_spoil_only_their_own_row(case: str, training: bool, padding: bool) -> None:
    """All else is as if they were masked out. As `padding` they are masked, and spoil nothing."""
    spoilt = batch(0).clone()
    spoilt[0, 3, 1], spoilt[1, 2, 5] = torch.nan, torch.inf
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 3] = mask[1, 2] = False
    layer, same = build_layer(case).train(training), build_layer(case).train(training)
    result = layer.forward_with_routing(spoilt.requires_grad_(), mask if padding else None)
    output, expected = result.hidden, same.forward_with_routing(batch(0), mask)
    if padding:
        assert torch.equal(output[~mask], expected.hidden[~mask])
    else:
        assert output[~mask].isnan().all(), "a bad token must not look like a good one"
    assert torch.equal(output[mask], expected.hidden[mask])
    assert_same(snapshot(layer, derived=False), snapshot(same, derived=False))
    # Nor do they spoil a gradient, even where that of their own row is NaN.
    for loss, routing in (
        ((output[mask] if padding else output).square().sum(), result.routing),
        (expected.hidden[mask].square().sum(), expected.routing),
    ):
        (loss + airmoe.load_balance_loss(routing) + airmoe.router_z_loss(routing)).backward()
    assert spoilt.grad is not None and (spoilt.grad[~mask] == 0).all()
    assert spoilt.grad.isfinite().all() and (spoilt.grad[mask] != 0).any()
    found, wanted = ([p.grad for p in module.parameters()] for module in (layer, same))
    assert_same(found, wanted)


@pytest.mark.parametrize("kind", ["spherical", "euclidean"])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1e39), (torch.float32, 3e38)])
def test_huge_tokens_are_left_out(kind: str, dtype: torch.dtype, value: float) -> None:
    router, hidden = build_router(codebook=kind), batch(0, 40).to(dtype)
    hidden[3] = value
    router.observe(hidden)
    assert bool(router.codebook.codewords.isfinite().all())
    routing = router(hidden)
    assert not routing.valid[3] and int(routing.valid.sum()) == 39
    assert bool(routing.expert_probs.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_more_codewords_than_tokens_works_and_warns_once(kind: str) -> None:
    codebook = make_codebook(kind, num_codewords=40, dead_below=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(3):
            codebook.update(batch(index, 7))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (0 if kind == "static" else 1)  # a static one replaces nothing
    assert all("tokens per codeword" in text and "dead_below" in text for text in messages)
    for name, tensor in snapshot(codebook).items():
        assert tensor.isfinite().all(), name
    if kind != "euclidean":
        torch.testing.assert_close(codebook.codewords.norm(dim=-1), torch.ones(40))
    if kind == "static":  # every token serves before one serves twice too often
        assert codebook.codewords.unique(dim=0).shape[0] == 7


def test_a_frozen_codebook_stays_while_shortlists_follow_the_centroids() -> None:
    layer, router, optimizer = tracked_layer(jitter_std=0.0)
    layer(batch(0)).pow(3).sum().backward()
    router.freeze_codebook()
    before, lists = snapshot(router.codebook), router.shortlists().clone()
    optimizer.step()
    for index in range(1, 4):
        layer(batch(index))
    assert_same(snapshot(router.codebook), before)
    assert int(router.micro_batches) == 4, "jitter must go on"
    assert not torch.equal(router.shortlists(), lists)


def test_loading_an_unstarted_codebook_starts_it_again() -> None:
    used, fresh = make_codebook("spherical"), make_codebook("spherical")
    start = fresh.state_dict()
    used.update(batch(0, 22))
    used.load_state_dict(start)
    used.update(batch(1, 22))
    fresh.update(batch(1, 22))
    assert_same(snapshot(used), snapshot(fresh))
