"""Numbers in hand-written words: each comes from a record, and a wrong name is an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from airmoe import ConfigError
from airmoe.experiments.marked import with_part
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import Run, write_record
from airmoe.experiments.report.records import plan_records, write_records
from airmoe.experiments.report.words import FIELDS, filled, named_runs
from tests.experiments.report_toys import write_suite


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    runs = {
        "air": {
            "perplexity": 20.0,
            "test": 25.0,
            "dead_experts": 0.0125,
            "unlisted_experts": 0.01,
            "overlap": 0.654,
            "flops": 1.7e12,
            "speed": 100.0,
            "memory": 9.54,
        },
        "peer": {"perplexity": 25.0, "test": None, "dead_experts": 0.002, "speed": 50.0},
    }
    write_suite(folder / "runs", "main", runs)
    write_records(plan_records(read_all([folder / "runs"]).runs, folder / "records"))
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    found = named_runs(folder / "records")
    return {name: run for name, run in found.items() if isinstance(run, Run)}


@pytest.mark.parametrize(
    ("placeholder", "text"),
    [
        ("main/air-seed42 perplexity", "20.00"),
        ("main/air-seed42 test perplexity", "25.00"),
        ("main/air-seed42 loss", "2.996"),  # ln 20
        ("main/air-seed42 dead_experts", "1.2 %"),
        ("main/air-seed42 overlap", "0.65"),
        ("main/air-seed42 mass_recall", "0.80"),
        ("main/air-seed42 entropy", "7.90"),
        ("main/air-seed42 seconds", "30.7 min"),  # 184,320 tokens at 100 a second
        ("main/air-seed42 tokens_per_second", "100"),
        ("main/air-seed42 flops", "313.3 PFLOPs"),
        ("main/air-seed42 step", "360"),
        ("main/air-seed42 perplexity %- main/peer-seed42 perplexity", "-20.0 %"),
        ("main/air-seed42 perplexity / main/peer-seed42 perplexity", "0.8"),
        ("main/air-seed42 test perplexity / main/air-seed42 perplexity", "1.25"),
        ("main/peer-seed42 seconds / main/air-seed42 seconds", "2"),
        # Half the way down 2.5 / 2 nats are still to go.
        ("main/air-seed42 perplexity at 180", "69.81"),
        ("main/air-seed42 perplexity at 360", "20.00"),
        ("main/air-seed42 perplexity at 180 %- main/peer-seed42 perplexity at 180", "-20.0 %"),
        ("main/air-seed42 perplexity at 180 / main/air-seed42 perplexity", "3.49"),
        ("main/air-seed42 training overlap at 180", "0.83"),
        ("main/air-seed42 training dead_experts at 30", "1.2 %"),
        ("main/air-seed42\nperplexity  /\n main/peer-seed42 perplexity", "0.8"),  # a wrapped line
    ],
)
def test_numbers(runs: dict[str, Run], placeholder: str, text: str) -> None:
    assert filled(f"It is {{{placeholder}}}, so.", runs, "words.md") == f"It is {text}, so."


def test_every_field_is_written(runs: dict[str, Run]) -> None:
    for field in FIELDS:
        assert filled(f"{{main/air-seed42 {field}}}", runs, "words.md")[0].isdigit(), field


def test_the_page_about_reports_lists_the_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    section = page.partition("## The results of this repository")[2]
    assert all(f"`{field}`" in section for field in FIELDS)


@pytest.mark.parametrize(
    ("placeholder", "parts"),
    [
        ("", ["RUN FIELD", "test perplexity"]),
        ("main/air-seed42", ["RUN FIELD", "tokens_per_second"]),
        (
            "main/air-seed42 preplexity",
            ["main/air-seed42 preplexity", "perplexity, test perplexity"],
        ),
        ("main/aire-seed42 loss", ["main/aire-seed42 loss", "main/air-seed42, main/peer-seed42"]),
        ("main/peer-seed42 test perplexity", ["main/peer-seed42 has no test perplexity"]),
        ("main/air-seed42 loss / main/peer-seed42 overlap", ["equal fields, not loss and overlap"]),
        ("main/air-seed42 loss - main/peer-seed42 loss", ["RUN FIELD", "joined by / or %-"]),
        ("main/air-seed42 loss / main/aire loss", ["must name one of the runs"]),
        ("main/air-seed42 perplexity at 181", ["one of the steps 60, 120, 180, 240, 300, 360"]),
        ("main/aire perplexity at 180", ["must name one of the runs"]),
        ("main/air-seed42 color at 180", ["one of the curves dead_experts, entropy, flops, loss"]),
        ("main/air-seed42 training perplexity at 180", ["the curves dead_experts, entropy, loss"]),
        ("main/air-seed42 perplexity at 1,000", ["RUN FIELD at STEP", "a step is written 1000"]),
        (f"main/air-seed42 perplexity at {'9' * 5000}", ["RUN FIELD at STEP"]),
        (
            "main/air-seed42 overlap at 180 / main/air-seed42 training overlap at 180",
            ["equal fields, not overlap and training overlap"],
        ),
    ],
)
def test_a_wrong_placeholder_is_named(
    runs: dict[str, Run], placeholder: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        filled(f"It is {{{placeholder}}}.", runs, "results/x/words.md")
    assert str(error.value).startswith("results/x/words.md: got ")
    assert f"'{{{placeholder}}}'" in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("sign", ["/", "%-"])
def test_nothing_is_divided_by_nothing(runs: dict[str, Run], sign: str) -> None:
    peer = runs["main/peer-seed42"]
    none_dead = replace(peer, best={**peer.best, "dead_experts": 0.0})
    words = f"{{main/air-seed42 dead_experts {sign} main/peer-seed42 dead_experts}}"
    with pytest.raises(ConfigError, match="the second dead_experts is 0"):
        filled(words, {**runs, "main/peer-seed42": none_dead}, "words.md")


def test_runs_of_a_report_have_the_same_names(folder: Path, tmp_path: Path) -> None:
    write_record(read_all([folder / "runs"]), tmp_path / "report.json")
    (tmp_path / "notes.json").write_text("[]", encoding="utf-8")
    (tmp_path / "report").mkdir()
    write_record(read_all([folder / "runs"]), tmp_path / "report" / "other.json")
    assert list(named_runs(tmp_path)) == ["main/air-seed42", "main/peer-seed42"]
    assert list(named_runs(folder)) == ["records/main/air-seed42", "records/main/peer-seed42"]


def test_a_part_of_a_page_is_replaced_where_it_is_marked() -> None:
    page = "a\n<!-- x: start -->\nold\n<!-- x: end -->\nb\n<!-- y: start -->\n<!-- y: end -->\n"
    changed = with_part("page.md", page, "x", "new")
    assert changed == page.replace("old", "new")
    for missing in ("start", "end"):
        with pytest.raises(ConfigError, match=r"page: got 'page.md', must have the lines"):
            with_part("page.md", page.replace(f"<!-- x: {missing} -->", ""), "x", "new")
