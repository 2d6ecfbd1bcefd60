"""The softmax over all experts, some tokens at a time: log Z, mean probabilities, gradients.

A chunk of tokens has its scores [tokens, E] in memory, 256 MiB of them, because making a score
again, a product as exact as float32 and jitter, costs more than writing and reading it.

    forward   1. scores, and the log-sum-exp of every row of a tile
              2. log Z from those of all tiles
              3. probabilities summed over the chunk's tokens
    backward  1. probabilities, and with the gradient of their means a_t = sum_e g_e p_te
              2. grad_te = p_te (g_z + weight_t (g_e - a_t)), times experts, over slices of experts
              3. the same, times tokens, added to what earlier chunks gave

The gradient of a score exists in registers only. All sums have a fixed order.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from airmoe.kernels.backend import chunks
from airmoe.kernels.best_experts_triton import exact_tables
from airmoe.kernels.device_triton import as_stored, block_size, part_dtype
from airmoe.kernels.norms_triton import inverse_norms
from airmoe.kernels.softmax_kernels_triton import (
    expert_grads_kernel,
    hidden_grads_kernel,
    log_z_kernel,
    mean_kernel,
    project_kernel,
    tile_kernel,
)

CHUNK_ELEMENTS = 1 << 26  # scores that exist at once: 256 MiB
COLUMNS = 128  # their rows are padded to multiples of it
PROGRAMS = 2 * 132  # enough to fill the device
ROW_ELEMENTS = 2048  # of whole rows, in one program
Jitter = tuple[Tensor | None, float]  # row keys [T], if any, and the standard deviation
# What the gradient of a chunk's scores is made of, beside their probabilities: g_z - weight a
# [tokens], weights [tokens], and the gradient of the means [E].
Upstream = tuple[Tensor, Tensor, Tensor]
TILE_REGISTERS = 168  # three programs of four warps share a multiprocessor


def _parts(table: Tensor, dtype: torch.dtype, *, whole: bool = False) -> tuple[int, bool]:
    """How many parts a number of the table [parts, N, D] has for the matrix units, and whether they
    are cut out of it where it is used. `whole` numbers are multiplied as they are."""
    if table.shape[0] > 1 or dtype == torch.bfloat16 or whole:
        return table.shape[0], False
    return 2 if dtype == torch.float16 else 3, True


class Chunks:
    """Tokens, some at a time, times all experts."""

    def __init__(self, hidden: Tensor, experts: Tensor, noise: Jitter, *, normalize: bool) -> None:
        (self.num_tokens, self.dim), self.num_experts = hidden.shape, experts.shape[0]
        self.hidden, self.experts, self.noise = hidden, experts, noise
        self.scales = inverse_norms(experts) if normalize else None
        self.tables = exact_tables(hidden, experts)
        whole = hidden.dtype == experts.dtype == torch.float16
        self.hidden_parts, self.hidden_cut = _parts(self.tables.rows, hidden.dtype, whole=whole)
        self.expert_parts, self.expert_cut = _parts(self.tables.columns, experts.dtype, whole=whole)
        self.columns = triton.cdiv(self.num_experts, COLUMNS) * COLUMNS
        self.step, self.block_rows = self._sizes()
        rows = triton.cdiv(self.step, self.block_rows) * self.block_rows
        self.buffer = self.empty(rows, self.columns)  # scores or probabilities
        self.config = self._tile_config()
        tiles = self.columns // self.config["BLOCK_C"]
        self.tile_sums, self.tile_peaks = self.empty(rows, tiles), self.empty(rows, tiles)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.hidden.device)

    def _sizes(self) -> tuple[int, int]:
        """Tokens per chunk and per tile."""
        most = max(1, CHUNK_ELEMENTS // self.columns)
        step = min(self.num_tokens, most // 128 * 128 if most > 128 else most)
        return step, block_size(step, 128)

    def slices(self) -> Iterator[slice]:
        return chunks(self.num_tokens, self.step)

    def _tile_config(self) -> dict[str, int]:
        """Three programs share a multiprocessor: one multiplies while others jitter."""
        products = self.hidden_parts * self.expert_parts
        return {
            "BLOCK_C": 64, "BLOCK_D": block_size(self.dim, 64 if products == 1 else 32),
            "num_warps": 4, "num_stages": 2 if products > 3 else 3, "maxnreg": TILE_REGISTERS,
        }  # fmt: skip

    def _run_tiles(self, chunk: slice, log_z: Tensor | None, grad_mean: Tensor | None) -> None:
        rows, columns = self.tables.rows[:, chunk], self.tables.columns
        (row_keys, noise_std), num_tokens = self.noise, rows.shape[1]
        grid = triton.cdiv(num_tokens, self.block_rows) * (self.columns // self.config["BLOCK_C"])
        tile_kernel[(grid,)](
            rows, columns, self.scales, None if row_keys is None else row_keys[chunk],
            log_z, grad_mean, self.buffer, self.tile_sums, self.tile_peaks,
            num_tokens, self.num_experts, self.dim, rows.stride(0), columns.stride(0),
            self.columns, noise_std,
            DIM=self.dim, HIDDEN_PARTS=self.hidden_parts, EXPERT_PARTS=self.expert_parts,
            HIDDEN_CUT=self.hidden_cut, EXPERT_CUT=self.expert_cut,
            BLOCK_R=self.block_rows, PART=part_dtype(), **self.config,
        )  # fmt: skip

    def score(self, chunk: slice, log_z: Tensor) -> None:
        """Scores of a chunk into the buffer, and their log Z into log_z [tokens]."""
        self._run_tiles(chunk, None, None)
        num_tiles = self.tile_sums.shape[1]
        block = min(1024, triton.next_power_of_2(num_tiles))
        rows = max(1, ROW_ELEMENTS // block)
        log_z_kernel[(triton.cdiv(log_z.shape[0], rows),)](
            self.tile_sums, self.tile_peaks, log_z, log_z.shape[0], num_tiles,
            ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip

    def mean_splits(self) -> int:
        """Into how many the tokens of a chunk are cut, so that programs are enough."""
        blocks = self.columns // COLUMNS
        return max(1, min(triton.cdiv(PROGRAMS, blocks), triton.cdiv(self.step, 128)))

    def add_probs(self, chunk: slice, log_z: Tensor, weights: Tensor, mean: Tensor) -> None:
        """mean [splits, E] float64 += weighted probabilities of the scores in the buffer."""
        num_tokens = chunk.stop - chunk.start
        mean_kernel[(self.columns // COLUMNS, mean.shape[0])](
            self.buffer, log_z, weights, mean, num_tokens, self.num_experts, self.columns,
            triton.cdiv(num_tokens, mean.shape[0]),
            BLOCK_T=16, BLOCK_E=COLUMNS, STAGES=4, num_warps=4,
        )  # fmt: skip

    def find_probs(self, chunk: slice, log_z: Tensor, grad_mean: Tensor) -> Tensor:
        """Probabilities of a chunk into the buffer; their mean of grad_mean: [tokens]."""
        self._run_tiles(chunk, log_z, grad_mean)
        return self.tile_sums[: chunk.stop - chunk.start].sum(-1)

    def hidden_grads(self, upstream: Upstream, grad_hidden: Tensor) -> None:
        """Gradient of a chunk's hidden states from the probabilities in the buffer."""
        table, num_tokens = self.tables.columns, grad_hidden.shape[0]
        parts, cut = _parts(table, self.experts.dtype)
        config = self._grads_config()
        tiles = (triton.cdiv(self.dim, config["BLOCK_D"]), triton.cdiv(num_tokens, self.block_rows))
        steps = triton.cdiv(self.num_experts, config["BLOCK_K"])
        steps_per_split = triton.cdiv(steps, min(steps, triton.cdiv(PROGRAMS, math.prod(tiles))))
        splits = triton.cdiv(steps, steps_per_split)
        partial = self.empty(splits, num_tokens, self.dim)
        hidden_grads_kernel[(*tiles, splits)](
            self.buffer, table, self.scales, *upstream, partial,
            num_tokens, self.num_experts, table.stride(0), self.columns,
            steps_per_split * config["BLOCK_K"],
            DIM=self.dim, PARTS=parts, CUT=cut,
            REACH=3 if grad_hidden.dtype == torch.float32 else 2,
            BLOCK_R=self.block_rows, PART=part_dtype(), **config,
        )  # fmt: skip
        grad_hidden.copy_(partial.sum(0))

    def expert_grads(self, chunk: slice, upstream: Upstream, sums: Tensor) -> None:
        """sums [E, D] += a chunk's gradients of the scores times its hidden states."""
        rows = self.tables.rows[:, chunk]
        parts, cut = _parts(rows, self.hidden.dtype)
        config = self._grads_config()
        config["BLOCK_K"] = min(config["BLOCK_K"], self.block_rows)  # the buffer has no more rows
        grid = triton.cdiv(self.dim, config["BLOCK_D"]) * (self.columns // COLUMNS)
        expert_grads_kernel[(grid,)](
            self.buffer, rows, *upstream, sums,
            rows.shape[1], self.num_experts, rows.stride(0), self.columns, int(chunk.start == 0),
            DIM=self.dim, PARTS=parts, CUT=cut,
            BLOCK_E=COLUMNS, PART=part_dtype(), **config,
        )  # fmt: skip

    def _grads_config(self) -> dict[str, int]:
        depth = block_size(self.dim, 128)
        return {"BLOCK_K": 64, "BLOCK_D": depth, "num_warps": 8, "num_stages": 2}

    def project(self, sums: Tensor) -> Tensor:
        """The gradient of the experts from that of the rows they were multiplied as."""
        if self.scales is None:
            return sums.to(self.experts.dtype)
        found = torch.empty(self.experts.shape, dtype=self.experts.dtype, device=sums.device)
        width = max(16, triton.next_power_of_2(self.dim))
        rows = max(1, ROW_ELEMENTS // width)
        project_kernel[(triton.cdiv(self.num_experts, rows),)](
            sums, as_stored(self.experts), self.scales, found, self.num_experts,
            DIM=self.dim, ROWS=rows, WIDTH=width, num_warps=4,
        )  # fmt: skip
        return found


def softmax_summary(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    row_keys: Tensor | None,
    noise_std: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """log Z [T] and mean probabilities [E], float32."""
    hidden, experts, weights = hidden.contiguous(), experts.contiguous(), weights.float()
    weights, noise = weights.contiguous(), (row_keys, noise_std)
    log_z = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    if hidden.shape[0] == 0:
        return log_z, log_z.new_zeros(experts.shape[0])
    chunks = Chunks(hidden, experts, noise, normalize=normalize)
    # Sums over chunks in double: chunking must not cost accuracy.
    shape = (chunks.mean_splits(), experts.shape[0])
    mean = torch.zeros(shape, dtype=torch.float64, device=hidden.device)
    for chunk in chunks.slices():
        chunks.score(chunk, log_z[chunk])
        chunks.add_probs(chunk, log_z[chunk], weights[chunk], mean)
    return log_z, mean.sum(0).float()


def softmax_summary_backward(call: Any, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of the wanted of hidden and experts."""
    hidden, experts, log_z = call.hidden.contiguous(), call.experts.contiguous(), call.log_z
    weights, grad_log_z, grad_mean = call.weights.float(), call.grad_log_z, call.grad_mean_probs
    weights = weights.contiguous()
    grad_log_z = torch.zeros_like(log_z) if grad_log_z is None else grad_log_z
    grad_mean = log_z.new_zeros(experts.shape[0]) if grad_mean is None else grad_mean
    if hidden.shape[0] == 0:
        return {"hidden": torch.empty_like(hidden), "experts": torch.zeros_like(experts)}
    # Rows that get no gradient may hold anything; as 0 they spoil nothing that all share.
    idle = (weights == 0) & (grad_log_z == 0)
    hidden, log_z = hidden.masked_fill(idle.unsqueeze(-1), 0), log_z.masked_fill(idle, 0)
    # A constant in it moves nothing; without it less is lost in the difference to its mean.
    grad_mean = grad_mean - grad_mean.mean()
    noise = call.row_keys, call.noise_std
    chunks = Chunks(hidden, experts, noise, normalize=call.normalize)
    found = {"hidden": torch.empty_like(hidden)} if "hidden" in wanted else {}
    sums = chunks.empty(*experts.shape) if "experts" in wanted else None
    for chunk in chunks.slices():
        inner = chunks.find_probs(chunk, log_z[chunk], grad_mean)
        bases = torch.addcmul(grad_log_z[chunk], weights[chunk], inner, value=-1)
        upstream = (bases, weights[chunk], grad_mean)
        if "hidden" in found:
            chunks.hidden_grads(upstream, found["hidden"][chunk])
        if sums is not None:
            chunks.expert_grads(chunk, upstream, sums)
    if sums is not None:
        found["experts"] = chunks.project(sums)
    return found
