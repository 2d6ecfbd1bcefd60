"""What a user sees when a run cannot start or go on: one line, the right code, nothing lost."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from airmoe.data import PrepareConfig, prepare
from airmoe.data.shards import SplitWriter
from airmoe.errors import ConfigError
from airmoe.training import RunConfig, checkpoints, loop, override, preset, run_folder
from airmoe.training import run as run_module
from airmoe.training.checkpoints import best_checkpoint, step_of
from airmoe.training.config import SECTIONS
from airmoe.training.loop import TrainingLoop
from airmoe.training.run_folder import claimed, open_run
from tests.training import kills
from tests.training.command import Outcome, airmoe, assert_one_line, started
from tests.training.runs import (
    assert_same_run,
    assignments,
    in_process,
    small_model,
    small_run,
    tensors_of,
    timeless_log,
    train_here,
)

CONFIG_ERROR, RUN_FAILED = 2, 1


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text and its tokens, which nobody changes."""
    folder = tmp_path_factory.mktemp("text")
    small_run(folder)
    return folder


@pytest.fixture(scope="module")
def finished(text: Path) -> Path:
    """A run of 4 steps with checkpoints at 2 and 4."""
    config = small_run(text, steps=4, eval_every=2)
    assert in_process(lambda: train_here(config, text / "finished")) == 0
    return text / "finished"


def trained(config: RunConfig, run: Path, *overrides: str, **options: Any) -> Outcome:
    return airmoe("train", "tiny", *assignments(config), *overrides, "--run", run, **options)


def assert_no_run(folder: Path) -> None:
    """A mistake must not leave a folder behind that refuses the corrected command."""
    assert not folder.exists()


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["huge"], ["preset: got 'huge'", "tiny, small, medium"]),
        (["tiny", "--method", "magic"], ["method: got 'magic'", "air, exact, peer"]),
        ([], ["preset: got None", "airmoe train tiny"]),
        (
            ["tiny", "training.stepz=5"],
            ["training.stepz: got 5", "Did you mean 'steps'?"],
        ),
        (["tiny", "model.top_k=5"], ["model.top_k: got 5", "num_experts_per_tok"]),
        (["tiny", "data.blocks=5"], ["data.blocks: got 5", "block_size"]),
        (
            ["tiny", "model.router_options.shortlists=5"],
            ["model.router_options.shortlists: got 5", "shortlist_size"],
        ),
        (["tiny", "steps=5"], ["steps: got 5", "model, data, training"]),
        (["tiny", "training.steps"], ["overrides: got 'training.steps'", "key.path=value"]),
        (["tiny", "training.steps=many"], ["training.steps: got 'many'", "whole number"]),
        (["tiny", "training.epochs=5"], ["training.steps: got ", "epochs = 5"]),
        (["tiny", "training.precision=fp8"], ["training.precision: got 'fp8'", "'bf16'"]),
        (["tiny", "training.micro_batch_size=3"], ["must divide batch_size = 4"]),
        (["tiny", "training.seed=4294967296"], ["training.seed", "4294967296"]),
        (["tiny", "training.precision=fp16"], ["training.precision: got 'fp16'", "needs a GPU"]),
        (["tiny", "training.sharding=fsdp2"], ["training.sharding", "torchrun"]),
        (["tiny", "model.hidden_size=100.5"], ["model.hidden_size: got 100.5"]),
        (
            ["tiny", "model.num_attention_heads=3"],
            ["model.hidden_size: got 128", "num_attention_heads = 3"],
        ),
        (["tiny", "model.vocab_size=many"], ["model.vocab_size: got 'many'"]),
        (["tiny", "model.max_position_embeddings=64"], ["data.block_size: got 128", "64"]),
    ],
)
def test_wrong_settings(arguments: list[str], parts: list[str], tmp_path: Path) -> None:
    if "fp16" in str(arguments) and torch.cuda.is_available():
        pytest.skip("this machine can")
    outcome = airmoe("train", *arguments, "--run", tmp_path / "run", cwd=tmp_path)
    assert_one_line(outcome, CONFIG_ERROR, *parts)
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


@pytest.mark.parametrize(("num_experts", "part"), [(10**12, "GiB"), (2**62, "too large")])
def test_a_model_that_no_memory_holds(
    num_experts: int, part: str, text: Path, tmp_path: Path
) -> None:
    config = small_run(text, steps=1, eval_every=1)
    too_many = f"model.num_experts={num_experts}"
    outcome = trained(config, tmp_path / "run", too_many)
    assert_one_line(outcome, CONFIG_ERROR, part, "model.num_experts")
    assert_no_run(tmp_path / "run")


