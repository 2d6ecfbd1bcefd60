"""Router + experts + post-norm, as one layer for any model."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from airmoe.config import check_choice
from airmoe.errors import ConfigError
from airmoe.moe.experts import CoarseExperts, GranularExperts
from airmoe.routers.base import Plan, Router, Tokens, run_eagerly
from airmoe.routers.routing import Routing

PostNorm = Literal["layernorm", "none"]
KEPT_PLANS = 16  # forwards that may wait for their backward at once


@dataclass(frozen=True)
class MoEOutput:
    """A layer's result together with the routing, for losses and metrics."""

    hidden: Tensor  # [B, L, D]
    routing: Routing


class MoELayer(nn.Module):
    """forward(x [B, L, D], mask [B, L] = None) -> [B, L, D].

    In training the router observes each micro-batch exactly once, also when activation
    checkpointing runs the forward again during backward.
    """

    def __init__(
        self,
        router: Router,
        experts: GranularExperts | CoarseExperts,
        post_norm: PostNorm = "layernorm",
    ) -> None:
        super().__init__()
        check_choice("MoELayer.post_norm", post_norm, PostNorm)
        for name in ("dim", "num_experts"):
            if getattr(router.config, name) != getattr(experts, name):
                raise ConfigError(
                    f"MoELayer.experts.{name}",
                    getattr(experts, name),
                    f"must equal the router's {name} = {getattr(router.config, name)}",
                    "Build router and experts with the same sizes.",
                )
        self.router, self.experts = router, experts
        self.post_norm = nn.LayerNorm(experts.dim) if post_norm == "layernorm" else None
        self._plans: OrderedDict[int, Plan] = OrderedDict()
        self._plans_of = -1  # the router's parameter_changes when the plans were made
        self._warned_lost_plan = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.forward_with_routing(x, mask).hidden

    @run_eagerly
    def forward_with_routing(self, x: Tensor, mask: Tensor | None = None) -> MoEOutput:
        """The same, with the routing: return both from a checkpointed block to keep gradients."""
        hidden, flat_mask = self._flatten(x, mask)
        tokens = self.router.read(hidden, flat_mask)
        routing = self.router.answer(tokens, self._plan(hidden, flat_mask, tokens))
        if flat_mask is not None:
            hidden = hidden.masked_fill(~flat_mask.unsqueeze(-1), 0)  # padding may hold anything
        output = self.experts(hidden, routing)
        if self.post_norm is not None:
            output = self.post_norm(output)
        return MoEOutput(output.reshape(x.shape).to(x.dtype), routing)

    def _flatten(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if x.ndim < 2:
            raise ConfigError(
                "MoELayer.x", tuple(x.shape), "must have shape [batch, length, dim]", "Add a batch."
            )
        hidden = x.reshape(-1, x.shape[-1])
        if mask is None:
            return hidden, None
        if mask.shape != x.shape[:-1]:
            raise ConfigError(
                "MoELayer.mask",
                tuple(mask.shape),
                f"must have shape {tuple(x.shape[:-1])}, one entry per token",
                "Pass the attention mask of this batch.",
            )
        return hidden, mask.reshape(-1).bool()

    def _plan(self, hidden: Tensor, mask: Tensor | None, tokens: Tokens) -> Plan:
        if not self.training:
            return self.router.plan(tokens)
        ticket = _draw_ticket()
        if _inside_backward():
            return self._kept_plan(ticket, tokens)
        self.router.observe(hidden, mask)
        plan = self.router.plan(tokens)
        if self._plans_of != self.router.parameter_changes:
            self._plans.clear()
            self._plans_of = self.router.parameter_changes
        self._plans[ticket] = plan
        while len(self._plans) > KEPT_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _kept_plan(self, ticket: int, tokens: Tokens) -> Plan:
        """The plan of the forward that is being recomputed."""
        if ticket in self._plans:
            return self._plans[ticket]
        if not self._warned_lost_plan:
            self._warned_lost_plan = True
            warnings.warn(
                "MoELayer is recomputed without the random state of its first forward "
                "(preserve_rng_state=False?), so the newest routing plan is used. That is right "
                "when every forward is followed by its own backward, and only then.",
                stacklevel=2,
            )
        return next(reversed(self._plans.values())) if self._plans else self.router.plan(tokens)


def _draw_ticket() -> int:
    """A number that a recomputed forward draws again.

    Checkpointing restores the CPU's random state before it recomputes, so the ticket names the
    forward it repeats, in whatever order backwards arrive.
    """
    return int(torch.randint(2**62, ()))


def _inside_backward() -> bool:
    """True while autograd executes a backward: a training forward in there is a recomputation."""
    return torch._C._current_graph_task_id() != -1
