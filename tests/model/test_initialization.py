"""Weights drawn from a seed: the modules that two models share start equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.model import draw_weights
from tests.model.common import VARIANTS, build
from tests.state.common import assert_same

MOE_LAYER = "model.layers.1.mlp."


def drawn(variant: str, seed: int = 1, before: int = 0) -> dict[str, Tensor]:
    model = build(variant)
    torch.manual_seed(before)
    draw_weights(model, seed)
    return dict(model.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_methods_share_does_not_depend_on_the_method(variant: str) -> None:
    air, other = drawn("air"), drawn(variant)
    body = [name for name in air if not name.startswith(MOE_LAYER)]
    assert len(body) > 20
    if variant in ("topk", "hierarchical", "expert_choice", "air-expert-choice"):
        parts = ("experts.gate", "experts.up", "experts.down", "router.centroids")
        body += [MOE_LAYER + part for part in parts]
    for name in body:
        assert torch.equal(air[name], other[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_seed_decides_and_nothing_else(variant: str) -> None:
    one, again, other = drawn(variant), drawn(variant, before=7), drawn(variant, seed=2)
    assert_same(one, again)
    matrices = [name for name, value in one.items() if value.ndim > 1]
    assert len(matrices) > 10
    for name in matrices:
        if "sums" not in name:  # zeros before the first batch
            assert not torch.equal(one[name], other[name]), name


def test_the_global_generator_is_left_alone() -> None:
    model = build("air")
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    draw_weights(model, 1)
    assert torch.equal(torch.rand(4), wanted)
