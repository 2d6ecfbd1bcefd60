"""Swapped routers answer by their family's own rule, over all experts or over a shortlist."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import airmoe
from tests.adapt.models import (
    BATCHES,
    BUILD,
    EXPERTS,
    NORMALISABLE,
    TOP_K,
    VOCAB,
    build,
    calibrated,
    fitted,
    ids,
    logits_of,
    routed,
    stock_routers,
    swap,
    swapped_routers,
)
from tests.state.common import assert_same

VARIANTS = [
    *((family, {}) for family in BUILD),
    *((family, {"norm_topk_prob": flag}) for family in NORMALISABLE for flag in (True, False)),
]


@pytest.mark.parametrize("family", BUILD)
def test_with_all_experts_nothing_changes(family: str) -> None:
    stock, swapped = build(family), calibrated(family, size=EXPERTS)
    with routed(stock) as expected:
        stock_logits = logits_of(stock)
    with routed(swapped) as found:
        torch.testing.assert_close(logits_of(swapped), stock_logits, rtol=0, atol=1e-5)
    assert len(found) == len(expected) == 2
    for (own_logits, *own), (logits, *stock_own) in zip(found, expected, strict=True):
        torch.testing.assert_close(own_logits, logits, rtol=0, atol=1e-5)
        assert_same(own, stock_own)


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_the_shortlist_path_agrees_with_stock_when_the_list_is_everything(
    family: str, changes: dict[str, Any]
) -> None:
    """Not the stock code: cells, scatter and the family's rule as written here."""
    model = calibrated(family, size=EXPERTS, **changes)
    hidden = torch.randn(50, model.config.hidden_size)
    for router in swapped_routers(model):
        everything = torch.arange(EXPERTS).expand(router.codebook.num_codewords, -1)
        logits = router.shortlist_logits(hidden, everything.contiguous())
        weights, chosen = router.select(logits, torch.float32)
        stock_logits, stock_weights, stock_chosen = router(hidden)
        torch.testing.assert_close(logits, stock_logits, rtol=0, atol=1e-5)
        # Stock leaves the order of the chosen open where it does not sort them.
        chosen, order = chosen.sort(-1)
        stock_chosen, stock_order = stock_chosen.sort(-1)
        assert torch.equal(chosen, stock_chosen)
        torch.testing.assert_close(
            weights.gather(1, order), stock_weights.gather(1, stock_order), rtol=0, atol=1e-5
        )


def by_hand(family: str, router: Any, hidden: Tensor, allowed: Tensor) -> dict[int, float]:
    """{expert: weight} of one token [D], from the definition, in float64."""
    logits = hidden.double() @ router.weight.detach().double().T
    if family == "gpt_oss":
        logits = logits + router.bias.detach().double()
    candidates = allowed.tolist()
    if family == "deepseek_v3":
        scores = logits.sigmoid()
        choice = {e: float(scores[e] + router.e_score_correction_bias[e]) for e in candidates}
        size = EXPERTS // router.num_group
        groups = [
            sorted((choice[e] for e in candidates if e // size == group), reverse=True)
            for group in range(router.num_group)
        ]
        best = sorted(range(router.num_group), key=lambda group: -sum(groups[group][:2]))
        kept = [e for e in candidates if e // size in best[: router.topk_group]]
        chosen = sorted(kept, key=lambda e: -choice[e])[:TOP_K]
        total = float(scores[chosen].sum()) if router.norm_topk_prob else 1.0
        return {e: float(scores[e]) / total * router.routed_scaling_factor for e in chosen}
    chosen = sorted(candidates, key=lambda e: -float(logits[e]))[:TOP_K]
    probs = torch.zeros(EXPERTS, dtype=torch.float64)
    probs[candidates] = logits[candidates].softmax(0)
    normalised = family in ("mixtral", "gpt_oss") or router.norm_topk_prob
    total = float(probs[chosen].sum()) if normalised else 1.0
    return {e: float(probs[e]) / total for e in chosen}


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_shortlists_route_by_the_family_s_rule(family: str, changes: dict[str, Any]) -> None:
    model = calibrated(family, **changes)
    hidden = torch.randn(40, model.config.hidden_size)
    for router in swapped_routers(model):
        logits, weights, chosen = router(hidden)
        exact = router.full_logits(hidden)
        allowed = router.shortlists()[router.codebook.assign(hidden)]  # [T, M]
        inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, allowed, True)
        assert torch.equal(logits.isfinite(), inside) and (logits[~inside] == -torch.inf).all()
        torch.testing.assert_close(logits[inside], exact[inside], rtol=0, atol=1e-5)
        for token in range(hidden.shape[0]):
            expected = by_hand(family, router, hidden[token], allowed[token])
            found = dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True))
            assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", BUILD)
def test_shortlists_are_the_best_experts_near_each_codeword(family: str) -> None:
    model = calibrated(family)
    for router in swapped_routers(model):
        codebook = router.codebook
        scores = (codebook.scales[:, None] * codebook.codewords) @ router.weight.T
        if family == "gpt_oss":
            scores = scores + router.bias
        if family == "deepseek_v3":
            # At 8 of 16 in 4 groups the quota of 2 per group is all there is.
            scores = scores.sigmoid() + router.e_score_correction_bias
            best = scores.view(-1, 4, 4).topk(2).indices + 4 * torch.arange(4)[:, None]
            expected = best.flatten(1).sort().values
        else:
            expected = scores.topk(8).indices.sort().values
        assert torch.equal(router.shortlists(), expected)
        assert (codebook.scales > 0).all()


