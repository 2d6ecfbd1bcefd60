"""The plain PyTorch operations on a GPU give what they give on a CPU (`make test-gpu`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import airmoe
from airmoe.kernels.noise import normal

pytestmark = pytest.mark.gpu

DIM, EXPERTS, TOP_K = 32, 256, 16


def build(name: str) -> airmoe.MoELayer:
    config = airmoe.ROUTERS[name].Config.for_budget(dim=DIM, num_experts=EXPERTS, top_k=TOP_K)
    return airmoe.MoELayer(config.build(), airmoe.GranularExperts(EXPERTS, DIM))


def step(layer: airmoe.MoELayer, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Output, loss and all gradients of one training micro-batch."""
    x = x.clone().requires_grad_()
    output = layer.forward_with_routing(x, mask)
    loss = output.hidden.square().mean() + airmoe.load_balance_loss(output.routing)
    loss.backward()
    found = {"output": output.hidden, "loss": loss, "x": x.grad}
    found |= {key: weight.grad for key, weight in layer.named_parameters()}
    found |= dict(layer.state_dict())
    return {key: value.detach().cpu() for key, value in found.items() if value is not None}


@pytest.mark.parametrize("name", sorted(airmoe.ROUTERS))
def test_a_training_step_equals_the_cpu(name: str) -> None:
    layer = build(name)
    layer_gpu = copy.deepcopy(layer).cuda()
    mask = torch.rand(2, 100) < 0.8
    for _ in range(3):
        x = torch.randn(2, 100, DIM)
        expected = step(layer, x, mask)
        found = step(layer_gpu, x.cuda(), mask.cuda())
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=2e-4, atol=2e-5, msg=key)


def test_noise_is_the_same_on_both() -> None:
    keys, columns = torch.arange(-50, 50, dtype=torch.int32).unsqueeze(-1), torch.arange(1000)
    torch.testing.assert_close(normal(keys.cuda(), columns.cuda()).cpu(), normal(keys, columns))


def test_bfloat16_model_keeps_its_codebook() -> None:
    layer = build("air").cuda().bfloat16()
    layer(torch.randn(2, 100, DIM, device="cuda", dtype=torch.bfloat16)).sum().backward()
    codebook = layer.router.codebook
    assert isinstance(codebook, airmoe.Codebook)
    assert codebook.codewords.dtype == torch.float32 and codebook.codewords.is_cuda
    assert bool(codebook.codewords.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_what_scores_are_made_of(dtype: torch.dtype) -> None:
    """As if tokens and centroids were rounded; scores, sums and evaluation lists stay float32."""
    layer = build("air").cuda()
    router, x = layer.router, torch.randn(2, 100, DIM, device="cuda")
    assert isinstance(router, airmoe.AirRouter)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    airmoe.track_optimizer(layer, optimizer)
    with torch.autocast("cuda", dtype=dtype):
        found = layer.forward_with_routing(x).routing
    assert isinstance(found, airmoe.CellRouting)
    assert found.gates.dtype == router.training_lists.dtype == dtype
    assert ((found.gates > 0).sum(-1) == TOP_K).all()
    assert found.log_z.dtype == found.expert_probs.dtype == torch.float32
    assert router.codebook.codewords.dtype == torch.float32
    same = copy.deepcopy(router)
    with torch.no_grad():
        same.centroids.copy_(same.centroids.to(dtype))
    lists = router.eval().shortlists()
    assert torch.equal(lists, copy.deepcopy(router).cpu().shortlists().cuda())
    with torch.autocast("cuda", dtype=dtype), torch.no_grad():
        rounded = router(x.view(-1, DIM))
    wanted = same.eval()(x.view(-1, DIM).to(dtype).float())
    mean = (rounded.expert_probs - wanted.expert_probs).abs().sum()
    assert mean < 0.02, "differs by the norms of the rounded centroids and single ties"
