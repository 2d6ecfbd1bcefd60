"""The commands as a user types them: what they print, and how they end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from airmoe import __version__
from airmoe.data import open_prepared
from airmoe.files import read_json
from airmoe.training.trained import load_trained
from tests.experiments.forked import fork_runs
from tests.training.command import airmoe, airmoe_train, assert_one_line, pythonpath, succeeds
from tests.training.runs import (
    assignments,
    small_model,
    small_run,
    trained,
    write_text,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    return trained(small_run(folder, steps=2, eval_every=2, eval_blocks=None), folder / "run")


def test_prepare(tmp_path: Path) -> None:
    text = write_text(tmp_path, 60)
    out = tmp_path / "[bold]tokens-with-a-name-that-is-longer-than-a-terminal-is-wide"
    arguments = ("prepare", text, "--out", out, "--tokenizer", "bytes")
    more = ("--validation-fraction", 0.1)
    printed = succeeds(*arguments, *more)
    prepared = open_prepared(out)
    splits = prepared.manifest.splits
    assert printed.splitlines() == [
        f"{out}: bytes, 257 token ids",
        *(
            f"  {name}: {splits[name].documents:,} documents, {splits[name].tokens:,} tokens"
            for name in splits
        ),
    ]
    assert splits["train"].documents + splits["validation"].documents == 60
    # Every document is its bytes and an end.
    size = len(text.read_bytes()) - 2 * 59 + 60
    assert splits["train"].tokens + splits["validation"].tokens == size
    manifest = (out / "manifest.json").read_bytes()
    assert airmoe(*arguments, *more).out == printed  # again: there already
    assert (out / "manifest.json").read_bytes() == manifest


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nothere.txt"], "corpus: got 'nothere.txt'"),
        (["text.txt", "--tokenizer", "bpe:5"], "tokenizer: got 'bpe:5'"),
        (["text.txt", "--validation-fraction", "1"], "prepare.validation_fraction: got 1.0"),
        (["text.txt", "--max-tokens", "0"], "prepare.max_tokens: got 0"),
        (["text.txt", "--tokenizer", "bytes", "--validation", "no.txt"], "got 'no.txt'"),
    ],
)
def test_wrong_preparations(arguments: list[str], part: str, tmp_path: Path) -> None:
    write_text(tmp_path, 5)
    outcome = airmoe("prepare", *arguments, "--out", "tokens", cwd=tmp_path)
    assert_one_line(outcome, 2, part)
    assert not (tmp_path / "tokens").exists()


def test_train_prints_plain_lines_where_there_is_no_terminal(run: Path, tmp_path: Path) -> None:
    name = "[bold] {run}"
    config = small_run(run.parent, steps=2, eval_every=2)
    printed = succeeds("train", "tiny", *assignments(config), "--run", tmp_path / name)
    size, first, *_, validation, last = printed.splitlines()
    assert size == f"{name}: 0.03 M parameters, 0.02 M active per token; 2 steps of 256 tokens"
    assert first.startswith(f"{name}  train  step 1/2  loss 6.")
    assert validation.startswith(f"{name}  valid  step 2/2  loss 5.")
    assert "ppl" in validation and "overlap" in validation
    assert last == f"Finished: {tmp_path / name / 'result.json'}"


def test_train_prepares_its_text_and_names_its_folder(tmp_path: Path) -> None:
    config = small_run(tmp_path, steps=1, eval_every=1)
    overrides = [*assignments(config), "data.folder=null", "data.validation_fraction=0.1"]
    succeeds("train", "tiny", *overrides, "data.corpus=./text.txt", cwd=tmp_path)
    assert (tmp_path / "data" / "text.txt-bytes" / "manifest.json").exists()
    assert (tmp_path / "runs" / "tiny-air" / "result.json").exists()


def on_a_terminal() -> None:
    os.environ.update({"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "400"})


def test_a_terminal_gets_a_bar(run: Path, tmp_path: Path) -> None:
    """Names with braces and brackets are text there, too."""
    text = write_text(tmp_path, 60)
    config = small_run(run.parent, steps=2, eval_every=2)
    new_text = [
        f"data.corpus={text}",
        f"data.folder={tmp_path}/new",
        "data.validation_fraction=0.1",
    ]
    outcome = airmoe_train(config, tmp_path / "{1} [b]", *new_text, patch=on_a_terminal)
    assert outcome.code == 0, outcome.err
    assert "2/2" in outcome.out and "{1} [b]" in outcome.out and "preparing" in outcome.out


def lost() -> None:
    """Both streams are a pipe, whose reader goes away after a line."""
    reader, writer = os.pipe()
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(writer)

    def read() -> None:
        while os.read(reader, 1) != b"\n":
            pass
        os.close(reader)

    Thread(target=read, daemon=True).start()


def test_a_run_whose_reader_is_gone_trains_to_its_end(run: Path, tmp_path: Path) -> None:
    config = small_run(run.parent, steps=6, eval_every=2, log_every=1)
    assert airmoe_train(config, tmp_path / "run", patch=lost).code == 0
    assert read_json(tmp_path / "run" / "result.json")["last"]["step"] == 6


def test_a_suite_whose_reader_is_gone_comes_to_its_end(run: Path, tmp_path: Path) -> None:
    def suite_without_reader() -> None:
        fork_runs()()
        lost()

    model = small_model(num_experts_per_tok=2)
    config = small_run(run.parent, model, steps=2, eval_every=2)
    suite = ("suite", "granularity", "tiny", *assignments(config), "--out", tmp_path / "suite")
    succeeds(*suite, patch=suite_without_reader)
    assert len(list((tmp_path / "suite").glob("*/result.json"))) == 2


def test_eval(run: Path) -> None:
    answer = json.loads(succeeds("eval", run))
    assert answer["checkpoint"] == str(run / "checkpoint-2")
    assert answer["split"] == "validation"
    prepared = open_prepared(run.parent / "tokens")
    assert answer["tokens"] == prepared.tokens("validation") // 32 * 31
    assert answer["perplexity"] == pytest.approx(math.exp(answer["loss"]))
    saved = json.loads((run / "result.json").read_text())["last"]
    # The same model and blocks: the run's own numbers, to the bit.
    for name in ("loss", "entropy", "dead_experts", "load_imbalance", "codeword_perplexity"):
        assert answer[name] == saved[name], name


def test_eval_of_other_text(run: Path, tmp_path: Path) -> None:
    validation = json.loads(succeeds("eval", run))
    train = json.loads(succeeds("eval", run, "--split", "train"))
    assert train["split"] == "train" and train["loss"] != validation["loss"]
    prepared = open_prepared(run.parent / "tokens")
    assert train["tokens"] == prepared.tokens("train") // 32 * 31
    again = succeeds("eval", run, "--data", run.parent / "tokens", "--checkpoint", "last")
    assert json.loads(again) == validation


def test_generate(run: Path) -> None:
    arguments = ("generate", run, "the ", "--max-new-tokens", 5)
    printed = succeeds(*arguments, "--temperature", 0)
    assert printed.startswith("the ")
    assert airmoe(*arguments, "--temperature", 0, "--seed", 3).out == printed
    seeds = [airmoe(*arguments, "--seed", seed).out for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    succeeds("generate", run, "--max-new-tokens", 3)
    model = load_trained(run)
    assert model.tokenizer.identity.kind == "bytes"


OWN_ROUTER = """
import airmoe

