"""Granular and coarse experts, which work with any routing."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_count
from airmoe.errors import ConfigError
from airmoe.kernels.backend import use_triton
from airmoe.kernels.cell_experts import cell_experts
from airmoe.kernels.cells import make_cells
from airmoe.kernels.rows import gather_dot, scatter_total
from airmoe.kernels.token_experts import (
    SMALL_BATCH,
    Activation,
    ExpertTables,
    activate,
    compact_gates,
    is_gated,
    token_experts,
)
from airmoe.routers.base import run_eagerly
from airmoe.routers.routing import CellRouting, ExpertRouting, Routing, TokenRouting, check_routing


class _Experts(nn.Module):
    """E feed-forward experts of S neurons. An expert is the sum over its neurons of
    act(gate.h) * (up.h) * down if it is gated, of act(up.h) * down if not."""

    def __init__(
        self, num_experts: int, dim: int, activation: Activation = "swiglu", expert_size: int = 1
    ) -> None:
        super().__init__()
        label = type(self).__name__
        check_count(f"{label}.num_experts", num_experts)
        check_count(f"{label}.dim", dim)
        check_count(f"{label}.expert_size", expert_size)
        check_choice(f"{label}.activation", activation, Activation)
        self.num_experts, self.dim = num_experts, dim
        self.activation: Activation = activation
        self.expert_size = expert_size
        shape = self.weight_shape()
        self.gate = nn.Parameter(torch.empty(shape)) if is_gated(activation) else None
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def weight_shape(self) -> tuple[int, ...]:
        """Expert-major: [E, S, D]."""
        return (self.num_experts, self.expert_size, self.dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Pre-activations of unit variance for unit-variance input, outputs likewise."""
        for weight in (self.gate, self.up):
            if weight is not None:
                nn.init.normal_(weight, std=self.dim**-0.5)
        nn.init.normal_(self.down, std=math.sqrt(1 / self.expert_size))

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        """hidden [T, D], routing of the same tokens -> [T, D]."""
        triton = use_triton(hidden, self.gate, self.up, self.down)
        if torch.compiler.is_compiling() and not triton:
            return self._forward_eagerly(hidden, routing)
        self._check(hidden, routing)
        gate = None if self.gate is None else self.gate.reshape(-1, self.dim)  # [E * S, D]
        up, down = self.up.reshape(-1, self.dim), self.down.reshape(-1, self.dim)
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, up, down = hidden.to(dtype), up.to(dtype), down.to(dtype)
            gate = None if gate is None else gate.to(dtype)
        tables = ExpertTables(gate, up, down, self.activation, self.expert_size)
        if isinstance(routing, CellRouting):
            return self._by_cell(hidden, tables, routing, triton)
        if isinstance(routing, ExpertRouting):
            return self._by_expert(hidden, tables, routing)
        assert isinstance(routing, TokenRouting)
        return self._by_token(hidden, tables, routing)

    _forward_eagerly = run_eagerly(forward)

    def _by_cell(
        self, hidden: Tensor, tables: ExpertTables, routing: CellRouting, triton: bool
    ) -> Tensor:
        cells, top_k, counts = routing.cells, routing.max_per_token, None
        gradients = torch.is_grad_enabled()
        few = 0 < hidden.shape[0] <= SMALL_BATCH and cells.rows_per_token == 1
        if triton and few and not gradients and top_k is not None:
            # Decoding: fetching the K chosen experts beats products over all M.
            expert_ids, weights = compact_gates(
                routing.gates, cells.pools, cells.cell_of_row, cells.token_ids, top_k
            )
            return token_experts(hidden, tables, weights, expert_ids)
        if triton and gradients and cells.small and self.expert_size == 1:
            counts = routing.entry_counts()  # lets the backward skip what no row of a cell chose
        return cell_experts(
            hidden, tables, routing.gates, cells, counts=counts, training=self.training
        )

    def _by_token(self, hidden: Tensor, tables: ExpertTables, routing: TokenRouting) -> Tensor:
        return token_experts(hidden, tables, routing.weights, routing.expert_ids)

    def _by_expert(self, hidden: Tensor, tables: ExpertTables, routing: ExpertRouting) -> Tensor:
        gate, up, down = tables.gate, tables.up, tables.down
        tokens = routing.token_ids.repeat_interleave(tables.size, dim=0)  # [E * S, C]
        pre_gate = None if gate is None else gather_dot(gate, hidden, tokens)
        active = activate(tables.activation, gather_dot(up, hidden, tokens), pre_gate)
        weights = routing.weights.to(active.dtype).repeat_interleave(tables.size, dim=0)
        return scatter_total(active * weights, down, tokens, hidden.shape[0])

    def _check(self, hidden: Tensor, routing: Routing) -> None:
        label = type(self).__name__
        check_routing(f"{label}.routing", routing)
        if hidden.shape != (routing.num_tokens, self.dim):
            rule = f"must have shape [{routing.num_tokens}, {self.dim}], one row per routed token"
            remedy = "Pass the hidden states that were routed."
            raise ConfigError(f"{label}.hidden", tuple(hidden.shape), rule, remedy)
        if routing.num_experts != self.num_experts:
            rule = f"must equal the router's num_experts = {routing.num_experts}"
            remedy = "Build router and experts with the same number."
            raise ConfigError(f"{label}.num_experts", self.num_experts, rule, remedy)
        if hidden.dtype != self.up.dtype and not torch.is_autocast_enabled(hidden.device.type):
            rule = f"must have the dtype of the expert weights, {self.up.dtype}"
            remedy = "Cast one of them, or run under autocast."
            raise ConfigError(f"{label}.hidden", hidden.dtype, rule, remedy)

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts}, {self.dim}, activation={self.activation!r}, "
            f"expert_size={self.expert_size}"
        )


class GranularExperts(_Experts):
    """Tens of thousands to millions of tiny experts, of one neuron each by default."""

    def weight_shape(self) -> tuple[int, ...]:
        """[E, D] for single neurons, else [E, S, D]."""
        return (self.num_experts, self.dim) if self.expert_size == 1 else super().weight_shape()


class CoarseExperts(_Experts):
    """A few large experts, dropless: an expert is a cell, and its pool is its own neurons."""

    def __init__(
        self, num_experts: int, dim: int, expert_size: int, activation: Activation = "swiglu"
    ) -> None:
        super().__init__(num_experts, dim, activation, expert_size)

    def _by_token(self, hidden: Tensor, tables: ExpertTables, routing: TokenRouting) -> Tensor:
        neurons = torch.arange(tables.up.shape[0], device=hidden.device).view(self.num_experts, -1)
        cells = make_cells(routing.expert_ids, neurons)
        row_weights = routing.weights.flatten()[cells.order].unsqueeze(-1)  # [T * K, 1]
        gates = row_weights.expand(-1, self.expert_size)
        return cell_experts(hidden, replace(tables, size=1), gates, cells, training=self.training)
