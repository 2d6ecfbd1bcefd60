"""The softmax over all experts, some tokens at a time: log Z, mean probabilities, gradients.

A chunk of tokens has its scores [tokens, E] in memory, 256 MiB of them, because making a score
again, a product as exact as float32 and jitter, costs more than writing and reading it.

    forward   1. scores, and the log-sum-exp of every row of a tile
              2. log Z from those of all tiles
              3. probabilities summed over the chunk's tokens
    backward  1. probabilities, and with the gradient of their means a_t = sum_e g_e p_te
              2. grad_te = p_te (g_z + weight_t (g_e - a_t)), times experts, over slices of experts
              3. the same, times tokens, added to what earlier chunks gave

The gradient of a score exists in registers only. Like every float32 number here it is cut into
bfloat16 parts for the matrix units; products are taken of blocks and added up outside of them, for
they cut off what they add. All sums have a fixed order.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none, reportOperatorIssue=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.assign.triton import upper_half
from airmoe.kernels.cells.dot_triton import part_dtype
from airmoe.kernels.chosen_logits.triton import store_projected
from airmoe.kernels.dense.triton import exact_tables
from airmoe.kernels.inverse_norms.triton import inverse_norms_op
from airmoe.kernels.noise import Noise
from airmoe.kernels.noise.triton import normal

CHUNK_ELEMENTS = 1 << 26  # scores that exist at once: 256 MiB
COLUMNS = 128  # their rows are padded to multiples of it
PROGRAMS = 2 * 132  # enough to fill the device
TILE_REGISTERS = 168  # three programs of four warps share a multiprocessor
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _load_parts(
    at, stride, mask, PARTS: tl.constexpr, CUT: tl.constexpr, MASKED: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """The three parts of a tile: as they are stored, or cut out of it. Absent ones repeat one."""
    if MASKED:
        first = tl.load(at, mask=mask, other=0.0)
    else:
        first = tl.load(at)
    second, third = first, first
    if CUT:
        first, second, third = _cut(first.to(tl.float32), PART)
    elif PARTS == 3:
        if MASKED:
            second = tl.load(at + stride, mask=mask, other=0.0)
            third = tl.load(at + 2 * stride, mask=mask, other=0.0)
        else:
            second = tl.load(at + stride)
            third = tl.load(at + 2 * stride)
    return first, second, third


@triton.jit
def _cut(values, PART: tl.constexpr):
    """float32 as three bfloat16 numbers that add up to it, the largest first."""
    first = upper_half(values)
    rest = values - first
    second = upper_half(rest)
    return first.to(PART), second.to(PART), (rest - second).to(PART)


@triton.jit
def _product(
    left_1, left_2, left_3, right_1, right_2, right_3,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Of LEFT x RIGHT parts the pairs that matter, the small ones first.

    With REACH 3 what a float32's last bit needs, with REACH 2 what 16 bits need.
    """
    product = tl.zeros((left_1.shape[0], right_1.shape[1]), tl.float32)
    if REACH == 3:
        if LEFT == 3:
            product = tl.dot(left_3, right_1, product)
        if RIGHT == 3:
            product = tl.dot(left_1, right_3, product)
        if LEFT > 1 and RIGHT > 1:
            product = tl.dot(left_2, right_2, product)
    if LEFT > 1:
        product = tl.dot(left_2, right_1, product)
    if RIGHT > 1:
        product = tl.dot(left_1, right_2, product)
    return tl.dot(left_1, right_1, product)


