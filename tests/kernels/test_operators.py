"""Every operator keeps torch's rules, repeats itself, compiles and runs in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.best_experts import best_experts, top_m
from airmoe.kernels.cell_scores import ScoreInputs
from airmoe.kernels.cells import CellLayout, make_cells
from airmoe.kernels.codewords import assign
from airmoe.kernels.norms import inverse_norms
from airmoe.kernels.product_keys import best_pairs
from airmoe.kernels.top_k import top_k_gates
from tests.kernels.comparison import DEVICE, captured

pytest.importorskip("triton")
from airmoe.kernels import cells_triton  # noqa: F401 (declares an operator)
from airmoe.metrics.flop_counter import flop_counter

flop_counter()  # declares all others


@dataclass(frozen=True)
class Example:
    """Arguments of an operator. `differentiable` are those whose gradients are looked at."""

    arguments: Sequence[Any]
    differentiable: Sequence[int] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, operator: Callable[..., Any]) -> list[Tensor]:
        """What the operator returns, and the gradients of all of that; or what it wrote to."""
        floats = [self.arguments[place].requires_grad_() for place in self.differentiable]
        arguments = list(self.arguments)
        if not floats:
            arguments = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        found = operator(*arguments, **self.options)
        results = [found] if isinstance(found, Tensor) else list(found or ())
        if not results:
            return [argument for argument in arguments if isinstance(argument, Tensor)]
        if not floats:
            return [result.clone() for result in results]
        sums = [each.sin().sum() for each in results if each.requires_grad]
        return [*results, *torch.autograd.grad(sums, floats)]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def ids(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape, device=DEVICE)


def int32(most: int, *shape: int) -> Tensor:
    return ids(most, *shape).int()


def number(value: int) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def true(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool, device=DEVICE)


def some_cells() -> CellLayout:
    """12 tokens in 3 cells, pools of 6 of 20 experts."""
    pools = torch.stack([torch.randperm(20)[:6].sort().values for _ in range(3)]).to(DEVICE)
    with use_backend("triton"):
        layout = make_cells(ids(3, 12, 1), pools).layout(20)
    return layout


def scored() -> tuple[Any, ...]:
    tables = floats(12, 16), floats(20, 16), floats(20).abs()
    return ScoreInputs(*tables, int32(1000, 12), 0.1, some_cells()).operands()


def experts(*, gated: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    return floats(20, 16) if gated else None, floats(20, 16), floats(20, 16)


def of_experts(gated: bool, *weights: Any) -> Example:
    arguments = (*experts(gated=gated), *weights, "swiglu" if gated else "gelu", 1, True)
    return Example((floats(weights[0].shape[0], 16), *arguments), (0, *([1] * gated), 2, 3, 4))


def lists(*, gated: bool, tokens: int = 4) -> Example:
    return of_experts(gated, floats(tokens, 3), ids(20, tokens, 3))


def pools(*, gated: bool) -> Example:
    return of_experts(gated, floats(12, 6).abs(), some_cells().tensors(), None)


def gates(count: int | None) -> Example:
    capacity = None if count else torch.tensor(3, device=DEVICE)
    return Example((*scored(), true(12), count, capacity, True), (0, 1))


def unit_logits(normalize: bool) -> Example:
    return Example((floats(4, 16), floats(9, 16), ids(9, 4, 5), normalize), (0, 1))


def loss(dtype: torch.dtype, wanted: list[bool]) -> Example:
    arguments = (floats(6, 12), floats(29, 12), ids(29, 6), dtype, wanted)
    return Example(arguments, [place for place in range(2) if wanted[place]])


def tiles(num_rows: int) -> Example:
    offsets = torch.tensor([0, 0, num_rows // 2, num_rows], device=DEVICE)
    return Example((offsets, num_rows, 32))


def sums_by_expert() -> Example:
    index = some_cells().reverse_index(20)
    return Example((floats(3, 6), index.entries, index.starts))


def counts() -> Example:
    layout = some_cells()
    return Example((floats(12, 6).relu(), layout.tensors()))


def codeword_tokens(*arguments: Any) -> Example:
    return Example((floats(40, 16), true(40), *arguments), options={"spherical": True})


EXAMPLES: dict[str, Callable[[], Example]] = {
    "assign": lambda: Example((floats(5, 16), floats(6, 16)), options={"euclidean": True}),
    "assign, many": lambda: Example((floats(65, 16), floats(6, 16)), options={"euclidean": True}),
    "codeword_sums": lambda: codeword_tokens(ids(7, 40), 7),
    "drawn_tokens": lambda: Example(
        (floats(40, 16), true(40), ids(2**40, 7), number(50), number(3)),
        options={"strata": True, "spherical": True},
    ),
    "move_codewords": lambda: Example(
        (floats(6, 16), floats(6), floats(6, 16), floats(6, 33), ids(9), 0.95, 1.0, False)
    ),
    "add_rms_norm": lambda: Example((floats(6, 9), None, floats(9), 1e-5, torch.float16)),
    "add_rms_norm, of a sum": lambda: Example(
        (floats(6, 9), floats(6, 9), floats(9), 1e-5, torch.float32)
    ),
    "swiglu": lambda: Example((floats(3, 4, 18),), (0,)),
    "rotary_heads": lambda: Example((floats(2, 5, 24), floats(1, 5, 4), floats(1, 5, 4), 1), (0,)),
    "inverse_norms": lambda: Example((floats(20, 30),)),
    "counted_rows": lambda: Example((floats(20, 30), None), (0,)),
    "counted_rows, masked": lambda: Example((floats(20, 30), ids(2, 20) > 0), (0,)),
    "noise_rows": lambda: Example((int32(99, 4), ids(99, 5), 0.1)),
    "noise_pairs": lambda: Example((int32(99, 4, 1), ids(99, 5), 0.1)),
    "noise_pairs, transposed": lambda: Example((int32(99, 5, 4).T, ids(99, 5), 0.1)),
    "combine_keys": lambda: Example((ids(99), [ids(99, 4)], [3, -1], None, torch.int64)),
    "combine_keys, rows": lambda: Example((ids(99), [], [3], 5, torch.int32)),
    "layout_of_few": lambda: Example((ids(7, 50), 7)),
    "cell_offsets": lambda: Example((ids(7, 100).sort().values, 7)),
    "find_tiles": lambda: tiles(100),
    "find_tiles, none": lambda: tiles(0),
    "sum_by_expert": sums_by_expert,
    "counts_per_entry": counts,
    "top_m": lambda: Example((floats(3, 16), floats(30, 16), 5, None, int32(99, 3), 0.1)),
    "best_experts": lambda: Example((floats(3, 16), floats(30, 16), 4, None, 0.0, True)),
    "best_pairs": lambda: Example((floats(2, 1, 12), floats(2, 1, 12), 4)),
    "top_k_gates": lambda: Example((floats(3, 20), true(3), 4), (0,)),
    "top_k_gates, K = 1": lambda: Example((floats(3, 20), true(3), 1), (0,)),
    "gather_dot": lambda: Example((floats(4, 16), floats(9, 16), ids(9, 4, 5)), (0, 1)),
    "gather_total": lambda: Example((floats(4, 5), floats(9, 16), ids(9, 4, 5)), (0, 1)),
    "scatter_total": lambda: Example((floats(4, 5), floats(4, 16), ids(9, 4, 5), 9), (0, 1)),
    "chosen_logits": partial(unit_logits, False),
    "chosen_logits, unit": partial(unit_logits, True),
    "softmax_summary": lambda: Example(
        (floats(5, 16), floats(20, 16), floats(5).abs(), int32(99, 5), 0.1, True), (0, 1)
    ),
    "linear_cross_entropy": partial(loss, torch.float32, [True, True]),
    "linear_cross_entropy, half": partial(loss, torch.float16, [False, True]),
    "linear_cross_entropy, no gradient": partial(loss, torch.float32, [False, False]),
    "token_experts": partial(lists, gated=True),
    "token_experts, many": partial(lists, gated=True, tokens=65),
    "token_experts, plain": partial(lists, gated=False),
    "compact_gates": lambda: Example(
        (floats(6, 9).relu(), ids(20, 4, 9), ids(4, 6), torch.randperm(6).to(DEVICE), 5)
    ),
    "cell_scores": lambda: Example(scored(), (0, 1)),
    "cell_gates": partial(gates, 3),
    "cell_gates, K = 1": partial(gates, 1),
    "cell_gates, experts choose": partial(gates, None),
    "probs_per_entry": lambda: Example((*scored(), floats(12, 6), floats(12).abs() + 9, true(12))),
    "cell_experts": partial(pools, gated=True),
    "cell_experts, plain": partial(pools, gated=False),
}
every_example = pytest.mark.parametrize("name", EXAMPLES)


def operator_of(name: str) -> Any:
    return getattr(torch.ops.airmoe, name.partition(",")[0]).default


def test_every_operator_has_an_example() -> None:
    names = (name.removeprefix("airmoe::") for name in torch._C._dispatch_get_all_op_names())
    operators = {name for name in names if hasattr(torch.ops.airmoe, name)}
    forward = {name for name in operators if not name.endswith("_backward")}
    planning = {"plan", "draw_ticket"}  # of routers
    assert forward - planning == {name.partition(",")[0] for name in EXAMPLES}


@every_example
def test_it_keeps_the_rules_of_operators(name: str) -> None:
    example = EXAMPLES[name]()
    for place in example.differentiable:
        example.arguments[place].requires_grad_()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = tuple(example.arguments), example.options
    torch.library.opcheck(operator_of(name), *arguments, test_utils=tests)


BY_CELL = ("cell_scores", "cell_gates", "cell_experts", "probs_per_entry")


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.startswith(BY_CELL)])
def test_operands_in_any_layout(name: str) -> None:
    """Those of cells are made contiguous before."""
    example, operator = EXAMPLES[name](), operator_of(name)
    strided = [columns_first(operand) for operand in example.arguments]
    wanted = example.run(operator)
    for found, right in zip(replace(example, arguments=strided).run(operator), wanted, strict=True):
        torch.testing.assert_close(found, right)


def columns_first(operand: Any) -> Any:
    """The same numbers, with others between them in memory."""
    if not isinstance(operand, Tensor) or not operand.is_floating_point():
        return operand
    return torch.stack([operand.detach(), -operand.detach()], -1)[..., 0]


def test_nothing_to_do() -> None:
    none, table = floats(0, 16), floats(30, 16)
    with use_backend("triton"):
        assert best_experts(none, table, 4).shape == top_m(none, table, 4).shape == (0, 4)
        assert assign(none, table, euclidean=False).shape == inverse_norms(none).shape == (0,)
        assert top_k_gates(none, true(0), 3).shape == (0, 16)
        assert best_pairs(floats(0, 2, 9), floats(0, 2, 9), 4).shape == (0, 2, 4)


@every_example
def test_it_repeats_itself_and_compiles_without_a_break(name: str) -> None:
    example, operator = EXAMPLES[name](), operator_of(name)
    torch._dynamo.reset()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    wanted = example.run(operator)
    again, found = example.run(operator), example.run(compiled)
    for values in zip(again, found, wanted, strict=True):
        assert torch.equal(values[0], values[2]) and torch.equal(values[1], values[2])


@pytest.mark.gpu
@every_example
def test_it_runs_in_a_cuda_graph(name: str) -> None:
    eager, graph, replayed = captured(partial(EXAMPLES[name]().run, operator_of(name)))
    graph.replay()
    for found, wanted in zip(replayed, eager, strict=True):
        assert torch.equal(found, wanted)
