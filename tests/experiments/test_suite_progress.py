"""What a suite shows: how far each run is, how long it will take, and how it ended."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from airmoe.experiments.suites import make_plan
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.progress import (
    Board,
    Pace,
    duration,
    last_lines,
    pace_of,
    suite_left,
)


def test_times() -> None:
    pace = Pace(step=10, steps=40, seconds=30.0)
    assert (pace.whole, pace.left) == (120.0, 90.0)
    assert suite_left([], None, [None, None]) is None
    assert suite_left([100.0], None, [None, None]) == 200.0
    # 90 to go, then one run of the mean of 100 and 120, then three quarters of one.
    assert suite_left([100.0], pace, [None, pace]) == 90.0 + 110.0 + 0.75 * 110.0
    assert duration(None) == "?" and duration(3725.4) == "1:02:05"
    assert {duration(float(damaged)) for damaged in ("nan", "inf", "1e300", "-1")} == {"?"}


def test_a_growing_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert last_lines(log) == [] and pace_of([], 9) is None
    line = {"kind": "train", "step": 1, "tokens": 9, "loss": 5.5, "seconds": 2.0}
    log.write_text(json.dumps(line) + '\n{"kind": "train", "step": 2, "sec')
    assert last_lines(log) == [line]
    assert pace_of(last_lines(log), 9) == Pace(1, 9, 2.0)
    long = [json.dumps({**line, "step": step, "x" * 947: 0}) for step in range(100, 200)]
    log.write_text("\n".join(long) + "\n")
    assert [line["step"] for line in last_lines(log)] == list(range(137, 200))  # 64 KiB


@pytest.mark.parametrize(
    "damage",
    [{"step": "x"}, {"step": 0}, {"seconds": None}, {"loss": "x"}, {"tokens_per_second": []}],
    ids=str,
)
def test_damaged_lines_of_a_log_are_passed_over(tmp_path: Path, damage: dict[str, Any]) -> None:
    line = {"kind": "train", "step": 1, "tokens": 9, "loss": 5.5, "seconds": 2.0}
    write_log(tmp_path, line, {**line, "step": 2, **damage})
    assert last_lines(tmp_path / "log.jsonl") == [line]


def write_log(path: Path, *lines: dict[str, Any]) -> None:
    path.mkdir(exist_ok=True)
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_result(path: Path, perplexity: float, seconds: float) -> None:
    path.mkdir(exist_ok=True)
    evaluation = {"step": 360, "loss": 3.0, "perplexity": perplexity}
    result = {"best": evaluation, "last": evaluation, "seconds": seconds}
    (path / "result.json").write_text(json.dumps(result | {"tokens_per_second": 9876.5}))


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """AIR is finished, PEER goes on, three wait."""
    plan = make_plan("main", "tiny")
    write_result(tmp_path / "air-seed42", perplexity=20.5, seconds=100.0)
    console = Console(file=io.StringIO(), width=150)
    return Board(SuiteFolder(tmp_path), plan.runs, 360, console)


def test_the_line_of_a_run(board: Board, tmp_path: Path) -> None:
    peer = make_plan("main", "tiny").runs[1]
    # Four runs of 100 seconds to go.
    assert board.line(peer) == "peer-seed42  step 0/360  ? left  suite 0:06:40 left"
    evaluation = {"kind": "eval", "step": 60, "loss": 4.0, "perplexity": 54.6, "seconds": 50.0}
    train = {"kind": "train", "step": 90, "loss": 3.9, "tokens_per_second": 1234, "seconds": 60.0}
    write_log(tmp_path / "peer-seed42", *({**line, "tokens": 9} for line in (evaluation, train)))
    # 240 seconds in all: 180 left, and three runs of (100 + 240) / 2.
    assert board.line(peer) == (
        "peer-seed42  step 90/360  loss 3.900  ppl 54.60  tok/s 1,234  0:03:00 left  "
        "suite 0:11:30 left"
    )


def shown(board: Board) -> list[str]:
    return board._console.file.getvalue().splitlines()  # pyright: ignore


def test_the_lines_of_a_log_and_the_table(board: Board, tmp_path: Path) -> None:
    air, peer, hierarchical, exact, coarse = make_plan("main", "tiny").runs
    board.already_finished(air)
    with board.running(peer):
        pass
    board.ended(peer, "killed by SIGKILL")
    for run in (hierarchical, exact, coarse):
        with board.running(run):
            write_result(tmp_path / run.folder, perplexity=30.0, seconds=60.0)
        board.ended(run)
    board.summary()
    lines = shown(board)
    done = "step 360/360  loss 3.000  ppl 20.50  tok/s 9,876  took 0:01:40"
    assert lines[:4] == [
        f"air-seed42  done before  {done}",
        "peer-seed42  step 0/360  ? left  suite 0:06:40 left",
        "peer-seed42  failed  killed by SIGKILL  suite 0:05:00 left",
        "hierarchical-seed42  step 0/360  ? left  suite 0:05:00 left",
    ]
    assert lines[4].endswith("took 0:01:00  suite 0:02:40 left")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
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
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, legacy_windows=False)
    board = Board(SuiteFolder(tmp_path), runs, 360, console)
    with board.running(runs[0]):
        pass
    write_result(tmp_path / "air-seed42", perplexity=20.5, seconds=100.0)
    board.ended(runs[0])
    going_on, erase, over = file.getvalue().partition("\x1b[2K")
    assert erase and going_on.count("\n") == 1
    assert "air-seed42  step 0/360  ? left  suite ? left" in going_on
    assert over.startswith("air-seed42  done  step 360/360") and over.count("\n") == 1


def test_the_name_of_the_folder_is_neither_markup_nor_escape_codes(tmp_path: Path) -> None:
    suite = SuiteFolder(tmp_path / "\x1b[31m[bold]x")
    plan = make_plan("main", "tiny", [])
    console = Console(file=io.StringIO(), width=200)
    board = Board(suite, plan.runs, 360, console)
    suite.path.mkdir()
    for run in plan.runs:
        write_result(suite.run(run.folder), perplexity=30.0, seconds=60.0)
    board.summary()
    text = "".join("".join(shown(board)).split())  # a long title is wrapped
    assert r"\x1b[31m[bold]x" in text and "\x1b" not in text
