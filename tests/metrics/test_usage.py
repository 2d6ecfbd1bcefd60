"""Usage of experts and codewords in closed form, and the staleness of shortlists."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from airmoe import AirRouter, track_optimizer
from airmoe.metrics import (
    codeword_usage,
    dead_experts,
    shortlist_staleness,
    unlisted_experts,
    usage_entropy,
)
from tests.metrics.routers import DIM, NUM_EXPERTS, build, track, trained_air

# -- closed forms ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "entropy", "dead"),
    [
        ([3, 3, 3, 3], math.log(4), 0.0),
        ([0, 7, 0, 0, 0], 0.0, 0.8),
        ([2, 0, 1, 1], 1.5 * math.log(2), 0.25),
        ([1, 0], 0.0, 0.5),
        ([10**12, 10**12, 0], math.log(2), 1 / 3),
    ],
)
def test_entropy_in_nats_and_dead_experts(counts: list[int], entropy: float, dead: float) -> None:
    tensor = torch.tensor(counts)
    assert usage_entropy(tensor).item() == pytest.approx(entropy, abs=1e-12)
    assert dead_experts(tensor).item() == pytest.approx(dead, abs=1e-12)
    assert asdict(codeword_usage(tensor)) == pytest.approx(
        {"entropy": entropy, "perplexity": math.exp(entropy), "unused": dead}
    )


def test_nothing_counted_has_no_entropy_and_only_dead_experts() -> None:
    counts = torch.zeros(5, dtype=torch.int64)
    assert usage_entropy(counts).isnan()
    assert dead_experts(counts) == 1


def test_a_million_experts_lose_no_precision() -> None:
    counts = torch.ones(2**20, dtype=torch.int64)
    counts[: 2**19] = 3
    # Two halves with three quarters and one quarter of the choices.
    expected = 19 * math.log(2) + 2 * math.log(2) - 0.75 * math.log(3)
    assert usage_entropy(counts).item() == pytest.approx(expected, rel=1e-12)


def test_unlisted_experts() -> None:
    lists = torch.tensor([[0, 3, 5], [1, 3, 5]])
    assert unlisted_experts(lists, 8) == 0.5  # 2, 4, 6 and 7
    assert unlisted_experts(torch.arange(8).view(2, 4), 8) == 0


@pytest.mark.parametrize("counts", [torch.ones(2, 3), torch.ones(()), torch.ones(0)])
def test_counts_must_be_one_list(counts: Tensor) -> None:
    for measure in (usage_entropy, dead_experts, codeword_usage):
        with pytest.raises(ValueError, match="counts: got shape"):
            measure(counts)


def test_counts_of_a_routing() -> None:
    router: AirRouter = build("air").eval()
    hidden, mask = torch.randn(6, DIM), torch.tensor([True] * 5 + [False])
    routing = router(hidden, mask)
    chosen = set(routing.to_token_routing().expert_ids[:5].flatten().tolist())
    dead = dead_experts(routing.expert_counts).item()
    assert dead == pytest.approx(1 - len(chosen) / NUM_EXPERTS)
    codes = router.codebook.assign(hidden[:5]).bincount(minlength=4)
    assert asdict(codeword_usage(routing.cell_counts)) == asdict(codeword_usage(codes))


# -- staleness ------------------------------------------------------------------------------


def test_staleness_is_the_share_of_replaced_entries() -> None:
    router: AirRouter = build("air", jitter_std=0.0)
    track(router)
    router.observe(torch.randn(64, DIM))
    assert shortlist_staleness(router) == 0.0
    router.codebook.codewords.copy_(-router.codebook.codewords)
    stale = shortlist_staleness(router)
    fresh = build("air", jitter_std=0.0)
    fresh.load_state_dict(router.state_dict())
    before, after = router.training_lists.experts, fresh.eval().shortlists()
    gone = [
        len(set(old.tolist()) - set(new.tolist())) for old, new in zip(before, after, strict=True)
    ]
    assert stale == pytest.approx(sum(gone) / before.numel()) and stale > 0.3


def test_staleness_has_the_jitter_of_the_lists_in_use() -> None:
    """With a codebook that stands still, jitter alone must not look like movement."""
    router: AirRouter = build("air", jitter_std=0.3, codebook="static")
    track(router)
    for _ in range(3):
        router.observe(torch.randn(64, DIM))
        assert shortlist_staleness(router) == 0.0


def test_staleness_follows_alg_3() -> None:
    """Codebook steps add to it, an optimizer step too, the next micro-batch clears it."""
    router: AirRouter = build("air", codebook_decay=0.0)
    optimizer = torch.optim.SGD(router.parameters(), lr=10.0)
    track_optimizer(router, optimizer)
    router.observe(torch.randn(64, DIM))
    assert shortlist_staleness(router) == 0.0
    router.observe(torch.randn(64, DIM))
    after_codebook = shortlist_staleness(router)
    assert 0 < after_codebook < 1
    router.centroids.grad = torch.randn(NUM_EXPERTS, DIM)
    optimizer.step()
    assert shortlist_staleness(router) not in (0.0, after_codebook)
    router.observe(torch.randn(64, DIM))
    assert shortlist_staleness(router) == 0.0


def test_staleness_is_the_same_from_evaluation_mode() -> None:
    router = trained_air(jitter_std=0.3)
    stale = shortlist_staleness(router)
    assert stale > 0
    router.eval()
    assert shortlist_staleness(router) == stale
    assert not router.training


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_untracked_training_is_never_stale() -> None:
    assert shortlist_staleness(trained_air(tracked=False)) == 0.0
    assert math.isnan(shortlist_staleness(build("air")))  # no lists yet
