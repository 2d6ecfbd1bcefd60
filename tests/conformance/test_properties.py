"""Odd shapes and awkward tokens through every router, the experts and the codebook (Hypothesis)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import airmoe
from airmoe import CellRouting
from tests import oracles
from tests.conformance.common import (
    Case,
    Mode,
    dense_weights,
    granular,
    leaves,
    row_cells,
    set_codebook,
)
from tests.conformance.training_oracles import alg2_update, assert_state, replacement, states_of
from tests.tolerance import assert_close, assert_top_k, score_slack

# Non-finite tokens and tiny batches give warnings.
pytestmark = pytest.mark.filterwarnings("ignore")
COUNTS = [1, 2, 3, 5, 7, 13, 17]


@dataclass
class Situation:
    case: Case
    hidden: Tensor  # [T, D]
    mask: Tensor | None  # [T]
    valid: Tensor  # [T]
    mode: Mode
    activation: str


@st.composite
def token_batches(draw: st.DrawFn, count: int, dim: int) -> Tensor:
    """Normal tokens, one token repeated, a few repeated, or small whole numbers full of ties."""
    kind = draw(st.sampled_from(["normal", "one", "few", "whole", "zero"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    hidden = 2 * torch.randn(count, dim, generator=generator)
    if kind == "one":
        hidden = hidden[:1].repeat(count, 1)
    if kind == "few":
        hidden = hidden[torch.randint(min(count, 3), (count,), generator=generator)]
    if kind == "whole":
        hidden = hidden.round().clamp(-1, 1)
    if kind == "zero":
        hidden[torch.randint(count, (1,), generator=generator)] = 0
    return hidden


@st.composite
def cases(draw: st.DrawFn, dim: int) -> Case:
    name = draw(st.sampled_from(sorted(airmoe.ROUTERS)))
    experts = draw(st.sampled_from([2, 3, 4, 5])) ** 2
    top_k = draw(st.integers(1, experts))
    options: dict[str, Any] = {"dim": dim, "num_experts": experts, "top_k": top_k}
    if name == "air":
        options["num_codewords"] = draw(st.integers(1, 20))
        options["shortlist_size"] = draw(st.one_of(st.just(top_k), st.integers(top_k, experts)))
        options["codebook"] = draw(st.sampled_from(["spherical", "euclidean", "static"]))
        options["gate"] = draw(st.sampled_from(["token_choice", "token_choice", "expert_choice"]))
    if name == "peer":
        heads = draw(st.sampled_from([h for h in (1, 2, 3) if h == 1 or 2 * h <= experts]))
        per_head = draw(st.integers(1 if heads == 1 else 2, experts // heads))
        options |= {"num_heads": heads, "top_k": heads * per_head}
    if name == "hierarchical":
        clusters = draw(st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0]))
        least = -(-top_k * clusters // experts)
        options["num_clusters"] = clusters
        options["num_selected_clusters"] = draw(st.integers(least, clusters))
    if name == "expert_choice" or options.get("gate") == "expert_choice":
        options["capacity_factor"] = draw(st.sampled_from([0.5, 1.0, 3.0]))
    if name in ("topk", "air"):
        options["normalize_centroids"] = draw(st.booleans())
    return Case(name, options)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    count, dim = draw(st.sampled_from(COUNTS)), draw(st.sampled_from([2, 4, 6, 10]))
    hidden = draw(token_batches(count, dim))
    mask = None
    if draw(st.booleans()):
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    for token in draw(st.lists(st.integers(0, count - 1), max_size=2)):
        if mask is None or mask[token]:
            hidden[token, draw(st.integers(0, dim - 1))] = draw(
                st.sampled_from([float("nan"), float("inf"), -float("inf")])
            )
    finite = hidden.isfinite().all(dim=1)
    valid = finite if mask is None else finite & mask
    mode: Mode = draw(st.sampled_from(["train", "eval"]))
    activation = draw(st.sampled_from(["swiglu", "relu"]))
    return Situation(draw(cases(dim)), hidden, mask, valid, mode, activation)


def choices_in_cells(case: Case, routing: Any, hidden: Tensor, named: dict[str, Tensor]):
    """The oracle's routing with the cells the library put a token in; those are checked apart."""
    normalize = case.config.get("normalize_centroids", True)
    centroids = oracles.project(named["centroids"], normalize)
    cells, choices = row_cells(routing), []
    for token, h in enumerate(hidden):
        mine = cells[routing.token_ids == token].tolist()
        candidates = sorted({e for g in mine for e in routing.pools[g].tolist()})
        logits = centroids[candidates] @ h
        if case.name == "hierarchical":
            clusters = oracles.project(named["cluster_centroids"]) @ h
            size = routing.pools.shape[1]
            logits = logits + torch.stack([clusters[e // size] for e in candidates])
        choices.append([oracles.choose(candidates, logits, case.config["top_k"])])
    return choices


def cell_scores(case: Case, router: Any, h: Tensor) -> Tensor:
    """Closeness of a token to every cell [G]."""
    if case.name == "hierarchical":
        return oracles.project(router.cluster_centroids.detach().to(h.dtype)) @ h
    codewords = router.codebook.codewords.to(h.dtype)
    if case.config["codebook"] == "euclidean":
        return -torch.stack([(h - c).norm() for c in codewords])
    return torch.stack([(h @ c) / (h.norm() * c.norm()) for c in codewords])


def assert_cells(case: Case, router: Any, routing: Any, s: Situation) -> None:
    cells = row_cells(routing)
    for token in s.valid.nonzero().flatten().tolist():
        if s.hidden[token].norm() == 0:
            continue  # the zero token has no direction: any codeword is right
        mine = cells[routing.token_ids == token].tolist()
        exact, plain = (cell_scores(case, router, s.hidden[token].to(t)) for t in DTYPES)
        slack = score_slack(exact, plain)
        assert_top_k(mine, exact, routing.cells.rows_per_token, slack, f"cells of token {token}")


DTYPES = (torch.float64, torch.float32)


def assert_selection(case: Case, routing: Any, choices: Any, plain: Any, valid: Tensor) -> None:
    top_k = case.config["top_k"]
    dense = dense_weights(routing).detach()
    if case.token_choice:
        for token in valid.nonzero().flatten().tolist():
            per_head = top_k // len(choices[token])
            ids = dense[token].nonzero().flatten().tolist()
            parts = [ids]
            if case.name == "peer":
                parts = routing.expert_ids[token].view(-1, per_head).tolist()
            for choice, other, part in zip(choices[token], plain[token], parts, strict=True):
                position = [choice.candidate_ids.index(expert) for expert in part]
                slack = score_slack(choice.logits, other.logits)
                assert_top_k(position, choice.logits, per_head, slack, f"token {token}")
        return
    experts = routing.num_experts
    factor = case.config["capacity_factor"]
    size = oracles.capacity(int(valid.sum()), experts, top_k, factor)
    for expert in range(experts):
        probs = []
        for run in (choices, plain):
            values = torch.full((len(valid),), -1.0, dtype=run[0][0].logits.dtype)
            for token in valid.nonzero().flatten().tolist():
                if expert in run[token][0].candidate_ids:
                    at = run[token][0].candidate_ids.index(expert)
                    values[token] = torch.softmax(run[token][0].logits, dim=0)[at]
            probs.append(values)
        expected = min(size, int((probs[0] >= 0).sum()))
        taken = (dense[:, expert].nan_to_num(0) > 0).nonzero().flatten().tolist()
        if expected:
            assert_top_k(taken, probs[0], expected, score_slack(*probs), f"expert {expert}")
        else:
            assert not taken


def make_experts(s: Situation, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    experts = granular(
        num_experts=s.case.config["num_experts"], dim=s.hidden.shape[1], activation=s.activation
    )
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    return experts


@settings(max_examples=120, deadline=None)
@given(situations())
def test_any_batch_routes_and_computes_by_the_formulas(s: Situation):
    case, router, experts = s.case, s.case.build(), make_experts(s)
    layer = airmoe.MoELayer(router, experts, post_norm="none").train(s.mode == "train")
    mask = None if s.mask is None else s.mask[None]
    result = layer.forward_with_routing(s.hidden[None], mask)
    routing, output = result.routing, result.hidden[0]
    assert torch.equal(routing.valid, s.valid)
    assert torch.equal(dense_weights(routing.to_token_routing()), dense_weights(routing))
    clean = s.hidden.nan_to_num(1.0, 1.0, 1.0)
    if isinstance(routing, CellRouting):
        assert_cells(case, router, routing, s)
    runs = []
    for dtype in DTYPES:
        named = {k: v.detach() for k, v in leaves(router, dtype).items()}
        h = clean.to(dtype)
        if isinstance(routing, CellRouting):
            runs.append(choices_in_cells(case, routing, h, named))
        else:
            runs.append(case.choices(router, h, named))
    assert_selection(case, routing, runs[0], runs[1], s.valid)
    assert_left_out(s, routing, output)
    truth = []
    for dtype, choices in zip(DTYPES, runs, strict=True):
        kept = [c if keep else None for c, keep in zip(choices, s.valid.tolist(), strict=True)]
        fixed = case.at_selection(kept, routing)
        named = {k: v.detach() for k, v in leaves(experts, dtype).items()}
        formula = oracles.Experts(s.activation, named.get("gate"), named["up"], named["down"])
        truth.append((fixed, oracles.moe_output(clean.to(dtype), fixed, formula)))
    (fixed, exact), (other, plain) = truth
    size = largest_logit(fixed)
    assert_close(output[s.valid], exact[s.valid], plain[s.valid], "output", size)
    assert routing.expert_counts.tolist() == oracles.expert_counts(fixed, routing.num_experts)
    if s.valid.any():
        stats = [
            (oracles.expert_probs(c, routing.num_experts, h), oracles.log_z(c, h))
            for c, h in ((fixed, clean.double()), (other, clean))
        ]
        assert_close(routing.expert_probs, stats[0][0], stats[1][0], "expert_probs", size)
        assert_close(routing.log_z, stats[0][1], stats[1][1], "log_z", size)


def assert_left_out(s: Situation, routing: Any, output: Tensor) -> None:
    """Masked tokens: weight 0 and output 0. NaN and infinite tokens: NaN in their own row."""
    masked = torch.zeros_like(s.valid) if s.mask is None else ~s.mask
    assert (dense_weights(routing)[masked] == 0).all()
    assert (output[masked] == 0).all()
    assert output[~s.valid & ~masked].isnan().all()
    assert (routing.log_z[~s.valid] == 0).all()


def largest_logit(choices: Any) -> float:
    heads = [choice for token in choices if token is not None for choice in token]
    return max((choice.logits.abs().max().item() for choice in heads), default=0.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batch_updates_the_codebook_by_alg2(data: st.DataObject):
    """G > T, one token, duplicates, masks, NaN, dead codes."""
    count, dim = data.draw(st.sampled_from([0, *COUNTS])), data.draw(st.sampled_from([2, 5, 8]))
    codes = data.draw(st.integers(1, 20))
    decay = data.draw(st.sampled_from([0.0, 0.5, 0.95]))
    dead_below = data.draw(st.sampled_from([0.1, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    hidden = torch.randn(count, dim, generator=generator)
    if count and data.draw(st.booleans()):
        hidden = hidden[torch.randint(min(3, count), (count,), generator=generator)]
    mask = torch.rand(count, generator=generator) < data.draw(st.sampled_from([0.6, 1.0]))
    bad = data.draw(st.sampled_from([None, float("nan"), float("inf")]))
    if count and bad is not None:
        hidden[torch.randint(count, (1,), generator=generator), 0] = bad
    options = {
        "dim": dim,
        "num_codewords": codes,
        "codebook_decay": decay,
        "dead_below": dead_below,
    }
    router = Case("air", options).build()
    start = oracles.project(torch.randn(codes, dim, generator=generator))
    set_codebook(router, start, 3 * torch.rand(codes, generator=generator))
    book = router.codebook
    before = states_of(book)
    valid = hidden[mask & hidden.isfinite().all(dim=1)]
    book.update(hidden, mask)
    if not len(valid):
        for part in vars(before[1]):
            assert torch.equal(getattr(book, part), getattr(before[1], part)), part
        return
    pick = replacement(book, oracles.project(valid.double()))
    exact, plain = (
        alg2_update(valid.to(t), state, decay, dead_below, pick)
        for t, state in zip(DTYPES, before, strict=True)
    )
    assert_state(book, exact, plain, "update")


@settings(max_examples=40, deadline=None)
@given(situations())
def test_gradients_of_any_batch_are_finite_and_masked_tokens_have_none(s: Situation):
    """Whatever the shape: no NaN from empty cells, unused slots, zero tokens or full lists."""
    hidden = s.hidden.nan_to_num(1.0, 1.0, 1.0).requires_grad_()
    layer = airmoe.MoELayer(s.case.build(), make_experts(s), post_norm="none")
    layer.train(s.mode == "train")
    mask = None if s.mask is None else s.mask[None]
    result = layer.forward_with_routing(hidden[None], mask)
    loss = result.hidden.square().sum() + airmoe.load_balance_loss(result.routing)
    loss = loss + airmoe.router_z_loss(result.routing)
    loss.backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    if s.mask is not None:
        assert (hidden.grad[~s.mask] == 0).all()


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", sorted(airmoe.ROUTERS))
def test_an_empty_batch_gives_an_empty_answer(name: str, mode: Mode):
    """No token: nothing chosen, no gradient, no state moved."""
    case = Case(name)
    router = case.build()
    layer = airmoe.MoELayer(router, granular(num_experts=16, dim=8)).train(mode == "train")
    saved = {key: value.clone() for key, value in router.state_dict().items()}
    x = torch.empty(1, 0, 8, requires_grad=True)
    result = layer.forward_with_routing(x)
    assert result.hidden.shape == x.shape
    assert result.routing.expert_counts.tolist() == [0] * 16
    (result.hidden.sum() + airmoe.load_balance_loss(result.routing)).backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is None or (parameter.grad == 0).all(), key
    for key, value in router.state_dict().items():
        assert torch.equal(value, saved[key]), key
