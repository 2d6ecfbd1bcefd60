"""`make bench`: AIR beside the paper's listing and PyPI's PEER-pytorch, on a CPU, in one run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.contenders import (
    AirLayer,
    HierarchicalLayer,
    Listing,
    PeerLayer,
    PeerPackage,
    TopKLayer,
)
from benchmarks.inputs import Shape, TokenSource, describe_cells
from benchmarks.machine import describe_machine
from benchmarks.measure import Entry, Result, measure
from benchmarks.report import (
    Ratio,
    comparison_ratios,
    growth_ratio,
    print_group,
    print_linear_costs,
)

RESULTS = Path(__file__).parent / "results"
FULL = Shape()
QUICK = Shape(
    num_tokens=256,
    dim=32,
    num_experts=1024,
    top_k=32,
    num_codewords=16,
    shortlist_size=128,
    num_heads=4,
    codebook_updates=3,
)
STYLES = {True: "green", False: "bold red", None: "default"}
GROWTH = 16  # 65,536 -> 1,048,576 experts


@dataclass(frozen=True)
class Plan:
    """What is measured: three groups, each of contenders that take turns."""

    gelu: list[Entry]  # AIR, the listing and PEER-pytorch first
    swiglu: list[Entry]  # AIR and the listing
    growth: list[Entry]  # AIR with E and with 16 E experts
    quick: bool  # a toy size, in one process


def make_plan(seed: int, quick: bool) -> Plan:
    """Slow contenders get fewer rounds; AIR, the fastest, does several steps in each."""
    source = TokenSource(QUICK if quick else FULL, seed)
    few, two, some, many = (1, 1, 1, 1) if quick else (1, 2, 3, 5)
    air = partial(Entry, source=source, steps=1 if quick else 4)
    gelu, gated = partial(AirLayer, form="gelu"), partial(AirLayer, form="swiglu")
    larger = source.with_experts(GROWTH * source.shape.num_experts)
    return Plan(
        gelu=[
            air("AIR", gelu, rounds=some, refreshes=some),
            Entry("paper's listing", partial(Listing, form="gelu"), source, two),
            Entry("PEER-pytorch", PeerPackage, source, some),
            air("AIR + balance loss", partial(gelu, balance=True), rounds=two),
            Entry("airmoe PEER", partial(PeerLayer, form="gelu"), source, few),
            Entry("airmoe hierarchical", partial(HierarchicalLayer, form="gelu"), source, few),
            Entry("airmoe exact top-K", partial(TopKLayer, form="gelu"), source, few),
        ],
        swiglu=[
            air("AIR", gated, rounds=some, refreshes=some),
            Entry("paper's listing", partial(Listing, form="swiglu"), source, few),
        ],
        growth=[
            air(f"E = {source.shape.num_experts:,}", gelu, rounds=many, refreshes=two, steps=2),
            Entry(f"E = {larger.shape.num_experts:,}", gelu, larger, many, refreshes=few),
        ],
        quick=quick,
    )


@dataclass(frozen=True)
class Report:
    """Everything one run found."""

    content: dict[str, Any]  # for the JSON file
    ratios: list[Ratio]
    complete: bool  # every contender got a time


def run(plan: Plan, threads: int, console: Console) -> Report:
    """Measure everything and print it as it comes; the ratios are left to be printed last."""
    source, started = plan.gelu[0].source, time.time()
    cells = describe_cells(source)
    console.print(f"{source.shape}, seed {source.seed}, {threads} threads")
    if plan.quick:
        console.print("A toy size: what follows shows that everything runs, not how fast.")
    console.print(
        f"tokens: cosine to their codeword {cells.mean_cosine:.2f}, tokens per cell "
        f"{cells.mean_size:.0f} on average, {cells.largest} at most, {cells.empty} cells empty"
    )
    results: dict[str, list[Result]] = {}
    titles = {
        "gelu": "two matrices with GELU",
        "swiglu": "SwiGLU",
        "growth": "AIR as the experts grow (GELU)",
    }
    for group, title in titles.items():
        console.print(f"measuring: {title} ...", style="dim")
        results[group] = measure(getattr(plan, group), threads, isolate=not plan.quick)
        print_group(console, title, results[group])
    print_linear_costs(console, results["growth"])
    ratios = all_ratios(results)
    if plan.quick:
        ratios = [replace(ratio, target=None) for ratio in ratios]
    content = {
        "quick": plan.quick,
        "seed": source.seed,
        "shape": asdict(source.shape),
        "cells": asdict(cells),
        "threads": threads,
        **describe_machine(),
        "started_unix": started,
        "wall_seconds": time.time() - started,
        "results": {group: [r.as_json() for r in rows] for group, rows in results.items()},
        "ratios": [asdict(ratio) | {"met": ratio.met} for ratio in ratios],
    }
    complete = all(result.status == "timed" for rows in results.values() for result in rows)
    return Report(content, ratios, complete)


def all_ratios(results: dict[str, list[Result]]) -> list[Ratio]:
    """The numbers that are printed last."""
    air, listing, peer, *_ = results["gelu"]
    gated_air, gated_listing = results["swiglu"]
    small, large = results["growth"]
    return [
        *comparison_ratios(air, listing, "AIR against the paper's listing (GELU)"),
        *comparison_ratios(air, peer, "AIR against PEER-pytorch (GELU)"),
        *comparison_ratios(gated_air, gated_listing, "AIR against the paper's listing (SwiGLU)"),
        growth_ratio(small, large, f"AIR forward with {GROWTH} times the experts"),
    ]


def main(
    quick: Annotated[bool, typer.Option(help="A toy size, to see that it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Of tokens and parameters.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Default: as torch decides.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Time and peak memory of AIR and its alternatives; every sample goes into the JSON file."""
    console = Console()
    report = run(make_plan(seed, quick), threads or torch.get_num_threads(), console)
    output = output or RESULTS / ("cpu-quick.json" if quick else "cpu.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report.content, indent=1) + "\n", encoding="utf-8")
    console.print(f"every sample: {output}", soft_wrap=True)
    for ratio in report.ratios:
        console.print(str(ratio), style=STYLES[ratio.met], soft_wrap=True)
    if not report.complete:
        raise typer.Exit(code=1)


if __name__ == "__main__":
    typer.run(main)
