"""What a run takes up again is what it wrote: files are known by their hash, lines are checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airmoe.errors import ConfigError
from airmoe.files import read_json, write_json
from airmoe.training.checkpoints import (
    LOG,
    MANIFEST,
    OPTIMIZER,
    best_checkpoint,
    check_checkpoint,
    checkpoints,
    write_manifest,
)
from airmoe.training.run_folder import open_run, read_result
from airmoe.training.run_log import read_log
from tests.training import kills
from tests.training.command import airmoe, assert_one_line
from tests.training.runs import killed, small_model, small_run, timeless_log, trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 6 steps, and one killed with checkpoints of steps 2 and 4.

    Lists live three steps, so that those of step 4 are in its checkpoint.
    """
    folder = tmp_path_factory.mktemp("integrity")
    model = small_model()
    model["router_options"] = {**model["router_options"], "refresh_every": 3}
    config = small_run(folder, model, documents=60, steps=6, eval_every=2, log_every=1)

    trained(config, folder / "whole")
    killed(config, folder / "killed", kills.before_step(6))
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A copy of the killed one."""
    return Path(shutil.copytree(runs / "killed", tmp_path / "run"))


def check(run: Path, *, to_resume: bool = True) -> None:
    check_checkpoint(checkpoints(run)[-1], open_run(run).sha256(), to_resume=to_resume)


# -- files of a checkpoint ----------------------------------------------------------------------


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


def another_codebook(folder: Path) -> None:
    """In the model's own settings."""
    values = read_json(folder / "config.json")
    values["router_options"]["codebook"] = "euclidean"
    write_json(folder / "config.json", values)


def written_by_0_1_0(folder: Path) -> None:
    write_json(folder / MANIFEST, read_json(folder / MANIFEST) | {"format": 1})


ROUTER = {"num_codewords": 8, "shortlist_size": 16, "refresh_every": 3, "codebook": "static"}
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of the weights": (lambda at: flip(at / "model.safetensors"), "model.safetensors"),
    "a bit of the moments": (lambda at: flip(at / OPTIMIZER), OPTIMIZER),
    "a bit of the random state": (lambda at: flip(at / "random-0.safetensors"), "random-0"),
    "no moments": (lambda at: (at / OPTIMIZER).unlink(), OPTIMIZER),
    "empty moments": (lambda at: (at / OPTIMIZER).write_bytes(b""), OPTIMIZER),
    "moments of another step": (of_another_step(OPTIMIZER), OPTIMIZER),
    "weights of another step": (of_another_step("model.safetensors"), "model.safetensors"),
    "schedule of another step": (of_another_step("training.json"), "training.json"),
    "another seed": (setting("training", "seed", 43), "run.json"),
    "another learning rate": (setting("training", "learning_rate", 0.02), "run.json"),
    "another codebook": (setting("model", "router_options", ROUTER), "run.json"),
    "another codebook in the model": (another_codebook, "config.json"),
    "one more file": (lambda at: (at / "random-1.safetensors").write_bytes(b"x"), "random-1"),
    "another name": (lambda at: at.rename(at.with_name("checkpoint-5")), "checkpoint-5"),
    "no manifest": (lambda at: (at / MANIFEST).unlink(), MANIFEST),
    "a manifest of 0.1.0": (written_by_0_1_0, "The last version that can read it is 0.1.0"),
    "half a manifest": (lambda at: (at / MANIFEST).write_text('{"format": 1,'), MANIFEST),
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


def test_a_name_for_people_and_a_system_file_change_nothing(run: Path) -> None:
    values = read_json(run / "run.json")
    values["config"]["preset"] = "another"
    write_json(run / "run.json", values)
    (run / "checkpoint-4" / ".DS_Store").write_text("x")
    check(run)


# -- JSON ---------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (None, True, -1, 2.5, 10**400, "x", [], [[]], {}, {"a": {}})


def mutations(values: Any) -> Iterator[Any]:
    """Every field of an object taken away or given odd values, also inside of it; and no object."""
    yield from ODD
    for name, value in values.items():
        yield {key: one for key, one in values.items() if key != name}
        yield from (values | {name: odd} for odd in ODD)
        if isinstance(value, dict) and value:
            yield from (values | {name: changed} for changed in mutations(value))


