"""Overlap, mass recall and the bound of Prop. 1 against the paper's formulas."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from airmoe import AirRouter, PeerRouter
from airmoe.metrics import (
    RoutingMeter,
    mass_recall,
    mass_recall_bound,
    overlap,
    quality,
    routing_quality,
    shortlist_staleness,
)
from tests import oracles
from tests.metrics.routers import DIM, NUM_EXPERTS, TOP_K, build, choices, exact_logits, trained_air
from tests.model.test_linear_cross_entropy import LargestTensor
from tests.state.common import assert_same
from tests.tolerance import assert_close

CASES = [
    pytest.param("topk", {}, id="topk"),
    pytest.param("hierarchical", {}, id="hierarchical"),
    pytest.param("air", {}, id="air"),
    pytest.param("air", {"normalize_centroids": False}, id="air-free"),
    pytest.param("air", {"codebook": "euclidean"}, id="air-euclidean"),
    pytest.param("air", {"shortlist_size": TOP_K}, id="air-smallest"),
]
EXPERT_CHOICE = [
    pytest.param("expert_choice", {}, id="expert_choice"),
    pytest.param("air", {"gate": "expert_choice"}, id="air"),
]
MEASURES = [overlap, mass_recall, mass_recall_bound]


DTYPES = (torch.float64, torch.float32)


def spread_norms(router: Any) -> None:
    """Without the projection other experts are the best."""
    with torch.no_grad():
        router.centroids.mul_(torch.linspace(0.5, 1.5, NUM_EXPERTS)[:, None])


def prepared(name: str, options: dict[str, Any]) -> Any:
    return trained_air(**options) if name == "air" else build(name, **options)


# -- against the definitions ----------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_overlap_and_mass_recall_are_the_definitions(
    name: str, options: dict[str, Any], scale: float
) -> None:
    router, hidden = prepared(name, options), torch.randn(41, DIM) * scale
    spread_norms(router)
    results = []
    for dtype in DTYPES:
        logits, routed = exact_logits(router, hidden, dtype), choices(router, hidden, dtype)
        shares = [
            len(set(heads[0].expert_ids) & set(oracles.top_ids(row, TOP_K))) / TOP_K
            for heads, row in zip(routed, logits, strict=True)
        ]
        shares = torch.tensor(shares, dtype=dtype)
        results.append((shares, oracles.mass_recall(routed, logits).detach()))
    assert_close(overlap(router, hidden), results[0][0], results[1][0], "overlap")
    size = 0.0 if name == "air" else exact_logits(router, hidden).abs().max().item()
    assert_close(mass_recall(router, hidden), results[0][1], results[1][1], "mass recall", size)
    assert name == "topk" or 0 < results[0][0].mean() < 1  # or the case shows nothing


def test_a_shortlist_of_all_experts_keeps_everything() -> None:
    """Also with large logits: weights of chosen experts get tiny, but 0 would mean not chosen."""
    router = trained_air(shortlist_size=NUM_EXPERTS)
    for scale in (3, 300):
        hidden = torch.randn(200, DIM) * scale
        assert (overlap(router, hidden) == 1).all()
        assert (overlap(build("topk"), hidden) == 1).all()
    torch.testing.assert_close(mass_recall(router, torch.randn(200, DIM) * 3), torch.ones(200))


@pytest.mark.parametrize(("name", "options"), EXPERT_CHOICE)
def test_expert_choice_is_measured_by_what_tokens_got(name: str, options: dict[str, Any]) -> None:
    router, hidden = prepared(name, options), torch.randn(30, DIM) * 2
    router.eval()
    routing = router(hidden).to_token_routing()
    logits, shares = exact_logits(router, hidden), []
    for row, ids, weights in zip(logits, routing.expert_ids, routing.weights, strict=True):
        exact = set(oracles.top_ids(row, TOP_K))
        shares.append(len(exact & set(ids[weights > 0].tolist())) / TOP_K)
    assert len(set(shares)) > 2
    assert overlap(router, hidden).tolist() == pytest.approx(shares, abs=1e-6)


@pytest.mark.parametrize(("name", "options"), EXPERT_CHOICE)
def test_tokens_are_compared_as_they_were_routed_among_all(
    name: str, options: dict[str, Any]
) -> None:
    router, hidden = prepared(name, options | {"capacity_factor": 0.3}), torch.randn(96, DIM) * 2
    mask = torch.rand(96) > 0.2
    rows = slice(None, 80, 5)
    whole, some = (routing_quality(router, hidden, mask, rows=part) for part in (slice(None), rows))
    for field in ("overlap", "mass_recall", "valid"):
        wanted, found = (getattr(quality, field) for quality in (whole, some))
        torch.testing.assert_close(found, wanted[rows], equal_nan=True)
    alone = routing_quality(router, hidden[rows], mask[rows])
    assert alone.overlap.nanmean() > some.overlap.nanmean()  # fewer to compete with


# -- ties and unused slots ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picked", "expected"),
    [
        ([0, 3], 1.0),  # of three tied for the second place any will do
        ([1, 2], 0.5),  # but they cannot stand in for the first
        ([3, 4], 0.5),
        ([0, 4], 0.5),
        ([0, -1], 0.5),  # an unused slot chooses nothing
        ([-1, 4], 0.0),
        ([1, 2, 3, 0], 1.0),  # more choices than K cannot exceed 1
    ],
)
def test_overlap_with_ties(picked: list[int], expected: float) -> None:
    logits = torch.tensor([[5.0, 3.0, 3.0, 3.0, 1.0]])
    assert quality._overlap_with_exact(logits, torch.tensor([picked]), 2).tolist() == [expected]


# -- the bound of Prop. 1 -------------------------------------------------------------------


def bound_by_formula(router: AirRouter, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(-2 |w| |h - c|) rho_M(c)."""
    hidden, codewords = hidden.to(dtype), router.codebook.codewords.to(dtype)
    kind: Any = router.config.codebook
    codewords = codewords[[oracles.nearest_codeword(h, codewords, kind) for h in hidden]]
    norms = router.centroids.detach().to(dtype).norm(dim=1)
    largest = 1.0 if router.config.normalize_centroids else norms.max()
    probs = exact_logits(router, codewords, dtype).softmax(1)
    captured = probs.topk(router.config.shortlist_size, dim=1).values.sum(1)
    return torch.exp(-2 * largest * (hidden - codewords).norm(dim=1)) * captured


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("codebook", ["spherical", "euclidean"])
def test_bound_is_the_formula(normalize: bool, codebook: str) -> None:
    router = trained_air(normalize_centroids=normalize, codebook=codebook)
    spread_norms(router)
    hidden = F.normalize(torch.randn(33, DIM), dim=1)
    exact, plain = (bound_by_formula(router, hidden, dtype) for dtype in DTYPES)
    assert_close(mass_recall_bound(router, hidden), exact, plain, "bound")
    assert exact.max() > 0.01
    found = mass_recall_bound(router.double(), hidden.double())
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


