"""`airmoe bench` as a user types it, at toy sizes: what it prints, writes and draws."""

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
from safetensors.torch import save_file

from airmoe import ConfigError, MoELayer
from airmoe.experiments.bench import run as bench
from airmoe.experiments.bench import step
from airmoe.experiments.bench.cases import CASES, Shape
from airmoe.experiments.bench.entries import ENTRIES
from airmoe.experiments.bench.measure import Result
from airmoe.experiments.bench.page import draw
from airmoe.experiments.bench.report import closing_lines, fastest, print_case
from airmoe.experiments.bench.timing import Limits, Timer, best_device
from tests.training.command import Outcome, airmoe, assert_one_line

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def bench_quickly(*arguments: object, out: Path) -> Outcome:
    return airmoe("bench", *arguments, "--quick", "--repeats", 2, "--out", out)


def load(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def test_all_contenders_in_one_run(tmp_path: Path) -> None:
    figure = tmp_path / "figures" / "speed.svg"
    outcome = bench_quickly("--figure", figure, out=tmp_path / "new")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["paper-quick.json"]
    content = load(tmp_path / "new" / "paper-quick.json")
    assert content["complete"] and content["phase"] == "training"
    assert content["shape"]["num_experts"] == 1024
    assert content["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert content["device"]["name"] and content["ceilings"]["flops"] > 0
    assert set(content["git"]) == {"commit", "changed"}
    results = {result["key"]: result for result in content["results"]}
    assert set(results) == {*CASES["paper"].contenders}
    for key, result in results.items():
        if key == "air-triton" and not torch.cuda.is_available():
            assert result["status"] == "skipped"
            continue
        assert result["status"] == "timed", result
        assert len(result["forward_ms"]) == len(result["total_ms"]) == 2
        pairs = zip(result["forward_ms"], result["total_ms"], strict=True)
        assert all(0 < forward < total for forward, total in pairs)
        assert result["median"]["total_ms"] == median(result["total_ms"])
        assert 0 < result["check"]["worst_share"] <= 1
        assert result["work"]["total_floor_ms"] > result["work"]["forward_floor_ms"] > 0
    assert set(results["air-reference"]["apart_ms"]) == {
        "codebook update",
        "refresh (1/|w|, shortlists, reverse index)",
        "casts from float32",
        "zeroed gradient buffers",
    }
    baseline = fastest(content, "baseline")
    assert baseline is not None
    lines = outcome.out.splitlines()
    (line,) = [line for line in lines if "times as fast as the fastest granular baseline" in line]
    assert f"baseline, {baseline['name']}," in line
    for key in results:
        name = ENTRIES[key].name
        assert any(line.startswith(f"  {name}: ") for line in lines), name
    assert baseline["name"] in figure.read_text(encoding="utf-8")


def test_cases_of_a_cpu_and_a_swapped_router(tmp_path: Path) -> None:
    cases = ("cpu", "cpu-swiglu", "cpu-growth", "--swapped")
    outcome = bench_quickly(*cases, out=tmp_path)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    for name in cases[:3]:
        content = load(tmp_path / f"{name}-quick.json")
        assert content["device"]["threads"] >= 1 and content["device"]["name"]
        assert [result["key"] for result in content["results"]] == [*CASES[name].contenders]
        for result in content["results"]:
            missing = result["key"] == "peer-pytorch" and find_spec("PEER_pytorch") is None
            assert result["status"] == ("skipped" if missing else "timed"), result
    (row,) = [line for line in outcome.out.splitlines() if line.startswith("| 16 |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["16", "32", "4", "8", "8"]
    assert float(cells[7]) == pytest.approx(float(cells[6]) / float(cells[5]), rel=0.1)


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_full_sizes_on_a_cpu_take_turns_and_a_wrong_one_fails_the_command(
    status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def turns(keys: list[str], shape: Shape, *_: Any) -> list[Result]:
        asked.append((keys, shape))
        return [Result(key, ENTRIES[key].name, "air", status, "no memory") for key in keys]

    monkeypatch.setattr(bench, "measure_in_turns", turns)
    console = Console(record=True, width=120)
    options = bench.Options(cases=("cpu-growth",), out=tmp_path)
    assert not bench.Bench(options, console).run()
    assert asked == [(["air", "air-16-times"], CASES["cpu-growth"].shape)]
    assert load(tmp_path / "cpu-growth.json")["complete"]
    assert f"AIR, 16 E: {status}: no memory" in console.export_text()


def test_scaling_and_decoding_of_one(tmp_path: Path) -> None:
    outcome = bench_quickly("--scaling", "--decode", "--only", "air-reference", out=tmp_path)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    files = {file.name: load(file) for file in tmp_path.iterdir()}
    scaling = [f"scaling-{experts}-quick-only.json" for experts in (16384, 65536, 262144)]
    decoding = [f"decode-{tokens}-quick-only.json" for tokens in (1, 8, 64)]
    assert set(files) == {*scaling, *decoding}
    assert [files[name]["shape"]["num_experts"] for name in scaling] == [256, 1024, 4096]
    for name in decoding:
        (result,) = files[name]["results"]
        assert result["status"] == "timed"
        assert len(result["forward_ms"]) == 2 and not result["total_ms"]
        assert [d["what"] for d in result["check"]["deviations"]] == ["output"]
    assert "E = 256: " in outcome.out and "; E = 4,096: " in outcome.out


def test_captured_states(tmp_path: Path) -> None:
    outcome = bench_quickly("paper-captured", "--only", "air-reference", out=tmp_path)
    assert outcome.code == 0
    assert "paper-captured-quick: skipped, it needs --activations" in outcome.out
    assert not list(tmp_path.iterdir())
    file = tmp_path / "states.safetensors"
    save_file({"hidden": torch.randn(300, 48)}, file)
    arguments = ("paper-captured", "--activations", file, "--only", "air-reference")
    outcome = bench_quickly(*arguments, out=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    content = load(tmp_path / "out" / "paper-captured-quick-only.json")
    assert (content["shape"]["num_tokens"], content["shape"]["dim"]) == (256, 48)
    assert content["results"][0]["status"] == "timed"


def test_training_steps_on_text_and_what_the_layer_was_given(tmp_path: Path) -> None:
    text, prepared = tmp_path / "text.txt", tmp_path / "prepared"
    lines = (f"{number} times {number} is {number * number}.\n\n" for number in range(600))
    text.write_text("".join(lines), encoding="utf-8")
    outcome = airmoe("prepare", text, "--out", prepared, "--tokenizer", "bytes")
    assert outcome.code == 0, outcome
    states = tmp_path / "made" / "states.safetensors"
    given = ("--step", "--only", "eager", "--data", prepared, "--capture", states)
    outcome = bench_quickly(*given, out=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    content = load(tmp_path / "out" / "step-text-quick-only.json")
    assert "text, after" in content["shape_text"]
    (result,) = content["results"]
    assert result["status"] == "timed"
    assert result["work"]["last_loss"] < 4 < result["work"]["first_loss"]  # ln 512 = 6.2
    speeds = [256e3 / ms for ms in result["total_ms"]]
    assert result["work"]["tokens_per_second"] == pytest.approx(speeds)
    assert f"{median(speeds):,.0f}" in outcome.out
    assert result["work"]["codeword_perplexity"] > 1.5
    given = ("paper-captured", "--activations", states, "--only", "air-reference")
    outcome = bench_quickly(*given, out=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    shape = load(tmp_path / "out" / "paper-captured-quick-only.json")["shape"]
    config = step.TOY.config()
    assert (shape["dim"], shape["num_experts"]) == (config.hidden_size, config.num_experts)


def test_a_captured_step_has_no_parts_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result("graph", "one CUDA graph", "air", total_ms=[20.0, 21.0, 25.0], captured=True)
    result.status = "timed"
    result.work = {"tokens_per_second": [1000.0]}
    monkeypatch.setattr(step, "measure_step", lambda *_: result)
    options = bench.Options(step=True, quick=True, only=("graph",), out=tmp_path)
    console = Console(record=True, width=120)
    assert bench.Bench(options, console).run()
    shown = console.export_text()
    assert "one CUDA graph: in all 21 ms" in shown and "1,000" in shown


@pytest.mark.parametrize("key", ["eager", "dense"])
def test_a_step_learns(key: str) -> None:
    way = replace(step.WAYS[key], compiled=False, captured=False)
    training = step.TrainingStep(step.TOY, way, Timer(best_device()), seed=0)
    has_experts = any(isinstance(part, MoELayer) for part in training.model.modules())
    assert (way.role, has_experts) == (("dense", False) if key == "dense" else ("air", True))
    for number in range(12):
        assert len(training(number)) == 4
    assert training.losses[-1] < training.losses[0]


def test_a_step_that_does_not_learn_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer(best_device())

    def stuck(self: step.TrainingStep, _number: int) -> list[Any]:
        self.losses.append(torch.tensor(math.nan if len(self.losses) == 3 else 5.0))
        return [timer.mark()] * 4

    monkeypatch.setattr(step.TrainingStep, "__call__", stuck)
    run = step.StepRun(step.TOY, timer, Limits(repeats=1), seed=0)
    result = step.measure_step(step.WAYS["eager"], run)
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
    options = bench.Options(quick=True, repeats=1, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        bench.Bench(options, Console(quiet=True)).run()
    content = load(tmp_path / "paper-quick.json")
    assert not content["complete"]
    assert [result["key"] for result in content["results"]] == ["air-triton", "air-reference"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["paper-7"], "bench.case: got 'paper-7', must be one of paper, paper-16k"),
        (["paper-7"], "Or use --step, --decode, --scaling, --swapped."),
        (["--only", "nobody"], "bench.only: got 'nobody', must be one of air-triton"),
        (["--only", "eager"], "bench.only: got 'eager', is in none of the cases"),
        (["--decode", "--only", "listing"], "bench.only: got 'listing', is in none"),
        (["--swapped", "--figure", "f.svg"], "bench.figure: got 'f.svg', is drawn from"),
        (["--repeats", "0"], "bench.repeats: got 0"),
        (["--figure", "a.txt"], "bench.figure: got 'a.txt', must end in .svg, .png or .pdf"),
        (["--data", "text"], "bench.data: got 'text', is for whole training steps"),
        (["--capture", "file"], "bench.capture: got 'file', is for whole training steps"),
        (["--step", "--only", "graph", "--capture", "file"], "bench.capture: got 'file'"),
        (["--step", "--data", "nowhere"], "data: got 'nowhere'"),
        (["--activations", "none.safetensors"], "bench.activations: got 'none.safetensors'"),
    ],
)
def test_mistakes(arguments: list[str], part: str, tmp_path: Path) -> None:
    outcome = airmoe("bench", *arguments, "--quick", cwd=tmp_path)
    assert_one_line(outcome, 2, part)
    assert not list(tmp_path.iterdir())


@ON_CPU
def test_full_sizes_need_a_gpu(tmp_path: Path) -> None:
    assert_one_line(airmoe("bench", cwd=tmp_path), 2, "bench.device: got 'cpu'", "--quick")


def result(name: str, role: str, ms: float, **more: Any) -> dict[str, Any]:
    made = Result(name.lower().replace(" ", "-"), name, role, forward_ms=[ms / 4], total_ms=[ms])
    made.peak_bytes = 2**30
    half = {"forward": 1e12, "backward": 2e12}
    made.work = {"algorithmic": half, "executed": half, "total_floor_ms": ms / 2}
    return made.as_json() | {"check": {"worst_share": 0.4}} | more


def made_up_content() -> dict[str, Any]:
    lost = Result("listing", "paper's listing", "baseline", "out of memory")
    lost.reason = "out of memory, needs about 192 GiB"
    return {
        "case": "paper",
        "phase": "training",
        "shape_text": "T = 65,536",
        "device": {"name": "a GPU"},
        "results": [
            result("AIR Triton", "air", 8.0),
            result("coarse", "coarse", 2.0),
            result("exact", "baseline", 40.0),
            result("PEER", "baseline", 60.0, parts=2, reason="in one part out of memory"),
            lost.as_json(),
        ],
    }


def test_the_fastest_granular_baseline_is_named() -> None:
    (line,) = closing_lines([made_up_content()])
    assert line == (
        "paper: AIR Triton, 8 ms, is 5 times as fast as the fastest granular baseline, exact, 40 ms"
    )


def test_table() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_case(console, made_up_content())
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert [line for line in lines if "50.0%" in line] == [
        "coarse 0.500 2.000 2-2 1.00 1.5e+03 1.5e+03 50.0% 0.40 1",
        "AIR Triton 2.000 8.000 8-8 1.00 375 375 50.0% 0.40 1",
        "exact 10.000 40.000 40-40 1.00 75 75 50.0% 0.40 1",
        "PEER, in 2 parts 15.000 60.000 60-60 1.00 50 50 50.0% 0.40 1",
    ]
    assert "paper's listing: out of memory, needs about 192 GiB" in lines
    assert "PEER: in one part out of memory" in lines
    assert not any(line.startswith("exact:") for line in lines)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_figure(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / f"speed.{suffix}"
    draw(made_up_content(), path)
    if suffix == "svg":
        text = path.read_text(encoding="utf-8")
        for part in ("5 times as fast as the fastest granular baseline, exact", "60.0 ms, 1 GiB"):
            assert part in text, part
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_figure_of_stored_results_measures_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("bench", "--figure", "speed.svg", "--out", "results")
    assert_one_line(airmoe(*arguments, cwd=tmp_path), 2, "bench.figure: got 'speed.svg'")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "paper.json").write_text(json.dumps(made_up_content()))
    outcome = airmoe(*arguments, cwd=tmp_path)
    assert (outcome.code, outcome.out) == (0, "figure: speed.svg\n"), outcome
    assert (tmp_path / "speed.svg").exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"phase": 7}', "[" * 5000])
def test_stored_results_that_are_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "paper.json").write_text(content)
    options = bench.Options(out=tmp_path, figure=tmp_path / "speed.svg")
    with pytest.raises(ConfigError, match=r"bench\.out: got .*must be"):
        bench.Bench(options, Console()).run()
