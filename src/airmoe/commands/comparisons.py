"""Runs beside each other: training them, tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from airmoe.commands import Overrides, Preset
from airmoe.errors import say


def suite(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="main, ablations, granularity, codebook")],
    preset: Preset,
    out: Annotated[Path, typer.Option(help="folder of the suite, new or begun")],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(help="runs of each variant: training.seed, + 1, ...")] = 1,
    tokens: Annotated[int | None, typer.Option(help="length of every run")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="the same, in passes; default: the preset's own length")
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="one more method, as train's; may be repeated")
    ] = None,
    processes: Annotated[int, typer.Option(help="torchrun's, that train each run together")] = 1,
) -> None:
    """Train runs to compare, at equal budgets. Run it again after a stop to continue."""
    from airmoe.experiments.suites import make_plan, run_suite

    plan = make_plan(
        name,
        preset,
        overrides or [],
        num_seeds=seeds,
        tokens=tokens,
        epochs=epochs,
        also=also or [],
    )
    if code := run_suite(plan, out, Console(), context.obj or (), processes):
        raise typer.Exit(code)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="suite folders, run folders, folders of them or of records"),
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder to write; default: report/ in the first of RUNS")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="folder that gets a JSON file per run, small enough to commit"),
    ] = None,
) -> None:
    """Tables and figures of finished runs: Markdown, LaTeX, one HTML page, and their data."""
    from airmoe.experiments.report import write_report

    console = Console()
    written = write_report(runs, out, records)
    for line in written.problems:
        say(console, line)
    say(console, f"{written.runs} runs reported:")
    for file in [*written.files, *written.records]:
        say(console, f"  {file}")
