"""Nothing in forward, backward or observe waits for the device, so steps can be captured."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import airmoe
from airmoe.kernels.backend import use_backend
from airmoe.training import capture
from airmoe.training.capture import CapturedMicroBatches
from tests.state.common import CASES, assert_same, batch, build_layer, losses, snapshot

# -- without a GPU: tensors on the meta device have no values to read --------------------------

READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"}


class NoHostTraffic(TorchDispatchMode):
    """Refuses operators that would read the device or copy to it: tensors of two devices."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        assert len(devices) < 2, f"{func} copies between {devices}"
        if "meta" in devices:
            assert func.overloadpacket.__name__ not in READS, f"{func} reads the device"
        return result


@pytest.fixture
def _autocast_knows_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast has no such device; off is all that is asked of it here."""
    real, enabled = torch.autocast, torch.is_autocast_enabled

    def autocast(device: str, **options: Any) -> Any:
        return contextlib.nullcontext() if device == "meta" else real(device, **options)

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda d: d != "meta" and enabled(d))


@pytest.mark.skipif(torch.cuda.is_available(), reason="looked at on a real device below")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("_autocast_knows_meta")
def test_nothing_is_read_or_copied(case: str) -> None:
    layer = build_layer(case)
    optimizer = torch.optim.SGD(layer.parameters())
    airmoe.track_optimizer(layer, optimizer)
    for index in range(2):  # the first steps may read that the codebook has started
        layer(batch(index))
    layer.to("meta")
    layer.router.on_parameters_changed()  # so that the shortlists are rebuilt
    x = torch.empty(2, 11, layer.experts.dim, device="meta", requires_grad=True)
    mask = torch.ones(2, 11, dtype=torch.bool, device="meta")
    with use_backend("triton"), NoHostTraffic():
        losses(layer.forward_with_routing(x, mask)).backward()
        with torch.no_grad():
            layer.eval()(x, mask)
    assert all(weight.grad is not None for weight in layer.parameters())


def test_host_traffic_is_found() -> None:
    with pytest.raises(AssertionError, match="copies"), NoHostTraffic():
        torch.zeros(3, device="meta").add_(torch.zeros(3).to("meta"))
    with pytest.raises(RuntimeError, match="meta"), NoHostTraffic():
        bool(torch.zeros((), device="meta"))


@pytest.mark.parametrize("kind", ["spherical", "euclidean", "static"])
def test_the_device_knows_whether_a_codebook_has_started(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a graph that was captured before the first batch: the host never looks."""
    codebook = airmoe.Codebook(3, DIM, kind, dead_below=0.1)
    blind = copy.deepcopy(codebook)
    monkeypatch.setattr(blind, "_has_started", lambda: False)
    for index in range(4):
        hidden = torch.randn(30, DIM)
        mask = torch.rand(30) < (0.0 if index in (0, 2) else 0.7)
        codebook.update(hidden, mask)
        blind.update(hidden, mask)
        assert_same(snapshot(blind), snapshot(codebook), f"{kind}, batch {index}")
    assert bool(blind.initialized)


@pytest.mark.parametrize(
    ("refresh_every", "graphs"), [(1, ["lists", "nothing"]), (3, ["lists", "nothing", "norms"])]
)
def test_there_is_one_graph_for_each_answer_to_what_is_due(
    refresh_every: int, graphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each step, nor anew after an evaluation. Here nothing is due in the second
    micro-batch of a step, the one whose gradients add up."""
    layer = build_layer("air", refresh_every=refresh_every)
    optimizer = torch.optim.AdamW(layer.parameters())
    airmoe.track_optimizer(layer, optimizer)

    def forward_backward(inputs: dict[str, Tensor]) -> Tensor:
        loss = layer(inputs["hidden"]).sum()
        loss.backward()
        return loss.detach()

    captures, due_at = [], []

    def capture_by_running(self: Any) -> Any:
        captures.append(self._due()[0])
        return SimpleNamespace(
            loss=forward_backward(self._inputs),
            due=self._due(),
            grads={one: one.grad for one in layer.parameters()},
            graph=SimpleNamespace(replay=lambda: None),
        )

    monkeypatch.setattr(CapturedMicroBatches, "_capture", capture_by_running)
    monkeypatch.setattr(capture, "PLAIN_MICRO_BATCHES", 0)
    micro_batches = CapturedMicroBatches(layer, forward_backward)
    for index in range(14):
        due_at.append(layer.router.lists_due)
        micro_batches.run({"hidden": batch(index)})
        assert layer.router.lists_due == "nothing"
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                layer.eval()(batch(99))
            layer.train()
    assert captures == graphs
    built = [index // 2 for index, due in enumerate(due_at) if due == "lists"]
    assert built == list(range(0, 7, refresh_every))


def test_gradients_of_replayed_micro_batches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the buffers of the first graph, even where the step began with a plain micro-batch.

    A parameter that this one did not use starts from 0.
    """
    layer = torch.nn.Linear(3, 1)
    weight, bias, plain = layer.weight, layer.bias, torch.zeros(1, 3)

    def forward_backward(inputs: dict[str, Tensor]) -> Tensor:
        loss = torch.nn.functional.linear(inputs["hidden"], weight).sum()
        loss.backward()
        return loss.detach()

    class Replay:
        """Writes or adds to the gradients' buffers, as a graph captured in this state would."""

        def __init__(self, given: dict[str, Tensor]) -> None:
            self.given, self.adds = given, weight.grad is not None
            self.grads = {
                one: torch.empty_like(one) if one.grad is None else one.grad
                for one in (weight, bias)
            }

        def replay(self) -> None:
            for grad, new in zip(
                self.grads.values(),
                (self.given["hidden"].sum(0, keepdim=True), torch.ones(1)),
                strict=True,
            ):
                grad.copy_(grad + new if self.adds else new)

    def capture_by_replay(self: Any) -> Any:
        graph = Replay(self._inputs)
        found = {"loss": torch.zeros(()), "due": self._due(), "grads": graph.grads}
        return SimpleNamespace(graph=graph, **found)

    monkeypatch.setattr(CapturedMicroBatches, "_capture", capture_by_replay)
    monkeypatch.setattr(capture, "PLAIN_MICRO_BATCHES", 1)  # so the second finds a gradient
    micro_batches, buffers = CapturedMicroBatches(layer, forward_backward), set()
    for index in range(9):
        hidden = torch.randn(5, 3)
        if index == 6:  # watched, as a step that is logged
            forward_backward({"hidden": hidden})
        else:
            micro_batches.run({"hidden": hidden})
        plain += hidden.sum(0, keepdim=True)
        if index % 3 == 2:
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, plain)
            assert bias.grad is None if index == 2 else bias.grad == (3 if index == 5 else 2)
            buffers.add(weight.grad.data_ptr())
            plain = torch.zeros(1, 3)
            layer.zero_grad()
    assert len(buffers) == 2  # of the plain step, and of all others


