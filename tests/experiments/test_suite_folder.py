"""The folder of a suite and what the command shows of it; nothing is trained here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from airmoe.errors import ConfigError
from airmoe.experiments.suites import Plan, make_plan
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.progress import Board, newest
from airmoe.experiments.suites.run import _last_words
from airmoe.training.devices import Machine, settle
from tests.experiments.report_toys import write_run
from tests.training.command import table_rows


def open_suite(path: Path, plan: Plan) -> SuiteFolder:
    """As a start of the suite does, without running anything."""
    suite = SuiteFolder(path)
    suite.check(plan)
    suite.write(plan)
    return suite


def test_the_folder_holds_the_plan(tmp_path: Path) -> None:
    plan = make_plan("main", "tiny", ["training.log_every=10"])
    suite = open_suite(tmp_path / "out", plan)
    values = json.loads((tmp_path / "out" / "suite.json").read_text())
    runs = values.pop("runs")
    assert values == {"format": 1, "suite": "main", "preset": "tiny"}
    assert runs[1] == {
        "folder": "peer-seed42",
        "variant": "peer",
        "seed": 42,
        "config": plan.runs[1].config.to_json(),
    }
    assert suite.config("peer-seed42") == plan.runs[1].config


def test_seeds_and_methods_may_be_added_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    open_suite(out, make_plan("main", "tiny"))
    open_suite(out, make_plan("main", "tiny", num_seeds=2))
    more = open_suite(tmp_path / "more", make_plan("main", "tiny"))
    open_suite(more.path, make_plan("main", "tiny", also=["expert_choice"]))
    before = (out / "suite.json").read_bytes()
    others = {
        "suite = 'main' (now 'ablations')": make_plan("ablations", "tiny", num_seeds=2),
        "preset = 'tiny' (now 'small')": make_plan("main", "small", num_seeds=2),
        "training.steps = 360 (now 9)": make_plan("main", "tiny", num_seeds=2, tokens=5000),
        "run 'air-seed43' (now no run of it)": make_plan("main", "tiny"),
    }
    for difference, plan in others.items():
        with pytest.raises(ConfigError) as caught:
            open_suite(out, plan)
        assert difference in str(caught.value) and "another --out" in str(caught.value)
    assert (out / "suite.json").read_bytes() == before


def test_a_run_with_other_settings_is_not_touched(tmp_path: Path) -> None:
    plan = make_plan("main", "tiny")
    other = make_plan("main", "tiny", tokens=5000).runs[0].config
    write_run(tmp_path / "air-seed42", other, result=False)
    with pytest.raises(ConfigError, match=r"air-seed42.*other settings: training.steps = 9 .now"):
        open_suite(tmp_path, plan)
    assert not (tmp_path / "suite.json").exists()
    write_run(tmp_path / "single", plan.runs[0].config, result=False)
    with pytest.raises(ConfigError, match="holds a single run"):
        open_suite(tmp_path / "single", plan)


def test_auto_means_the_same_for_all_runs_on_any_machine() -> None:
    plan = make_plan("main", "small", ["training.precision=auto"])
    tight = Machine(cuda=True, bf16=True, triton=True, memory=29 * 2**28, processes=1)
    options = [run.config.training for run in plan.runs]
    sizes = [settle(run.config, tight)[0].training.micro_batch_size for run in plan.runs]
    assert {one.micro_batch_size for one in options} == {"auto"} and len(set(sizes)) > 1
    settled, lines = plan.settled(tight, None)
    found = {
        (r.config.training.precision, r.config.training.micro_batch_size) for r in settled.runs
    }
    assert found == {("bf16", min(sizes))} and len(lines) == 2
    on_cpu = Machine(cuda=False, bf16=False, triton=False, memory=0, processes=1)
    assert plan.settled(on_cpu, settled) == (settled, [])
    assert plan.settled(on_cpu, None)[0] != settled


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"format": 2, "runs": []}', '{"format": 1, "runs": 7}'),
        '{"format": 1, "suite": "main", "preset": "tiny", "runs": [{"variant": "air"}]}',
    ],
)
def test_a_plan_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text(text)
    with pytest.raises(ConfigError, match=r"suite\.json.*cannot be read"):
        open_suite(tmp_path, make_plan("main", "tiny"))


@pytest.mark.parametrize(
    ("printed", "code", "words"),
    [
        ("Traceback:\n  a\nAcceleratorError: bad\nHint.\n", 1, "AcceleratorError: bad"),
        ("airmoe: the disk is full\nx.errors.ChildFailedError: \n", 1, "the disk is full"),
        ("OutOfMemoryError: no\nx.errors.ChildFailedError: \n", 1, "OutOfMemoryError: no"),
        ("", 3, "ended with code 3"),
        ("step 5\n", -9, "killed by SIGKILL"),
    ],
)
def test_why_a_run_failed_is_one_line(printed: str, code: int, words: str) -> None:
    assert _last_words(printed.encode(), code) == words


# -- what it shows --------------------------------------------------------------------------


def test_a_growing_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert newest(log) == {}
    lines = [{"step": 1, "loss": 5.5, "perplexity": 9.0}, {"step": 2, "loss": 5.0}]
    log.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo')
    assert newest(log) == {"step": 2, "loss": 5.0, "perplexity": 9.0}
    log.write_text(json.dumps({"x": "y" * 2**16}) + "\n" + json.dumps(lines[1]) + "\n")
    assert newest(log) == lines[1]  # of a long log the end


def write_result(path: Path, perplexity: float, seconds: float) -> None:
    path.mkdir(exist_ok=True)
    numbers = {"loss": 3.0, "perplexity": perplexity}
    evaluation = {"kind": "eval", "step": 360, "tokens": 1, "seconds": seconds, **numbers}
    result = {"best": evaluation, "last": evaluation, "seconds": seconds}
    (path / "result.json").write_text(json.dumps(result | {"tokens_per_second": 9876.5}))


def board_of(folder: Path, **options: Any) -> tuple[Board, io.StringIO]:
    """Of the suite `main`, in which AIR is finished."""
    write_result(folder / "air-seed42", perplexity=20.5, seconds=100.0)
    file = io.StringIO()
    console = Console(file=file, **{"width": 150, **options})
    return Board(SuiteFolder(folder), make_plan("main", "tiny").runs, 360, console), file


def test_the_line_of_a_run(tmp_path: Path) -> None:
    peer, (board, _) = make_plan("main", "tiny").runs[1], board_of(tmp_path)
    # Four runs of 100 seconds to go.
    assert board.line(peer) == "peer-seed42  step 0/360  0:01:40 left  suite 0:06:40 left"
    (tmp_path / "peer-seed42").mkdir()
    evaluation = {"kind": "eval", "step": 60, "loss": 4.0, "perplexity": 54.6, "seconds": 50.0}
    train = {"kind": "train", "step": 90, "loss": 3.9, "tokens_per_second": 1234, "seconds": 60.0}
    lines = f"{json.dumps(evaluation)}\n{json.dumps(train)}\n"
    (tmp_path / "peer-seed42" / "log.jsonl").write_text(lines)
    # 240 seconds in all: 180 left, and three runs of (100 + 240) / 2.
    assert board.line(peer) == (
        "peer-seed42  step 90/360  loss 3.900  ppl 54.60  tok/s 1,234  0:03:00 left  "
        "suite 0:11:30 left"
    )


def test_the_lines_of_a_log_and_the_table(tmp_path: Path) -> None:
    air, peer, *others = make_plan("main", "tiny").runs
    board, file = board_of(tmp_path)
    board.finished(air, "done before")
    with board.running(peer):
        pass
    board.failed(peer, "killed by SIGKILL")
    for run in others:
        with board.running(run):
            write_result(tmp_path / run.folder, perplexity=30.0, seconds=60.0)
        board.finished(run)
    board.summary()
    lines = file.getvalue().splitlines()
    done = "step 360/360  loss 3.000  ppl 20.50  tok/s 9,876  took 0:01:40"
    assert lines[:4] == [
        f"air-seed42  done before  {done}",
        "peer-seed42  step 0/360  0:01:40 left  suite 0:06:40 left",
        "peer-seed42  failed  killed by SIGKILL",
        "hierarchical-seed42  step 0/360  0:01:40 left  suite 0:05:00 left",
    ]
    assert table_rows(file.getvalue()) == [
        ["air", "42", "done", "20.50", "1.7"],
        ["peer", "42", "failed", "-", "-"],
        ["hierarchical", "42", "done", "30.00", "1.0"],
        ["exact", "42", "done", "30.00", "1.0"],
        ["coarse", "42", "done", "30.00", "1.0"],
    ]
    assert lines[-1].startswith("peer-seed42 failed: killed by SIGKILL (all it printed: ")
    assert lines[-1].endswith("peer-seed42.txt)")


def test_on_a_terminal_the_line_is_updated_in_place(tmp_path: Path) -> None:
    runs = make_plan("main", "tiny").runs
    board, file = board_of(tmp_path, force_terminal=True, width=60, legacy_windows=False)
    with board.running(runs[1]):
        pass
    board.finished(runs[0])
    going_on, erase, over = file.getvalue().partition("\x1b[2K")
    assert erase and going_on.count("\n") == 1 and "peer-seed42  step 0/360" in going_on
    assert over.startswith("air-seed42  done  step 360/360") and over.count("\n") == 1
