"""Mass recall and overlap against the paper's definitions; Proposition 1 as an inequality."""

from __future__ import annotations

import pytest
import torch

from airmoe import metrics
from tests import oracles
from tests.conformance.common import Case, route, tokens
from tests.tolerance import assert_close

TOKENS, DIM, EXPERTS, TOP_K = 37, 8, 30, 4


def build(normalize: bool, jitter_std: float = 0.3):
    options = {
        "dim": DIM,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "num_codewords": 5,
        "shortlist_size": 9,
        "normalize_centroids": normalize,
        "jitter_std": jitter_std,
    }
    router = Case("air", options).build()
    with torch.no_grad():
        router.centroids.mul_(torch.linspace(0.5, 1.5, EXPERTS)[:, None])
    return router


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_metrics_are_the_papers_formulas(scale: float, normalize: bool):
    router, hidden = build(normalize), scale * tokens(TOKENS, DIM, 1)
    route(router, hidden, "train")
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[4] = False
    values = {
        "mass_recall": metrics.mass_recall(router, hidden, mask),
        "mass_recall_bound": metrics.mass_recall_bound(router, hidden, mask),
        "overlap": metrics.overlap(router, hidden, mask),
    }
    results = []
    for dtype in (torch.float64, torch.float32):
        h, book = hidden.to(dtype), router.codebook.codewords.to(dtype)
        centroids = router.centroids.detach().to(dtype)
        air = oracles.alg1_forward(h, book, centroids, 9, TOP_K, normalize=normalize)
        exact = oracles.exact_topk(h, centroids, TOP_K, normalize)
        logits = h @ oracles.project(centroids, normalize).T
        shares = [
            len(set(a[0].expert_ids) & set(b[0].expert_ids)) / TOP_K
            for a, b in zip(air.choices, exact, strict=True)
        ]
        results.append(
            {
                "mass_recall": oracles.mass_recall(air.choices, logits),
                "mass_recall_bound": oracles.mass_recall_bound(
                    h, book, air.shortlists, centroids, normalize
                ),
                "overlap": torch.tensor(shares, dtype=dtype),
            }
        )
    for name, value in values.items():
        assert value[~mask].isnan().all(), name
        assert_close(value[mask], results[0][name][mask], results[1][name][mask], name)
    assert 0 < values["overlap"][mask].mean() < 1
    assert (values["mass_recall"][mask] >= values["mass_recall_bound"][mask]).all()
