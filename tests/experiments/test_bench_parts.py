"""The parts of `airmoe bench`: cases, tokens, counting, sampling, turns."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from airmoe.errors import ConfigError
from airmoe.experiments.bench import turns
from airmoe.experiments.bench.cases import CASES, DECODE, SCALING, Shape, toy
from airmoe.experiments.bench.entries import ENTRIES, Work
from airmoe.experiments.bench.inputs import make_inputs, read_captured, summarize_cells
from airmoe.experiments.bench.measure import Result
from airmoe.experiments.bench.timing import (
    Ceilings,
    Limits,
    Timer,
    action_in_graph,
    peak_bytes,
    sample,
    step_of,
)
from airmoe.experiments.bench.turns import Subject, measure_in_turns, own_process

CPU = torch.device("cpu")
PAPER = CASES["paper"].shape


def test_cases_have_the_promised_sizes() -> None:
    assert Shape(65_536, 256, 65_536, 512, 1024, 2048, 8, "bfloat16", "swiglu", "even") == PAPER
    cpu = CASES["cpu"].shape
    assert Shape(4096, 256, 65_536, 512, 256, 1024, 8, "float32", "gelu", "topics") == cpu
    for name, base, change in (
        ("paper-16k", PAPER, {"num_tokens": 16_384}),
        ("paper-768", PAPER, {"dim": 768}),
        ("paper-g256", PAPER, {"num_codewords": 256}),
        ("cpu-swiglu", cpu, {"activation": "swiglu"}),
    ):
        assert CASES[name].shape == replace(base, **change)
    assert [case.shape.num_experts for case in SCALING] == [4**n for n in range(6, 11)]
    for case, tokens in zip(DECODE, (1, 8, 64), strict=True):
        wanted = replace(PAPER, num_tokens=tokens, dim=1024, num_experts=1_048_576)
        assert (case.shape, case.phase) == (wanted, "decoding")
    for case in (*CASES.values(), *SCALING, *DECODE):
        assert set(case.contenders) <= set(ENTRIES)
        assert toy(case).name == f"{case.name}-quick"
        assert (case.device == "cpu") == case.name.startswith("cpu")
    assert {key for case in CASES.values() for key in case.contenders} == set(ENTRIES)


def test_equal_budgets() -> None:
    assert PAPER.num_coarse_experts == 128
    assert PAPER.num_selected_clusters == 32
    assert replace(PAPER, num_experts=1_048_576).num_selected_clusters == 2
    assert replace(PAPER, num_codewords=8).num_selected_clusters is None
    assert CASES["cpu"].shape.num_selected_clusters == 4


@pytest.mark.parametrize("cells", ["even", "zipf", "topics"])
def test_tokens_fall_into_the_cells_that_were_asked_for(cells: Any) -> None:
    topics = cells == "topics"  # a codebook learned them: cells of unequal size
    shape = replace(CASES["cpu" if topics else "paper"].shape, dim=64, dtype="float32", cells=cells)
    inputs = make_inputs(shape, CPU, seed=0)
    found = summarize_cells(inputs)
    assert found.mean_size == shape.num_tokens / shape.num_codewords
    low, high = {"even": (1, 2), "zipf": (20, 1000), "topics": (2.5, 1000)}[cells]
    assert low * found.mean_size < found.largest < high * found.mean_size
    if topics:
        assert 0.6 < found.mean_cosine < 0.8
    else:
        assert found.mean_cosine == pytest.approx(1 / math.sqrt(1.36), abs=0.02)
        assert (found.empty > 0) == (cells == "zipf")
    torch.testing.assert_close(inputs.codewords.norm(dim=-1), torch.ones(shape.num_codewords))
    torch.testing.assert_close(inputs.batches[1].norm(dim=-1), torch.full((shape.num_tokens,), 8.0))
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


def work(key: str, shape: Shape = PAPER) -> Work:
    return ENTRIES[key].work(shape)


def test_flops_of_the_papers_shape() -> None:
    """Products of the ledger; candidates have gradients, codewords none."""
    product = 2 * 65_536 * 256  # a token with a row, all tokens
    air, listing, exact = work("air"), work("listing"), work("exact")
    assert air.executed.forward == product * (2 * 1024 + 4 * 2048)
    assert air.executed.backward == product * 2 * 4 * 2048
    assert air.executed.total == pytest.approx(0.89e12, rel=0.01)
    assert air.algorithmic.forward == product * (2 * 1024 + 2048 + 3 * 512)
    assert air.algorithmic.backward == product * 2 * (2048 + 3 * 512)
    assert listing.executed == listing.algorithmic
    assert listing.executed.forward == product * (1024 + 2048 + 3 * 512)
    assert exact.algorithmic.forward == product * (65_536 + 3 * 512)
    assert exact.executed.backward == product * 2 * 4 * 512
    assert work("exact-gathered").executed == exact.algorithmic
    assert work("coarse").algorithmic.forward == product * (128 + 3 * 512)
    assert work("peer").executed.forward == product * (8 * 256 + 8 * 256 + 3 * 512)
    assert work("peer-gathered") == work("peer")
    assert work("hierarchical").executed.forward == product * (1024 + 4 * 2048)
    gelu = work("air", replace(PAPER, activation="gelu"))
    assert gelu.executed.backward == product * 2 * 3 * 2048


def test_the_floor_is_the_larger_of_two() -> None:
    air = work("air")
    tables = 65_536 * 256 * 2
    assert air.moved.forward == pytest.approx(tables * (2 + 4), rel=0.01)
    assert air.moved.backward == pytest.approx(tables * (3 + 4 + 4), rel=0.01)
    slow_product = Ceilings("bfloat16", flops=1e12, bytes=1e15)
    assert air.floor_ms(slow_product, backward=True) == pytest.approx(air.executed.total / 1e9)
    slow_copy = Ceilings("bfloat16", flops=1e18, bytes=1e9)
    assert air.floor_ms(slow_copy, backward=False) == pytest.approx(air.moved.forward / 1e6)


def test_bytes_of_other_routers() -> None:
    width, tables = 256 * 2, 2 * 65_536 + 3 * 65_536  # tokens twice, three tables
    rows = {"exact": 65_536, "hierarchical": 65_536 + 1024, "peer": 8 * (256 + 256), "coarse": 128}
    for key, router in rows.items():
        assert work(key).moved.forward == width * (tables + router), key
        assert work(key).moved.backward == width * (tables + 65_536 + 2 * router + 3 * 65_536), key


def test_few_tokens_touch_few_rows() -> None:
    """Why decoding with AIR can be fast: its floor does not grow with the experts."""
    air, exact = (work(key, DECODE[1].shape) for key in ("air", "exact"))
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


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_action() -> None:
    timer = Timer(torch.device("cuda"))
    kept = torch.zeros(2**20, device="cuda")
    found = peak_bytes(timer, lambda: torch.zeros(2**22, device="cuda").sum())
    assert found is not None and 2**24 <= found < 2**24 + 2**20
    del kept


@pytest.mark.gpu
def test_a_graph_reads_the_batch_of_its_step() -> None:
    timer, batch = Timer(torch.device("cuda")), torch.zeros(4, device="cuda")
    replay, outputs = action_in_graph(timer, lambda: batch * 2), []
    step = step_of(timer, lambda: outputs.append(replay()), before=batch.fill_)
    for number in (1, 2):
        assert len(step(number)) == 2
        timer.wait()
        assert outputs[-1].tolist() == [2.0 * number] * 4


TURNS = replace(
    toy(CASES["cpu"]).shape, num_tokens=512, dim=64, shortlist_size=512, num_experts=1024
)
CEILINGS = Ceilings("float32", 1e12, 1e12)


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In alternating order; who cannot go on drops out, and slow ones get fewer turns."""
    seen: list[tuple[str, int]] = []

    class Scripted:
        def __init__(self, key: str, *_: Any) -> None:
            self.key = key

        def prepare(self) -> int:
            return 3 if self.key == "air" else 2

        def turn(self, number: int) -> None:
            seen.append((self.key, number))
            if (self.key, number) == ("peer", 1):
                raise RuntimeError("its process ended")

        def finish(self) -> Result:
            return Result(self.key, self.key, "air", backend="reference")

    @contextmanager
    def here(_make: Any, *arguments: Any) -> Iterator[Any]:
        subject = Scripted(*arguments)
        yield lambda method, *given: getattr(subject, method)(*given)

    monkeypatch.setattr(turns, "own_process", here)
    keys = ("air", "peer", "exact")
    air, peer, exact = measure_in_turns(keys, TURNS, 0, CEILINGS, Limits(repeats=3))
    assert seen == [
        ("exact", 1), ("peer", 1), ("air", 1), ("air", 2), ("exact", 2), ("air", 3)
    ]  # fmt: skip
    assert (air.status, air.backend, exact.status) == ("timed", "reference", "timed")
    assert (peer.status, peer.reason) == ("failed", "RuntimeError: its process ended")


