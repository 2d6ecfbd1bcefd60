"""Usage in closed form, the staleness of lists, and a meter over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from airmoe import AirRouter, track_optimizer
from airmoe.metrics import (
    RoutingMeter,
    dead_experts,
    mass_recall,
    mass_recall_bound,
    overlap,
    shortlist_staleness,
    unlisted_experts,
    usage_entropy,
)
from tests.distributed.launch import WORLD, run_all
from tests.metrics.routers import DIM, NUM_EXPERTS, build, track, trained_air

# -- closed forms ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "entropy", "dead"),
    [
        ([3, 3, 3, 3], math.log(4), 0.0),
        ([0, 7, 0, 0, 0], 0.0, 0.8),
        ([2, 0, 1, 1], 1.5 * math.log(2), 0.25),
        ([10**12, 10**12, 0], math.log(2), 1 / 3),
        ([0, 0], math.nan, 1.0),
        # A million experts, of which one half has three quarters of the choices.
        ([3] * 2**19 + [1] * 2**19, 21 * math.log(2) - 0.75 * math.log(3), 0.0),
    ],
    ids=["equal", "one", "some", "many tokens", "none", "many experts"],
)
def test_entropy_in_nats_and_dead_experts(counts: list[int], entropy: float, dead: float) -> None:
    tensor = torch.tensor(counts)
    assert usage_entropy(tensor).item() == pytest.approx(entropy, abs=1e-12, nan_ok=True)
    assert dead_experts(tensor).item() == pytest.approx(dead, abs=1e-12)


def test_unlisted_experts() -> None:
    lists = torch.tensor([[0, 3, 5], [1, 3, 5]])
    assert unlisted_experts(lists, 8) == 0.5  # 2, 4, 6 and 7
    assert unlisted_experts(torch.arange(8).view(2, 4), 8) == 0


@pytest.mark.parametrize("counts", [torch.ones(2, 3), torch.ones(()), torch.ones(0)])
def test_counts_must_be_one_list(counts: Tensor) -> None:
    for measure in (usage_entropy, dead_experts):
        with pytest.raises(ValueError, match=r"counts: got .shape"):
            measure(counts)


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
    assert shortlist_staleness(router.eval()) == after_codebook and not router.training
    router.train().centroids.grad = torch.randn(NUM_EXPERTS, DIM)
    optimizer.step()
    assert shortlist_staleness(router) not in (0.0, after_codebook)
    router.observe(torch.randn(64, DIM))
    assert shortlist_staleness(router) == 0.0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_untracked_training_is_never_stale() -> None:
    assert shortlist_staleness(trained_air(tracked=False)) == 0.0
    assert math.isnan(shortlist_staleness(build("air")))  # no lists yet


# -- the meter ------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]
MEASURES = (mass_recall_bound, overlap, mass_recall)  # the bound first, before any forward


def batch(size: int) -> Batch:
    """Tokens with a mask, and one NaN if there are enough."""
    hidden = torch.randn(size, DIM)
    if size > 2:
        hidden[1] = torch.nan
    return hidden, torch.arange(size) % 4 != 3


def metered(router: Any, batches: Iterable[Batch], ask_often: bool = True) -> dict[str, Any]:
    """What a meter reports after these batches, and the totals it counted."""
    meter = RoutingMeter()
    router.eval()
    for hidden, mask in batches:
        meter.update(router(hidden, mask))
        meter.update_quality(router, hidden, mask)
        if ask_often:
            meter.compute()  # may be asked at any time
    found = vars(meter.compute())
    return found | {name: counts.tolist() for name, counts in meter.totals.items()}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == (value and pytest.approx(value, rel=1e-6)), name


@pytest.fixture
def router() -> Any:
    return trained_air().eval()


@pytest.mark.parametrize("name", ["air", "hierarchical", "topk"])
def test_batches_add_up_to_one(name: str) -> None:
    router = trained_air() if name == "air" else build(name)
    batches = [batch(size) for size in (9, 1, 30, 2)]
    joined = torch.cat([hidden for hidden, _ in batches]), torch.cat([mask for _, mask in batches])
    report = metered(router, batches)
    assert_same(report, metered(router, [joined]))
    assert sum(report["experts"]) == ((7 - 1) + 1 + (23 - 1) + 2) * router.config.top_k


def test_report_is_what_the_single_metrics_say(router: Any) -> None:
    hidden, mask = batch(40)
    routing, report = router(hidden, mask), metered(router, [(hidden, mask)])
    chosen = routing.to_token_routing().expert_ids[routing.valid].flatten()
    counts = chosen.bincount(minlength=NUM_EXPERTS)
    shares = counts[counts > 0] / counts.sum()
    assert report["entropy"] == pytest.approx(-(shares * shares.log()).sum().item())
    assert report["dead_experts"] == pytest.approx((counts == 0).double().mean().item())
    assert report["load_imbalance"] == pytest.approx(counts.max().item() / counts.double().mean())
    for measure in MEASURES:
        mean = measure(router, hidden, mask).nanmean().item()
        assert report[measure.__name__] == pytest.approx(mean), measure.__name__
    codes = router.codebook.assign(hidden[routing.valid]).bincount(minlength=4)
    assert report["experts"] == counts.tolist() and report["cells"] == codes.tolist()
    assert report["codeword_perplexity"] == pytest.approx(usage_entropy(codes).exp().item())


def test_what_was_not_measured_is_none(router: Any) -> None:
    nothing = vars(RoutingMeter().compute())
    assert set(nothing.values()) == {None}
    hidden, mask = torch.randn(3, DIM), torch.zeros(3, dtype=torch.bool)
    assert metered(router, [(hidden, mask)]).items() >= nothing.items()
    meter, exact = RoutingMeter(), build("topk").eval()
    meter.update(exact(hidden))
    report = meter.compute()
    assert report.entropy is not None and report.codeword_perplexity is None
    assert report.overlap is None and report.mass_recall_bound is None
    meter.update_quality(exact, hidden)
    assert (meter.compute().overlap, meter.compute().mass_recall_bound) == (1.0, None)


def test_quality_may_be_measured_on_some_batches_only(router: Any) -> None:
    meter, batches = RoutingMeter(), [batch(8), batch(13), batch(5)]
    for hidden, mask in batches:
        meter.update(router(hidden, mask))
    meter.update_quality(router, *batches[1])
    measured = overlap(router, *batches[1]).nanmean().item()
    assert meter.compute().overlap == pytest.approx(measured)


def test_the_meter_keeps_no_tokens_and_writes_to_no_routing(router: Any) -> None:
    meter, routings = RoutingMeter(), []
    for _ in range(3):
        hidden, mask = batch(200)
        routings.append(router(hidden, mask))
        first = routings[0].expert_counts.clone()
        meter.update(routings[-1])
        meter.update_quality(router, hidden, mask)
        assert torch.equal(routings[0].expert_counts, first)
    held = sum(leaf.numel() for leaf in tree_leaves(vars(meter)) if isinstance(leaf, Tensor))
    assert held <= NUM_EXPERTS + 4 + 6


# -- ranks ----------------------------------------------------------------------------------

# Batches of rank 0 and rank 1: unequal sizes and numbers, then one rank that saw nothing.
SPLITS: list[tuple[list[int], list[int]]] = [([9, 4], [17]), ([11], []), ([], [1, 6])]


def batches_of(split: int, rank: int) -> list[Batch]:
    torch.manual_seed(10 * split + rank)
    return [batch(size) for size in SPLITS[split][rank]]


def meter_this_rank(rank: int, join: Callable[[], None]) -> list[dict[str, Any]]:
    """`compute` is a collective: ranks call it once, however many batches they have."""
    join()
    splits = range(len(SPLITS))
    return [metered(build("air"), batches_of(split, rank), ask_often=False) for split in splits]


def measure_sharded(rank: int, join: Callable[[], None]) -> list[Tensor]:
    """All measures with the router as an FSDP2 unit, then inside one, before any forward."""
    router = build("air", normalize_centroids=False)
    join()
    mesh = init_device_mesh("cpu", (WORLD,))
    hidden, mask = batches_of(0, rank)[0]
    fully_shard(router, mesh=mesh, reshard_after_forward=True)
    inner = build("air", normalize_centroids=False)
    fully_shard(nn.Sequential(inner), mesh=mesh)
    found = []
    for sharded in (router, inner):
        found += [measure(sharded, hidden, mask) for measure in MEASURES]
        assert isinstance(sharded.centroids, DTensor) and sharded.centroids.requires_grad
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scenarios = {"meter": meter_this_rank, "sharded": measure_sharded}
    return run_all(scenarios, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
def test_ranks_add_up_to_one_process(ranks: dict[str, list[Any]]) -> None:
    here, there = ranks["meter"]
    assert here == there  # every rank learns the same, to the last bit
    for split in range(len(SPLITS)):
        wanted = metered(build("air"), batches_of(split, 0) + batches_of(split, 1))
        assert None not in wanted.values()
        assert_same(here[split], wanted)


@pytest.mark.slow
def test_sharded_routers_are_measured_alike(ranks: dict[str, list[Any]]) -> None:
    router = build("air", normalize_centroids=False)
    for rank, found in enumerate(ranks["sharded"]):
        hidden, mask = batches_of(0, rank)[0]
        wanted = [measure(router, hidden, mask) for measure in MEASURES]
        torch.testing.assert_close(found, wanted * 2, equal_nan=True)
