"""Which checkpoints are kept, which one is best, and what a failed write leaves behind."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from airmoe.errors import ConfigError, RunError
from airmoe.files import write_json
from airmoe.training import best_checkpoint, loop
from airmoe.training.checkpoints import (
    STATE,
    USAGE,
    Counters,
    checkpoints,
    clean_up,
    load_optimizer_state,
    optimizer_state,
    remove_old,
    save_tensors,
    step_of,
    write_checkpoint,
    write_manifest,
)
from airmoe.training.evaluation import Evaluation
from airmoe.training.trained import load_trained
from tests.training.runs import differing, in_process, small_run, train_here, trained


def fake(folder: Path, *steps: int, best: int | None = None) -> None:
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        state = Counters(step, best, 1.0, 0, 0.0, 0.0, 1, {})
        write_json(folder / f"checkpoint-{step}" / STATE, asdict(state))
        write_manifest(folder / f"checkpoint-{step}", "run")


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(folder)]


@pytest.mark.parametrize(
    ("best", "keep", "kept"),
    [
        (None, 2, [30, 100]),
        (100, 2, [30, 100]),
        (30, 2, [30, 100]),
        (1, 2, [1, 100]),
        (1, 3, [1, 30, 100]),
        (2, 9, [1, 2, 4, 30, 100]),
        (77, 2, [30, 100]),  # it is not there
    ],
)
def test_the_best_and_the_newest_stay(
    best: int | None, keep: int, kept: list[int], tmp_path: Path
) -> None:
    fake(tmp_path, 100, 30, 4, 2, 1, best=best)
    others = ("checkpoint-300.partial", "checkpoint-x", "my-checkpoint-5")
    for name in others:
        (tmp_path / name).mkdir()
    remove_old(tmp_path, keep)
    assert steps(tmp_path) == kept
    assert len(list(tmp_path.iterdir())) == len(kept) + len(others)


def test_a_linked_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Neither it nor what it leads to is removed, and it takes no place of those that are kept."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    run.mkdir()
    fake(elsewhere, 1, 3)
    fake(run, 2, 4, 5, best=1)
    for step in (1, 3):
        (run / f"checkpoint-{step}").symlink_to(elsewhere / f"checkpoint-{step}")
    (run / "checkpoint-6.partial").symlink_to(elsewhere / "checkpoint-1")
    before = sorted(elsewhere.rglob("*"))
    remove_old(run, 2)
    assert steps(run) == [1, 3, 4, 5]
    clean_up(run, keep=2)
    assert steps(run) == [1, 3, 4, 5]
    assert sorted(elsewhere.rglob("*")) == before


def test_the_best_is_the_one_the_newest_remembers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint-N.*Train it first"):
        best_checkpoint(tmp_path)
    fake(tmp_path, 2)
    assert step_of(best_checkpoint(tmp_path)) == 2  # never evaluated
    fake(tmp_path, 4, best=2)
    assert step_of(best_checkpoint(tmp_path)) == 2
    fake(tmp_path, 6, best=6)
    assert step_of(best_checkpoint(tmp_path)) == 6


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "is full.*-2 is whole. Make room",
        ),
        (
            PermissionError(13, "Permission denied", "b"),
            "denied.*-2 is whole. Put that right",
        ),
    ],
    ids=["full", "not allowed"],
)
def test_a_failed_write_leaves_no_trace(error: OSError, what: str, tmp_path: Path) -> None:
    fake(tmp_path, 2)

    def fill(folder: Path) -> None:
        save_tensors({"a": torch.zeros(3)}, folder / "a.safetensors")
        raise error

    with pytest.raises(RunError, match=rf"step 4: .*{what}, then: .*--resume"):
        write_checkpoint(tmp_path, 4, "run", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    write_checkpoint(tmp_path, 4, "run", lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_a_mistake_in_the_code_is_not_called_a_full_disk(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        write_checkpoint(tmp_path, 4, "run", fill)
    assert checkpoints(tmp_path) == []


def test_tensors_that_are_no_block_of_memory_are_saved_right(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4).T
    save_tensors({"a": value}, tmp_path / "a.safetensors")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], value)


def test_the_best_is_chosen_by_validation_loss(text: Path, run: Path) -> None:
    """Checkpoints between evaluations do not push it out."""

    def job() -> None:
        losses = iter((3.0, 1.0, 2.0, 2.5))
        loop.evaluate = lambda *_, **__: Evaluation(next(losses), 10, {})
        train_here(small_run(text, steps=8, eval_every=2, save_every=1), run)

    assert in_process(job) == 0
    assert steps(run) == [4, 8]
    assert step_of(best_checkpoint(run)) == 4
    assert step_of(load_trained(run, "best").checkpoint) == 4
    assert step_of(load_trained(run, "last").checkpoint) == 8
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    assert (result["best"]["step"], result["best"]["loss"]) == (4, 1.0)
    assert result["best"]["perplexity"] == math.e
    assert (result["last"]["step"], result["last"]["loss"]) == (8, 2.5)


def test_only_the_checkpoint_of_an_evaluation_has_its_usage(text: Path, run: Path) -> None:
    config = small_run(text, steps=4, eval_every=2, save_every=1, keep_checkpoints=4)
    kept = checkpoints(trained(config, run))
    assert [(path / USAGE).exists() for path in kept] == [False, True, False, True]


def test_a_checkpoint_is_an_ordinary_hugging_face_model(finished: Path) -> None:
    folder = load_trained(finished).checkpoint
    model = AutoModelForCausalLM.from_pretrained(folder)
    ours = load_trained(finished).model
    ids = torch.tensor([list(b"the router learns")])
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, ours(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("the router", add_special_tokens=False)["input_ids"] == list(b"the router")


def test_optimizer_state_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.randn(5, 2)).square().sum().backward()
    optimizer.step()
    saved = optimizer_state(layer, optimizer)
    assert len(saved) == 6
    file = tmp_path / "optimizer.safetensors"
    for name, damage in {
        "weight/exp_avg": lambda value: value.T,
        "weight/exp_avg_sq": lambda value: value[:, :1],
        "bias/exp_avg": torch.Tensor.double,
        "bias/step": lambda value: value[None],
    }.items():
        save_tensors({**saved, name: damage(saved[name])}, file)
        with pytest.raises(ConfigError, match=f"must have '{name}' as the model needs it"):
            load_optimizer_state(layer, optimizer, file)
    for wrong in ({}, {"weight/step": saved["weight/step"]}, {**saved, "more": torch.zeros(1)}):
        save_tensors(wrong, file)
        with pytest.raises(ConfigError, match="as the model needs it"):
            load_optimizer_state(layer, optimizer, file)
    save_tensors(saved, file)
    optimizer.state.clear()
    load_optimizer_state(layer, optimizer, file)
    assert differing(optimizer_state(layer, optimizer), saved) == []
