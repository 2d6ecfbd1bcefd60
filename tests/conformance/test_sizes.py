"""Batches large enough to be worked on in pieces, against the plain formula in one piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe import CellRouting
from tests import oracles
from tests.conformance.common import (
    Case,
    all_logits,
    candidates,
    dense_weights,
    granular,
    leaves,
    row_cells,
    set_codebook,
    tokens,
)
from tests.tolerance import assert_close, score_slack

DIM, TOP_K = 16, 32
SIZES = {"dim": DIM, "num_experts": 1089, "top_k": TOP_K}
LARGE = {**SIZES, "num_experts": 2025}  # scored in full, in pieces of four million
CASES = [
    Case("air", {**SIZES, "num_codewords": 9, "shortlist_size": 300}),
    Case("hierarchical", {**SIZES, "num_clusters": 33, "num_selected_clusters": 8}),
    Case("peer", {**SIZES, "num_heads": 1}),
    Case("topk", LARGE),
    Case("expert_choice", LARGE),
]
COUNTS = {1089: 1201, 2025: 2105}  # tokens
DTYPES = (torch.float64, torch.float32)


def plain_weights(case: Case, logits: Tensor, allowed: Tensor, chosen: Tensor) -> Tensor:
    """[T, E] softmax over what was chosen, or over all candidates under expert choice."""
    within = chosen if case.token_choice else allowed
    return logits.masked_fill(~within, -torch.inf).softmax(dim=1) * chosen


@pytest.mark.parametrize("case", CASES, ids=str)
def test_large_batches_equal_the_plain_formula(case: Case):
    router, experts = case.build().eval(), case.config["num_experts"]
    count = COUNTS[experts]
    if case.name == "air":
        set_codebook(router, oracles.project(tokens(9, DIM, 1)))
    hidden = (2 * tokens(count, DIM, 2)).requires_grad_()
    routing = router(hidden)
    dense = dense_weights(routing)
    chosen = dense.detach() > 0
    h64 = hidden.detach().double()
    allowed = candidates(case, router, h64)
    exact_logits, plain_logits = (
        all_logits(case, h64.to(t), leaves(router, t)).detach().view(count, experts) for t in DTYPES
    )
    slack = score_slack(exact_logits, plain_logits)
    assert not (chosen & ~allowed).any()
    if case.token_choice:
        assert (chosen.sum(dim=1) == TOP_K).all()
        scores = exact_logits.masked_fill(~allowed, -torch.inf)
        kth = scores.topk(TOP_K, dim=1).values[:, -1:]
        assert (scores[chosen] >= kth.expand_as(scores)[chosen] - slack).all()
    else:
        size = oracles.capacity(count, experts, TOP_K)
        assert (chosen.sum(dim=0) == size).all()
        log_probs = exact_logits.log_softmax(dim=1)
        kth = log_probs.topk(size, dim=0).values[-1:]
        assert (log_probs[chosen] >= kth.expand_as(log_probs)[chosen] - 2 * slack).all()
    assert torch.equal(routing.expert_counts, chosen.sum(dim=0))

    direction, mean = tokens(count, experts, 3), tokens(1, experts, 4)[0]
    loss = (dense * direction).sum() + count * (routing.expert_probs * mean).sum()
    mine = torch.autograd.grad(loss, [hidden, *router.parameters()])
    results = []
    for dtype in DTYPES:
        h, named = hidden.detach().to(dtype).requires_grad_(), leaves(router, dtype)
        logits = all_logits(case, h, named).view(count, experts)
        weights = plain_weights(case, logits, allowed, chosen)
        probs = logits.masked_fill(~allowed, -torch.inf).softmax(dim=1).mean(dim=0)
        loss = (weights * direction).sum() + count * (probs * mean).sum()
        grads = torch.autograd.grad(loss, [h, *named.values()])
        results.append([weights.detach(), probs.detach(), *grads])
    names = ["weights", "expert_probs", "hidden.grad", *dict(router.named_parameters())]
    for name, actual, exact, plain in zip(
        names, [dense, routing.expert_probs, *mine], *results, strict=True
    ):
        assert_close(actual, exact, plain, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_large_batches_of_experts_equal_the_plain_formula(case: Case):
    """Output and gradients of the experts at the library's own weights."""
    num_experts = case.config["num_experts"]
    router, experts = case.build().eval(), granular(num_experts=num_experts, dim=DIM)
    hidden = tokens(COUNTS[num_experts], DIM, 2)
    with torch.no_grad():
        routing = router(hidden)
        weights = dense_weights(routing)
    x = hidden.clone().requires_grad_()
    output = experts(x, routing)
    direction = tokens(len(hidden), DIM, 3)
    mine = torch.autograd.grad((output * direction).sum(), [x, *experts.parameters()])
    results = []
    for dtype in DTYPES:
        h, named = hidden.to(dtype).requires_grad_(), leaves(experts, dtype)
        values = torch.nn.functional.silu(h @ named["gate"].T) * (h @ named["up"].T)
        plain = (weights.to(dtype) * values) @ named["down"]
        grads = torch.autograd.grad((plain * direction).sum(), [h, *named.values()])
        results.append([plain.detach(), *grads])
    names = ["output", "hidden.grad", *dict(experts.named_parameters())]
    for name, actual, exact, plain in zip(names, [output, *mine], *results, strict=True):
        assert_close(actual, exact, plain, name)


def test_many_codewords_and_experts():
    """Assignment and shortlists beyond one piece: T x G and G x E above four million."""
    options = {**SIZES, "num_experts": 4099, "num_codewords": 2003, "shortlist_size": 40}
    router = Case("air", options).build().eval()
    set_codebook(router, oracles.project(tokens(2003, DIM, 1)))
    hidden = tokens(2503, DIM, 2)
    exact, plain = (
        oracles.project(hidden.to(t)) @ router.codebook.codewords.to(t).T for t in DTYPES
    )
    slack = score_slack(exact, plain)
    assigned = router.codebook.assign(hidden)
    assert (exact.gather(1, assigned[:, None])[:, 0] >= exact.amax(dim=1) - slack).all()
    lists = router.shortlists()
    assert (lists.diff(dim=1) > 0).all()
    codewords, centroids = router.codebook.codewords, router.centroids.detach()
    exact, plain = (codewords.to(t) @ oracles.project(centroids.to(t)).T for t in DTYPES)
    slack = score_slack(exact, plain)
    kth = exact.topk(40, dim=1).values[:, -1:]
    assert (exact.gather(1, lists) >= kth - slack).all()
    routing = router(hidden)
    assert isinstance(routing, CellRouting)
    assert torch.equal(row_cells(routing), assigned[routing.token_ids])
