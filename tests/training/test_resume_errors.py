"""Resuming what is no run, is incomplete or was changed: one line, and nothing is touched."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from airmoe.data import PrepareConfig, prepare
from airmoe.training import checkpoints
from airmoe.training.run_folder import open_run
from tests.training import kills
from tests.training.command import Outcome, airmoe, assert_one_line
from tests.training.runs import killed, small_run


def resume(run: Path, *more: object) -> Outcome:
    return airmoe("train", "--resume", run, *more)


@pytest.mark.parametrize(
    "extra", [["training.steps=9"], ["tiny"], ["--run", "elsewhere"], ["--method", "peer"]]
)
def test_resume_takes_nothing_else(extra: list[str], finished: Path) -> None:
    outcome = resume(finished, *extra)
    assert_one_line(outcome, 2, f"got '{extra[-1]}'", "cannot be given with --resume")


def test_resume_of_what_is_no_run(text: Path, finished: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "no", text):
        assert_one_line(resume(folder), 2, "run.json")
    values = json.loads((finished / "run.json").read_text())
    config = values["config"]
    contents = {
        "": "run.json",
        "{}": "format",
        json.dumps(values | {"format": 99}): "format: got 99",
        json.dumps(values | {"format": 1}): "The last version that can read it is 0.1.0",
        json.dumps(values | {"config": config | {"sails": 5}}): "run.sails: got 5",
    }
    for content, part in contents.items():
        (tmp_path / "run.json").write_text(content)
        assert_one_line(resume(tmp_path), 2, part)


def test_another_text_or_none(tmp_path: Path) -> None:
    """Elsewhere, `data.corpus` would be prepared under the folder's name: another text."""
    config = small_run(tmp_path, steps=6, eval_every=2)
    run = killed(config, tmp_path / "run", kills.before_step(4))
    tokens = tmp_path / "tokens"
    tokens.rename(tmp_path / "away")
    assert_one_line(resume(run), 2, "data.folder", "where the run was started")
    assert not tokens.exists()
    (tmp_path / "other.txt").write_text((tmp_path / "text.txt").read_text().upper())
    options: dict[str, Any] = {"validation_fraction": 0.1}
    corpus = str(tmp_path / "other.txt")
    prepare(PrepareConfig(corpus=corpus, tokenizer="bytes", out=str(tokens), **options))
    assert_one_line(resume(run), 2, "data.folder", "began")
    shutil.rmtree(tokens)
    (tmp_path / "away").rename(tokens)
    assert resume(run).code == 0


def test_a_finished_run_needs_no_checkpoints(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for checkpoint in checkpoints.checkpoints(run):
        shutil.rmtree(checkpoint)
    before = {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}
    outcome = resume(run)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        f"{run} is finished: there is nothing left to do.",
        f"Finished: {run / 'result.json'}",
    ]
    assert {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))} == before


def test_an_unfinished_run_without_its_checkpoints(unfinished: Path, tmp_path: Path) -> None:
    """It must not silently begin at step 0."""
    checkpoint, log = unfinished / "checkpoint-2", unfinished / "log.jsonl"
    checkpoint.rename(tmp_path / "away")
    with log.open("a") as file:
        file.write('{"kind": "train", "step": 9, "los')  # torn by the kill
    before = log.read_bytes()
    reached = ("its log reaches step 3", "checkpoint was due after step 2")
    outcome = resume(unfinished)
    assert_one_line(outcome, 2, f"run: got '{unfinished}'", *reached, "Put", "start a new run")
    assert log.read_bytes() == before
    (tmp_path / "away").rename(checkpoint)
    assert resume(unfinished).code == 0


@pytest.mark.parametrize(
    "options",
    [{"eval_every": 4}, {"eval_every": "epoch"}, {"eval_every": 6, "save_every": 4}],
    ids=["evaluation", "epoch", "save_every"],
)
def test_before_the_first_checkpoint(options: dict[str, Any], text: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=6, log_every=1, **options)
    run = killed(config, tmp_path / "run", kills.in_fill(1))
    outcome = resume(run)
    assert outcome.code == 0, outcome.err
    assert f"{run} has no checkpoint yet: it starts again." in outcome.out
    steps = [json.loads(line)["step"] for line in (run / "log.jsonl").open()]
    assert steps[0] == 1 and steps == sorted(steps)


def test_a_run_that_still_goes_on(unfinished: Path) -> None:
    before = sorted(unfinished.rglob("*"))
    with open_run(unfinished).lock():
        holder = f"is being trained by process {os.getpid()} on {socket.gethostname()}"
        assert_one_line(resume(unfinished), 2, holder)
    assert sorted(unfinished.rglob("*")) == before
    assert resume(unfinished).code == 0
