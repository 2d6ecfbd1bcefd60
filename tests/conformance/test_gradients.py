"""Gradients of routers, experts and the layer against float64 autograd of the plain formulas."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import airmoe
from tests import oracles
from tests.conformance.common import (
    Case,
    Mode,
    all_logits,
    coarse,
    dense_weights,
    granular,
    leaves,
    probe,
    route,
    tokens,
)
from tests.tolerance import assert_close

PostNorm = Literal["layernorm", "none"]
TOKENS, DIM, EXPERTS = 19, 8, 16
ROUTER_CASES = [
    Case("air"),
    Case("air", {"normalize_centroids": False}),
    Case("air", {"top_k": 1}),
    Case("air", {"gate": "expert_choice"}),
    Case("air", {"codebook": "euclidean"}),
    Case("peer"),
    Case("peer", {"num_heads": 1, "top_k": 9}),
    Case("peer", {"num_heads": 1, "top_k": 1}),
    Case("hierarchical"),
    Case("hierarchical", {"normalize_centroids": False, "num_selected_clusters": 3}),
    Case("hierarchical", {"top_k": 1}),
    Case("topk"),
    Case("topk", {"top_k": 1}),
    Case("topk", {"normalize_centroids": False}),
    Case("expert_choice"),
    Case("expert_choice", {"normalize_centroids": False, "capacity_factor": 2.0}),
]


def test_every_router_is_here():
    assert {case.name for case in ROUTER_CASES} == set(airmoe.ROUTERS)


def spread_norms(router: nn.Module) -> None:
    """Norms away from 1, so that the gradient through the projection shows."""
    with torch.no_grad():
        for name, parameter in router.named_parameters():
            if "centroids" in name:
                parameter.mul_(torch.linspace(0.4, 1.8, len(parameter))[:, None])


def assert_gradients(mine: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]):
    assert set(mine) == set(exact)
    for name in mine:
        assert exact[name].abs().max() > 0, f"{name}: the test gives it no gradient"
        assert_close(mine[name], exact[name], plain[name], f"gradient of {name}")


def gradients(loss: Tensor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", ROUTER_CASES, ids=str)
def test_router_gradients(case: Case, mode: Mode):
    router = case.build()
    spread_norms(router)
    hidden = tokens(TOKENS, DIM, 30).requires_grad_()
    routing = route(router, hidden, mode)
    loss = probe(dense_weights(routing), routing.expert_probs, routing.log_z)
    mine = gradients(loss, {"hidden": hidden, **dict(router.named_parameters())})
    results = []
    for dtype in (torch.float64, torch.float32):
        h, named = hidden.detach().to(dtype).requires_grad_(), leaves(router, dtype)
        choices = case.at_selection(case.choices(router, h, named), routing)
        dense = oracles.dense_weights(choices, EXPERTS, h)
        loss = probe(dense, oracles.expert_probs(choices, EXPERTS, h), oracles.log_z(choices, h))
        results.append(gradients(loss, {"hidden": h, **named}))
    assert_gradients(mine, *results)


@pytest.mark.parametrize("case", ROUTER_CASES, ids=str)
def test_list_form_and_full_logits_by_the_formulas(case: Case):
    """Of `to_token_routing().weights` the gradients, of `full_logits` also the values."""
    router = case.build().eval()
    hidden = tokens(TOKENS, DIM, 30).requires_grad_()
    routing = router(hidden)
    named = {"hidden": hidden, **dict(router.named_parameters())}
    direction = tokens(TOKENS, EXPERTS, 34)
    listed = routing.to_token_routing()
    from_list = gradients((direction.gather(1, listed.expert_ids) * listed.weights).sum(), named)
    results = []
    for dtype in (torch.float64, torch.float32):
        h, params = hidden.detach().to(dtype).requires_grad_(), leaves(router, dtype)
        choices = case.at_selection(case.choices(router, h, params), routing)
        dense = oracles.dense_weights(choices, EXPERTS, h)
        results.append(gradients((direction * dense).sum(), {"hidden": h, **params}))
    assert_gradients(from_list, *results)
    logits = router.full_logits(hidden)
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(35))
    mine = gradients((direction * logits).sum(), named)
    values, results = [], []
    for dtype in (torch.float64, torch.float32):
        h, params = hidden.detach().to(dtype).requires_grad_(), leaves(router, dtype)
        plain_logits = all_logits(case, h, params)
        values.append(plain_logits.detach())
        results.append(gradients((direction * plain_logits).sum(), {"hidden": h, **params}))
    assert_close(logits, *values, what="full_logits")
    assert_gradients(mine, *results)


# ---------------------------------------------------------------- experts and the whole layer

FORMS = {str(c): c for c in (ROUTER_CASES[i] for i in (0, 3, 4, 6, 9, 12, 15))}


def check_layer(case: Case, experts: Any, activation: str, post_norm: PostNorm, mode: Mode) -> None:
    """Output, and gradients of the input and of every parameter of router and experts."""
    router = case.build()
    num_experts = case.config["num_experts"]
    spread_norms(router)
    with torch.no_grad():
        for i, parameter in enumerate(experts.parameters()):
            values = tokens(parameter.numel() // DIM, DIM, 40 + i)
            parameter.copy_(0.5 * values.view_as(parameter))
    layer = airmoe.MoELayer(router, experts, post_norm=post_norm).train(mode == "train")
    x = tokens(TOKENS, DIM, 45).view(1, TOKENS, DIM).requires_grad_()
    result = layer.forward_with_routing(x)
    direction = tokens(TOKENS, DIM, 46)
    named = {"hidden": x, **dict(router.named_parameters()), **dict(experts.named_parameters())}
    mine = gradients((direction * result.hidden[0]).sum(), named)
    mine["hidden"] = mine["hidden"][0]
    assert result.routing.num_experts == num_experts
    outputs, results = [], []
    for dtype in (torch.float64, torch.float32):
        h = x.detach()[0].to(dtype).requires_grad_()
        routed, weights = leaves(router, dtype), leaves(experts, dtype)
        choices = case.at_selection(case.choices(router, h, routed), result.routing)
        formula = oracles.Experts(activation, weights.get("gate"), weights["up"], weights["down"])
        output = oracles.moe_output(h, choices, formula)
        if post_norm == "layernorm":
            eps = next(m for m in layer.modules() if isinstance(m, nn.LayerNorm)).eps
            output = F.layer_norm(output, (DIM,), eps=eps)
        outputs.append(output.detach())
        results.append(gradients((direction * output).sum(), {"hidden": h, **routed, **weights}))
    assert_close(result.hidden[0], *outputs, what="output")
    assert_gradients(mine, *results)


@pytest.mark.parametrize("expert_size", [1, 3])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh", "gelu", "relu", "silu"])
@pytest.mark.parametrize("form", FORMS)
def test_granular_expert_gradients(form: str, activation: str, expert_size: int):
    experts = granular(num_experts=EXPERTS, dim=DIM, activation=activation, expert_size=expert_size)
    check_layer(FORMS[form], experts, activation, "none", "eval")


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("name", ["topk", "air", "expert_choice"])
def test_coarse_expert_gradients(name: str, top_k: int, activation: str):
    options: dict[str, Any] = {"num_experts": 4, "top_k": top_k}
    if name == "air":
        options |= {"num_codewords": 2, "shortlist_size": 3}
    experts = coarse(num_experts=4, dim=DIM, expert_size=20, activation=activation)
    check_layer(Case(name, options), experts, activation, "none", "eval")


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("form", FORMS)
def test_layer_gradients_through_the_post_norm(form: str, mode: Mode):
    experts = granular(num_experts=EXPERTS, dim=DIM)
    check_layer(FORMS[form], experts, "swiglu", "layernorm", mode)


def test_what_is_not_supported_raises() -> None:
    """Second derivatives and torch.func: an error, and not a wrong number."""
    experts = granular(num_experts=EXPERTS, dim=DIM)
    layer = airmoe.MoELayer(Case("air").build(), experts).eval()
    x = torch.randn(1, 6, DIM, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
    with torch.no_grad():
        layer(x)  # builds the lists
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda tokens: layer(tokens).sum())(x.detach())
