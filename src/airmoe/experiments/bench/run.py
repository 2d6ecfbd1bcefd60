"""`airmoe bench` and `make bench`: cases one after the other, each with its JSON file."""

from __future__ import annotations

import gc
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from airmoe.errors import ConfigError, visible
from airmoe.experiments.bench import step as steps
from airmoe.experiments.bench.cases import CASES, DECODE, SCALING, Case, toy
from airmoe.experiments.bench.entries import ENTRIES
from airmoe.experiments.bench.inputs import Captured, make_inputs, read_captured, summarize_cells
from airmoe.experiments.bench.measure import Result, Setting, free_memory, measure
from airmoe.experiments.bench.page import draw
from airmoe.experiments.bench.report import closing_lines, print_case, print_step, remarks
from airmoe.experiments.bench.swapped import compare_swapped
from airmoe.experiments.bench.timing import Ceilings, Limits, Timer, best_device, measure_ceilings
from airmoe.experiments.bench.turns import LIMITS, measure_in_turns
from airmoe.files import read_json, write_json
from airmoe.training.run_folder import git_state, versions

FORMAT = 1
SEED = 0
FIGURES = (".svg", ".png", ".pdf", "")  # "": PNG
NO_CASE = "is in none of the cases"
MEASURE_AGAIN = "Measure again: airmoe bench."
QUICK_SCALING = (16_384, 65_536, 262_144)  # experts of the full size


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    cases: tuple[str, ...] = ()
    step: bool = False
    decode: bool = False
    scaling: bool = False
    swapped: bool = False
    quick: bool = False
    only: tuple[str, ...] = ()
    repeats: int = 20
    out: Path = Path("benchmarks/results")
    activations: Path | None = None
    data: Path | None = None
    capture: Path | None = None
    figure: Path | None = None

    def check(self) -> None:
        """Raise about the first mistake."""
        known = (*ENTRIES, *steps.WAYS)
        for name, values, names, remedy in (
            ("case", self.cases, CASES, "Or use --step, --decode, --scaling, --swapped."),
            ("only", self.only, known, "Choose one of these."),
        ):
            for value in values:
                if value not in names:
                    rule = f"must be one of {', '.join(names)}"
                    raise ConfigError(f"bench.{name}", value, rule, remedy)
        cases = self.all_cases()
        offered = [key for case in cases for key in case.contenders]
        offered += steps.WAYS if self.step else ()
        eager = "eager" in self.wanted(steps.WAYS)
        of_steps = ("is for whole training steps", "Add --step.")
        for name, value, fine, rule, remedy in (
            ("only", self.only, self.wanted(offered), NO_CASE, "Name another case."),
            ("data", self.data, self.step, *of_steps),
            ("capture", self.capture, self.step, *of_steps),
            ("capture", self.capture, eager, "is written by the way `eager`", "Add --only eager."),
        ):
            if value and not fine:
                shown = ", ".join(value) if isinstance(value, tuple) else str(value)
                raise ConfigError(f"bench.{name}", shown, rule, remedy)
        if self.figure is not None and self.figure.suffix not in FIGURES:
            rule = "must end in .svg, .png or .pdf"
            raise ConfigError("bench.figure", str(self.figure), rule, "Rename it.")
        if self.figure is not None and not cases:
            self.stored_paper()
        if self.repeats < 1:
            raise ConfigError("bench.repeats", self.repeats, "must be >= 1", "Give 1 or more.")
        needs_gpu = self.step or any(case.device == "gpu" for case in cases)
        if needs_gpu and not self.quick and best_device().type == "cpu":
            rule = "is too slow for these sizes"
            remedy = "Use --quick to see that all runs, `make bench` for times on a CPU, or a GPU."
            raise ConfigError("bench.device", "cpu", rule, remedy)

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Those of them that `--only` leaves."""
        return [key for key in keys if not self.only or key in self.only]

    def stored_paper(self) -> Path:
        """The stored results that a figure shows where no case is measured."""
        file = self.out / "paper.json"
        if not file.is_file():
            rule = f"is drawn from {file}, which is not there"
            raise ConfigError(
                "bench.figure", str(self.figure), rule, "Measure first: airmoe bench."
            )
        return file

    def all_cases(self) -> list[Case]:
        """In the order of the command line; the paper's where nothing was asked for."""
        named = [CASES[name] for name in self.cases]
        others = self.step or self.decode or self.scaling or self.swapped
        draws_only = self.figure is not None and not self.quick  # of stored results
        if not (named or others or draws_only):
            named = [CASES["paper"]]
        if self.scaling:
            named += [c for c in SCALING if not self.quick or c.shape.num_experts in QUICK_SCALING]
        if self.decode:
            named += DECODE
        return [toy(case) for case in named] if self.quick else named


