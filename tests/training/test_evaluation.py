"""Validation numbers against plain loops over full logits and over every routed token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe.metrics import dead_experts, routing_quality, usage_entropy
from airmoe.routers import Router, track_optimizer
from airmoe.training.evaluation import Evaluation, RoutingWatch, evaluate, num_batches
from tests.model.common import VARIANTS, batch, build, learn_a_little
from tests.state.common import checkpoint_activations

Blocks = list[dict[str, Tensor]]
LENGTH = 12


def blocks(count: int) -> Blocks:
    return [{"input_ids": batch(100 + index, (1, LENGTH))[0]} for index in range(count)]


def routers_of(model: Any) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def plain_losses(model: Any, given: Blocks, batch_size: int) -> list[float]:
    """Mean loss of every batch from its full logits, in float64."""
    model.eval()
    means = []
    for start in range(0, len(given), batch_size):
        ids = torch.stack([block["input_ids"] for block in given[start : start + batch_size]])
        logits = model(ids).logits[:, :-1].double()
        means.append(float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())))
    return means


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_the_mean_over_all_predicted_tokens(variant: str) -> None:
    """9 blocks in batches of 4: the last one has a single block and counts a quarter."""
    model = learn_a_little(build(variant))
    given = blocks(9)
    result = evaluate(model, given, batch_size=4, quality_tokens=8)
    means = plain_losses(model, given, batch_size=4)
    exact = (4 * means[0] + 4 * means[1] + means[2]) / 9
    # Both start from the same float32 hidden states; a loss of about 4 nats is a sum of products
    # of 16 numbers and a logarithm, each exact to 2^-24: 1e-6 of it allows 16 roundings.
    tolerance = 1e-6 * exact
    assert abs(result.loss - exact) < tolerance
    assert abs(sum(means) / 3 - exact) > 10 * tolerance  # a mean over batches would be seen
    assert result.tokens == 9 * (LENGTH - 1)
    assert result.perplexity == pytest.approx(math.exp(exact), rel=1e-5)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dense"])
def test_usage_counts_every_token(variant: str) -> None:
    model = learn_a_little(build(variant))
    counts: dict[int, Tensor] = {}

    def count(place: int) -> Any:
        def hook(_: Any, __: Any, routing: Any) -> None:
            if routing.num_tokens == 8:
                return  # the sample, routed once more to be compared: not another use
            found = routing.to_token_routing()
            chosen = found.expert_ids[found.weights > 0]
            ones = torch.bincount(chosen, minlength=model.config.num_experts)
            counts[place] = counts.get(place, 0) + ones

        return hook

    handles = [
        router.register_forward_hook(count(place)) for place, router in enumerate(routers_of(model))
    ]
    result = evaluate(model, blocks(9), batch_size=4, quality_tokens=8)
    for handle in handles:
        handle.remove()
    expected = 9 * LENGTH * model.config.num_experts_per_tok
    if "expert" not in variant:
        assert all(int(found.sum()) == expected for found in counts.values())
    for name, measure in (
        ("entropy", usage_entropy),
        ("dead_experts", dead_experts),
        ("load_imbalance", lambda found: found.max() / found.double().mean()),
    ):
        wanted = sum(float(measure(found)) for found in counts.values()) / len(counts)
        assert result.routing[name] == pytest.approx(wanted, rel=1e-9), name


def test_routers_report_what_they_have() -> None:
    names = {
        variant: set(evaluate(build(variant), blocks(2), batch_size=2, quality_tokens=4).routing)
        for variant in ("air", "peer", "topk", "hierarchical", "dense")
    }
    usage = {"entropy", "dead_experts", "load_imbalance"}
    assert names["dense"] == set()
    assert names["peer"] == usage  # it has no exact routing to compare with
    assert names["topk"] == usage | {"overlap", "mass_recall"}
    assert names["hierarchical"] == names["topk"] | {"codeword_perplexity"}
    assert names["air"] == names["hierarchical"] | {"mass_recall_bound", "unlisted_experts"}
    exact = evaluate(build("topk"), blocks(2), batch_size=2, quality_tokens=4).routing
    assert exact["overlap"] == 1.0 and exact["mass_recall"] == pytest.approx(1.0)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_changes_nothing(training: bool) -> None:
    model = learn_a_little(build("air")).train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    evaluate(model, blocks(5), batch_size=2, quality_tokens=8)
    assert model.training is training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(router._forward_hooks for router in routers_of(model))


def test_a_failing_batch_leaves_the_model_as_it_was() -> None:
    model = build("air").train()
    broken: Any = [*blocks(2), {"input_ids": torch.tensor([10**6] * LENGTH)}]
    with pytest.raises(IndexError):
        evaluate(model, broken, batch_size=2, quality_tokens=8)
    assert model.training
    assert not any(router._forward_hooks for router in routers_of(model))


def test_batches_are_counted_and_announced() -> None:
    seen = []
    evaluate(
        build("dense"), blocks(9), batch_size=4, quality_tokens=1, on_batch=lambda: seen.append(1)
    )
    assert len(seen) == num_batches(blocks(9), 4) == 3
    assert num_batches(blocks(8), 4) == 2


def test_perplexity_of_a_hopeless_loss_is_a_number() -> None:
    assert math.isfinite(Evaluation(1e6, 1, {}).perplexity)


@contextmanager
def on(watch: RoutingWatch) -> Iterator[None]:
    watch.start()
    yield
    watch.stop()


# -- the watch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [1, 5, 7, 36, 1000])
def test_the_sample_is_spread_over_all_sequences(wanted: int) -> None:
    """36 tokens in 3 sequences: every stride-th of the first batch, and not its beginning only."""
    model = build("air")
    watch = RoutingWatch(model, wanted)
    inputs: list[Tensor] = []
    (router,) = routers_of(model)
    router.register_forward_hook(lambda _, given, __: inputs.append(given[0].detach().clone()))
    with on(watch), torch.no_grad():
        model(batch(0))
        model(batch(1))
    sample = watch._samples[0]
    stride = max(1, 36 // wanted)
    assert torch.equal(sample.hidden, inputs[0][::stride][:wanted])
    assert sample.valid.all() and len(sample.valid) == len(sample.hidden)
    if 1 < wanted < 36:
        assert stride * (len(sample.hidden) - 1) >= 24  # reaches the third sequence


@pytest.mark.parametrize("variant", ["expert_choice", "air-expert-choice"])
def test_where_experts_choose_the_sample_is_routed_among_the_whole_batch(variant: str) -> None:
    model = build(variant).eval()
    watch = RoutingWatch(model, 5)
    (router,) = routers_of(model)
    inputs: list[Tensor] = []
    router.register_forward_hook(lambda _, given, __: inputs.append(given[0].detach().clone()))
    with on(watch), torch.no_grad():
        model(batch(0))
    rows = slice(None, 35, 7)
    wanted = routing_quality(router, inputs[0], rows=rows)
    assert wanted.valid.shape == (5,)
    assert watch.numbers()["overlap"] == pytest.approx(float(wanted.overlap.mean()))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_activation_checkpointing_counts_once(reentrant: bool | None) -> None:
    model = build("air").train()
    track_optimizer(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    if reentrant is not None:
        checkpoint_activations(model, reentrant)
    watch = RoutingWatch(model, 8)
    with on(watch):
        for index in range(2):
            model(batch(index), labels=batch(index)).loss.backward()
        assert tokens_seen(watch) == 2 * 36
        assert watch.numbers().keys() >= {"entropy", "overlap", "staleness"}
    del optimizer  # alive until here, or its routers would be untracked


def tokens_seen(watch: RoutingWatch) -> float:
    """Of the one mixture of the model."""
    (meter,), (router,) = watch._meters, watch._routers
    meter.compute()
    return meter.totals["experts"].sum().item() / router.config.top_k


def test_a_watch_that_is_off_sees_nothing() -> None:
    model = build("air")
    watch = RoutingWatch(model, 8)
    with torch.no_grad():
        with on(watch):
            model(batch(0))
        model(batch(1))
    assert tokens_seen(watch) == 36
    with on(watch):
        assert tokens_seen(watch) == 0  # starts from nothing
