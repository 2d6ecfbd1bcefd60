"""What the loop is made of, where a whole run would not show it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Trainer, get_linear_schedule_with_warmup

from airmoe.model import METHODS, AirMoeForCausalLM
from airmoe.training import preset
from airmoe.training.config import TrainingOptions
from airmoe.training.loop import learning_rate, make_optimizer


@pytest.mark.parametrize("method", METHODS)
def test_weights_decay_as_in_the_hugging_face_trainer(method: str) -> None:
    """It goes by names; norms and biases are also all that is no matrix."""
    config = preset("tiny", method).model_config(257, 256)
    model = AirMoeForCausalLM(config)
    named = Trainer.get_decay_parameter_names(None, model)  # pyright: ignore[reportArgumentType]
    optimizer = make_optimizer(model, preset("tiny").training)
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    for group, decays in ((decaying, True), (others, False)):
        found = {id(parameter) for parameter in group["params"]}
        wanted = {id(one) for name, one in model.named_parameters() if (name in named) is decays}
        assert found == wanted


def test_the_optimizer_has_the_settings_of_the_run() -> None:
    settings: dict[str, Any] = {"learning_rate": 0.5, "beta1": 0.1, "beta2": 0.2, "epsilon": 1e-3}
    options = TrainingOptions(batch_size=1, micro_batch_size=1, steps=1, **settings)
    group = make_optimizer(torch.nn.Linear(2, 2), options).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 1e-3)
    assert group["fused"] is True


@pytest.mark.parametrize("last_step", [1, 2, 7, 20])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.3, 0.99])
def test_the_schedule_is_that_of_transformers(last_step: int, warmup: float) -> None:
    """To the bit, for every step: it need not be saved."""
    options = TrainingOptions(batch_size=1, micro_batch_size=1, steps=last_step, warmup=warmup)
    optimizer = make_optimizer(torch.nn.Linear(2, 2), options)
    schedule = get_linear_schedule_with_warmup(optimizer, math.ceil(last_step * warmup), last_step)
    for step in range(last_step):
        assert learning_rate(options, step, last_step) == schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
