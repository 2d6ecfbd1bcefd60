"""Router + experts + post-norm, as one layer for any model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from airmoe.config import check_choice
from airmoe.errors import ConfigError
from airmoe.moe.experts import CoarseExperts, GranularExperts
from airmoe.moe.replay import PlanLog, draw_ticket, inside_backward
from airmoe.routers.base import Plan, Router, run_eagerly
from airmoe.routers.routing import Routing

PostNorm = Literal["layernorm", "none"]


@dataclass(frozen=True)
class MoEOutput:
    """A layer's result together with the routing, for losses and metrics."""

    hidden: Tensor  # [B, L, D]
    routing: Routing


class MoELayer(nn.Module):
    """forward(x [B, L, D], mask [B, L] = None) -> [B, L, D].

    In training the router observes each micro-batch exactly once, also when activation
    checkpointing runs the forward again during backward. To know such forwards again the layer
    draws one number per training forward from torch's CPU generator.
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
        self._plans = PlanLog()

    def train(self, mode: bool = True) -> MoELayer:
        if not mode:
            self._plans.clear()
        super().train(mode)
        return self

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.forward_with_routing(x, mask).hidden

    @run_eagerly
    def forward_with_routing(self, x: Tensor, mask: Tensor | None = None) -> MoEOutput:
        """The same, with the routing, for losses and metrics.

        Inside a checkpointed block compute the loss there too and return it as a tensor.
        """
        hidden, flat_mask = self._flatten(x, mask)
        routing = self.router(hidden, flat_mask, self._plan(hidden, flat_mask))
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
        if mask.is_floating_point() or mask.is_complex():
            raise ConfigError(
                "MoELayer.mask",
                mask.dtype,
                "must be bool or 0/1 integers; an additive mask means the opposite",
                "Pass the mask in which 1 stands for a real token.",
            )
        return hidden, mask.reshape(-1) != 0

    def _plan(self, hidden: Tensor, mask: Tensor | None) -> Plan | None:
        """Observe and plan a new micro-batch; find the old plan of one that is recomputed."""
        router = self.router
        if not (self.training and router.training):
            return None  # as things are now
        ticket = draw_ticket()
        if inside_backward():
            return self._plans.find(ticket, hidden)
        router.observe(hidden, mask)
        plan = router.plan(router.read(hidden.detach(), mask))
        self._plans.keep(ticket, hidden, plan, router.parameter_changes, router.kept_plans)
        return plan
