"""`swap_ffn` puts new experts in the place of dense networks, or refuses before any change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import airmoe
from airmoe import ConfigError, FfnExperts, MoELayer, swap_ffn
from tests.adapt.models import (
    DENSE,
    VOCAB,
    WIDTH,
    WRONG_LAYERS,
    air,
    dense,
    granular,
    ids,
    layer_of,
    logits_of,
    reloaded,
    unchanged,
)
from tests.model.common import build as own_model

pytestmark = pytest.mark.filterwarnings("ignore:AirRouter is trained without", "ignore:codebook")
NEW: dict[str, Any] = {"layers": [1], "router": air()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layers_take_the_place_of_the_networks(dtype: torch.dtype) -> None:
    model = dense(dtype=dtype)
    made = swap_ffn(model, layers=[0, 2], router=air())
    assert [layer_of(model, index) for index in (0, 2)] == made
    assert all(isinstance(layer, MoELayer) and not layer.training for layer in made)
    assert not isinstance(layer_of(model, 1), MoELayer)
    assert logits_of(model).dtype == dtype


@pytest.mark.parametrize("family", DENSE)
def test_new_experts_train(family: str) -> None:
    model = dense(family)
    router = airmoe.AirRouter.Config.for_budget(dim=WIDTH, num_experts=64, top_k=8)
    (layer,) = swap_ffn(model, layers=[1], router=router)
    assert layer.post_norm is not None and layer.experts.activation == "swiglu"
    assert 0.19 < float(layer.experts.up.detach().std()) < 0.21  # initializer_range
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    airmoe.track_optimizer(model, optimizer)
    losses = []
    for _ in range(8):
        loss = model.train()(ids(batch=8), labels=ids(batch=8)).loss
        loss.backward()
        assert all(weight.grad is not None for weight in layer.parameters())
        optimizer.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    assert torch.isfinite(logits_of(model)).all()


@pytest.mark.parametrize("name", ["peer", "hierarchical", "topk"])
def test_any_router_that_lets_tokens_choose(name: str) -> None:
    config = airmoe.ROUTERS[name].Config.for_budget(dim=WIDTH, num_experts=64, top_k=8)
    experts = FfnExperts(expert_size=2, activation="geglu")
    (layer,) = swap_ffn(dense(), layers=[2], router=config, experts=experts, post_norm="none")
    x = torch.randn(2, 5, WIDTH)
    output = layer.eval().forward_with_routing(x)
    direct = layer.experts(x.view(-1, WIDTH), output.routing)
    assert torch.equal(output.hidden.view(-1, WIDTH), direct)
    assert (layer.experts.expert_size, layer.experts.activation) == (2, "geglu")
    assert isinstance(layer.router, airmoe.ROUTERS[name])


def test_torch_s_default_device_does_not_matter() -> None:
    """Users may have set it for their own tensors; the layer lives where the model does."""
    model = dense()
    with torch.device("meta"):
        swap_ffn(model, **NEW)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert torch.isfinite(logits_of(model)).all()


def test_generate_with_cache_is_generate_without() -> None:
    """A token's experts depend on that token only."""
    model = granular()
    prompt = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    options = {"max_new_tokens": 8, "do_sample": False}
    with_cache, without = (
        model.generate(**prompt, **options, use_cache=cache) for cache in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_the_project_s_own_dense_layers(tmp_path: Path) -> None:
    """`swap_ffn` needs the shape of the network, not the family's name."""
    model = own_model("dense", vocab_size=VOCAB, hidden_size=WIDTH)
    swap_ffn(model, **NEW)
    assert isinstance(layer_of(model, 1), MoELayer)
    loaded = reloaded(model, tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))


# -- refused --------------------------------------------------------------------------------------


