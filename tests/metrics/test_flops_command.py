"""`airmoe flops` as a user types it."""

from __future__ import annotations

import json

import pytest

from airmoe.flops import COLUMNS, Workload, count_flops
from airmoe.model import METHODS, model_size, with_method
from tests.training.command import airmoe, assert_one_line, table_rows


def test_one_method_as_a_table() -> None:
    outcome = airmoe("flops", "small", "--tokens", 1_000_000_000)
    assert (outcome.code, outcome.err) == (0, "")
    workload = Workload(
        sequence_length=256, tokens_per_step=16_384, tokens_per_micro_batch=4096, devices=4
    )
    ledger = count_flops(model_size("small"), workload)
    assert "small, air: M FLOP per token" in outcome.out
    rows = {cells[0]: cells[1:] for cells in table_rows(outcome.out)}
    for part in ledger.parts():
        costs = [ledger.cost(column, part) for column in COLUMNS]
        numbers = [n for cost in costs for n in (cost.forward, cost.backward, cost.total)]
        assert rows[part] == [f"{n / 1e6:,.3f}" for n in numbers], part
    # 297.0 and 304.1 M FLOP per token, a thousand million times.
    assert rows["run of 1,000,000,000 tokens"] == ["", "", "297.0 P", "", "", "304.1 P"]
    assert outcome.out.splitlines()[-1] == (
        "Blocks of 256 tokens; steps of 16,384 on 4 device(s), micro-batches of 4,096."
    )


def test_all_methods_side_by_side() -> None:
    """A preset in steps knows its length: 28,500 of 65,536 tokens."""
    outcome = airmoe("flops", "small-c5", "--all")
    assert (outcome.code, outcome.err) == (0, "")
    for column in COLUMNS:
        assert f"small-c5, {column}: M FLOP per token" in outcome.out
    headings = [line for line in outcome.out.splitlines() if line.startswith("┃")]
    for heading in headings:
        assert [cell.strip() for cell in heading.strip("┃").split("┃")] == ["part", *METHODS]
    runs = [cells for cells in table_rows(outcome.out) if cells[0].startswith("run of")]
    assert [cells[0] for cells in runs] == ["run of 1,867,776,000 tokens"] * 2
    assert runs[0][1] == "625.6 P"  # AIR; the paper: 625.5


def test_json_and_overrides() -> None:
    options = ("--method", "peer", "--devices", 1, "--json", "model.load_balance_weight=0")
    outcome = airmoe("flops", "medium", *options, "data.block_size=512")
    assert (outcome.code, outcome.err) == (0, "")
    answer = json.loads(outcome.out)
    workload = Workload(sequence_length=512, tokens_per_step=32_768, tokens_per_micro_batch=8192)
    config = with_method(model_size("medium"), "peer")
    config.load_balance_weight = 0.0
    assert answer["preset"] == "medium"
    assert answer["workload"]["tokens_per_step"] == 32_768
    assert answer["methods"] == {"peer": count_flops(config, workload).to_json()}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["huge"], "preset: got 'huge'"),
        (["small", "--method", "best"], "method: got 'best'"),
        (["small", "--method", "air", "--all"], "cannot be given with --all"),
        (["small", "--devices", "3"], "training.batch_size: got 64"),
        (["small", "model.width=3"], "model.width"),
        (["small", "data.tokenizer=here/tokens"], "model.vocab_size: got None"),
    ],
)
def test_mistakes_take_one_line(arguments: list[str], part: str) -> None:
    assert_one_line(airmoe("flops", *arguments), 2, part)


def test_methods_side_by_side_keep_their_budgets() -> None:
    """Settings are those of the run with AIR, from which the others are made, as in a suite."""
    arguments = ("flops", "small", "model.num_experts=16384", "--all", "--json")
    outcome = airmoe(*arguments, "model.router_options.shortlist_size=1024")
    assert (outcome.code, outcome.err) == (0, "")
    methods = json.loads(outcome.out)["methods"]
    experts = {
        name: count["parts"]["experts"]["algorithmic"]["total"]
        for name, count in methods.items()
        if name != "dense"
    }
    assert len(set(experts.values())) == 1, experts


def test_devices_are_as_many_as_share_a_step_evenly() -> None:
    sizes = ("training.batch_size=6", "training.micro_batch_size=1")
    outcome = airmoe("flops", "small", *sizes, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["workload"]["devices"] == 3
    tiny = json.loads(airmoe("flops", "tiny", "--json").out)["methods"]["air"]
    assert tiny["parts"]["head"]["executed"]["forward"] == 2 * 2048 * 128  # a trained tokenizer
