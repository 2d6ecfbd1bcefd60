"""Which steps share a graph; what graphs compute is tested on a GPU (test_precision)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import airmoe
from airmoe.training import capture
from airmoe.training.capture import CapturedSteps
from tests.state.common import batch, build_layer


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
