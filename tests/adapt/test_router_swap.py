"""What cannot be swapped is refused in one sentence, before anything has changed."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import airmoe
from airmoe import ConfigError
from tests.adapt.models import (
    BUILD,
    EXPERTS,
    SIZES,
    build,
    calibrated,
    logits_of,
    stock_routers,
    swapped_routers,
)

SIZE: dict[str, Any] = {"num_codewords": 4, "shortlist_size": 8}


def picture(model: nn.Module) -> dict[str, Any]:
    """Everything a half-done swap would have changed."""
    return {
        "classes": [(name, type(module)) for name, module in model.named_modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "config": [id(getattr(module, "config", None)) for module in model.modules()],
        "tensors": [
            (name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()
        ],
    }


def refused(model: Any, match: str, **settings: Any) -> ConfigError:
    before = picture(model)
    with pytest.raises(ConfigError, match=match) as caught:
        airmoe.swap_routers(model, **{**SIZE, **settings})
    assert picture(model) == before
    return caught.value


@pytest.mark.parametrize("family", BUILD)
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"shortlist_size": 1}, r"shortlist_size: got 1, must be >= 2"),
        ({"shortlist_size": EXPERTS + 1}, r"shortlist_size: got 17, must be <= 16"),
        ({"shortlist_size": 8.0}, "must be a whole number"),
        ({"num_codewords": 0}, "num_codewords: got 0"),
        ({"layers": [1, 7]}, r"layers: got 7, must be the number of a layer with a router: "),
        ({"layers": [-1]}, r"layers: got -1"),
        ({"layers": [True]}, r"layers: got True"),
        ({"layers": 1}, r"layers: got 1, must be a list"),
        ({"layers": [1.0]}, r"layers: got 1\.0, must be a list of whole numbers"),
        ({"layers": torch.tensor([1])}, r"layers: got tensor\(1\)"),
        ({"layers": []}, "at least one"),
        ({"layers": [1, 1]}, "each layer once"),
    ],
)
def test_wrong_settings(family: str, settings: dict[str, Any], match: str) -> None:
    refused(build(family), match, **settings)


def test_a_dense_layer_has_no_router() -> None:
    error = refused(build("deepseek_v3"), r"with a router: 1, 2", layers=[0])
    assert error.value == 0


@pytest.mark.parametrize("size", [2, 4, 7])
def test_groups_need_candidates_everywhere(size: int) -> None:
    """Two of four groups: any two must hold the token's two experts, and two to be judged by."""
    error = refused(build("deepseek_v3"), "must be >= 8: tokens are limited", shortlist_size=size)
    assert "fewer than 2 candidates" in error.rule
    airmoe.swap_routers(build("deepseek_v3"), num_codewords=4, shortlist_size=8)


def test_groups_that_are_all_selected_limit_nothing() -> None:
    model = build("deepseek_v3", n_group=1, topk_group=1)
    airmoe.swap_routers(model, num_codewords=4, shortlist_size=2)
    assert swapped_routers(model)[0].shortlist_size == 2


def test_more_experts_per_token_need_more_of_each_group() -> None:
    model = build("deepseek_v3", num_experts_per_tok=6)
    refused(model, "must be >= 12: ", shortlist_size=11)  # 3 of each of the 4 groups
    airmoe.swap_routers(model, num_codewords=4, shortlist_size=12)
    router = swapped_routers(model)[0]
    groups = router.shortlists() // 4
    assert all((groups == group).sum(-1).min() >= 3 for group in range(4))
    # Five from two groups may be three and two, hence three of each as well.
    refused(build("deepseek_v3", num_experts_per_tok=5), "must be >= 12: ", shortlist_size=11)


def test_unknown_models_are_told_which_are_known() -> None:
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


@pytest.mark.parametrize("family", BUILD)
def test_swapped_already(family: str) -> None:
    model = calibrated(family)
    expected = logits_of(model)
    refused(model, "is swapped already")
    refused(model, "is swapped already", layers=[1])
    assert torch.equal(logits_of(model), expected)


def test_the_meta_device() -> None:
    with torch.device("meta"):
        model = BUILD["mixtral"]()
    refused(model, "must have its weights in memory")


@pytest.mark.parametrize("mark", ["is_quantized", "hf_quantizer", "config", "weights"])
def test_quantised_models(mark: str) -> None:
    model = build("mixtral")
    if mark == "config":
        model.config.quantization_config = {"quant_method": "mxfp4"}
    elif mark == "weights":
        experts = model.model.layers[0].mlp.experts
        whole = experts.down_proj.detach().to(torch.int8)
        experts.down_proj = nn.Parameter(whole, requires_grad=False)
    else:
        setattr(model, mark, True if mark == "is_quantized" else object())
    refused(model, "must have floating-point weights")


@pytest.mark.parametrize("where", ["gate", "block"])
def test_somebody_else_s_forward(where: str) -> None:
    """Hub kernels replace the forward of the block, and never ask the router."""
    model = build("mixtral")
    block = model.model.layers[1].mlp
    module = block.gate if where == "gate" else block
    module.forward = types.MethodType(lambda self, hidden: None, module)
    error = refused(model, "must run the forward of its class")
    assert error.value == "model.layers.1.mlp" + (".gate" if where == "gate" else "")


def test_nothing_to_restore() -> None:
    model = build("mixtral")
    before = picture(model)
    with pytest.raises(ConfigError, match="must have swapped routers"):
        airmoe.restore_routers(model)
    assert picture(model) == before


def test_random_numbers_go_on_as_without_the_swap() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    airmoe.swap_routers(build("mixtral"), **SIZE)
    assert torch.equal(torch.rand(3), expected)
