"""`airmoe recall` as a user meets it: file, table, errors; and its file in reports and words."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from airmoe import ConfigError, cli, files
from airmoe.experiments.recall_study import command
from airmoe.experiments.recall_study.command import measure_run
from airmoe.experiments.recall_study.reading import study_from_json
from airmoe.experiments.recall_study.record import RecallStudy
from airmoe.experiments.report import write_report
from airmoe.experiments.report.coarse_stages import study_blocks
from airmoe.experiments.report.document import Paragraph
from airmoe.experiments.report.reading import read_everything
from airmoe.experiments.report.study_records import plan_studies
from airmoe.experiments.report.words import ROW_FIELDS, filled, named_runs
from airmoe.files import read_json, write_json
from airmoe.training.checkpoints import write_manifest
from airmoe.training.run_folder import open_run
from tests.experiments.report_toys import write_run
from tests.training.command import airmoe, assert_one_line
from tests.training.runs import in_process, small_model, small_run, train_here

SIZES = ("--fit-tokens", 2048, "--tokens", 512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of AIR in one and in two layers, of exact routing, and of experts that take tokens."""
    folder = tmp_path_factory.mktemp("recall")
    options = {"num_codewords": 16, "shortlist_size": 16, "probes": 2}
    models = {
        "air": small_model(),
        "layers": small_model(moe_layers=[0, 1], router_options=options),
        "exact": small_model(router="topk", router_options={}),
        "takers": small_model(router_options=options | {"gate": "expert_choice", "probes": 1}),
    }

    def train_all() -> None:
        for name, model in models.items():
            config = small_run(folder, model, steps=2, eval_every=2, eval_blocks=None)
            train_here(config, folder / name)

    assert in_process(train_all) == 0
    return folder


@pytest.fixture(scope="module")
def study(folder: Path) -> RecallStudy:
    return measure_run(folder / "air", fit_tokens=2048, tokens=512)


