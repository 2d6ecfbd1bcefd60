"""A record with a garbled field: the run is left out with a line that names it, never a traceback.

What is not left out is reported: tables, figures and all files.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airmoe import ConfigError
from airmoe.experiments.report.contents import make_report
from airmoe.experiments.report.reading import read_all, read_everything
from airmoe.experiments.report.record import read_record, write_record
from airmoe.experiments.report.writing import write_report
from airmoe.files import read_json, write_json
from airmoe.training import RunConfig, preset
from tests.experiments.report_toys import write_run, write_suite, write_usage

DROPPED = object()  # in the place of a value: the field itself goes
DIGITS = 10**400
Place = tuple[str | int, ...]

NAMED: list[tuple[Place, Any, str]] = [
    (("machine",), [], "machine: got 'list', must be an object"),
    (("machine", "device"), float("inf"), "machine.device: got inf, must be a finite number"),
    (("versions",), None, "versions: got None, must be an object"),
    (("versions", "torch"), 2, "versions.torch: got 2, must be a text"),
    (("git", "commit"), "\ud800", "git.commit: got '\\ud800', must be a text that a file can hold"),
    (("name",), 3, "name: got 3, must be a text"),
    (("suite",), ["main"], "suite: got 'list', must be a text"),
    (("variant",), None, "variant: got None, must be a text"),
    (("seed",), "42", "seed: got '42', must be a whole number"),
    (("data_sha256",), 5, "data_sha256: got 5, must be a text"),
    (("training",), {"a": 1}, "training.a: got 1, must be a list"),
    (("training",), {"a": [1]}, "training.step: got None, must be given"),
    (("training", "overlap"), -1, "training.overlap: got -1, must be a list"),
    (("training", "overlap", 3), "x", "training.overlap[3]: got 'x', must be a finite number"),
    (("training", "overlap", 3), DIGITS, "training.overlap[3]: got '1000"),
    (("training", "overlap"), [0.5], "training.overlap: got 1, must be as many as steps, 12"),
    (("evaluations", "loss", 0), float("nan"), "evaluations.loss[0]: got nan"),
    (("evaluations", "perplexity", 0), 0, "evaluations.perplexity[0]: got 0, must be above 0"),
    (("best", "perplexity"), None, "best.perplexity: got None, must be a finite number"),
    (("best", "flops"), DIGITS, "best.flops: got '1000"),
    (("parameters", "total"), DROPPED, "parameters.total: got None, must be given"),
    (("tokens",), DIGITS, "tokens: got '1000"),
    (("tokens",), 1.5, "tokens: got 1.5, must be a whole number"),
    (("peak_memory_gib",), "9", "peak_memory_gib: got '9', must be a finite number"),
    (("test",), [1], "test: got 'list', must be an object"),
    (("usage",), 1, "usage: got 1, must be an object"),
    (("usage", "levels"), [1], "usage.levels: got 'list', must be a text"),
    (("usage", "levels"), "AAAA", "usage.levels: got 'AAAA', must be a map of"),
    (("usage", "levels"), "ä", "usage.levels: got 'ä', must be a map of"),
    (("usage", "shape", 0), 65, "must be a map of its shape"),
    (("usage", "layer"), DROPPED, "usage.layer: got None, must be given"),
    (("usage", "shape"), [4096], "usage.shape: got 'list', must be a list of 2"),
    (("usage", "steps", 1), float("inf"), "usage.steps[1]: got inf, must be a"),
    (("usage", "steps", 1), 0, "usage.steps[1]: got 0, must be >= 1"),
    (("config", "preset"), ["a"], "config.preset: got 'list', must be a non-empty text"),
    (("config", "training", "seed"), DIGITS, "config.training.seed: got '1000"),
    (("config", "data", "folder"), DROPPED, "config.data.folder: got None, must be given"),
    (("config", "training", "learning_rate"), DIGITS, "config.training.learning_rate: got '1000"),
    (("config", "model", "num_experts"), [], "config.model.num_experts: got 'list'"),
    (("config", "data", "folder"), 3, "config.data.folder: got 3, must be a non-empty text"),
    (("recipe",), {"corpus": 3}, "recipe.corpus: got 3, must be a text"),
    (("colour",), "red", "colour: got 'red', is not a known field"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record with everything that a run can have, and the folder of another run."""
    folder = tmp_path_factory.mktemp("folder")
    about = {"data_recipe": {"corpus": "novels", "split_rule": "official", "max_tokens": None}}
    runs = {"air": {"perplexity": 30.0, "test": 40.0, "memory": 9.5, "about": about}}
    more = {"staleness": 0.1, "unlisted_experts": 0.2, "codeword_perplexity": 20.0}
    write_suite(folder / "suite", "main", {"air": runs["air"] | more}, name="small")
    write_usage(folder / "suite" / "air-seed42", np.arange(4096))
    write_record(read_everything([folder / "suite"]), folder / "record.json")
    write_run(folder / "good" / "run")
    return folder


def garbled(values: Any, place: Place, value: Any) -> Any:
    """A copy of the record with one value of its run changed."""
    values = copy.deepcopy(values)
    inside = values["runs"][0]
    for step in place[:-1]:
        inside = inside[step]
    if value is DROPPED:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return values