@settings(max_examples=60)
@given(
    scale=st.sampled_from([1e-3, 0.1, 1.0, 3.0, 30.0]),
    unit_norm=st.booleans(),
    centroid_scale=st.sampled_from([0.05, 1.0, 4.0]),
    normalize=st.booleans(),
    codebook=st.sampled_from(["spherical", "euclidean", "static"]),
    shortlist_size=st.integers(TOP_K, NUM_EXPERTS),
    seed=st.integers(0, 2**31),
)
def test_bound_never_exceeds_mass_recall(
    scale: float,
    unit_norm: bool,
    centroid_scale: float,
    normalize: bool,
    codebook: str,
    shortlist_size: int,
    seed: int,
) -> None:
    options = {"normalize_centroids": normalize, "codebook": codebook}
    router = trained_air(seed, shortlist_size=shortlist_size, **options)
    with torch.no_grad():
        router.centroids.mul_(centroid_scale)
    hidden = torch.randn(16, DIM)
    hidden = F.normalize(hidden, dim=1) if unit_norm else hidden * scale
    bound, recall = mass_recall_bound(router, hidden), mass_recall(router, hidden)
    # float32 logits are off by about eps |logit| each, and so is the logarithm of the recall.
    slack = 8 * torch.finfo(torch.float32).eps * (1 + exact_logits(router, hidden).abs().max())
    assert (recall > 0).all() and (recall <= 1 + slack).all()
    assert (bound >= 0).all()
    assert (bound <= recall * (1 + slack)).all()


