"""What a suite runs: every variant with every seed, at one length; refused where unfair."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from airmoe.config import check_count, did_you_mean
from airmoe.errors import ConfigError
from airmoe.experiments.fairness import check_fair
from airmoe.experiments.suites.variants import SUITES
from airmoe.model.methods import check_method
from airmoe.training import RunConfig, TrainingOptions, override
from airmoe.training import preset as named_run
from airmoe.training.devices import Machine, settle
from airmoe.training.presets import method_variant

FORMAT = 1  # of suite.json
LENGTHS = ("training.steps", "training.epochs")


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed."""

    variant: str
    config: RunConfig

    @property
    def seed(self) -> int:
        return self.config.training.seed

    @property
    def folder(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    def to_json(self) -> dict[str, Any]:
        about = {"folder": self.folder, "variant": self.variant, "seed": self.seed}
        return about | {"config": self.config.to_json()}


@dataclass(frozen=True)
class Plan:
    """A suite with everything decided."""

    suite: str
    preset: str
    runs: tuple[PlannedRun, ...]

    def to_json(self) -> dict[str, Any]:
        runs = [run.to_json() for run in self.runs]
        return {"format": FORMAT, "suite": self.suite, "preset": self.preset, "runs": runs}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError where `to_json` did not write the values."""
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, ours {FORMAT}")
        runs = (
            PlannedRun(str(run["variant"]), RunConfig.from_json(run["config"]))
            for run in values["runs"]
        )
        return cls(str(values["suite"]), str(values["preset"]), tuple(runs))

    def settled(self, machine: Machine, begun: Self | None) -> tuple[Self, list[str]]:
        """The plan with one precision and micro-batch for all its runs in place of `auto`.

        A suite that has begun keeps its own. A new one takes the smallest micro-batch that any of
        its variants needs on this machine, and gives a line for each choice.
        """
        if begun is not None and begun.runs:
            options, lines = begun.runs[0].config.training, []
        else:
            variants = {run.variant: run.config for run in self.runs}.values()
            found = [settle(config, machine) for config in variants]
            config, lines = min(found, key=lambda one: one[0].training.micro_batch_size)
            options = config.training
        asked = self.runs[0].config.training  # the same in all its runs
        chosen = {
            name: getattr(options, name)
            for name in ("precision", "micro_batch_size")
            if getattr(asked, name) == "auto"
        }
        runs = (PlannedRun(run.variant, _with_training(run.config, **chosen)) for run in self.runs)
        return dataclasses.replace(self, runs=tuple(runs)), lines


def make_plan(
    suite: str,
    preset: str,
    overrides: Sequence[str] = (),
    *,
    num_seeds: int = 1,
    tokens: int | None = None,
    epochs: int | None = None,
    also: Sequence[str] = (),
) -> Plan:
    """The runs of a suite; raises if settings are wrong, runs too short, or the comparison unfair.

    `overrides` change the run with AIR from which the variants are made, `also` names methods
    beside the suite's own. All variants of a seed come before the next seed, so that a suite that
    is stopped has whole comparisons.
    """
    if suite not in SUITES:
        remedy = f"{did_you_mean(suite, SUITES)}Choose one of these."
        raise ConfigError("suite", suite, f"must be one of {', '.join(SUITES)}", remedy)
    for name in also:
        check_method("also", name)
    check_count("seeds", num_seeds)
    base = override(named_run(preset), overrides)
    if tokens is not None or epochs is not None:
        base = _with_training(base, **_length(base, overrides, tokens, epochs))
    if base.training.steps is not None:
        check_warmup(base.training, base.training.steps)
    variants = SUITES[suite].variants(base)
    more = {name: method_variant(base, name) for name in also}
    for name in more.keys() & variants.keys():
        raise ConfigError("also", name, "is in this suite already", "Leave it out.")
    runs = tuple(
        PlannedRun(variant, _with_training(config, seed=seed))
        for seed in range(base.training.seed, base.training.seed + num_seeds)
        for variant, config in (variants | more).items()
    )
    check_fair({run.folder: run.config for run in runs}, SUITES[suite].rules)
    return Plan(suite, preset, runs)


def check_warmup(training: TrainingOptions, steps: int) -> None:
    """Raise for a run that would end during its warm-up."""
    warmup_steps = math.ceil(training.warmup * steps)
    if steps <= warmup_steps:
        raise ConfigError(
            "budget",
            f"{steps} steps",
            f"must be longer than the warm-up, {warmup_steps} steps (training.warmup = "
            f"{training.warmup:g})",
            "Raise --tokens or --epochs, or lower training.warmup.",
        )


def _length(
    run: RunConfig, overrides: Sequence[str], tokens: int | None, epochs: int | None
) -> dict[str, int | None]:
    """Options for a length in passes, or in tokens: the whole steps that fit into so many."""
    one_of_them = "Give one of them."
    if tokens is not None and epochs is not None:
        raise ConfigError("epochs", epochs, "cannot be given with --tokens", one_of_them)
    for assignment in overrides:
        if assignment.partition("=")[0] in LENGTHS:
            rule = "cannot be given with --tokens or --epochs, which say the same"
            raise ConfigError("overrides", assignment, rule, one_of_them)
    if tokens is None:
        check_count("epochs", epochs)
        return {"epochs": epochs, "steps": None}
    check_count("tokens", tokens)
    per_step = run.training.batch_size * run.data.block_size
    if tokens < per_step:
        rule = (
            f"must be at least one step of {per_step} tokens (training.batch_size x "
            "data.block_size)"
        )
        raise ConfigError("tokens", tokens, rule, "Raise --tokens.")
    return {"epochs": None, "steps": tokens // per_step}


def _with_training(run: RunConfig, **options: Any) -> RunConfig:
    return dataclasses.replace(run, training=dataclasses.replace(run.training, **options))
