"""Plans under `torch.compile`: from a traced forward to the module that makes them, and back.

Observing, rebuilding shortlists and finding the plan of a recomputed forward follow flags that
Python holds, and must run at every call: a compiler would fix them as they were when it traced.
So a compiled graph calls an operator, `airmoe::plan`, which finds the module by a handle and runs
that code; all the rest of routing is part of the graph.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from airmoe.kernels.backend import assume_constant

if TYPE_CHECKING:
    from airmoe.routers.base import Plan, Router
    from airmoe.routers.tokens import Tokens


class Planner(Protocol):
    """A module whose forwards begin with a plan: a router, or the layer around it."""

    @property
    def planning_router(self) -> Router: ...

    def make_plan(self, tokens: Tokens, ticket: int | None, learn: bool) -> Plan:
        """Observe, if it is to learn, and plan; a training forward has a ticket, by which it is
        known again."""
        ...


_numbers = itertools.count()
_planners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def new_handle(planner: Any) -> Tensor:
    """By which the operator finds a module; the module must keep it, outside of its buffers.

    A tensor and not a number, because a compiler would make a number part of the graph and compile
    the layers of a model one by one; on the CPU, where reading it waits for nothing.
    """
    number = next(_numbers)
    _planners[number] = planner
    return torch.full((1,), number, dtype=torch.int64, device="cpu")


def planner_of(handle: Tensor) -> Planner:
    return _planners[int(handle)]


def draw_ticket() -> int:
    """A number that a recomputed forward draws again.

    Checkpointing restores the CPU's random state before it recomputes, so the ticket names the
    forward that is repeated, in whatever order the backwards arrive.
    """
    return int(torch.randint(2**62, ()))


def traced_plan(
    planner: Planner,
    handle: Tensor,
    hidden: Tensor,
    mask: Tensor | None,
    *,
    training: bool,
    learn: bool = True,
) -> tuple[Tensor | None, Plan]:
    """(mask of the tokens that count [T] bool or None, plan), while a compiler traces."""
    import airmoe.routers.plan_operator  # noqa: F401 (registers the operators)

    router = planner.planning_router
    layout = router.plan_layout()
    if not training and not layout:
        return mask, router.unpack_plan([])
    ticket = torch.ops.airmoe.draw_ticket(handle, _call_number()) if training else None
    tensors = torch.ops.airmoe.plan(
        hidden.detach(), mask, ticket, handle, f"bool:T;{layout}", torch.is_grad_enabled(), learn
    )
    # Not `valid, *tensors`, a tuple to torch 2.11; and a list that a router may take apart.
    return tensors[0], router.unpack_plan(list(tensors[1:]))


def _call_number() -> int:
    return next(_numbers)


# A number for each traced call.
assume_constant(_call_number)
