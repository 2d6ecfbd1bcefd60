"""Run and suite folders with chosen numbers, as training would leave them, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from airmoe.experiments.report.groups import KNOWN, Group, group_runs
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.suites import SUITES, Plan, PlannedRun
from airmoe.files import read_json, write_json
from airmoe.losses import BALANCE_CONVENTION
from airmoe.training import RunConfig, override, preset
from airmoe.training.checkpoints import FORMAT

EVALUATIONS = 6
TRAIN_LINES = 12
STEPS = 360
TOKENS_PER_STEP = 512  # of `tiny`
VERSIONS = {"python": "3.11.7", "airmoe": "0.1.0", "torch": "2.13.0"}
MACHINE = {"device": "x86_64", "count": 2}
HASH = "ab" * 32
WIKIPEDIA_HASH = next(iter(KNOWN))  # that of the text of results/wikipedia


def write_run(
    folder: Path,
    config: RunConfig | Sequence[str] = (),
    *,
    perplexity: float = 60.0,
    result: bool = True,
    **numbers: Any,
) -> None:
    """A finished run whose best evaluation is the last, with `perplexity`.

    config: or changes to `tiny`. numbers: `flops` per token, `speed` in tokens/s, `test`
    (perplexity), `memory` in GiB, any field of an evaluation, and `about` for fields of run.json
    and result.json that differ from the usual.
    A field that is None is missing.
    """
    if not isinstance(config, RunConfig):
        config = override(preset("tiny"), config)
    about = {
        "data_sha256": HASH,
        "data_recipe": {"corpus": config.data.corpus, "max_tokens": None},
        "versions": VERSIONS,
        "git": {"commit": "c" * 40, "changed": False},
        "machine": MACHINE,
        "balance": BALANCE_CONVENTION,
    } | numbers.pop("about", {})
    test, memory = numbers.pop("test", None), numbers.pop("memory", None)
    lines = _lines(perplexity, numbers)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"format": FORMAT, "config": config.to_json(), **about})
    if result:
        best = min(evaluations, key=lambda line: line["loss"])
        summary = {
            "config": config.to_json(),
            "parameters": {"total": 3_200_000, "active": 1_600_000},
            "best": best,
            "last": evaluations[-1],
            "tokens": evaluations[-1]["tokens"],
            "seconds": evaluations[-1]["seconds"],
            "tokens_per_second": numbers.get("speed", 4000.0),
            "test": None if test is None else {"step": STEPS, "perplexity": test},
            "peak_memory_gib": memory,
            **{key: about[key] for key in ("versions", "git", "machine")},
            "log": lines,
        }
        write_json(folder / "result.json", summary)


def _lines(perplexity: float, numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """A falling curve that ends at `perplexity`."""
    usual = {
        "entropy": 7.9,
        "dead_experts": 0.02,
        "overlap": 0.7,
        "mass_recall": 0.8,
        "mass_recall_bound": 1e-9,
    }
    given = {key: value for key, value in numbers.items() if key not in ("flops", "speed")}
    fields = {key: value for key, value in (usual | given).items() if value is not None}
    per_token, speed = numbers.get("flops", 1e7), numbers.get("speed", 4000.0)
    lines = []
    for kind, count in (("train", TRAIN_LINES), ("eval", EVALUATIONS)):
        for index in range(1, count + 1):
            step = STEPS * index // count
            tokens = step * TOKENS_PER_STEP
            loss = float(np.log(perplexity)) + 2.5 * (1 - index / count)
            line: dict[str, Any] = {"kind": kind, "step": step, "tokens": tokens, "loss": loss}
            line |= {"seconds": tokens / speed, "training_seconds": tokens / speed} | fields
            if per_token is not None:
                line |= {"flops": tokens * per_token, "executed_flops": 1.5 * tokens * per_token}
            if kind == "eval":
                line["perplexity"] = float(np.exp(loss))
            if kind == "train" and "overlap" in fields:
                line["overlap"] = 1 - (1 - fields["overlap"]) * index / count
            lines.append(line)
    return sorted(lines, key=lambda line: line["step"])


def write_suite(
    folder: Path,
    suite: str,
    runs: Mapping[str, Mapping[str, Any] | float | list[float]],
    *,
    seeds: Sequence[int] = (42,),
    name: str = "tiny",
    overrides: Sequence[str] = (),
) -> Path:
    """A suite of `variant -> numbers` or perplexity; a list has a value per seed."""
    configs = SUITES[suite].variants(override(preset(name), list(overrides)))
    planned = []
    for index, seed in enumerate(seeds):
        for variant, numbers in runs.items():
            run = PlannedRun(variant, override(configs[variant], [f"training.seed={seed}"]))
            planned.append(run)
            named = numbers if isinstance(numbers, Mapping) else {"perplexity": numbers}
            chosen: dict[str, Any] = {
                key: value[index] if isinstance(value, list) else value
                for key, value in named.items()
            }
            write_run(folder / run.folder, run.config, **chosen)
    write_json(folder / "suite.json", Plan(suite, name, tuple(planned)).to_json())
    return folder


def write_usage(run: Path, experts: np.ndarray) -> None:
    save_file({"experts.1": experts.astype(np.int64)}, run / "usage.safetensors")


def write_drawn_suite(folder: Path) -> Path:
    """Three methods with two seeds, and maps of the first."""
    runs = {
        "air": [61.0, 63.0],
        "peer": {"perplexity": [64.0, 65.0], "overlap": None},
        "exact": [60.0, 60.5],
    }
    write_suite(folder, "main", runs, seeds=(42, 43))
    random = np.random.default_rng(0)
    for variant in runs:
        write_usage(folder / f"{variant}-seed42", random.poisson(9, 4096))
    return folder


def change_config(run: Path, section: str, **options: object) -> None:
    """Other settings for a run that is written already; suite.json stays as it is."""
    for name in ("run.json", "result.json"):
        values = read_json(run / name)
        values["config"][section] |= options
        write_json(run / name, values)


def only_group(folder: Path) -> Group:
    (group,) = group_runs(read_all([folder]).runs).groups
    return group
