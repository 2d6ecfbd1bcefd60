"""The benchmark measures what it says: right answers only, every sample kept, real memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor

from benchmarks import peer_pytorch, swapped_router
from benchmarks.contenders import AirLayer, Answer, Contender, Listing, PeerPackage
from benchmarks.cpu import FULL, QUICK, main
from benchmarks.inputs import Shape, TokenSource
from benchmarks.measure import Entry, Result, Sample, measure
from benchmarks.report import comparison_ratios, growth_ratio

SOURCE = TokenSource(QUICK, seed=3)
HAS_PEER = find_spec("PEER_pytorch") is not None


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_full_run_has_the_promised_sizes() -> None:
    assert Shape(4096, 256, 65_536, 512, 256, 1024, num_heads=8) == FULL
    assert FULL.num_selected_clusters * FULL.num_experts // FULL.num_codewords == 1024


def test_quick_run_writes_every_sample_and_the_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "cpu.json"
    if HAS_PEER:
        main(quick=True, seed=1, threads=1, output=file)
    else:
        with pytest.raises(typer.Exit) as stop:
            main(quick=True, seed=1, threads=1, output=file)
        assert stop.value.exit_code == 1
    report = json.loads(file.read_text())
    assert (report["quick"], report["seed"], report["threads"]) == (True, 1, 1)
    assert report["shape"]["num_experts"] == 1024
    assert report["versions"]["torch"] == torch.__version__
    assert report["cpu"]
    names = {group: [r["name"] for r in rows] for group, rows in report["results"].items()}
    assert names["gelu"][:3] == ["AIR", "paper's listing", "PEER-pytorch"]
    assert names["swiglu"] == ["AIR", "paper's listing"]
    assert names["growth"] == ["E = 1,024", "E = 16,384"]
    for row in (row for rows in report["results"].values() for row in rows):
        if row["name"] == "PEER-pytorch" and not HAS_PEER:
            assert row["status"] == "missing"
            continue
        assert row["status"] == "timed", row
        assert row["check"]["experts_per_token"] == 32
        assert row["check"]["output_error"] <= 1
        assert row["warmup"]
        totals = sorted(s["forward"] + s["backward"] for s in row["samples"])
        middle = (totals[(len(totals) - 1) // 2] + totals[len(totals) // 2]) / 2
        assert row["median"]["total"] == pytest.approx(middle)
        assert all(s["forward"] > 0 and s["backward"] > 0 for s in row["samples"])
    assert report["results"]["gelu"][0]["with_refresh"]
    known = [ratio["value"] is not None for ratio in report["ratios"]]
    assert known == [True, True, HAS_PEER, HAS_PEER, True, True, True]
    last_lines = capsys.readouterr().out.splitlines()[-7:]
    for ratio, line in zip(report["ratios"], last_lines, strict=True):
        assert line.startswith(ratio["name"])


class TooLarge(Listing):
    """Output wrong by a hundredth of a per cent."""

    def answer(self, hidden: Tensor) -> Answer:
        answer = super().answer(hidden)
        return replace(answer, output=answer.output * 1.0001)


class NotANumber(Listing):
    def answer(self, hidden: Tensor) -> Answer:
        answer = super().answer(hidden)
        return replace(answer, output=answer.output * torch.nan)


class NoRouterGradient(Listing):
    """Right output, but weights cut off from the centroids."""

    def answer(self, hidden: Tensor) -> Answer:
        routing = self.layer.route(hidden)
        routing = replace(routing, weights=routing.weights.detach())
        output = self.layer.run_experts(hidden, routing)
        return Answer(output, routing.expert_ids.unsqueeze(1))


class WorseExpert(Listing):
    """Takes the candidate after the K-th instead of the K-th."""

    def answer(self, hidden: Tensor) -> Answer:
        order = self.scores(hidden).argsort(dim=-1, descending=True)
        ids = torch.cat([order[..., : self.top_k - 1], order[..., [self.top_k]]], dim=-1)
        return Answer(super().answer(hidden).output, ids)


class FewerExperts(Listing):
    def answer(self, hidden: Tensor) -> Answer:
        answer = super().answer(hidden)
        return replace(answer, expert_ids=answer.expert_ids[..., :-1])


class SameExpertTwice(Listing):
    def answer(self, hidden: Tensor) -> Answer:
        ids = super().answer(hidden).expert_ids.clone()
        ids[..., -1] = ids[..., 0]
        return Answer(super().answer(hidden).output, ids)


class StaleShortlists(Listing):
    """Centroids moved, shortlists did not."""

    def __init__(self, source: TokenSource) -> None:
        super().__init__(source, "gelu")
        with torch.no_grad():
            self.layer.centroids.copy_(self.layer.centroids.roll(1, 0))


class LessJitterThanSaid(AirLayer):
    def __init__(self, source: TokenSource) -> None:
        super().__init__(source, "gelu")
        self.jitter_std *= 2


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (partial(TooLarge, form="gelu"), "output: error"),
        (partial(NotANumber, form="gelu"), "output: error nan"),
        (partial(NoRouterGradient, form="swiglu"), "gradient 0: error"),
        (partial(WorseExpert, form="gelu"), "below the last of the best 32"),
        (partial(FewerExperts, form="gelu"), "31 experts per token, expected 32"),
        (partial(SameExpertTwice, form="gelu"), "chosen twice"),
        (StaleShortlists, "shortlist: one is"),
        (LessJitterThanSaid, "jitter 1.0"),
    ],
)
def test_a_wrong_contender_gets_no_time(build: partial[Contender], complaint: str) -> None:
    wrong, right = measure(
        [
            Entry("wrong", build, SOURCE, rounds=1),
            Entry("right", partial(Listing, form="gelu"), SOURCE, rounds=1),
        ],
        threads=1,
        isolate=False,
    )
    assert wrong.status == "wrong"
    assert complaint in wrong.reason
    assert not wrong.samples
    assert not wrong.warmup
    assert "median" not in wrong.as_json()
    assert right.status == "timed"
    assert all(ratio.value is None for ratio in comparison_ratios(right, wrong, "x"))


def test_missing_peer_pytorch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pytorch, "find_spec", lambda _name: None)
    (result,) = measure([Entry("peer", PeerPackage, SOURCE, 1)], threads=1, isolate=False)
    assert result.status == "missing"
    assert "pip install" in result.reason


def test_memory_of_the_listing_holds_its_gathered_candidates() -> None:
    shape = replace(QUICK, num_tokens=512, dim=64, shortlist_size=512)
    gathered = 512 * 512 * 64 * 4
    source = TokenSource(shape, seed=0)
    (result,) = measure([Entry("listing", partial(Listing, form="gelu"), source, 1)], threads=1)
    assert result.status == "timed", result.reason
    assert gathered <= result.peak_bytes <= 4 * gathered


def test_batches_are_the_same_for_all_and_differ_by_number() -> None:
    first, second = SOURCE.batch(0), SOURCE.batch(1)
    assert torch.equal(first, TokenSource(QUICK, seed=3).batch(0))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.norm(dim=-1), torch.full((256,), 32**0.5))


def test_ratios_say_which_way_they_go() -> None:
    air = Result("AIR", samples=[Sample(1.0, 1.0, 2.0, 100), Sample(3.0, 2.0, 5.0, 50)])
    other = Result("other", samples=[Sample(10.0, 11.0, 21.0, 500)])
    faster, memory = comparison_ratios(air, other, "x")
    assert faster.value == pytest.approx(21 / 3.5)
    assert memory.value == pytest.approx(100 / 500)
    assert faster.met
    assert memory.met
    growth = growth_ratio(air, other, "growth")
    assert growth.value == pytest.approx(10 / 2)
    assert not growth.met
    assert "missed" in str(growth)


def test_a_swapped_router_is_measured_beside_its_stock_twin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    swapped_router.main((swapped_router.Case(32, 16, 4, 4, 8),), (8,))
    *_, row = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["16", "32", "4", "8", "8"]
    assert float(cells[7]) == pytest.approx(float(cells[6]) / float(cells[5]), rel=0.1)
