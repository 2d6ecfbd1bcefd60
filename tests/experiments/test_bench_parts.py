"""The parts of `airmoe bench`: cases, tokens, counting, sampling, memory."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe.experiments.bench import timing
from airmoe.experiments.bench.cases import CASES, CPU, DECODE, PAPER, SCALING, STEP, Case
from airmoe.experiments.bench.contenders import Air, Coarse, Contender, Exact, Hierarchical, Peer
from airmoe.experiments.bench.inputs import Inputs, Shape, make_inputs, summarize_cells
from airmoe.experiments.bench.measure import measure_alone
from airmoe.experiments.bench.plain import Listing
from airmoe.experiments.bench.timing import Limits, Step
from airmoe.experiments.bench.work import Ceilings, Work, count_work

DEVICE = torch.device("cpu")
CEILINGS = Ceilings("float32", 1e12, 1e12)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LAYERS = (*CASES.values(), *SCALING, *DECODE)


@pytest.mark.parametrize("case", [*LAYERS, replace(STEP, name="step-text")], ids=lambda c: c.name)
def test_the_stored_results_are_of_these_cases(case: Case) -> None:
    stored = json.loads((RESULTS / f"{case.name}.json").read_text(encoding="utf-8"))
    assert (asdict(case.shape), case.phase) == (stored["shape"], stored["phase"])
    assert {one["key"] for one in stored["results"]} <= {one.key for one in case.contenders}
    assert ("threads" in stored["device"]) == (case.device == "cpu")


def test_equal_budgets() -> None:
    assert Coarse.router_config(PAPER).num_experts == 128
    for case in LAYERS:
        assert isinstance(case.shape, Shape)
        clusters = Hierarchical.router_config(case.shape)
        size = case.shape.num_experts // clusters.num_clusters
        assert clusters.num_selected_clusters * size == case.shape.shortlist_size, case.name


@pytest.mark.parametrize("cells", ["even", "zipf", "topics"])
def test_tokens_fall_into_the_cells_that_were_asked_for(cells: Any) -> None:
    topics = cells == "topics"  # a codebook learned them: cells of unequal size
    shape = replace(CPU if topics else PAPER, dim=64, dtype="float32", cells=cells)
    inputs = make_inputs(shape, DEVICE, seed=0)
    found = summarize_cells(inputs)
    assert found["mean_size"] == shape.num_tokens / shape.num_codewords
    low, high = {"even": (1, 2), "zipf": (20, 1000), "topics": (2.5, 1000)}[cells]
    assert low * found["mean_size"] < found["largest"] < high * found["mean_size"]
    if topics:
        assert 0.6 < found["mean_cosine"] < 0.8
    else:
        assert found["mean_cosine"] == pytest.approx(1 / math.sqrt(1.36), abs=0.02)
        assert (found["empty"] > 0) == (cells == "zipf")
    torch.testing.assert_close(inputs.codewords.norm(dim=-1), torch.ones(shape.num_codewords))
    torch.testing.assert_close(inputs.batches[1].norm(dim=-1), torch.full((shape.num_tokens,), 8.0))
    assert not torch.equal(inputs.batches[0], inputs.batches[1])


def test_inputs_are_the_same_for_the_same_seed() -> None:
    first, second, other = (make_inputs(PAPER.toy(), DEVICE, seed) for seed in (1, 1, 2))
    assert torch.equal(first.batches[2], second.batches[2])
    assert torch.equal(first.cotangent, second.cotangent)
    assert not torch.equal(first.batches[2], other.batches[2])


def work(kind: type[Contender], shape: Shape = PAPER) -> Work:
    """With a router of a centroid per expert."""
    rows = (3 if shape.activation == "gelu" else 4) * shape.num_experts
    size = rows * shape.dim * shape.torch_dtype.itemsize
    return count_work(shape, kind.router_config(shape), size, plain=kind.plain)


def test_flops_of_the_papers_shape() -> None:
    """Products of the ledger; candidates have gradients, codewords none."""
    product = 2 * 65_536 * 256  # a token with a row, all tokens
    air, listing = work(Air), work(Listing)
    assert air.executed.forward == product * (2 * 1024 + 4 * 2048)
    assert air.executed.backward == product * 2 * 4 * 2048
    assert air.executed.total == pytest.approx(0.89e12, rel=0.01)
    assert air.algorithmic.forward == product * (2 * 1024 + 2048 + 3 * 512)
    assert air.algorithmic.backward == product * 2 * (2048 + 3 * 512)
    assert listing.executed == listing.algorithmic
    assert listing.executed.forward == product * (1024 + 2048 + 3 * 512)
    assert work(Coarse).algorithmic.forward == product * (128 + 3 * 512)
    gelu = work(Air, replace(PAPER, activation="gelu"))
    assert gelu.executed.backward == product * 2 * 3 * 2048


def test_the_floor_is_the_larger_of_two() -> None:
    air = work(Air)
    tables = 65_536 * 256 * 2
    assert air.moved.forward == pytest.approx(tables * (2 + 4), rel=0.01)
    assert air.moved.backward == pytest.approx(tables * (3 + 4 + 4), rel=0.01)
    slow_product = Ceilings("bfloat16", flops=1e12, bytes=1e15)
    assert air.floor_ms(slow_product, backward=True) == pytest.approx(air.executed.total / 1e9)
    slow_copy = Ceilings("bfloat16", flops=1e18, bytes=1e9)
    assert air.floor_ms(slow_copy, backward=False) == pytest.approx(air.moved.forward / 1e6)


def test_bytes_of_other_routers() -> None:
    inputs = make_inputs(PAPER.toy(), DEVICE)
    width, tokens, tables = 64 * 4, 256, 3 * 1024
    rows = {Exact: 1024, Hierarchical: 1024 + 16, Peer: 4 * (64 + 32), Coarse: 1024 // 32}
    for kind, router in rows.items():
        contender = kind(inputs)
        size = sum(value.nbytes for value in contender.parameters().values())
        moved = count_work(inputs.shape, contender.config, size).moved
        assert moved.forward == width * (2 * tokens + tables + router), kind
        assert moved.backward == width * (3 * tokens + 2 * (tables + router)), kind


def test_few_tokens_touch_few_rows() -> None:
    """Why decoding with AIR can be fast: its floor does not grow with the experts."""
    shape = replace(PAPER, num_tokens=8, dim=1024, num_experts=1_048_576)
    air, exact = (work(kind, shape) for kind in (Air, Exact))
    assert air.moved.forward < 50_000 * 1024 * 2
    assert exact.moved.forward > 1_048_576 * 1024 * 2


def test_slow_steps_get_fewer_samples() -> None:
    limits = Limits(repeats=20, seconds=3, least=5)
    counts = [limits.count(seconds) for seconds in (0.0, 0.01, 0.25, 1.0, 50.0)]
    assert counts == [20, 20, 12, 5, 5]
    assert Limits(repeats=2).count(0.1) == 2


def test_every_sample_is_kept_and_warm_up_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, loaded = [0.0], []

    def work() -> None:
        clock[0] += 0.001 * loaded[-1]

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    laps = Step(DEVICE, [work, lambda: (work(), work())], loaded.append).sample(Limits(4), warmup=2)
    assert loaded == [0, 1, 2, 3, 4, 5]
    assert [[round(ms, 6) for ms in lap] for lap in laps] == [[n, 2 * n] for n in (2, 3, 4, 5)]


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_step() -> None:
    kept = torch.zeros(2**20, device="cuda")
    step = Step(torch.device("cuda"), [lambda: torch.zeros(2**22, device="cuda").sum()])
    found = step.peak_bytes()
    assert found is not None and 2**24 <= found < 2**24 + 2**20
    del kept


@pytest.mark.gpu
def test_a_graph_reads_the_batch_of_its_step() -> None:
    device, batch, outputs = torch.device("cuda"), torch.zeros(4, device="cuda"), []
    (replay,) = Step(device, [lambda: batch * 2], batch.fill_).captured().actions
    step = Step(device, [lambda: outputs.append(replay())], batch.fill_)
    for number in (1, 2):
        assert len(step.take(number)) == 2
        torch.cuda.synchronize()
        assert outputs[-1].tolist() == [2.0 * number] * 4


@pytest.mark.slow
def test_memory_of_the_listing_holds_its_gathered_candidates() -> None:
    shape = replace(CPU.toy(), num_tokens=512, dim=64, shortlist_size=512, num_experts=1024)
    listing = measure_alone(Listing, shape, "training", DEVICE, CEILINGS, Limits(repeats=2))
    assert listing.status == "timed", listing.reason
    assert listing.check is not None and listing.check.worst_share <= 1
    pairs = list(zip(listing.forward_ms, listing.total_ms, strict=True))
    assert len(pairs) == 2 and all(0 < forward < total for forward, total in pairs)
    gathered = 512 * 512 * 64 * 4
    assert listing.peak_bytes is not None and gathered <= listing.peak_bytes <= 4 * gathered


class Dying(Air):
    def __init__(self, inputs: Inputs) -> None:
        os._exit(7)


@pytest.mark.slow
def test_a_process_that_dies_is_reported() -> None:
    result = measure_alone(Dying, PAPER, "training", DEVICE, CEILINGS, Limits())
    assert result.status == "failed" and "terminated abruptly" in result.reason
