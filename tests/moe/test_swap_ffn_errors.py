"""What `swap_ffn` cannot do it refuses before it touches the model, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import airmoe
from airmoe import ConfigError, FfnExperts, swap_ffn
from tests.moe.dense_models import DIM, NEURONS, VOCABULARY, air, dense, ids

Refusal = tuple[str, dict[str, Any], str, str]
NEW = airmoe.AirRouter.Config.for_budget(dim=DIM, num_experts=64, top_k=8)
FIRST: dict[str, Any] = {"layers": [1], "router": NEW}

# name, arguments, field, words of the message
ARGUMENTS: list[Refusal] = [
    (
        "past the end",
        FIRST | {"layers": [0, 3]},
        "layers",
        "got 3, must be a whole number from",
    ),
    ("negative", FIRST | {"layers": [-1]}, "layers", "got -1"),
    ("no number", FIRST | {"layers": ["1"]}, "layers", "got '1'"),
    ("a flag", FIRST | {"layers": [True]}, "layers", "got True"),
    ("a number alone", FIRST | {"layers": 1}, "layers", "must list at least one layer"),
    ("none", FIRST | {"layers": []}, "layers", "must list at least one layer"),
    ("nothing", FIRST | {"layers": None}, "layers", "got None, must list at least one layer"),
    ("a stream", FIRST | {"layers": iter([1])}, "layers", "must list at least one layer"),
    ("twice", FIRST | {"layers": [1, 0, 1]}, "layers", "must name each layer once"),
    ("no router", {"layers": [1]}, "router", "must be given, because it says"),
    ("a built router", {"layers": [1], "router": NEW.build()}, "router", "must be the Config of"),
    ("another width", FIRST | {"router": air(dim=8)}, "router.dim", "must be 16"),
    (
        "experts that choose",
        {
            "layers": [1],
            "router": airmoe.ExpertChoiceRouter.Config(dim=DIM, num_experts=64, top_k=8),
        },
        "router",
        "see future tokens",
    ),
    (
        "a gate that chooses",
        {"layers": [1], "router": air(8, gate="expert_choice")},
        "router",
        "see future tokens",
    ),
    ("a number of experts", FIRST | {"experts": 48}, "experts", "must be an airmoe.FfnExperts"),
    ("an unknown norm", {"layers": [1], "router": NEW, "post_norm": "rms"}, "post_norm", "one of"),
]


def refused(model: nn.Module, arguments: dict[str, Any], field: str, words: str) -> None:
    """The call raises a ConfigError about `field`, and model and config are as before."""
    config = getattr(model, "config", None)
    noted = None if config is None else config.to_dict()
    modules = dict(model.named_modules())
    versions = {name: weight._version for name, weight in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        swap_ffn(model, **arguments)
    assert caught.value.field == f"swap_ffn.{field}"
    assert words in str(caught.value), str(caught.value)
    assert caught.value.remedy.endswith(".")
    assert dict(model.named_modules()) == modules
    assert {name: weight._version for name, weight in model.named_parameters()} == versions
    assert noted is None or (config is not None and config.to_dict() == noted)


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [case[1:] for case in ARGUMENTS],
    ids=[case[0] for case in ARGUMENTS],
)
def test_arguments(arguments: dict[str, Any], field: str, words: str) -> None:
    refused(dense(), arguments, field, words)


def test_sizes_that_settings_refuse_themselves() -> None:
    for make in (
        lambda: air(num_experts=48, top_k=49, shortlist_size=48),
        lambda: air(top_k=20, shortlist_size=12),
        lambda: FfnExperts(expert_size=0),
        lambda: FfnExperts(activation="tanh"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError):
            make()


def test_swapped_already() -> None:
    model = dense()
    swap_ffn(model, **FIRST)
    refused(model, FIRST | {"layers": [0, 1]}, "layers[1]", "is swapped already")
    swap_ffn(model, layers=[0], router=NEW)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return dense()


def quantised() -> nn.Module:
    model = dense()
    model.hf_quantizer = object()
    return model


def with_quantization_settings() -> nn.Module:
    model = dense()
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def with_part(name: str, part: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = dense()
        setattr(model.model.layers[1].mlp, name, part)
        return model

    return build


class Clamped(nn.Module):
    """Has the parts of a plain network, but does something else with them."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = network.gate_proj, network.up_proj
        self.down_proj, self.act_fn = network.down_proj, network.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp_max(0.1)) * self.up_proj(x))


def clamped() -> nn.Module:
    model = dense()
    model.model.layers[1].mlp = Clamped(model.model.layers[1].mlp)
    return model


def without_network() -> nn.Module:
    model = dense()
    del model.model.layers[1].mlp
    return model


def with_one_network_twice() -> nn.Module:
    model = dense()
    model.model.layers[2].mlp = model.model.layers[1].mlp
    return model


class Quantised(nn.Linear):
    """What quantization libraries put in the place of a Linear."""


HALF_BYTES = nn.Linear(DIM, NEURONS, bias=False).to(torch.float8_e4m3fn)
MODELS: list[tuple[Callable[[], nn.Module], str, str]] = [
    (on_meta, "model", "on the meta device"),
    (quantised, "model", "floating-point weights"),
    (with_quantization_settings, "model", "floating-point weights"),
    (lambda: nn.Linear(2, 2), "model", "must be a decoder with its layers in `layers`"),
    (with_part("up_proj", Quantised(DIM, NEURONS)), "layers[1].up_proj", "got 'Quantised'"),
    (with_part("gate_proj", HALF_BYTES), "layers[1].gate_proj", "must be one of float16"),
    (with_part("dropout", nn.Dropout()), "layers[1]", "made of gate_proj, up_proj, down_proj"),
    (with_part("up_proj", None), "layers[1]", "made of gate_proj, up_proj, down_proj"),
    (without_network, "layers[1]", "got 'no `mlp`'"),
]


@pytest.mark.parametrize(("build", "field", "words"), MODELS)
def test_models(build: Callable[[], nn.Module], field: str, words: str) -> None:
    refused(build(), FIRST, field, words)


def test_one_bad_layer_leaves_the_others_alone() -> None:
    refused(with_part("up_proj", None)(), FIRST | {"layers": [0, 1]}, "layers[1]", "made of")


def test_no_model_at_all() -> None:
    with pytest.raises(ConfigError, match=r"got .NoneType., must be a model\. Load it"):
        swap_ffn(None, **FIRST)  # type: ignore[arg-type]


def test_new_experts_need_neither_formula_nor_activation() -> None:
    models: list[Any] = [dense(hidden_act="relu"), dense(mlp_bias=True), clamped()]
    models.append(with_one_network_twice())
    for model in models:
        swap_ffn(model, layers=[1], router=NEW)
        assert model(ids()).logits.shape == (2, 9, VOCABULARY)
