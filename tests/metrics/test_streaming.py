"""A meter over batches and ranks equals one over all tokens at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from airmoe import PeerRouter
from airmoe.metrics import (
    RoutingMeter,
    RoutingReport,
    codeword_usage,
    mass_recall,
    mass_recall_bound,
    overlap,
)
from tests.distributed.launch import WORLD, run_all
from tests.metrics.routers import DIM, NUM_EXPERTS, build, trained_air

Batch = tuple[Tensor, Tensor]
MEASURES = (mass_recall_bound, overlap, mass_recall)  # the bound first, before any forward


def batch(size: int) -> Batch:
    """Tokens with a mask, and one NaN if there are enough."""
    hidden = torch.randn(size, DIM)
    if size > 2:
        hidden[1] = torch.nan
    return hidden, torch.arange(size) % 4 != 3


def metered(router: Any, batches: Iterable[Batch]) -> RoutingReport:
    meter = RoutingMeter()
    router.eval()
    for hidden, mask in batches:
        meter.update(router(hidden, mask))
        meter.update_quality(router, hidden, mask)
    return meter.compute()


def flat(report: RoutingReport) -> dict[str, Any]:
    """One level of numbers; what is None is left out."""
    values = asdict(report)
    usage = values.pop("codewords") or {}
    values |= {f"codewords.{key}": value for key, value in usage.items()}
    return {key: value for key, value in values.items() if value is not None}


def assert_same(got: RoutingReport, want: RoutingReport) -> None:
    assert flat(got) == pytest.approx(flat(want), rel=1e-6)


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
    assert report.tokens == report.quality_tokens == (7 - 1) + 1 + (23 - 1) + 2


def test_report_is_what_the_single_metrics_say(router: Any) -> None:
    hidden, mask = batch(40)
    routing, report = router(hidden, mask), metered(router, [(hidden, mask)])
    chosen = routing.to_token_routing().expert_ids[routing.valid].flatten()
    counts = chosen.bincount(minlength=NUM_EXPERTS).double()
    shares = counts[counts > 0] / counts.sum()
    assert report.tokens == 29
    assert report.entropy == pytest.approx(-(shares * shares.log()).sum().item())
    assert report.dead_experts == pytest.approx((counts == 0).double().mean().item())
    assert report.load_imbalance == pytest.approx((counts.max() / counts.mean()).item())
    for measure in MEASURES:
        mean = measure(router, hidden, mask).nanmean().item()
        assert getattr(report, measure.__name__) == pytest.approx(mean), measure.__name__
    codes = router.codebook.assign(hidden[routing.valid]).bincount(minlength=4)
    assert report.codewords == codeword_usage(codes)


def test_what_was_not_measured_is_none(router: Any) -> None:
    meter, exact = RoutingMeter(), build("topk").eval()
    nothing = dict.fromkeys(asdict(meter.compute())) | {"tokens": 0, "quality_tokens": 0}
    assert asdict(meter.compute()) == nothing
    hidden, mask = torch.randn(3, DIM), torch.zeros(3, dtype=torch.bool)
    assert asdict(metered(router, [(hidden, mask)])) == nothing
    meter.update(exact(hidden))
    report = meter.compute()
    assert report.tokens == 3 and report.entropy is not None and report.codewords is None
    assert report.overlap is None and report.mass_recall_bound is None
    meter.update_quality(exact, hidden)
    report = meter.compute()
    assert report.overlap == 1.0 and report.mass_recall_bound is None


def test_quality_may_be_measured_on_some_batches_only(router: Any) -> None:
    meter = RoutingMeter()
    batches = [batch(8), batch(13), batch(5)]
    for hidden, mask in batches:
        meter.update(router(hidden, mask))
    meter.update_quality(router, *batches[1])
    report = meter.compute()
    measured = overlap(router, *batches[1])
    assert (report.tokens, report.quality_tokens) == (5 + 9 + 3, 9)
    assert report.overlap == pytest.approx(measured.nanmean().item())


def test_compute_may_be_called_at_any_time(router: Any) -> None:
    meter, batches = RoutingMeter(), [batch(8), batch(13)]
    for hidden, mask in batches:
        meter.update(router(hidden, mask))
        meter.update_quality(router, hidden, mask)
        meter.compute()
    assert_same(meter.compute(), metered(router, batches))
    meter.reset()
    assert meter.compute().tokens == 0


def test_counts_of_the_routing_are_not_written_to() -> None:
    router, meter = build("topk").eval(), RoutingMeter()
    routing = router(torch.randn(5, DIM))
    before = routing.expert_counts.clone()
    for _ in range(3):
        meter.update(routing)
    assert torch.equal(routing.expert_counts, before)
    assert meter.compute().tokens == 15


def test_the_meter_holds_no_tokens(router: Any) -> None:
    meter = RoutingMeter()
    for _ in range(3):
        hidden, mask = batch(200)
        meter.update(router(hidden, mask))
        meter.update_quality(router, hidden, mask)
    held = sum(leaf.numel() for leaf in tree_leaves(vars(meter)) if isinstance(leaf, Tensor))
    assert held <= NUM_EXPERTS + 4 + 3 + 3


def test_another_router_is_refused() -> None:
    meter = RoutingMeter()
    meter.update(build("topk").eval()(torch.randn(5, DIM)))
    with pytest.raises(ValueError, match="12 experts, must be 24"):
        meter.update(build("topk", num_experts=12).eval()(torch.randn(5, DIM)))


def test_peer_has_usage_but_no_quality() -> None:
    router = PeerRouter.Config(dim=DIM, num_experts=16, top_k=4, num_heads=2).build().eval()
    meter, hidden = RoutingMeter(), torch.randn(50, DIM)
    meter.update(router(hidden))
    assert 0 < (meter.compute().entropy or 0) <= math.log(16)
    with pytest.raises(ValueError, match="exact by construction"):
        meter.update_quality(router, hidden)


# -- ranks ----------------------------------------------------------------------------------

# Batches of rank 0 and rank 1: unequal sizes and numbers, then one rank that saw nothing.
SPLITS: list[tuple[list[int], list[int]]] = [([9, 4], [17]), ([11], []), ([], [1, 6])]


def batches_of(split: int, rank: int) -> list[Batch]:
    torch.manual_seed(10 * split + rank)
    return [batch(size) for size in SPLITS[split][rank]]


def meter_this_rank(rank: int, join: Callable[[], None]) -> list[dict[str, Any]]:
    join()
    reports = [flat(metered(build("air"), batches_of(split, rank))) for split in range(len(SPLITS))]
    meter, other = RoutingMeter(), build("topk", num_experts=NUM_EXPERTS + rank).eval()
    meter.update(other(torch.randn(5, DIM)))
    with pytest.raises(ValueError, match="ranks counted") as caught:
        meter.compute()
    return [*reports, {"error": str(caught.value)}]


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
    assert isinstance(here, list), here
    assert here == there  # every rank learns the same, to the last bit
    for split in range(len(SPLITS)):
        batches = batches_of(split, 0) + batches_of(split, 1)
        wanted = flat(metered(build("air"), batches))
        assert wanted.keys() >= {"overlap", "mass_recall_bound", "codewords.unused"}
        assert here[split] == pytest.approx(wanted, rel=1e-6)
    assert "[24, 25] experts, must agree" in here[-1]["error"]


@pytest.mark.slow
def test_sharded_routers_are_measured_alike(ranks: dict[str, list[Any]]) -> None:
    router = build("air", normalize_centroids=False)
    for rank, found in enumerate(ranks["sharded"]):
        assert isinstance(found, list), found
        hidden, mask = batches_of(0, rank)[0]
        wanted = [measure(router, hidden, mask) for measure in MEASURES]
        for got, want in zip(found, wanted * 2, strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)