def test_the_command_writes_and_shows_the_study(
    folder: Path, study: RecallStudy, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "recall.json"
    outcome = airmoe("recall", folder / "air", *SIZES, "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    found = study_from_json(read_json(out))
    assert found == study  # the same numbers, whoever asks
    assert found == study_from_json(study.to_json())
    assert (found.run, found.checkpoint, found.seed) == ("air", "checkpoint-2", 0)
    assert (found.fit_tokens, found.tokens) == (2048, 512)
    assert found.config["data"]["folder"] == "tokens"  # no path of this machine
    (layer,) = found.layers
    assert (layer.layer, layer.num_experts, layer.top_k, layer.shortlist_size) == ("1", 64, 4, 16)
    lines = outcome.out.splitlines()
    assert lines[-1] == f"Written: {out}"
    own = next(line for line in lines if "own codebook" in line)
    shares = [f"{row.overlap:.3f}" for row in layer.rows[:5]]
    assert own.split()[2:9] == ["8", "1", *shares]
    # 64 experts and steps of 256 tokens
    assert layer.rows[1].products_every_step == 8 * (2 + 64 / 256) + 3 * 16


def test_the_file_goes_into_the_run_and_is_replaced(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "air", run)
    for tokens in (64, 96):
        assert airmoe("recall", run, "--fit-tokens", 256, "--tokens", tokens).code == 0
        assert read_json(run / "recall.json")["tokens"] == tokens
    assert not list(run.glob("*.draft"))
    record = read_everything([run])
    assert [one.tokens for one in record.studies] == [96] and len(record.runs) == 1


def test_the_command_measures_as_much_as_the_function() -> None:
    """The command repeats these numbers: importing them would make --help slow."""
    asked = signature(cli.recall).parameters
    assert asked["fit_tokens"].default == command.FIT_TOKENS
    assert asked["tokens"].default == command.TOKENS


def test_a_table_is_shown_even_if_it_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    outcome = airmoe(
        *("recall", folder / "air", "--fit-tokens", 64, "--tokens", 32, "--out", tmp_path / "x"),
        patch=lambda: setattr(files, "write_json", full),
    )
    assert_one_line(outcome, 1, "the disk is full")
    assert "own codebook" in outcome.out and "Written" not in outcome.out


def test_a_wrong_place_is_said_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("began")

    outcome = airmoe(
        *("recall", folder / "air", "--out", "/proc/nothere/x"),
        patch=lambda: monkeypatch.setattr(command, "measure_run", measured),
    )
    assert_one_line(outcome, 2, "out: got '/proc/nothere/x'")


def test_a_terminal_gets_a_bar(folder: Path, tmp_path: Path) -> None:
    outcome = airmoe(
        *("recall", folder / "air", "--fit-tokens", 64, "--tokens", 32, "--out", tmp_path / "x"),
        patch=lambda: os.environ.update({"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}),
    )
    assert outcome.code == 0
    assert "layer 1: text" in outcome.err and "layer 1: coarse stages" in outcome.err


def test_another_text_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tokens", tmp_path / "others")
    found = measure_run(folder / "air", tmp_path / "others", fit_tokens=64, tokens=32)
    assert found.data == "others"
    about = next(block for block in study_blocks([found]) if isinstance(block, Paragraph))
    assert f"of the training text: others, data hash {found.data_sha256[:12]}; " in about.text
    assert about.text.endswith("airmoe recall RUN --data others --fit-tokens 64 --tokens 32")


def test_every_layer_is_measured(folder: Path, tmp_path: Path) -> None:
    found = measure_run(folder / "layers", fit_tokens=512, tokens=256)
    first, second = found.layers
    assert (first.layer, second.layer) == ("0", "1")
    assert [row.name for row in first.rows] == [row.name for row in second.rows]
    assert first.rows != second.rows
    assert first.rows[0].probes == 2  # as the run has it
    write_json(tmp_path / "recall.json", found.to_json())
    names = named_runs(tmp_path)
    assert filled("{recall/own-g16-m16-p2-layer1 overlap}", names, "words.md") == (
        f"{second.rows[1].overlap:.3f}"
    )


def untrained(run: Path) -> None:
    (file,) = run.glob("checkpoint-2/model.safetensors")
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("codebook.initialized"))
    tensors[name] = torch.tensor(False)
    save_file(tensors, file, metadata={"format": "pt"})
    write_manifest(file.parent, 2, open_run(run).sha256())


@pytest.mark.parametrize(
    ("run", "arguments", "parts"),
    [
        ("exact", [], ["run: got ", "must have AIR routers, not TopKRouter", "method air"]),
        ("nothere", [], ["must be a run folder"]),
        ("untrained", [], ["codebook that has seen no token", "must be trained", "Train the run"]),
        ("air", ["--data", "nothere"], ["data: got 'nothere', is not a folder"]),
        ("air", ["--fit-tokens", 0], ["recall.fit_tokens: got 0, must be >= 1"]),
        ("air", ["--tokens", 31], ["recall.tokens: got 31, must be >= 32, one block", "--tokens"]),
        ("air", ["--fit-tokens", 5], ["recall.fit_tokens: got 5", "Raise --fit-tokens"]),
        (
            "layers",
            ["--fit-tokens", 63],
            ["recall.fit_tokens: got 32, must be >= 64, 4 for each of the run's 16 codewords"],
        ),
        ("air", ["--out", "."], ["out: got '.', must be a new file", "--out"]),
        ("air", ["--out", "air/run.json/x/y"], ["'air/run.json/x/y', must be a file that can be"]),
        ("air", ["--out", "/proc/nothere/x"], ["out: got '/proc/nothere/x', must be a file that"]),
        ("air", ["--out", "x" * 300], ["must be a file that can be written (File name too long)"]),
        ("air/run.json", [], ["run: got 'air/run.json', must be a run folder"]),
        ("takers", [], ['gate = "expert_choice"', "must let tokens choose", "token_choice"]),
        ("air", ["--out", "air/run.json"], ["out: got 'air/run.json'", "`airmoe recall` wrote"]),
    ],
)
def test_errors_say_what_to_do(
    folder: Path, tmp_path: Path, run: str, arguments: list[Any], parts: list[str]
) -> None:
    if run == "untrained":
        shutil.copytree(folder / "air", tmp_path / "untrained")
        untrained(tmp_path / "untrained")
        run = str(tmp_path / "untrained")
    before = (folder / "air" / "run.json").read_bytes()
    outcome = airmoe("recall", run, *arguments, cwd=folder)
    assert_one_line(outcome, 2, *parts)
    assert (folder / "air" / "run.json").read_bytes() == before
    assert not (folder / "air" / "recall.json").exists()


@pytest.fixture
def results(tmp_path: Path, folder: Path, study: RecallStudy) -> Path:
    """A folder of results with a run and a study."""
    write_run(tmp_path / "results" / "mine", open_run(folder / "air").config, perplexity=60.0)
    write_json(tmp_path / "results" / "recall.json", study.to_json())
    return tmp_path / "results"


def test_a_report_has_the_table(results: Path, study: RecallStudy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_report([results], tmp_path / "out")
    assert written.problems == []
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    section = text.partition("## What other coarse stages would find: air\n")[2]
    section = section.partition("\n## ")[0]
    assert "airmoe recall RUN --fit-tokens 2048 --tokens 512" in section
    rows = study.layers[0].rows
    head = next(line for line in section.splitlines() if line.startswith("| coarse stage"))
    assert [cell.strip() for cell in head.strip("|").split("|")][3:8] == [
        *("M = 8", "M = 16", "M = 24", "M = 26", "M = 32")
    ]
    used = [row for row in rows if row.stage == "used"]
    shares = " | ".join(f"{row.overlap:.3f}" for row in used)
    unlisted = f"{100 * used[1].unlisted_experts:.1f}"
    cosine = f"{used[1].cosine:.3f}"
    assert "| ranked by use, one batch's tokens (32) | 8 | 1 |" in section  # steps of 256
    assert "Training tokens per cell with 8 codewords: 256 on average." in section
    assert f": text.txt from tokens, data hash {study.data_sha256[:12]}; " in section
    assert f"| ranked by use | 8 | 1 | {shares} | {unlisted} | {cosine} | – | – |" in section
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert '<h2 id="recall-1">' in page and "ranked by use" in page
    again = write_report([tmp_path / "out" / "report.json"], tmp_path / "again")
    assert again.problems == []
    assert (tmp_path / "again" / "report.md").read_text(encoding="utf-8") == text


def test_records_hold_the_study_too(results: Path, study: RecallStudy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = tmp_path / "records"
    for _ in range(2):  # the second time it is replaced
        written = write_report([results], tmp_path / "out", records)
        assert records / "air" / "recall.json" in written.records
    again = read_everything([records])
    assert (again.studies, len(again.runs), again.problems) == ([study], 1, [])


def test_a_study_among_the_records_stays_where_it_is(study: RecallStudy, tmp_path: Path) -> None:
    (tmp_path / "by-hand").mkdir()
    write_json(tmp_path / "by-hand" / "recall.json", study.to_json())
    assert plan_studies([study], tmp_path) == {}
    other = replace(study, tokens=study.tokens + 1)
    assert list(plan_studies([other], tmp_path)) == [tmp_path / study.run / "recall.json"]


def test_a_study_met_twice_counts_once(results: Path, study: RecallStudy) -> None:
    (results / "again").mkdir()
    write_json(results / "again" / "recall.json", study.to_json())
    record = read_everything([results])
    assert record.studies == [study]
    assert record.problems == [
        "results/again/recall.json: the same study of air as one before it: left out"
    ]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"tokens": 64}, None),  # measured again
        ({"run": "other"}, "no study of that run"),
        ({"data_sha256": "00"}, "no study of that run"),
        ({"kind": "notes"}, "no study of that run"),
    ],
)
def test_the_study_of_another_run_is_not_replaced(
    study: RecallStudy, tmp_path: Path, change: dict[str, Any], rule: str | None
) -> None:
    (tmp_path / "air").mkdir()
    write_json(tmp_path / "air" / "recall.json", study.to_json() | change)
    if rule is None:
        assert list(plan_studies([study], tmp_path)) == [tmp_path / "air" / "recall.json"]
    else:
        with pytest.raises(ConfigError, match=f"cannot take the study of air: .*{rule}"):
            plan_studies([study], tmp_path)


def test_two_studies_of_one_name_are_refused(study: RecallStudy, tmp_path: Path) -> None:
    for other in (replace(study, tokens=64), replace(study, data_sha256="00")):
        with pytest.raises(ConfigError, match="something else has that name too"):
            plan_studies([study, other], tmp_path)
    with pytest.raises(ConfigError, match="something else has that name too"):
        plan_studies([study], tmp_path, [tmp_path / "air" / "recall.json"])  # that of a run
    with pytest.raises(ConfigError, match="must be a name"):
        plan_studies([replace(study, run="../air")], tmp_path)


def test_a_study_alone_can_be_reported(results: Path, tmp_path: Path) -> None:
    written = write_report([results / "recall.json"], tmp_path / "out")
    assert (written.runs, written.problems) == (0, [])


def test_words_quote_the_rows(results: Path, study: RecallStudy) -> None:
    runs = named_runs(results)
    own, *_ = (row for row in study.layers[0].rows if row.shortlist_size == 16)
    used = next(row for row in study.layers[0].rows if row.name == "used-g8-m16-p1")
    ratio = used.overlap / own.overlap
    words = (
        "{recall/own-g8-m16-p1 overlap}, {recall/used-g8-m16-p1 overlap / recall/own-g8-m16-p1 "
        "overlap}, "
        "{recall/own-g8-m16-p1 unlisted_experts}"
    )
    unlisted = f"{100 * own.unlisted_experts:.1f} %"
    assert filled(words, runs, "words.md") == f"{own.overlap:.3f}, {ratio:.3g}, {unlisted}"
    with pytest.raises(ConfigError, match="has no perplexity"):
        filled("{recall/own-g8-m16-p1 perplexity}", runs, "words.md")
    with pytest.raises(ConfigError, match=f", .* and {len(runs) - 12} more. Correct"):
        filled("{recall/own overlap}", runs, "words.md")
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    assert all(f"`{field}`" in page for field in ROW_FIELDS)
