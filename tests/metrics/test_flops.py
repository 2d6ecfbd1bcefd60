"""The FLOP ledger against the paper's main table, and against its own formulas."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest

from airmoe.errors import ConfigError
from airmoe.flops import COLUMNS, Ledger, Workload, count_flops
from airmoe.model import METHODS, AirMoeConfig, model_size, with_method
from airmoe.routers import ROUTERS, RouterConfig
from airmoe.training import preset

SEQUENCES_PER_DEVICE, DEVICES = 16, 4  # twice as many for the large model
EPOCH = 121_000_000  # WikiText-103's training text in tokens (PAPER-NOTES: "about 121 M")
C5, OPENWEBTEXT2 = 28_500 * 65_536, 23_000 * 65_536

# The main table, in P FLOP at the minimum of the perplexity. On WikiText-103 that is the end of an
# epoch: its number (of 10) stands beside the cell. Epochs lie 10 % apart and the paper evaluates at
# no other moment, so which one is meant is no matter of tolerance.
WIKITEXT = {
    ("small", "air"): (324.1, 9),
    ("small", "peer"): (352.8, 10),
    ("small", "hierarchical"): (350.4, 10),
    ("small", "exact"): (467.5, 10),
    ("small", "coarse"): (342.5, 10),
    ("medium", "air"): (755.9, 7),
    ("medium", "peer"): (751.0, 7),
    ("medium", "hierarchical"): (954.7, 9),
    ("medium", "coarse"): (836.7, 8),
}
WEB = {  # small only: C5, OpenWebText2
    "air": (625.5, 505.0),
    "peer": (626.3, 505.6),
    "hierarchical": (622.6, 502.6),
    "exact": (817.2, 648.3),
    "coarse": (611.7, 493.9),
}


def paper_config(size: str, method: str) -> AirMoeConfig:
    """As the paper describes a method: balancing and unit centroids it states for AIR only."""
    config = with_method(model_size(size), method)
    if method != "air":
        config.load_balance_weight = 0.0
        if method != "peer":
            config.router_options |= {"normalize_centroids": False}
    return config


def paper_ledger(size: str, method: str, block: int) -> Ledger:
    per_device = SEQUENCES_PER_DEVICE * block * (2 if size == "large" else 1)
    workload = Workload(
        sequence_length=block,
        tokens_per_step=DEVICES * per_device,
        tokens_per_micro_batch=per_device,
        devices=DEVICES,
    )
    return count_flops(paper_config(size, method), workload)


def per_token(method: str, block: int) -> float:
    """M FLOP of the small model."""
    return paper_ledger("small", method, block).cost("algorithmic").total / 1e6


@pytest.mark.parametrize(("size", "method"), WIKITEXT)
def test_wikitext_cells(size: str, method: str) -> None:
    cell, epochs = WIKITEXT[size, method]
    found = paper_ledger(size, method, 256).run(epochs * EPOCH) / 1e15
    # The paper's small coarse model is its own odd one out (PAPER-NOTES).
    tolerance = 0.01 if (size, method) == ("small", "coarse") else 0.006
    assert found == pytest.approx(cell, rel=tolerance)


@pytest.mark.parametrize("method", WEB)
def test_web_cells(method: str) -> None:
    # Exact's minimum on C5 came one evaluation later (docs/flops.md): by the paper's own ratios of
    # C5 to OpenWebText2, which are 1.239 = 28.5/23 for the others and 1.2605 = 29/23 for exact.
    c5 = 29_000 * 65_536 if method == "exact" else C5
    found = [
        paper_ledger("small", method, 1024).run(tokens) / 1e15 for tokens in (c5, OPENWEBTEXT2)
    ]
    assert found == pytest.approx(WEB[method], rel=0.006)


def shown(page: str, table: str) -> str:
    """A table of a page in docs/, between its marks."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"<!-- {table}: start -->\n")
    return rest.partition(f"\n<!-- {table}: end -->")[0]


# AIR's row of the main table.
WEB_CELLS = {
    "small-c5": "625.5 P",
    "small-openwebtext2": "505.0 P",
    "medium-c5": "4.1 E",
    "medium-openwebtext2": "3.6 E",
    "large-c5": "14.3 E",
    "large-openwebtext2": "11.2 E",
}


