"""The pages about training: their commands and code run in order, their tables are true."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from torch.distributed.run import parse_args

from airmoe import cli
from airmoe.data.shards import SHARD_TOKENS
from airmoe.kernels.linear_cross_entropy import CPU_CHUNK_BYTES, CUDA_CHUNK_BYTES
from airmoe.model import METHODS
from airmoe.training import PRESETS, method_run, preset
from airmoe.training.run_log import TIME_FIELDS, read_log
from tests.docs.common import PAGES, ROOT, TRAINING, code_blocks, command_lines
from tests.training.command import airmoe
from tests.training.runs import in_process

TEXT = "\n".join(page.read_text(encoding="utf-8") for page in TRAINING)


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder after everything the pages do in it, top to bottom."""
    folder = tmp_path_factory.mktemp("train-page")
    blocks = [block for page in TRAINING for block in code_blocks(page)]
    assert {language for language, _ in blocks} == {"python", "sh"}
    assert in_process(lambda: walk(blocks, folder)) == 0
    return folder


def walk(blocks: list[tuple[str, str]], folder: Path) -> None:
    """In a process of its own: training leaves settings behind in its process."""
    os.chdir(folder)
    module = sys.modules["train_page"] = ModuleType("train_page")
    for number, (language, code) in enumerate(blocks, 1):
        if language == "python":
            exec(compile(code, f"training pages, block {number}", "exec"), module.__dict__)
            continue
        for line in command_lines(code):
            name, *arguments = shlex.split(line, comments=True)
            assert name == "airmoe", line
            outcome = airmoe(*arguments)
            assert (outcome.code, outcome.err) == (0, ""), (line, outcome)


@pytest.mark.slow
def test_the_pages_run(walked: Path) -> None:
    assert read_log(walked / "runs" / "again" / "log.jsonl")[-1]["step"] == 20


def test_log_fields_are_those_of_the_table(walked: Path) -> None:
    rows = table("field of a log line")
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    lines = read_log(walked / "runs" / "mine" / "log.jsonl")
    assert listed == {name for line in lines for name in line}
    assert re.findall(r"`(\w+)`", rows[-1][0]) == list(TIME_FIELDS)
    only = {row[0].strip("` "): row[1] for row in rows}
    evaluation = next(line for line in lines if line["kind"] == "eval")
    training = next(line for line in lines if line["kind"] == "train")
    assert "`eval` only" in only["perplexity"] and "perplexity" not in training
    assert "`train` only" in only["staleness"] and "staleness" not in evaluation


def test_a_run_holds_what_the_page_lists(walked: Path) -> None:
    tree = TEXT.partition("## What a run leaves")[2].partition("A checkpoint is")[0]
    listed = set(re.findall(r"^    ([\w.-]+)/? ", tree, re.MULTILINE))
    assert listed == {path.name for path in (walked / "runs" / "mine").iterdir()}
    files = {path.name for path in (walked / "runs" / "mine" / "checkpoint-20").iterdir()}
    about = TEXT.partition("A checkpoint is `model")[2].partition("pickle")[0]
    for name in ("model.safetensors", *re.findall(r"`([\w-]+\.\w+)`", about)):
        assert name in files, name


def test_preset_table() -> None:
    found = set()
    for names, text, block, sequences, length in table("preset"):
        for name in re.findall(r"`([\w-]+)`", names):
            found.add(name)
            run = preset(name)
            corpus = text.strip("` ")
            assert run.data.corpus == (name.partition("-")[2] if corpus == "as named" else corpus)
            assert (run.data.block_size, run.training.batch_size) == (int(block), int(sequences))
            steps, epochs = run.training.steps, run.training.epochs
            assert length == (f"{epochs} epochs" if steps is None else f"{steps:,} steps")
            assert (run.data.tokenizer, run.training.precision) == ("llama-3", "auto")
            assert (run.training.learning_rate, run.training.warmup) == (3e-4, 0.05)
    assert found == set(PRESETS) - {"tiny"}


def test_other_lists_are_complete() -> None:
    assert [row[0].strip("`") for row in table("method")] == list(METHODS)
    assert f"shards of 2^{SHARD_TOKENS.bit_length() - 1} tokens" in TEXT
    chunks = f"{CPU_CHUNK_BYTES // 2**20} MiB on a CPU and {CUDA_CHUNK_BYTES // 2**30} GiB on a GPU"
    assert chunks in " ".join(TEXT.split())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{method}`" in readme for method in METHODS)
    commands = re.search(r"commands.py +airmoe (.*)", readme)
    assert commands and commands[1].split(" | ") == list(group().commands)


def test_commands_of_all_pages_are_understood() -> None:
    """Options exist, names are known, overrides fit; nothing is run."""
    seen = set()
    for page in PAGES:
        for line in commands_of(page.read_text(encoding="utf-8")):
            seen.add(understood(line))
    assert seen == set(group().commands)


def commands_of(text: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^ {4}(?:airmoe|torchrun) (?:.*\\\n)*.*$", text, re.MULTILINE)
    inline = re.findall(r"(?<!`)`(airmoe [^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))
    one_line = [" ".join(words.split()) for words in inline]
    return [line for block in (*blocks, *one_line) for line in command_lines(block)]


def understood(line: str) -> str:
    """Parse a command as its program would; the name of the airmoe command in it."""
    program, *words = shlex.split(line, comments=True)
    if program == "torchrun":
        options = parse_args(words)
        assert options.module and options.training_script == "airmoe", line
        words = options.training_script_args
    else:
        assert program == "airmoe", line
    known = words[0] != "--import"  # else there are names that only that module knows
    name, *words = words if known else words[2:]
    if not words:  # only its name
        return name if name in group().commands else ""
    parsed: dict[str, Any] = group().commands[name].make_context(name, list(words)).params
    if known and name == "train" and parsed["resume"] is None:
        method_run(parsed["preset"], parsed["method"] or "air", parsed["overrides"] or [])
    return name


def group() -> Any:
    return typer.main.get_command(cli.app)


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first column is called so."""
    rows = TEXT.partition(f"\n| {heading} |")[2].splitlines()[2:]
    found = []
    for row in rows:
        if not row.startswith("|"):
            break
        found.append([cell.strip() for cell in row.strip("|").split("|")])
    assert found, heading
    return found
