"""How a report names the text of a run: by what its prepared folder says, not by what was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.paper import beside_paper
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.tables import settings_table
from airmoe.training import override, preset
from tests.experiments.report_toys import grouped, write_run, write_suite

RULE = "validation if the first 8 bytes of sha256(text) / 2^64 < 0.1"
RECIPE = {
    "corpus": "novels",
    "corpus_sha256": "cd" * 32,
    "tokenizer": "bpe:512",
    "split_rule": RULE,
    "text_field": "text",
    "max_tokens": 5000,
}
FOLDER = ["data.folder=data/texts"]


def write(folder: Path, changes: list[str], recipe: dict[str, Any] | None = RECIPE) -> None:
    about = {} if recipe is None else {"data_recipe": recipe}
    write_run(folder, override(preset("tiny"), changes), about=about)


def only_group(*folders: Path) -> Group:
    record = read_all(folders)
    assert record.problems == []
    found = grouped(record)
    assert found.left_out == found.notes == []
    (group,) = found.groups
    return group


def shown_settings(group: Group) -> dict[str, str]:
    """The table of the settings that all share."""
    return {name.text: value.text for name, value in settings_table(group).rows}


@pytest.mark.parametrize(
    ("changes", "recipe", "title"),
    [
        (FOLDER, RECIPE, "novels from texts"),
        ([*FOLDER, "data.corpus=poems/"], RECIPE, "novels from texts"),
        (["data.folder=data/novels"], RECIPE, "novels"),
        ([], RECIPE | {"corpus": "python-docs"}, "python-docs"),
        ([], None, "python-docs"),
    ],
)
def test_the_name_of_a_text(
    tmp_path: Path, changes: list[str], recipe: dict[str, Any] | None, title: str
) -> None:
    write(tmp_path / "run", changes, recipe)
    assert only_group(tmp_path).title == f"Single runs: tiny, {title}, 184,320 tokens"


def test_settings_are_those_the_text_was_prepared_with(tmp_path: Path) -> None:
    write(tmp_path / "run", FOLDER)
    shown = shown_settings(only_group(tmp_path))
    assert shown["text.corpus"] == "novels"
    assert shown["text.split_rule"] == RULE
    assert shown["text.max_tokens"] == "5000"
    assert shown["data.folder"] == "data/texts"
    assert not {"data.corpus", "data.validation", "data.validation_fraction"} & set(shown)


def test_settings_of_a_text_that_the_run_asked_for_are_its_own(tmp_path: Path) -> None:
    write(tmp_path / "run", [], RECIPE | {"corpus": "python-docs"})
    shown = shown_settings(only_group(tmp_path))
    assert (shown["data.corpus"], shown["data.validation_fraction"]) == ("python-docs", "0.05")
    assert "text.split_rule" not in shown


def test_a_corpus_that_had_no_say_separates_no_runs(tmp_path: Path) -> None:
    write(tmp_path / "a", FOLDER)
    write(tmp_path / "b", [*FOLDER, "data.corpus=novels/", "training.seed=43"])
    group = only_group(tmp_path)
    assert {name: len(runs) for name, runs in group.variants.items()} == {"air": 2}


def test_the_same_run_with_another_corpus_is_no_second_seed(tmp_path: Path) -> None:
    write(tmp_path / "a", FOLDER)
    write(tmp_path / "b", [*FOLDER, "data.corpus=novels/"])
    found = grouped(read_all([tmp_path]))
    (line,) = found.left_out
    assert line.endswith(
        "b: the same variant and seed as " + found.groups[0].runs[0].name + ": left out"
    )


def test_a_corpus_that_had_no_say_is_not_unfair(tmp_path: Path) -> None:
    runs = {
        name: {"perplexity": 60.0, "about": {"data_recipe": RECIPE}} for name in ("air", "peer")
    }
    write_suite(tmp_path / "one", "main", runs, overrides=FOLDER)
    others = {"coarse": runs["air"]}
    write_suite(tmp_path / "two", "main", others, overrides=[*FOLDER, "data.corpus=novels/"])
    assert list(only_group(tmp_path).variants) == ["air", "peer", "coarse"]


def test_beside_the_paper_too(tmp_path: Path) -> None:
    about = {"about": {"data_recipe": RECIPE}}
    write_suite(
        tmp_path / "s",
        "main",
        {"air": {"perplexity": 30.0, **about}},
        name="small",
        overrides=FOLDER,
    )
    found = beside_paper(only_group(tmp_path))
    assert found is not None
    assert found.differences[0] == (
        "text: novels, data.folder=data/texts, text.max_tokens=5000 (data hash abababababab); "
        "the paper's is wikitext103"
    )
    assert not any("validation_fraction" in item for item in found.differences)