def test_a_run_that_failed_before_its_first_step_is_none(text: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=1, eval_every=1)

    def patch() -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        run_module.draw_weights = fail

    assert trained(config, tmp_path / "run", patch=patch).code != 0
    assert_no_run(tmp_path / "run")
    assert trained(config, tmp_path / "run", "training.seed=5").code == 0


# -- text ---------------------------------------------------------------------------------------


def test_a_process_with_another_precision(text: Path, tmp_path: Path) -> None:
    """Accelerate, which the Trainer sets up too, has one in a process."""
    config = small_run(text, steps=1)

    def prepare_in_bf16() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # of tests before, in a fork
        Accelerator(mixed_precision="bf16")

    outcome = trained(config, tmp_path / "run", patch=prepare_in_bf16)
    assert_one_line(outcome, CONFIG_ERROR, "training.precision: got 'fp32'", "process of its own")


def test_missing_and_useless_text(text: Path, tmp_path: Path) -> None:
    config = small_run(text)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("\n\n".join(f"{i}" for i in range(40)))
    cases: dict[str, tuple[list[str], list[str]]] = {
        "missing": (["data.corpus=nothere.txt"], ["corpus: got 'nothere.txt'", "python-docs"]),
        "empty": ([f"data.corpus={tmp_path}/empty.txt"], ["prepare.corpus", "no text"]),
        "shorter than a block": (
            [
                f"data.corpus={tmp_path}/short.txt",
                "data.validation_fraction=0.3",
                "data.block_size=512",
            ],
            ["data.block_size: got 512", "split 'train'"],
        ),
        "fewer blocks than a batch": (
            ["data.folder=" + str(text / "tokens"), "training.batch_size=100000"],
            ["training.batch_size: got 100000", "must be <= "],
        ),
        "too large a block": (
            [
                "data.folder=" + str(text / "tokens"),
                "data.block_size=1000000",
                "model.max_position_embeddings=1000000",
            ],
            ["data.block_size: got 1000000"],
        ),
        "no such tokenizer": (["data.tokenizer=nothere"], ["tokenizer: got 'nothere'"]),
    }
    for name, (overrides, parts) in cases.items():
        run = tmp_path / name
        outcome = trained(config, run, f"data.folder={tmp_path}/tokens-{name}", *overrides)
        assert_one_line(outcome, CONFIG_ERROR, *parts)
        assert_no_run(run)


def test_another_text_of_the_same_name_and_size(text: Path, tmp_path: Path) -> None:
    """Without data.folder both would be data/text.txt-bytes."""
    mine = (text / "text.txt").read_text()
    for folder, content in (("a", mine), ("b", mine.swapcase())):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(content)
    more = ("data.folder=null", "data.validation_fraction=0.1")
    config = small_run(text, steps=1, eval_every=1)
    first = trained(config, tmp_path / "1", "data.corpus=a/text.txt", *more, cwd=tmp_path)
    assert first.code == 0, first.err
    other = trained(config, tmp_path / "2", "data.corpus=b/text.txt", *more, cwd=tmp_path)
    assert_one_line(other, CONFIG_ERROR, "data/text.txt-bytes", "other text", "data.folder")
    assert_no_run(tmp_path / "2")


def damaged(text: Path, folder: Path, damage: Callable[[bytearray], Any]) -> Path:
    tokens = folder / "tokens"
    shutil.copytree(text / "tokens", tokens)
    shard = tokens / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    damage(content)
    shard.write_bytes(content)
    return tokens


def flip(content: bytearray) -> None:
    content[1000] ^= 1


def cut(content: bytearray) -> None:
    del content[-4:]


@pytest.mark.parametrize(
    ("damage", "part"), [(flip, "sha256"), (cut, "bytes instead of")], ids=["flipped", "cut"]
)
def test_damaged_tokens(
    damage: Callable[[bytearray], Any], part: str, text: Path, finished: Path, tmp_path: Path
) -> None:
    tokens = damaged(text, tmp_path, damage)
    outcome = trained(small_run(text), tmp_path / "run", f"data.folder={tokens}")
    assert_one_line(outcome, CONFIG_ERROR, str(tokens / "train-00000.bin"), part)
    assert_no_run(tmp_path / "run")
    assert_one_line(airmoe("eval", finished, "--data", tokens), CONFIG_ERROR, part)


