"""A recall.json that was cut, changed by hand or written by another airmoe: named, and left out."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from airmoe import ConfigError
from airmoe.experiments import preset
from airmoe.experiments.recall_study.reading import study_from_json
from airmoe.experiments.report.coarse_stages import study_blocks
from airmoe.experiments.report.document import Table
from airmoe.experiments.report.reading import read_everything
from airmoe.files import read_json, write_json
from tests.experiments.report_toys import write_run, write_study

DROPPED = object()  # in the place of a value: the field itself goes
ROW = ("layers", 0, "rows", 0)

DAMAGES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("format",), 7, "recall.format: got 7, must be 1"),
    (("format",), DROPPED, "recall.format: got None, must be 1"),
    (("colour",), "red", "recall.colour: got 'red', is no field of a study"),
    (("tokens",), DROPPED, "recall.tokens: got None, must be given"),
    (("tokens",), "1024", "recall.tokens: got '1024', must be a whole number"),
    (("fit_tokens",), 0, "recall.fit_tokens: got 0, must be >= 1"),
    (("seed",), True, "recall.seed: got True, must be a whole number"),
    (("run",), None, "recall.run: got None, must be a text"),
    (("checkpoint",), ["a"], "recall.checkpoint: got 'list', must be a text"),
    (("data_sha256",), 5, "recall.data_sha256: got 5, must be a text"),
    (("config",), None, "recall.config: got None"),
    (("config", "training"), 3, "recall.config.training: got 3"),
    (("config", "training", "steps"), "x", "recall.config."),
    (("config", "colour"), 3, "colour: got 3, is not an option"),
    (("config", "preset"), DROPPED, "preset: got None, must be given"),
    (("machine",), [], "recall.machine: got 'list', must be an object"),
    (("versions",), "2.0", "recall.versions: got '2.0', must be an object"),
    (("git",), None, "recall.git: got None, must be an object"),
    (("layers",), [], "recall.layers: got 'list', must be a list with something in it"),
    (("layers",), {}, "recall.layers: got 'dict', must be a list"),
    (("layers", 0), "1", "recall.layers[0]: got '1', must be an object"),
    (("layers", 0, "layer"), 1, "recall.layers[0].layer: got 1, must be a text"),
    (("layers", 0, "top_k"), 2.0, "recall.layers[0].top_k: got 2.0, must be a whole number"),
    (("layers", 0, "shortlist_size"), 100, "among the sizes of the rows, [64, 128]"),
    (("layers", 0, "rows"), [], "recall.layers[0].rows: got 'list', must be a list with"),
    (ROW, None, "recall.layers[0].rows[0]: got None, must be an object"),
    ((*ROW, "stage"), "best", "recall.layers[0].rows[0].stage: got 'best', must be one of 'own'"),
    ((*ROW, "stage"), {}, "rows[0].stage: got 'dict', must be a text"),
    ((*ROW, "overlap"), "0.5", "rows[0].overlap: got '0.5', must be a finite number >= 0"),
    ((*ROW, "overlap"), None, "rows[0].overlap: got None"),
    ((*ROW, "overlap"), nan, "rows[0].overlap: got nan"),
    ((*ROW, "overlap"), inf, "rows[0].overlap: got inf"),
    ((*ROW, "overlap"), 5.0, "rows[0].overlap: got 5.0, must be a finite number >= 0 and <= 1"),
    ((*ROW, "unlisted_experts"), -0.5, "rows[0].unlisted_experts: got -0.5"),
    ((*ROW, "cosine"), 1.5, "rows[0].cosine: got 1.5"),
    ((*ROW, "cosine"), DROPPED, "rows[0].cosine: got None, must be given"),
    ((*ROW, "products_every_step"), inf, "rows[0].products_every_step: got inf"),
    ((*ROW, "products_every_16_steps"), -1, "rows[0].products_every_16_steps: got -1"),
    ((*ROW, "num_codewords"), -8, "rows[0].num_codewords: got -8, must be >= 1"),
    ((*ROW, "shortlist_size"), 128, "must have one row of each size, [128]"),  # one twice
    ((*ROW, "probes"), 3, "must have one row of each size, [64, 128], of own-g32-m64-p3"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run and a study."""
    config = preset("tiny")
    write_run(tmp_path / "results" / "run", config, perplexity=60.0)
    write_study(tmp_path / "results" / "recall.json", "run", config)
    return tmp_path / "results"


def damaged(values: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    place: Any = values
    for step in path[:-1]:
        place = place[step]
    if value is DROPPED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return values


@pytest.mark.parametrize(("path", "value", "part"), DAMAGES)
def test_a_damaged_file_is_named_and_the_rest_reported(
    folder: Path, path: tuple[str | int, ...], value: Any, part: str
) -> None:
    write_json(folder / "recall.json", damaged(read_json(folder / "recall.json"), path, value))
    record = read_everything([folder])
    (line,) = record.problems
    assert line.startswith("results/recall.json: recall") and part in line
    assert line.endswith("Measure again: airmoe recall RUN.")
    assert len(record.runs) == 1 and record.studies == []


def test_a_missing_size_is_named(folder: Path) -> None:
    values = read_json(folder / "recall.json")
    rows = values["layers"][0]["rows"]
    rows += [row | {"probes": 2} for row in rows]
    study_from_json(values)
    del rows[-1]
    with pytest.raises(ConfigError, match=r"rows: got '\[64\]', must .* of own-g32-m64-p2"):
        study_from_json(values)


def test_what_is_no_study_is_refused() -> None:
    for values in (None, [], {"kind": "flops"}):
        with pytest.raises(ConfigError, match=r"recall: .* must be an object of the kind 'recall'"):
            study_from_json(values)


def test_columns_have_the_numbers_of_their_size(folder: Path) -> None:
    """In whatever order the rows stand."""
    values = read_json(folder / "recall.json")
    values["layers"][0]["rows"].reverse()
    (table,) = (
        block for block in study_blocks([study_from_json(values)]) if isinstance(block, Table)
    )
    assert table.columns[3:5] == ["M = 64", "M = 128"]
    assert [cell.text for cell in table.rows[0][3:5]] == ["0.500", "0.713"]
