"""Two processes learn as one: bit-identical codebooks, the gradients of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.launch import run_all
from tests.distributed.scenarios import CODEWORDS, SCENARIOS, STEPS, tokens
from tests.state.common import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")

LEARNING = ["learn_spherical", "learn_euclidean", "learn_static", "learn_with_empty_ranks"]
State = dict[str, Tensor]
Results = dict[str, list[Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_all(SCENARIOS, tmp_path_factory.mktemp("ranks"))


def alone(name: str) -> Any:
    """The same scenario in this process, on the concatenated batch."""
    return SCENARIOS[name](None, lambda: None)  # type: ignore[arg-type]


def assert_near(actual: State, expected: State, what: str) -> None:
    """Sums over ranks are taken in another order: float32 rounding, integers exactly."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(
                actual[name], tensor, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{what} {n}: {m}"
            )
        else:
            assert torch.equal(actual[name], tensor), f"{what} {name}"


@pytest.mark.parametrize("name", LEARNING)
def test_codebooks_are_bit_identical_on_all_ranks(ranks: Results, name: str) -> None:
    first, second = ranks[name]
    assert len(first) > 5
    assert_same(first, second)


@pytest.mark.parametrize("name", ["learn_spherical", "learn_euclidean"])
def test_codewords_did_die_and_were_replaced_from_the_global_batch(
    ranks: Results, name: str
) -> None:
    """Otherwise the test above would prove nothing about replacement."""
    states = ranks[name][0]
    assert len(states) == STEPS
    replaced_by_rank = [0, 0]
    for step, state in enumerate(states):
        hidden = tokens(step, 41)
        if name == "learn_spherical":
            hidden = torch.nn.functional.normalize(hidden, dim=-1)
        for code in (state["counts"] == 1.0).nonzero().flatten().tolist():
            distance = (hidden - state["codewords"][code]).norm(dim=-1)
            assert distance.min() < 1e-5, f"step {step}: replaced by no token of the batch"
            replaced_by_rank[int(distance.argmin() >= 24)] += 1
    assert sum(replaced_by_rank) > 2 * CODEWORDS
    assert min(replaced_by_rank) > 5, f"replacements come from one rank only: {replaced_by_rank}"


@pytest.mark.parametrize("name", LEARNING)
def test_two_ranks_equal_one_process_on_the_whole_batch(ranks: Results, name: str) -> None:
    expected = alone(name)
    for step, (state, wanted) in enumerate(zip(ranks[name][0], expected, strict=True)):
        state, wanted = dict(state), dict(wanted)
        state.pop("micro", None)  # a batch empty on all ranks is counted by ranks, not by one
        wanted.pop("micro", None)
        assert_near(state, wanted, f"step {step}")


def test_a_batch_empty_on_all_ranks_changes_no_codebook(ranks: Results) -> None:
    for states in ranks["learn_with_empty_ranks"]:
        for key in ("codewords", "counts", "sums", "updates"):
            assert torch.equal(states[4][key], states[3][key]), key
            assert not torch.equal(states[5][key], states[4][key]), key


def test_ddp_gradients_are_those_of_the_global_batch(ranks: Results) -> None:
    (first, second), expected = ranks["train_ddp"], alone("train_ddp")
    assert_same(first, second)
    for step, (state, wanted) in enumerate(zip(first, expected, strict=True)):
        assert any(key.endswith("centroids.grad") for key in wanted)
        assert_near(state, wanted, f"step {step}")


def test_fsdp2_trains_with_lists_of_the_full_centroids(ranks: Results) -> None:
    (first, second), expected = ranks["train_fsdp"], alone("train_fsdp")
    assert_same(first, second)
    for step, (state, wanted) in enumerate(zip(first, expected, strict=True)):
        assert torch.equal(state["lists"], state["expected"]), f"step {step}"
        assert torch.equal(state["evaluation"], state["expected_evaluation"]), f"step {step}"
        assert torch.equal(state["outside"], state["expected_evaluation"]), f"step {step}"
        assert_near(state, wanted, f"step {step}")
    assert not torch.equal(expected[0]["lists"], expected[2]["lists"]), "the lists never moved"


@pytest.mark.parametrize("name", ["noise_same_seed", "noise_other_seed"])
def test_token_noise_differs_between_ranks_and_shortlist_noise_does_not(
    ranks: Results, name: str
) -> None:
    first, second = ranks[name]
    assert torch.equal(first["lists"], second["lists"])
    assert not torch.equal(first["lists"], first["calm"]), "no jitter in the lists"
    assert not torch.equal(first["experts"], second["experts"]), "ranks share their token noise"
    assert torch.equal(first["seed"], second["seed"]) == (name == "noise_same_seed")


def test_a_frozen_codebook_keeps_shortlist_noise_equal(ranks: Results) -> None:
    first, second = ranks["frozen_noise"]
    assert torch.equal(first["lists"], second["lists"])
