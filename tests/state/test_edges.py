"""Uses at the edge of the state rules, each of which went wrong once."""

from __future__ import annotations

import pytest
import torch

import airmoe
from tests.state.common import DIM, batch, build_layer, build_router, tracked_layer


def test_a_routing_of_an_earlier_moment_refuses_to_be_read() -> None:
    layer, _, optimizer = tracked_layer()
    x = batch(0)
    output = layer.forward_with_routing(x)
    probs = output.routing.expert_probs.detach().clone()
    output.hidden.square().sum().backward()
    optimizer.step()
    layer(x)
    assert torch.equal(output.routing.expert_probs, probs)  # read in time, it stays
    with pytest.raises(RuntimeError, match="is stale"):
        output.routing.to_token_routing()
    with pytest.raises(RuntimeError, match="is stale"):
        _ = output.routing.expert_counts


@pytest.mark.parametrize("kind", ["spherical", "euclidean"])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1e39), (torch.float32, 3e38)])
def test_huge_tokens_are_left_out(kind: str, dtype: torch.dtype, value: float) -> None:
    router, hidden = build_router(codebook=kind), torch.randn(40, DIM, dtype=dtype)
    hidden[3] = value
    router.observe(hidden)
    assert bool(router.codebook.codewords.isfinite().all())
    routing = router(hidden)
    assert not routing.valid[3] and int(routing.valid.sum()) == 39
    assert bool(routing.expert_probs.isfinite().all())


def test_what_is_not_supported_raises() -> None:
    """Second derivatives and torch.func: an error, and not a wrong number."""
    layer, x = build_layer().eval(), torch.randn(1, 6, DIM, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
    with torch.no_grad():
        layer(x)  # builds the lists
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda tokens: layer(tokens).sum())(x.detach())


def test_assigned_state_is_float32_again() -> None:
    router = build_router()
    router.observe(batch(0, 40))
    rounded = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in router.state_dict().items()
    }
    router.load_state_dict(rounded, assign=True)
    assert router.codebook.codewords.dtype == torch.float32
    assert torch.equal(router.codebook.codewords, rounded["codebook.codewords"].float())


def test_a_router_may_have_a_part_named_router() -> None:
    outer, hidden = build_router(), batch(0, 40)
    kinds = ";".join(["bool:T", *outer.plan_layout().values()])
    arguments = (hidden, None, None, outer._handle, kinds, False, False)
    wanted = torch.ops.airmoe.plan(*arguments)
    outer.router = airmoe.ROUTERS["topk"].Config(dim=DIM, num_experts=9, top_k=2).build()
    found = torch.ops.airmoe.plan(*arguments)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
