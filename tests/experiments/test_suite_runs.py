"""Suites that really train: skipped, stopped, killed and crashed, in two processes, reported."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airmoe.errors import ConfigError
from airmoe.experiments.suites import make_plan
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.run import start_process
from airmoe.files import check_unlocked, read_json
from airmoe.training.checkpoints import checkpoints
from airmoe.training.devices import Machine
from tests.experiments.forked import fork_runs
from tests.experiments.report_toys import write_run
from tests.training.command import (
    airmoe,
    assert_one_line,
    pythonpath,
    succeeds,
    table_rows,
)
from tests.training.runs import (
    assert_same_run,
    assignments,
    loss_of_a_new_model,
    small_model,
    small_run,
)

pytestmark = pytest.mark.slow  # every run is a process that imports torch

# Two runs: q1, the coarse model, and q2, AIR.
FIRST, SECOND = "q1-seed42", "q2-seed42"


@dataclass(frozen=True)
class Toy:
    """A suite of two short runs on a small text."""

    folder: Path
    settings: list[str]

    def arguments(self, out: Path, *more: str) -> list[Any]:
        return ["suite", "granularity", "tiny", *self.settings, *more, "--out", out]

    def run(
        self, out: Path, *more: str, patch: Callable[[], None] | None = None, code: int = 0
    ) -> str:
        """What it prints, with forks for the runs; it must end so and raise no error."""
        outcome = airmoe(*self.arguments(out, *more), patch=patch or fork_runs())
        assert (outcome.code, outcome.err) == (code, ""), outcome
        return outcome.out


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("suite")
    model = small_model(num_experts_per_tok=2)
    config = small_run(folder, model, steps=40, eval_every=8, log_every=4)
    return Toy(folder, [*assignments(config), "training.precision=auto"])


@pytest.fixture(scope="module")
def whole(toy: Toy) -> Path:
    """An uninterrupted suite with real processes, and what it printed."""
    out = toy.folder / "whole"
    (toy.folder / "whole.out").write_text(succeeds(*toy.arguments(out)))
    return out


def result(out: Path, run: str) -> dict[str, Any]:
    return read_json(out / run / "result.json")


def has_checkpoint(run: Path) -> bool:
    return run.is_dir() and bool(checkpoints(run)) and not (run / "result.json").exists()


def being_trained(run: Path) -> bool:
    """Whether a process holds the run's lock."""
    try:
        check_unlocked(run, "run", "is being trained")
    except ConfigError:
        return True
    return False


def test_a_whole_suite(whole: Path) -> None:
    chosen, *lines = (whole.parent / "whole.out").read_text().splitlines()
    assert chosen.startswith("training.precision=auto: ")
    assert lines[0] == f"{FIRST}  step 0/40  ? left  suite ? left"
    assert lines[1].startswith(f"{FIRST}  done  step 40/40  loss ") and "  tok/s " in lines[1]
    assert lines[2].startswith(f"{SECOND}  step 0/40  0:00:")
    assert lines[3].startswith(f"{SECOND}  done  step 40/40  loss ")
    best = [f"{result(whole, run)['best']['perplexity']:.2f}" for run in (FIRST, SECOND)]
    assert [row[:4] for row in table_rows("\n".join(lines))] == [
        ["q1", "42", "done", best[0]],
        ["q2", "42", "done", best[1]],
    ]
    expected = {"lock", "suite.json", FIRST, SECOND, f"{FIRST}.txt", f"{SECOND}.txt"}
    assert {path.name for path in whole.iterdir()} == expected
    assert f"{SECOND}  valid  step 40/40" in (whole / f"{SECOND}.txt").read_text()
    planned = read_json(whole / "suite.json")["runs"]
    for run in planned:
        assert result(whole, run["folder"])["config"] == run["config"]
        assert result(whole, run["folder"])["last"]["step"] == 40


def test_finished_runs_are_not_repeated(toy: Toy, whole: Path) -> None:
    """Nor is their text needed any more."""
    files = [whole / run / "result.json" for run in (FIRST, SECOND)]
    before = [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files]
    moved = toy.folder / "moved"
    (toy.folder / "tokens").rename(moved)
    try:
        printed = toy.run(whole)
    finally:
        moved.rename(toy.folder / "tokens")
    assert [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files] == before
    lines = printed.splitlines()
    assert lines[0].startswith(f"{FIRST}  done before  step 40/40")
    assert lines[1].startswith(f"{SECOND}  done before  step 40/40")
    assert table_rows(printed) == table_rows((toy.folder / "whole.out").read_text())


