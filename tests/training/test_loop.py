"""What the loop is made of, where a whole run would not show it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, get_linear_schedule_with_warmup

import airmoe
from airmoe.model import METHODS, AirMoeForCausalLM
from airmoe.training import capture, preset
from airmoe.training.capture import CapturedSteps
from airmoe.training.config import TrainingOptions
from airmoe.training.loop import learning_rate, make_optimizer
from tests.state.common import batch, build_layer


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


# -- CUDA graphs: what they compute is tested on a GPU (test_precision) --------------------------


def test_an_evaluation_asks_for_no_new_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build_layer("air")
    optimizer = torch.optim.AdamW(layer.parameters())
    airmoe.track_optimizer(layer, optimizer)

    def step(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = layer(inputs["hidden"]).sum()
        loss.backward()
        return loss.detach()

    captures = []

    def captured(self: Any) -> Any:  # a graph that runs once, while it is captured
        captures.append(self._due())
        loss, due = step(self._inputs), self._due()
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), loss=loss, due=due)

    monkeypatch.setattr(CapturedSteps, "_capture", captured)
    monkeypatch.setattr(capture, "PLAIN_STEPS", 0)
    steps = CapturedSteps(layer, step)
    for seed in range(4):
        steps.run({"hidden": batch(seed)})
        optimizer.step()
        with torch.no_grad():
            layer.eval()(batch(9))
        layer.train()
    assert captures == [("lists",)]
