"""What the Trainer is asked for, where only a GPU would show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe.experiments import preset
from airmoe.training import arguments


@pytest.mark.parametrize("on_gpu", [False, True])
def test_copies_do_not_block_where_memory_is_pinned(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """From pageable memory they would block all the same; without pinning a GPU waits."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(arguments, "TrainingArguments", asked.update)  # a real one needs the GPU
    arguments.make_arguments(preset("tiny"), Path("run"), num_processes=1, steps_per_epoch=10)
    assert asked["dataloader_pin_memory"] is on_gpu
    assert asked["accelerator_config"] == {"non_blocking": on_gpu}
    assert asked["use_cpu"] is not on_gpu
