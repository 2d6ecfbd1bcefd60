"""What a codebook computes: the codeword of each token, the sums that codewords learn from, and how
they move (Alg. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.kernels.backend import chunks, operator, own_precision, use_triton

CHUNK_ELEMENTS = 1 << 22


@torch.no_grad()
@own_precision
def assign(hidden: Tensor, codewords: Tensor, *, euclidean: bool) -> Tensor:
    """The nearest codeword of each token: [T] int64 (Alg. 1, lines 2-3).

    hidden [T, D], codewords [G, D] (unit norm unless `euclidean`). Ties go to the lowest id.
    """
    if codewords.dtype == torch.float32 and use_triton(hidden, codewords):
        return nearest_codeword(hidden, codewords, euclidean)
    nearest = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    # |h - c|^2 = |h|^2 - 2 (<h, c> - |c|^2 / 2): the token's own norm changes no order.
    offset = codewords.square().sum(-1) / 2 if euclidean else None
    for rows in chunks(hidden.shape[0], max(1, CHUNK_ELEMENTS // codewords.shape[0])):
        similarity = hidden[rows].to(codewords.dtype) @ codewords.T  # [rows, G]
        if offset is not None:
            similarity -= offset
        nearest[rows] = similarity.argmax(-1)  # of equal ones the first
    return nearest


nearest_codeword = operator(
    "nearest_codeword(Tensor hidden, Tensor codewords, bool euclidean) -> Tensor",
    "codewords_triton",
    fake=lambda hidden, *_: hidden.new_empty(hidden.shape[0], dtype=torch.int64),
)


def directions(rows: Tensor) -> Tensor:
    """Rows on the unit sphere however small they are (sums fade without end); 0 stays 0."""
    largest = rows.abs().amax(-1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1.0)
    norms = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1.0)


@torch.no_grad()
def codeword_sums(
    hidden: Tensor, valid: Tensor, codeword_ids: Tensor, num_codewords: int, *, spherical: bool
) -> Tensor:
    """hidden [T, D] (0 where not `valid`), codeword_ids [T] -> [G, D + 1] float32.

    The sum of each codeword's tokens (Alg. 2, lines 2-5), by direction where `spherical`; the last
    column is the number of valid tokens.
    """
    if use_triton(hidden):
        return codeword_sums_op(hidden.detach(), valid, codeword_ids, num_codewords, spherical)
    states = hidden.float()
    if spherical:
        states = directions(states)
    counted = torch.cat([states, valid.float().unsqueeze(-1)], dim=-1)
    sums = counted.new_zeros(num_codewords, counted.shape[1])
    return sums.index_add_(0, codeword_ids, counted)


codeword_sums_op = operator(
    "codeword_sums(Tensor hidden, Tensor valid, Tensor codeword_ids, SymInt num_codewords, "
    "bool spherical) -> Tensor",
    "codewords_triton",
    fake=lambda hidden, valid, ids, count, _: hidden.new_empty(
        count, hidden.shape[1] + 1, dtype=torch.float32
    ),
)


@torch.no_grad()
def rows_of_numbers(
    hidden: Tensor, valid: Tensor, numbers: Tensor, first: Tensor, *, spherical: bool
) -> Tensor:
    """Tokens by their number among the valid ones of all ranks: [n, D] float32.

    `first` is the number of this rank's first valid token; other ranks' tokens are 0 here. Tokens
    count by direction where `spherical`.
    """
    if hidden.shape[0] == 0:
        return hidden.new_zeros(numbers.shape[0], hidden.shape[1], dtype=torch.float32)
    if use_triton(hidden):
        return rows_of_numbers_op(hidden.detach(), valid, numbers, first, spherical)
    seen = valid.cumsum(0)  # [T]
    local = numbers - first
    mine = (local >= 0) & (local < seen[-1])
    place = torch.searchsorted(seen, local + 1).clamp_max_(hidden.shape[0] - 1)
    states = hidden[place].float()
    states = directions(states) if spherical else states
    return states.masked_fill(~mine.unsqueeze(-1), 0)


rows_of_numbers_op = operator(
    "rows_of_numbers(Tensor hidden, Tensor valid, Tensor numbers, Tensor first, bool spherical) "
    "-> Tensor",
    "codewords_triton",
    fake=lambda hidden, _valid, numbers, *_: hidden.new_empty(
        numbers.shape[0], hidden.shape[1], dtype=torch.float32
    ),
)


@dataclass(frozen=True)
class CodebookState:
    """Codewords with the running counts and sums of their tokens."""

    codewords: Tensor  # [G, D]
    counts: Tensor  # [G]
    sums: Tensor  # [G, D]


@torch.no_grad()
def moved(
    state: CodebookState,
    totals: Tensor,
    num_tokens: Tensor,
    *,
    decay: float,
    dead_below: float,
    euclidean: bool,
) -> CodebookState:
    """Alg. 2, lines 6-13: running counts and sums, replacements of dead codewords, projection.

    totals [G, 2 D + 1]: of each codeword the sum of its tokens, their number, and the token that
    replaces it if it is dead. Without tokens (`num_tokens`, 0-dim) nothing moves.
    """
    old = state.codewords, state.counts, state.sums
    if use_triton(state.codewords):
        form = decay, dead_below, euclidean
        return CodebookState(*move_codewords_op(*old, totals, num_tokens, *form))
    dim = state.codewords.shape[1]
    batch_sums, batch_counts, spare = totals.split([dim, 1, dim], dim=-1)
    counts = state.counts * decay + batch_counts.squeeze(-1) * (1 - decay)
    sums = state.sums * decay + batch_sums * (1 - decay)
    dead = counts < dead_below
    counts = counts.masked_fill(dead, 1.0)
    sums = torch.where(dead.unsqueeze(-1), spare, sums)
    new = projected(sums, counts, state.codewords, euclidean=euclidean), counts, sums
    some = num_tokens > 0
    return CodebookState(*(torch.where(some, *pair) for pair in zip(new, old, strict=True)))


def projected(sums: Tensor, counts: Tensor, old: Tensor, *, euclidean: bool) -> Tensor:
    """Directions of the sums, or their means if Euclidean; the old ones where there is none."""
    if euclidean:
        empty = (counts == 0).unsqueeze(-1)
        return torch.where(empty, old, sums / counts.unsqueeze(-1))
    return torch.where((sums == 0).all(-1, keepdim=True), old, directions(sums))


move_codewords_op = operator(
    "move_codewords(Tensor codewords, Tensor counts, Tensor sums, Tensor totals, "
    "Tensor num_tokens, float decay, float dead_below, bool euclidean) -> (Tensor, Tensor, Tensor)",
    "codewords_triton",
    fake=lambda codewords, counts, sums, *_: tuple(
        map(torch.empty_like, (codewords, counts, sums))
    ),
)