@triton.jit
def _scores(
    hidden, experts, scales, row_keys, row, column, num_tokens, num_experts,
    hidden_stride, expert_stride, noise_std,
    DIM: tl.constexpr, HIDDEN_PARTS: tl.constexpr, EXPERT_PARTS: tl.constexpr,
    HIDDEN_CUT: tl.constexpr, EXPERT_CUT: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_NOISE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, BLOCK_C] scores. Rows and columns that are none repeat the last one."""
    # No masks but at the end of the depth: they would stand in the way of wide copies.
    row = tl.minimum(row, num_tokens - 1)
    column = tl.minimum(column, num_experts - 1)
    depth = tl.arange(0, BLOCK_D)
    rows_at = hidden + row.to(tl.int64)[:, None] * DIM + depth[None, :]
    columns_at = experts + column.to(tl.int64)[None, :] * DIM + depth[:, None]
    scores = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, DIM, BLOCK_D):
        inside = depth < DIM - start
        left_1, left_2, left_3 = _load_parts(
            rows_at + start, hidden_stride, inside[None, :],
            HIDDEN_PARTS, HIDDEN_CUT, DIM % BLOCK_D != 0, PART,
        )  # fmt: skip
        right_1, right_2, right_3 = _load_parts(
            columns_at + start, expert_stride, inside[:, None],
            EXPERT_PARTS, EXPERT_CUT, DIM % BLOCK_D != 0, PART,
        )  # fmt: skip
        scores += _product(
            left_1, left_2, left_3, right_1, right_2, right_3, HIDDEN_PARTS, EXPERT_PARTS, 3
        )
    if HAS_SCALES:
        scores *= tl.load(scales + column)[None, :]
    if HAS_NOISE:
        keys = tl.load(row_keys + row)
        scores += normal(keys[:, None], column[None, :]) * noise_std
    return scores


@triton.jit
def _tile_kernel(
    hidden, experts, scales, row_keys, log_z, grad_mean, chunk, tile_sums, tile_peaks,
    num_tokens, num_experts, hidden_stride, expert_stride, chunk_stride, noise_std,
    PROBS: tl.constexpr, DIM: tl.constexpr,
    HIDDEN_PARTS: tl.constexpr, EXPERT_PARTS: tl.constexpr,
    HIDDEN_CUT: tl.constexpr, EXPERT_CUT: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_NOISE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(num_tokens, BLOCK_R)
    # Neighbouring programs share their experts: the larger table is read once.
    block = tl.program_id(0) // row_blocks
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    column = block * BLOCK_C + tl.arange(0, BLOCK_C)
    scores = _scores(
        hidden, experts, scales, row_keys, row, column, num_tokens, num_experts,
        hidden_stride, expert_stride, noise_std,
        DIM, HIDDEN_PARTS, EXPERT_PARTS, HIDDEN_CUT, EXPERT_CUT, HAS_SCALES, HAS_NOISE,
        BLOCK_R, BLOCK_C, BLOCK_D, PART,
    )  # fmt: skip
    scores = tl.where((column < num_experts)[None, :], scores, -INFINITY)
    at = chunk + row.to(tl.int64)[:, None] * chunk_stride + column[None, :]
    tile = row * (chunk_stride // BLOCK_C) + block
    if PROBS:
        shift = tl.load(log_z + row, mask=row < num_tokens, other=INFINITY)  # no row: 0
        probs = tl.exp(scores - shift[:, None])
        grads = tl.load(grad_mean + column, mask=column < num_experts, other=0.0)
        tl.store(at, probs)
        tl.store(tile_sums + tile, tl.sum(probs * grads[None, :], axis=1))
    else:
        # A tile may be all padding. NaN is no peak, but the sum has it.
        peak = tl.maximum(tl.max(scores, axis=1), -FLOAT32_MAX)
        tl.store(at, scores)
        tl.store(tile_peaks + tile, peak)
        tl.store(tile_sums + tile, tl.sum(tl.exp(scores - peak[:, None]), axis=1))


@triton.jit
def _log_z_kernel(tile_sums, tile_peaks, log_z, num_tiles, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), -FLOAT32_MAX, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_tiles, BLOCK):
        tile = start + lane
        at = row * num_tiles + tile
        peak = tl.load(tile_peaks + at, mask=tile < num_tiles, other=-FLOAT32_MAX)
        more = tl.load(tile_sums + at, mask=tile < num_tiles, other=0.0)
        higher = tl.maximum(peaks, peak)
        sums = sums * tl.exp(peaks - higher) + more * tl.exp(peak - higher)
        peaks = higher
    peak = tl.max(peaks, axis=0)
    total = tl.sum(sums * tl.exp(peaks - peak), axis=0)
    tl.store(log_z + row, peak + tl.log(total))


@triton.jit
def _mean_kernel(
    chunk, log_z, weights, mean, num_tokens, num_experts, chunk_stride, tokens_per_split,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    first = tl.program_id(1) * tokens_per_split
    last = tl.minimum(first + tokens_per_split, num_tokens)
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_T)
        weight = tl.load(weights + row, mask=row < last, other=0.0)
        shift = tl.load(log_z + row, mask=row < last, other=0.0)
        counts = (weight != 0)[:, None]  # what does not count may hold anything
        at = chunk + row.to(tl.int64)[:, None] * chunk_stride + column[None, :]
        scores = tl.load(at, mask=counts, other=0.0)
        total += tl.where(counts, tl.exp(scores - shift[:, None]) * weight[:, None], 0.0)
    place = mean + tl.program_id(1).to(tl.int64) * num_experts + column
    real = column < num_experts
    so_far = tl.load(place, mask=real, other=0.0)
    tl.store(place, so_far + tl.sum(total, axis=0).to(tl.float64), mask=real)


@triton.jit
def _hidden_grads_kernel(
    chunk, experts, scales, bases, weights, grad_mean, partial,
    num_tokens, num_experts, expert_stride, chunk_stride, experts_per_split,
    DIM: tl.constexpr, PARTS: tl.constexpr, CUT: tl.constexpr, REACH: tl.constexpr,
    HAS_SCALES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    depth = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = tl.program_id(2) * experts_per_split
    last = tl.minimum(first + experts_per_split, num_experts)
    lane = tl.arange(0, BLOCK_K)
    base = tl.load(bases + row, mask=row < num_tokens, other=0.0)[:, None]
    weight = tl.load(weights + row, mask=row < num_tokens, other=0.0)[:, None]
    rows_at = chunk + row.to(tl.int64)[:, None] * chunk_stride
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_K):
        column = start + lane
        real = column < num_experts  # the padding has probability 0
        towards = tl.load(grad_mean + column, mask=real, other=0.0)[None, :]
        grads = tl.load(rows_at + column[None, :]) * (base + weight * towards)
        if HAS_SCALES:
            grads *= tl.load(scales + column, mask=real, other=0.0)[None, :]
        left_1, left_2, left_3 = _cut(grads, PART)
        table_row = tl.minimum(column, num_experts - 1).to(tl.int64)
        right_1, right_2, right_3 = _load_parts(
            experts + table_row[:, None] * DIM + depth[None, :], expert_stride,
            (depth < DIM)[None, :], PARTS, CUT, DIM % BLOCK_D != 0, PART,
        )  # fmt: skip
        total += _product(left_1, left_2, left_3, right_1, right_2, right_3, 3, PARTS, REACH)
    place = (tl.program_id(2) * num_tokens + row).to(tl.int64)[:, None] * DIM + depth[None, :]
    tl.store(partial + place, total, mask=(row < num_tokens)[:, None] & (depth < DIM)[None, :])


@triton.jit
def _expert_grads_kernel(
    chunk, hidden, bases, weights, grad_mean, sums,
    num_tokens, num_experts, hidden_stride, chunk_stride, first_chunk,
    DIM: tl.constexpr, PARTS: tl.constexpr, CUT: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    depth = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    column = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    lane = tl.arange(0, BLOCK_K)
    real = column < num_experts
    towards = tl.load(grad_mean + column, mask=real, other=0.0)[None, :]
    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for start in range(0, num_tokens, BLOCK_K):
        row = start + lane
        base = tl.load(bases + row, mask=row < num_tokens, other=0.0)[:, None]
        weight = tl.load(weights + row, mask=row < num_tokens, other=0.0)[:, None]
        at = chunk + row.to(tl.int64)[:, None] * chunk_stride + column[None, :]
        grads = tl.load(at) * (base + weight * towards)
        left_1, left_2, left_3 = _cut(grads, PART)
        token = tl.minimum(row, num_tokens - 1).to(tl.int64)
        right_1, right_2, right_3 = _load_parts(
            hidden + token[:, None] * DIM + depth[None, :], hidden_stride,
            (depth < DIM)[None, :], PARTS, CUT, DIM % BLOCK_D != 0, PART,
        )  # fmt: skip
        total += _product(
            tl.trans(left_1), tl.trans(left_2), tl.trans(left_3), right_1, right_2, right_3,
            3, PARTS, 3,
        )  # fmt: skip
    place = sums + column.to(tl.int64)[:, None] * DIM + depth[None, :]
    mask = real[:, None] & (depth < DIM)[None, :]
    if first_chunk == 0:
        total += tl.load(place, mask=mask, other=0.0)
    tl.store(place, total, mask=mask)


@triton.jit
def _project_kernel(sums, table, out, DIM: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    total = tl.load(sums + row * DIM + columns, mask=columns < DIM, other=0.0)
    store_projected(total, table, out, row, columns, DIM, True)


@dataclass(frozen=True)
class _Operand:
    """A table as the matrix units take it."""

    table: Tensor  # [count, N, D], or [1, N, D] to be cut
    count: int  # parts of a number
    cut: bool  # out of the number where it is used, or stored as parts

    @classmethod
    def of(cls, table: Tensor, dtype: torch.dtype, *, whole: bool) -> _Operand:
        """`whole`: numbers are multiplied as they are, if they are not stored in parts."""
        if table.shape[0] > 1 or dtype == torch.bfloat16 or whole:
            return cls(table, table.shape[0], False)
        return cls(table, 2 if dtype == torch.float16 else 3, True)


class Chunks:
    """Tokens, some at a time, times all experts."""

    def __init__(
        self, hidden: Tensor, experts: Tensor, noise: Noise | None, *, normalize: bool
    ) -> None:
        (self.num_tokens, self.dim), self.num_experts = hidden.shape, experts.shape[0]
        self.hidden, self.experts, self.noise = hidden, experts, noise
        self.scales = inverse_norms_op(experts) if normalize else None
        self.tables = exact_tables(hidden, experts)
        self.columns = triton.cdiv(self.num_experts, COLUMNS) * COLUMNS
        self.step, self.block_rows = self._sizes()
        rows = triton.cdiv(self.step, self.block_rows) * self.block_rows
        self.buffer = self._empty(rows, self.columns)  # scores or probabilities
        self.config = self._tile_config()
        tiles = self.columns // self.config["BLOCK_C"]
        self.tile_sums, self.tile_peaks = self._empty(rows, tiles), self._empty(rows, tiles)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.hidden.device)

    def _sizes(self) -> tuple[int, int]:
        """Tokens per chunk and per tile."""
        most = max(1, CHUNK_ELEMENTS // self.columns)
        step = min(self.num_tokens, most // 128 * 128 if most > 128 else most)
        return step, min(128, max(16, triton.next_power_of_2(step)))

    def slices(self) -> list[slice]:
        total, step = self.num_tokens, self.step
        return [slice(start, min(start + step, total)) for start in range(0, total, step)]

    def _operands(self, *, together: bool) -> tuple[_Operand, _Operand]:
        """Of tokens and experts. Multiplied `together`, two tables of float16 are left whole."""
        whole = together and self.hidden.dtype == self.experts.dtype == torch.float16
        return (
            _Operand.of(self.tables.rows, self.hidden.dtype, whole=whole),
            _Operand.of(self.tables.columns, self.experts.dtype, whole=whole),
        )

    def _tile_config(self) -> dict[str, int]:
        """Three programs share a multiprocessor: one multiplies while others jitter."""
        tokens, experts = self._operands(together=True)
        single = tokens.count * experts.count == 1
        depth = min(64 if single else 32, max(16, triton.next_power_of_2(self.dim)))
        return {
            "BLOCK_C": 64, "BLOCK_D": depth,
            "num_warps": 4, "num_stages": 2 if tokens.count * experts.count > 3 else 3,
            "maxnreg": TILE_REGISTERS,
        }  # fmt: skip

    def _run_tiles(self, chunk: slice, log_z: Tensor | None, grad_mean: Tensor | None) -> None:
        tokens, experts = self._operands(together=True)
        rows = tokens.table[:, chunk]
        noise, num_tokens = self.noise, rows.shape[1]
        grid = triton.cdiv(num_tokens, self.block_rows) * (self.columns // self.config["BLOCK_C"])
        _tile_kernel[(grid,)](
            rows, experts.table, self.scales, None if noise is None else noise.row_keys[chunk],
            log_z, grad_mean, self.buffer, self.tile_sums, self.tile_peaks,
            num_tokens, self.num_experts, rows.stride(0), experts.table.stride(0), self.columns,
            0.0 if noise is None else noise.std,
            PROBS=log_z is not None, DIM=self.dim,
            HIDDEN_PARTS=tokens.count, EXPERT_PARTS=experts.count,
            HIDDEN_CUT=tokens.cut, EXPERT_CUT=experts.cut,
            HAS_SCALES=self.scales is not None, HAS_NOISE=noise is not None,
            BLOCK_R=self.block_rows, PART=part_dtype(), **self.config,
        )  # fmt: skip

    def score(self, chunk: slice, log_z: Tensor) -> None:
        """Scores of a chunk into the buffer, and their log Z into log_z [tokens]."""
        self._run_tiles(chunk, None, None)
        num_tiles = self.tile_sums.shape[1]
        block = min(1024, triton.next_power_of_2(num_tiles))
        _log_z_kernel[(log_z.shape[0],)](
            self.tile_sums, self.tile_peaks, log_z, num_tiles,
            BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip

    def mean_splits(self) -> int:
        """Into how many the tokens of a chunk are cut, so that programs are enough."""
        blocks = self.columns // COLUMNS
        return max(1, min(triton.cdiv(PROGRAMS, blocks), triton.cdiv(self.step, 128)))

    def add_probs(self, chunk: slice, log_z: Tensor, weights: Tensor, mean: Tensor) -> None:
        """mean [splits, E] float64 += weighted probabilities of the scores in the buffer."""
        num_tokens = chunk.stop - chunk.start
        _mean_kernel[(self.columns // COLUMNS, mean.shape[0])](
            self.buffer, log_z, weights, mean, num_tokens, self.num_experts, self.columns,
            triton.cdiv(num_tokens, mean.shape[0]),
            BLOCK_T=16, BLOCK_E=COLUMNS, STAGES=4, num_warps=4,
        )  # fmt: skip

    def find_probs(self, chunk: slice, log_z: Tensor, grad_mean: Tensor) -> Tensor:
        """Probabilities of a chunk into the buffer; their mean of grad_mean: [tokens]."""
        self._run_tiles(chunk, log_z, grad_mean)
        return self.tile_sums[: chunk.stop - chunk.start].sum(-1)

    def hidden_grads(self, upstream: _Upstream, grad_hidden: Tensor) -> None:
        """Gradient of a chunk's hidden states from the probabilities in the buffer."""
        experts = self._operands(together=False)[1]
        num_tokens = grad_hidden.shape[0]
        config = self._grads_config()
        tiles = triton.cdiv(self.dim, config["BLOCK_D"]) * triton.cdiv(num_tokens, self.block_rows)
        steps = triton.cdiv(self.num_experts, config["BLOCK_K"])
        steps_per_split = triton.cdiv(steps, min(steps, triton.cdiv(PROGRAMS, tiles)))
        splits = triton.cdiv(steps, steps_per_split)
        partial = self._empty(splits, num_tokens, self.dim)
        grid = (
            triton.cdiv(self.dim, config["BLOCK_D"]),
            triton.cdiv(num_tokens, self.block_rows),
            splits,
        )
        _hidden_grads_kernel[grid](
            self.buffer, experts.table, self.scales, *upstream.arguments(), partial,
            num_tokens, self.num_experts, experts.table.stride(0), self.columns,
            steps_per_split * config["BLOCK_K"],
            DIM=self.dim, PARTS=experts.count, CUT=experts.cut,
            REACH=3 if grad_hidden.dtype == torch.float32 else 2,
            HAS_SCALES=self.scales is not None, BLOCK_R=self.block_rows, PART=part_dtype(),
            **config,
        )  # fmt: skip
        grad_hidden.copy_(partial.sum(0))

    def expert_grads(self, chunk: slice, upstream: _Upstream, sums: Tensor) -> None:
        """sums [E, D] += a chunk's gradients of the scores times its hidden states."""
        tokens = self._operands(together=False)[0]
        rows = tokens.table[:, chunk]
        config = self._grads_config()
        config["BLOCK_K"] = min(config["BLOCK_K"], self.block_rows)  # the buffer has no more rows
        grid = (triton.cdiv(self.dim, config["BLOCK_D"]), self.columns // COLUMNS)
        _expert_grads_kernel[grid](
            self.buffer, rows, *upstream.arguments(), sums,
            rows.shape[1], self.num_experts, rows.stride(0), self.columns, int(chunk.start == 0),
            DIM=self.dim, PARTS=tokens.count, CUT=tokens.cut,
            BLOCK_E=COLUMNS, PART=part_dtype(), **config,
        )  # fmt: skip

    def _grads_config(self) -> dict[str, int]:
        depth = min(128, max(16, triton.next_power_of_2(self.dim)))
        return {"BLOCK_K": 64, "BLOCK_D": depth, "num_warps": 8, "num_stages": 2}

    def project(self, sums: Tensor) -> Tensor:
        """The gradient of the experts from that of the rows they were multiplied as."""
        if self.scales is None:
            return sums.to(self.experts.dtype)
        found = torch.empty_like(self.experts)
        width = max(16, triton.next_power_of_2(self.dim))
        _project_kernel[(self.num_experts,)](
            sums, self.experts, found, DIM=self.dim, WIDTH=width,
            num_warps=max(1, min(8, width // 256)),
        )  # fmt: skip
        return found


@dataclass(frozen=True)
class _Upstream:
    """What the gradient of a chunk's scores is made of, beside their probabilities."""

    bases: Tensor  # [tokens] g_z - weight a
    weights: Tensor  # [tokens]
    grad_mean: Tensor  # [E]

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.bases, self.weights, self.grad_mean


def summarize(
    hidden: Tensor, experts: Tensor, weights: Tensor, noise: Noise | None, normalize: bool
) -> tuple[Tensor, Tensor]:
    """log Z [T] and mean probabilities [E], float32."""
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


def gradients(
    grad_log_z: Tensor,
    grad_mean: Tensor,
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    log_z: Tensor,
    noise: Noise | None,
    *,
    normalize: bool,
    want_hidden: bool,
    want_experts: bool,
) -> list[Tensor]:
    """Gradients of those of (hidden, experts) that are wanted, each in its dtype."""
    grad_hidden = torch.empty_like(hidden) if want_hidden else None
    if hidden.shape[0] == 0:
        grad_experts = torch.zeros_like(experts) if want_experts else None
        return [grad for grad in (grad_hidden, grad_experts) if grad is not None]
    # Rows that get no gradient may hold anything; as 0 they spoil nothing that all share.
    idle = (weights == 0) & (grad_log_z == 0)
    hidden, log_z = hidden.masked_fill(idle.unsqueeze(-1), 0), log_z.masked_fill(idle, 0)
    # A constant in it moves nothing; without it less is lost in the difference to its mean.
    grad_mean = grad_mean - grad_mean.mean()
    chunks = Chunks(hidden, experts, noise, normalize=normalize)
    sums = chunks._empty(*experts.shape) if want_experts else None
    for chunk in chunks.slices():
        inner = chunks.find_probs(chunk, log_z[chunk], grad_mean)
        bases = torch.addcmul(grad_log_z[chunk], weights[chunk], inner, value=-1)
        upstream = _Upstream(bases, weights[chunk], grad_mean)
        if grad_hidden is not None:
            chunks.hidden_grads(upstream, grad_hidden[chunk])
        if sums is not None:
            chunks.expert_grads(chunk, upstream, sums)
    grad_experts = None if sums is None else chunks.project(sums)
    return [grad for grad in (grad_hidden, grad_experts) if grad is not None]