def test_epochs_are_compared_with_the_warmup_when_the_text_is_known(toy: Toy) -> None:
    out = toy.folder / "short"
    text = ["training.steps=null", "training.epochs=1", "training.batch_size=1000"]
    outcome = airmoe(*toy.arguments(out, *text, "training.micro_batch_size=1000"))
    assert_one_line(outcome, 2, "budget: got '1 steps', must be longer than the warm-up, 1 steps")
    assert not (out / "suite.json").exists()


def signal_suite(number: int) -> Callable[[int], None]:
    """The suite's own process, while it waits for a run."""
    return lambda _: os.kill(os.getpid(), number)


def test_stopped_then_killed_it_ends_as_if_nothing_had_been(toy: Toy, whole: Path) -> None:
    out = toy.folder / "killed"
    # A polite end in the first run: it writes a checkpoint, and the suite says how to go on.
    polite = fork_runs(lambda: has_checkpoint(out / FIRST), signal_suite(signal.SIGTERM))
    printed = toy.run(out, patch=polite, code=143)
    assert printed.splitlines()[-1] == f"Stopped in {FIRST}. Go on with the same command."
    said = (out / f"{FIRST}.txt").read_text().splitlines()[-1]
    step = int(said.removeprefix("Stopped by SIGTERM after step "))
    assert checkpoints(out / FIRST)[-1].name == f"checkpoint-{step}" and step < 40
    assert not (out / f"{FIRST}.failed.json").exists()
    # A kill in the second: its process must not train on.
    kill = fork_runs(lambda: has_checkpoint(out / SECOND), signal_suite(signal.SIGKILL))
    toy.run(out, patch=kill, code=-signal.SIGKILL)
    end = time.monotonic() + 20
    while being_trained(out / SECOND):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not (out / SECOND / "result.json").exists()
    first = (out / FIRST / "result.json").stat()
    printed = toy.run(out)
    assert printed.startswith(f"{FIRST}  done before")
    again = (out / FIRST / "result.json").stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    for run in (FIRST, SECOND):
        assert_same_run(out / run, whole / run)
    in_table = [row[:4] for row in table_rows(printed)]
    assert in_table == [row[:4] for row in table_rows((toy.folder / "whole.out").read_text())]
    assert read_json(out / "suite.json") == read_json(whole / "suite.json")


def test_ctrl_c_before_the_first_checkpoint(toy: Toy) -> None:
    out = toy.folder / "interrupted"
    begun = out / FIRST / "run.json"
    interrupt = fork_runs(begun.exists, signal_suite(signal.SIGINT))
    assert (
        toy.run(out, patch=interrupt, code=130).splitlines()[-1]
        == f"Stopped in {FIRST}. Go on with the same command."
    )
    assert not (out / FIRST / "result.json").exists() and not (out / SECOND).exists()
    assert not (out / f"{FIRST}.failed.json").exists()


def test_a_crashed_run_stops_no_other(toy: Toy, whole: Path) -> None:
    out = toy.folder / "crashed"
    # As the kernel does where memory ends.
    crash = fork_runs(lambda: has_checkpoint(out / FIRST), lambda run: os.kill(run, signal.SIGKILL))
    printed = toy.run(out, patch=crash, code=1)
    assert read_json(out / f"{FIRST}.failed.json") == {"message": "killed by SIGKILL", "code": -9}
    assert f"{FIRST}  failed  killed by SIGKILL\n" in printed
    assert [row[:3] for row in table_rows(printed)] == [
        ["q1", "42", "failed"],
        ["q2", "42", "done"],
    ]
    assert printed.splitlines()[-1].startswith(f"{FIRST} failed: killed by SIGKILL (all it ")
    assert_same_run(out / SECOND, whole / SECOND)
    # What is left of an attempt before the one that finished a run goes away.
    (out / f"{SECOND}.failed.json").write_text(json.dumps({"message": "old", "code": 1}))
    toy.run(out)  # tried again
    assert list(out.glob("*.failed.json")) == []
    assert_same_run(out / FIRST, whole / FIRST)


