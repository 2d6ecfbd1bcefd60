"""A router's input, `Tokens`, and its output, one of three kinds of `Routing`.

Statistics are lazy, because many forwards need none of them; they are differentiable whenever the
routing itself is, whoever reads them first. A cell routing refers to the router's shortlists: read
it before the router rebuilds them (afterwards it raises an error).
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
from airmoe.kernels.cells import Cells, counts_per_entry
from airmoe.kernels.norms import counted_rows
from airmoe.kernels.top_k import top_k_gates, top_positions

Value = TypeVar("Value")


@dataclass(frozen=True)
class Tokens:
    """Hidden states; rows that do not count are set to 0, so that they affect no other row."""

    hidden: Tensor  # [T, D]
    valid: Tensor  # [T] bool

    @property
    def shape(self) -> torch.Size:
        """[T, D], like that of the hidden states that these may stand in for."""
        return self.hidden.shape

    @property
    def weights(self) -> Tensor:
        """[T] float32, 1 / (number of valid tokens) for each valid token, else 0."""
        valid = self.valid.float()
        return valid / valid.sum().clamp_min(1)


def for_products(hidden: Tensor) -> Tensor:
    """On a GPU under autocast, cast float32 hidden states to its dtype; elsewhere unchanged.

    Sums, scores and selection are float32 all the same.
    """
    device = hidden.device.type
    if device != "cuda" or hidden.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return hidden
    return hidden.to(torch.get_autocast_dtype(device))


def read_tokens(label: str, dim: int, hidden: Tensor | Tokens, mask: Tensor | None) -> Tokens:
    """Check hidden [T, dim] and mask [T], and find the tokens that count.

    `Tokens`, which were read before, are returned as they are.

    Masked tokens do not count, nor do those whose squared norm is not a finite float32: NaN,
    infinity and values beyond 1e19 would corrupt the sums over all tokens.
    """
    if isinstance(hidden, Tokens):
        return hidden
    if hidden.ndim != 2 or hidden.shape[1] != dim:
        rule = f"must have shape [tokens, dim = {dim}]"
        remedy = "Flatten leading dimensions, or build with the model's width."
        raise ConfigError(f"{label}.hidden", tuple(hidden.shape), rule, remedy)
    if not hidden.is_floating_point():
        raise ConfigError(
            f"{label}.hidden", hidden.dtype, "must be real floating point", "Cast it first."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != hidden.shape[:1]):
        rule = f"must be a bool tensor of shape [{hidden.shape[0]}]"
        remedy = "Give True for real tokens and False for padding."
        raise ConfigError(f"{label}.mask", (tuple(mask.shape), mask.dtype), rule, remedy)
    return Tokens(*counted_rows(hidden, mask))


@dataclass(eq=False)
class Lazy(Generic[Value]):
    """A value computed when it is first read, without autocast and in the gradient mode in which
    the object was made, so that it does not matter who reads it first, or where."""

    device: torch.device
    compute: Callable[[], Value] | None  # None once it has run
    value: Value | None = None
    gradients: bool = field(default_factory=torch.is_grad_enabled)

    def __call__(self) -> Value:
        if self.compute is not None:
            full_precision = torch.autocast(self.device.type, enabled=False)
            with torch.set_grad_enabled(self.gradients), full_precision:
                self.value = self.compute()
            self.compute = None  # frees what the computation needed
        return cast(Value, self.value)


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
        return torch.where(self.valid, self.lazy_log_z(), 0.0)

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
    def cell_probs(self) -> Tensor:
        """[G] mean softmax of the coarse scores over all cells."""
        return self.lazy_cell_probs()

    @property
    def cell_counts(self) -> Tensor:
        """[G] int64: valid tokens in each cell."""
        counts = torch.zeros(self.pools.shape[0], dtype=torch.int64, device=self.valid.device)
        return counts.scatter_add_(0, self.cells.cell_of_row, self.valid[self.token_ids].long())

    def entry_counts(self) -> Tensor:
        """[G, M] int32: how many rows of each cell chose each of its experts. Only with Triton."""
        counts = self._entry_counts
        if counts is None:
            counts = counts_per_entry(self.gates.detach(), self.cells.layout().tensors())
            self._entry_counts = counts
        return counts

    @property
    def expert_counts(self) -> Tensor:
        self.cells.check_current()
        if use_triton(self.gates):  # rows that do not count have no gate
            reverse = self.cells.reverse_index(self.num_experts)
            return reverse.sum_by_expert(self.entry_counts()).long()
        chosen = (self.gates.detach() > 0) & self.valid[self.cells.token_ids].unsqueeze(-1)
        return sum_over_cells(chosen.int(), self.cells, self.num_experts).long()

    def to_token_routing(self) -> TokenRouting:
        self.cells.check_current()
        flat_gates = by_token(self.gates, self.cells)  # [T, R * M]
        width = self.max_per_token
        if width is None:
            used = (flat_gates.detach() > 0).sum(-1)
            width = max(1, int(used.max())) if used.numel() else 1
        places = top_positions(flat_gates.detach(), width)
        experts = self.pools[self.cells.cell_of_row]  # [N, M]
        expert_ids = by_token(experts, self.cells).gather(1, places)
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


def by_token(rows: Tensor, cells: Cells) -> Tensor:
    """Rows sorted by cell [N, M] -> token order [T, R * M], cells in the order of `cell_ids`."""
    restored = rows.index_select(0, cells.order.argsort())
    return restored.reshape(-1, cells.rows_per_token * rows.shape[1])


def sum_over_cells(values: Tensor, cells: Cells, num_experts: int) -> Tensor:
    """Add up per-row values [N, M] for each expert: -> [E]."""
    cells.check_current()
    per_cell = values.new_zeros(cells.pools.shape).index_add(0, cells.cell_of_row, values)
    per_expert = values.new_zeros(num_experts)
    return per_expert.scatter_add(0, cells.pools.flatten(), per_cell.flatten())


@dataclass(frozen=True)
class ScoredCells:
    """The logits of every token's candidates."""

    tokens: Tokens
    cells: Cells
    scores: Tensor  # [N, M]
    num_experts: int

    def log_z(self) -> Tensor:
        """[T] logsumexp over all rows of a token."""
        return by_token(self.scores, self.cells).logsumexp(-1)

    def probs(self, log_z: Tensor) -> Tensor:
        """[N, M] softmax over all candidates of a token."""
        return (self.scores - log_z[self.cells.token_ids].unsqueeze(-1)).exp()

    def routing(
        self, gates: Tensor, max_per_token: int | None, cell_probs: Callable[[], Tensor]
    ) -> CellRouting:
        """The routing with these gates [N, M]; `cell_probs` gives [G]."""
        device = self.scores.device
        log_z = Lazy(device, self.log_z)

        def expert_probs() -> Tensor:
            row_weights = self.tokens.weights[self.cells.token_ids].unsqueeze(-1)
            return sum_over_cells(self.probs(log_z()) * row_weights, self.cells, self.num_experts)

        return CellRouting(
            num_tokens=self.tokens.hidden.shape[0],
            num_experts=self.num_experts,
            valid=self.tokens.valid,
            cells=self.cells,
            gates=gates,
            max_per_token=max_per_token,
            lazy_expert_probs=Lazy(device, expert_probs),
            lazy_log_z=log_z,
            lazy_cell_probs=Lazy(device, cell_probs),
        )


def token_choice(scored: ScoredCells, top_k: int) -> Tensor:
    """Each token takes its K best over all its rows: gates [N, M] (Alg. 1, line 10; Eq. 2)."""
    cells, scores, valid = scored.cells, scored.scores, scored.tokens.valid
    if cells.rows_per_token == 1:  # rows can be treated in place
        return top_k_gates(scores, valid[cells.token_ids], top_k)
    gates = top_k_gates(by_token(scores, cells), valid, top_k)  # [T, R * M]
    return gates.reshape(scores.shape).index_select(0, cells.order)


def check_routing(name: str, value: object) -> None:
    if not isinstance(value, Routing):
        remedy = "Give layer.forward_with_routing(x).routing, or router(hidden)."
        raise ConfigError(name, type(value).__name__, "must be a routing", remedy)