@pytest.mark.parametrize(("place", "value", "part"), NAMED, ids=range(len(NAMED)))
def test_the_field_is_named_and_the_rest_reported(
    folder: Path, tmp_path: Path, place: Place, value: Any, part: str
) -> None:
    values = read_json(folder / "record.json")
    both = [*garbled(values, place, value)["runs"], *values["runs"]]
    write_json(tmp_path / "garbled.json", values | {"runs": both})
    record = read_all([tmp_path / "garbled.json", folder / "good"])
    assert [run.name for run in record.runs] == ["suite/air-seed42", "good/run"]
    (line,) = record.problems
    assert line.startswith("garbled.json: runs[0].") and part in line and len(line) < 300
    assert line.endswith(". The run is left out: write its record again.")


def places(values: Any, here: Place = ()) -> Iterator[Place]:
    """All fields, of lists the first."""
    items = values.items() if isinstance(values, dict) else enumerate(values[:1])
    for name, one in items:
        yield (*here, name)
        if isinstance(one, dict | list):
            yield from places(one, (*here, name))


ODD = st.sampled_from(
    [
        *(DROPPED, None, True, [], {}, [1], ["a"], [[]], {"a": 1}, {"step": [1, 2]}, "", "a", "1"),
        *("\0", "\ud800", "$", "../..", "q0", "q8", "g1-m1", f"q{'9' * 50}", "x" * 400, "main"),
        *("granularity", "exact", "air", "topk", "tiny", "bpe:2048", "AAAA", "eJwDAAAAAAE=", "\n"),
        *(0, -1, 1, 2, 1.5, 1e-300, 1e300, -1e300, DIGITS, -DIGITS, 2**62, 2**63),
        *(float("inf"), float("-inf"), float("nan")),
    ]
)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_field_brings_a_report_down(folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    pytest.importorskip("matplotlib")
    values = read_json(folder / "record.json")
    place = data.draw(st.sampled_from(list(places(values["runs"][0]))))
    file = tmp_path / "garbled.json"
    write_json(file, garbled(values, place, data.draw(ODD)))
    record = read_all([file, folder / "good"])
    if len(record.runs) == 1:
        (line,) = record.problems
        assert line.startswith("garbled.json: runs[0]") and "left out" in line
        return
    report = make_report(record)  # figures too, but not their files
    assert report.sections and report.drawings
    write_record(record, file)
    assert read_record(file).runs == record.runs


@pytest.mark.parametrize(
    "odd",
    [
        {
            ("config", "preset"): "x" * 400,
            ("training", "overlap", 0): -1e99,
            ("evaluations", "tokens", 0): None,
            ("best", "loss"): -1e99,
        },
        {("suite",): "granularity", ("variant",): "q0"},
        {("suite",): "codebook", ("variant",): "g1-m1"},
    ],
    ids=["numbers", "granularity", "codebook"],
)
def test_odd_but_not_garbled_is_written(
    folder: Path, tmp_path: Path, odd: dict[Place, Any]
) -> None:
    pytest.importorskip("matplotlib")
    values = read_json(folder / "record.json")
    for place, value in odd.items():
        values = garbled(values, place, value)
    write_json(tmp_path / "odd.json", values)
    assert write_report([tmp_path / "odd.json"], tmp_path / "out").runs == 1


@pytest.mark.parametrize("part", ["runs", "problems"])
def test_lists_are_lists(good: Path, tmp_path: Path, part: str) -> None:
    file = tmp_path / "report.json"
    write_record(read_all([good]), file)
    write_json(file, read_json(file) | {part: "none"})
    (line,) = read_all([file, good]).problems
    assert line.startswith("report.json: ") and f"{part} must be a list" in line


def test_a_file_nested_without_end(good: Path, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    (line,) = read_all([tmp_path / "deep.json", good]).problems
    assert line.startswith("deep.json: report: got 'deep.json', must be a report.json")


@pytest.mark.parametrize(
    ("file", "changes", "part"),
    [
        ("result.json", {"machine": {"device": DIGITS}}, "run.machine.device"),
        ("result.json", {"versions": {"torch": 2}}, "run.versions.torch"),
        ("result.json", {"tokens": DIGITS}, "run.tokens"),
        ("run.json", {"data_sha256": 5}, "run.data_sha256"),
    ],
)
def test_run_folders_keep_to_the_same(
    good: Path, file: str, changes: dict[str, Any], part: str
) -> None:
    """Otherwise a report could be written, and not read again."""
    write_run(good / "odd")
    write_json(good / "odd" / file, read_json(good / "odd" / file) | changes)
    record = read_all([good])
    assert [run.name for run in record.runs] == ["runs/good"]
    (line,) = record.problems
    assert line.startswith("runs/odd: result.json cannot be read (") and part in line


def test_numbers_of_400_digits_in_a_log(good: Path) -> None:
    result = good / "good" / "result.json"
    values = read_json(result)
    values["log"][0]["overlap"] = DIGITS
    result.write_text(json.dumps(values), encoding="utf-8")
    (run,) = read_all([good]).runs
    assert run.training["overlap"][0] is None


@pytest.mark.parametrize("name", [["a"], "", None, 3])
def test_a_preset_is_a_text(name: Any) -> None:
    values = preset("tiny").to_json() | {"preset": name}
    with pytest.raises(ConfigError, match=r"^preset: got .*, must be a non-empty text"):
        RunConfig.from_json(values)
