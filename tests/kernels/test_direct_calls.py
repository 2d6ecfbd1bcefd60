"""An operator that nobody watches is called without torch's dispatcher, and nobody can tell."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from airmoe.kernels.backend import Operator
from tests.kernels.test_operators import EXAMPLES, every_example, floats, ids, operator_of

pytest.importorskip("triton")
WITH_GRADIENTS = [name for name, example in EXAMPLES.items() if example().differentiable]


def named(name: str) -> Operator:
    """What this project calls; `operator_of` gives what is registered."""
    full_name = "airmoe::" + name.partition(",")[0]
    return next(each for each in operators() if each.schema.name == full_name)


def operators() -> list[Operator]:
    return [each for each in gc.get_objects() if type(each) is Operator]


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a registered operator fail."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("went through the dispatcher")

    for each in operators():
        monkeypatch.setattr(each, "registered", fail)


@every_example
def test_results_and_gradients_are_those_of_the_registered(
    name: str, request: pytest.FixtureRequest
) -> None:
    example, direct, registered = EXAMPLES[name](), named(name), operator_of(name)
    wanted = example.run(registered)
    request.getfixturevalue("unregistered")
    for found, right in zip(example.run(direct), wanted, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_both_keep_the_same_tensors_for_the_backward(name: str) -> None:
    """Activation checkpointing compares them, and may recompute in the other way."""

    def kept(operator: Callable[..., Any]) -> list[Any]:
        example, found = EXAMPLES[name](), []
        for place in example.differentiable:
            example.arguments[place].requires_grad_()

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            operator(*example.arguments)
        return [(tensor.shape, tensor.dtype) for tensor in found]

    assert kept(named(name)) == kept(operator_of(name))


@pytest.mark.parametrize("direct", [True, False])
def test_what_was_kept_must_not_change(direct: bool) -> None:
    left, rows = floats(4, 16).requires_grad_(), floats(9, 16)
    operator = named("gather_dot") if direct else operator_of("gather_dot")
    result = operator(left, rows, torch.randint(9, (4, 5), device=rows.device))
    rows.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("direct", [True, False])
def test_there_is_no_second_derivative(direct: bool) -> None:
    name = "cell_scores"
    example, operator = EXAMPLES[name](), named(name) if direct else operator_of(name)
    hidden = example.arguments[0].requires_grad_()
    (grad,) = torch.autograd.grad(operator(*example.arguments).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.sum().backward()


@pytest.mark.parametrize("direct", [True, False])
def test_operators_without_a_gradient_say_so(direct: bool) -> None:
    rows = floats(20, 30).requires_grad_()
    norms = (named if direct else operator_of)("inverse_norms")(rows)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        norms.sum().backward()


def test_what_is_written_has_a_new_version() -> None:
    arguments = EXAMPLES["move_codewords"]().arguments
    before = [x._version for x in arguments if isinstance(x, Tensor)]
    named("move_codewords")(*arguments)
    after = [x._version for x in arguments if isinstance(x, Tensor)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 1, 0, 0]


class Names(TorchDispatchMode):
    """Keeps the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    """Somebody's kind of tensor."""


def test_a_mode_sees_both_directions() -> None:
    example, names = EXAMPLES["cell_experts"](), Names()
    with names:
        example.run(named("cell_experts"))
    seen = [name for name in names.seen if name.startswith("airmoe")]
    assert seen == ["airmoe.cell_experts.default", "airmoe.cell_experts_backward.default"]


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(
    ("context", "kind"),
    [(Names(), None), (Function(), None), (nullcontext(), Own)],
    ids=["dispatch mode", "function mode", "own tensors"],
)
def test_who_watches_gets_the_registered(
    context: AbstractContextManager[Any], kind: type[Tensor] | None
) -> None:
    rows = floats(20, 30)
    rows = rows if kind is None else rows.as_subclass(kind)
    with context, pytest.raises(AssertionError, match="went through the dispatcher"):
        named("inverse_norms")(rows)


@pytest.mark.usefixtures("unregistered")
def test_transforms_get_the_registered() -> None:
    with pytest.raises(AssertionError, match="went through the dispatcher"):
        torch.func.vmap(named("inverse_norms"))(floats(3, 20, 30))


def test_gradients_batched_by_autograd_get_the_registered() -> None:
    """Its own vmap is neither a mode nor a transform."""
    table, places = floats(9, 16), ids(9, 4, 5)
    queries, upstream = floats(4, 16).requires_grad_(), floats(3, 4, 5)
    dots = named("gather_dot")(queries, table, places)
    found = torch.autograd.grad(dots, queries, upstream, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(dots, queries, one, retain_graph=True)[0] for one in upstream]
    assert torch.equal(found[0], torch.stack(wanted))