def test_tokens_out_of_range(text: Path, tmp_path: Path) -> None:
    """Consistent to its checksums, but of another vocabulary than it says."""
    tokens = damaged(
        text, tmp_path, lambda content: content.__setitem__(slice(0, 4), b"\xff\0\1\0")
    )
    manifest = json.loads((tokens / "manifest.json").read_text())
    (shard,) = manifest["splits"]["train"]["shards"]
    shard["sha256"] = hashlib.sha256((tokens / shard["file"]).read_bytes()).hexdigest()
    (tokens / "manifest.json").write_text(json.dumps(manifest))
    config = small_run(
        text, steps=None, epochs=1, batch_size=64, micro_batch_size=64, eval_every="epoch"
    )
    outcome = trained(config, tmp_path / "run", f"data.folder={tokens}")
    assert_one_line(outcome, CONFIG_ERROR, "data: got 65791", "vocab_size = 257", "position 0")


def test_tokenizers_and_vocabularies_must_agree(text: Path, finished: Path, tmp_path: Path) -> None:
    config = small_run(text)
    small = trained(config, tmp_path / "run", "model.vocab_size=256")
    assert_one_line(small, CONFIG_ERROR, "model.vocab_size: got 256", ">= 257")
    assert_no_run(tmp_path / "run")
    other = trained(config, tmp_path / "run", "data.tokenizer=bpe:300")
    assert_one_line(other, CONFIG_ERROR, "data.tokenizer: got 'bpe:300'", "must be bytes")
    assert_no_run(tmp_path / "run")
    prepare(
        PrepareConfig(
            corpus=str(text / "text.txt"),
            tokenizer="bpe:280",
            out=str(tmp_path / "bpe"),
            validation_fraction=0.1,
            workers=1,
        )
    )
    outcome = airmoe("eval", finished, "--data", tmp_path / "bpe")
    assert_one_line(outcome, CONFIG_ERROR, "data.tokenizer", "280 ids", "bytes (257 ids")


# -- folders ------------------------------------------------------------------------------------


def test_run_folders_are_never_overwritten(text: Path, finished: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=4, eval_every=2)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    other = trained(config, finished, "training.steps=5")
    assert_one_line(other, CONFIG_ERROR, "another config", "--run", f"--resume {finished}")
    # `preset` is the name the settings came from; nothing else differs.
    same = trained(config, finished)
    assert_one_line(same, CONFIG_ERROR, "run: got", f"airmoe train --resume {finished}")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("x")
    outcome = trained(config, tmp_path / "foreign")
    assert_one_line(outcome, CONFIG_ERROR, "new or empty folder")
    assert_one_line(
        trained(config, tmp_path / "foreign" / "thesis.tex"), CONFIG_ERROR, "new or empty"
    )
    assert (tmp_path / "foreign" / "thesis.tex").read_text() == "x"


def test_an_occupied_folder_is_refused_before_the_text_is_prepared(
    text: Path, finished: Path, tmp_path: Path
) -> None:
    outcome = trained(small_run(text), finished, f"data.folder={tmp_path}/tokens")
    assert_one_line(outcome, CONFIG_ERROR, "another config")
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize(
    "extra", [["training.steps=9"], ["tiny"], ["--run", "elsewhere"], ["--method", "peer"]]
)
def test_resume_takes_nothing_else(extra: list[str], finished: Path) -> None:
    outcome = airmoe("train", "--resume", finished, *extra)
    assert_one_line(outcome, CONFIG_ERROR, f"got '{extra[-1]}'", "cannot be given with --resume")


def test_resume_of_what_is_no_run(text: Path, finished: Path, tmp_path: Path) -> None:
    assert_one_line(airmoe("train", "--resume", tmp_path / "no"), CONFIG_ERROR, "run.json")
    assert_one_line(airmoe("train", "--resume", text), CONFIG_ERROR, "run.json")
    values = json.loads((finished / "run.json").read_text())
    contents = {
        "": "run.json",
        "[]": "format and config",
        "{}": "format",
        json.dumps(values | {"format": 99}): "run.format: got 99",
        json.dumps(values | {"format": 1}): "The last version that can read it is 0.1.0",
        json.dumps(values | {"config": 5}): "config: got 5",
        json.dumps(values | {"config": values["config"] | {"data": 5}}): "config.data: got 5",
        json.dumps(values | {"config": values["config"] | {"model": 5}}): "model: got 5",
        json.dumps(values | {"config": values["config"] | {"sails": 5}}): "run.sails: got 5",
    }
    for content, part in contents.items():
        (tmp_path / "run.json").write_text(content)
        assert_one_line(airmoe("train", "--resume", tmp_path), CONFIG_ERROR, part)
    assert_one_line(airmoe("eval", tmp_path), CONFIG_ERROR, "run.sails: got 5")


