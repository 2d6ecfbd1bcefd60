"""`center_tokens`: tokens are routed without their running mean, and nobody is out of reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import airmoe
from airmoe import AirRouter, ConfigError
from airmoe.metrics import mass_recall_bound, overlap
from airmoe.routers.token_mean import TokenMean
from airmoe.routers.tokens import read_tokens
from tests.state.common import DIM, batch, build_block, build_layer, build_router

DECAY = 0.7


def tokens_of(hidden: Tensor, mask: Tensor | None = None) -> Any:
    return read_tokens("test", DIM, hidden, mask)


def shifted(index: int, count: int = 22) -> Tensor:
    """Tokens on one side of the origin."""
    return batch(index, count) + 2 * batch(99, 1)


def test_the_mean_by_hand() -> None:
    found = TokenMean(DIM, DECAY)
    assert torch.equal(found.value, torch.zeros(DIM))
    sums, count = torch.zeros(DIM, dtype=torch.float64), 0.0
    for index, size in enumerate([22, 5, 1, 40]):
        hidden = shifted(index, size)
        found.update(tokens_of(hidden))
        sums = DECAY * sums + (1 - DECAY) * hidden.double().sum(0)
        count = DECAY * count + (1 - DECAY) * size
        torch.testing.assert_close(found.value.double(), sums / count, rtol=1e-5, atol=1e-6)
        if index == 0:
            torch.testing.assert_close(found.value, hidden.mean(0))


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 1e30])
def test_what_does_not_count_is_not_in_the_mean(rubbish: float) -> None:
    hidden = torch.cat([shifted(0), torch.full((3, DIM), rubbish), shifted(1)])
    mask = torch.arange(hidden.shape[0]) < 25  # rubbish is not masked, the tokens after it are
    found, wanted = TokenMean(DIM, DECAY), TokenMean(DIM, DECAY)
    found.update(tokens_of(hidden, mask))
    wanted.update(tokens_of(shifted(0)))
    torch.testing.assert_close(found.value, wanted.value)


def test_batches_without_a_token_change_nothing() -> None:
    found = TokenMean(DIM, DECAY)
    found.update(tokens_of(shifted(0)))
    before = {name: value.clone() for name, value in found.state_dict().items()}
    for _ in range(500):  # decayed that often, the sums would have vanished
        found.update(tokens_of(shifted(1), torch.zeros(22, dtype=torch.bool)))
    assert all(torch.equal(before[name], value) for name, value in found.state_dict().items())


def plain_twin(router: AirRouter) -> AirRouter:
    """The same router for tokens that come without their mean."""
    same = ("probes", "gate", "jitter_std")
    twin = build_router("air", **{name: getattr(router.config, name) for name in same})
    state = router.state_dict()
    twin.load_state_dict({key: state[key] for key in twin.state_dict()})
    return twin.train(router.training)


@pytest.mark.parametrize("options", [{}, {"probes": 2}, {"gate": "expert_choice"}])
@pytest.mark.parametrize("training", [True, False])
def test_routing_is_that_of_tokens_less_the_mean(options: dict[str, Any], training: bool) -> None:
    router = build_router("air-centered", **options).train(training)
    for index in range(3):
        router.observe(shifted(index))
    hidden, mean = shifted(7), router.token_mean.value
    assert mean.norm() > 1
    twin = plain_twin(router)
    found, wanted = router(hidden), twin(hidden - mean)
    found, wanted = found.to_token_routing(), wanted.to_token_routing()
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    torch.testing.assert_close(found.weights, wanted.weights)
    torch.testing.assert_close(router.full_logits(hidden), twin.full_logits(hidden - mean))


def test_the_codebook_learns_tokens_less_the_mean() -> None:
    router, mean = build_router("air-centered"), TokenMean(DIM)
    twin = plain_twin(router)
    for index in range(4):
        router.observe(shifted(index))
        mean.update(tokens_of(shifted(index)))
        twin.observe(shifted(index) - mean.value)
    for name, wanted in twin.codebook.state_dict().items():
        torch.testing.assert_close(router.codebook.state_dict()[name], wanted)


def test_gradients_reach_tokens_as_if_the_mean_were_a_constant() -> None:
    router = build_router("air-centered", jitter_std=0.0)
    router.observe(shifted(0))
    twin = plain_twin(router)
    inputs = [shifted(0).requires_grad_(), (shifted(0) - router.token_mean.value).requires_grad_()]
    for one, hidden in zip((router, twin), inputs, strict=True):
        (one(hidden).to_token_routing().weights ** 2).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(router.centroids.grad, twin.centroids.grad)


def test_padding_is_routed_nowhere() -> None:
    layer = build_layer("air-centered")
    mask = torch.arange(22) < 15
    layer(shifted(0).unsqueeze(0), mask.unsqueeze(0))
    other = shifted(0).masked_fill(~mask.unsqueeze(-1), torch.nan)
    layer.eval()
    clean = layer(shifted(0).unsqueeze(0), mask.unsqueeze(0))
    assert torch.equal(clean, layer(other.unsqueeze(0), mask.unsqueeze(0)))
    assert not clean[0, 15:].any()


def test_evaluation_leaves_the_mean_alone() -> None:
    layer = build_layer("air-centered")
    layer(shifted(0).unsqueeze(0))
    before = layer.router.token_mean.value
    layer.eval()(shifted(1).unsqueeze(0) + 5)
    assert torch.equal(before, layer.router.token_mean.value)


def test_freezing_the_codebook_freezes_the_mean() -> None:
    router = build_router("air-centered")
    router.observe(shifted(0))
    router.freeze_codebook()
    before = router.token_mean.value
    router.observe(shifted(1) + 5)
    assert torch.equal(before, router.token_mean.value)


def test_a_recomputed_forward_has_the_mean_of_its_own_moment() -> None:
    """Activation checkpointing, with another micro-batch between forward and backward."""
    gradients = []
    for checkpointed in (False, True):
        block = build_block("air-centered").train()
        airmoe.track_optimizer(block, torch.optim.SGD(block.parameters(), lr=0.1))
        outputs = []
        for index in range(3):
            torch.manual_seed(index)  # dropout
            x = shifted(index).unsqueeze(0) * (index + 1)
            if checkpointed:
                outputs.append(checkpoint(block, x, use_reentrant=False))
            else:
                outputs.append(block(x))
        for output in outputs:
            output.pow(2).sum().backward()
        gradients.append([weight.grad for weight in block.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_a_saved_router_goes_on_where_it_stopped() -> None:
    router, again = build_router("air-centered"), build_router("air-centered", seed=5)
    router.observe(shifted(0))
    again.load_state_dict(router.state_dict())
    for one in (router, again):
        one.observe(shifted(1))
    assert torch.equal(router.token_mean.value, again.token_mean.value)
    assert torch.equal(router.codebook.codewords, again.codebook.codewords)


def test_a_cast_keeps_the_mean_whole() -> None:
    router = build_router("air-centered").bfloat16()
    halves = {key: value.half() for key, value in router.state_dict().items()}
    router.load_state_dict(halves, assign=True)
    assert {value.dtype for value in router.token_mean.state_dict().values()} == {torch.float32}


def test_without_it_there_is_nothing_to_save() -> None:
    assert not [key for key in build_router("air").state_dict() if "mean" in key]


def test_reset() -> None:
    router = build_router("air-centered")
    router.observe(shifted(0))
    router.reset_parameters()
    assert not router.token_mean.value.any()


def test_measured_against_the_exact_answer_of_the_same_tokens() -> None:
    """With lists of all experts nothing is missed, and the bound holds."""
    router = build_router("air-centered", shortlist_size=36)
    router.observe(shifted(0))
    assert torch.equal(overlap(router, shifted(1)), torch.ones(22))
    short = build_router("air-centered")
    short.observe(shifted(0))
    found = airmoe.metrics.mass_recall(short, shifted(1))
    assert (mass_recall_bound(short, shifted(1)) <= found + 1e-6).all()


def unlisted(router: AirRouter) -> int:
    return router.config.num_experts - router.shortlists().unique().numel()


def test_experts_opposite_to_a_shared_direction_are_listed() -> None:
    """The reason for it: with a mean far from 0 the lists of all codewords are the same side's."""
    sizes = {"num_experts": 400, "num_codewords": 32, "shortlist_size": 40, "jitter_std": 0.0}
    routers = [build_router(case, **sizes).eval() for case in ("air", "air-centered")]
    for router in routers:
        for index in range(20):
            router.train().observe(batch(index, 256) + 4 * batch(99, 1))
    plain, centered = (unlisted(router.eval()) for router in routers)
    assert plain > 100 > 20 > centered


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_yes_or_no(value: object) -> None:
    with pytest.raises(ConfigError, match="center_tokens"):
        build_router("air", center_tokens=value)
