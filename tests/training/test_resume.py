"""A run that is killed and resumed ends with the bits of one that never was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe import ROUTERS
from airmoe.data import open_prepared
from airmoe.files import read_json, write_json
from airmoe.training import checkpoints as saving
from airmoe.training import evaluation
from airmoe.training import run as running
from airmoe.training.checkpoints import checkpoints, step_of
from airmoe.training.loop import TrainingLoop
from airmoe.training.text import MicroBatches, epoch_order
from tests.training import kills
from tests.training.runs import (
    OPTIONS,
    Whole,
    assert_same_run,
    differing,
    killed,
    resumed,
    small_model,
    small_run,
    tensors_of,
    timeless_log,
    trained,
)

BEFORE_RESULT = kills.before_call(running, "write_result", 1)
# 12 steps of 2 micro-batches, evaluated and saved at 4, 8 and 12, logged at 1, 3, 6, 9 and 12;
# an evaluation has 3 batches; a checkpoint's tensor files are optimizer and random states.
KILLS = {
    "before the first checkpoint": kills.before_step(3),
    "between windows": kills.before_step(7),
    "inside a window": kills.at_micro_batch(2 * 5 + 1),
    "in the second micro-batch": kills.at_micro_batch(2 * 6 + 2),
    "after the optimizer's step": kills.after_call(TrainingLoop, "_take_step", 6),
    "in an evaluation": kills.before_call(evaluation, "_summed_loss", 3 + 2),
    "in the first checkpoint": kills.in_fill(2),
    "in a checkpoint, after its model": kills.in_fill(2 + 1),
    "before a checkpoint's name": kills.after_call(saving, "sync_tree", 2),
    "before the rotation": kills.before_call(saving, "remove_old", 2),
    "before the last rotation": kills.before_call(saving, "remove_old", 3),
    "in the rotation": kills.in_rotation,
    "right after a checkpoint": kills.after_call(saving, "remove_old", 2),
    "before the result": BEFORE_RESULT,
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_ends_like_an_uninterrupted_one(moment: str, plain: Whole, run: Path) -> None:
    killed(plain.config, run, KILLS[moment])
    assert not (run / "result.json").exists()
    for checkpoint in checkpoints(run):  # what has that name is whole
        files = {file.name for file in (plain.path / "checkpoint-12").iterdir()}
        assert {file.name for file in checkpoint.iterdir()} == files
        assert tensors_of(checkpoint)
    assert_same_run(resumed(run), plain.path)


def test_killed_twice_and_with_a_torn_log_line(plain: Whole, run: Path) -> None:
    killed(plain.config, run, kills.before_step(7))
    with (run / "log.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 6, "los')
    resumed(run, kills.in_fill(1))
    resumed(run, kills.at_micro_batch(1))
    resumed(run)
    assert_same_run(run, plain.path)


def test_a_result_names_the_machine_that_trained(plain: Whole, run: Path) -> None:
    """Not the one that resumed a run whose steps were done: its numbers are not from there."""
    killed(plain.config, run, BEFORE_RESULT)
    elsewhere = {"machine": {"device": "another", "count": 9}, "versions": {"python": "9"}}
    write_json(run / "run.json", read_json(run / "run.json") | elsewhere)
    resumed(run)
    result = read_json(run / "result.json")
    assert {name: result[name] for name in elsewhere} == elsewhere
    elsewhere = {"machine": {"device": "a third", "count": 1}, "versions": {"python": "8"}}
    write_json(run / "result.json", result | elsewhere | {"peak_memory_gib": 0.5})
    resumed(run)
    assert read_json(run / "result.json") == result | elsewhere | {"peak_memory_gib": 0.5}


def test_the_comparison_can_fail(plain: Whole, tmp_path: Path) -> None:
    """Another seed must show in every kind of state, or the tests above would prove nothing."""
    run = trained(small_run(plain.path.parent, seed=43), tmp_path / "run")
    found = " ".join(
        differing(tensors_of(run / "checkpoint-12"), tensors_of(plain.path / "checkpoint-12"))
    )
    for part in (
        "model.safetensors/model.layers.1.mlp.router.codebook.codewords",
        "model.safetensors/model.layers.1.mlp.router.centroids",
        "optimizer.safetensors/model.layers.1.mlp.router.centroids/exp_avg_sq",
        "random-0.safetensors/torch",
    ):
        assert part in found
    assert timeless_log(run) != timeless_log(plain.path)


ROUTER_OPTIONS: dict[str, dict[str, Any]] = {
    "air": OPTIONS | {"jitter_std": 0.1},
    "peer": {"num_heads": 2},
    "hierarchical": {"num_clusters": 8, "num_selected_clusters": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"router": name, "router_options": ROUTER_OPTIONS.get(name, {})} for name in ROUTERS},
    "air, experts choose": {"router_options": OPTIONS | {"gate": "expert_choice"}},
    "air, many dead codes": {
        "router_options": {"num_codewords": 32, "shortlist_size": 16, "dead_below": 8.0},
        "shortlist_balance_weight": 0.01,
        "router_z_weight": 0.001,
        "moe_layers": [0, 1],
    },
    "coarse": {
        "router": "topk",
        "router_options": {},
        "experts": "coarse",
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "expert_size": 8,
    },
    "dense": {"moe_layers": []},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_router_resumes_exactly(name: str, text: Path, run: Path, tmp_path: Path) -> None:
    model = small_model(**MODELS[name])
    config = small_run(text, model, steps=5, eval_every=2, log_every=2)
    reference = tmp_path / "reference"
    trained(config, reference, kills.copied(reference, 3, run))
    assert [step_of(path) for path in checkpoints(run)] == [2]
    assert_same_run(resumed(run), reference)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_checkpointing": True}, id="gradient checkpointing"),
        pytest.param({"precision": "bf16"}, id="bf16"),
        pytest.param({"save_every": 3, "eval_every": 5, "keep_checkpoints": 3}, id="save_every"),
        pytest.param({"batch_size": 4, "log_every": 4}, id="one micro-batch"),
        pytest.param({"log_every": 100}, id="one log line"),
    ],
)
def test_recipes_resume_exactly(
    options: dict[str, Any], text: Path, run: Path, tmp_path: Path
) -> None:
    config = small_run(text, steps=8, **options)
    reference = tmp_path / "reference"
    trained(config, reference, kills.copied(reference, 8, run))
    assert checkpoints(run)
    assert_same_run(resumed(run), reference)


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """12 steps each, evaluated and saved at their ends, and saved every 5 steps.

    Beside the run there are copies of it, as kills would leave it.
    """
    folder = tmp_path_factory.mktemp("epochs")
    config = small_run(folder, documents=14, steps=None, epochs=2, eval_every="epoch", save_every=5)
    run = folder / "reference"
    patches = [kills.copied(run, step, folder / f"killed-{step}") for step in (12, 13, 18)]
    return Whole(config, trained(config, run, *patches))


@pytest.mark.parametrize(
    ("step", "newest"), [(12, 10), (13, 12), (18, 15)], ids=["within", "between", "after"]
)
def test_epochs_resume_exactly(step: int, newest: int, two_epochs: Whole) -> None:
    log = timeless_log(two_epochs.path)
    assert [line["step"] for line in log if line["kind"] == "eval"] == [12, 24]
    run = two_epochs.path.with_name(f"killed-{step}")
    assert step_of(checkpoints(run)[-1]) == newest
    assert_same_run(resumed(run), two_epochs.path)


def test_epochs_see_every_block_once_in_a_new_order() -> None:
    orders = [epoch_order(21, 4, seed=5, epoch=epoch) for epoch in range(3)]
    for order in orders:
        assert len(order) == 20 == len(set(order)) and set(order) < set(range(21))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch_order(21, 4, seed=5, epoch=0) == orders[0]
    assert epoch_order(21, 4, seed=6, epoch=0) != orders[0]


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_do_not_block_where_memory_is_pinned(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, plain: Whole
) -> None:
    """From pageable memory they would block all the same; without pinning a GPU waits."""
    blocks = open_prepared(Path(str(plain.config.data.folder))).blocks("train", 32)
    batches = MicroBatches(blocks, plain.config.training, torch.device("cpu"))
    copied: list[object] = []
    monkeypatch.setattr(batches, "_device", torch.device("cuda" if pinned else "cpu"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: copied.append("pinned") or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, **options: copied.append(options) or self
    )
    assert len([*batches.of_step(0)]) == 2
    assert copied == 2 * (["pinned"] * pinned + [{"non_blocking": True}])
