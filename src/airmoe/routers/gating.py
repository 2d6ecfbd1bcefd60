"""From cell scores to gates: who chooses whom, shared by the routers that work in cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.kernels.cells import Cells
from airmoe.kernels.top_k import top_k_gates
from airmoe.routers.routing import CellRouting, Lazy, by_token, sum_over_cells
from airmoe.routers.tokens import Tokens


@dataclass(frozen=True)
class ScoredCells:
    """Candidates of every token with their logits, -inf where an entry does not count."""

    tokens: Tokens
    cells: Cells
    scores: Tensor  # [N, M]
    num_experts: int

    @property
    def num_tokens(self) -> int:
        return self.tokens.hidden.shape[0]

    def log_z(self) -> Tensor:
        """[T] logsumexp over all rows of a token, 0 for tokens that do not count."""
        log_z = by_token(self.scores, self.cells, self.num_tokens).logsumexp(-1)
        return torch.where(self.tokens.valid, log_z, 0.0)

    def probs(self, log_z: Tensor) -> Tensor:
        """[N, M] softmax over all candidates of a token."""
        return (self.scores - log_z[self.cells.token_ids].unsqueeze(-1)).exp()

    def routing(
        self, gates: Tensor, max_per_token: int | None, cell_probs: Callable[[], Tensor]
    ) -> CellRouting:
        device = self.scores.device
        log_z = Lazy(device, self.log_z)

        def expert_probs() -> Tensor:
            row_weights = self.tokens.weights[self.cells.token_ids].unsqueeze(-1)
            return sum_over_cells(self.probs(log_z()) * row_weights, self.cells, self.num_experts)

        return CellRouting(
            num_tokens=self.num_tokens,
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
    if scores.shape[0] == scored.num_tokens:  # one row per token: rows can be treated in place
        return top_k_gates(scores, valid[cells.token_ids], top_k)
    flat = by_token(scores, cells, scored.num_tokens)  # [T, R * M]
    gates = top_k_gates(flat, valid, top_k)
    return gates.reshape(scores.shape).index_select(0, cells.order)


def expert_choice(scored: ScoredCells, capacity: Tensor) -> Tensor:
    """Each expert takes its `capacity` most probable tokens among those that may have it.

    The gate is the token's probability over its own candidates. Ties go to the lowest token.
    """
    cells, num_tokens = scored.cells, scored.num_tokens
    probs = scored.probs(scored.log_z())  # [N, M]
    owners = cells.pools[cells.cell_of_row()]  # [N, M]
    with torch.no_grad():
        usable = (probs > 0) & scored.tokens.valid[cells.token_ids].unsqueeze(-1)
        ranked = by_token(torch.where(usable, probs, -1.0), cells, num_tokens).flatten()
        by_prob = ranked.sort(descending=True, stable=True).indices
        experts = by_token(owners, cells, num_tokens).flatten()[by_prob]
        experts, by_expert = experts.sort(stable=True)
        first = torch.searchsorted(
            experts, torch.arange(scored.num_experts, device=experts.device)
        )  # [E]
        place = torch.arange(experts.numel(), device=experts.device) - first[experts]
        taken = torch.zeros(experts.numel(), dtype=torch.bool, device=experts.device)
        taken[by_prob[by_expert]] = place < capacity
        taken = taken.view(probs.shape)[cells.order] & usable
    return probs * taken


def capacity_of(valid: Tensor, top_k: int, num_experts: int, factor: float) -> Tensor:
    """Tokens an expert takes: ceil(T K / E * factor) over the tokens that count."""
    return (valid.sum().double() * top_k / num_experts * factor).ceil().long()
