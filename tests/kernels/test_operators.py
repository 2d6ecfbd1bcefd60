"""Every operator keeps torch's rules, repeats itself, compiles and runs in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe.kernels import (
    best_experts,
    cell_experts,
    cell_gates,
    cell_scores,
    cells,
    codewords,
    noise,
    norms,
    product_keys,
    rows,
    softmax_summary,
    token_experts,
    top_k,
)
from airmoe.kernels import linear_cross_entropy as cross_entropy
from airmoe.kernels.backend import use_backend
from airmoe.kernels.cell_scores import ScoreInputs
from airmoe.kernels.cells import make_cells
from tests.kernels.comparison import DEVICE, captured

pytest.importorskip("triton")
from airmoe.kernels import cells_triton


@dataclass(frozen=True)
class Example:
    """A call of an operator. `differentiable` are the arguments whose gradients are looked at."""

    operator: Any
    arguments: Sequence[Any]
    differentiable: Sequence[int] = ()

    def run(self, operator: Callable[..., Any] | None = None) -> list[Tensor]:
        """What it returns (or writes into the last argument), and gradients of all of that."""
        floats = [self.arguments[place].requires_grad_() for place in self.differentiable]
        found = (operator or self.operator)(*self.arguments)
        found = self.arguments[-1:] if found is None else found
        results = [found] if isinstance(found, Tensor) else list(found)
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


def true(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool, device=DEVICE)


def some_cells(size: int = 1) -> cells.CellLayout:
    """12 tokens in 3 cells, pools of 6 of 20 experts of so many neurons."""
    pools = torch.stack([torch.randperm(20)[:6].sort().values for _ in range(3)]).to(DEVICE)
    with use_backend("triton"):
        layout = make_cells(ids(3, 12, 1), pools * size).layout(20 * size)
    return layout


def scored() -> tuple[Any, ...]:
    tables = floats(12, 16), floats(20, 16), floats(20).abs()
    return ScoreInputs(*tables, int32(1000, 12), 0.1, some_cells()).operands()


def experts(*, gated: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    return floats(20, 16) if gated else None, floats(20, 16), floats(20, 16)


def lists(*, gated: bool, tokens: int = 4) -> Example:
    arguments = (floats(tokens, 16), *experts(gated=gated), floats(tokens, 3), ids(20, tokens, 3))
    form = ("swiglu" if gated else "gelu", 1, True)
    return Example(
        token_experts.token_experts_op, (*arguments, *form), (0, *([1] if gated else []), 2, 3, 4)
    )


def pools(*, gated: bool) -> Example:
    arguments = (floats(12, 16), *experts(gated=gated), floats(12, 6).abs())
    form = (some_cells().tensors(), None, "swiglu" if gated else "gelu", 1, True)
    return Example(
        cell_experts.cell_experts_op, (*arguments, *form), (0, *([1] if gated else []), 2, 3, 4)
    )


def gates(count: int | None) -> Example:
    capacity = None if count else torch.tensor(3, device=DEVICE)
    return Example(cell_gates.cell_gates_op, (*scored(), true(12), count, capacity, True), (0, 1))


def unit_logits(normalize: bool) -> Example:
    return Example(
        rows.chosen_logits_op, (floats(4, 16), floats(9, 16), ids(9, 4, 5), normalize), (0, 1)
    )


def loss(dtype: torch.dtype, wanted: list[bool]) -> Example:
    arguments = (floats(6, 12), floats(29, 12), ids(29, 6), dtype, wanted)
    places = [place for place in range(2) if wanted[place]]
    return Example(cross_entropy.linear_cross_entropy_op, arguments, places)


def tiles(num_rows: int) -> Example:
    offsets = torch.tensor([0, 0, num_rows // 2, num_rows], device=DEVICE)
    return Example(cells_triton.find_tiles_op, (offsets, num_rows, 32))


def sums_by_expert() -> Example:
    layout = some_cells()
    assert layout.reverse is not None
    index = layout.reverse
    return Example(cells.sum_by_expert_op, (floats(3, 6), index.entries, index.starts))


def counts() -> Example:
    layout = some_cells()
    chosen = floats(12, 6).relu()
    return Example(cells.counts_per_entry, (chosen, layout.offsets, layout.pools))


EXAMPLES: dict[str, Callable[[], Example]] = {
    "nearest_codeword": lambda: Example(
        codewords.nearest_codeword, (floats(5, 16), floats(6, 16), True)
    ),
    "nearest_codeword, many": lambda: Example(
        codewords.nearest_codeword, (floats(65, 16), floats(6, 16), True)
    ),
    "codeword_sums": lambda: Example(
        codewords.codeword_sums_op, (floats(40, 16), true(40), ids(7, 40), 7, True)
    ),
    "rows_of_numbers": lambda: Example(
        codewords.rows_of_numbers_op, (floats(40, 16), true(40), ids(40, 7), ids(3), True)
    ),
    "move_codewords": lambda: Example(
        codewords.move_codewords_op,
        (floats(6, 16), floats(6), floats(6, 16), floats(6, 33), ids(9), 0.95, 1.0, False),
    ),
    "inverse_norms": lambda: Example(norms.inverse_norms_op, (floats(20, 30),)),
    "finite_rows": lambda: Example(norms.finite_rows_op, (floats(20, 30),)),
    "noise_rows": lambda: Example(noise.noise_rows, (int32(99, 4), ids(99, 5), 0.1)),
    "noise_pairs": lambda: Example(noise.noise_pairs, (int32(99, 4, 1), ids(99, 5), 0.1)),
    "noise_pairs, transposed": lambda: Example(
        noise.noise_pairs, (int32(99, 5, 4).T, ids(99, 5), 0.1)
    ),
    "combine_keys": lambda: Example(noise.combine_keys, (ids(99), [ids(99, 4)], [3, -1])),
    "cell_offsets": lambda: Example(cells.cell_offsets_op, (ids(7, 100).sort().values, 7)),
    "find_tiles": lambda: tiles(100),
    "find_tiles, none": lambda: tiles(0),
    "sum_by_expert": sums_by_expert,
    "counts_per_entry": counts,
    "top_m": lambda: Example(
        best_experts.top_m_op,
        (floats(3, 16), floats(30, 16), 5, None, int32(99, 3), 0.1),
    ),
    "best_experts": lambda: Example(
        best_experts.best_experts_op, (floats(3, 16), floats(30, 16), 4, None, 0.0, True)
    ),
    "best_pairs": lambda: Example(
        product_keys.best_pairs_op, (floats(2, 1, 12), floats(2, 1, 12), 4)
    ),
    "top_k_gates": lambda: Example(top_k.top_k_gates_op, (floats(3, 20), true(3), 4), (0,)),
    "top_k_gates, K = 1": lambda: Example(top_k.top_k_gates_op, (floats(3, 20), true(3), 1), (0,)),
    "gather_dot": lambda: Example(
        rows.gather_dot_op, (floats(4, 16), floats(9, 16), ids(9, 4, 5)), (0, 1)
    ),
    "gather_total": lambda: Example(
        rows.gather_total_op, (floats(4, 5), floats(9, 16), ids(9, 4, 5)), (0, 1)
    ),
    "scatter_total": lambda: Example(
        rows.scatter_total_op, (floats(4, 5), floats(4, 16), ids(9, 4, 5), 9), (0, 1)
    ),
    "chosen_logits": partial(unit_logits, False),
    "chosen_logits, unit": partial(unit_logits, True),
    "softmax_summary": lambda: Example(
        softmax_summary.softmax_summary_op,
        (floats(5, 16), floats(20, 16), floats(5).abs(), int32(99, 5), 0.1, True),
        (0, 1),
    ),
    "linear_cross_entropy": partial(loss, torch.float32, [True, True]),
    "linear_cross_entropy, half": partial(loss, torch.float16, [False, True]),
    "linear_cross_entropy, no gradient": partial(loss, torch.float32, [False, False]),
    "token_experts": partial(lists, gated=True),
    "token_experts, many": partial(lists, gated=True, tokens=65),
    "token_experts, plain": partial(lists, gated=False),
    "compact_gates": lambda: Example(
        token_experts.compact_gates,
        (floats(6, 9).relu(), ids(20, 4, 9), ids(4, 6), torch.randperm(6).to(DEVICE), 5),
    ),
    "cell_scores": lambda: Example(cell_scores.cell_scores_op, scored(), (0, 1)),
    "cell_gates": partial(gates, 3),
    "cell_gates, K = 1": partial(gates, 1),
    "cell_gates, experts choose": partial(gates, None),
    "probs_per_entry": lambda: Example(
        cell_gates.probs_per_entry_op, (*scored(), floats(12, 6), floats(12).abs() + 9, true(12))
    ),
    "cell_experts": partial(pools, gated=True),
    "cell_experts, plain": partial(pools, gated=False),
}
every_example = pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES.keys())


def test_every_operator_has_an_example() -> None:
    names = (name.removeprefix("airmoe::") for name in torch._C._dispatch_get_all_op_names())
    operators = {name for name in names if hasattr(torch.ops.airmoe, name)}
    forward = {name for name in operators if not name.endswith("_backward")}
    planning = {"plan", "draw_ticket"}  # of routers
    assert forward - planning == {name.partition(",")[0] for name in EXAMPLES}


@every_example
def test_it_keeps_the_rules_of_operators(make: Callable[[], Example]) -> None:
    example = make()
    for place in example.differentiable:
        example.arguments[place].requires_grad_()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(example.operator, tuple(example.arguments), test_utils=tests)


@every_example
def test_it_repeats_itself_and_compiles_without_a_break(make: Callable[[], Example]) -> None:
    example = make()
    torch._dynamo.reset()
    compiled = torch.compile(example.operator, fullgraph=True, backend="aot_eager")
    wanted = example.run()
    for again, found, right in zip(example.run(), example.run(compiled), wanted, strict=True):
        assert torch.equal(again, right) and torch.equal(found, right)


@pytest.mark.gpu
@every_example
def test_it_runs_in_a_cuda_graph(make: Callable[[], Example]) -> None:
    eager, graph, replayed = captured(make().run)
    graph.replay()
    for found, wanted in zip(replayed, eager, strict=True):
        assert torch.equal(found, wanted)
