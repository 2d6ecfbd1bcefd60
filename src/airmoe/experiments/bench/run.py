"""The command `airmoe bench`: cases one after the other, each with its JSON file."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from airmoe.errors import ConfigError, visible
from airmoe.experiments.bench import step as steps
from airmoe.experiments.bench.cases import CASES, DECODE, SCALING, Case, toy
from airmoe.experiments.bench.entries import ENTRIES, best_device
from airmoe.experiments.bench.figure import draw
from airmoe.experiments.bench.inputs import Captured, make_inputs, read_captured, summarize_cells
from airmoe.experiments.bench.measure import Result, Setting, free_memory, measure
from airmoe.experiments.bench.promises import kept_and_broken
from airmoe.experiments.bench.report import closing_lines, print_case, print_step, remarks
from airmoe.experiments.bench.timing import Ceilings, Limits, Timer, measure_ceilings
from airmoe.files import read_json, write_json
from airmoe.training.run_folder import git_state, versions

FORMAT = 1
SEED = 0
QUICK_SCALING = (16_384, 65_536, 262_144)  # experts of the full size


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
    activations: Path | None = None
    data: Path | None = None
    capture: Path | None = None
    figure: Path | None = None

    def check(self) -> None:
        for case in self.cases:
            if case not in CASES:
                rule = f"must be one of {', '.join(CASES)}"
                raise ConfigError("bench.case", case, rule, "Or use --step, --decode, --scaling.")
        known = (*ENTRIES, *steps.WAYS)
        for key in self.only:
            if key not in known:
                rule = f"must be one of {', '.join(known)}"
                raise ConfigError("bench.only", key, rule, "Choose one of these.")
        offered = [key for case in self.all_cases() for key in case.contenders]
        if not self.wanted([*offered, *(steps.WAYS if self.step else ())]):
            rule = "is in none of the cases"
            raise ConfigError("bench.only", ", ".join(self.only), rule, "Name another case.")
        for name in ("data", "capture"):
            if getattr(self, name) is not None and not self.step:
                rule = "is for whole training steps"
                raise ConfigError(f"bench.{name}", str(getattr(self, name)), rule, "Add --step.")
        if self.capture is not None and "eager" not in self.wanted(steps.WAYS):
            rule = "is written by the way `eager`"
            raise ConfigError("bench.capture", str(self.capture), rule, "Add --only eager.")
        if self.repeats < 1:
            raise ConfigError("bench.repeats", self.repeats, "must be >= 1", "Give 1 or more.")
        if not self.quick and not self.draws_only and best_device().type == "cpu":
            raise ConfigError(
                "bench.device",
                "cpu",
                "is too slow for these sizes",
                "Use --quick to see that all runs, `make bench` for times on a CPU, or a GPU.",
            )

    @property
    def draws_only(self) -> bool:
        """A figure of stored results was asked for, and nothing to measure."""
        asked = self.cases or self.step or self.decode or self.scaling or self.quick
        return self.figure is not None and not asked

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Those of them that `--only` leaves."""
        return [key for key in keys if not self.only or key in self.only]

    def all_cases(self) -> list[Case]:
        """In the order of the command line; the paper's where nothing was named."""
        named = [CASES[name] for name in self.cases]
        if not (named or self.step or self.decode or self.scaling):
            named = [CASES["paper"]]
        if self.scaling:
            wanted = [c for c in SCALING if not self.quick or c.shape.num_experts in QUICK_SCALING]
            named += wanted
        if self.decode:
            named += DECODE
        return [toy(case) for case in named] if self.quick else named


