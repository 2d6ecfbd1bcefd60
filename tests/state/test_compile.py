"""`torch.compile(fullgraph=True)` gives what eager gives, bit for bit, and observes as often.

On a CPU the Triton operators are interpreted and `aot_eager` runs the traced graph operator by
operator, so equality is exact; a GPU also runs what the compiler itself generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import airmoe
from airmoe.kernels.backend import use_backend
from airmoe.moe.recomputation import PlanLog
from tests.model.common import VOCABULARY
from tests.model.common import build as build_model
from tests.state.common import (
    EXTRA,
    Block,
    assert_same,
    batch,
    build_layer,
    counting_observe,
    losses,
    snapshot,
)

pytestmark = pytest.mark.slow  # it interprets Triton kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# As small as can be: interpreted kernels take their time for every expert.
FEW: dict[str, dict[str, Any]] = {
    "air": {"num_experts": 9, "shortlist_size": 6, "dead_below": 0.1},
    "peer": {"num_experts": 9},
    "topk": {"num_experts": 9},
    "hierarchical": {"num_experts": 9, "num_clusters": 3},
}
ROUTERS = ["air", "peer", "topk", "hierarchical"]


@pytest.fixture(autouse=True)
def _triton_and_no_old_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with use_backend("triton"):
        yield


def whole(function: Any) -> Any:
    """Compiled without a graph break, with a backend that runs the traced operators in turn."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def build(case: str, seed: int = 0, **options: Any) -> Any:
    return build_layer(case, seed, **{**FEW[case], **options}).to(DEVICE)


def small(index: int, length: int = 5) -> Tensor:
    return batch(index, 1, length).to(DEVICE)


