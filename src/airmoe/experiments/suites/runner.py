"""Runs a suite: finished runs are skipped, begun ones go on, and a crash stops no other run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console

from airmoe.distributed import on_first_rank, rank, world_size
from airmoe.experiments.suites.execution import Outcome, OwnProcesses, in_this_group
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.plan import Plan, PlannedRun, check_warmup
from airmoe.experiments.suites.progress import Board
from airmoe.files import write_json
from airmoe.training import RunConfig
from airmoe.training.devices import check_device, check_sharding
from airmoe.training.display import PrepareDisplay
from airmoe.training.text import check_blocks, prepared_data

Execution = Callable[[SuiteFolder, PlannedRun], Outcome]


def run_suite(plan: Plan, out: Path, console: Console, modules: Sequence[str] = ()) -> int:
    """Run what is left of a plan; the exit code: 1 where a run failed, 128 + n after a signal n.

    Runs are processes of their own: `modules` are those that they import to know your routers.
    """
    under_torchrun = "LOCAL_RANK" in os.environ
    if under_torchrun:
        PartialState(cpu=not torch.cuda.is_available())
    suite = SuiteFolder(out)
    with ExitStack() as stack:

        def unfinished_runs() -> list[PlannedRun]:
            stack.enter_context(suite.locked())
            suite.check(plan)
            left = [run for run in plan.runs if suite.state(run.folder) != "finished"]
            # Those that failed come last: one that ends all of torchrun's processes every time must
            # not keep the others from their turn.
            return sorted(left, key=lambda run: suite.failure(run.folder).exists())

        left = on_first_rank(unfinished_runs)
        # All runs of a suite have the same text and recipe.
        steps = _known_steps(plan.runs[0].config, console) if left else 0
        # Only now: settings that were refused must not bind those of the next attempt.
        on_first_rank(lambda: suite.write(plan))
        board = Board(suite, plan.runs, steps, console if rank() == 0 else Console(quiet=True))
        for run in plan.runs:
            if run not in left:
                _clear_failure(suite, run)  # of an attempt before the one that finished it
                board.already_finished(run)
        own_processes = None if under_torchrun else stack.enter_context(OwnProcesses(modules))
        return _run_all(suite, left, board, own_processes or in_this_group)


def _run_all(
    suite: SuiteFolder, left: Sequence[PlannedRun], board: Board, execution: Execution
) -> int:
    failed = False
    for run in left:
        outcome = _run_one(suite, run, board, execution)
        if outcome.stopped_by is not None:
            board.stopped(run)
            return 128 + outcome.stopped_by
        failed = failed or outcome.code != 0
    board.summary()
    return 1 if failed else 0


def _run_one(suite: SuiteFolder, run: PlannedRun, board: Board, execution: Execution) -> Outcome:
    _clear_failure(suite, run)
    try:
        with board.running(run):
            outcome = execution(suite, run)
    except Exception as error:  # of one process: recorded, then it ends the group
        _write_failure(suite, run, Outcome(1, f"{type(error).__name__}: {error}"))
        raise
    if outcome.code:
        _write_failure(suite, run, outcome)
    if outcome.stopped_by is None:
        board.ended(run, outcome.message)
    return outcome


def _clear_failure(suite: SuiteFolder, run: PlannedRun) -> None:
    if rank() == 0:
        suite.failure(run.folder).unlink(missing_ok=True)


def _write_failure(suite: SuiteFolder, run: PlannedRun, outcome: Outcome) -> None:
    if rank() == 0:
        write_json(suite.failure(run.folder), {"message": outcome.message, "code": outcome.code})


def _known_steps(config: RunConfig, console: Console) -> int:
    """Length of every run, from its text; what no run could do is said before the first starts."""
    check_device(config, world_size())
    check_sharding(config, world_size())
    config.training.accumulation_steps(world_size())
    display = PrepareDisplay(console, config.data.corpus)
    with PartialState().main_process_first() if world_size() > 1 else nullcontext(), display:
        prepared = prepared_data(config.data, display.show)
    blocks = len(prepared.blocks("train", config.data.block_size))
    check_blocks(blocks, config.training.batch_size, config.data.block_size)
    steps = config.training.total_steps(blocks // config.training.batch_size)
    check_warmup(config.training, steps)
    return steps