class Bench:
    """One run of the command."""

    def __init__(self, options: Options, console: Console) -> None:
        options.check()
        self.options, self.console = options, console
        self.timer = Timer(best_device())
        self.limits = Limits(repeats=options.repeats)
        self.captured: Captured | None = None
        if options.activations is not None:
            self.captured = read_captured(options.activations)
        self._ceilings: dict[torch.dtype, Ceilings] = {}
        gc.freeze()  # collections between contenders need to look at nothing older than this

    def run(self) -> bool:
        """Measure, write, show; False where a contender was wrong or failed."""
        options = self.options
        if options.quick:
            self._say("Toy sizes: what follows shows that everything runs, not how fast.", "yellow")
        if options.draws_only:
            self._draw([])
            return True
        contents = [content for case in options.all_cases() if (content := self._case(case))]
        if options.step:
            contents.append(self._step())
        for text in closing_lines(contents):
            self._say(text)
        for promise in kept_and_broken(contents):
            self._say(str(promise), promise.style)
        self._draw(contents)
        ends = {result["status"] for content in contents for result in content["results"]}
        return not ends & {"wrong", "failed"}

    def _case(self, case: Case) -> dict[str, Any] | None:
        chosen = self.options.wanted(case.contenders)
        if not chosen:
            return None
        if case.shape.cells == "captured" and self.captured is None:
            self._say(f"{case.name}: skipped, it needs --activations FILE.safetensors", "yellow")
            return None
        inputs = make_inputs(case.shape, self.timer.device, SEED, self.captured)
        cells = summarize_cells(inputs)
        ceilings = self._ceilings_of(inputs.shape.torch_dtype)
        self._say(f"{case.name}: {inputs.shape}; {cells}")
        content = self._header(case.name, str(inputs.shape), case.phase) | {
            "shape": asdict(inputs.shape),
            "cells": asdict(cells),
            "ceilings": asdict(ceilings),
        }
        setting = Setting(inputs, case.phase, self.timer, ceilings, self.limits)
        jobs = {ENTRIES[key].name: lambda key=key: measure(ENTRIES[key], setting) for key in chosen}
        self._measure(content, jobs)
        print_case(self.console, content)
        return content

    def _step(self) -> dict[str, Any]:
        shape = steps.TOY if self.options.quick else steps.FULL
        name = "step" if self.options.data is None else "step-text"
        name += "-quick" if self.options.quick else ""
        data, capture = self.options.data, self.options.capture
        text = None if data is None else steps.open_text(data, shape)
        kind = "random tokens" if text is None else f"text, after {steps.TEXT_STEPS} steps of it"
        shape_text = (
            f"{shape.size}, {shape.num_sequences} x {shape.block_size} tokens, "
            f"{shape.vocab_size:,} token ids, bfloat16 autocast, {kind}"
        )
        self._say(f"{name}: {shape_text}")
        content = self._header(name, shape_text, "step") | {"shape": asdict(shape)}
        keys = self.options.wanted(steps.WAYS)

        def job(key: str) -> Callable[[], Result]:
            way, wanted = steps.WAYS[key], capture if key == "eager" else None
            setting = (shape, self.timer, self.limits, SEED, text, wanted)
            return lambda: steps.measure_step(way, *setting)

        self._measure(content, {steps.WAYS[key].name: job(key) for key in keys})
        print_step(self.console, content)
        return content

    def _measure(self, content: dict[str, Any], jobs: dict[str, Callable[[], Result]]) -> None:
        """Do the jobs, and write the file after each: a killed run keeps what it has."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        # A run of some contenders must not replace one of all.
        part = "-only" if self.options.only else ""
        file = self.options.out / f"{content['case']}{part}.json"
        started = time.monotonic()
        for name, job in jobs.items():
            began = time.monotonic()
            result = job()
            free_memory()
            content["results"].append(result.as_json())
            content["wall_seconds"] = time.monotonic() - started
            content["complete"] = len(content["results"]) == len(jobs)
            write_json(file, content)
            self._say(f"  {name}: {_summary(result)} ({time.monotonic() - began:.0f} s)")
        self._say(f"every sample: {file}")

    def _ceilings_of(self, dtype: torch.dtype) -> Ceilings:
        if dtype not in self._ceilings:
            self._ceilings[dtype] = found = measure_ceilings(self.timer, dtype)
            free_memory()
            self._say(
                f"ceilings in {found.dtype}: {found.flops / 1e12:.3g} TFLOP/s (product), "
                f"{found.bytes / 1e12:.3g} TB/s (copy)"
            )
        return self._ceilings[dtype]

    def _header(self, name: str, text: str, phase: str) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "case": name,
            "phase": phase,
            "shape_text": text,
            "seed": SEED,
            "started_unix": time.time(),
            "complete": False,
            "device": describe_device(self.timer.device),
            "versions": versions() | {"triton": _version("triton"), "cuda": torch.version.cuda},
            "git": git_state(),
            "results": [],
        }

    def _draw(self, contents: Sequence[dict[str, Any]]) -> None:
        """Of the first case that was measured, or else of the stored results of the paper's."""
        path = self.options.figure
        if path is None:
            return
        drawable = [content for content in contents if content["phase"] != "step"]
        if not drawable:
            file = self.options.out / "paper.json"
            if not file.is_file():
                rule = f"is drawn from {file}, which is not there"
                raise ConfigError("bench.figure", str(path), rule, "Measure first: airmoe bench.")
            drawable = [_stored(file)]
        try:
            draw(drawable[0], path)
        except (LookupError, TypeError, AttributeError) as error:
            rule = f"must be what `airmoe bench` wrote ({type(error).__name__}: {error})"
            raise ConfigError("bench.out", str(self.options.out), rule, "Measure again.") from error
        self._say(f"figure: {path}")

    def _say(self, text: str, style: str = "default") -> None:
        self.console.print(
            visible(text), style=style, markup=False, highlight=False, soft_wrap=True
        )


def _stored(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except ValueError as error:
        rule = f"must be JSON ({error})"
        raise ConfigError("bench.out", str(file), rule, "Measure again: airmoe bench.") from error


def _summary(result: Result) -> str:
    content = result.as_json()
    if result.status != "timed":
        return remarks(result.status, result.reason)
    middle = content["median"]
    times = [
        f"{what} {middle[part]:.3g} ms"
        for part, what in (("forward_ms", "forward"), ("total_ms", "in all"))
        if part in middle
    ]
    if result.peak_bytes is not None:
        times.append(f"{result.peak_bytes / 2**30:.2f} GiB")
    return ", ".join(times)


def describe_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "CPU", "threads": torch.get_num_threads()}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
