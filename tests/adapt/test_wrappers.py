"""Models inside other modules: the right one is changed, wholly or not at all, and given back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import airmoe
from tests.adapt.models import (
    BATCHES,
    BUILD,
    EXPERTS,
    SIZES,
    build,
    calibrated,
    logits_of,
    swapped_routers,
)
from tests.adapt.test_router_swap import SIZE, picture, refused


class Wrapper(nn.Module):
    """Shows the config of what it wraps, as many training loops do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.reward = nn.Linear(4, 4)
        self.policy = model

    @property
    def config(self) -> Any:
        return self.policy.config

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.policy(input_ids)


def test_a_wrapper_that_shows_the_config(tmp_path: Path) -> None:
    wrapper = Wrapper(build("mixtral"))
    airmoe.swap_routers(wrapper, **SIZE)
    airmoe.calibrate(wrapper, BATCHES, passes=3)
    assert wrapper.config.model_type == "airmoe_mixtral"
    expected = logits_of(calibrated("mixtral"))
    assert torch.equal(logits_of(wrapper), expected)
    wrapper.policy.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    airmoe.restore_routers(wrapper)
    assert type(wrapper.policy) is MixtralForCausalLM and type(wrapper.config) is MixtralConfig
    assert torch.equal(logits_of(wrapper), logits_of(build("mixtral")))


def test_two_models_in_one_module_are_swapped_one_by_one() -> None:
    pair: Any = nn.ModuleList([build("mixtral"), build("olmoe")])
    error = refused(pair, "must hold one Hugging Face model")
    assert error.value == "MixtralForCausalLM, OlmoeForCausalLM"
    for model in pair:
        airmoe.swap_routers(model, **SIZE)
    airmoe.restore_routers(pair)
    for model, family in zip(pair, ("mixtral", "olmoe"), strict=True):
        assert type(model) is type(build(family)) and not swapped_routers(model)
        assert model.config.model_type == family and not hasattr(model.config, "airmoe")


def test_the_body_alone() -> None:
    """Swapped through the body, restored through the head; and the other way round."""
    model, stock = build("mixtral"), build("mixtral")
    airmoe.swap_routers(model.model, **SIZE)
    assert type(model) is MixtralForCausalLM and len(swapped_routers(model)) == 2
    airmoe.restore_routers(model)
    airmoe.swap_routers(model, **SIZE)
    airmoe.restore_routers(model.model)
    assert not swapped_routers(model) and model.config.model_type == "mixtral"
    airmoe.restore_routers(model)
    for found, expected in zip(model.modules(), stock.modules(), strict=True):
        assert type(found) is type(expected)
        assert type(getattr(found, "config", None)) is type(getattr(expected, "config", None))
    assert torch.equal(logits_of(model), logits_of(stock))


@pytest.mark.parametrize("family", BUILD)
def test_a_body_s_swap_is_saved_by_its_head(family: str, tmp_path: Path) -> None:
    """The head shares its config with the body, and says of both what was swapped."""
    model = build(family)
    airmoe.swap_routers(model.model, **SIZE)
    airmoe.calibrate(model, BATCHES, passes=3)
    assert model.config is model.model.config
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = calibrated(family)
    assert type(loaded) is type(expected) and loaded.config.airmoe == expected.config.airmoe
    for found in (model, loaded):
        assert torch.equal(logits_of(found), logits_of(expected))


@pytest.mark.parametrize("through", ["body", "head"])
def test_a_body_s_swap_undone_is_stock_on_disk(through: str, tmp_path: Path) -> None:
    model, stock = build("mixtral"), build("mixtral")
    airmoe.swap_routers(model.model, **SIZE)
    airmoe.restore_routers(model.model if through == "body" else model)
    assert model.config is model.model.config and type(model.config) is MixtralConfig
    assert model.config.to_dict() == {**stock.config.to_dict(), "architectures": None}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is MixtralForCausalLM
    assert torch.equal(logits_of(loaded), logits_of(stock))
    airmoe.swap_routers(model, **SIZE)


def test_the_config_of_a_swapped_body_serves_no_second_model() -> None:
    """It could say of one only what was swapped."""
    body = build("mixtral").model
    other = type(body)(body.config)
    airmoe.swap_routers(body, **SIZE)
    error = refused(other, r"config of its own.*copy\.deepcopy")
    assert error.field == "swap_routers.model"
    assert body.config.airmoe["shortlist_size"] == 8


def test_a_config_that_cannot_be_copied_changes_nothing() -> None:
    model = build("mixtral")
    model.config.lock = threading.Lock()
    before = picture(model)
    with pytest.raises(TypeError, match="pickle"):
        airmoe.swap_routers(model, **SIZE)
    assert picture(model) == before
    del model.config.lock
    airmoe.swap_routers(model, **SIZE)
    model.config.lock = threading.Lock()
    before = picture(model)
    with pytest.raises(TypeError, match="pickle"):
        airmoe.restore_routers(model)
    assert picture(model) == before


def test_a_config_of_somebody_s_own_is_unknown() -> None:
    """Restoring could not give it back."""

    class Config(MixtralConfig):
        pass

    config = Config(**{**SIZES, "num_local_experts": EXPERTS})
    refused(MixtralForCausalLM(config), "must be one of Mixtral")
