"""Activation checkpointing changes neither the codebook nor a single bit of any gradient."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import airmoe
from airmoe.moe import recomputation
from tests.state.common import (
    CASES,
    Block,
    assert_same,
    batch,
    build_layer,
    counting_observe,
    losses,
    routers_of,
    snapshot,
)

Run = Callable[[nn.Module, Tensor], Any]


aten: Any = torch.ops.aten
SAVED = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.topk.default]


# Results of products and of `topk` are kept and given, in their order, to the second run.
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, SAVED)
MODES: dict[str, Run] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non_reentrant": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
}

# The micro-batches up to an optimizer step, in order: `0` is the forward of batch 0, `-0` its
# backward. A prime marks another forward of the same batch.
WINDOWS = {
    "accumulation": "0 -0 1 -1 2 -2",
    "identical": "0 0' -0' -0",
    "reverse_order": "0 1 -1 -0",
    "interleaved": "0 1 -1 2 -0 -2",  # a backward between two forwards that still wait for theirs
    "twice": "0 -0 1 -1 -0",  # the same graph is recomputed twice
    "one_random_state": "0 1 -0 -1",  # as two views of a batch have, with the same dropout
}


def run_window(name: str, loss: Callable[[int], Tensor]) -> None:
    losses, steps = {}, WINDOWS[name].split()
    for place, step in enumerate(steps):
        if step.startswith("-"):
            losses[step[1:]].backward(retain_graph=step in steps[place + 1 :])
        else:
            if name == "one_random_state":
                torch.manual_seed(3)
            losses[step] = loss(int(step.rstrip("'")))


class WithLosses(Block):
    """A block of which the losses of the routing are a part."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer.forward_with_routing(x)
        return output.hidden + losses(output)


@contextmanager
def only_expected_warnings() -> Iterator[None]:
    """A lost plan is announced by a warning: here it is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*without a tracked optimizer")
        yield


def train(model: nn.Module, run: Run, window: str, tracked: bool) -> list[dict[str, Tensor]]:
    """Everything that can be compared, after each window and after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if tracked:
        airmoe.track_optimizer(model, optimizer)
    states = []
    torch.manual_seed(7)
    for step in range(2):
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def loss(index: int, first=10 * step, inputs=inputs, outputs=outputs) -> Tensor:
            inputs.append(batch(first + index).requires_grad_())
            output = run(model, inputs[-1])
            outputs.append(output.detach().clone())
            return (output * torch.linspace(-1, 2, output.numel()).view(output.shape)).sum()

        run_window(window, loss)
        found = {f"output{i}": output for i, output in enumerate(outputs)}
        for index, x in enumerate(inputs):
            assert x.grad is not None
            found[f"input{index}"] = x.grad
        states.append({**snapshot(model), **found})
        optimizer.step()
        optimizer.zero_grad()
        states.append(snapshot(model))
    return states


def build(case: str, with_losses: bool) -> Block:
    return (WithLosses if with_losses else Block)(build_layer(case))


@functools.cache
def uncheckpointed(
    case: str, window: str, tracked: bool, with_losses: bool
) -> list[dict[str, Tensor]]:
    with only_expected_warnings():
        return train(build(case, with_losses), nn.Module.__call__, window, tracked)


def assert_checkpointing_changes_nothing(
    case: str, mode: str, window: str, tracked: bool, with_losses: bool = False
) -> None:
    micro_batches = sum("-" not in step for step in WINDOWS[window].split())
    model = build(case, with_losses)
    (router,) = routers_of(model)
    with only_expected_warnings(), counting_observe(router) as seen:
        actual = train(model, MODES[mode], window, tracked)
    assert seen == [22] * (2 * micro_batches)
    assert int(router.micro_batches) == 2 * micro_batches
    assert_same(actual, uncheckpointed(case, window, tracked, with_losses))


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize(
    ("window", "mode"),
    # torch refuses a second backward through what it has kept selectively
    [(w, m) for w in WINDOWS for m in MODES if (w, m) != ("twice", "selective")],
)
def test_air_equals_the_run_without_checkpointing(window: str, mode: str, tracked: bool) -> None:
    assert_checkpointing_changes_nothing("air", mode, window, tracked)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [case for case in CASES if case != "air"])
