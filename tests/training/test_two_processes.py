"""Two processes under torchrun: equal codebooks, the curve of one process, exact resume."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.run import parse_args

from airmoe.data import open_prepared
from airmoe.model import AirMoeForCausalLM
from airmoe.training import RunConfig, evaluate, override, run
from airmoe.training.checkpoints import checkpoints, step_of
from airmoe.training.trained import load_trained
from tests.training import kills, ranks
from tests.training.command import pythonpath
from tests.training.runs import (
    assert_same_run,
    differing,
    in_process,
    killed,
    resumed,
    small_model,
    small_run,
    timeless_log,
    train_here,
    trained,
)

pytestmark = pytest.mark.slow  # together: the first test waits for the starts of the processes

ROUTER = {"num_codewords": 12, "shortlist_size": 16, "jitter_std": 0.0, "dead_below": 4.0}


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Two processes; a hanging one is a failure, not a wait."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m"),
            *map(str, arguments),
        ],
        env=os.environ
        | {"PYTHONPATH": pythonpath(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes left behind: made once, also where pytest workers share these tests."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "two-processes"
    with (shared / "two-processes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            start_processes(folder)
            (folder / "ready").touch()
    return folder


def one_process(folder: Path) -> RunConfig:
    """Epochs of 3 steps: checkpoint 4, from which the killed runs go on, is inside the second."""
    model = small_model(router_options=ROUTER)
    return small_run(folder, model, documents=14, batch_size=32, micro_batch_size=32)


def start_processes(folder: Path) -> None:
    one = one_process(folder)
    two = override(one, ["training.micro_batch_size=16"])
    sharded = override(two, ["training.sharding=fsdp2"])
    for name in ("ddp", "ddp-killed", "full"):
        (folder / f"{name}.json").write_text(json.dumps(two.to_json()))
    for name in ("fsdp", "fsdp-killed"):
        (folder / f"{name}.json").write_text(json.dumps(sharded.to_json()))
    blocks = open_prepared(folder / "tokens").blocks("train", 32)
    torch.save([blocks[index] for index in range(9)], folder / "blocks.pt")
    trained(one, folder / "one")
    half_done = killed(two, folder / "one-killed", kills.before_step(6))
    assert [step_of(path) for path in checkpoints(half_done)] == [4]
    # The last job is the end of the processes; a finished run is resumed to see who writes results.
    jobs = [
        *("train:ddp", "measure:ddp", "train:fsdp", "measure:fsdp", "resume:fsdp"),
        *("evaluate:ddp", "fail:full", "refused:ddp"),
        *("broken:fsdp-killed", "copy:fsdp-killed", "resume:fsdp-killed"),
        *("take_up:one-killed", "take_up:fsdp-killed-copy", "killed:ddp-killed"),
    ]
    first = torchrun("tests.training.ranks", folder, *jobs)
    assert first.stdout.count("done: ") == 2 * (len(jobs) - 1), first.stderr[-3000:]
    assert first.returncode != 0
    shutil.copytree(folder / "ddp-killed", folder / "ddp-killed-copy")
    second = torchrun("airmoe", "train", "--resume", folder / "ddp-killed")
    assert second.returncode == 0, second.stderr[-3000:]
    assert second.stdout.count("Finished: ") == 1


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_every_rank_has_the_same_codebook(name: str, runs: Path) -> None:
    first, second = (load_file(runs / f"{name}-{rank}.safetensors") for rank in (0, 1))
    assert any("codewords" in buffer for buffer in first)
    assert differing(first, second) == []
    saved = load_file(runs / name / "checkpoint-12" / "model.safetensors")
    for buffer in ("codewords", "counts", "sums"):
        assert torch.equal(
            saved[f"model.layers.1.mlp.router.codebook.{buffer}"], first[f"0.codebook.{buffer}"]
        )


@pytest.fixture(scope="module")
def tolerance(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far rounding alone drives this run apart, by name of the number.

    Two processes add in another order, so every sum may differ in its last bit, and training makes
    that grow. How much is measured: runs of one process whose first weights are off by one bit.
    Four times the most that two such runs move is allowed, and 1e-6 where they do not move.
    """
    control, folder = timeless_log(runs / "one"), tmp_path_factory.mktemp("nudged")
    most: dict[str, float] = {}
    for seed in (1, 2):

        def job(seed: int = seed) -> None:
            original = run.build_model

            def nudged(*arguments: Any) -> AirMoeForCausalLM:
                model = original(*arguments)
                random = torch.Generator().manual_seed(seed)
                with torch.no_grad():
                    for weight in model.parameters():
                        signs = torch.randint(-1, 2, weight.shape, generator=random)
                        weight.mul_(1 + signs * 2.0**-23)
                return model

            run.build_model = nudged
            train_here(one_process(runs), folder / str(seed))

        assert in_process(job) == 0
        for line, plain in zip(timeless_log(folder / str(seed)), control, strict=True):
            for name in ("loss", "grad_norm"):
                if name in line:
                    moved = abs(line[name] - plain[name]) / abs(plain[name])
                    most[name] = max(most.get(name, 0.0), moved)
    assert max(most.values()) < 0.01  # else a comparison would prove nothing
    return {name: 4 * moved + 1e-6 for name, moved in most.items()}


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_curve_is_that_of_one_process(
    name: str, runs: Path, tolerance: dict[str, float]
) -> None:
    found, expected = timeless_log(runs / name), timeless_log(runs / "one")
    assert [(line["kind"], line["step"]) for line in found] == [
        (line["kind"], line["step"]) for line in expected
    ]
    for line, plain in zip(found, expected, strict=True):
        assert line["tokens"] == plain["tokens"]
        assert line.get("learning_rate") == plain.get("learning_rate")
        for number, allowed in tolerance.items():
            if number in plain:
                assert line[number] == pytest.approx(plain[number], rel=allowed), (number, line)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_killed_group_resumes_exactly(name: str, runs: Path) -> None:
    """Both processes were killed in step 7; the random states of both are in the checkpoint."""
    assert_same_run(runs / f"{name}-killed", runs / name)


