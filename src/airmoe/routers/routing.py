"""What a router answers: three layouts with one face for losses and metrics.

Statistics are lazy, because many forwards need none of them; they are differentiable whenever the
routing itself is, whoever reads them first. A cell routing refers to the router's shortlists: read
it before the router rebuilds them (it refuses afterwards).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.backend import use_triton
from airmoe.kernels.cells import Cells
from airmoe.kernels.top_k import top_positions

Value = TypeVar("Value")


class Lazy(Generic[Value]):
    """Something computed on first use, but under the gradient mode of its making and in full
    precision: who reads it first, and where, makes no difference."""

    def __init__(self, device: torch.device, compute: Callable[[], Value]) -> None:
        self._device_type = device.type
        self._gradients = torch.is_grad_enabled()
        self._compute: Callable[[], Value] | None = compute
        self._value: Value | None = None

    def __call__(self) -> Value:
        if self._compute is not None:
            with (
                torch.set_grad_enabled(self._gradients),
                torch.autocast(self._device_type, enabled=False),
            ):
                self._value = self._compute()
            self._compute = None  # lets go of what the computation needed
        return cast(Value, self._value)


@dataclass(eq=False, kw_only=True)
class Routing(ABC):
    """Which experts each token uses, and with which weight."""

    num_tokens: int
    num_experts: int
    valid: Tensor  # [T] bool: False for masked and non-finite tokens, which enter no statistic
    lazy_expert_probs: Callable[[], Tensor] = field(repr=False)
    lazy_log_z: Callable[[], Tensor] = field(repr=False)

    @property
    def expert_probs(self) -> Tensor:
        """[E] mean over valid tokens of the softmax over the router's candidates."""
        return self.lazy_expert_probs()

    @property
    def log_z(self) -> Tensor:
        """[T] logsumexp over the router's candidates, 0 for tokens that do not count."""
        return self.lazy_log_z()

    @property
    @abstractmethod
    def expert_counts(self) -> Tensor:
        """[E] int64: how often each expert was chosen."""

    @property
    def experts_choose(self) -> bool:
        """Whether experts take tokens, so that a token's list depends on the other tokens."""
        return False

    @abstractmethod
    def to_token_routing(self) -> TokenRouting:
        """The same answer as one list per token (best first; PEER: head by head, each best first).

        Weights stay differentiable.
        """

    def _listed(self, expert_ids: Tensor, weights: Tensor) -> TokenRouting:
        return TokenRouting(
            expert_ids=expert_ids,
            weights=weights,
            num_tokens=self.num_tokens,
            num_experts=self.num_experts,
            valid=self.valid,
            lazy_expert_probs=self.lazy_expert_probs,
            lazy_log_z=self.lazy_log_z,
        )


@dataclass(eq=False, kw_only=True)
class TokenRouting(Routing):
    """Each token has its own list (PEER, exact top-K)."""

    expert_ids: Tensor  # [T, K]
    weights: Tensor  # [T, K], 0 marks an unused slot

    @property
    def expert_counts(self) -> Tensor:
        used = (self.weights.detach() != 0) & self.valid.unsqueeze(-1)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=used.device)
        return counts.scatter_add_(0, self.expert_ids.flatten(), used.flatten().long())

    def to_token_routing(self) -> TokenRouting:
        return self