def test_lengths_of_the_web_presets() -> None:
    """FLOPs at the minimum by FLOPs of a step, as docs/decisions.md shows it."""
    lines = [
        "| preset | FLOPs at the minimum | FLOPs per token | tokens a step | steps |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, cell in WEB_CELLS.items():
        size = name.partition("-")[0]
        ledger, tokens = paper_ledger(size, "air", 1024), 131_072 if size == "large" else 65_536
        number, unit = cell.split()
        steps = float(number) * {"P": 1e15, "E": 1e18}[unit] / ledger.run(tokens)
        assert preset(name).training.steps == round(steps, -2), name
        per_token = f"{ledger.run(1) / 1e6:,.1f} M"
        lines.append(f"| `{name}` | {cell} | {per_token} | {tokens:,} | {steps:,.0f} |")
    assert shown("decisions.md", "lengths") == "\n".join(lines)


def test_differences_between_methods() -> None:
    """What all methods share cancels: these see the routers alone."""
    for block in (256, 1024):
        assert per_token("exact", block) - per_token("peer", block) == pytest.approx(94.6, abs=0.2)
    air, hierarchical = (
        {block: per_token(method, block) for block in (256, 1024)}
        for method in ("air", "hierarchical")
    )
    assert air[1024] - hierarchical[1024] == pytest.approx(1.6, abs=0.2)
    assert air[256] - hierarchical[256] == pytest.approx(7.9, abs=0.4)


def test_the_page_shows_these_cells() -> None:
    """docs/flops.md compares ledger and paper, and says the difference."""

    def cell(paper: float, ledger: Ledger, tokens: int) -> str:
        found = ledger.run(tokens) / 1e15
        return f"{found:.1f} / {paper:.1f} ({100 * (found / paper - 1):+.2f} %)"

    lines = ["| ledger / paper | WikiText-103 | C5 | OpenWebText2 |", "|---|---|---|---|"]
    for (size, method), (paper, epochs) in WIKITEXT.items():
        wikitext = cell(paper, paper_ledger(size, method, 256), epochs * EPOCH)
        web = ["", ""]
        if size == "small":
            ledger, cells = paper_ledger(size, method, 1024), WEB[method]
            web = [cell(cells[0], ledger, C5), cell(cells[1], ledger, OPENWEBTEXT2)]
        lines.append(f"| {size}, {method} | {epochs} epochs: {wikitext} | {web[0]} | {web[1]} |")
    assert shown("flops.md", "cells") == "\n".join(lines)


def test_terms_are_named_once() -> None:
    """With all losses, so that every term there is appears."""
    workload = Workload(sequence_length=64, tokens_per_step=2048, tokens_per_micro_batch=512)
    configs = [with_method(model_size("tiny"), method) for method in METHODS]
    for config in configs:
        config.router_z_weight = 1e-3
        if config.router in ("air", "hierarchical"):
            config.shortlist_balance_weight = 1e-3
    configs.append(model_size("tiny"))
    configs[-1].router_options |= {"gate": "expert_choice", "codebook": "euclidean"}
    for ledger in (count_flops(config, workload) for config in configs):
        names = [(term.part, term.name) for term in ledger.terms]
        assert len(set(names)) == len(names)


def test_lists_that_live_longer_cost_less() -> None:
    def products(refresh_every: int) -> list[float]:
        model = model_size("small")
        model.router_options = {**model.router_options, "refresh_every": refresh_every}
        workload = Workload(
            sequence_length=256, tokens_per_step=16_384, tokens_per_micro_batch=4096, devices=1
        )
        ledger = count_flops(model, workload)
        return [ledger.cost(column, "router refresh").total for column in COLUMNS]

    every_step, every_fourth, never = products(1), products(4), products(10**9)
    for one, four, norms in zip(every_step, every_fourth, never, strict=True):
        assert four - norms == pytest.approx((one - norms) / 4, rel=1e-6)
    # 2 G E D per step is nearly all of it; what is left are norms.
    assert every_step[0] - never[0] > 0.9 * 2 * 1024 * 65_536 * 256 / 16_384
    assert all(norms < 0.02 * one for norms, one in zip(never, every_step, strict=True))


def test_every_router_is_counted_and_others_are_refused() -> None:
    workload = Workload(sequence_length=64, tokens_per_step=512, tokens_per_micro_batch=512)
    for name in ROUTERS:
        config = AirMoeConfig(router=name, num_experts=4096, num_experts_per_tok=16)
        assert count_flops(config, workload).cost("executed", "router fine").total > 0, name

    @dataclasses.dataclass(frozen=True)
    class Unknown(RouterConfig):
        pass

    config = copy.copy(model_size("tiny"))
    config.router_config = lambda: Unknown(dim=8, num_experts=4, top_k=2)  # type: ignore
    with pytest.raises(ConfigError, match="must be a router the ledger can count"):
        count_flops(config, workload)


def test_a_workload_must_divide() -> None:
    with pytest.raises(ConfigError, match="tokens_per_micro_batch x devices = 300"):
        Workload(sequence_length=10, tokens_per_step=400, tokens_per_micro_batch=100, devices=3)
    with pytest.raises(ConfigError, match=r"workload.devices: got 0"):
        Workload(sequence_length=10, tokens_per_step=400, tokens_per_micro_batch=100, devices=0)