def test_others_equal_the_run_without_checkpointing(case: str, mode: str) -> None:
    assert_checkpointing_changes_nothing(case, mode, "reverse_order", tracked=True)


@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_losses_of_the_routing_leave_a_checkpointed_block(
    case: str, tracked: bool, mode: str
) -> None:
    assert_checkpointing_changes_nothing(case, mode, "reverse_order", tracked, with_losses=True)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_without_the_random_state_one_forward_at_a_time_is_exact(use_reentrant: bool) -> None:
    options: Any = {"use_reentrant": use_reentrant, "preserve_rng_state": False}
    layer, same = build_layer("air"), build_layer("air")
    with only_expected_warnings():
        for index in range(2):
            checkpointed: Any = checkpoint(layer, batch(index).requires_grad_(), **options)
            for output in (checkpointed, same(batch(index))):
                output.square().sum().backward()
    assert_same(snapshot(layer), snapshot(same))


def test_a_forward_under_no_grad_is_a_micro_batch_of_its_own() -> None:
    layer = build_layer("air")
    with torch.no_grad():
        layer(batch(0))
    layer(batch(1)).sum().backward()
    assert int(layer.router.micro_batches) == 2
    assert int(layer.router.codebook.updates) == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_forwards_without_learning_find_their_plan(use_reentrant: bool) -> None:
    """Other forwards observe before the backward of these."""

    def run(call: Callable[..., Any]) -> dict[str, Tensor]:
        layer = build_layer("air")
        layer(batch(9))

        def forward(x: Tensor, learn: bool) -> Tensor:
            return layer.forward_with_routing(x, learn=learn).hidden

        torch.manual_seed(0)
        total = torch.zeros(())
        for index, learn in enumerate((True, False, True)):
            total = total + call(forward, batch(index).requires_grad_(), learn).pow(3).sum()
        total.backward()
        assert int(layer.router.micro_batches) == 3
        return snapshot(layer)

    checkpointed = functools.partial(checkpoint, use_reentrant=use_reentrant)
    assert_same(run(checkpointed), run(lambda function, *arguments: function(*arguments)))


@pytest.mark.parametrize("others", [1, recomputation.KEPT_PLANS])
def test_a_plan_for_another_number_of_tokens_is_never_used(others: int) -> None:
    """Neither one whose sampled rows are equal, nor the newest one in place of a lost plan."""
    layer = build_layer("air")
    x = batch(0, 9).requires_grad_()
    torch.manual_seed(3)
    output: Any = checkpoint(layer, x[:8].unsqueeze(0), use_reentrant=False)
    for _ in range(others):
        torch.manual_seed(3)
        layer(x.detach().unsqueeze(0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        output.pow(3).sum().backward()
    assert x.grad is not None and (x.grad[:8].abs().sum(-1) > 0).all()
    assert len(said) == (others > 1)
    assert all("preserve_rng_state" in str(warning.message) for warning in said)


def test_plans_that_own_much_memory_are_kept_for_fewer_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An untracked router builds lists for every forward, and each plan keeps its own."""
    layer = build_layer("air").train()
    lists = layer.router._lists()
    own_bytes = layer.router.codebook.codewords.nbytes + lists.experts.nbytes
    own_bytes += lists.inverse_norms.nbytes
    monkeypatch.setattr(recomputation, "PLAN_BYTES", 6 * own_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is untracked
        for seed in range(9):
            layer(batch(seed))
    assert len(layer._plans._kept) == 6
    monkeypatch.setattr(recomputation, "PLAN_BYTES", 0)
    layer(batch(9))
    assert len(layer._plans._kept) == recomputation.LEAST_PLANS
    optimizer = torch.optim.SGD(layer.parameters())
    airmoe.track_optimizer(layer, optimizer)
    layer(batch(10))
    assert layer._plans._kept[-1].plan.own_bytes == layer.router.codebook.codewords.nbytes
