"""Plans under `torch.compile`: from a traced forward to the module that makes them, and back.

Observing, rebuilding shortlists and finding the plan of a recomputed forward depend on Python
state, so that code must run at every call; a compiler would bake in what it saw while tracing.
Compiled graphs therefore call an operator, `airmoe::plan`, which finds the module by a handle and
runs the code. The rest of routing is part of the graph.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from airmoe.kernels.backend import assume_constant

if TYPE_CHECKING:
    from airmoe.routers.base import Plan, Router

_numbers = itertools.count()  # of modules, and of traced calls
# The modules whose forwards begin with a plan: routers, and layers (which have a `router`). A
# training forward of a layer has a ticket, by which its recomputation is recognised, and
# `MoELayer.make_plan` lets the router observe.
_planners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def new_handle(planner: Any) -> Tensor:
    """What the operator finds a module by; the module keeps it as `_handle`, not as a buffer.

    It is a tensor, because a compiler would make a number part of the graph and compile each layer
    of a model anew; and it is on the CPU, where reading it does not wait.
    """
    number = next(_numbers)
    _planners[number] = planner
    return torch.full((1,), number, dtype=torch.int64, device="cpu")


def traced_plan(
    planner: Any,
    router: Router,
    hidden: Tensor,
    mask: Tensor | None,
    *,
    training: bool,
    learn: bool = True,
) -> tuple[Tensor | None, Plan]:
    """For code that a compiler traces: (mask of the tokens that count [T] bool or None, plan).

    `planner` is the router itself, or the layer around it.
    """
    handle, layout = planner._handle, router.plan_layout()
    if not training and not layout:
        return mask, router.plan_type()
    ticket = torch.ops.airmoe.draw_ticket(handle, _call_number()) if training else None
    kinds = ";".join(["bool:T", *layout.values()])
    tensors = torch.ops.airmoe.plan(
        hidden.detach(), mask, ticket, handle, kinds, torch.is_grad_enabled(), learn
    )
    return tensors[0], router.plan_type(**dict(zip(layout, tensors[1:], strict=True)))


def _call_number() -> int:
    return next(_numbers)


# Called while a compiler traces: each traced call keeps the number it got.
assume_constant(_call_number)


# The tag makes compilers restore the generator before they recompute a checkpointed forward.
@torch.library.custom_op(
    "airmoe::draw_ticket", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def _draw_ticket(handle: Tensor, call: int) -> Tensor:
    """The ticket, drawn as a layer draws it without a compiler: [1] int64 on the CPU.

    Compilers take an operator to run on its inputs' device, and the handle is on the CPU.
    `call` differs from call to call, or a compiler would merge two of them into one.
    """
    return torch.randint(2**62, (1,), device="cpu")


@_draw_ticket.register_fake
def _(handle: Tensor, call: int) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


# The tag keeps it out of CUDA graphs: Python's state must be read at every call.
@torch.library.custom_op("airmoe::plan", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def _plan(
    hidden: Tensor,
    mask: Tensor | None,
    ticket: Tensor | None,
    handle: Tensor,
    kinds: str,
    gradients: bool,
    learn: bool,
) -> list[Tensor]:
    """The tokens that count, and the tensors of a plan, of these kinds joined by `;`.

    They are copies, because a compiler may overwrite an operator's results. The tokens are among
    them so that every call has a result that is used: without jitter some plans are empty, and a
    compiler would drop the call.
    """
    planner = _planners[int(handle)]
    # A layer has its router in `router`. Routers are recognised first: one may have such a part.
    router = planner if hasattr(planner, "plan_layout") else planner.router
    with torch.set_grad_enabled(gradients):
        tokens = router.read(hidden, mask)
        if ticket is None:
            plan = router.plan(tokens)
        else:
            plan = planner.make_plan(tokens, int(ticket), learn)
    tensors = [tokens.valid, *(getattr(plan, name) for name in router.plan_layout())]
    return [tensor.clone() for tensor in tensors]


@_plan.register_fake
def _(hidden: Tensor, _mask: Any, _ticket: Any, _handle: Any, kinds: str, *_: Any) -> list[Tensor]:
    found = []
    for kind in kinds.split(";"):
        dtype, sizes = kind.split(":")
        shape = [hidden.shape[0] if n == "T" else int(n) for n in filter(None, sizes.split(","))]
        found.append(hidden.new_empty(shape, dtype=getattr(torch, dtype)))
    return found