@pytest.mark.slow
def test_memory_of_the_listing_holds_its_gathered_candidates() -> None:
    limits = Limits(repeats=2, seconds=1e-9, least=2)
    (listing,) = measure_in_turns(("listing",), TURNS, 0, CEILINGS, limits)
    assert listing.status == "timed", listing.reason
    assert listing.check is not None and listing.check.worst_share <= 1
    pairs = list(zip(listing.forward_ms, listing.total_ms, strict=True))
    assert len(pairs) == 2 and all(0 < forward < total for forward, total in pairs)
    gathered = 512 * 512 * 64 * 4
    assert listing.peak_bytes is not None and gathered <= listing.peak_bytes <= 4 * gathered


def test_a_subject_is_checked_before_its_turns() -> None:
    limits = Limits(repeats=2, seconds=1e-9, least=2)
    subject = Subject("air", replace(TURNS, num_tokens=64), 0, CEILINGS, limits)
    assert subject.prepare() == 2
    assert subject.result.check is not None and len(subject.result.check.deviations) > 3
    subject.turn(1)
    result = subject.finish()
    assert (result.status, result.backend) == ("timed", "reference")
    assert len(result.forward_ms) == len(result.total_ms) == 1, "warm-up is no sample"
    assert result.peak_bytes is not None and result.peak_bytes > 0
    assert "refresh (1/|w|, shortlists, reverse index)" in result.apart_ms


@pytest.mark.slow
def test_a_process_that_dies_is_reported() -> None:
    with own_process(importlib.import_module, "os") as ask:
        assert ask("getpid") != os.getpid()
        with pytest.raises(RuntimeError, match="ended with exit code 7"):
            ask("_exit", 7)
