"""The states that a study is made from: which text, which tokens, in which precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe.experiments.recall_study import command
from airmoe.experiments.recall_study.states import evenly, router_states
from airmoe.routers import AirRouter
from airmoe.training.load import Trained, load_trained
from tests.training.runs import in_process, small_run, train_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of AIR in steps of 256 tokens."""
    folder = tmp_path_factory.mktemp("recall")
    config = small_run(folder, steps=2, eval_every=2, eval_blocks=None)
    assert in_process(lambda: train_here(config, folder / "air")) == 0
    return folder


@pytest.fixture
def trained(folder: Path) -> Trained:
    return load_trained(folder / "air")


def states_of(trained: Trained, split: str, tokens: int) -> Tensor:
    text = command._open_text(trained, None, tokens, tokens)
    return router_states(trained, router_of(trained), getattr(text, split), tokens, lambda _: None)


def router_of(trained: Trained) -> AirRouter:
    return command._air_routers(trained)["1"]


def test_states_are_those_the_router_sees_all_over_the_text(trained: Trained) -> None:
    text = command._open_text(trained, None, 10**9, 512)
    assert text.fit_tokens == len(text.train) * 32  # fewer where the text has fewer
    numbers = evenly(text.validation, 512)
    assert len(numbers) == 16 and numbers[0] == 0 and numbers == sorted(set(numbers))
    assert numbers[-1] >= len(text.validation) * 15 // 16
    router = command._air_routers(trained)["1"]
    read: list[int] = []
    states = router_states(trained, router, text.validation, 512, read.append)
    assert sum(read) == 512 and states.shape == (512, 32) and states.dtype == torch.float32
    seen: list[torch.Tensor] = []
    hook = router.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    with torch.no_grad():
        trained.model(input_ids=text.validation[numbers[3]]["input_ids"].unsqueeze(0))
    hook.remove()
    assert torch.allclose(states[96:128], seen[0], atol=1e-5)


def test_codebooks_are_fitted_to_the_training_text(
    folder: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Recorder(command.LayerStudy):
        def __init__(self, router: AirRouter, fit: Tensor, held_out: Tensor, **rest: Any) -> None:
            given.update(fit=fit, held_out=held_out, **rest)
            super().__init__(router, fit, held_out, **rest)

    monkeypatch.setattr(command, "LayerStudy", Recorder)
    command.measure_run(folder / "air", fit_tokens=256, tokens=128)
    assert torch.equal(given["fit"], states_of(trained, "train", 256))
    assert torch.equal(given["held_out"], states_of(trained, "validation", 128))
    assert given["tokens_per_step"] == 256


def test_states_that_are_not_finite_are_left_out(trained: Trained) -> None:
    whole = states_of(trained, "validation", 128)

    def spoil(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = inputs[0].clone()
        hidden.view(-1, hidden.shape[-1])[0, 3] = float("nan")  # the first token of each batch
        return hidden, *inputs[1:]

    router_of(trained).register_forward_pre_hook(spoil)
    kept = torch.ones(128, dtype=torch.bool)
    kept[:: 32 * trained.run.config.training.micro_batch_size] = False
    assert torch.equal(states_of(trained, "validation", 128), whole[kept])


def test_states_are_computed_in_the_precision_of_the_run(trained: Trained) -> None:
    config = trained.run.config
    lower = replace(config, training=replace(config.training, precision="bf16"))
    seen: list[bool] = []
    router = router_of(trained)
    router.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    states_of(trained, "validation", 32)
    states_of(replace(trained, run=replace(trained.run, config=lower)), "validation", 32)
    assert seen == [False, True]


def test_nothing_stays_on_the_router(trained: Trained) -> None:
    router = router_of(trained)
    before = dict(router._forward_pre_hooks)
    states_of(trained, "validation", 32)
    assert router._forward_pre_hooks == before

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    handle = router.register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        states_of(trained, "validation", 32)
    handle.remove()
    assert router._forward_pre_hooks == before
