"""What a run takes up again is what it wrote: files are known by their hash."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airmoe.errors import ConfigError
from airmoe.files import read_json, write_json
from airmoe.training.checkpoints import (
    LOG,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    check_checkpoint,
    checkpoints,
    write_manifest,
)
from airmoe.training.run_folder import open_run
from airmoe.training.run_log import read_log
from tests.training import kills
from tests.training.command import airmoe, assert_one_line
from tests.training.runs import OPTIONS, killed, small_model, small_run, timeless_log, trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 6 steps, and one killed with checkpoints of steps 2 and 4.

    Lists live three steps, so that those of step 4 are in its checkpoint.
    """
    folder = tmp_path_factory.mktemp("integrity")
    model = small_model(router_options=OPTIONS | {"refresh_every": 3})
    config = small_run(folder, model, documents=60, steps=6, eval_every=2, log_every=1)
    trained(config, folder / "whole")
    killed(config, folder / "killed", kills.before_step(6))
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "killed", tmp_path / "run"))


def check(run: Path, *, to_resume: bool = True) -> None:
    check_checkpoint(checkpoints(run)[-1], open_run(run).sha256(), to_resume=to_resume)


def flip(path: Path) -> None:
    """One bit, far behind the header."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def of_another_step(name: str) -> Callable[[Path], Any]:
    return lambda folder: shutil.copy(folder.parent / "checkpoint-2" / name, folder / name)


def setting(section: str, name: str, value: Any) -> Callable[[Path], Any]:
    """Of the run itself, as if somebody had changed it by hand."""

    def change(folder: Path) -> None:
        values = read_json(folder.parent / "run.json")
        values["config"][section][name] = value
        write_json(folder.parent / "run.json", values)

    return change


def written_by_0_1_0(folder: Path) -> None:
    write_json(folder / MANIFEST, read_json(folder / MANIFEST) | {"format": 1})


ROUTER = OPTIONS | {"refresh_every": 3, "codebook": "static"}
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of the weights": (lambda at: flip(at / "model.safetensors"), "model.safetensors"),
    "a bit of the random state": (lambda at: flip(at / "random-0.safetensors"), "random-0"),
    "no moments": (lambda at: (at / OPTIMIZER).unlink(), OPTIMIZER),
    "empty moments": (lambda at: (at / OPTIMIZER).write_bytes(b""), OPTIMIZER),
    "weights of another step": (of_another_step("model.safetensors"), "model.safetensors"),
    "schedule of another step": (of_another_step("training.json"), "training.json"),
    "another learning rate": (setting("training", "learning_rate", 0.02), "run.json"),
    "another codebook": (setting("model", "router_options", ROUTER), "run.json"),
    "moments of another step": (of_another_step(OPTIMIZER), OPTIMIZER),
    "another name": (lambda at: at.rename(at.with_name("checkpoint-5")), "checkpoint-4"),
    "no manifest": (lambda at: (at / MANIFEST).unlink(), MANIFEST),
    "half a manifest": (lambda at: (at / MANIFEST).write_text('{"format": 1,'), MANIFEST),
    "a manifest of 0.1.0": (written_by_0_1_0, "The last version that can read it is 0.1.0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_checkpoint_is_refused(damage: str, run: Path) -> None:
    check(run)
    change, named = DAMAGES[damage]
    change(run / "checkpoint-4")
    with pytest.raises(ConfigError) as error:
        check(run)
    message = str(error.value)
    assert named in message and "\n" not in message


def test_the_commands_look_first(run: Path) -> None:
    before = (run / "log.jsonl").read_bytes()
    flip(run / "checkpoint-4" / OPTIMIZER)
    part = f"{run}/checkpoint-4/{OPTIMIZER}"
    assert_one_line(airmoe("train", "--resume", run), 2, part, "sha256", "the one before")
    assert airmoe("eval", run).code == 0  # it does not read that
    for folder in checkpoints(run):
        flip(folder / "model.safetensors")
    for command in ("eval", "generate"):
        assert_one_line(airmoe(command, run), 2, "model.safetensors", "sha256")
    assert (run / "log.jsonl").read_bytes() == before
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-4"]


def test_the_remedy_helps(run: Path, runs: Path) -> None:
    shutil.rmtree(run / "checkpoint-4")
    assert airmoe("train", "--resume", run).code == 0
    assert timeless_log(run) == timeless_log(runs / "whole")


def test_a_name_for_people_changes_nothing(run: Path) -> None:
    values = read_json(run / "run.json")
    values["config"]["preset"] = "another"
    write_json(run / "run.json", values)
    check(run)


@pytest.mark.parametrize("content", ["", '{"kind": "train", "st\n', None])
def test_a_changed_log_comes_back_from_the_checkpoint(
    content: str | None, run: Path, runs: Path
) -> None:
    log = run / "log.jsonl"
    if content is None:
        log.unlink()
    else:
        log.write_text(content)
    assert airmoe("train", "--resume", run).code == 0
    assert timeless_log(run) == timeless_log(runs / "whole")
    assert read_json(run / "result.json")["log"] == read_log(log)


@pytest.mark.parametrize("gone", [OPTIMIZER, LOG, "training.json"])
def test_a_manifest_that_was_made_again(gone: str, run: Path) -> None:
    """What the hashes are for is not to be had by them: all that is needed is looked at anyway."""
    checkpoint = run / "checkpoint-4"
    if gone == OPTIMIZER:
        (checkpoint / OPTIMIZER).write_bytes((checkpoint / MODEL).read_bytes())
    else:
        (checkpoint / gone).unlink()
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, open_run(run).sha256())
    assert_one_line(airmoe("train", "--resume", run), 2, "checkpoint", gone)


@pytest.mark.parametrize(
    ("file", "values", "reason"),
    [
        ("result.json", {"last": 5}, "cannot be read (it lacks best)"),
        ("run.json", {"format": 2, "config": []}, "cannot be read (it lacks data_sha256)"),
    ],
)
def test_a_file_without_its_fields_is_one_line(
    file: str, values: dict[str, Any], reason: str, runs: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "whole", tmp_path / "run"))
    write_json(run / file, values)
    assert_one_line(airmoe("train", "--resume", run), 2, file, reason)
