"""Comparisons and costs: suites and reports, time and FLOPs, and what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from airmoe.commands import Method, Overrides, Preset, wide_console
from airmoe.errors import ConfigError, say


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


def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="paper (the default), paper-16k, paper-768, paper-g256, paper-zipf; "
            "cpu, cpu-swiglu, cpu-growth"
        ),
    ] = None,
    step: Annotated[
        bool, typer.Option("--step", help="whole training steps of the small preset")
    ] = False,
    decode: Annotated[bool, typer.Option("--decode", help="batches of 1, 8 and 64 tokens")] = False,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="from 4,096 to 1,048,576 experts")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="toy sizes, also on a CPU, to see that it runs")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="air, exact, listing, ...; may be repeated")
    ] = None,
    repeats: Annotated[int, typer.Option(help="samples; fewer if they take too long", min=1)] = 20,
    out: Annotated[Path, typer.Option(help="folder of the JSON files")] = Path(
        "benchmarks/results"
    ),
    data: Annotated[
        Path | None, typer.Option(help="with --step: train on what `prepare` wrote, then time")
    ] = None,
) -> None:
    """Time AIR and its alternatives on a GPU or a CPU, after checking their results."""
    from airmoe.experiments.bench.run import Bench

    run = Bench(
        wide_console(), cases or (), step, decode, scaling, quick, only or (), repeats, out, data
    )
    if not run.run():
        raise typer.Exit(1)


def flops(
    preset: Preset,
    overrides: Overrides = None,
    method: Method = None,
    every: Annotated[bool, typer.Option("--all", help="all methods side by side")] = False,
    tokens: Annotated[
        int | None,
        typer.Option(help="length of the run; default: the preset's, if in steps", min=1),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="that share a step; default: the paper's 4, or fewer", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="every term, counted both ways")] = False,
) -> None:
    """FLOPs of training by part, in the paper's convention and as our kernels compute."""
    import json

    from airmoe.experiments.flop_count import count_preset
    from airmoe.model import METHODS

    if every and method is not None:
        raise ConfigError("method", method, "cannot be given with --all", "Give one of them.")
    methods = METHODS if every else (method or "air",)
    count = count_preset(preset, methods, overrides or [], tokens=tokens, devices=devices)
    if as_json:
        print(json.dumps(count.to_json()))
    else:
        count.show(wide_console())


def doctor() -> None:
    """Show versions, devices and kernels in use, and how to install what is missing."""
    from airmoe.experiments.doctor import examine

    examine(Console())