def unfinished(text: Path, folder: Path) -> Path:
    """A run of 6 steps, killed with a checkpoint at 2 only."""
    config = small_run(text, steps=6, eval_every=2)

    def job() -> None:
        kills.before_step(4)()
        train_here(config, folder / "run")

    assert in_process(job) < 0
    return folder / "run"


def test_resume_of_a_checkpoint_with_other_settings(text: Path, tmp_path: Path) -> None:
    run = unfinished(text, tmp_path)
    values = json.loads((run / "run.json").read_text())
    changes = {
        "num_experts": 128,
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "moe_layers": [],
        "tie_word_embeddings": False,
    }
    for name, value in changes.items():
        config = values["config"] | {"model": values["config"]["model"] | {name: value}}
        (run / "run.json").write_text(json.dumps(values | {"config": config}))
        outcome = airmoe("train", "--resume", run)
        assert_one_line(outcome, CONFIG_ERROR, "checkpoint-2", "of this run", f"{run}/run.json")
    (run / "run.json").write_text(json.dumps(values))
    assert airmoe("train", "--resume", run).code == 0


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_resume_and_eval_of_a_cut_checkpoint(file: str, text: Path, tmp_path: Path) -> None:
    run = unfinished(text, tmp_path)
    os.truncate(run / "checkpoint-2" / file, 1000)
    outcome = airmoe("train", "--resume", run)
    assert_one_line(outcome, CONFIG_ERROR, str(run / "checkpoint-2"), "whole")
    if file.startswith("model"):
        assert_one_line(airmoe("eval", run), CONFIG_ERROR, str(run / "checkpoint-2"), "whole")


@pytest.mark.parametrize("file", ["training.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")])
def test_resume_of_a_checkpoint_with_a_damaged_file(
    damage: Callable[[Path], Any], file: str, text: Path, tmp_path: Path
) -> None:
    run = unfinished(text, tmp_path)
    damage(run / "checkpoint-2" / file)
    outcome = airmoe("train", "--resume", run)
    assert_one_line(outcome, CONFIG_ERROR, str(run / "checkpoint-2" / file), "whole")


def test_resume_wants_the_text_the_run_began_with(tmp_path: Path) -> None:
    """Elsewhere, `data.corpus` would be prepared under the folder's name: another text."""
    run = unfinished(tmp_path, tmp_path)
    (tmp_path / "tokens").rename(tmp_path / "away")
    outcome = airmoe("train", "--resume", run)
    assert_one_line(outcome, CONFIG_ERROR, "data.folder", "where the run was started")
    assert not (tmp_path / "tokens").exists()
    (tmp_path / "other.txt").write_text((tmp_path / "text.txt").read_text().upper())
    other = PrepareConfig(
        corpus=str(tmp_path / "other.txt"),
        tokenizer="bytes",
        out=str(tmp_path / "tokens"),
        validation_fraction=0.1,
        workers=1,
    )
    prepare(other)
    assert_one_line(airmoe("train", "--resume", run), CONFIG_ERROR, "data.folder", "began")
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "away").rename(tmp_path / "tokens")
    assert airmoe("train", "--resume", run).code == 0


def test_resume_without_the_log(text: Path, tmp_path: Path) -> None:
    run = unfinished(text, tmp_path)
    (run / "log.jsonl").unlink()
    outcome = airmoe("train", "--resume", run)
    assert outcome.code == 0 and "log.jsonl: was changed or damaged" in outcome.out
    trained_steps = [line["step"] for line in timeless_log(run) if line["kind"] == "train"]
    assert trained_steps == [1, 3, 6]


def test_resume_of_a_finished_run_without_its_checkpoints(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for checkpoint in checkpoints.checkpoints(run):
        shutil.rmtree(checkpoint)
    before = {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}
    outcome = airmoe("train", "--resume", run)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        f"{run} is finished and its checkpoints are gone: there is nothing left to do.",
        f"Finished: {run / 'result.json'}",
    ]
    assert {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))} == before


