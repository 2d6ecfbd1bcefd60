"""What a codebook computes: the codeword of each token, the sums that codewords learn from, and how
they move (Alg. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import chunks, operator, own_precision, use_triton, with_kernel

CHUNK_ELEMENTS = 1 << 22
LARGEST = 2**63 - 1  # makes an int64 positive


@torch.no_grad()
@own_precision
@with_kernel(
    "codewords_triton",
    when=lambda _hidden, codewords, **_: codewords.dtype == torch.float32,
    fake=lambda hidden, _, **__: hidden.new_empty(hidden.shape[0], dtype=torch.int64),
)
def assign(hidden: Tensor, codewords: Tensor, *, euclidean: bool) -> Tensor:
    """The nearest codeword of each token: [T] int64 (Alg. 1, lines 2-3).

    hidden [T, D], codewords [G, D] (unit norm unless `euclidean`). Ties go to the lowest id.
    """
    nearest = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    # |h - c|^2 = |h|^2 - 2 (<h, c> - |c|^2 / 2): the token's own norm changes no order.
    offset = codewords.square().sum(-1) / 2 if euclidean else None
    for rows in chunks(hidden.shape[0], max(1, CHUNK_ELEMENTS // codewords.shape[0])):
        similarity = hidden[rows].to(codewords.dtype) @ codewords.T  # [rows, G]
        if offset is not None:
            similarity -= offset
        nearest[rows] = similarity.argmax(-1)  # of equal ones the first
    return nearest


def directions(rows: Tensor) -> Tensor:
    """Rows on the unit sphere however small they are (sums fade without end); 0 stays 0."""
    largest = rows.abs().amax(-1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1.0)
    norms = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1.0)


@torch.no_grad()
@with_kernel("codewords_triton")
def codeword_sums(
    hidden: Tensor, valid: Tensor, codeword_ids: Tensor, num_codewords: int, *, spherical: bool
) -> Tensor:
    """hidden [T, D] (0 where not `valid`), codeword_ids [T] -> [G, D + 1] float32.

    The sum of each codeword's tokens (Alg. 2, lines 2-5), by direction where `spherical`; the last
    column is the number of valid tokens.
    """
    states = directions(hidden.float()) if spherical else hidden.float()
    counted = torch.cat([states, valid.float().unsqueeze(-1)], dim=-1)
    sums = counted.new_zeros(num_codewords, counted.shape[1])
    return sums.index_add_(0, codeword_ids, counted)


@torch.no_grad()
@with_kernel("codewords_triton")
def drawn_tokens(
    hidden: Tensor,
    valid: Tensor,
    keys: Tensor,
    total: Tensor,
    first: Tensor,
    *,
    strata: bool,
    spherical: bool,
) -> Tensor:
    """A token for each of n random keys, drawn from the `total` valid tokens of all ranks.

    With `strata` the i-th is drawn from the i-th of n equal parts of them. This rank's first valid
    token has the number `first`; tokens of other ranks are 0 here. Tokens count by direction where
    `spherical`. -> [n, D] float32.
    """
    num_keys, dim = keys.shape[0], hidden.shape[1]
    if hidden.shape[0] == 0:
        return hidden.new_zeros(num_keys, dim, dtype=torch.float32)
    places = torch.arange(num_keys + 1, device=keys.device)
    borders = places * total // num_keys if strata else torch.stack([total * 0, total])
    # The mask drops the sign. The shift is not needed, but without it other tokens are drawn.
    numbers = borders[:-1] + ((keys & LARGEST) >> 1) % borders.diff().clamp_min(1)
    seen = valid.cumsum(0)  # [T]
    local = numbers - first
    mine = (local >= 0) & (local < seen[-1])
    place = torch.searchsorted(seen, local + 1).clamp_max_(hidden.shape[0] - 1)
    states = hidden[place].float()
    states = directions(states) if spherical else states
    return states.masked_fill(~mine.unsqueeze(-1), 0)


@torch.no_grad()
def move(
    codewords: Tensor,
    counts: Tensor,
    sums: Tensor,
    totals: Tensor,
    num_tokens: Tensor,
    *,
    decay: float,
    dead_below: float,
    euclidean: bool,
) -> None:
    """Alg. 2, lines 6-13, in place: running counts and sums, replacements of dead codewords,
    projection.

    codewords [G, D], counts [G], sums [G, D]; totals [G, 2 D + 1]: of each codeword the sum of its
    tokens, their number, and the token that replaces it if it is dead. Without tokens
    (`num_tokens`, 0-dim) nothing moves.
    """
    if use_triton(codewords):
        state, form = (codewords, counts, sums), (decay, dead_below, euclidean)
        move_codewords(*state, totals, num_tokens, *form)
        return
    dim = codewords.shape[1]
    batch_sums, batch_counts, replacements = totals.split([dim, 1, dim], dim=-1)
    new_counts = counts * decay + batch_counts.squeeze(-1) * (1 - decay)
    new_sums = sums * decay + batch_sums * (1 - decay)
    dead = new_counts < dead_below
    new_counts = new_counts.masked_fill(dead, 1.0)
    new_sums = torch.where(dead.unsqueeze(-1), replacements, new_sums)
    new_codewords = projected(new_sums, new_counts, codewords, euclidean=euclidean)
    some = num_tokens > 0
    codewords.copy_(torch.where(some, new_codewords, codewords))
    counts.copy_(torch.where(some, new_counts, counts))
    sums.copy_(torch.where(some, new_sums, sums))


def projected(sums: Tensor, counts: Tensor, old: Tensor, *, euclidean: bool) -> Tensor:
    """Directions of the sums, or their means if Euclidean; the old ones where there is none."""
    if euclidean:
        empty = (counts == 0).unsqueeze(-1)
        return torch.where(empty, old, sums / counts.unsqueeze(-1))
    return torch.where((sums == 0).all(-1, keepdim=True), old, directions(sums))


move_codewords = operator(
    "move_codewords(Tensor(a!) codewords, Tensor(b!) counts, Tensor(c!) sums, Tensor totals, "
    "Tensor num_tokens, float decay, float dead_below, bool euclidean) -> ()",
    "codewords_triton",
    fake=lambda *_: None,
)
