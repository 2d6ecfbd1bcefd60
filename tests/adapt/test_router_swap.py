"""What is swapped, alone or inside other modules, and what is refused before any change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import airmoe
from airmoe import ConfigError
from tests.adapt.models import (
    BATCHES,
    EXPERTS,
    SIZES,
    build,
    calibrated,
    fresh,
    logits_of,
    stock_routers,
    swap,
    swapped_routers,
    unchanged,
)


def refused(model: Any, match: str, **settings: Any) -> ConfigError:
    with unchanged(model), pytest.raises(ConfigError, match=match) as caught:
        swap(model, **settings)
    return caught.value


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"shortlist_size": 1}, r"shortlist_size: got 1, must be >= "),
        ({"shortlist_size": EXPERTS + 1}, r"shortlist_size: got 17, must be <= 16"),
        ({"shortlist_size": 8.0}, "must be a whole number"),
        ({"num_codewords": 0}, "num_codewords: got 0"),
        ({"layers": [1, 7]}, r"layers: got 7, must be the number of a layer with a router: "),
        ({"layers": [-1]}, r"layers: got -1"),
        ({"layers": [True]}, r"layers: got True"),
        ({"layers": 1}, r"layers: got 1, must be a list"),
        ({"layers": [1.0]}, r"layers: got 1\.0"),
        ({"layers": []}, "at least one"),
        ({"layers": [1, 1]}, "each layer once"),
    ],
)
def test_wrong_settings(family: str, settings: dict[str, Any], match: str) -> None:
    refused(build(family), match, **settings)


def test_a_dense_layer_has_no_router() -> None:
    error = refused(build("deepseek_v3"), r"with a router: 1, 2", layers=[0])
    assert error.value == 0


def test_groups_need_candidates_everywhere() -> None:
    """Two of four groups: any two must hold the token's two experts, and two to be judged by."""
    for size in (2, 4, 7):
        match = "must be >= 8: tokens are limited.*fewer than 2 candidates"
        refused(build("deepseek_v3"), match, shortlist_size=size)
    swap(build("deepseek_v3"))


def test_groups_that_are_all_selected_limit_nothing() -> None:
    model = build("deepseek_v3", n_group=1, topk_group=1)
    swap(model, shortlist_size=2)
    assert swapped_routers(model)[0].shortlist_size == 2


def test_more_experts_per_token_need_more_of_each_group() -> None:
    model = build("deepseek_v3", num_experts_per_tok=6)
    refused(model, "must be >= 12: ", shortlist_size=11)  # 3 of each of the 4 groups
    swap(model, shortlist_size=12)
    router = swapped_routers(model)[0]
    groups = router.shortlists() // 4
    assert all((groups == group).sum(-1).min() >= 3 for group in range(4))
    # Five from two groups may be three and two, hence three of each as well.
    refused(build("deepseek_v3", num_experts_per_tok=5), "must be >= 12: ", shortlist_size=11)


def test_unknown_models_learn_which_are_known() -> None:
    small = {name: value for name, value in SIZES.items() if name != "num_experts_per_tok"}
    error = refused(
        LlamaForCausalLM(LlamaConfig(**small)), "Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3, GPT-OSS"
    )
    assert error.value == "LlamaForCausalLM"


def test_a_subclassed_router_is_unknown() -> None:
    """Its forward may do anything."""
    model = build("mixtral")
    for router in stock_routers(model):
        router.__class__ = type("Mine", (type(router),), {})
    refused(model, "must be one of Mixtral")


def test_swapped_already() -> None:
    model = calibrated("deepseek_v3")
    expected = logits_of(model)
    refused(model, "is swapped already")
    refused(model, "is swapped already", layers=[1])
    assert torch.equal(logits_of(model), expected)


def test_the_meta_device() -> None:
    with torch.device("meta"):
        model = fresh("mixtral")
    refused(model, "must have its weights in memory")


def test_quantised_models() -> None:
    model = build("mixtral")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    refused(model, "must have floating-point weights")
    model = build("mixtral")
    experts = model.model.layers[0].mlp.experts
    whole = experts.down_proj.detach().to(torch.int8)
    experts.down_proj = nn.Parameter(whole, requires_grad=False)
    refused(model, "must have floating-point weights")


def test_nothing_to_restore() -> None:
    model = build("mixtral")
    with unchanged(model), pytest.raises(ConfigError, match="must have swapped routers"):
        airmoe.restore_routers(model)


def test_random_numbers_go_on_as_without_the_swap() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    swap(build("mixtral"))
    assert torch.equal(torch.rand(3), expected)


class Wrapper(nn.Module):
    """Shows the config of what it wraps, as many training loops do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.policy = model

    @property
    def config(self) -> Any:
        return self.policy.config

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.policy(input_ids)


def test_a_model_inside_a_wrapper() -> None:
    """Swapped by itself; calibrated and restored through the wrapper too."""
    wrapper = Wrapper(build("mixtral"))
    refused(wrapper, r"must be a model of transformers.* pass the model inside")
    swap(wrapper.policy)
    airmoe.calibrate(wrapper, BATCHES, passes=3)
    assert torch.equal(logits_of(wrapper), logits_of(calibrated("mixtral")))
    airmoe.restore_routers(wrapper)
    assert type(wrapper.policy) is MixtralForCausalLM and type(wrapper.config) is MixtralConfig
    assert torch.equal(logits_of(wrapper), logits_of(build("mixtral")))
