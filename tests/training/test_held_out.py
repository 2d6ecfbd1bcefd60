"""A text with a test split: the best checkpoint is measured on it once, at the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from airmoe.data import PrepareConfig, open_prepared, prepare
from airmoe.files import read_json
from airmoe.training import RunConfig, evaluate, override
from airmoe.training.checkpoints import write_manifest
from airmoe.training.run_folder import open_run
from airmoe.training.trained import load_trained
from tests.training.runs import resume_here, small_run, train_here


def with_test_split(folder: Path) -> RunConfig:
    config = small_run(folder, steps=12, eval_every=4)
    splits = folder / "splits"
    splits.mkdir()
    documents = (folder / "text.txt").read_text(encoding="utf-8").split("\n\n")
    for name, first, last in (("train", 0, 200), ("valid", 200, 220), ("test", 220, 240)):
        (splits / f"{name}.txt").write_text("\n\n".join(documents[first:last]), encoding="utf-8")
    prepare(PrepareConfig(corpus=str(splits), tokenizer="bytes", out=str(folder / "tokens3")))
    return override(config, [f"data.corpus={splits}", f"data.folder={folder}/tokens3"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held_out")
    train_here(with_test_split(folder), folder / "run")
    return folder / "run"


def test_the_best_checkpoint_is_measured(run: Path) -> None:
    found = read_json(run / "result.json")["test"]
    trained = load_trained(run)
    blocks = open_prepared(run.parent / "tokens3").blocks("test", 32)
    expected = evaluate(trained.model, blocks, batch_size=4, quality_tokens=16)
    assert found == {
        "step": read_json(run / "result.json")["best"]["step"],
        "tokens": len(blocks) * 31,
        **expected.numbers(),
    }
    assert found["perplexity"] != read_json(run / "result.json")["best"]["perplexity"]


def test_it_is_the_best_and_not_the_last(run: Path, tmp_path: Path) -> None:
    """Killed before the measurement, which is made up for, with another checkpoint the best."""
    run = shutil.copytree(run, tmp_path / "run")
    best = load_trained(run).checkpoint
    state = best.parent / "checkpoint-12" / "training.json"
    values = state.read_text(encoding="utf-8")
    before = read_json(run / "test.json")
    earlier = "8" if best.name == "checkpoint-12" else "12"
    step = f'"best_step": {best.name.partition("-")[2]}'
    state.write_text(values.replace(step, f'"best_step": {earlier}'), encoding="utf-8")
    write_manifest(state.parent, open_run(run).sha256())
    (run / "test.json").unlink()
    (run / "result.json").unlink()
    resume_here(run)
    assert read_json(run / "test.json")["step"] == int(earlier)
    assert read_json(run / "test.json")["loss"] != before["loss"]


def test_without_a_test_split_there_is_none(finished: Path) -> None:
    assert read_json(finished / "result.json")["test"] is None
    assert not (finished / "test.json").exists()


def test_one_too_short_for_a_block_is_left_alone(tmp_path: Path) -> None:
    config = with_test_split(tmp_path)
    (tmp_path / "splits" / "test.txt").write_text("short", encoding="utf-8")
    out = str(tmp_path / "short")
    prepare(PrepareConfig(corpus=config.data.corpus, tokenizer="bytes", out=out))
    short = ["training.steps=2", "training.eval_every=2", f"data.folder={out}"]
    train_here(override(config, short), tmp_path / "run")
    assert read_json(tmp_path / "run" / "result.json")["test"] is None
