"""Bad input, line by line: each is named, and the rest is still reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from airmoe import ConfigError
from airmoe.experiments import preset
from airmoe.experiments.report.fair import fair_groups
from airmoe.experiments.report.groups import Grouped, group_runs
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import Record, read_record, write_record
from airmoe.files import read_json, write_json
from airmoe.training import override
from tests.experiments.report_toys import write_run, write_suite, write_usage


def grouped(record: Record) -> Grouped:
    return fair_groups(group_runs(record.runs))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder with one run that is fine."""
    folder = tmp_path / "runs"
    write_run(folder / "good", preset("tiny"), perplexity=60.0)
    return folder


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
    assert line.startswith("runs/new: run.format: got 7, must be 1, the format of this airmoe")


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
    assert line.startswith("runs/headless: run: got") and "must be a run folder" in line


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
    assert line.startswith("runs/nan: ") and "no number" in line


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


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "suites" / "main"
    runs = {name: {"perplexity": 60.0} for name in ("air", "peer", "hierarchical", "coarse")}
    write_suite(folder, "main", runs)
    return folder


def test_crashed_runs_and_runs_to_come(suite: Path) -> None:
    crash = {"message": "the disk is full", "code": 1}
    write_json(suite / "peer-seed42.failed.json", crash)
    shutil.rmtree(suite / "coarse-seed42")
    shutil.copytree(suite / "air-seed42", suite / "air-old")
    record = read_all([suite.parent])
    assert [run.variant for run in record.runs] == ["air", "hierarchical"]
    assert [run.suite for run in record.runs] == ["main", "main"]
    assert record.problems == [
        "suites/main/peer-seed42: crashed, step 360, loss 4.094: the disk is full (exit code 1)",
        "suites/main/coarse-seed42: has not begun",
        "suites/main/air-old: is not in suite.json: left out",
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"format": 2}', "has format 2, this airmoe reads 1"),
        ("{", "cannot be read (JSONDecodeError"),
        ('{"format": 1}', "cannot be read (KeyError: 'suite')"),
    ],
)
def test_a_bad_suite_json(suite: Path, good: Path, text: str, part: str) -> None:
    (suite / "suite.json").write_text(text, encoding="utf-8")
    record = read_all([suite, good])
    assert [run.name for run in record.runs] == ["runs/good"]
    (line,) = record.problems
    assert line.startswith("main/suite.json: ") and part in line


def test_other_text_is_left_out(suite: Path) -> None:
    run = suite / "peer-seed42" / "run.json"
    write_json(run, read_json(run) | {"data_sha256": "cd" * 32})
    found = grouped(read_all([suite]))
    assert list(found.groups[0].variants) == ["air", "hierarchical", "coarse"]
    assert found.left_out == [
        "main/peer-seed42: other text than the rest of its group (data hash cdcdcdcdcdcd, not "
        "abababababab): left out"
    ]


def change_config(run: Path, section: str, **options: object) -> None:
    for name in ("run.json", "result.json"):
        values = read_json(run / name)
        values["config"][section] |= options
        write_json(run / name, values)


def test_the_variant_that_alone_is_unfair_is_left_out(suite: Path) -> None:
    change_config(suite / "peer-seed42", "training", learning_rate=1.0)
    found = grouped(read_all([suite]))
    assert list(found.groups[0].variants) == ["air", "hierarchical", "coarse"]
    (line,) = found.left_out
    assert "peer is left out" in line
    assert "training.learning_rate 0.002 in air, hierarchical, coarse; 1.0 in peer" in line
    assert found.notes == []


def test_where_no_one_is_to_blame_it_is_a_note(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {name: {"perplexity": 60.0} for name in ("air", "peer")})
    change_config(tmp_path / "s" / "peer-seed42", "training", warmup=0.5)
    found = grouped(read_all([tmp_path]))
    assert list(found.groups[0].variants) == ["air", "peer"]
    assert found.left_out == []
    (line,) = found.notes
    assert "training.warmup 0.05 in air; 0.5 in peer" in line