class Own(airmoe.TopKRouter):
    def route(self, tokens, plan) -> airmoe.TokenRouting:
        return super().route(tokens, plan)

airmoe.ROUTERS["own"] = Own
"""


def test_a_router_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own_router.py").write_text(OWN_ROUTER)
    settings = assignments(small_run(tmp_path, documents=60, steps=1, eval_every=1))
    settings = [words for words in settings if not words.startswith("model.router")]
    train = ("train", "tiny", *settings, "--method", "own")
    ours = ("--import", "own_router")
    assert_one_line(airmoe(*train, cwd=tmp_path), 2, "method: got 'own'", "airmoe --import MODULE")
    succeeds(*ours, *train, cwd=tmp_path)
    run = tmp_path / "runs" / "tiny-own"
    assert json.loads((run / "result.json").read_text())["last"]["overlap"] == 1  # it is exact
    # What a run says makes nothing be imported.
    outcome = airmoe("eval", run, cwd=tmp_path)
    assert_one_line(outcome, 2, "model.router: got 'own'", "airmoe --import MODULE")


@pytest.mark.parametrize(
    ("module", "part"),
    [("no_such_module", "that Python finds"), ("a/b", "without folder"), ("./own.py", "and .py")],
)
def test_modules_that_cannot_be_imported(module: str, part: str) -> None:
    assert_one_line(airmoe("--import", module, "doctor"), 2, f"import: got '{module}'", part)


def test_help_lists_the_commands() -> None:
    printed = succeeds("--help")
    for command in ("prepare", "train", "eval", "generate", "doctor"):
        assert command in printed
        succeeds(command, "--help")


def test_the_version_is_said() -> None:
    assert airmoe("--version").out == f"airmoe {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("train sma", {"small", "small-c5", "small-openwebtext2"}),
        ("train tiny training.prec", {"training.precision="}),
        ("flops tiny --method h", {"hierarchical"}),
        ("sui", {"suite"}),
    ],
)
def test_a_shell_completes(
    typed: str, completed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"airmoe {typed}"
    monkeypatch.setenv("_AIRMOE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert {*airmoe().out.split()} == completed


PROBE = """
import sys
sys.argv = ["airmoe", "--help"]
from airmoe.cli import main
try:
    main()
