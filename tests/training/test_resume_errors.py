"""What is resumed is what a run wrote: else one line, and nothing is touched."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airmoe.data import PrepareConfig, Prepared, prepare
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
from airmoe.training.run_folder import data_sha256, open_run
from airmoe.training.run_log import read_log
from tests.training import kills
from tests.training.command import Outcome, airmoe, assert_one_line
from tests.training.runs import OPTIONS, Whole, killed, small_run, timeless_log


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
    for checkpoint in checkpoints(run):
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
    checkpoint, log = unfinished / "checkpoint-8", unfinished / "log.jsonl"
    checkpoint.rename(tmp_path / "away")
    shutil.rmtree(unfinished / "checkpoint-4")
    with log.open("a") as file:
        file.write('{"kind": "train", "step": 11, "los')  # torn by the kill
    before = log.read_bytes()
    reached = ("its log reaches step 9", "checkpoint was due after step 4")
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


# -- files are known by their hash --------------------------------------------------------------


def check(run: Path) -> None:
    check_checkpoint(checkpoints(run)[-1], open_run(run).sha256(), to_resume=True)


def flip(path: Path) -> None:
    """One bit, far behind the header."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def of_another_step(name: str) -> Callable[[Path], Any]:
    return lambda folder: shutil.copy(folder.parent / "checkpoint-4" / name, folder / name)


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
    "another name": (lambda at: at.rename(at.with_name("checkpoint-9")), "checkpoint-8"),
    "no manifest": (lambda at: (at / MANIFEST).unlink(), MANIFEST),
    "half a manifest": (lambda at: (at / MANIFEST).write_text('{"format": 1,'), MANIFEST),
    "a manifest of 0.1.0": (written_by_0_1_0, "The last version that can read it is 0.1.0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_checkpoint_is_refused(damage: str, unfinished: Path) -> None:
    check(unfinished)
    change, named = DAMAGES[damage]
    change(unfinished / "checkpoint-8")
    with pytest.raises(ConfigError) as error:
        check(unfinished)
    message = str(error.value)
    assert named in message and "\n" not in message


def test_the_commands_look_first(unfinished: Path) -> None:
    before = (unfinished / "log.jsonl").read_bytes()
    flip(unfinished / "checkpoint-8" / OPTIMIZER)
    part = f"{unfinished}/checkpoint-8/{OPTIMIZER}"
    assert_one_line(resume(unfinished), 2, part, "sha256", "the one before")
    assert airmoe("eval", unfinished).code == 0  # it does not read that
    for folder in checkpoints(unfinished):
        flip(folder / "model.safetensors")
    for command in ("eval", "generate"):
        assert_one_line(airmoe(command, unfinished), 2, "model.safetensors", "sha256")
    assert (unfinished / "log.jsonl").read_bytes() == before
    assert [path.name for path in checkpoints(unfinished)] == ["checkpoint-4", "checkpoint-8"]


def test_the_remedy_helps(unfinished: Path, lasting: Whole) -> None:
    shutil.rmtree(unfinished / "checkpoint-8")
    assert resume(unfinished).code == 0
    assert timeless_log(unfinished) == timeless_log(lasting.path)


def test_a_name_for_people_changes_nothing(unfinished: Path) -> None:
    values = read_json(unfinished / "run.json")
    values["config"]["preset"] = "another"
    write_json(unfinished / "run.json", values)
    check(unfinished)


@pytest.mark.parametrize("content", ["", '{"kind": "train", "st\n', None])
def test_a_changed_log_comes_back_from_the_checkpoint(
    content: str | None, unfinished: Path, lasting: Whole
) -> None:
    log = unfinished / "log.jsonl"
    if content is None:
        log.unlink()
    else:
        log.write_text(content)
    assert resume(unfinished).code == 0
    assert timeless_log(unfinished) == timeless_log(lasting.path)
    assert read_json(unfinished / "result.json")["log"] == read_log(log)


@pytest.mark.parametrize("gone", [OPTIMIZER, LOG, "training.json"])
def test_a_manifest_that_was_made_again(gone: str, unfinished: Path) -> None:
    """What the hashes are for is not to be had by them: all that is needed is looked at anyway."""
    checkpoint = unfinished / "checkpoint-8"
    if gone == OPTIMIZER:
        (checkpoint / OPTIMIZER).write_bytes((checkpoint / MODEL).read_bytes())
    else:
        (checkpoint / gone).unlink()
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, open_run(unfinished).sha256())
    assert_one_line(resume(unfinished), 2, "checkpoint", gone)


@pytest.mark.parametrize(
    ("file", "values", "reason"),
    [
        ("result.json", {"last": 5}, "cannot be read (it lacks best)"),
        ("run.json", {"format": 2, "config": []}, "cannot be read (it lacks data_sha256)"),
    ],
)
def test_a_file_without_its_fields_is_one_line(
    file: str, values: dict[str, Any], reason: str, unfinished: Path
) -> None:
    write_json(unfinished / file, values)
    assert_one_line(resume(unfinished), 2, file, reason)


# -- the hash of a run's text is one of its tokens, not of names and packing --------------------


def prepared(folder: Path, text: str, *, packed: bool = False) -> Prepared:
    folder.mkdir()
    for split in ("train", "valid"):
        data = f"{split}: {text}".encode()
        name = f"{split}.txt.gz" if packed else f"{split}-of-mine.txt"
        (folder / name).write_bytes(gzip.compress(data) if packed else data)
    out = f"{folder}-tokens"
    return prepare(PrepareConfig(corpus=str(folder), tokenizer="bytes", out=out))


def test_names_and_packing_do_not_matter_but_tokens_do(tmp_path: Path) -> None:
    first = prepared(tmp_path / "one", "some words")
    same = prepared(tmp_path / "two", "some words", packed=True)
    assert first.manifest != same.manifest  # so there is something to ignore
    assert data_sha256(first) == data_sha256(same)
    other = prepared(tmp_path / "three", "other words")
    assert data_sha256(first) != data_sha256(other)


def test_the_tokenizer_and_which_split_is_which_matter(tmp_path: Path) -> None:
    text = prepared(tmp_path / "one", "some words")
    manifest = text.manifest
    tokenizer = replace(manifest.tokenizer, sha256="00" * 32)
    train, validation = (manifest.splits[name] for name in ("train", "validation"))
    for changed in (
        replace(manifest, tokenizer=tokenizer),
        replace(manifest, splits={"train": validation, "validation": train}),
        replace(manifest, splits={"train": train}),
    ):
        assert data_sha256(replace(text, manifest=changed)) != data_sha256(text)
