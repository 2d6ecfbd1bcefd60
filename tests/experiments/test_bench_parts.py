"""The parts of `airmoe bench`: cases, tokens, counting, sampling, promises."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from airmoe.errors import ConfigError
from airmoe.experiments.bench.cases import CASES, DECODE, SCALING, Shape, toy
from airmoe.experiments.bench.entries import ENTRIES
from airmoe.experiments.bench.inputs import make_inputs, read_captured, summarize_cells
from airmoe.experiments.bench.promises import kept_and_broken
from airmoe.experiments.bench.timing import (
    Ceilings,
    Limits,
    Timer,
    in_graph,
    measure_ceilings,
    peak_bytes,
    sample,
)
from airmoe.experiments.bench.work import air_work, coarse_work, exact_work, peer_work

CPU = torch.device("cpu")
PAPER = CASES["paper"].shape


def test_cases_have_the_promised_sizes() -> None:
    assert Shape(65_536, 256, 65_536, 512, 1024, 2048) == PAPER
    assert (PAPER.dtype, PAPER.activation, PAPER.cells) == ("bfloat16", "swiglu", "even")
    assert CASES["paper-16k"].shape == replace(PAPER, num_tokens=16_384)
    assert CASES["paper-768"].shape == replace(PAPER, dim=768)
    assert CASES["paper-g256"].shape == replace(PAPER, num_codewords=256)
    assert [case.shape.num_experts for case in SCALING] == [4**n for n in range(6, 11)]
    for case, tokens in zip(DECODE, (1, 8, 64), strict=True):
        wanted = replace(PAPER, num_tokens=tokens, dim=1024, num_experts=1_048_576)
        assert (case.shape, case.phase) == (wanted, "decoding")
    for case in (*CASES.values(), *SCALING, *DECODE):
        assert set(case.contenders) <= set(ENTRIES)
        assert toy(case).name == f"{case.name}-quick"
    assert set(CASES["paper"].contenders) == set(ENTRIES)


def test_equal_budgets() -> None:
    assert PAPER.num_coarse_experts == 128
    assert PAPER.num_selected_clusters == 32
    assert replace(PAPER, num_experts=1_048_576).num_selected_clusters == 2
    assert replace(PAPER, num_codewords=8).num_selected_clusters is None


@pytest.mark.parametrize("cells", ["even", "zipf"])
def test_tokens_fall_into_the_cells_that_were_asked_for(cells: Any) -> None:
    shape = replace(PAPER, dim=64, cells=cells, dtype="float32")
    inputs = make_inputs(shape, CPU, seed=0)
    found = summarize_cells(inputs)
    assert found.mean_size == 64
    assert found.mean_cosine == pytest.approx(1 / math.sqrt(1.36), abs=0.02)
    if cells == "zipf":
        assert found.largest >= 20 * found.mean_size
        assert found.empty >= 1
    else:
        assert found.largest < 2 * found.mean_size
        assert found.empty == 0
    torch.testing.assert_close(inputs.batches[0].norm(dim=-1), torch.full((65_536,), 8.0))
    assert not torch.equal(inputs.batches[0], inputs.batches[1])


def test_inputs_are_the_same_for_the_same_seed() -> None:
    shape = toy(CASES["paper"]).shape
    first, second, other = (make_inputs(shape, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(first.batches[2], second.batches[2])
    assert torch.equal(first.cotangent, second.cotangent)
    assert not torch.equal(first.batches[2], other.batches[2])


def test_captured_states_decide_the_sizes(tmp_path: Path) -> None:
    hidden = torch.randn(96, 24)
    shape = replace(toy(CASES["paper-captured"]).shape, num_tokens=64)
    save_file({"hidden": hidden}, tmp_path / "plain.safetensors")
    inputs = make_inputs(shape, CPU, 0, read_captured(tmp_path / "plain.safetensors"))
    assert (inputs.shape.num_tokens, inputs.shape.dim) == (64, 24)
    assert torch.equal(inputs.batches[0], hidden[:64])
    assert torch.equal(inputs.batches[1], hidden[24:88])
    assert torch.equal(inputs.batches[3], torch.cat([hidden[72:], hidden[:40]]))
    torch.testing.assert_close(inputs.codewords.norm(dim=-1), torch.ones(16))
    tensors = {"hidden": hidden, "codewords": torch.randn(5, 24), "centroids": torch.randn(256, 24)}
    save_file(tensors, tmp_path / "all.safetensors")
    shape = replace(shape, num_tokens=1000, dtype="bfloat16")
    inputs = make_inputs(shape, CPU, 0, read_captured(tmp_path / "all.safetensors"))
    assert (inputs.shape.num_tokens, inputs.shape.num_codewords) == (96, 5)
    assert inputs.shape.num_experts == 256
    assert inputs.centroids is not None and inputs.batches[0].dtype == torch.bfloat16
    torch.testing.assert_close(inputs.codewords, F.normalize(tensors["codewords"], dim=-1))


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (None, "must be a safetensors file"),
        ("text", "cannot be read"),
        ({"states": torch.ones(2, 2)}, "must hold a tensor `hidden`"),
        ({"hidden": torch.ones(2)}, "hidden is \\(2,\\)"),
        ({"hidden": torch.ones(2, 4), "codewords": torch.ones(2, 3)}, "codewords is \\(2, 3\\)"),
        ({"hidden": torch.full((2, 2), torch.nan)}, "must be finite"),
        ({"hidden": torch.ones(2, 2, dtype=torch.int64)}, "must be finite numbers"),
    ],
)
def test_captured_states_that_are_none(tensors: Any, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "states.safetensors"
    if isinstance(tensors, str):
        file.write_text(tensors)
    elif tensors is not None:
        save_file(tensors, file)
    with pytest.raises(ConfigError, match=complaint):
        read_captured(file)


def test_flops_of_the_papers_shape() -> None:
    air = air_work(PAPER)
    product = 2 * 65_536 * 256  # a token with a row, all tokens
    assert air.executed.forward == product * (1024 + 4 * 2048)
    assert air.executed.backward == product * 2 * 4 * 2048
    assert air.executed.total == pytest.approx(0.86e12, rel=0.01)
    assert air.algorithmic.forward == product * (1024 + 2048 + 3 * 512)
    assert air.algorithmic.backward == product * 2 * 4 * 512
    assert exact_work(PAPER).algorithmic.forward == product * (65_536 + 3 * 512)
    assert coarse_work(PAPER).executed.forward == product * (128 + 3 * 512)
    assert peer_work(PAPER).executed.forward == product * (8 * 256 + 8 * 256 + 3 * 512)
    gelu = air_work(replace(PAPER, activation="gelu"))
    assert gelu.executed.backward == product * 2 * 3 * 2048


def test_the_floor_is_the_larger_of_two() -> None:
    air = air_work(PAPER)
    tables = 65_536 * 256 * 2
    assert air.moved.forward == pytest.approx(tables * (2 + 4), rel=0.01)
    assert air.moved.backward == pytest.approx(tables * (3 + 4 + 4), rel=0.01)
    slow_product = Ceilings("bfloat16", flops=1e12, bytes=1e15)
    assert air.floor_ms(slow_product, backward=True) == pytest.approx(air.executed.total / 1e9)
    slow_copy = Ceilings("bfloat16", flops=1e18, bytes=1e9)
    assert air.floor_ms(slow_copy, backward=False) == pytest.approx(air.moved.forward / 1e6)


def test_few_tokens_touch_few_rows() -> None:
    """Why decoding with AIR can be fast: its floor does not grow with the experts."""
    air, exact = (work(DECODE[1].shape) for work in (air_work, exact_work))
    assert air.moved.forward < 50_000 * 1024 * 2
    assert exact.moved.forward > 1_048_576 * 1024 * 2


def test_slow_steps_get_fewer_samples() -> None:
    limits = Limits(repeats=20, seconds=3, least=5, most_seconds=12)
    counts = [limits.count(seconds) for seconds in (0.0, 0.01, 0.25, 1.0, 2.0, 5.0, 50.0)]
    assert counts == [20, 20, 12, 5, 5, 2, 1]
    assert Limits(repeats=2).count(0.1) == 2


def test_every_sample_is_kept_and_warm_up_is_not() -> None:
    timer, seen = Timer(CPU), []

    def step(number: int) -> list[Any]:
        seen.append(number)
        return [0.0, 0.001 * number, 0.003 * number]

    laps = sample(timer, step, Limits(repeats=4), warmup=2)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [[round(ms, 6) for ms in lap] for lap in laps] == [[n, 2 * n] for n in (2, 3, 4, 5)]


def test_ceilings_are_plausible_on_a_cpu() -> None:
    found = measure_ceilings(Timer(CPU), torch.float32)
    assert found.dtype == "float32"
    assert 1e8 < found.flops < 1e14
    assert 1e7 < found.bytes < 1e13


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_action() -> None:
    timer = Timer(torch.device("cuda"))
    kept = torch.zeros(2**20, device="cuda")
    found = peak_bytes(timer, lambda: torch.zeros(2**22, device="cuda").sum())
    assert found is not None and 2**24 <= found < 2**24 + 2**20
    del kept


@pytest.mark.gpu
def test_a_graph_reads_the_batch_of_its_step() -> None:
    timer, outputs = Timer(torch.device("cuda")), []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        outputs.append(hidden * 2)
        return outputs[-1]

    batches = [torch.full((4,), float(value), device="cuda") for value in (1, 2)]
    step = in_graph(timer, forward, batches)
    for number in (1, 0):
        step(number)
        timer.wait()
        assert outputs[-1].tolist() == [2.0 * (number + 1)] * 4


def content(case: str, **milliseconds: float) -> dict[str, Any]:
    """As it stands in a JSON file."""
    return {
        "case": case,
        "results": [
            {
                "key": key.replace("_", "-"),
                "status": "timed",
                "median": {"forward_ms": ms / 4, "total_ms": ms},
                "peak_bytes": int(ms * 2**28),
            }
            for key, ms in milliseconds.items()
        ],
    }


def test_promises_are_about_what_was_measured() -> None:
    run = [
        content("paper", air_triton=10.0, exact=50.0, exact_gathered=300.0, peer=200.0),
        content("paper-zipf", air_triton=16.0),
        content("scaling-65536", air_triton=10.0),
        content("scaling-1048576", air_triton=14.0),
        content("decode-8", air_triton=0.1, exact=4.0),
    ]
    found = {promise.text: promise for promise in kept_and_broken(run)}
    assert (found["paper: AIR, ms"].value, found["paper: AIR, ms"].kept) == (10.0, True)
    assert (found["paper: AIR, peak GiB"].value, found["paper: AIR, peak GiB"].kept) == (2.5, True)
    zipf = found["paper-zipf: AIR, times paper"]
    assert zipf.value == pytest.approx(1.6) and not zipf.kept
    assert str(zipf) == "paper-zipf: AIR, times paper: 1.6 (at most 1.5: broken)"
    assert found["paper: exact, times as fast as gathered"].value == 6
    assert not found["paper: exact, memory over gathered"].kept
    assert not any("peer" in text for text in found)
    growth = [promise for text, promise in found.items() if "16 times" in text]
    assert [promise.value for promise in growth] == [1.4, 1.4]
    assert [promise.kept for promise in growth] == [False, True]
    assert found["decode-8: AIR, times as fast as exact"].kept
    assert not kept_and_broken([content("paper-quick", air_triton=1.0)])
