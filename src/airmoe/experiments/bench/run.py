"""`airmoe bench` and `make bench`: cases one after the other, each with its JSON file."""

from __future__ import annotations

import gc
import platform
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from airmoe.config import did_you_mean
from airmoe.errors import ConfigError, say
from airmoe.experiments.bench import step as steps
from airmoe.experiments.bench.cases import (
    CASES,
    DECODE,
    SCALING,
    SEED,
    Case,
    make_inputs,
    summarize_cells,
    toy,
)
from airmoe.experiments.bench.entries import ENTRIES
from airmoe.experiments.bench.measure import (
    Result,
    Setting,
    free_memory,
    measure,
    measure_alone,
)
from airmoe.experiments.bench.report import closing_lines, print_case, summary
from airmoe.experiments.bench.timing import Limits, Timer, best_device, measure_ceilings
from airmoe.files import write_json
from airmoe.training.run_folder import git_state, versions

FORMAT = 2
CPU_LIMITS = Limits(seconds=10.0, least=3, most_seconds=40.0)


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    cases: tuple[str, ...] = ()
    step: bool = False
    decode: bool = False
    scaling: bool = False
    quick: bool = False
    only: tuple[str, ...] = ()
    repeats: int = 20
    out: Path = Path("benchmarks/results")
    data: Path | None = None

    def check(self) -> None:
        """Raise for the first mistake."""
        for name in self.cases:
            if name not in CASES:
                rule = f"must be one of {', '.join(CASES)}"
                remedy = f"{did_you_mean(name, CASES)}Or use --step, --decode, --scaling."
                raise ConfigError("bench.case", name, rule, remedy)
        cases = self.all_cases()
        offered = dict.fromkeys(key for case in cases for key in case.contenders)
        offered |= dict.fromkeys(steps.WAYS if self.step else ())
        for key in self.only:
            if key not in offered:
                rule = f"is in none of the cases; they have {', '.join(offered)}"
                remedy = f"{did_you_mean(key, offered)}Choose one of these."
                raise ConfigError("bench.only", key, rule, remedy)
        if self.data is not None and not self.step:
            rule = "is for whole training steps"
            raise ConfigError("bench.data", str(self.data), rule, "Add --step.")
        needs_gpu = self.step or any(case.device == "gpu" for case in cases)
        if needs_gpu and not self.quick and best_device().type == "cpu":
            rule = "is too slow for these sizes"
            remedy = "Use --quick to see that all runs, `make bench` for times on a CPU, or a GPU."
            raise ConfigError("bench.device", "cpu", rule, remedy)

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys that `--only` selects."""
        return [key for key in keys if not self.only or key in self.only]

    def all_cases(self) -> list[Case]:
        """In the order of the command line; the paper's where nothing was asked for."""
        named = [CASES[name] for name in self.cases]
        if not (named or self.step or self.decode or self.scaling):
            named = [CASES["paper"]]
        if self.scaling:
            named += SCALING
        if self.decode:
            named += DECODE
        return [toy(case) for case in named] if self.quick else named


class Bench:
    """One run of the command."""

    def __init__(self, options: Options, console: Console) -> None:
        options.check()
        self.options, self.console = options, console
        self.limits = Limits(repeats=options.repeats)
        gc.freeze()  # garbage collections between contenders then skip all that is older

    def run(self) -> bool:
        """Measure, write, show; False where a contender was wrong or failed."""
        options = self.options
        if options.quick:
            text = "Toy sizes: what follows shows that everything runs, not how fast."
            self.console.print(text, style="yellow", soft_wrap=True)
        cases = [case for case in options.all_cases() if options.wanted(case.contenders)]
        contents = [self._case(case) for case in cases]
        for text in [line for content in contents for line in closing_lines(content)]:
            say(self.console, text)
        if options.step and options.wanted(steps.WAYS):
            contents.append(self._step())
        ends = {result["status"] for content in contents for result in content["results"]}
        return not ends & {"wrong", "failed"}

    def _case(self, case: Case) -> dict[str, Any]:
        shape = case.shape
        device = best_device() if case.device == "gpu" else torch.device("cpu")
        cells = summarize_cells(make_inputs(shape, device))
        ceilings = measure_ceilings(device, shape.torch_dtype)
        free_memory()
        largest, empty = cells["largest"], cells["empty"]
        say(
            self.console,
            f"{case.name}: {shape}; largest cell {largest:,} tokens, {empty} cells empty",
        )
        say(
            self.console,
            f"ceilings in {shape.dtype}: {ceilings.flops / 1e12:.3g} TFLOP/s (product), "
            f"{ceilings.bytes / 1e12:.3g} TB/s (copy)",
        )
        content = self._header(case.name, str(shape), case.phase, device) | {
            "shape": asdict(shape),
            "cells": cells,
            "ceilings": asdict(ceilings),
        }
        limits, how = self.limits, measure
        if case.device == "cpu" and not self.options.quick:
            limits, how = replace(CPU_LIMITS, repeats=limits.repeats), measure_alone
        setting = Setting(shape, case.phase, device, ceilings, limits)
        entries = [ENTRIES[key] for key in self.options.wanted(case.contenders)]
        self._measure(content, {e.name: lambda e=e: how(e, setting) for e in entries})
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
        say(self.console, f"{name}: {shape_text}")
        timer = Timer(best_device())
        content = self._header(name, shape_text, "step", timer.device) | {"shape": asdict(shape)}
        given = (shape, timer, self.limits, text)
        ways = [steps.WAYS[key] for key in options.wanted(steps.WAYS)]
        self._measure(content, {w.name: lambda w=w: steps.measure_step(w, *given) for w in ways})
        print_case(self.console, content)
        return content

    def _measure(self, content: dict[str, Any], jobs: dict[str, Callable[[], Result]]) -> None:
        """Do the jobs, and write the file after each, so that a killed run keeps what it has."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        # A run of some contenders must not replace one of all.
        part = "-only" if self.options.only else ""
        file = self.options.out / f"{content['case']}{part}.json"
        for name, job in jobs.items():
            began = time.time()
            result = job().as_json()
            free_memory()
            content["results"].append(result)
            content["wall_seconds"] = time.time() - content["started_unix"]
            content["complete"] = len(content["results"]) == len(jobs)
            write_json(file, content)
            say(self.console, f"  {name}: {summary(result)} ({time.time() - began:.0f} s)")
        say(self.console, f"every sample: {file}")

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


def describe_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"name": torch.cuda.get_device_name(device)}
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or "CPU"
    return {"name": name, "threads": torch.get_num_threads()}
