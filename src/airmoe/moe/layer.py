"""Router + experts + post-norm, as one layer for any model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from airmoe.config import check_choice
from airmoe.errors import ConfigError
from airmoe.kernels.backend import use_triton
from airmoe.moe.experts import CoarseExperts, GranularExperts
from airmoe.moe.recomputation import PlanLog, inside_backward, unseen_by_checkpointing
from airmoe.routers.base import Plan, Router, run_eagerly
from airmoe.routers.codebook import Codebook
from airmoe.routers.planning import new_handle, traced_plan
from airmoe.routers.routing import Routing, Tokens, for_products
from airmoe.routers.settings import RouterConfig

PostNorm = Literal["layernorm", "none"]


@dataclass(frozen=True)
class MoEOutput:
    """A layer's result together with the routing, for losses and metrics."""

    hidden: Tensor  # [B, L, D]
    routing: Routing


class MoELayer(nn.Module):
    """forward(x [B, L, D], mask [B, L] = None) -> [B, L, D].

    In training the router observes each micro-batch exactly once, also when activation
    checkpointing runs the forward again during backward. To recognise such a forward the layer
    draws one number per training forward from torch's CPU generator.

    Where Triton computes, `torch.compile(fullgraph=True)` compiles the whole layer, and a training
    step can be captured in a CUDA graph:

        airmoe.track_optimizer(layer, optimizer)  # e.g. AdamW(..., fused=True, capturable=True)
        for _ in range(3):
            step()  # forward, backward, optimizer.step(); on another stream, as torch demands
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            step()

    The warm-up steps compile the kernels and let the host learn that the codebook has started; the
    last of them leaves the shortlists out of date, so that rebuilding them is part of the graph.
    A graph repeats what was due when it was captured, so this needs `refresh_every=1`: with more,
    the shortlists would be rebuilt in every replay or in none. Nor do Python's counters move:
    before you evaluate, call `layer.eval()` (which must change the mode) or
    `router.on_parameters_changed()`, or evaluation uses old lists.
    """

    def __init__(
        self,
        router: Router,
        experts: GranularExperts | CoarseExperts,
        post_norm: PostNorm = "layernorm",
    ) -> None:
        super().__init__()
        check_choice("MoELayer.post_norm", post_norm, PostNorm)
        if not isinstance(getattr(router, "config", None), RouterConfig):
            rule = "must be a router, the first of the two"
            remedy = "Build it from its settings: MoELayer(config.build(), experts)."
            raise ConfigError("MoELayer.router", type(router).__qualname__, rule, remedy)
        for name in ("dim", "num_experts"):
            wanted, given = getattr(router.config, name), getattr(experts, name, None)
            if given != wanted:
                rule = f"must equal the router's {name} = {wanted}"
                remedy = "Build router and experts with the same sizes."
                raise ConfigError(f"MoELayer.experts.{name}", given, rule, remedy)
        self.router, self.experts = router, experts
        self.post_norm = nn.LayerNorm(experts.dim) if post_norm == "layernorm" else None
        self._plans = PlanLog()
        self._warned_frozen = False
        self._handle = new_handle(self)

    def train(self, mode: bool = True) -> MoELayer:
        if not mode:
            self._plans.clear()
        super().train(mode)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = new_handle(self)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.forward_with_routing(x, mask).hidden

    def forward_with_routing(
        self, x: Tensor, mask: Tensor | None = None, *, learn: bool = True
    ) -> MoEOutput:
        """The same, with the routing, for losses and metrics.

        Inside a checkpointed block compute the loss there too and return it as a tensor. Without
        `learn` the router does not observe the tokens even in training, as when a model that is
        being trained writes one token at a time, which would take over the codebook.
        """
        compiling, router, plan = torch.compiler.is_compiling(), self.router, None
        if compiling and not self.compiles(x):
            return self._forward_eagerly(x, mask, learn=learn)
        if x.ndim < 2:
            rule = "must have shape [batch, length, dim]"
            raise ConfigError("MoELayer.x", tuple(x.shape), rule, "Add a batch.")
        if x.shape[-1] != self.experts.dim:
            rule = f"must have width dim = {self.experts.dim}"
            remedy = "Pass hidden states of this width, or build router and experts with yours."
            raise ConfigError("MoELayer.x", tuple(x.shape), rule, remedy)
        hidden = for_products(x.reshape(-1, x.shape[-1]))  # [T, D]
        mask = None if mask is None else _flat_mask(mask, x.shape[:-1])
        # A forward of training may be recomputed, and the router learns from its tokens.
        training = self.training and router.training
        if compiling:
            valid, plan = traced_plan(self, router, hidden, mask, training=training, learn=learn)
            tokens = router.read(hidden, valid)
        else:
            tokens = router.read(hidden, mask)
            if training:
                # Checkpointing restores the random state before it recomputes a forward, so the
                # ticket names that forward, in whatever order the backwards arrive.
                ticket = int(torch.randint(2**62, (), device="cpu"))
                plan = self.make_plan(tokens, ticket, learn)
        routing = router(hidden, mask, plan, tokens)  # hidden and mask are for forward hooks
        output = self.experts(tokens.hidden, routing)
        if self.post_norm is not None:
            output = self.post_norm(output)
        # Bad tokens (NaN, infinity, huge values) are NaN again, unless they are masked: they must
        # not look like good ones, nor enter a gradient.
        good = tokens.valid if mask is None else tokens.valid | ~mask
        output = torch.where(good.unsqueeze(-1), output, torch.nan)
        return MoEOutput(output.reshape(x.shape).to(x.dtype), routing)

    _forward_eagerly = run_eagerly(forward_with_routing)

    def compiles(self, x: Tensor) -> bool:
        """True if a compiler can include the whole layer; if not, the layer is a graph break."""
        return self.router.compiles(x) and use_triton(x, *self.experts._parameters.values())

    @unseen_by_checkpointing()
    def make_plan(self, tokens: Tokens, ticket: int, learn: bool) -> Plan:
        """The plan of the training forward that drew `ticket`, which observes if it is new."""
        router = self.router
        if inside_backward():  # a recomputation
            return self._plans.find(ticket, tokens.hidden) or router.plan(tokens)
        if learn:
            first = next(self.parameters(), None)
            if first is not None and not first.requires_grad:
                self._warn_if_frozen()
            router.observe(tokens)
        plan = router.plan(tokens)
        self._plans.keep(ticket, tokens.hidden, plan, router.parameter_changes)
        return plan

    def _warn_if_frozen(self) -> None:
        """Warn once if only the codebook of this layer learns, after its first batch."""
        codebook = getattr(self.router, "codebook", None)
        learns = isinstance(codebook, Codebook) and codebook.learning and torch.is_grad_enabled()
        if self._warned_frozen or not learns or any(p.requires_grad for p in self.parameters()):
            return
        self._warned_frozen = True
        warnings.warn(
            "No parameter of this MoELayer is trained, but its codebook goes on learning, which "
            "changes its routing. An adapter's file does not hold that: call "
            "router.freeze_codebook() before training, or save the whole model.",
            stacklevel=3,
        )


def _flat_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """[B, L] bool or 0/1 integers -> [T] bool."""
    given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__qualname__
    if given != tuple(shape):
        rule = f"must be a tensor of shape {tuple(shape)}, one entry per token"
        raise ConfigError("MoELayer.mask", given, rule, "Pass the attention mask of this batch.")
    if mask.is_floating_point() or mask.is_complex():
        rule = "must be bool or 0/1 integers; an additive mask means the opposite"
        remedy = "Pass the mask in which 1 stands for a real token."
        raise ConfigError("MoELayer.mask", mask.dtype, rule, remedy)
    return mask.reshape(-1) != 0