class Bench:
    """One run of the command."""

    def __init__(self, options: Options, console: Console) -> None:
        options.check()
        self.options, self.console = options, console
        self.limits = Limits(repeats=options.repeats)
        self.captured: Captured | None = None
        if options.activations is not None:
            self.captured = read_captured(options.activations)
        self._ceilings: dict[tuple[str, torch.dtype], Ceilings] = {}
        gc.freeze()  # collections between contenders need to look at nothing older than this

    def run(self) -> bool:
        """Measure, write, show; False where a contender was wrong or failed."""
        options = self.options
        if options.quick:
            self._say("Toy sizes: what follows shows that everything runs, not how fast.", "yellow")
        contents = [content for case in options.all_cases() if (content := self._case(case))]
        if options.step:
            contents.append(self._step())
        if options.swapped:
            compare_swapped(self.console, quick=options.quick)
        for text in closing_lines(contents):
            self._say(text)
        if options.figure is not None:
            self._draw(contents, options.figure)
        ends = {result["status"] for content in contents for result in content["results"]}
        return not ends & {"wrong", "failed"}

    def _case(self, case: Case) -> dict[str, Any] | None:
        keys = self.options.wanted(case.contenders)
        if not keys:
            return None
        if case.shape.cells == "captured" and self.captured is None:
            self._say(f"{case.name}: skipped, it needs --activations FILE.safetensors", "yellow")
            return None
        timer = Timer(best_device() if case.device == "gpu" else torch.device("cpu"))
        inputs = make_inputs(case.shape, timer.device, SEED, self.captured)
        shape, cells = inputs.shape, summarize_cells(inputs)
        ceilings = self._ceilings_of(timer, shape.torch_dtype)
        self._say(f"{case.name}: {shape}; {cells}")
        content = self._header(case.name, str(shape), case.phase, timer.device) | {
            "shape": asdict(shape),
            "cells": asdict(cells),
            "ceilings": asdict(ceilings),
        }
        if case.device == "cpu" and not self.options.quick:
            limits = replace(LIMITS, repeats=self.options.repeats)
            results = measure_in_turns(keys, shape, SEED, ceilings, limits)
            self._measure(content, {result.name: lambda r=result: r for result in results})
        else:
            setting = Setting(inputs, case.phase, timer, ceilings, self.limits)
            entries = [ENTRIES[key] for key in keys]
            self._measure(content, {e.name: lambda e=e: measure(e, setting) for e in entries})
        print_case(self.console, content)
        return content

    def _step(self) -> dict[str, Any]:
        options, shape = self.options, steps.TOY if self.options.quick else steps.FULL
        name = "step" if options.data is None else "step-text"
        name += "-quick" if options.quick else ""
        text = None if options.data is None else steps.open_text(options.data, shape)
        kind = "random tokens" if text is None else f"text, after {steps.TEXT_STEPS} steps of it"
        shape_text = (
            f"{shape.size}, {shape.num_sequences} x {shape.block_size} tokens, "
            f"{shape.vocab_size:,} token ids, bfloat16 autocast, {kind}"
        )
        self._say(f"{name}: {shape_text}")
        timer = Timer(best_device())
        content = self._header(name, shape_text, "step", timer.device) | {"shape": asdict(shape)}
        run = steps.StepRun(shape, timer, self.limits, SEED, text, options.capture)
        ways = [steps.WAYS[key] for key in options.wanted(steps.WAYS)]
        self._measure(content, {w.name: lambda w=w: steps.measure_step(w, run) for w in ways})
        print_step(self.console, content)
        return content

    def _measure(self, content: dict[str, Any], jobs: dict[str, Callable[[], Result]]) -> None:
        """Do the jobs, and write the file after each: a killed run keeps what it has."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        # A run of some contenders must not replace one of all.
        part = "-only" if self.options.only else ""
        file = self.options.out / f"{content['case']}{part}.json"
        for name, job in jobs.items():
            began = time.time()
            result = job()
            free_memory()
            content["results"].append(result.as_json())
            content["wall_seconds"] = time.time() - content["started_unix"]
            content["complete"] = len(content["results"]) == len(jobs)
            write_json(file, content)
            self._say(f"  {name}: {_summary(result)} ({time.time() - began:.0f} s)")
        self._say(f"every sample: {file}")

    def _ceilings_of(self, timer: Timer, dtype: torch.dtype) -> Ceilings:
        key = (timer.device.type, dtype)
        if key not in self._ceilings:
            self._ceilings[key] = found = measure_ceilings(timer, dtype)
            free_memory()
            self._say(
                f"ceilings in {found.dtype}: {found.flops / 1e12:.3g} TFLOP/s (product), "
                f"{found.bytes / 1e12:.3g} TB/s (copy)"
            )
        return self._ceilings[key]

    def _header(self, name: str, text: str, phase: str, device: torch.device) -> dict[str, Any]:
        others = {"triton": "not installed", "PEER-pytorch": "not installed"}
        for package in others:
            with suppress(PackageNotFoundError):
                others[package] = version(package)
        return {
            "format": FORMAT,
            "case": name,
            "phase": phase,
            "shape_text": text,
            "seed": SEED,
            "started_unix": time.time(),
            "complete": False,
            "device": describe_device(device),
            "versions": versions() | others | {"cuda": torch.version.cuda},
            "git": git_state(),
            "results": [],
        }

    def _draw(self, contents: Sequence[dict[str, Any]], path: Path) -> None:
        """Of the first case that was measured, or else of the stored results of the paper's."""
        drawable = [content for content in contents if content["phase"] != "step"]
        if not drawable:
            file = self.options.stored_paper()
            try:
                drawable = [read_json(file)]
            except ValueError as error:
                rule = f"must be JSON ({error})"
                raise ConfigError("bench.out", str(file), rule, MEASURE_AGAIN) from error
        try:
            draw(drawable[0], path)
        except (LookupError, TypeError, AttributeError) as error:
            rule = f"must be what `airmoe bench` wrote ({type(error).__name__}: {error})"
            raise ConfigError("bench.out", str(self.options.out), rule, MEASURE_AGAIN) from error
        self._say(f"figure: {path}")

    def _say(self, text: str, style: str = "default") -> None:
        self.console.print(
            visible(text), style=style, markup=False, highlight=False, soft_wrap=True
        )


def _summary(result: Result) -> str:
    if result.status != "timed":
        return remarks(result.status, result.reason)
    samples = {"forward": result.forward_ms, "in all": result.total_ms}
    times = [f"{what} {median(laps):.3g} ms" for what, laps in samples.items() if laps]
    if result.peak_bytes is not None:
        times.append(f"{result.peak_bytes / 2**30:.2f} GiB")
    return ", ".join(times)


def describe_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {
            "name": found.name,
            "memory_bytes": found.total_memory,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
        }
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "name": model[1].strip() if model else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
