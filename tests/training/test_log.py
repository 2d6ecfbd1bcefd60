"""What a run writes down: log lines, TensorBoard, run.json and result.json, number by number."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers
from accelerate import tracking
from safetensors.torch import load_file

import airmoe
from airmoe.data import open_prepared
from airmoe.flops import count_flops
from airmoe.routers import RouterConfig
from airmoe.training import RunConfig, loop, override
from airmoe.training.config import workload_of
from airmoe.training.run import build_model, flops_per_token
from airmoe.training.run_folder import git_state
from airmoe.training.run_log import STARTING_STEPS, Clock, read_log
from airmoe.training.trained import load_trained
from tests.training import kills
from tests.training.command import airmoe_train
from tests.training.runs import (
    in_process,
    killed,
    loss_of_a_new_model,
    resumed,
    small_model,
    small_run,
    train_here,
    trained,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(text: Path) -> RunConfig:
    return small_run(text, track="tensorboard")


@pytest.fixture(scope="module")
def tracked(config: RunConfig, text: Path) -> Path:
    return trained(config, text / "tracked")


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_log(run / "log.jsonl") if line["kind"] == kind]


ROUTING_FIELDS = {
    *("load_balance_loss", "entropy", "dead_experts", "load_imbalance", "overlap", "mass_recall"),
    *("mass_recall_bound", "codeword_perplexity", "staleness", "unlisted_experts"),
}
TRAIN_FIELDS = ROUTING_FIELDS | {
    *("kind", "step", "epoch", "tokens", "loss", "grad_norm", "learning_rate", "seconds"),
    *("tokens_per_second", "training_seconds", "flops", "executed_flops"),
}
ONLY_TRAIN = {"grad_norm", "learning_rate", "load_balance_loss", "staleness", "tokens_per_second"}
EVAL_FIELDS = TRAIN_FIELDS - ONLY_TRAIN | {"perplexity"}


def test_lines_and_their_fields(config: RunConfig, tracked: Path) -> None:
    train, evaluations = lines_of(tracked, "train"), lines_of(tracked, "eval")
    assert [line["step"] for line in train] == [1, 3, 6, 9, 12]
    assert [line["step"] for line in evaluations] == [4, 8, 12]
    assert len(read_log(tracked / "log.jsonl")) == 8
    for line in train:
        assert line.keys() == TRAIN_FIELDS
    # Of 12 steps one warms up from 0, then a line falls to nearly 0 at the last.
    rates = [0.0] + [config.training.learning_rate * (13 - step) / 11 for step in (3, 6, 9, 12)]
    assert [line["learning_rate"] for line in train] == pytest.approx(rates)
    for line in evaluations:
        assert line.keys() == EVAL_FIELDS
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    per_step = config.training.batch_size * config.data.block_size
    for line in train + evaluations:
        assert line["tokens"] == line["step"] * per_step
        numbers = [value for name, value in line.items() if name != "kind"]
        assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers)
        assert 0 <= line["dead_experts"] <= 1 and 0 <= line["overlap"] <= 1
    seconds = [line["seconds"] for line in read_log(tracked / "log.jsonl")]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_a_train_line_is_the_mean_since_the_line_before(text: Path, tmp_path: Path) -> None:
    """And counts each token once, whatever the micro-batches."""
    each, rare = (
        trained(small_run(text, steps=6, log_every=every, eval_every=6), tmp_path / str(every))
        for every in (1, 3)
    )
    losses = [line["loss"] for line in lines_of(each, "train")]
    found = {line["step"]: line["loss"] for line in lines_of(rare, "train")}
    assert found.keys() == {1, 3, 6}
    # Three float32 additions of losses near 6, each rounded to 2^-24 of the sum.
    assert found[1] == losses[0]
    assert found[3] == pytest.approx(sum(losses[1:3]) / 2, rel=4 * 2**-24)
    assert found[6] == pytest.approx(sum(losses[3:6]) / 3, rel=4 * 2**-24)


def test_the_first_line_is_the_loss_of_a_new_model(config: RunConfig, tracked: Path) -> None:
    """The model its seed draws, on the first blocks of its order, micro-batch by micro-batch."""
    wanted = loss_of_a_new_model(config)
    assert lines_of(tracked, "train")[0]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_new_model_has_learned_nothing_yet(config: RunConfig) -> None:
    """But it leans to repeat its input: 0.9 above log 257, give or take 0.2 with a seed."""
    seeds = [override(config, [f"training.seed={seed}"]) for seed in range(8)]
    losses = [loss_of_a_new_model(one) for one in seeds]
    assert 0.65 < sum(losses) / len(losses) - math.log(257) < 1.15


def test_methods_of_one_seed_start_from_the_same_weights(text: Path) -> None:
    air = small_run(text)
    exact = small_run(text, small_model(router="topk", router_options={}))
    assert air.data.folder is not None
    prepared = open_prepared(Path(air.data.folder))
    one, other = (dict(build_model(run, prepared).named_parameters()) for run in (air, exact))
    assert one.keys() == other.keys()  # the centroids too
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


def test_other_models_log_what_they_have(text: Path, tmp_path: Path) -> None:
    dense = small_run(text, small_model(moe_layers=[]), steps=1, eval_every=1)
    trained(dense, tmp_path / "dense")
    (line,) = lines_of(tmp_path / "dense", "train")
    assert line.keys() == TRAIN_FIELDS - ROUTING_FIELDS
    assert line["flops"] == line["executed_flops"]  # nothing is left out or added
    assert not (tmp_path / "dense" / "usage.safetensors").exists()


def test_flops_run_on_with_the_tokens(config: RunConfig, tracked: Path) -> None:
    ledger = count_flops(load_trained(tracked).model.config, workload_of(config, devices=1))
    for line in read_log(tracked / "log.jsonl"):
        assert line["flops"] == pytest.approx(ledger.run(line["tokens"]))
        assert line["executed_flops"] == pytest.approx(ledger.run(line["tokens"], "executed"))
        assert line["executed_flops"] != line["flops"]


def test_a_router_the_ledger_does_not_know_is_trained_without(
    monkeypatch: pytest.MonkeyPatch, text: Path
) -> None:
    config = small_run(text)
    model = config.model_config(257, 256)
    assert flops_per_token(config, model, 1).keys() == {"flops", "executed_flops"}

    class OwnConfig(RouterConfig):
        pass

    monkeypatch.setattr(type(model), "router_config", lambda self: object.__new__(OwnConfig))
    assert flops_per_token(config, model, 1) == {}


def test_usage_of_the_best_checkpoint(config: RunConfig, tracked: Path) -> None:
    usage = load_file(tracked / "usage.safetensors")
    assert usage.keys() == {"experts.1", "cells.1"}
    best = json.loads((tracked / "result.json").read_text())["best"]
    experts, cells = usage["experts.1"], usage["cells.1"]
    assert int(experts.sum()) == 4 * int(cells.sum())  # four experts a token, one cell
    assert int(cells.sum()) == 9 * config.data.block_size  # of the blocks it is evaluated on
    assert airmoe.metrics.usage_entropy(experts).item() == pytest.approx(best["entropy"])
    assert airmoe.metrics.dead_experts(experts).item() == pytest.approx(best["dead_experts"])


def test_run_json(config: RunConfig, tracked: Path) -> None:
    values = json.loads((tracked / "run.json").read_text())
    assert values["format"] == 2
    assert RunConfig.from_json(values["config"]) == config
    assert config.data.folder is not None
    prepared = open_prepared(config.data.folder)
    assert values["data_recipe"] == dataclasses.asdict(prepared.manifest.recipe)
    assert values["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert values["versions"]["transformers"] == transformers.__version__
    assert {"python", "airmoe", "accelerate", "safetensors", "numpy"} <= values["versions"].keys()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if (ROOT / ".git").exists() and not head.returncode:
        assert values["git"]["commit"] == head.stdout.strip()
        assert isinstance(values["git"]["changed"], bool)
    else:
        assert values["git"] == {"commit": None, "changed": None}
    assert values["machine"].keys() == {"device", "count"}


def test_result_json(config: RunConfig, tracked: Path) -> None:
    result = json.loads((tracked / "result.json").read_text())
    log = read_log(tracked / "log.jsonl")
    evaluations = [line for line in log if line["kind"] == "eval"]
    assert result["config"] == config.to_json()
    assert result["log"] == log
    assert result["best"] == min(evaluations, key=lambda line: line["loss"])
    assert result["last"] == evaluations[-1]
    assert result["tokens"] == 12 * 8 * 32
    assert result["seconds"] == evaluations[-1]["seconds"]
    speeds = [line["tokens_per_second"] for line in log if line["kind"] == "train"]
    assert result["tokens_per_second"] == median(speeds)
    assert 0.05 < result["peak_memory_gib"] < 100
    model = load_trained(tracked).model
    total = sum(parameter.numel() for parameter in model.parameters())
    assert result["parameters"]["total"] == total
    inactive = (64 - 4) * 3 * 32  # experts a token leaves out, three rows of the width each
    assert result["parameters"]["active"] == total - inactive
    started = json.loads((tracked / "run.json").read_text())
    assert result["versions"] == started["versions"]
    assert result["git"] == started["git"]
    assert result["versions"]["airmoe"] == airmoe.__version__


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_has_the_same_numbers(tracked: Path) -> None:
    found = events(tracked)
    for kind in ("train", "eval"):
        lines = lines_of(tracked, kind)
        for name in lines[0].keys() - {"kind", "step", "tokens"}:
            expected = [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
            assert found[f"{kind}/{name}"] == expected, name


def test_tensorboard_forgets_what_a_resumed_run_does_again(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = small_run(text, track="tensorboard", log_every=1, steps=8)
    run = killed(config, tmp_path / "run", kills.before_step(8))
    assert [step for step, _ in events(run)["train/loss"]] == list(range(1, 8))
    found = events(resumed(run))
    assert [step for step, _ in found["train/loss"]] == list(range(1, 9))
    assert [step for step, _ in found["eval/loss"]] == [4, 8]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_left_out_in_one_line(
    tracker: Any, text: Path, tmp_path: Path
) -> None:
    def patch() -> None:
        tracking.get_available_trackers = lambda: []

    config, folder = small_run(text, track=tracker, steps=4), tmp_path / "run"
    outcome = airmoe_train(config, folder, patch=patch)
    assert outcome.code == 0, outcome.err
    (said,) = (line for line in outcome.out.splitlines() if "training.track" in line)
    assert f"training.track={tracker}: left out" in said and "pip install" in said
    assert not (folder / "tensorboard").exists()
    assert read_log(folder / "log.jsonl")[-1]["step"] == 4


def test_times_leave_out_what_is_not_training(text: Path, tmp_path: Path) -> None:
    """A slow evaluation must not make training look slow."""
    config = small_run(text, steps=4, eval_every=2, log_every=1)

    def job() -> None:
        kills.before(loop, "evaluate", kills.since(1), lambda *_, **__: time.sleep(0.5))
        train_here(config, tmp_path / "run")

    assert in_process(job) == 0
    lines = lines_of(tmp_path / "run", "train")
    assert lines[2]["seconds"] - lines[1]["seconds"] > 0.5
    assert lines[2]["training_seconds"] - lines[1]["training_seconds"] < 0.5
    assert lines[2]["tokens_per_second"] > 8 * 32 / 0.5  # the step alone


def test_a_copy_can_tell_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRMOE_COMMIT", raising=False)
    assert git_state()["commit"] != "abc"
    monkeypatch.setenv("AIRMOE_COMMIT", "abc")
    assert git_state() == {"commit": "abc", "changed": None}


@pytest.mark.parametrize(("starting", "counted"), [(0, 10), (STARTING_STEPS, 2)])
def test_time_in_which_compilers_start_is_nobody_s(
    monkeypatch: pytest.MonkeyPatch, starting: int, counted: int
) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    clock = Clock(starting_steps=starting)
    for _ in range(10):  # of one second each
        with clock.step(then_wait=False):
            pass
    assert clock.training_seconds == counted
    assert clock.steps_per_second() == 1.0
    assert clock.steps_per_second() is None