def test_a_real_process_ends_with_its_suite(
    toy: Toy, whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run whose suite is gone before it has begun touches nothing.

    Nor does it take a file of the working folder for a module, except one that it was given.
    """
    (tmp_path / "accelerate.py").write_text("open('planted', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", pythonpath())
    before = sorted((whole / FIRST).iterdir())
    first = make_plan("granularity", "tiny", toy.settings).runs[0]

    def printed_by(modules: list[str], *, alone: bool) -> tuple[int, str]:
        with (tmp_path / "printed").open("wb") as printed:
            process = start_process(SuiteFolder(whole), first, printed, modules, 1)
            assert process.stdin is not None
            if alone:
                process.stdin.close()
            return process.wait(), (tmp_path / "printed").read_text()

    gone = "airmoe: the suite that started this run is gone\n"
    assert printed_by([], alone=True) == (1, gone)
    code, text = printed_by(["no_such_module"], alone=False)
    assert code == 2 and text.startswith("airmoe: import: got 'no_such_module'")
    assert sorted((whole / FIRST).iterdir()) == before
    assert not (tmp_path / "planted").exists()


def test_why_a_run_failed_is_one_line(toy: Toy) -> None:
    out = toy.folder / "diverged"
    settings = ["training.learning_rate=1e30", "training.max_grad_norm=1e30"]
    printed = toy.run(out, *settings, code=1)
    for run in (FIRST, SECOND):
        failure = read_json(out / f"{run}.failed.json")
        assert failure["code"] == 1 and "\n" not in failure["message"]
        assert failure["message"].startswith("step ")
        assert "the loss or its gradient is not a finite number" in failure["message"]
        assert f"{run} failed: {failure['message']} (all it printed: " in printed
    assert [row[2:] for row in table_rows(printed)] == [["failed", "-", "-"]] * 2


def test_two_processes_train_each_run_together(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run fails in both, because its text is another than at its start."""
    out = toy.folder / "together"
    short = ["training.steps=4", "training.eval_every=2"]
    plan = make_plan("granularity", "tiny", [*toy.settings, *short])
    settled, _ = plan.settled(Machine.this(2), None)
    begun = settled.runs[0].config
    write_run(out / FIRST, begun, result=False, about={"data_sha256": "another"})
    monkeypatch.setenv("PYTHONPATH", pythonpath())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    outcome = airmoe(*toy.arguments(out, *short, "--processes", "2"))
    assert [row[:3] for row in table_rows(outcome.out)] == [
        ["q1", "42", "failed"],
        ["q2", "42", "done"],
    ]
    assert (outcome.code, outcome.err) == (1, "")
    failure = read_json(out / f"{FIRST}.failed.json")
    assert "must hold the text with which" in failure["message"]
    assert result(out, SECOND)["last"]["step"] == 4
    training = read_json(out / SECOND / "checkpoint-4" / "training.json")
    assert training["processes"] == 2
    assert f"{SECOND}  valid  step 4/4" in (out / f"{SECOND}.txt").read_text()
    # Both micro-batches make one, also for the codebook; only the jitter knows processes.
    wanted = loss_of_a_new_model(plan.runs[1].config, micro_batches=1)
    assert result(out, SECOND)["log"][0]["loss"] == pytest.approx(wanted, rel=1e-3)


def test_torchrun_is_started_by_the_suite(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = toy.arguments(toy.folder / "twice")
    assert_one_line(airmoe(*arguments, "--processes", "0"), 2, "processes: got 0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert_one_line(airmoe(*arguments), 2, "suite: got 'torchrun'", "--processes N")


def test_all_methods_and_ablations_to_their_report(tmp_path: Path) -> None:
    """`make report` at toy size."""
    pytest.importorskip("matplotlib")
    config = small_run(tmp_path, small_model(num_experts_per_tok=8), steps=6, eval_every=3)
    suites, out = tmp_path / "suites", tmp_path / "report"
    for name in ("main", "ablations"):
        arguments = ["suite", name, "tiny", *assignments(config), "--out", suites / name]
        succeeds(*arguments, patch=fork_runs())
    succeeds("report", suites, "--out", out)
    page, text = ((out / f"report.{end}").read_text() for end in ("html", "md"))
    results = [read_json(file) for file in suites.glob("*/*/result.json")]
    assert len(results) == 5 + 5
    for best in (result["best"] for result in results):
        assert f"{best['perplexity']:.2f}" in text and best["flops"] > 0
    assert page.count("<svg") >= 2 * 4 and "http://" not in page.replace("http://www.w3.org", "")
    assert "Nothing." in text.partition("Left out, and why")[2]
