"""One file per run: where they lie, what they refuse, and that they make the report again."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from airmoe import ConfigError
from airmoe.experiments.report.reading import read_all, read_everything
from airmoe.experiments.report.record import Record, Run, read_record, write_record
from airmoe.experiments.report.writing import default_folder, file_of, plan_records
from airmoe.files import read_json, write_json
from airmoe.training import preset
from tests.experiments.report_toys import change_config, write_run, write_suite, write_usage
from tests.training.command import airmoe, assert_one_line


def write_all(runs: Path, folder: Path) -> list[str]:
    """The records of everything under `runs`, without the figures of a report."""
    for path, run in plan_records(read_everything([runs]).runs, folder).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(Record(runs=[run], problems=[]), path)
    return files_in(folder)


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two suites that share AIR, two seeds of it, and a single run."""
    folder = tmp_path / "runs"
    shared = {"air": {"perplexity": [61.0, 62.0], "test": 70.0}}
    write_suite(folder / "a", "main", shared | {"peer": [64.0, 65.0]}, seeds=(1, 2))
    write_suite(folder / "b", "ablations", shared | {"static": 70.0}, seeds=(1,))
    write_run(folder / "mine", preset("tiny", "coarse"), perplexity=66.0)
    for seed in (1, 2):
        write_usage(folder / "a" / f"air-seed{seed}", np.arange(4096) + seed)
    return folder


def test_a_run_of_two_suites_has_two_files(runs: Path, tmp_path: Path) -> None:
    assert write_all(runs, tmp_path / "records") == [
        "ablations/air-seed1.json",
        "ablations/static-seed1.json",
        "main/air-seed1.json",
        "main/air-seed2.json",
        "main/peer-seed1.json",
        "main/peer-seed2.json",
        "single/mine.json",
    ]
    values = read_json(tmp_path / "records" / "main" / "air-seed2.json")
    assert (values["format"], values["problems"], len(values["runs"])) == (2, [], 1)
    assert values["runs"][0]["best"]["perplexity"] == pytest.approx(62.0)
    assert values["runs"][0]["test"] == {"step": 360, "perplexity": 70.0}


def test_every_file_has_its_map(runs: Path, tmp_path: Path) -> None:
    write_all(runs, tmp_path / "records")
    maps = []
    for seed in (1, 2):
        (run,) = read_record(tmp_path / "records" / "main" / f"air-seed{seed}.json").runs
        assert run.usage is not None and run.usage.levels is not None
        maps.append(run.usage.levels)
    assert maps[0] != maps[1]
    one, other = (
        run for run in read_all([tmp_path / "records"]).runs if run.usage and run.suite == "main"
    )
    assert one.usage is not None and one.usage.levels == maps[0]
    assert other.usage is not None and other.usage.levels is None


def test_a_folder_of_records_is_the_runs_themselves(runs: Path, tmp_path: Path) -> None:
    write_all(runs, tmp_path / "results" / "toy")
    found, again = read_all([runs]), read_all([tmp_path / "results"])

    def by_file(runs: list[Run]) -> dict[str, Run]:
        return {str(file_of(run)): run for run in runs}

    assert again.problems == []
    assert by_file(again.runs) == by_file(found.runs) and len(again.runs) == 7


def test_the_same_run_is_replaced(runs: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    before = write_all(runs, records)
    result = runs / "mine" / "result.json"
    values = read_json(result)
    write_json(result, values | {"best": values["best"] | {"perplexity": 65.5}})
    assert write_all(runs, records) == before
    (run,) = read_record(records / "single" / "mine.json").runs
    assert run.best["perplexity"] == 65.5


def test_another_run_of_that_name_is_refused(runs: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    write_all(runs, records)
    shutil.rmtree(records / "main")
    before = {name: (records / name).read_bytes() for name in files_in(records)}
    change_config(runs / "mine", "training", learning_rate=0.5)
    outcome = airmoe("report", runs, "--out", tmp_path / "out", "--records", records)
    assert_one_line(outcome, 2, "single/mine.json", "cannot take runs/mine", "of another run")
    assert {name: (records / name).read_bytes() for name in files_in(records)} == before
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_record_is_not_overwritten(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "records" / "single" / "mine.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"mine": true}', encoding="utf-8")
    with pytest.raises(ConfigError, match="the file there is of another run"):
        write_all(runs, tmp_path / "records")
    assert file.read_text(encoding="utf-8") == '{"mine": true}'


def test_two_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder, rate in (("x", 0.002), ("y", 0.003)):
        write_run(tmp_path / "runs" / folder / "air", [f"training.learning_rate={rate}"])
    with pytest.raises(ConfigError, match=r"cannot take runs/y/air: runs/x/air has that name too"):
        write_all(tmp_path / "runs", tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_a_suite_cannot_lead_out_of_the_folder(runs: Path, tmp_path: Path) -> None:
    suite = runs / "a" / "suite.json"
    write_json(suite, read_json(suite) | {"suite": "../elsewhere"})
    with pytest.raises(ConfigError, match="must be a name"):
        write_all(runs, tmp_path / "records")


def test_other_json_files_are_named(good: Path) -> None:
    for name, text in {"notes": '{"a": 1}', "list": "[]", "torn": '{"format"'}.items():
        (good / f"{name}.json").write_text(text, encoding="utf-8")
    (good / ".hidden.json").write_text("{", encoding="utf-8")
    record = read_all([good])
    assert [run.name for run in record.runs] == ["runs/good"]
    assert [line.partition(",")[0] for line in record.problems] == [
        "runs/list.json: report: got 'list.json'",
        "runs/notes.json: report: got 'notes.json'",
        "runs/torn.json: report: got 'torn.json'",
    ]


def test_a_record_met_twice_counts_once(runs: Path, tmp_path: Path) -> None:
    write_all(runs, tmp_path / "records")
    file = tmp_path / "records" / "single" / "mine.json"
    assert len(read_all([file, tmp_path / "records", file]).runs) == 7


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    suite = tmp_path / "runs" / "suite"  # of a kind with a single figure
    write_suite(suite, "codebook", {"g32-m128": {"perplexity": 66.0}})
    records, out = tmp_path / "records", tmp_path / "runs" / "out"
    out.mkdir()
    write_record(read_all([suite]), out / "report.json")  # to be replaced
    outcome = airmoe("report", tmp_path / "runs", "--out", out, "--records", records)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "1 runs reported:"
    assert lines[-1] == f"  {records / 'codebook' / 'g32-m128-seed42.json'}"


def test_a_report_is_never_one_of_the_records(runs: Path, tmp_path: Path) -> None:
    write_all(runs, tmp_path)
    file = tmp_path / "single" / "mine.json"
    assert default_folder([file]) == tmp_path / "single" / "report"  # which is not read
    file.rename(file.with_name("report.json"))
    assert default_folder([file.with_name("report.json")]) == tmp_path / "single"
