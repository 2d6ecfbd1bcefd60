"""What `swap_ffn` cannot do it refuses before it touches the model, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import airmoe
from airmoe import ConfigError, FfnExperts, swap_ffn
from airmoe.moe.ffn.dense import dense_activation, find_ffns
from tests.moe.dense_models import DIM, NEURONS, VOCABULARY, air, dense, exact, ids

Refusal = tuple[str, dict[str, Any], str, str]
DENSE: dict[str, Any] = {"layers": [1], "router": exact(), "from_dense": True}
NEW = airmoe.AirRouter.Config.for_budget(dim=DIM, num_experts=64, top_k=8)

# name, arguments, field, words of the message
ARGUMENTS: list[Refusal] = [
    (
        "past the end",
        DENSE | {"layers": [0, 3]},
        "layers",
        "got 3, must be a whole number from",
    ),
    ("negative", DENSE | {"layers": [-1]}, "layers", "got -1"),
    ("no number", DENSE | {"layers": ["1"]}, "layers", "got '1'"),
    ("a flag", DENSE | {"layers": [True]}, "layers", "got True"),
    ("a number alone", DENSE | {"layers": 1}, "layers", "must list at least one layer"),
    ("none", DENSE | {"layers": []}, "layers", "must list at least one layer"),
    ("nothing", DENSE | {"layers": None}, "layers", "got None, must list at least one layer"),
    ("a stream", DENSE | {"layers": iter([1])}, "layers", "must list at least one layer"),
    ("twice", DENSE | {"layers": [1, 0, 1]}, "layers", "must name each layer once"),
    ("not a flag", DENSE | {"from_dense": 1}, "from_dense", "must be True or False"),
    ("no router", {"layers": [1]}, "router", "must be given when experts are new"),
    ("a built router", {"layers": [1], "router": NEW.build()}, "router", "must be the Config of"),
    ("another width", DENSE | {"router": exact(dim=8)}, "router.dim", "must be 16"),
    (
        "another number",
        DENSE | {"router": exact(num_experts=64)},
        "router.num_experts",
        "must be 48 with from_dense",
    ),
    ("softmax", DENSE | {"router": exact(gate="token_choice")}, "router.gate", "must be 'binary'"),
    (
        "no gate at all",
        DENSE
        | {
            "router": airmoe.ROUTERS["hierarchical"].Config.for_budget(
                dim=DIM, num_experts=48, top_k=8
            )
        },
        "router.gate",
        "got 'HierarchicalRouter.Config', must be 'binary'",
    ),
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
    (
        "sizes that do not divide",
        DENSE | {"experts": FfnExperts(expert_size=7)},
        "experts.expert_size",
        "must divide 48",
    ),
    (
        "another activation",
        DENSE | {"experts": FfnExperts(activation="geglu")},
        "experts.activation",
        "must be 'swiglu'",
    ),
    ("a number of experts", DENSE | {"experts": 48}, "experts", "must be an airmoe.FfnExperts"),
    ("a norm", DENSE | {"post_norm": "layernorm"}, "post_norm", "must be 'none' with from_dense"),
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
        lambda: exact(top_k=NEURONS + 1),
        lambda: air(top_k=NEURONS + 1, shortlist_size=NEURONS),
        lambda: air(top_k=20, shortlist_size=12),
        lambda: exact(gate="softmax"),
        lambda: FfnExperts(expert_size=0),
        lambda: FfnExperts(activation="tanh"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError):
            make()


def test_swapped_already() -> None:
    model = dense()
    swap_ffn(model, **DENSE)
    refused(model, DENSE | {"layers": [0, 1]}, "layers[1]", "is swapped already")
    swap_ffn(model, layers=[0], router=exact(), from_dense=True)


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


def with_tied_projections() -> nn.Module:
    model = dense()
    network = model.model.layers[1].mlp
    network.up_proj.weight = network.gate_proj.weight
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
    (lambda: dense(mlp_bias=True), "layers[1].gate_proj.bias", "experts have no bias"),
    (clamped, "layers[1]", "and nothing else"),
    (with_one_network_twice, "layers[1]", "layers.2.mlp.gate_proj.weight', must have weights of"),
    (with_tied_projections, "layers[1]", "must have weights of its own"),
    (lambda: dense(hidden_act="relu"), "layers[1].act_fn", "swiglu, geglu, geglu_tanh"),
    (with_part("act_fn", nn.PReLU()), "layers[1].act_fn", "got 'PReLU'"),
]


@pytest.mark.parametrize(("build", "field", "words"), MODELS)
def test_models(build: Callable[[], nn.Module], field: str, words: str) -> None:
    refused(build(), DENSE, field, words)


def test_no_model_at_all() -> None:
    with pytest.raises(ConfigError, match=r"got .NoneType., must be a model\. Load it"):
        swap_ffn(None, **DENSE)  # type: ignore[arg-type]


def test_one_bad_layer_leaves_the_others_alone() -> None:
    model = dense()
    model.model.layers[2].mlp = Clamped(model.model.layers[2].mlp)
    refused(model, DENSE | {"layers": [0, 1, 2]}, "layers[2]", "and nothing else")


def test_new_experts_need_neither_formula_nor_activation() -> None:
    models: list[Any] = [dense(hidden_act="relu"), dense(mlp_bias=True), clamped()]
    models.append(with_one_network_twice())
    for model in models:
        swap_ffn(model, layers=[1], router=NEW)
        assert model(ids()).logits.shape == (2, 9, VOCABULARY)


def test_other_names_of_the_same_activation() -> None:
    for name, expected in (
        ("silu", "swiglu"),
        ("swish", "swiglu"),
        ("gelu_python", "geglu"),
        ("gelu_new", "geglu_tanh"),
    ):
        (ffn,) = find_ffns(dense(hidden_act=name), [1])
        assert dense_activation(ffn) == expected
