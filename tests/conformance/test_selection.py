"""Exactly K, ties to the lowest id, and float32 scores whatever the dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe import ROUTERS
from tests import oracles
from tests.conformance.common import (
    Case,
    Mode,
    dense_weights,
    leaves,
    route,
    selected_ids,
    set_codebook,
    tokens,
)
from tests.tolerance import assert_top_k, score_slack

BATCH = 211
SIZES = {"dim": 8, "num_experts": 36, "top_k": 5}
CASES = [
    Case("air", {**SIZES, "num_codewords": 6, "shortlist_size": 17}),
    Case("air", {**SIZES, "num_codewords": 6, "shortlist_size": 5}),
    Case("peer", {**SIZES, "num_heads": 1}),
    Case("peer", {**SIZES, "top_k": 6, "num_heads": 2}),
    Case("hierarchical", {**SIZES, "num_clusters": 6, "num_selected_clusters": 3}),
    Case("hierarchical", {**SIZES, "num_clusters": 36, "num_selected_clusters": 7}),
    Case("topk", SIZES),
    Case("topk", {**SIZES, "top_k": 1}),
]


def test_every_token_choice_router_is_here():
    assert {case.name for case in CASES} | {"expert_choice"} == set(ROUTERS)


def axes(count: int, dim: int, seed: int) -> Tensor:
    """Unit vectors along the axes, half of them negative: exact in every float type."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.eye(dim)[torch.randint(dim, (count,), generator=generator)]
    return rows * (2 * torch.randint(2, (count, 1), generator=generator) - 1)


def whole_number_router(case: Case) -> Any:
    """Parameters on the axes: with whole-number tokens every score is exact, most are tied."""
    router = case.build()
    with torch.no_grad():
        for name, parameter in router.named_parameters():
            if name == "query.weight":
                parameter.copy_(torch.eye(8).repeat(len(parameter) // 8, 1))
            elif name == "keys":
                flat = axes(parameter[..., 0].numel(), parameter.shape[-1], 1)
                parameter.copy_(flat.view_as(parameter))
            else:
                parameter.copy_(axes(len(parameter), 8, len(name)))
    if case.name == "air":
        set_codebook(router, axes(6, 8, 3))
        router.freeze_codebook()
    return router


def whole_number_tokens(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randint(-1, 2, (count, 8), generator=generator).float()
    hidden[:, 0] += (hidden == 0).all(dim=1)  # the zero token has no direction
    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ties_go_to_the_lowest_expert(case: Case, mode: Mode, dtype: torch.dtype):
    router, hidden = whole_number_router(case).to(dtype), whole_number_tokens(41).to(dtype)
    routing = route(router, hidden, mode)
    if case.name == "air":
        book, centroids = router.codebook.codewords.double(), router.centroids.double()
        size = case.config["shortlist_size"]
        assert router.shortlists().tolist() == oracles.build_shortlists(book, centroids, size)
    choices = case.choices(router, hidden.double(), leaves(router, torch.float64))
    tied = 0
    for token, heads in enumerate(choices):
        assert heads is not None
        expected = [expert for choice in heads for expert in sorted(choice.expert_ids)]
        if case.name == "peer":
            rows = routing.expert_ids[token].view(len(heads), -1)
            assert [e for row in rows.tolist() for e in sorted(row)] == expected
        else:
            ids = routing.to_token_routing().expert_ids[token].tolist()
            assert sorted(ids) == expected
        for choice in heads:
            last = choice.logits[choice.candidate_ids.index(choice.expert_ids[-1])]
            tied += int((choice.logits >= last).sum()) > len(choice.expert_ids)
    if case.config.get("shortlist_size") != case.config["top_k"]:
        assert tied > 20  # a threshold would take more than K for most tokens
    assert (routing.to_token_routing().weights > 0).all()
    assert routing.to_token_routing().weights.dtype == torch.float32


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exactly_the_k_best_in_bfloat16(case: Case, mode: Mode):
    """bf16 weights and tokens, float32 scores: the K best up to float32, not bf16, rounding."""
    router = case.build().bfloat16()
    hidden = (3 * tokens(BATCH, 8, 2)).bfloat16()
    routing = route(router, hidden, mode)
    if case.name == "peer":  # the query projection runs in the model's dtype: ask the router itself
        truth = router.full_logits(hidden).double()
        for token, row in enumerate(routing.expert_ids.view(BATCH, truth.shape[1], -1)):
            for head, ids in enumerate(row):
                assert_top_k(ids.tolist(), truth[token, head], len(ids), 1e-6, str(case))
        return
    results = [
        case.choices(router, hidden.to(t), leaves(router, t))
        for t in (torch.float64, torch.float32)
    ]
    rounded_too_many = 0
    for ids, exact, plain in zip(selected_ids(routing), *results, strict=True):
        assert exact is not None and plain is not None
        choice, top_k = exact[0], case.config["top_k"]
        position = [choice.candidate_ids.index(expert) for expert in ids]
        slack = score_slack(choice.logits, plain[0].logits)
        assert_top_k(position, choice.logits, top_k, slack, str(case))
        rounded = choice.logits.bfloat16()
        rounded_too_many += (
            int((rounded >= rounded.sort(descending=True).values[top_k - 1]).sum()) > top_k
        )
    if len(results[0][0][0].candidate_ids) > case.config["top_k"] > 1:
        assert rounded_too_many > 0  # bf16 scores would have failed


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exactly_k_even_when_the_softmax_saturates(case: Case, mode: Mode):
    """Logits hundreds apart: weights vanish, but 0 marks an unused slot, so none may be 0."""
    routing = route(case.build(), 500 * tokens(29, 8, 2), mode)
    assert ((routing.to_token_routing().weights > 0).sum(dim=1) == case.config["top_k"]).all()
    assert int(routing.expert_counts.sum()) == 29 * case.config["top_k"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_list_form_is_sorted_and_sums_to_one(case: Case):
    routing = route(case.build(), tokens(31, 8, 5), "eval")
    listed = routing.to_token_routing()
    per_head = listed.weights.view(31, case.config.get("num_heads", 1), -1)  # head by head
    assert (per_head.diff(dim=2) <= 0).all()
    dense = torch.zeros(31, 36).scatter_add(1, listed.expert_ids, listed.weights)
    assert torch.equal(dense, dense_weights(routing))
    if case.config["top_k"] > 1:
        heads = case.config.get("num_heads", 1)
        sums = listed.weights.double().sum(dim=1)
        assert (sums - heads).abs().max() < 8 * torch.finfo(torch.float32).eps * heads
