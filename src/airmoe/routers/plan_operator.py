"""Planning as operators of compiled graphs (`airmoe.routers.planning` says why).

Imported when a compiler traces the first forward: registering operators loads the compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.routers.planning import draw_ticket, planner_of

# Left out of the CUDA graphs that a compiler records: the flags must be read at every call.
_TAGS = [tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None]


# The tag makes compilers restore the generator before they recompute a checkpointed forward.
@torch.library.custom_op(
    "airmoe::draw_ticket", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def _draw_ticket(handle: Tensor, call: int) -> Tensor:
    """[1] int64 on the CPU, as the handle tells compilers.

    `call` is another number for each, or they would draw once for two calls.
    """
    return torch.full((1,), draw_ticket(), dtype=torch.int64)


@_draw_ticket.register_fake
def _(handle: Tensor, call: int) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.custom_op("airmoe::plan", mutates_args=(), tags=_TAGS)
def _plan(
    hidden: Tensor,
    mask: Tensor | None,
    ticket: Tensor | None,
    handle: Tensor,
    layout: str,
    gradients: bool,
    learn: bool,
) -> list[Tensor]:
    """The tokens that count, and the tensors of a plan, all described by `layout`.

    They are copies: a compiler may write over what an operator gave it, while the module keeps its
    own. The tokens are there so that something of every call is used: without jitter some plans
    are empty, and a compiler would drop the call.
    """
    planner = planner_of(handle)
    router = planner.planning_router
    with torch.set_grad_enabled(gradients):
        tokens = router.read(hidden, mask)
        plan = planner.make_plan(tokens, None if ticket is None else int(ticket), learn)
    tensors = [tokens.valid, *router.pack_plan(plan)]
    return [tensor.clone() for tensor in tensors]


@_plan.register_fake
def _(
    hidden: Tensor,
    mask: Tensor | None,
    ticket: Tensor | None,
    handle: Tensor,
    layout: str,
    gradients: bool,
    learn: bool,
) -> list[Tensor]:
    found = []
    for part in filter(None, layout.split(";")):
        dtype, sizes = part.split(":")
        shape = [hidden.shape[0] if n == "T" else int(n) for n in filter(None, sizes.split(","))]
        found.append(hidden.new_empty(shape, dtype=getattr(torch, dtype)))
    return found