# -- on a GPU ----------------------------------------------------------------------------------

DIM, EXPERTS, TOP_K, SHAPE = 64, 1024, 32, (2, 200)
STEPS = 3
Step = Callable[[], None]


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    name, more = CASES[name]
    router_class: Any = airmoe.ROUTERS[name]
    config = router_class.Config.for_budget(dim=DIM, num_experts=EXPERTS, top_k=TOP_K)
    config = type(config)(**{**vars(config), **more, **options})
    return airmoe.MoELayer(config.build(), airmoe.GranularExperts(EXPERTS, DIM)).cuda()


def inputs(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(*SHAPE, DIM, generator=generator).cuda()


def training(layer: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    """A whole step on whatever `x` holds."""
    airmoe.track_optimizer(layer, optimizer)
    mask = torch.ones(SHAPE, dtype=torch.bool, device="cuda")
    mask[0, :7] = False

    def step() -> None:
        losses(layer.forward_with_routing(x, mask)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def adamw(layer: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True, capturable=True)


def run(step: Step, x: Tensor, first: int, count: int) -> None:
    for index in range(first, first + count):
        x.copy_(inputs(index))
        step()


def captured(step: Step) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def aside(action: Callable[[], None]) -> None:
    """On another stream, as torch wants the steps before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        action()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["air", "peer", "hierarchical", "topk"])
def test_a_step_does_not_wait_for_the_gpu(name: str) -> None:
    layer, x = build(name), torch.empty(*SHAPE, DIM, device="cuda")
    step = training(layer, adamw(layer), x)
    run(step, x, 0, 3)
    layer.eval()(x)
    layer.train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with torch.no_grad():
            layer.eval()(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["air", "peer", "hierarchical", "topk"])
def test_replayed_steps_equal_eager_ones(name: str) -> None:
    """Weights, codebook, counters and shortlists, which are rebuilt inside of the graph."""
    layer = build(name)
    same, x = copy.deepcopy(layer), torch.empty(*SHAPE, DIM, device="cuda")
    step, eager = training(layer, adamw(layer), x), training(same, adamw(same), x)
    aside(lambda: run(step, x, 0, 3))
    graph = captured(step)
    run(graph.replay, x, 3, STEPS)
    run(eager, x, 0, 3 + STEPS)
    assert int(layer.router.micro_batches) == 3 + STEPS
    layer.zero_grad(set_to_none=True)
    assert_same(snapshot(layer), snapshot(same), name)
    with torch.no_grad():  # the lists of evaluation have followed as well
        assert torch.equal(layer.eval()(x), same.eval()(x))
    for module in (layer, same):
        module.train()
    run(step, x, 10, 1)  # and what comes after the graph goes on from there
    run(eager, x, 10, 1)
    assert_same(snapshot(layer), snapshot(same), f"{name}, one step later")


@pytest.mark.gpu
def test_a_graph_of_the_first_step_starts_the_codebook() -> None:
    layer = build("air")
    same, warm, x = copy.deepcopy(layer), copy.deepcopy(layer), inputs(0)
    steps = [training(m, torch.optim.SGD(m.parameters(), lr=1e-2), x) for m in (layer, same, warm)]
    aside(lambda: run(steps[2], x, 0, 3))  # compiles the kernels
    graph = captured(steps[0])
    run(graph.replay, x, 0, STEPS)
    run(steps[1], x, 0, STEPS)
    layer.zero_grad(set_to_none=True)
    assert bool(layer.router.codebook.initialized)
    assert_same(snapshot(layer), snapshot(same))