@dataclass(eq=False, kw_only=True)
class CellRouting(Routing):
    """Rows of a cell share a pool (AIR, hierarchical)."""

    cells: Cells
    gates: Tensor  # [N, M], 0 = not chosen
    max_per_token: int | None  # K, or None where a token may get any number (expert choice)
    lazy_cell_probs: Callable[[], Tensor] = field(repr=False)
    _entry_counts: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def experts_choose(self) -> bool:
        return self.max_per_token is None

    @property
    def token_ids(self) -> Tensor:
        """[N] rows sorted by cell."""
        return self.cells.token_ids

    @property
    def offsets(self) -> Tensor:
        """[G + 1] first row of each cell."""
        return self.cells.offsets

    @property
    def pools(self) -> Tensor:
        """[G, M] expert ids."""
        return self.cells.pools

    @property
    def rows_per_token(self) -> int:
        return self.cells.rows_per_token

    @property
    def cell_probs(self) -> Tensor:
        """[G] mean softmax of the coarse scores over all cells."""
        return self.lazy_cell_probs()

    @property
    def cell_counts(self) -> Tensor:
        """[G] int64: valid tokens in each cell."""
        counts = torch.zeros(self.pools.shape[0], dtype=torch.int64, device=self.valid.device)
        return counts.scatter_add_(0, self.cells.cell_of_row(), self.valid[self.token_ids].long())

    def entry_counts(self) -> Tensor:
        """[G, M] int32: how many rows of each cell chose each of its experts. Triton's only."""
        counts = self._entry_counts
        if counts is None:
            from airmoe.kernels.cell_gates import counts_per_entry

            counts = counts_per_entry(self.gates.detach(), self.offsets, self.pools)
            self._entry_counts = counts
        return counts

    @property
    def expert_counts(self) -> Tensor:
        self.cells.check_current()
        if use_triton(self.gates):  # rows that do not count have no gate
            reverse = self.cells.reverse_index(self.num_experts)
            return reverse.sum_by_expert(self.entry_counts()).long()
        chosen = (self.gates.detach() > 0) & self.valid[self.token_ids].unsqueeze(-1)
        return sum_over_cells(chosen.int(), self.cells, self.num_experts).long()

    def to_token_routing(self) -> TokenRouting:
        self.cells.check_current()
        flat_gates = by_token(self.gates, self.cells, self.num_tokens)  # [T, R * M]
        width = self.max_per_token
        if width is None:
            used = (flat_gates.detach() > 0).sum(-1)
            width = max(1, int(used.max())) if used.numel() else 1
        places = top_positions(flat_gates.detach(), width)
        experts = self.pools[self.cells.cell_of_row()]  # [N, M]
        expert_ids = by_token(experts, self.cells, self.num_tokens).gather(1, places)
        return self._listed(expert_ids, flat_gates.gather(1, places))


@dataclass(eq=False, kw_only=True)
class ExpertRouting(Routing):
    """Each expert has its own list (expert choice); a token may get any number of experts."""

    token_ids: Tensor  # [E, C]
    weights: Tensor  # [E, C], 0 marks an unused slot

    @property
    def experts_choose(self) -> bool:
        return True

    @property
    def expert_counts(self) -> Tensor:
        return ((self.weights.detach() != 0) & self.valid[self.token_ids]).sum(-1)

    def to_token_routing(self) -> TokenRouting:
        capacity = self.token_ids.shape[1]
        used = self.weights.detach() != 0
        # Unused slots go to an extra list past the last token, which is dropped at the end.
        owners = torch.where(used, self.token_ids, self.num_tokens).flatten()
        owners, order = owners.sort(stable=True)
        starts = torch.searchsorted(owners, torch.arange(self.num_tokens + 1, device=used.device))
        places = torch.arange(owners.numel(), device=used.device) - starts[owners]
        sizes = starts.diff()
        width = max(1, int(sizes.max())) if sizes.numel() else 1
        kept = owners < self.num_tokens
        slots = (owners[kept], places[kept])
        expert_ids = torch.zeros(self.num_tokens, width, dtype=torch.int64, device=used.device)
        expert_ids[slots] = order[kept].div(capacity, rounding_mode="floor")
        weights = self.weights.new_zeros(self.num_tokens, width)
        weights = weights.index_put(slots, self.weights.flatten()[order[kept]])
        best_first = top_positions(weights.detach(), width)
        return self._listed(expert_ids.gather(1, best_first), weights.gather(1, best_first))


def by_token(rows: Tensor, cells: Cells, num_tokens: int) -> Tensor:
    """Rows sorted by cell [N, M] -> token order [T, R * M], nearest cell first."""
    restored = rows.index_select(0, cells.order.argsort())
    return restored.reshape(num_tokens, cells.rows_per_token * rows.shape[1])


def sum_over_cells(values: Tensor, cells: Cells, num_experts: int) -> Tensor:
    """Add up per-row values [N, M] for each expert: -> [E]."""
    cells.check_current()
    per_cell = values.new_zeros(cells.pools.shape).index_add(0, cells.cell_of_row(), values)
    per_expert = values.new_zeros(num_experts)
    return per_expert.scatter_add(0, cells.pools.flatten(), per_cell.flatten())


def check_routing(name: str, value: object) -> None:
    if not isinstance(value, Routing):
        raise ConfigError(
            name,
            type(value).__name__,
            "must be a routing",
            "Give layer.forward_with_routing(x).routing, or router(hidden).",
        )