# -- tokens that do not count, precision, memory --------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
def test_masked_and_non_finite_tokens_are_nan_and_change_nothing(measure: Any) -> None:
    router, hidden = trained_air(), torch.randn(20, DIM)
    mask = torch.arange(20) % 5 != 0
    hidden[3, 2], hidden[7, 0] = torch.nan, torch.inf
    counted = mask & hidden.isfinite().all(1)
    found = measure(router, hidden.clone().requires_grad_(), mask)
    assert torch.equal(found.isnan(), ~counted) and not found.requires_grad
    torch.testing.assert_close(found[counted], measure(router, hidden[counted]))
    assert found.dtype == torch.float32
    assert measure(router, torch.empty(0, DIM)).shape == (0,)
    assert measure(router, torch.randn(4, DIM), torch.zeros(4, dtype=torch.bool)).isnan().all()


@pytest.mark.parametrize("measure", MEASURES)
def test_bfloat16_tokens_and_autocast_are_measured_in_full_precision(measure: Any) -> None:
    router, hidden = trained_air(), torch.randn(50, DIM).bfloat16()
    expected = measure(router, hidden.float())
    assert torch.equal(measure(router, hidden), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(measure(router, hidden.float()), expected)


@pytest.mark.parametrize("measure", MEASURES)
def test_memory_is_bounded_whatever_the_number_of_tokens(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = trained_air(num_experts=400, num_codewords=16, shortlist_size=TOP_K)
    hidden = torch.randn(500, DIM)
    whole = measure(router, hidden)
    monkeypatch.setattr(quality, "CHUNK_BYTES", 0)  # leaves the size of the centroids
    with LargestTensor() as largest:
        parts = measure(router, hidden)
    torch.testing.assert_close(parts, whole)
    # The router's own tensors are measured too: tokens x codewords is the largest of them.
    assert largest.elements <= 500 * 16 < 500 * 400 / 20


# -- the router stays as it was -------------------------------------------------------------


def everything(router: AirRouter) -> dict[str, Any]:
    """All that training continues from; the evaluation lists are a separate cache."""
    found: dict[str, Any] = {k: v.clone() for k, v in router.state_dict().items()}
    found["experts"] = router.training_lists.experts.clone()
    found["norms"] = router.training_lists.inverse_norms.clone()
    found["flags"] = [module.training for module in router.modules()]
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_measuring_changes_nothing(training: bool, tracked: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the untracked optimizer
        router = trained_air(tracked=tracked, jitter_std=0.5)
    hidden = torch.randn(30, DIM)
    router.train(training)
    router.codebook.eval()  # a flag of its own must survive too
    before, key, gates = everything(router), router.training_lists.key, router(hidden).gates
    (wanted,) = torch.autograd.grad(gates.square().sum(), router.centroids, retain_graph=True)
    for measure in MEASURES:
        measure(router, hidden)
    shortlist_staleness(router)
    assert_same(everything(router), before)
    assert router.training_lists.key == key
    # The backward of the earlier forward, then another forward.
    (grad,) = torch.autograd.grad(gates.square().sum(), router.centroids)
    assert torch.equal(grad, wanted) and grad.abs().max() > 0
    assert torch.equal(router(hidden).gates, gates)


def test_the_training_flag_survives_an_error() -> None:
    router = trained_air()
    with pytest.raises(ValueError, match="hidden"):
        routing_quality(router, torch.randn(3, DIM + 1))
    assert router.training and router.codebook.training


# -- refusals -------------------------------------------------------------------------------


def test_routers_that_cannot_be_measured_are_refused() -> None:
    peer = PeerRouter.Config(dim=DIM, num_experts=16, top_k=4, num_heads=2).build()
    peer, hidden, meter = peer.eval(), torch.randn(50, DIM), RoutingMeter()
    for measure in (overlap, mass_recall, meter.update_quality):
        with pytest.raises(ValueError, match="exact by construction"):
            measure(peer, hidden)
    meter.update(peer(hidden))  # usage it has
    assert 0 < (meter.compute().entropy or 0) <= math.log(16)
    with pytest.raises(ValueError, match="TopKRouter, needs an AirRouter"):
        mass_recall_bound(build("topk"), torch.randn(3, DIM))
