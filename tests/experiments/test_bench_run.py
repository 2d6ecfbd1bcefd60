"""`airmoe bench` as a user types it, at toy sizes: what it prints and writes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from rich.console import Console

from airmoe import MoELayer
from airmoe.experiments.bench import run as bench
from airmoe.experiments.bench import step
from airmoe.experiments.bench.cases import CASES, CPU
from airmoe.experiments.bench.contenders import Contender
from airmoe.experiments.bench.inputs import Shape
from airmoe.experiments.bench.results import Result, fastest, print_case
from airmoe.experiments.bench.timing import Limits, best_device
from tests.training.command import airmoe, assert_one_line, succeeds

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
TOY = step.StepShape().toy()


def bench_quickly(*arguments: object, out: Path) -> str:
    return succeeds("bench", *arguments, "--quick", "--repeats", 2, "--out", out)


def load(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def test_all_contenders_in_one_run(tmp_path: Path) -> None:
    printed = bench_quickly(out=tmp_path / "new")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["paper-quick.json"]
    content = load(tmp_path / "new" / "paper-quick.json")
    assert content["complete"] and content["phase"] == "training"
    assert content["shape"]["num_experts"] == 1024
    assert content["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert content["device"]["name"] and content["ceilings"]["flops"] > 0
    assert set(content["git"]) == {"commit", "changed"}
    results = {result["key"]: result for result in content["results"]}
    assert list(results) == [kind.key for kind in CASES["paper"].contenders]
    for result in results.values():
        assert result["status"] == "timed", result
        assert len(result["forward_ms"]) == len(result["total_ms"]) == 2
        pairs = zip(result["forward_ms"], result["total_ms"], strict=True)
        assert all(0 < forward < total for forward, total in pairs)
        assert result["median"]["total_ms"] == median(result["total_ms"])
        assert 0 < result["check"]["worst_share"] <= 1
        assert result["work"]["total_floor_ms"] > result["work"]["forward_floor_ms"] > 0
    assert {"codebook update", "refresh (1/|w|, shortlists, reverse index)"} <= set(
        results["air"]["apart_ms"]
    )
    baseline = fastest(content, "baseline")
    assert baseline is not None
    lines = printed.splitlines()
    (line,) = [line for line in lines if "times as fast as the fastest granular baseline" in line]
    assert f"baseline, {baseline['name']}," in line
    for name in (kind.name for kind in CASES["paper"].contenders):
        assert any(line.startswith(f"  {name}: ") for line in lines), name


def test_cases_of_a_cpu(tmp_path: Path) -> None:
    cases = ("cpu", "cpu-swiglu", "cpu-growth")
    bench_quickly(*cases, out=tmp_path)
    for name in cases:
        content = load(tmp_path / f"{name}-quick.json")
        assert content["device"]["threads"] >= 1 and content["device"]["name"]
        assert [result["key"] for result in content["results"]] == [
            kind.key for kind in CASES[name].contenders
        ]
        for result in content["results"]:
            missing = result["key"] == "peer-pytorch" and find_spec("PEER_pytorch") is None
            assert result["status"] == ("skipped" if missing else "timed"), result


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_full_sizes_on_a_cpu_get_a_process_each_and_a_wrong_one_fails_the_command(
    status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def alone(kind: type[Contender], shape: Shape, *given: Any) -> Result:
        asked.append((kind.key, shape, given[-1].repeats))
        return Result(kind.key, kind.name, "air", status, "no memory")

    monkeypatch.setattr(bench, "measure_alone", alone)
    console = Console(record=True, width=120)
    assert not bench.Bench(console, cases=("cpu-growth",), repeats=7, out=tmp_path).run()
    assert asked == [("air", CPU, 7), ("air-16-times", CPU, 7)]
    assert load(tmp_path / "cpu-growth.json")["complete"]
    assert f"AIR, 16 E: {status}: no memory" in console.export_text()


def test_scaling_and_decoding_of_one(tmp_path: Path) -> None:
    bench_quickly("--scaling", "--decode", "--only", "air", out=tmp_path)
    files = {file.name: load(file) for file in tmp_path.iterdir()}
    scaling = [f"scaling-{4**n}-quick-only.json" for n in range(6, 11)]
    decoding = [f"decode-{tokens}-quick-only.json" for tokens in (1, 8, 64)]
    assert set(files) == {*scaling, *decoding}
    sizes = [files[name]["shape"]["num_experts"] for name in scaling]
    assert sizes == [256, 256, 1024, 4096, 16_384]
    for name in decoding:
        (result,) = files[name]["results"]
        assert result["status"] == "timed"
        assert len(result["forward_ms"]) == 2 and not result["total_ms"]
        assert [d["what"] for d in result["check"]["deviations"]] == ["output"]


def test_training_steps_on_text(tmp_path: Path) -> None:
    text, prepared = tmp_path / "text.txt", tmp_path / "prepared"
    lines = (f"{number} times {number} is {number * number}.\n\n" for number in range(600))
    text.write_text("".join(lines), encoding="utf-8")
    succeeds("prepare", text, "--out", prepared, "--tokenizer", "bytes")
    given = ("--step", "--only", "eager", "--data", prepared)
    printed = bench_quickly(*given, out=tmp_path / "out")
    content = load(tmp_path / "out" / "step-text-quick-only.json")
    assert "text, after" in content["shape_text"]
    (result,) = content["results"]
    assert result["status"] == "timed"
    assert result["work"]["last_loss"] < 4 < result["work"]["first_loss"]  # ln 512 = 6.2
    speeds = [256e3 / ms for ms in result["total_ms"]]
    assert result["work"]["tokens_per_second"] == pytest.approx(speeds)
    assert f"{median(speeds):,.0f}" in printed
    assert result["work"]["codeword_perplexity"] > 1.5


def test_a_captured_step_has_no_parts_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result("graph", "one CUDA graph", "air", total_ms=[20.0, 21.0, 25.0], captured=True)
    result.work = {"tokens_per_second": [1000.0]}
    monkeypatch.setattr(bench, "measure_step", lambda *_: result)
    console = Console(record=True, width=120)
    assert bench.Bench(console, step=True, quick=True, only=("graph",), out=tmp_path).run()
    shown = console.export_text()
    assert "one CUDA graph: in all 21 ms" in shown and "1,000" in shown


@pytest.mark.parametrize(
    ("key", "role"), [("eager", "air"), ("dense", "dense"), ("peer", "baseline")]
)
def test_a_step_learns(key: str, role: str) -> None:
    way = replace(step.WAYS[key], compiled=False, captured=False)
    training = step.TrainingStep(way, TOY, best_device())
    has_experts = any(isinstance(part, MoELayer) for part in training.model.modules())
    assert (way.role, has_experts) == (role, key != "dense")
    for number in range(12):
        training.load(number)
        training.run()
        training.keep_loss()
    assert training.losses[-1] < training.losses[0]


def test_a_step_that_does_not_learn_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_loss(self: step.TrainingStep) -> None:
        self.losses.append(torch.tensor(math.nan if len(self.losses) == 3 else 5.0))

    monkeypatch.setattr(step.TrainingStep, "keep_loss", keep_loss)
    result = step.measure_step(step.WAYS["eager"], TOY, best_device(), Limits(repeats=1), None)
    assert result.status == "wrong" and "nothing is learned" in result.reason
    assert not result.total_ms


def test_a_killed_run_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = bench.measure, []

    def killed(*arguments: Any) -> Result:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(bench, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.Bench(Console(quiet=True), quick=True, repeats=1, out=tmp_path).run()
    content = load(tmp_path / "paper-quick.json")
    assert not content["complete"]
    assert [result["key"] for result in content["results"]] == ["air", "coarse"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["paper-7"], "bench.case: got 'paper-7', must be one of paper, paper-16k"),
        (["paper-7"], "Or use --step, --decode, --scaling."),
        (["--only", "nobody"], "bench.only: got 'nobody', is in none of the cases; they have air"),
        (["--decode", "--only", "listing"], "bench.only: got 'listing', is in none"),
        (["--data", "text"], "bench.data: got 'text', is for whole training steps"),
        (["--step", "--data", "nowhere"], "data: got 'nowhere'"),
    ],
)
def test_mistakes(arguments: list[str], part: str, tmp_path: Path) -> None:
    outcome = airmoe("bench", *arguments, "--quick", cwd=tmp_path)
    assert_one_line(outcome, 2, part)
    assert not list(tmp_path.iterdir())


@ON_CPU
def test_full_sizes_need_a_gpu(tmp_path: Path) -> None:
    assert_one_line(airmoe("bench", cwd=tmp_path), 2, "bench.device: got 'cpu'", "--quick")


def result(name: str, role: str, ms: float) -> dict[str, Any]:
    made = Result(name.lower(), name, role, forward_ms=[ms / 4], total_ms=[ms], peak_bytes=2**30)
    made.work = {"total_floor_ms": ms / 2}
    return made.as_json() | {"check": {"worst_share": 0.4}}


def test_table_and_the_fastest_granular_baseline() -> None:
    lost = Result("listing", "paper's listing", "baseline", "out of memory")
    timed = [
        result("AIR", "air", 8.0),
        result("coarse", "coarse", 2.0),
        result("exact", "baseline", 40.0),
        result("PEER", "baseline", 60.0),
    ]
    content = {
        "case": "paper",
        "phase": "training",
        "shape_text": "T = 65,536",
        "results": [*timed, lost.as_json()],
    }
    console = Console(width=160)
    with console.capture() as captured:
        print_case(console, content)
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert [line for line in lines if "50.0%" in line] == [
        "coarse 0.500 2.000 2-2 - 1.00 50.0% 0.40 1",
        "AIR 2.000 8.000 8-8 - 1.00 50.0% 0.40 1",
        "exact 10.000 40.000 40-40 - 1.00 50.0% 0.40 1",
        "PEER 15.000 60.000 60-60 - 1.00 50.0% 0.40 1",
    ]
    ratio = "AIR, 8 ms, is 5 times as fast as the fastest granular baseline, exact, 40 ms"
    assert lines[-1] == f"paper: {ratio}"
