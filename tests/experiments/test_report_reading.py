"""Bad input, line by line: each is named, and the rest is still reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe import ConfigError
from airmoe.experiments.report.finished import MOST_POINTS
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import read_record, write_record
from airmoe.files import read_json, write_json
from airmoe.training import override, preset
from airmoe.training.checkpoints import USAGE
from tests.experiments.report_toys import (
    write_main_suite,
    write_run,
    write_suite,
    write_usage,
)


def problems(folder: Path) -> list[str]:
    """The lines about a folder in which the run `good` must still be found."""
    record = read_all([folder])
    assert [run.name for run in record.runs] == ["runs/good"]
    return record.problems


def test_a_half_written_run_says_how_far_it_came(good: Path) -> None:
    write_run(good / "half", preset("tiny"), perplexity=60.0, result=False)
    log = good / "half" / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines()
    log.write_text("\n".join(lines[:4]) + '\n{"kind": "tra', encoding="utf-8")
    last = json.loads(lines[3])
    assert problems(good) == [
        f"runs/half: is not finished: no result.json, step {last['step']} of 360, "
        f"loss {last['loss']:.3f}"
    ]


def test_a_run_without_a_log(good: Path) -> None:
    write_run(good / "half", preset("tiny"), perplexity=60.0, result=False)
    (good / "half" / "log.jsonl").unlink()
    assert problems(good) == ["runs/half: is not finished: no result.json, nothing logged"]


def test_a_run_of_another_format(good: Path) -> None:
    shutil.copytree(good / "good", good / "new")
    values = read_json(good / "new" / "run.json")
    write_json(good / "new" / "run.json", values | {"format": 7})
    (line,) = problems(good)
    assert line.startswith("runs/new: run.format: got 7, must be 2, the format of this airmoe")


def test_an_empty_folder(good: Path) -> None:
    (good / "empty").mkdir()
    assert problems(good) == ["runs/empty: is empty"]


@pytest.mark.parametrize(
    ("file", "text", "part"),
    [
        ("run.json", "{", "run: got 'run.json', must be JSON with format and config"),
        ("run.json", "[]", "must be JSON with format and config"),
        ("result.json", '{"best"', "result.json cannot be read (JSONDecodeError"),
        ("result.json", "[]", "result.json cannot be read (TypeError"),
        ("result.json", '{"log": []}', "result.json cannot be read (KeyError: 'best')"),
    ],
)
def test_unreadable_json(good: Path, file: str, text: str, part: str) -> None:
    shutil.copytree(good / "good", good / "torn")
    (good / "torn" / file).write_text(text, encoding="utf-8")
    (line,) = problems(good)
    assert line.startswith("runs/torn: ") and part in line and "\n" not in line


def test_no_run_json(good: Path) -> None:
    shutil.copytree(good / "good", good / "headless")
    (good / "headless" / "run.json").unlink()
    (line,) = problems(good)
    assert line == "runs/headless: is half written: no run.json, step 360, loss 4.094"


@pytest.mark.parametrize("left", ["run.json.draft", "checkpoint-60/training.json", USAGE])
def test_what_is_left_of_a_run_is_half_written(good: Path, left: str) -> None:
    file = good / "half" / left
    file.parent.mkdir(parents=True)
    file.write_text("{", encoding="utf-8")
    assert problems(good) == ["runs/half: is half written: no run.json"]


def test_runs_beside_a_stray_checkpoint_are_found(good: Path) -> None:
    (good / "checkpoint-60").mkdir()
    assert problems(good) == ["runs: is half written: no run.json"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"tokens": "a"}, "tokens: got 'a', must be a whole number"),
        (
            {"parameters": {"total": None, "active": 1}},
            "parameters.total: got None, must be a whole number",
        ),
        ({"parameters": None}, "parameters: got None, must be an object"),
        ({"machine": 3}, "machine: got 3, must be an object"),
    ],
)
def test_wrong_types_in_a_result(good: Path, changes: dict[str, object], part: str) -> None:
    write_run(good / "wrong", preset("tiny"), perplexity=60.0)
    result = good / "wrong" / "result.json"
    write_json(result, read_json(result) | changes)
    (line,) = problems(good)
    assert line.startswith("runs/wrong: result.json cannot be read (") and part in line


@pytest.mark.parametrize("method", ["iterdir", "open"])
def test_a_folder_that_may_not_be_read(
    good: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(good / "secret", preset("tiny"), perplexity=60.0)
    usual = getattr(Path, method)

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if "secret" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *arguments, **options)

    monkeypatch.setattr(Path, method, refused)
    refusal = "cannot be read (PermissionError: Permission denied)"
    assert problems(good) == [f"runs/secret: {refusal}"]


def test_settings_of_another_version(good: Path) -> None:
    shutil.copytree(good / "good", good / "other")
    values = read_json(good / "other" / "run.json")
    values["config"]["training"]["hurry"] = True
    write_json(good / "other" / "run.json", values)
    (line,) = problems(good)
    assert line.startswith("runs/other: ") and "hurry" in line


def test_a_perplexity_that_is_no_number(good: Path) -> None:
    write_run(good / "nan", preset("tiny"), perplexity=float("nan"))
    (line,) = problems(good)
    assert line.startswith("runs/nan: ") and "best.perplexity: got None" in line


def test_unreadable_usage_costs_the_map_only(good: Path) -> None:
    (good / "good" / "usage.safetensors").write_bytes(b"not a tensor")
    (line,) = problems(good)
    assert line.startswith("runs/good: usage.safetensors cannot be read")


def test_a_path_that_is_not_there(good: Path) -> None:
    record = read_all([good, good / "nowhere"])
    assert len(record.runs) == 1
    assert record.problems == [f"{good / 'nowhere'}: there is no such file or folder"]


def test_no_run_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"must hold at least one finished run .*is empty"):
        read_all([tmp_path])


def test_a_folder_given_twice_counts_once(good: Path) -> None:
    assert len(read_all([good, good / "good", good]).runs) == 1


def test_paths_of_a_machine_do_not_get_into_a_report(tmp_path: Path) -> None:
    paths = ["data.folder=/somewhere/else/tokens", "data.corpus=/x/y.txt"]
    config = override(preset("tiny"), [*paths, "data.tokenizer=/x/tokenizer.model"])
    write_run(tmp_path / "run", config, perplexity=60.0)
    (run,) = read_all([tmp_path]).runs
    assert run.config["data"]["folder"] == "tokens"
    assert run.config["data"]["corpus"] == "y.txt"
    assert run.config["data"]["tokenizer"] == "tokenizer.model"


def test_curves_are_thinned_and_maps_kept_once(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"air": {"perplexity": [60.0, 61.0]}}, seeds=(42, 43))
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


def test_a_report_json_with_settings_of_another_version(good: Path, tmp_path: Path) -> None:
    write_record(read_all([good]), tmp_path / "report.json")
    values = read_json(tmp_path / "report.json")
    values["runs"][0]["config"]["training"]["hurry"] = True
    write_json(tmp_path / "report.json", values)
    (line,) = read_all([tmp_path / "report.json", good]).problems
    assert line.startswith("report.json: ") and "hurry" in line


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
    (suite / "peer-seed42" / "result.json").unlink()
    record = read_all([suite])
    write_record(record, tmp_path / "report.json")
    assert read_record(tmp_path / "report.json") == record
    again = read_all([tmp_path / "report.json"])
    assert (again.runs, again.problems) == (record.runs, record.problems)
