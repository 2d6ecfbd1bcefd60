"""`airmoe bench` and `make bench`: cases one after the other, each with its JSON file."""

from __future__ import annotations

import gc
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from airmoe.config import did_you_mean
from airmoe.errors import ConfigError, say
from airmoe.experiments.bench.cases import CASES, DECODE, SCALING, STEP, Case
from airmoe.experiments.bench.inputs import SEED, Shape, make_inputs, summarize_cells
from airmoe.experiments.bench.measure import free_memory, measure, measure_alone
from airmoe.experiments.bench.results import Content, Result, print_case, summary
from airmoe.experiments.bench.step import TEXT_STEPS, StepShape, measure_step, open_text
from airmoe.experiments.bench.timing import Limits, best_device
from airmoe.experiments.bench.work import measure_ceilings
from airmoe.files import write_json
from airmoe.training.run_folder import git_state, versions

FORMAT = 2
CPU_SECONDS = 10.0  # of samples
Job = Callable[[Any], Result]  # measures one contender


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
        cases = self._asked_for()
        self._check(cases)
        gc.freeze()  # garbage collections between contenders then skip all that is older
        if self.quick:
            text = "Toy sizes: what follows shows that everything runs, not how fast."
            self.console.print(text, style="yellow", soft_wrap=True)
        contents = [self._measure(case) for case in cases if self._wanted(case)]
        ends = {result["status"] for content in contents for result in content["results"]}
        return not ends & {"wrong", "failed"}

    def _asked_for(self) -> list[Case]:
        """In the order of the command line; the paper's where nothing was asked for."""
        for name in self.cases:
            if name not in CASES:
                rule = f"must be one of {', '.join(CASES)}"
                remedy = f"{did_you_mean(name, CASES)}Or use --step, --decode, --scaling."
                raise ConfigError("bench.case", name, rule, remedy)
        cases = [CASES[name] for name in self.cases]
        cases += SCALING if self.scaling else ()
        cases += DECODE if self.decode else ()
        if self.step:
            cases.append(replace(STEP, name="step-text") if self.data else STEP)
        cases = cases or [CASES["paper"]]
        return [case.toy() for case in cases] if self.quick else cases

    def _check(self, cases: Sequence[Case]) -> None:
        """Raise for the first mistake in the other options."""
        offered = dict.fromkeys(one.key for case in cases for one in case.contenders)
        for key in self.only:
            if key not in offered:
                rule = f"is in none of the cases; they have {', '.join(offered)}"
                remedy = f"{did_you_mean(key, offered)}Choose one of these."
                raise ConfigError("bench.only", key, rule, remedy)
        if self.data is not None and not self.step:
            rule = "is for whole training steps"
            raise ConfigError("bench.data", str(self.data), rule, "Add --step.")
        needs_gpu = any(case.device == "gpu" for case in cases)
        if needs_gpu and not self.quick and best_device().type == "cpu":
            rule = "is too slow for these sizes"
            remedy = "Use --quick to see that all runs, `make bench` for times on a CPU, or a GPU."
            raise ConfigError("bench.device", "cpu", rule, remedy)

    def _wanted(self, case: Case) -> list[Any]:
        """Those of its contenders that `--only` selects."""
        return [one for one in case.contenders if not self.only or one.key in self.only]

    def _measure(self, case: Case) -> Content:
        """Write the file after each contender, so that a killed run keeps what it has."""
        device = best_device() if case.device == "gpu" else torch.device("cpu")
        content = _header(case, device)
        if isinstance(case.shape, StepShape):
            job = self._step(case.shape, device, content)
        else:
            job = self._layer(case, case.shape, device, content)
        self.out.mkdir(parents=True, exist_ok=True)
        # A run of some contenders must not replace one of all.
        file = self.out / f"{case.name}{'-only' if self.only else ''}.json"
        wanted = self._wanted(case)
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

    def _layer(self, case: Case, shape: Shape, device: torch.device, content: Content) -> Job:
        """How to measure a layer; what all of the case have in common goes to the file."""
        cells = summarize_cells(make_inputs(shape, device))
        ceilings = measure_ceilings(device, shape.torch_dtype)
        free_memory()
        content |= {"cells": cells, "ceilings": asdict(ceilings)}
        say(
            self.console,
            f"{case.name}: {shape}; largest cell {cells['largest']:,} tokens, "
            f"{cells['empty']} cells empty",
        )
        say(
            self.console,
            f"ceilings in {shape.dtype}: {ceilings.flops / 1e12:.3g} TFLOP/s (product), "
            f"{ceilings.bytes / 1e12:.3g} TB/s (copy)",
        )
        given = (shape, case.phase, device, ceilings)
        if case.device == "cpu" and not self.quick:
            return lambda kind: measure_alone(kind, *given, Limits(self.repeats, CPU_SECONDS))
        return lambda kind: measure(kind, *given, Limits(self.repeats))

    def _step(self, shape: StepShape, device: torch.device, content: Content) -> Job:
        """How to measure a whole training step."""
        text, tokens = None, "random tokens"
        if self.data is not None:
            text, tokens = open_text(self.data, shape), f"text, after {TEXT_STEPS} steps of it"
        content["shape_text"] += f", {tokens}"
        say(self.console, f"{content['case']}: {content['shape_text']}")
        return lambda way: measure_step(way, shape, device, Limits(self.repeats), text)


def _header(case: Case, device: torch.device) -> Content:
    """What the file of a case says before its results."""
    installed = {found.name: found.version for found in distributions()}
    others = {name: installed.get(name, "not installed") for name in ("triton", "PEER-pytorch")}
    return {
        "format": FORMAT,
        "case": case.name,
        "phase": case.phase,
        "shape_text": str(case.shape),
        "shape": asdict(case.shape),
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