except SystemExit as stop:
    assert stop.code in (0, None), stop.code
heavy = {"torch", "transformers", "accelerate", "datasets", "tokenizers", "tensorboard"}
print("loaded:", *sorted(heavy & set(sys.modules)))
"""


def test_help_loads_no_large_library() -> None:
    probe = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=os.environ | {"PYTHONPATH": pythonpath()},
        capture_output=True,
        text=True,
    )
    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.splitlines()[-1].split()[1:] == []


# Colours text, names the window, rings a bell, and is markup to rich.
HOSTILE = "\x1b[31mred\x1b]0;title\x07[bold]"
SHOWN = r"\x1b[31mred\x1b]0;title\x07[bold]"


def test_names_reach_the_terminal_escaped(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    text = write_text(folder, 60)
    config = small_run(run.parent, steps=1, eval_every=1, track="none")
    new_text = (f"data.corpus={text}", f"data.folder={folder}/new", "data.validation_fraction=0.1")
    (folder / "empty").mkdir()
    for code, command in (
        (0, ("train", "tiny", *assignments(config), *new_text, "--run", folder / "run")),
        (2, ("train", "--resume", folder)),
        (2, ("suite", "main", "tiny", "--out", folder / "run")),  # holds a single run
        (2, ("report", folder / "empty")),
    ):
        outcome = airmoe(*command)
        assert outcome.code == code, (command, outcome)
        assert SHOWN in (outcome.err if code else outcome.out), (command, outcome)
        for odd in ("\x1b", "\x07"):
            assert odd not in outcome.out + outcome.err, (command, outcome)
        if code:
            assert_one_line(outcome, code)


def test_an_argument_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    for command in (
        ("prepare", "text.txt", "--tokenizer", "bytes", "--out", "t\udcffo"),
        ("train", "tiny", "--run", "t\udcffo"),
        ("suite", "main", "tiny", "--out", "t\udcffo"),
    ):
        assert_one_line(airmoe(*command, cwd=tmp_path), 2, r"got 't\udcffo', must be UTF-8")
    assert not list(tmp_path.iterdir())


def test_prepare_counts_rows_without_text(tmp_path: Path) -> None:
    rows = ['{"text": null}\n' if n % 20 == 0 else f'{{"text": "text {n}"}}\n' for n in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(rows))
    arguments = ("prepare", tmp_path / "text.jsonl", "--out", tmp_path / "out")
    printed = succeeds(*arguments, "--tokenizer", "bytes", "--validation-fraction", 0.2)
    assert printed.splitlines()[0] == "skipped 3 rows without text"
