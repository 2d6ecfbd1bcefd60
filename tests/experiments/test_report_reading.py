"""Bad input, line by line: each is named, and the rest is still reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe import ConfigError
from airmoe.experiments.report.finished import MOST_POINTS
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import read_record, write_record
from airmoe.files import read_json, write_json
from airmoe.training.checkpoints import USAGE
from tests.experiments.report_toys import write_main_suite, write_run, write_suite, write_usage


def problems(folder: Path) -> list[str]:
    """The lines about a folder in which the run `good` must still be found."""
    record = read_all([folder])
    assert [run.name for run in record.runs] == ["runs/good"]
    return record.problems


def unfinished(run: Path) -> None:
    write_run(run, result=False)


def torn(run: Path) -> None:
    """Killed after four lines of its log, while it wrote the fifth."""
    unfinished(run)
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "log.jsonl").write_text("\n".join(lines[:4]) + '\n{"kind": "tra', encoding="utf-8")


def without_log(run: Path) -> None:
    unfinished(run)
    (run / "log.jsonl").unlink()


def headless(run: Path) -> None:
    write_run(run)
    (run / "run.json").unlink()


def changed(file: str, section: str | None = None, **values: Any) -> Callable[[Path], None]:
    """A finished run with other values in a file."""

    def make(run: Path) -> None:
        write_run(run)
        content = read_json(run / file)
        (content["config"][section] if section else content).update(values)
        write_json(run / file, content)

    return make


def with_text(file: str, text: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        write_run(run)
        (run / file).write_text(text, encoding="utf-8")

    return make


def remains(file: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / file).parent.mkdir(parents=True)
        (run / file).write_text("{", encoding="utf-8")

    return make


WRONG_RESULT = "result.json cannot be read ("


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (torn, "is not finished: no result.json, step 90 of 360, loss 5.969"),
        (without_log, "is not finished: no result.json, nothing logged"),
        (headless, "is half written: no run.json, step 360, loss 4.094"),
        (remains("run.json.draft"), "is half written: no run.json"),
        (remains("checkpoint-60/training.json"), "is half written: no run.json"),
        (remains(USAGE), "is half written: no run.json"),
        (Path.mkdir, "is empty"),
        (changed("run.json", format=7), "run.format: got 7, must be 2, the format of this airmoe"),
        (changed("run.json", "training", hurry=True), "training.hurry: got True, is not an option"),
        (with_text("run.json", "{"), "run: got 'run.json', must be JSON with format and config"),
        (with_text("run.json", "[]"), "run: got 'run.json', must be JSON with format and config"),
        (with_text("result.json", '{"best"'), f"{WRONG_RESULT}JSONDecodeError"),
        (with_text("result.json", "[]"), f"{WRONG_RESULT}TypeError"),
        (with_text("result.json", '{"log": []}'), f"{WRONG_RESULT}KeyError: 'best')"),
        (
            changed("result.json", tokens="a"),
            f"{WRONG_RESULT}ConfigError: run.tokens: got 'a', must be a whole number",
        ),
        (
            changed("result.json", parameters={"total": None, "active": 1}),
            f"{WRONG_RESULT}ConfigError: run.parameters.total: got None, must be a whole number",
        ),
        (
            changed("result.json", parameters=None),
            f"{WRONG_RESULT}ConfigError: run.parameters: got None, must be an object",
        ),
        (
            changed("result.json", machine=3),
            f"{WRONG_RESULT}ConfigError: run.machine: got 3, must be an object",
        ),
        (
            lambda run: write_run(run, perplexity=float("nan")),
            f"{WRONG_RESULT}ConfigError: run.best.perplexity: got None, must be a finite number",
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_one_line(
    good: Path, make: Callable[[Path], None], line: str
) -> None:
    make(good / "odd")
    (found,) = problems(good)
    assert found.startswith(f"runs/odd: {line}") and "\n" not in found


def test_runs_beside_a_stray_checkpoint_are_found(good: Path) -> None:
    (good / "checkpoint-60").mkdir()
    assert problems(good) == ["runs: is half written: no run.json"]


@pytest.mark.parametrize("method", ["iterdir", "open"])
def test_a_folder_that_may_not_be_read(
    good: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(good / "secret")
    usual = getattr(Path, method)

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if "secret" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *arguments, **options)

    monkeypatch.setattr(Path, method, refused)
    refusal = "cannot be read (PermissionError: Permission denied)"
    assert problems(good) == [f"runs/secret: {refusal}"]


def test_unreadable_usage_costs_the_map_only(good: Path) -> None:
    (good / "good" / "usage.safetensors").write_bytes(b"not a tensor")
    (line,) = problems(good)
    assert line.startswith("runs/good: usage.safetensors cannot be read")


def test_paths_that_are_not_there_or_given_twice(good: Path) -> None:
    record = read_all([good, good / "good", good, good / "nowhere"])
    assert len(record.runs) == 1
    assert record.problems == [f"{good / 'nowhere'}: there is no such file or folder"]


def test_no_run_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"must hold at least one finished run .*is empty"):
        read_all([tmp_path])


def test_paths_of_a_machine_do_not_get_into_a_report(tmp_path: Path) -> None:
    paths = ["data.folder=/somewhere/else/tokens", "data.corpus=/x/y.txt"]
    write_run(tmp_path / "run", [*paths, "data.tokenizer=/x/tokenizer.model"])
    (run,) = read_all([tmp_path]).runs
    found = [run.config["data"][name] for name in ("folder", "corpus", "tokenizer")]
    assert found == ["tokens", "y.txt", "tokenizer.model"]


def test_curves_are_thinned_and_maps_kept_once(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"air": [60.0, 61.0]}, seeds=(42, 43))
    for seed in (42, 43):
        run = tmp_path / "s" / f"air-seed{seed}"
        write_usage(run, np.arange(4096) + 1)
        values = read_json(run / "result.json")
        line = next(line for line in values["log"] if line["kind"] == "train")
        values["log"] = [line | {"step": step} for step in range(1000)]
        write_json(run / "result.json", values)
    one, other = read_all([tmp_path]).runs
    steps = one.training["step"]
    assert len(steps) == MOST_POINTS < 1000 and (steps[0], steps[-1]) == (0, 999)
    assert one.usage is not None and one.usage.levels is not None
    assert other.usage is not None and other.usage.levels is None
    assert other.usage.structure == one.usage.structure


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "must be a report.json of `airmoe report`"),
        ("[]", "must be a report.json of `airmoe report`"),
        ('{"format": 1}', "report.format: got 1, must be 2"),
        ('{"format": 2, "runs": [{}], "problems": []}', "runs[0].name: got None, must be given"),
    ],
)
def test_a_bad_report_json(good: Path, tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    record = read_all([tmp_path / "report.json", good])
    assert len(record.runs) == 1
    (line,) = record.problems
    assert line.startswith("report.json: ") and part in line


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    suite = write_main_suite(tmp_path / "main")
    write_usage(suite / "air-seed42", np.arange(4096))
    shutil.rmtree(suite / "coarse-seed42")
    (suite / "peer-seed42" / "result.json").unlink()
    record = read_all([suite])
    assert len(record.problems) == 2
    write_record(record, tmp_path / "report.json")
    assert read_record(tmp_path / "report.json") == record
    again = read_all([tmp_path / "report.json"])
    assert (again.runs, again.problems) == (record.runs, record.problems)


def test_a_report_json_with_settings_of_another_version(good: Path, tmp_path: Path) -> None:
    write_record(read_all([good]), tmp_path / "report.json")
    values = read_json(tmp_path / "report.json")
    values["runs"][0]["config"]["training"]["hurry"] = True
    (tmp_path / "report.json").write_text(json.dumps(values), encoding="utf-8")
    (line,) = read_all([tmp_path / "report.json", good]).problems
    assert line.startswith("report.json: ") and "hurry" in line
