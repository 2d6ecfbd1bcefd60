"""gate="binary": the same experts as by softmax, each of them with weight 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe import AirRouter, CellRouting, Router, TopKRouter, load_balance_loss, router_z_loss
from airmoe.kernels.backend import use_backend

SIZES: dict[str, Any] = {"dim": 16, "num_experts": 40, "top_k": 6}
AIR: dict[str, Any] = SIZES | {"num_codewords": 5, "shortlist_size": 18}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "topk": (TopKRouter, SIZES),
    "topk-1": (TopKRouter, SIZES | {"top_k": 1}),
    "air": (AirRouter, AIR),
    "air-1": (AirRouter, AIR | {"top_k": 1}),
    "air-all": (AirRouter, AIR | {"top_k": 18}),
}


def twins(case: str) -> tuple[Router, Router]:
    """The same router with a binary gate, and with softmax; in training, jitter and all."""
    kind, options = CASES[case]
    binary = kind.Config(**options, gate="binary").build()
    softmax = kind.Config(**options).build()
    hidden = torch.randn(64, SIZES["dim"])
    binary.observe(hidden)
    softmax.load_state_dict(binary.state_dict())
    return binary, softmax


def dense_weights(router: Router, hidden: Tensor, mask: Tensor) -> Tensor:
    """[T, E]"""
    listed = router(hidden, mask).to_token_routing()
    weights = torch.zeros(hidden.shape[0], SIZES["num_experts"])
    return weights.scatter_add(1, listed.expert_ids, listed.weights.detach())


@pytest.mark.filterwarnings("ignore:AirRouter runs with gradients")
@pytest.mark.parametrize("case", CASES)
def test_the_chosen_weigh_one(case: str) -> None:
    binary, softmax = twins(case)
    hidden, mask = torch.randn(31, SIZES["dim"]), torch.rand(31) < 0.8
    weights, expected = (dense_weights(router, hidden, mask) for router in (binary, softmax))
    assert torch.equal(weights, (expected > 0).float())
    assert torch.equal(weights.sum(1), mask * float(binary.config.top_k))
    one, other = binary(hidden, mask), softmax(hidden, mask)
    assert torch.equal(one.expert_counts, other.expert_counts)
    assert torch.equal(one.expert_probs, other.expert_probs)
    assert torch.equal(one.log_z, other.log_z)


@pytest.mark.parametrize("case", CASES)
def test_only_losses_reach_the_centroids(case: str) -> None:
    router: Any = twins(case)[0]
    hidden = torch.randn(31, SIZES["dim"], requires_grad=True)
    routing = router(hidden)
    weights = routing.gates if isinstance(routing, CellRouting) else routing.weights
    assert not weights.requires_grad
    (load_balance_loss(routing) + router_z_loss(routing)).backward()
    assert router.centroids.grad.abs().sum() > 0
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0


def test_triton_gates_weigh_one_too() -> None:
    router = twins("air")[0].eval()
    hidden = torch.randn(31, SIZES["dim"])
    with torch.no_grad():
        expected = dense_weights(router, hidden, torch.ones(31, dtype=torch.bool))
        with use_backend("triton"):
            actual = dense_weights(router, hidden, torch.ones(31, dtype=torch.bool))
    assert torch.equal(actual, expected)


def test_a_capacity_is_for_experts_that_choose() -> None:
    with pytest.raises(ValueError, match="only has a meaning with gate"):
        AirRouter.Config(**AIR, gate="binary", capacity_factor=2.0)
