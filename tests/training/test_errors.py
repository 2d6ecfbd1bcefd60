"""What a user sees when a run cannot start: one line, exit code 2, and no folder left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe.data import PrepareConfig, prepare
from airmoe.errors import ConfigError
from airmoe.training import override, preset
from airmoe.training import run as run_module
from airmoe.training.config import SECTIONS
from airmoe.training.run_folder import claimed, open_run
from tests.training.command import airmoe, airmoe_train, assert_one_line
from tests.training.runs import in_process, kill_self, small_run

# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        ("huge", ["preset: got 'huge'", "tiny, small, medium"]),
        ("tiny --method magic", ["method: got 'magic'", "air, exact, peer"]),
        ("", ["preset: got None", "airmoe train tiny"]),
        ("tiny training.stepz=5", ["training.stepz: got 5", "Did you mean 'steps'?"]),
        ("tiny training.precision=fp16", ["training.precision: got 'fp16'", "needs a GPU"]),
        ("tiny training.sharding=fsdp2", ["training.sharding", "torchrun"]),
    ],
)
def test_wrong_settings(typed: str, parts: list[str], tmp_path: Path) -> None:
    if "fp16" in typed and torch.cuda.is_available():
        pytest.skip("this machine can")
    outcome = airmoe("train", *typed.split(), "--run", tmp_path / "run", cwd=tmp_path)
    assert_one_line(outcome, 2, *parts)
    assert list(tmp_path.iterdir()) == []  # neither run nor data: it was said before any work


ODD_VALUES = ("abc", "[]", "{}", "-1", "0", "null", "true", "1.5", "NaN", "1e400", '""', "[1]")


@pytest.mark.parametrize("section", SECTIONS)
def test_no_value_of_any_option_makes_a_traceback(section: str) -> None:
    """A wrong value is a `ConfigError` of one line, whatever it is; nothing else gets out."""
    start, messages = preset("tiny"), {}
    for name in SECTIONS[section]:
        for value in ODD_VALUES:
            assignment = f"{section}.{name}={value}"
            try:
                override(start, [assignment])
            except ConfigError as error:
                messages[assignment] = str(error)
    assert len(messages) > len(SECTIONS[section])
    assert [text for text in messages.values() if "\n" in text] == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.num_experts=1000000000000"], ["GiB", "model.num_experts"]),
        ([f"model.num_experts={2**62}"], ["too large", "model.num_experts"]),
        (["model.vocab_size=256"], ["model.vocab_size: got 256", ">= 257"]),
        (["data.tokenizer=bpe:300"], ["data.tokenizer: got 'bpe:300'", "must be bytes"]),
        (["data.corpus=nothere.txt", "{new}"], ["corpus: got 'nothere.txt'", "python-docs"]),
        (["data.corpus=empty.txt", "{new}"], ["prepare.corpus", "no text"]),
        (["training.batch_size=100000"], ["training.batch_size: got 100000", "must be <= "]),
        (["data.tokenizer=nothere", "{new}"], ["tokenizer: got 'nothere'"]),
    ],
)
def test_what_does_not_fit_text_or_memory(
    overrides: list[str], parts: list[str], text: Path, tmp_path: Path
) -> None:
    """`{new}`: the text is not prepared yet."""
    (tmp_path / "empty.txt").write_text("")
    typed = [one.replace("{new}", "data.folder=tokens") for one in overrides]
    outcome = airmoe_train(small_run(text), tmp_path / "run", *typed, cwd=tmp_path)
    assert_one_line(outcome, 2, *parts)
    assert not (tmp_path / "run").exists()


def test_a_run_that_failed_before_its_first_step_is_none(text: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=1, eval_every=1)

    def patch() -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        run_module.draw_weights = fail

    assert airmoe_train(config, tmp_path / "run", patch=patch).code != 0
    assert not (tmp_path / "run").exists()
    assert airmoe_train(config, tmp_path / "run", "training.seed=5").code == 0


# -- text ---------------------------------------------------------------------------------------


def test_another_text_of_the_same_name_and_size(text: Path, tmp_path: Path) -> None:
    """Without data.folder both would be data/text.txt-bytes."""
    mine = (text / "text.txt").read_text()
    for folder, content in (("a", mine), ("b", mine.swapcase())):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(content)
    config = small_run(text, steps=1, eval_every=1)
    more = ("data.folder=null", "data.validation_fraction=0.1")
    first, other = (
        airmoe_train(config, tmp_path / run, f"data.corpus={folder}/text.txt", *more, cwd=tmp_path)
        for run, folder in (("1", "a"), ("2", "b"))
    )
    assert first.code == 0, first.err
    assert_one_line(other, 2, "data/text.txt-bytes", "other text", "data.folder")
    assert not (tmp_path / "2").exists()


def test_damaged_tokens(text: Path, finished: Path, tmp_path: Path) -> None:
    tokens = shutil.copytree(text / "tokens", tmp_path / "tokens")
    shard = tokens / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    outcome = airmoe_train(small_run(text), tmp_path / "run", f"data.folder={tokens}")
    assert_one_line(outcome, 2, str(shard), "sha256")
    assert not (tmp_path / "run").exists()
    assert_one_line(airmoe("eval", finished, "--data", tokens), 2, "sha256")


# -- folders ------------------------------------------------------------------------------------


def test_run_folders_are_never_overwritten(text: Path, finished: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=4, eval_every=2)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    resume = f"--resume {finished}"
    new_text = f"data.folder={tmp_path}/tokens"  # refused before that is prepared
    other = airmoe_train(config, finished, "training.steps=5", new_text)
    assert_one_line(other, 2, "another config", "--run", resume)
    assert not (tmp_path / "tokens").exists()
    assert_one_line(airmoe_train(config, finished), 2, "holds this very run already", resume)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    (tmp_path / "foreign").mkdir()
    thesis = tmp_path / "foreign" / "thesis.tex"
    thesis.write_text("x")
    for run in (tmp_path / "foreign", thesis):
        assert_one_line(airmoe_train(config, run), 2, "new or empty folder")
    assert thesis.read_text() == "x"


def test_one_process_makes_a_run(text: Path, tmp_path: Path) -> None:
    """The second one is told who is at it, also while there is no run yet, only a folder."""
    config, run = small_run(text, steps=1, eval_every=1), tmp_path / "runs" / "run"
    holder = f"run: got '{run}', is being trained by process {os.getpid()} on"
    with claimed(run, config):
        assert_one_line(airmoe_train(config, run), 2, holder, "Wait for it")
    assert not run.exists()  # no run came of it

    def claim_and_die() -> None:
        with claimed(run, config):
            kill_self()

    assert in_process(claim_and_die) < 0
    assert [file.name for file in run.iterdir()] == ["lock"]
    (run / "run.json.draft").write_text("{")  # the next one was killed a little later
    assert airmoe_train(config, run).code == 0
    with open_run(run).lock():
        assert_one_line(airmoe_train(config, run), 2, holder)
    assert_one_line(airmoe_train(config, run), 2, "holds this very run already")


@pytest.mark.parametrize("target", ["nothere", "link"], ids=["dangling", "loop"])
def test_links_that_lead_nowhere(target: str, text: Path, tmp_path: Path) -> None:
    """Said before the text is prepared: for `exists` such a link is a free place."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    outcome = airmoe_train(small_run(text), link, f"data.folder={tmp_path}/tokens")
    assert_one_line(outcome, 2, f"run: got '{link}'", "new or empty folder")
    inside = airmoe_train(small_run(text), link / "run")
    assert_one_line(inside, 2, str(link), "Choose a path")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


# -- use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "parts"),
    [
        ("eval", ["--split", "test"], ["split: got 'test'", "train, validation"]),
        ("eval", ["--checkpoint", "first"], ["checkpoint: got 'first'", "'best'"]),
        ("eval", ["--quality-tokens", 0], ["quality_tokens: got 0"]),
        ("eval", ["--data", "."], ["data: got", "manifest"]),
        ("generate", ["--nucleus", 0], ["generate.nucleus: got 0"]),
    ],
)
def test_wrong_questions_to_a_trained_model(
    command: str, options: list[Any], parts: list[str], finished: Path, tmp_path: Path
) -> None:
    assert_one_line(airmoe(command, finished, *options, cwd=tmp_path), 2, *parts)


def test_eval_wants_text_of_the_same_tokenizer(text: Path, finished: Path, tmp_path: Path) -> None:
    corpus, out = str(text / "text.txt"), str(tmp_path / "bpe")
    options: dict[str, Any] = {"validation_fraction": 0.1}
    prepare(PrepareConfig(corpus=corpus, tokenizer="bpe:280", out=out, **options))
    outcome = airmoe("eval", finished, "--data", out)
    assert_one_line(outcome, 2, "data.tokenizer", "280 ids", "bytes (257 ids")
