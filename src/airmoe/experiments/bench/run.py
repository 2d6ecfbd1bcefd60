"""`airmoe bench` and `make bench`: cases one after the other, each with its JSON file."""

from __future__ import annotations

import gc
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from airmoe.config import did_you_mean
from airmoe.errors import ConfigError, say
from airmoe.experiments.bench import step as steps
from airmoe.experiments.bench.cases import CASES, DECODE, SCALING, Case, toy
from airmoe.experiments.bench.inputs import SEED, make_inputs, summarize_cells
from airmoe.experiments.bench.measure import Result, free_memory, measure, measure_alone
from airmoe.experiments.bench.report import print_case, summary
from airmoe.experiments.bench.timing import Limits, Timer, best_device
from airmoe.experiments.bench.work import measure_ceilings
from airmoe.files import write_json
from airmoe.training.run_folder import git_state, versions

FORMAT = 2
CPU_SECONDS = 10.0  # of samples


@dataclass
class Bench:
    """One run of the command, as the user asked for it."""

    console: Console
    cases: Sequence[str] = ()
    step: bool = False
    decode: bool = False
    scaling: bool = False
    quick: bool = False
    only: Sequence[str] = ()
    repeats: int = 20
    out: Path = Path("benchmarks/results")
    data: Path | None = None

    def run(self) -> bool:
        """Measure, write, show; False where a contender was wrong or failed."""
        for name in self.cases:
            if name not in CASES:
                rule = f"must be one of {', '.join(CASES)}"
                remedy = f"{did_you_mean(name, CASES)}Or use --step, --decode, --scaling."
                raise ConfigError("bench.case", name, rule, remedy)
        cases = self._all_cases()
        self._check(cases)
        gc.freeze()  # garbage collections between contenders then skip all that is older
        if self.quick:
            text = "Toy sizes: what follows shows that everything runs, not how fast."
            self.console.print(text, style="yellow", soft_wrap=True)
        contents = [self._case(case) for case in cases if self._wanted(case.contenders)]
        if self.step and self._wanted(steps.WAYS.values()):
            contents.append(self._step())
        ends = {result["status"] for content in contents for result in content["results"]}
        return not ends & {"wrong", "failed"}

    def _all_cases(self) -> list[Case]:
        """In the order of the command line; the paper's where nothing was asked for."""
        named = [CASES[name] for name in self.cases]
        if not (named or self.step or self.decode or self.scaling):
            named = [CASES["paper"]]
        named += SCALING if self.scaling else ()
        named += DECODE if self.decode else ()
        return [toy(case) for case in named] if self.quick else named

    def _check(self, cases: Sequence[Case]) -> None:
        """Raise for the first mistake in the other options."""
        offered = dict.fromkeys(kind.key for case in cases for kind in case.contenders)
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

    def _wanted(self, contenders: Iterable[Any]) -> list[Any]:
        """Those that `--only` selects."""
        return [one for one in contenders if not self.only or one.key in self.only]

    def _case(self, case: Case) -> dict[str, Any]:
        shape, limits, how = case.shape, Limits(repeats=self.repeats), measure
        if case.device == "cpu" and not self.quick:
            limits, how = Limits(self.repeats, CPU_SECONDS), measure_alone
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
        content = _header(case.name, case.phase, shape, device)
        content |= {"cells": cells, "ceilings": asdict(ceilings)}
        given = (case, device, ceilings, limits)
        return self._measure(content, case.contenders, lambda kind: how(kind, *given))

    def _step(self) -> dict[str, Any]:
        shape = steps.TOY if self.quick else steps.FULL
        name, text, tokens = "step", None, "random tokens"
        if self.data is not None:
            name, text = "step-text", steps.open_text(self.data, shape)
            tokens = f"text, after {steps.TEXT_STEPS} steps of it"
        name += "-quick" if self.quick else ""
        timer, limits = Timer(best_device()), Limits(repeats=self.repeats)
        content = _header(name, "step", shape, timer.device)
        content["shape_text"] += f", {tokens}"
        say(self.console, f"{name}: {content['shape_text']}")
        given = (shape, timer, limits, text)
        ways = steps.WAYS.values()
        return self._measure(content, ways, lambda way: steps.measure_step(way, *given))

    def _measure(
        self, content: dict[str, Any], contenders: Iterable[Any], job: Callable[[Any], Result]
    ) -> dict[str, Any]:
        """Write the file after each contender, so that a killed run keeps what it has."""
        self.out.mkdir(parents=True, exist_ok=True)
        # A run of some contenders must not replace one of all.
        part = "-only" if self.only else ""
        file = self.out / f"{content['case']}{part}.json"
        wanted = self._wanted(contenders)
        for one in wanted:
            began = time.time()
            result = job(one).as_json()
            free_memory()
            content["results"].append(result)
            content["wall_seconds"] = time.time() - content["started_unix"]
            content["complete"] = len(content["results"]) == len(wanted)
            write_json(file, content)
            say(self.console, f"  {one.name}: {summary(result)} ({time.time() - began:.0f} s)")
        say(self.console, f"every sample: {file}")
        print_case(self.console, content)
        return content


def _header(name: str, phase: str, shape: Any, device: torch.device) -> dict[str, Any]:
    """What the file of a case says before its results."""
    installed = {found.name: found.version for found in distributions()}
    others = {name: installed.get(name, "not installed") for name in ("triton", "PEER-pytorch")}
    return {
        "format": FORMAT,
        "case": name,
        "phase": phase,
        "shape_text": str(shape),
        "shape": asdict(shape),
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