def test_the_scale_of_a_codeword_decides_between_weights_and_bias() -> None:
    router = swapped_routers(calibrated("gpt_oss"))[0]
    before = router.shortlists()
    router.codebook.scales.mul_(1e-4)
    only_bias = router.bias.topk(8).indices.sort().values
    assert torch.equal(router.shortlists(), only_bias.expand_as(before))
    assert not torch.equal(router.shortlists(), before)


def test_shortlists_follow_the_bias_that_balances_experts() -> None:
    """Training moves it between batches, without gradients; experts of a group trade places."""
    router = swapped_routers(calibrated("deepseek_v3"))[0]
    with torch.no_grad():
        before = router.shortlists()
        router.e_score_correction_bias[::2] += 10
        even = torch.arange(0, EXPERTS, 2).expand_as(before)
        assert torch.equal(router.shortlists(), even) and not torch.equal(before, even)


@pytest.mark.parametrize("family", BUILD)
def test_an_uncalibrated_model_routes_exactly_and_says_so_once(family: str) -> None:
    stock = build(family)
    swapped = swap(copy.deepcopy(stock))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(logits_of(swapped), logits_of(stock))
        assert torch.equal(logits_of(swapped, ids(2)), logits_of(stock, ids(2)))
    assert len([w for w in caught if "airmoe.calibrate" in str(w.message)]) == 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_router_logits_and_auxiliary_loss(family: str) -> None:
    """With all experts they are stock's; with shortlists what is outside has no probability."""
    stock = build(family).eval()
    swapped = calibrated(family, size=EXPERTS).eval()
    tokens, mask = ids(3), torch.ones(3, 12, dtype=torch.int64)
    mask[0, :4] = 0
    options = {"labels": tokens, "attention_mask": mask, "output_router_logits": True}
    stock(tokens, **options)  # installs the recording hooks before the swap
    expected, found = stock(tokens, **options), swapped(tokens, **options)
    assert torch.equal(found.aux_loss, expected.aux_loss) and expected.aux_loss > 0
    assert torch.equal(found.loss, expected.loss)
    short = fitted(stock)(tokens, **options)
    assert len(short.router_logits) == 2
    for logits in short.router_logits:
        assert ((logits == -torch.inf).sum(-1) == EXPERTS - 8).all()
    assert short.aux_loss.isfinite() and short.aux_loss != expected.aux_loss
    short.loss.backward()
    for router in stock_routers(stock):
        assert router.weight.grad.isfinite().all() and router.weight.grad.abs().sum() > 0


def test_hooks_and_holders_of_the_router_stay() -> None:
    model = build("mixtral")
    router, weight = stock_routers(model)[0], stock_routers(model)[0].weight
    calls = []
    handle = router.register_forward_hook(lambda *_: calls.append(1))
    stock_class = type(router)
    swap(model)
    assert isinstance(router, stock_class) and stock_routers(model)[0] is router
    assert router.weight is weight
    logits_of(model)
    assert calls == [1]
    handle.remove()
    logits_of(model)
    assert calls == [1]
    airmoe.restore_routers(model)
    assert stock_routers(model)[0] is router and type(router) is stock_class
    assert router.weight is weight


def test_only_the_layers_asked_for() -> None:
    stock = build("deepseek_v3")
    model = swap(copy.deepcopy(stock), layers=[2])
    (router,) = swapped_routers(model)
    assert router is model.model.layers[2].mlp.gate
    report = airmoe.calibrate(model, BATCHES)
    assert [layer.name for layer in report.layers] == ["model.layers.2.mlp.gate"]
    with routed(model) as answers:
        logits_of(model)
    assert answers[0][0].isfinite().all() and not answers[1][0].isfinite().all()


def test_a_broken_token_spoils_only_its_own_row() -> None:
    router = swapped_routers(calibrated("mixtral"))[0]
    hidden = torch.randn(6, 32)
    expected = router(hidden)
    hidden[2, 3] = torch.nan
    logits, weights, chosen = router(hidden)
    others = [0, 1, 3, 4, 5]
    # Another number of rows in a cell may round its product differently.
    torch.testing.assert_close(logits[others], expected[0][others], rtol=0, atol=1e-5)
    torch.testing.assert_close(weights[others], expected[1][others], rtol=0, atol=1e-5)
    assert torch.equal(chosen[others], expected[2][others])
    assert weights[2].isnan().all() and (chosen[2] < EXPERTS).all()


@pytest.mark.parametrize("family", BUILD)
def test_a_vanishing_probability_stays_inside_the_shortlist(family: str) -> None:
    """Logits thousands apart: all but one candidate round to 0, like those outside."""
    model = calibrated(family)
    router = swapped_routers(model)[0]
    hidden = 1e4 * torch.randn(40, 32)
    _, weights, chosen = router(hidden)
    allowed = router.shortlists()[router.codebook.assign(hidden)]
    assert (chosen[:, :, None] == allowed[:, None]).any(-1).all()
    assert weights.isfinite().all()


@pytest.mark.parametrize("family", BUILD)
def test_generate(family: str) -> None:
    stock, swapped = build(family).eval(), calibrated(family, size=EXPERTS)
    everything = torch.ones_like(ids(4))  # token 0 is no padding here
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": everything}
    expected = stock.generate(ids(4), **options)
    assert torch.equal(swapped.generate(ids(4), **options), expected)
    short = calibrated(family)
    written = short.generate(ids(4), **options)
    step_by_step = ids(4)
    for _ in range(5):
        best = logits_of(short, step_by_step)[:, -1].argmax(-1, keepdim=True)
        step_by_step = torch.cat([step_by_step, best], dim=1)
    assert torch.equal(written, step_by_step) and int(written.max()) < VOCAB