def test_seeds_of_a_variant_share_their_settings(tmp_path: Path) -> None:
    runs = {"air": {"perplexity": [60.0, 61.0]}, "peer": {"perplexity": [62.0, 63.0]}}
    write_suite(tmp_path / "s", "main", runs, seeds=(42, 43))
    change_config(tmp_path / "s" / "air-seed43", "model", num_experts_per_tok=32)
    found = grouped(read_all([tmp_path]))
    (line,) = found.left_out
    assert line.endswith(
        "s/air-seed43: other settings than "
        f"{tmp_path.name}/s/air-seed42 (model.num_experts_per_tok): left out"
    )
    (note,) = found.notes
    assert note.endswith("not every variant has every seed (42 of air; 42, 43 of peer)")


def test_the_same_run_in_two_folders_is_no_second_seed(suite: Path, tmp_path: Path) -> None:
    shutil.copytree(suite, tmp_path / "again")
    found = grouped(read_all([suite, tmp_path / "again"]))
    assert len(found.groups[0].runs) == 4
    first = found.left_out[0]
    assert first == "again/air-seed42: the same variant and seed as main/air-seed42: left out"


def test_two_suites_with_other_seeds_are_one_group(tmp_path: Path) -> None:
    for seed in (42, 43):
        write_suite(tmp_path / str(seed), "main", {"air": {"perplexity": 60.0}}, seeds=(seed,))
    (group,) = grouped(read_all([tmp_path])).groups
    assert [run.seed for run in group.variants["air"]] == [42, 43]


def test_single_runs_of_one_method_get_their_own_rows(good: Path) -> None:
    config = override(preset("tiny"), ["training.learning_rate=0.001"])
    write_run(good / "slow", config, perplexity=70.0)
    (group,) = grouped(read_all([good])).groups
    assert list(group.variants) == ["air", "air (slow)"]


def test_times_of_two_machines(suite: Path) -> None:
    result = suite / "peer-seed42" / "result.json"
    write_json(result, read_json(result) | {"machine": {"device": "H200", "count": 1}})
    (note,) = grouped(read_all([suite])).notes
    assert note.endswith("different machines (1 x H200; 2 x x86_64): times do not compare")


def test_paths_of_a_machine_do_not_get_into_a_report(tmp_path: Path) -> None:
    config = override(
        preset("tiny"), ["data.folder=/somewhere/else/tokens", "data.corpus=/x/y.txt"]
    )
    write_run(tmp_path / "run", config, perplexity=60.0)
    (run,) = read_all([tmp_path]).runs
    assert run.config["data"]["folder"] == "tokens"
    assert run.config["data"]["corpus"] == "y.txt"


def test_curves_are_thinned_and_maps_kept_once(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"air": {"perplexity": [60.0, 61.0]}}, seeds=(42, 43))
    for seed in (42, 43):
        run = tmp_path / "s" / f"air-seed{seed}"
        write_usage(run, np.arange(4096) + 1, np.arange(32))
        values = read_json(run / "result.json")
        line = next(line for line in values["log"] if line["kind"] == "train")
        values["log"] = [line | {"step": step} for step in range(1000)]
        write_json(run / "result.json", values)
    one, other = read_all([tmp_path]).runs
    steps = one.training["step"]
    assert len(steps) == 200 and (steps[0], steps[-1]) == (0, 999)
    assert one.usage is not None and one.usage.experts.levels is not None
    assert other.usage is not None and other.usage.experts.levels is None
    assert other.usage.experts.structure == one.usage.experts.structure


def test_a_record_comes_back_as_it_was(suite: Path, tmp_path: Path) -> None:
    write_usage(suite / "air-seed42", np.arange(4096), np.arange(32))
    (suite / "peer-seed42" / "result.json").unlink()
    record = read_all([suite])
    write_record(record, tmp_path / "report.json")
    assert read_record(tmp_path / "report.json") == record
    again = read_all([tmp_path / "report.json"])
    assert (again.runs, again.problems) == (record.runs, record.problems)


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
        ('{"format": 3}', "report.format: got 3, must be 1"),
        ('{"format": 1, "runs": [{}], "problems": []}', "lacks or misnames a field"),
    ],
)
def test_a_bad_report_json(good: Path, tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    record = read_all([tmp_path / "report.json", good])
    assert len(record.runs) == 1
    (line,) = record.problems
    assert line.startswith("report.json: ") and part in line
