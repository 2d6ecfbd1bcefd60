"""What is swapped, alone or inside other modules, and what is refused before any change."""

from __future__ import annotations

import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import airmoe
from airmoe import ConfigError
from tests.adapt.models import (
    BUILD,
    EXPERTS,
    SIZES,
    WRONG_LAYERS,
    build,
    calibrated,
    fitted,
    fresh,
    logits_of,
    reloaded,
    stock_routers,
    swap,
    swapped_routers,
    unchanged,
)


def refused(model: Any, match: str, **settings: Any) -> ConfigError:
    with unchanged(model), pytest.raises(ConfigError, match=match) as caught:
        swap(model, **settings)
    return caught.value


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"shortlist_size": 1}, r"shortlist_size: got 1, must be >= 2"),
        ({"shortlist_size": EXPERTS + 1}, r"shortlist_size: got 17, must be <= 16"),
        ({"shortlist_size": 8.0}, "must be a whole number"),
        ({"num_codewords": 0}, "num_codewords: got 0"),
        *(({"layers": layers}, match) for layers, match in WRONG_LAYERS),
    ],
)
def test_wrong_settings(settings: dict[str, Any], match: str) -> None:
    refused(build("mixtral"), match, **settings)


def test_a_dense_layer_has_no_router() -> None:
    error = refused(build("deepseek_v3"), r"with a router: 1, 2", layers=[0])
    assert error.value == 0


@pytest.mark.parametrize(
    ("changes", "least", "rule"),
    [
        ({}, 8, ": tokens are limited.*fewer than 2 candidates"),
        ({"num_experts_per_tok": 6}, 12, ": "),  # 3 of each of the 4 groups
        ({"num_experts_per_tok": 5}, 12, ": "),  # may be three and two
        ({"n_group": 1, "topk_group": 1}, 2, ""),  # all selected: they limit nothing
    ],
)
def test_groups_need_candidates_everywhere(changes: Any, least: int, rule: str) -> None:
    """Two of four groups: any two must hold the token's experts, and two to be judged by."""
    model = build("deepseek_v3", **changes)
    for size in range(1, least):
        refused(model, f"must be >= {least}{rule}", shortlist_size=size)
    swap(model, shortlist_size=least)
    router = swapped_routers(model)[0]
    groups = router.shortlists() // 4
    assert router.shortlist_size == least
    assert all((groups == group).sum(-1).min() >= least // 4 for group in range(4))


def test_unknown_models_learn_which_are_known() -> None:
    small = {name: value for name, value in SIZES.items() if name != "num_experts_per_tok"}
    for model in (LlamaForCausalLM(LlamaConfig(**small)), nn.Linear(4, 4)):
        error = refused(model, "Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3, GPT-OSS")
        assert error.value == type(model).__name__


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


@pytest.mark.parametrize("where", ["gate", "block"])
def test_a_forward_that_was_replaced(where: str) -> None:
    """Hub kernels replace the forward of the block, and never ask the router."""
    model = build("mixtral")
    block = model.model.layers[1].mlp
    module = block.gate if where == "gate" else block
    module.forward = types.MethodType(lambda self, hidden: None, module)
    error = refused(model, "must run the forward of its class")
    assert error.value == "model.layers.1.mlp" + (".gate" if where == "gate" else "")


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


# -- models inside other modules: the right one is changed, wholly or not at all -------------------


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


def test_through_a_wrapper(tmp_path: Path) -> None:
    wrapper = fitted(Wrapper(build("mixtral")))
    assert wrapper.config.model_type == "airmoe_mixtral"
    expected = logits_of(calibrated("mixtral"))
    assert torch.equal(logits_of(wrapper), expected)
    assert torch.equal(logits_of(reloaded(wrapper.policy, tmp_path)), expected)
    airmoe.restore_routers(wrapper)
    assert type(wrapper.policy) is MixtralForCausalLM and type(wrapper.config) is MixtralConfig
    assert torch.equal(logits_of(wrapper), logits_of(build("mixtral")))


def test_two_models_in_one_module_are_swapped_separately() -> None:
    pair: Any = nn.ModuleList([build("mixtral"), build("olmoe")])
    error = refused(pair, "must hold one Hugging Face model")
    assert error.value == "MixtralForCausalLM, OlmoeForCausalLM"
    for model in pair:
        swap(model)
    airmoe.restore_routers(pair)
    for model, family in zip(pair, ("mixtral", "olmoe"), strict=True):
        assert type(model) is type(build(family)) and not swapped_routers(model)
        assert model.config.model_type == family and not hasattr(model.config, "airmoe")


def test_a_single_layer_is_saved_nowhere() -> None:
    model, stock = build("mixtral"), build("mixtral")
    layer = model.model.layers[1]
    assert swap(layer) is layer and len(swapped_routers(model)) == 1
    assert type(model) is MixtralForCausalLM and model.config.to_dict() == stock.config.to_dict()
    airmoe.restore_routers(layer)
    assert torch.equal(logits_of(model), logits_of(stock))


@pytest.mark.parametrize("family", BUILD)
def test_a_body_s_swap_is_saved_by_its_head(family: str, tmp_path: Path) -> None:
    """The head shares its config with the body, and says of both what was swapped."""
    model = build(family)
    fitted(model.model)
    assert model.config is model.model.config
    loaded = reloaded(model, tmp_path)
    expected = calibrated(family)
    assert type(loaded) is type(expected) and loaded.config.airmoe == expected.config.airmoe
    for found in (model, loaded):
        assert torch.equal(logits_of(found), logits_of(expected))


@pytest.mark.parametrize("swapped", ["body", "head"])
@pytest.mark.parametrize("restored", ["body", "head"])
def test_body_and_head_undo_each_other_s_swap(swapped: str, restored: str, tmp_path: Path) -> None:
    model, stock = build("mixtral"), build("mixtral")
    swap(model if swapped == "head" else model.model)
    airmoe.restore_routers(model if restored == "head" else model.model)
    if swapped == "head" and restored == "body":
        airmoe.restore_routers(model)  # the head's own class
    assert model.config is model.model.config
    assert model.config.to_dict() == {**stock.config.to_dict(), "architectures": None}
    for found, expected in zip(model.modules(), stock.modules(), strict=True):
        assert type(found) is type(expected)
        assert type(getattr(found, "config", None)) is type(getattr(expected, "config", None))
    loaded = reloaded(model, tmp_path)
    assert type(loaded) is MixtralForCausalLM
    assert torch.equal(logits_of(loaded), logits_of(stock))
    swap(model)


def test_the_config_of_a_swapped_body_serves_no_second_model() -> None:
    """It can say of one only what was swapped."""
    body = build("mixtral").model
    other = type(body)(body.config)
    swap(body)
    error = refused(other, r"config of its own.*copy\.deepcopy")
    assert error.field == "swap_routers.model"
    assert body.config.airmoe["shortlist_size"] == 8


def test_a_config_that_cannot_be_copied_changes_nothing() -> None:
    model = build("mixtral")
    model.config.lock = threading.Lock()
    with unchanged(model), pytest.raises(TypeError, match="pickle"):
        swap(model)
    del model.config.lock
    swap(model)
    model.config.lock = threading.Lock()
    with unchanged(model), pytest.raises(TypeError, match="pickle"):
        airmoe.restore_routers(model)


def test_a_config_class_of_the_user_s_own_is_unknown() -> None:
    """Restoring could not give it back."""

    class Config(MixtralConfig):
        pass

    config = Config(**{**SIZES, "num_local_experts": EXPERTS})
    refused(MixtralForCausalLM(config), "must be one of Mixtral")