def test_resume_of_a_run_whose_checkpoints_are_gone(text: Path, tmp_path: Path) -> None:
    """It must not begin at step 0 under the eyes of someone who forgot where they are."""
    run = unfinished(text, tmp_path)
    (run / "checkpoint-2").rename(tmp_path / "away")
    with (run / "log.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 9, "los')  # torn by the kill
    before = (run / "log.jsonl").read_bytes()
    outcome = airmoe("train", "--resume", run)
    assert_one_line(
        outcome,
        CONFIG_ERROR,
        f"run: got '{run}'",
        "its log reaches step 3",
        "checkpoint after step 2",
        "Put",
        "start a new run",
    )
    assert (run / "log.jsonl").read_bytes() == before
    (tmp_path / "away").rename(run / "checkpoint-2")
    assert airmoe("train", "--resume", run).code == 0


@pytest.mark.parametrize(
    "options",
    [{"eval_every": 4}, {"eval_every": "epoch"}, {"eval_every": 6, "save_every": 4}],
    ids=["evaluation", "epoch", "save_every"],
)
def test_resume_before_the_first_checkpoint(
    options: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    config = small_run(text, steps=6, log_every=1, **options)

    def job() -> None:
        kills.in_fill(1)()
        train_here(config, tmp_path / "run")

    assert in_process(job) < 0
    outcome = airmoe("train", "--resume", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert f"{tmp_path / 'run'} has no checkpoint yet: it starts again." in outcome.out
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").open()]
    assert steps[0] == 1 and steps == sorted(steps)


def test_resume_of_a_run_that_still_goes_on(text: Path, tmp_path: Path) -> None:
    run = unfinished(text, tmp_path)
    before = sorted(run.rglob("*"))
    with open_run(run).lock():
        holder = f"is being trained by process {os.getpid()} on {socket.gethostname()} since 20"
        assert_one_line(airmoe("train", "--resume", run), CONFIG_ERROR, holder)
    assert sorted(run.rglob("*")) == before
    assert airmoe("train", "--resume", run).code == 0


def test_one_process_makes_a_run(text: Path, tmp_path: Path) -> None:
    """The second one is told who is at it, also while there is no run yet, only a folder."""
    config, run = small_run(text, steps=1, eval_every=1), tmp_path / "runs" / "run"
    holder = f"run: got '{run}', is being trained by process {os.getpid()} on"
    with claimed(run, config):
        assert_one_line(trained(config, run), CONFIG_ERROR, holder, "Wait for it")
    assert list(tmp_path.iterdir()) == []  # no run came of it

    def claim_and_die() -> None:
        with claimed(run, config):
            kills.kill_self()

    assert in_process(claim_and_die) < 0
    assert [file.name for file in run.iterdir()] == ["lock"]
    (run / "run.json.draft").write_text("{")  # the next one was killed a little later
    assert trained(config, run).code == 0
    with open_run(run).lock():
        assert_one_line(trained(config, run), CONFIG_ERROR, holder)
    assert_one_line(trained(config, run), CONFIG_ERROR, "holds this very run already")


def test_two_processes_make_a_run_at_the_same_moment(text: Path, tmp_path: Path) -> None:
    """Both found the folder free, and one of them goes on when the other already trains."""
    config, run = small_run(text, steps=1, eval_every=1), tmp_path / "run"

    def meet() -> None:
        original, now = run_folder.check_free, kills.nth(1)

        def check_free(*arguments: Any) -> None:
            original(*arguments)
            if now():
                (tmp_path / str(os.getpid())).touch()
                while len(found := sorted(tmp_path.glob("[0-9]*"))) < 2:
                    time.sleep(0.01)
                while found[0].name == str(os.getpid()) and not (run / "log.jsonl").exists():
                    time.sleep(0.01)

        run_folder.check_free = check_free

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: trained(config, run, patch=meet), range(2)))
    assert sorted(outcome.code for outcome in both) == [0, CONFIG_ERROR], both
    refused = next(outcome for outcome in both if outcome.code)
    assert "is being trained by process" in refused.err or "this very run already" in refused.err


def test_paths_through_a_file(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    inside = tmp_path / "file" / "inside"
    assert_one_line(trained(small_run(text), inside), CONFIG_ERROR, str(inside))
    outcome = airmoe("prepare", text / "text.txt", "--out", inside, "--tokenizer", "bytes")
    assert_one_line(outcome, CONFIG_ERROR, str(inside))


def test_a_suite_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    outcome = airmoe("suite", "main", "tiny", "--out", tmp_path / "file")
    assert_one_line(outcome, CONFIG_ERROR, str(tmp_path / "file"), "File exists", "Choose a path")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("target", ["nothere", "link"], ids=["dangling", "loop"])
def test_links_that_lead_nowhere(target: str, text: Path, tmp_path: Path) -> None:
    """Said before the text is prepared: for `exists` such a link is a free place."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    fresh = f"data.folder={tmp_path}/tokens"
    outcome = trained(small_run(text), link, fresh)
    assert_one_line(outcome, CONFIG_ERROR, f"run: got '{link}'", "new or empty folder")
    outcome = airmoe("prepare", text / "text.txt", "--out", link, "--tokenizer", "bytes")
    assert_one_line(outcome, CONFIG_ERROR, f"prepare.out: got '{link}'", "is there already")
    outcome = airmoe("suite", "main", "tiny", "--out", link)
    assert_one_line(outcome, CONFIG_ERROR, str(link), "Choose a path")
    inside = trained(small_run(text), link / "run")
    assert_one_line(inside, CONFIG_ERROR, str(link), "Choose a path")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_while_text_is_prepared(code: int, text: Path, tmp_path: Path) -> None:
    """A used-up quota is a full disk to whoever has it. There is no run yet, so no --resume."""

    def patch() -> None:
        def add(self: SplitWriter, tokens: Any) -> bool:
            raise OSError(code, os.strerror(code))

        SplitWriter.add = add

    arguments = ("prepare", text / "text.txt", "--out", tmp_path / "out", "--tokenizer", "bytes")
    more = ("--validation-fraction", 0.1, "--workers", 1)
    outcome = airmoe(*arguments, *more, patch=patch)
    assert_one_line(outcome, RUN_FAILED, "the disk is full", "run the same command again")
    assert airmoe(*arguments, *more).code == 0


def test_models_without_a_checkpoint(text: Path, tmp_path: Path) -> None:
    run = unfinished(text, tmp_path)
    shutil.rmtree(run / "checkpoint-2")
    for command in ("eval", "generate"):
        outcome = airmoe(command, run)
        assert_one_line(
            outcome, CONFIG_ERROR, f"run: got '{run}'", "checkpoint-N", "Train it first"
        )


# -- failures on the way ------------------------------------------------------------------------


def full_disk(number: int) -> Callable[[], None]:
    """From the tensor file of that number on, the disk is full."""

    def patch() -> None:
        now = kills.nth(number)

        def save_tensors(tensors: Any, path: Path) -> None:
            if now() or full:
                full.append(1)
                path.write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            original(tensors, path)

        full: list[int] = []
        original = checkpoints.save_tensors
        checkpoints.save_tensors = save_tensors

    return patch


def test_a_full_disk_keeps_the_checkpoint_before(text: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=6, eval_every=2)
    reference = tmp_path / "reference"
    assert in_process(lambda: train_here(override(config, []), reference)) == 0
    run = tmp_path / "run"
    outcome = trained(config, run, patch=full_disk(3 + 1))
    assert_one_line(
        outcome,
        RUN_FAILED,
        "step 4",
        "disk is full",
        f"{run}/checkpoint-2 is whole",
        f"--resume {run}",
    )
    left = ["checkpoint-2", "lock", "log.jsonl", "run.json"]
    assert sorted(path.name for path in run.iterdir()) == left
    outcome = airmoe("train", "--resume", run, patch=full_disk(1))
    assert_one_line(outcome, RUN_FAILED, "step 4", "disk is full")
    assert airmoe("train", "--resume", run).code == 0
    assert tensors_of(run / "checkpoint-6").keys() == tensors_of(reference / "checkpoint-6").keys()
    for folder in (run, reference):
        result = json.loads((folder / "result.json").read_text())
        del result["config"]["preset"]
        (folder / "result.json").write_text(json.dumps(result))
    assert_same_run(run, reference)


def test_a_full_disk_before_the_first_checkpoint(text: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=4, eval_every=2)
    outcome = trained(config, tmp_path / "run", patch=full_disk(1))
    assert_one_line(outcome, RUN_FAILED, "step 2", "No checkpoint was written before")
    assert airmoe("train", "--resume", tmp_path / "run").code == 0


def full_at(file: Path, number: int, code: int = errno.ENOSPC) -> Callable[[], None]:
    """The disk is full when that file is brought to it for the `number`th time."""

    def patch() -> None:
        now, original = kills.nth(number), os.fsync

        def fsync(handle: int) -> None:
            if file.exists() and os.path.samestat(os.fstat(handle), file.stat()) and now():
                raise OSError(code, os.strerror(code))
            original(handle)

        os.fsync = fsync

    return patch


@pytest.mark.parametrize(
    ("file", "number", "code", "kept"),
    [
        ("log.jsonl", 1, errno.ENOSPC, "No checkpoint was written before"),
        ("log.jsonl", 4, errno.EDQUOT, "{run}/checkpoint-2 is whole"),  # after 1, 2 and its eval, 3
        ("usage.safetensors.draft", 1, errno.ENOSPC, "{run}/checkpoint-4 is whole"),
        ("result.json.draft", 1, errno.ENOSPC, "{run}/checkpoint-4 is whole"),
    ],
    ids=["first line", "a line", "usage", "result"],
)
def test_a_full_disk_between_checkpoints(
    file: str, number: int, code: int, kept: str, text: Path, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = small_run(text, steps=4, eval_every=2)
    outcome = trained(config, run, patch=full_at(run / file, number, code))
    assert_one_line(
        outcome,
        RUN_FAILED,
        "the disk is full",
        kept.format(run=run),
        f"Make room, then: airmoe train --resume {run}\n",
    )
    assert list(run.glob("*.draft")) == []
    assert airmoe("train", "--resume", run).code == 0
    assert timeless_log(run) == timeless_log(finished)


def test_a_full_disk_before_there_is_a_run(text: Path, tmp_path: Path) -> None:
    """The remedy is to run the same command again, so it must not be refused then."""
    config, run = small_run(text, steps=1, eval_every=1), tmp_path / "run"
    outcome = trained(config, run, patch=full_at(run / "run.json.draft", 1))
    assert_one_line(outcome, RUN_FAILED, "the disk is full", "run the same command again")
    assert trained(config, run).code == 0


def broken_tensorboard(number: int) -> Callable[[], None]:
    """From the event of that number on, its disk is full."""

    def patch() -> None:
        records = pytest.importorskip("tensorboard.summary.writer.record_writer")
        original, now = records.RecordWriter.write, kills.nth(number)
        full: list[int] = []

        def write(self: Any, data: bytes) -> None:
            if now() or full:
                full.append(1)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(self, data)

        records.RecordWriter.write = write

    return patch


@pytest.mark.parametrize("number", [1, 3, 30], ids=["opening", "first line", "second line"])
def test_a_run_goes_on_without_its_tracker(number: int, text: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=4, eval_every=2, track="tensorboard")
    outcome = trained(config, tmp_path / "run", patch=broken_tensorboard(number))
    assert outcome.code == 0 and outcome.err == ""
    assert (tmp_path / "run" / "result.json").exists()
    said = [line for line in outcome.out.splitlines() if "training.track=tensorboard" in line]
    assert len(said) == 1
    assert "is off for the rest of this run" in said[0] and "No space left on device" in said[0]


def test_a_tracker_does_not_hide_why_a_run_stops(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def patch() -> None:
        broken_tensorboard(3)()
        full_at(run / "log.jsonl", 4)()

    config = small_run(text, steps=4, eval_every=2, track="tensorboard")
    outcome = trained(config, run, patch=patch)
    assert_one_line(outcome, RUN_FAILED, "the disk is full", f"{run}/checkpoint-2 is whole")


def test_a_really_full_disk(text: Path, finished: Path, tmp_path: Path) -> None:
    """Room for one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    one = sum(file.stat().st_size for file in (finished / "checkpoint-2").iterdir())
    size = f"size={one * 3 // 2}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount")
    try:
        config = small_run(text, steps=4, eval_every=2)
        outcome = trained(config, disk / "run")
        assert_one_line(outcome, RUN_FAILED, "disk is full", f"--resume {disk / 'run'}")
        (kept,) = checkpoints.checkpoints(disk / "run")
        assert step_of(kept) == 2 and tensors_of(kept)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert airmoe("train", "--resume", disk / "run").code == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def poison(step: int) -> Callable[[], None]:
    """One weight becomes infinite before that step."""

    def patch() -> None:
        original = TrainingLoop._take_step

        def take_step(self: TrainingLoop, *, watched: bool) -> Any:
            if self.step == step - 1:
                with torch.no_grad():
                    self.model.lm_head.weight[0, 0] = math.inf
            return original(self, watched=watched)

        TrainingLoop._take_step = take_step

    return patch


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_no_number_stops_the_run(log_every: int, text: Path, tmp_path: Path) -> None:
    """With rare logs it is noticed at the next evaluation, and still knows the step."""
    config = small_run(text, steps=9, eval_every=3, log_every=log_every)
    run = tmp_path / "run"
    outcome = trained(config, run, patch=poison(5))
    assert_one_line(
        outcome, RUN_FAILED, "step 5", "not a finite number", f"{run}/checkpoint-3", "learning_rate"
    )
    assert [step_of(path) for path in checkpoints.checkpoints(run)] == [3]
    assert not (run / "result.json").exists()
    assert all(
        tensor.isfinite().all()
        for tensor in load_file(run / "checkpoint-3" / "model.safetensors").values()
    )
    for line in (run / "log.jsonl").read_text().splitlines():
        assert json.loads(line)["step"] < 5 and math.isfinite(json.loads(line)["loss"])
    assert airmoe("train", "--resume", run).code == 0  # unpoisoned, it goes on


def test_a_gradient_that_is_no_number_stops_the_run(text: Path, tmp_path: Path) -> None:
    """The loss is fine, its gradient is not: nothing of that step may be saved."""

    def patch() -> None:
        now, original = kills.nth(3), loop.clip_grad_norm_

        def clip(parameters: Any, most: float) -> Any:
            weights = list(parameters)
            if now():
                weights[0].grad[0, 0] = math.nan
            return original(weights, most)

        loop.clip_grad_norm_ = clip

    config = small_run(text, steps=4, eval_every=3, log_every=1)
    outcome = trained(config, tmp_path / "run", patch=patch)
    assert_one_line(
        outcome, RUN_FAILED, "step 3", "not a finite number", "No checkpoint was written"
    )
    assert checkpoints.checkpoints(tmp_path / "run") == []


# -- use ----------------------------------------------------------------------------------------


def test_wrong_questions_to_a_trained_model(finished: Path, tmp_path: Path) -> None:
    cases: dict[tuple[Any, ...], list[str]] = {
        ("eval", finished, "--split", "test"): ["data.split: got 'test'", "train, validation"],
        ("eval", finished, "--checkpoint", "first"): ["checkpoint: got 'first'", "'best'"],
        ("eval", finished, "--quality-tokens", 0): ["quality_tokens: got 0"],
        ("eval", finished, "--data", tmp_path): ["data: got", "manifest"],
        ("generate", finished, "a " * 1200): ["generate.max_new_tokens: got 100", "2048", "2400 "],
        ("generate", finished, "--max-new-tokens", 2048): ["got 2048", "1 token"],
        ("generate", finished, "--max-new-tokens", 0): ["generate.max_new_tokens: got 0"],
        ("generate", finished, "--temperature", -1): ["generate.temperature: got -1"],
        ("generate", finished, "--nucleus", 0): ["generate.nucleus: got 0"],
        ("generate", finished, "--nucleus", 1.1): ["generate.nucleus: got 1.1"],
        ("generate", finished, "--seed", 2**70): ["generate.seed"],
        ("generate", finished, "--checkpoint", "x"): ["checkpoint: got 'x'"],
    }
    for arguments, parts in cases.items():
        assert_one_line(airmoe(*arguments), CONFIG_ERROR, *parts)


@pytest.mark.parametrize(
    "fields",
    [
        {"router": "expert_choice", "router_options": {}},
        {"router_options": {"num_codewords": 8, "shortlist_size": 16, "gate": "expert_choice"}},
    ],
    ids=["expert_choice", "air with its gate"],
)
def test_experts_that_choose_tokens_cannot_generate(
    fields: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    config = small_run(text, small_model(**fields), steps=1, eval_every=1)
    assert in_process(lambda: train_here(config, tmp_path / "run")) == 0
    assert best_checkpoint(tmp_path / "run").name == "checkpoint-1"
    assert_one_line(
        airmoe("generate", tmp_path / "run", "the"), CONFIG_ERROR, "experts choose tokens"
    )
    assert airmoe("eval", tmp_path / "run").code == 0


@pytest.mark.slow
def test_the_real_process_says_the_same(tmp_path: Path) -> None:
    process = started("train", "tiny", "training.stepz=5", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert_one_line(Outcome(process.returncode, out, err), CONFIG_ERROR, "training.stepz: got 5")
    assert out == ""