def forward(layer: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Output and all losses of a layer."""
    output = layer.forward_with_routing(x, mask)
    return output.hidden, losses(output)


class Steps:
    """Training steps of a layer through `forward`, eager or compiled."""

    def __init__(self, layer: Any, forward: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.layer, self.forward = layer, forward
        self.optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
        airmoe.track_optimizer(layer, self.optimizer)

    def step(self, index: int) -> dict[str, Tensor]:
        """Output, gradients and the whole state of one step."""
        torch.manual_seed(index)
        x = small(index).requires_grad_()
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=DEVICE)
        mask[0, index] = False
        output, loss = self.forward(self.layer, x, mask)
        (output.pow(3).sum() + loss).backward()
        assert x.grad is not None
        found = snapshot(self.layer) | {"output": output.detach(), "x": x.grad, "loss": loss}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found | {"random": torch.get_rng_state()}


@pytest.mark.parametrize("case", ROUTERS)
def test_steps_equal_eager_ones(case: str) -> None:
    eager, layer = build(case), build(case)
    expected, found = Steps(eager, forward), Steps(layer, whole(forward))
    with counting_observe(layer.router) as seen:
        for index in range(2):
            assert_same(found.step(index), expected.step(index), f"{case}, step {index}")
    assert seen == [5, 5]
    assert graphs() == 1  # a step made the shortlists stale, but no new graph


@pytest.mark.parametrize("case", ["air", "peer"])
def test_evaluation_equals_eager(case: str) -> None:
    eager, layer = build(case).eval(), build(case).eval()
    compiled = whole(layer)
    with torch.no_grad():
        for index in range(2):
            assert torch.equal(compiled(small(index)), eager(small(index)))
            for weight in (*eager.router.parameters(), *layer.router.parameters()):
                weight.mul_(1.1).add_(0.1)  # the lists of evaluation must follow
    assert graphs() == 1


def test_calls_are_neither_merged_nor_dropped() -> None:
    """Without jitter a plan of PEER is empty; and two calls on one input are two micro-batches."""
    layer = build("peer", jitter_std=0.0)
    with counting_observe(layer.router) as seen:
        whole(lambda x: layer(x) + layer(x))(small(0)).sum().backward()
    assert seen == [5, 5]
    assert int(layer.router.micro_batches) == 2


def inside(block: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("case", "order"), [("air", "checkpoint inside"), ("topk", "checkpoint outside")]
)
def test_recomputed_forwards_find_their_plan(
    case: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forwards wait for one backward, and the codebook has moved in between."""
    eager, block = Block(build(case)).to(DEVICE), Block(build(case)).to(DEVICE)
    block.load_state_dict(eager.state_dict())
    recomputed: list[Any] = []
    find = PlanLog.find

    def counted(*arguments: Any) -> Any:
        recomputed.append(find(*arguments))
        return recomputed[-1]

    monkeypatch.setattr(PlanLog, "find", counted)
    if order == "checkpoint inside":
        call = whole(lambda x: inside(block, x))
    else:
        compiled = whole(block)
        call = lambda x: inside(compiled, x)  # noqa: E731
    results = []
    for module, called in ((eager, eager), (block, call)):
        torch.manual_seed(4)
        with counting_observe(module.layer.router) as seen:
            (called(small(0)).square().sum() + called(small(1)).pow(3).sum()).backward()
        assert seen == [5, 5]
        results.append(snapshot(module))
    assert len(recomputed) == 2 and recomputed[0] is not recomputed[1]
    if DEVICE == "cpu":  # on a GPU dropout inside a graph draws other numbers
        assert_same(results[1], results[0], f"{case}, {order}")


def test_the_number_of_tokens_may_change() -> None:
    eager, layer = build("air"), build("air")
    compiled = whole(layer)
    with torch.no_grad():
        for index, length in enumerate((5, 6)):
            torch.manual_seed(index)
            found = compiled(small(index, length))
            torch.manual_seed(index)
            assert torch.equal(found, eager(small(index, length))), length
    assert_same(snapshot(layer), snapshot(eager))


def test_a_watched_router_is_left_to_python() -> None:
    """Hooks run at every forward, also when they came after compilation."""
    layer = build("topk")
    compiled = torch.compile(layer, backend="aot_eager")
    counts: list[int] = []
    with torch.no_grad():
        compiled(small(0))
        hook = layer.router.register_forward_hook(
            lambda _module, _inputs, routing: counts.append(int(routing.expert_counts.sum()))
        )
        for index in range(2):
            compiled(small(index))
        hook.remove()
        compiled(small(0))
    assert counts == [20, 20]
    assert int(layer.router.micro_batches) == 4


@pytest.mark.parametrize("case", ["air", "topk"])
def test_plain_kernels_stay_a_break_in_the_graph(case: str) -> None:
    eager, layer = build(case), build(case)
    compiled = torch.compile(forward, backend="aot_eager")
    with use_backend("reference"):
        expected, found = Steps(eager, forward), Steps(layer, compiled)
        for index in range(2):
            assert_same(found.step(index), expected.step(index), f"{case}, step {index}")
        with pytest.raises(Unsupported):
            whole(layer)(small(0))


def test_decoder_layers_compile_whole() -> None:
    """Attention, routing, experts and router losses of a language model, in one graph.

    Its layers share the graph, but no state.
    """
    options = {"num_experts": 9, "num_hidden_layers": 2, "moe_layers": [0, 1]}
    options["router_options"] = {**EXTRA["air"], **FEW["air"]}
    del options["router_options"]["num_experts"]
    weights = {"load_balance_weight": 0.5, "shortlist_balance_weight": 0.5, "router_z_weight": 0.1}
    eager, model = (build_model("air", **options, **weights).to(DEVICE) for _ in range(2))
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    ids = torch.randint(VOCABULARY, (1, 6), device=DEVICE)
    results = []
    for module in (model, eager):
        torch.manual_seed(3)
        loss = module.train()(ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append(snapshot(module) | {"loss": loss.detach()})
    assert_same(*results)
    assert graphs() == 1


def test_a_router_alone_compiles_too() -> None:
    router, hidden = build("air").router, small(0)[0]
    router.observe(hidden)
    before = int(router.micro_batches)

    def listed(hidden: Tensor) -> tuple[Tensor, Tensor]:
        routing = router(hidden).to_token_routing()
        return routing.expert_ids, routing.weights

    with torch.no_grad():
        assert_same(whole(listed)(hidden), listed(hidden))
    assert int(router.micro_batches) == before  # a forward observes nothing


def test_a_router_with_plans_that_nobody_can_pack_is_left_to_python() -> None:
    class OwnPlans(airmoe.TopKRouter):
        def plan(self, tokens: Any) -> Any:
            return super().plan(tokens)

    plain = build("topk").router
    own = OwnPlans(plain.config).to(DEVICE)
    assert plain.compiles(small(0)[0])
    assert not own.compiles(small(0)[0])


def test_a_router_may_have_a_part_named_router() -> None:
    outer, hidden = build("air").router, small(0)[0]
    kinds = ";".join(["bool:T", *outer.plan_layout().values()])
    arguments = (hidden, None, None, outer._handle, kinds, False, False)
    wanted = torch.ops.airmoe.plan(*arguments)
    outer.router = airmoe.ROUTERS["topk"].Config(dim=8, num_experts=9, top_k=2).build()
    found = torch.ops.airmoe.plan(*arguments)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("case", ROUTERS)
def test_generated_code_agrees(case: str, mode: str) -> None:
    """Steps from equal weights; the sums of generated code are in another order."""
    eager, layer = build(case), build(case)
    compiled = torch.compile(forward, fullgraph=True, mode=mode)
    expected, found = Steps(eager, forward), Steps(layer, compiled)
    for index in range(4):  # later ones replay what the compiler has captured
        wanted, got = expected.step(index), found.step(index)
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
        layer.load_state_dict(eager.state_dict())
    assert int(layer.router.micro_batches) == 4
