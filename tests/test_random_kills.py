"""Whatever is killed at random moments and begun again ends with the bits of what never was.

Half of the kills come at a random operation on a file, the others after a random time. How many
there are is AIRMOE_KILLS, by default few: `AIRMOE_KILLS=100 pytest tests/test_random_kills.py`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from airmoe.data import PrepareConfig, prepare
from airmoe.errors import ConfigError
from airmoe.experiments.report import write_report
from airmoe.experiments.suites import Plan, make_plan, run_suite
from airmoe.files import LOCK, check_unlocked
from airmoe.training import RunConfig
from tests.data.common import folder_bytes
from tests.experiments.forked import fork_runs
from tests.training.kills import killed_at_operation, on_file_operation
from tests.training.runs import (
    OPTIONS,
    Whole,
    assert_same_run,
    assignments,
    in_process,
    quiet,
    resume_here,
    small_model,
    small_run,
    train_here,
    trained,
    write_text,
)

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("AIRMOE_KILLS", "8"))
Job = Callable[[], object]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A short run with lists that live several steps, and the one that was never killed."""
    folder = tmp_path_factory.mktemp("kills")
    options = OPTIONS | {"refresh_every": 3}
    model = small_model(num_experts_per_tok=2, router_options=options)
    config = small_run(folder, model, documents=60, steps=8, eval_every=2, log_every=1)
    return Whole(config, trained(config, folder / "whole"))


def measured(job: Job, folder: Path) -> tuple[int, float]:
    """How many operations on files of the folder `job` does, and how many seconds it takes."""
    counter = folder.with_name(f"{folder.name}.operations")

    def counted() -> None:
        seen: list[None] = []
        on_file_operation(folder, lambda: seen.append(None))
        job()
        counter.write_text(str(len(seen)))

    start = time.monotonic()
    assert in_process(counted) == 0
    seconds = time.monotonic() - start
    operations = int(counter.read_text())
    counter.unlink()
    return operations, seconds


def killed_after(job: Job, seconds: float) -> int:

    def dying() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a process as abruptly as SIGKILL
        signal.setitimer(signal.ITIMER_REAL, seconds)
        job()

    return in_process(dying)


def killed(job: Job, folder: Path, check: Job, share: int) -> None:
    """Begin `job` again after every kill until it ends by itself, `check` what it left, repeat.

    `check` removes what it made. There are as many kills as this `share` of the work gets.
    """
    draw, left = random.Random(share), -(-KILLS * share // 8)  # rounded up
    operations, seconds = measured(job, folder)
    check()
    in_a_row = 0
    while left > 0:
        if draw.random() < 0.5:
            code = killed_at_operation(job, folder, draw.randint(1, operations))
        else:
            code = killed_after(job, draw.uniform(0, seconds))
        assert code in (0, -signal.SIGKILL, -signal.SIGALRM), code
        left -= code != 0
        in_a_row = in_a_row + 1 if code else 0
        if in_a_row == 3:  # now to the end, or it would begin again and again
            assert in_process(job) == 0
            code = 0
        if code == 0:
            check()
            in_a_row = 0
    assert in_process(job) == 0
    check()


def test_train(toy: Whole, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def job() -> None:
        if (run / "run.json").exists():
            resume_here(run)
        else:
            train_here(toy.config, run)

    def check() -> None:
        assert_same_run(run, toy.path)
        shutil.rmtree(run)

    killed(job, run, check, 3)


def test_prepare(tmp_path: Path) -> None:
    text = write_text(tmp_path, 120)
    os.mkdir(tmp_path / "work")

    def settings(out: Path) -> PrepareConfig:
        return PrepareConfig(
            corpus=str(text), tokenizer="bpe:280", out=str(out), validation_fraction=0.1
        )

    prepare(settings(tmp_path / "whole"), _shard_tokens=700)
    whole = folder_bytes(tmp_path / "whole")

    def check() -> None:
        assert os.listdir(tmp_path / "work") == ["out"]
        assert folder_bytes(tmp_path / "work" / "out") == whole
        shutil.rmtree(tmp_path / "work" / "out")

    out = tmp_path / "work" / "out"
    killed(lambda: prepare(settings(out), _shard_tokens=700), out.parent, check, 2)


def plan_of(config: RunConfig) -> Plan:
    short = ["training.steps=4", "training.eval_every=2"]
    return make_plan("granularity", "tiny", [*assignments(config), *short])


@pytest.fixture(scope="module")
def suite(toy: Whole) -> Path:

    def job() -> None:
        fork_runs()()
        assert run_suite(plan_of(toy.config), toy.path.parent / "suite", quiet()) == 0

    assert in_process(job) == 0
    return toy.path.parent / "suite"


def wait_for_runs(suite: Path) -> None:
    """A run ends a moment after its suite."""
    deadline = time.monotonic() + 20
    for lock in suite.glob(f"*/{LOCK}"):
        while time.monotonic() < deadline:
            try:
                check_unlocked(lock.parent, "run", "is being trained")
                break
            except ConfigError:
                time.sleep(0.01)


def test_suite(toy: Whole, suite: Path, tmp_path: Path) -> None:
    """The suite's own process is killed, and with it the run it waits for."""
    plan, out = plan_of(toy.config), tmp_path / "suite"

    def job() -> None:
        wait_for_runs(out)
        fork_runs()()
        assert run_suite(plan, out, quiet()) == 0

    def check() -> None:
        for run in plan.runs:
            assert_same_run(out / run.folder, suite / run.folder)
        names = sorted(path.name for path in suite.iterdir())
        assert sorted(path.name for path in out.iterdir()) == names
        shutil.rmtree(out)

    killed(job, out, check, 2)


def test_report(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    write_report([suite], tmp_path / "whole")
    whole = folder_bytes(tmp_path / "whole")

    def check() -> None:
        assert folder_bytes(out) == whole
        shutil.rmtree(out)

    killed(lambda: write_report([suite], out), out, check, 1)