def running_losses(checkpoint: Path) -> Tensor:
    """Of the processes that wrote it, since the last line of the log."""
    files = sorted(checkpoint.glob("random-*"))
    return torch.cat([load_file(file)["running_loss"] for file in files])


def assert_taken_up(loaded: Path, checkpoint: Path) -> dict[str, Tensor]:
    """Everything that was loaded equals what the checkpoint holds; gives the rest."""
    found = load_file(loaded)
    for part in ("model", "optimizer"):
        taken = {
            name.removeprefix(f"{part}/"): found.pop(name)
            for name in list(found)
            if name.startswith(f"{part}/")
        }
        saved = load_file(checkpoint / f"{part}.safetensors")
        for one in (taken, saved):
            one.pop("lm_head.weight", None)  # the embedding, which only shards save twice
        assert taken and differing(taken, saved) == []
    assert found["loop/steps"].item() == step_of(checkpoint)
    return found


@pytest.mark.parametrize("name", ["ddp-killed-copy", "fsdp-killed-copy"])
def test_one_process_takes_up_what_two_made(name: str, runs: Path, tmp_path: Path) -> None:
    """With the settings as they are, and goes on to the end."""
    shutil.copytree(runs / name, tmp_path / name)

    def job() -> None:
        ranks.remember_loops()
        ranks.take_up(tmp_path / name, "loaded")

    assert in_process(job) == 0
    rest = assert_taken_up(tmp_path / "loaded-0.safetensors", tmp_path / name / "checkpoint-4")
    assert not rest["loop/shards"].any()
    losses = running_losses(tmp_path / name / "checkpoint-4")
    assert losses[0] != losses[1] and rest["loop/running_loss"] == losses.mean()
    resumed(tmp_path / name)
    steps = [line["step"] for line in timeless_log(tmp_path / name)]
    assert steps == [line["step"] for line in timeless_log(runs / "one")]


@pytest.mark.parametrize(
    ("name", "sharded"), [("one-killed", False), ("fsdp-killed-copy", True)], ids=["ddp", "fsdp"]
)
def test_two_processes_take_up_what_there_is(name: str, sharded: bool, runs: Path) -> None:
    for rank in (0, 1):
        loaded = runs / f"{name}-by-two-{rank}.safetensors"
        rest = assert_taken_up(loaded, runs / name / "checkpoint-4")
        assert rest["loop/shards"].all() == sharded
        losses = running_losses(runs / name / "checkpoint-4")
        assert rest["loop/running_loss"] == losses[rank if sharded else 0]  # one process wrote it


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_processes_measure_the_best_checkpoint(name: str, runs: Path) -> None:
    """Also where each holds shards of the model, into which that checkpoint must get."""
    found = json.loads((runs / f"{name}-test.json").read_text())
    trained = load_trained(runs / name)
    blocks = open_prepared(runs / "tokens").blocks("validation", 32)
    expected = evaluate(trained.model, blocks, batch_size=16, quality_tokens=16)
    assert (found["step"], found["tokens"]) == (step_of(trained.checkpoint), expected.tokens)
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)  # a sum in another order
    assert found["dead_experts"] == expected.routing["dead_experts"]


def test_evaluation_on_two_ranks_is_that_of_one(runs: Path) -> None:
    found = [json.loads((runs / f"evaluation-{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    trained = load_trained(runs / "ddp")
    blocks = torch.load(runs / "blocks.pt")
    for count in (9, 4, 2):
        plain = evaluate(trained.model, blocks[:count], batch_size=4, quality_tokens=10_000)
        together = found[0][str(count)]
        assert together["tokens"] == plain.tokens == count * 31
        # The same batches, summed in float64 in another order.
        assert together["loss"] == pytest.approx(plain.loss, rel=1e-14)
        for name in ("entropy", "dead_experts", "load_imbalance", "codeword_perplexity"):
            assert together[name] == plain.routing[name], name


def test_a_failure_of_the_first_rank_is_told_to_all(runs: Path) -> None:
    messages = [(runs / f"full-{rank}.txt").read_text() for rank in (0, 1)]
    assert messages[0] == messages[1]
    assert "step 4" in messages[0] and "disk is full" in messages[0]


def test_an_occupied_folder_is_refused_by_every_rank(runs: Path) -> None:
    for rank in (0, 1):
        message = (runs / f"refused-{rank}.txt").read_text()
        assert "holds this very run already" in message


def test_the_folder_can_be_named_under_torchrun() -> None:
    """torchrun takes a shortened option for one of its own, wherever it stands."""
    arguments = ["train", "tiny", "--folder", "x", "--method", "air", "training.steps=1"]
    parsed = parse_args(["--nproc-per-node", "2", "-m", "airmoe", *arguments])
    assert parsed.training_script_args == arguments
    resumed = ["train", "--resume", "x"]
    assert parse_args(["-m", "airmoe", *resumed]).training_script_args == resumed