def texts(content: str) -> Iterator[str]:
    yield from ("", "{", content[: len(content) // 2], "[" * 100_000, "1" * 5000)
    yield from map(json.dumps, mutations(json.loads(content)))


def outcome_of(job: Callable[[], Any]) -> str | None:
    """The one line of a refusal, None where there was none; nothing else may come out."""
    try:
        job()
    except ConfigError as error:
        return str(error).replace("\n", "SECOND LINE")
    return None


@pytest.mark.parametrize("name", ["training.json", "config.json", MANIFEST])
def test_no_change_of_a_checkpoint_is_taken(name: str, run: Path) -> None:
    file = run / "checkpoint-4" / name
    whole = file.read_text()
    sha256 = open_run(run).sha256()
    for content in texts(whole):
        if content == json.dumps(json.loads(whole)) and name == MANIFEST:
            continue
        file.write_text(content)
        refusal = outcome_of(lambda: check_checkpoint(file.parent, sha256, to_resume=True))
        assert refusal is not None and str(file.parent) in refusal, content[:200]
        assert "SECOND LINE" not in refusal
        outcome_of(lambda: best_checkpoint(run))


def test_no_change_of_a_run_is_a_traceback(run: Path) -> None:
    """What is taken is the same run, or its checkpoint is not."""
    whole, sha256 = (run / "run.json").read_text(), open_run(run).sha256()
    config, taken = open_run(run).config, 0
    for content in texts(whole):
        (run / "run.json").write_text(content)
        if outcome_of(lambda: check(run)) is None:
            taken += 1
            assert open_run(run).sha256() == sha256
            assert open_run(run).config.training == config.training
    assert taken  # versions, machine: they are no settings


def test_fields_of_a_result(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    whole = (runs / "whole" / "result.json").read_text()
    for content in texts(json.dumps(json.loads(whole) | {"log": [], "config": {}})):
        file.write_text(content)
        refusal = outcome_of(lambda: read_result(file))
        assert refusal is None or (str(file) in refusal and "SECOND LINE" not in refusal)
    file.write_text(json.dumps(json.loads(whole) | {"best": {"loss": 1.0}}))
    with pytest.raises(ConfigError, match=r"result\.json: best\.perplexity: got 'nothing'"):
        read_result(file)


def test_a_result_without_its_fields_is_one_line(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "whole", tmp_path / "run"))
    write_json(run / "result.json", {"last": 5})
    assert_one_line(airmoe("train", "--resume", run), 2, "result.json: best: got 'nothing'")
    (run / "result.json").unlink()
    values = read_json(run / "run.json")
    write_json(run / "run.json", values | {"git": 5})
    assert_one_line(airmoe("train", "--resume", run), 2, "run.json: git: got 5", "Put")


# -- the log ------------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[list[str]], Any]] = {
    "damaged": lambda lines: lines.__setitem__(2, '{"kind": "train", "st'),
    "emptied": lambda lines: lines.__setitem__(2, ""),
    "removed": lambda lines: lines.pop(2),
    "edited": lambda lines: lines.__setitem__(2, lines[2].replace('"loss": ', '"loss": 0')),
    "another beside a damaged one": lambda lines: lines.__setitem__(slice(2), ["x", lines[2]]),
    "added": lambda lines: lines.insert(2, lines[2]),
    "all": lambda lines: lines.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_log_comes_back_from_the_checkpoint(change: str, run: Path, runs: Path) -> None:
    """Said once, before training, also where the run is killed before its next checkpoint."""
    log = run / "log.jsonl"
    lines = log.read_text().splitlines()
    CHANGES[change](lines)
    log.write_text("".join(f"{line}\n" for line in lines))
    first = airmoe("train", "--resume", run, patch=kills.before_step(5))
    assert first.out.splitlines()[0] == (
        f"{log}: was changed or damaged, and is again as checkpoint-4 has it."
    )
    second = airmoe("train", "--resume", run)
    assert second.code == 0 and "damaged" not in second.out, second
    assert timeless_log(run) == timeless_log(runs / "whole")
    assert read_json(run / "result.json")["log"] == read_log(log)


def test_a_log_without_its_copy_is_not_taken(run: Path) -> None:
    checkpoint = run / "checkpoint-4"
    for name in (LOG, MANIFEST):
        (checkpoint / name).unlink()
    write_manifest(checkpoint, 4, open_run(run).sha256())
    assert_one_line(airmoe("train", "--resume", run), 2, str(checkpoint), "copy of the run's log")
    assert airmoe("eval", run).code == 0


@pytest.mark.parametrize("change", CHANGES)
def test_the_result_of_a_finished_run_survives_its_log(
    change: str, runs: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "whole", tmp_path / "run"))
    before = (run / "result.json").read_bytes()
    lines = (run / "log.jsonl").read_text().splitlines()
    CHANGES[change](lines)
    (run / "log.jsonl").write_text("\n".join(lines))
    assert airmoe("train", "--resume", run).code == 0
    assert (run / "result.json").read_bytes() == before
    assert (run / "log.jsonl").read_bytes() == (runs / "whole" / "log.jsonl").read_bytes()


def test_usage_is_that_of_the_best_step_or_none(runs: Path, tmp_path: Path) -> None:
    """Not of whatever checkpoint is left."""
    run = Path(shutil.copytree(runs / "whole", tmp_path / "run"))
    best = run / f"checkpoint-{read_json(run / 'result.json')['best']['step']}"
    usage = (run / "usage.safetensors").read_bytes()
    assert usage == (best / "usage.safetensors").read_bytes()
    best.rename(run / "away")
    assert airmoe("train", "--resume", run).code == 0
    assert (run / "usage.safetensors").read_bytes() == usage


def test_a_manifest_that_was_made_again(run: Path) -> None:
    """What the hashes are for is not to be had by them: shapes and names are checked anyway."""
    (run / "checkpoint-4" / OPTIMIZER).write_bytes(
        (run / "checkpoint-4" / "model.safetensors").read_bytes()
    )
    (run / "checkpoint-4" / MANIFEST).unlink()
    write_manifest(run / "checkpoint-4", 4, open_run(run).sha256())
    assert_one_line(airmoe("train", "--resume", run), 2, "checkpoint", OPTIMIZER)