def refused(model: nn.Module, arguments: dict[str, Any], field: str, match: str) -> None:
    """The call raises a ConfigError about `field`, and model and config are as before."""
    with unchanged(model), pytest.raises(ConfigError, match=match) as caught:
        swap_ffn(model, **arguments)
    assert caught.value.field == f"swap_ffn.{field}"
    assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize(
    ("arguments", "field", "match"),
    [
        ({"layers": [0, 3]}, "layers", "got 3, must be the number of a decoder layer: 0, 1, 2"),
        ({"layers": None}, "layers", "got None, must be a list"),
        *(({"layers": layers}, "layers", match) for layers, match in WRONG_LAYERS),
        ({"router": None}, "router", r"for_budget\(dim=32"),
        ({"router": air().build()}, "router", "must be the Config of"),
        ({"router": air(dim=8)}, "router.dim", "must be 32"),
        (
            {"router": airmoe.ExpertChoiceRouter.Config(dim=WIDTH, num_experts=64, top_k=8)},
            "router",
            "see future tokens",
        ),
        ({"router": air(gate="expert_choice")}, "router", "see future tokens"),
        ({"experts": 48}, "experts", "must be an airmoe.FfnExperts"),
        ({"post_norm": "rms"}, "post_norm", "one of"),
    ],
)
def test_arguments(arguments: dict[str, Any], field: str, match: str) -> None:
    refused(dense(), NEW | arguments, field, match)


@pytest.mark.parametrize("option", [{"expert_size": 0}, {"activation": "tanh"}])
def test_experts_that_cannot_be(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"swap_ffn\.experts\."):
        FfnExperts(**option)


def test_swapped_already() -> None:
    model = dense()
    swap_ffn(model, **NEW)
    refused(model, NEW | {"layers": [0, 1]}, "layers[1]", "is swapped already")
    swap_ffn(model, layers=[0], router=air())


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return dense()


def with_part(name: str, part: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = dense()
        setattr(layer_of(model, 1), name, part)
        return model

    return build


def without_network() -> nn.Module:
    model = dense()
    del model.model.layers[1].mlp
    return model


class Quantised(nn.Linear):
    """What quantization libraries put in the place of a Linear."""


HALF_BYTES = nn.Linear(WIDTH, 24, bias=False).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("build", "field", "match"),
    [
        (on_meta, "model", "on the meta device"),
        (lambda: nn.Linear(2, 2), "model", "must be a decoder with its layers in `layers`"),
        (with_part("up_proj", Quantised(WIDTH, 24)), "layers[1].up_proj", "got 'Quantised'"),
        (with_part("gate_proj", HALF_BYTES), "layers[1].gate_proj", "torch.nn.Linear in float16"),
        (with_part("dropout", nn.Dropout()), "layers[1]", "made of gate_proj, up_proj, down_proj"),
        (with_part("up_proj", None), "layers[1]", "made of gate_proj, up_proj, down_proj"),
        (without_network, "layers[1]", "got 'no `mlp`'"),
    ],
)
def test_models(build: Callable[[], Any], field: str, match: str) -> None:
    refused(build(), NEW | {"layers": [0, 1]}, field, match)


def test_no_model_at_all() -> None:
    with pytest.raises(ConfigError, match=r"got .NoneType., must be a model\. Load it"):
        swap_ffn(None, **NEW)  # type: ignore[arg-type]


def test_new_experts_need_neither_formula_nor_activation() -> None:
    for model in (dense(hidden_act="relu"), dense(mlp_bias=True)):
        swap_ffn(model, **NEW)
        assert logits_of(model).shape == (3, 12, VOCAB)


def test_a_body_s_swap_is_saved_by_its_head(tmp_path: Path) -> None:
    """Their one config says what was swapped, so it serves no second model."""
    model = dense()
    other = type(model.model)(model.config)
    swap_ffn(model.model, **NEW)
    loaded = reloaded(model, tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))
    refused(other, NEW, "model", "must have a config of its own")


def test_a_config_class_of_the_user_s_own() -> None:
    class Config(LlamaConfig):
        pass

    model = LlamaForCausalLM(Config(**dense().config.to_dict()))
    swap_ffn(model, **NEW)
    assert isinstance(layer_of(model, 1), MoELayer) and isinstance(model.config, Config)
    assert set(model.config.airmoe_ffn) == {"1"}  # type: ignore[attr-defined]
