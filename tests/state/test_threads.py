"""Several threads may evaluate one model: all get what one alone would."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe import AirMoeForCausalLM, AirRouter
from tests.model.common import batch, build, learn_a_little

THREADS = 8


def in_threads(evaluate: Callable[[int], Tensor]) -> list[Tensor]:
    """What each of many threads gets that begin at the same time."""
    barrier = Barrier(THREADS)

    def run(index: int) -> Tensor:
        barrier.wait()
        with torch.no_grad():
            return evaluate(index)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(run, range(THREADS)))


@pytest.fixture
def slow_rebuilds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rebuilding takes its time on both sides of the write; as many entries as rebuilds."""
    build_lists, calls = AirRouter._build_lists, []

    def slow(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        time.sleep(0.02)
        built = build_lists(*arguments, **options)
        time.sleep(0.02)
        return built

    monkeypatch.setattr(AirRouter, "_build_lists", slow)
    return calls


def test_a_model_that_was_just_loaded(tmp_path: Path, slow_rebuilds: list[int]) -> None:
    trained = learn_a_little(build("air", moe_layers=[0, 2])).eval()
    trained.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = [trained(batch(index)).logits for index in range(THREADS)]
    model = AirMoeForCausalLM.from_pretrained(tmp_path).eval()
    slow_rebuilds.clear()
    found = in_threads(lambda index: model(batch(index)).logits)
    assert all(map(torch.equal, found, expected))
    assert len(slow_rebuilds) == 2  # one per layer


def test_a_copy_has_a_lock_of_its_own() -> None:
    model = learn_a_little(build("air")).eval()
    (layer,) = [module for module in model.modules() if hasattr(module, "evaluation_lists")]
    with layer.evaluation_lists.lock, torch.no_grad():
        copied = copy.deepcopy(model)(batch(0)).logits  # would wait forever for the other's
    with torch.no_grad():
        assert torch.equal(model(batch(0)).logits, copied)
