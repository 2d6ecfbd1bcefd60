"""The loss and its gradients on a GPU: a chunk's logits are overwritten by their own gradient.

Per chunk of tokens: the logits by one product, then one program per row that reads it twice (the
sum of exponentials; softmax minus one-hot, written in place) while it is still in the cache, then
two products for the gradients, whose sums are float32 from the first chunk to the last.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportOptionalMemberAccess=none
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import chunks
from airmoe.kernels.device_triton import INFINITY
from airmoe.kernels.linear_cross_entropy import (
    IGNORE_INDEX,
    chunk_bytes,
    gradient_dtype,
    tokens_that_count,
)

# One program per multiprocessor, so that its row of 256 KB stays in the caches for the second pass.
ROW_WARPS = 32
ROW_VECTORS = 4  # 16-byte loads per thread and block, with the next block's already under way
ROWS_MULTIPLE = 128  # tokens of a chunk: whole tiles of the products
WORDS_MULTIPLE = 256  # columns of a chunk: aligned rows, and slices of at least 8 aligned words
TILE_ROWS, TILE_COLUMNS = 128, 256  # a product's tile, for estimating how many a GPU gets
TILES_WANTED = 256  # two per multiprocessor
MOST_SLICES = 32
# Gradients are at most 1 in size. In half precision they are held times this, so that what is
# normal begins at 2e-9 instead of 6e-5; sums are float32 and are scaled back.
HALF_SCALE = 2.0**15

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # below any logit, yet finite: -inf minus -inf is not a number


@triton.jit
def _power(values, peak, HALF: tl.constexpr):
    """exp(values - peak). Of 16-bit logits in one instruction less, the peak's part rounded."""
    shifted = tl.fma(values, LOG2_E, -(peak * LOG2_E)) if HALF else (values - peak) * LOG2_E
    return tl.exp2(shifted)


@triton.jit
def _correction(peak):
    """What takes the rounding of the peak's part out of such powers."""
    return tl.exp2(-tl.fma(peak, LOG2_E, -(peak * LOG2_E)))


@triton.jit
def _rows_kernel(
    logits, labels, losses, num_words, row_stride, ignore_index,
    SCALE: tl.constexpr, GRADIENTS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
    LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """One row: its loss and, over its logits, their gradient times SCALE.

    The row's `row_stride` entries are all aligned and written; if PADDED those from `num_words` on
    are no words. A lane is what one thread loads at once, with a maximum of its own: no exchange
    until the end. An ignored row is not read: -inf in place of its logits gives gradients of 0.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    label = tl.load(labels + row)
    counts = label != ignore_index
    known = counts & (label >= 0) & (label < num_words)
    # Read before anything is overwritten; the reductions below keep it so for all threads.
    target_logit = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
    lanes = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]

    peaks = tl.full((LANES,), LOWEST, tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    end = tl.where(counts, row_stride, 0)
    upcoming = tl.load(logits + lanes, mask=lanes < end, other=-INFINITY)
    for start in range(0, end, LANES * PER_LANE):
        words = start + lanes
        values = upcoming.to(tl.float32)
        if PADDED:  # masked here, because a bound that is no multiple of 16 splits the loads
            values = tl.where(words < num_words, values, -INFINITY)
        following = words + LANES * PER_LANE
        upcoming = tl.load(logits + following, mask=following < end, other=-INFINITY)
        higher = tl.maximum(peaks, tl.max(values, axis=1))
        sums = sums * tl.exp2((peaks - higher) * LOG2_E)
        sums += tl.sum(_power(values, higher[:, None], HALF), axis=1)
        peaks = higher
    peak = tl.max(peaks, axis=0)
    if HALF:
        sums *= _correction(peaks)
    total = tl.sum(sums * tl.exp2((peaks - peak) * LOG2_E), axis=0)
    loss = tl.log(total) + (peak - target_logit)
    tl.store(losses + row, tl.where(counts, loss, 0.0))

    if GRADIENTS:
        factor = tl.where(counts, tl.where(known, tl.div_rn(SCALE, total), float("nan")), 0.0)
        if HALF:
            factor *= _correction(peak)
        # Backwards: the end of the row was read last and is nearest.
        last = (row_stride - 1) // (LANES * PER_LANE) * (LANES * PER_LANE)
        upcoming = tl.load(logits + last + lanes, mask=last + lanes < end, other=-INFINITY)
        for back in range(0, row_stride, LANES * PER_LANE):
            words = last - back + lanes
            values = upcoming.to(tl.float32)
            following = words - LANES * PER_LANE
            inside = (following >= 0) & (following < end)
            upcoming = tl.load(logits + following, mask=inside, other=-INFINITY)
            grads = _power(values, peak, HALF) * factor
            if PADDED:
                grads = tl.where(words < num_words, grads, 0.0)
            # Nobody reads them soon: they should not push other rows out of the caches.
            tl.store(
                logits + words,
                grads.to(logits.dtype.element_ty),
                mask=words < row_stride,
                cache_modifier=".cs",
            )
        # The target's entry once more, by one thread, after the one that wrote it with its lane.
        tl.debug_barrier()
        target = _power(target_logit, peak, HALF) * factor - SCALE
        tl.store(logits + label, target.to(logits.dtype.element_ty), mask=known)


def losses_and_gradients_(
    logits: Tensor, labels: Tensor, losses: Tensor, *, num_words: int, gradients: bool
) -> None:
    """Write the losses [n] and, if asked, over the logits [n, padded] their gradient.

    Of a row `num_words` entries are logits, the others become 0. Half precision's gradients are
    scaled by `HALF_SCALE`. A label that is neither a word nor `IGNORE_INDEX` makes loss and
    gradient of its row NaN; nothing outside the row is read.
    """
    assert logits.is_contiguous() and logits.shape[1] % WORDS_MULTIPLE == 0
    per_lane = 16 // logits.element_size()
    lanes = min(ROW_WARPS * 32 * ROW_VECTORS, triton.next_power_of_2(logits.shape[1] // per_lane))
    _rows_kernel[(logits.shape[0],)](
        logits, labels, losses, num_words, logits.shape[1], IGNORE_INDEX,
        SCALE=gradient_scale(logits.dtype), GRADIENTS=gradients,
        PADDED=num_words != logits.shape[1], HALF=logits.element_size() == 2,
        LANES=lanes, PER_LANE=per_lane,
        num_warps=max(1, min(ROW_WARPS, lanes // 32)),
    )  # fmt: skip


def gradient_scale(dtype: torch.dtype) -> float:
    return HALF_SCALE if dtype == torch.float16 else 1.0


def _unscaled_(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of gradients that were held in `dtype`, in place."""
    scale = gradient_scale(dtype)
    return sums if scale == 1 else sums.div_(scale)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss and the gradients of hidden and weight, empty if unwanted."""
    want_hidden, want_weight = wanted
    num_tokens, num_words = hidden.shape[0], weight.shape[0]
    rows, labels = _padded_rows(weight, dtype), labels.contiguous()  # [padded, D], [T]
    step = chunk_size(num_tokens, rows)
    logits = rows.new_empty(step, rows.shape[0])
    losses = hidden.new_empty(num_tokens, dtype=torch.float32)
    grad_hidden = hidden.new_empty(hidden.shape if want_hidden else 0, dtype=gradient_dtype(dtype))
    grad_rows = None
    for chunk in chunks(num_tokens, step):
        skipped, states = tokens_that_count(hidden[chunk], labels[chunk], dtype)
        found = torch.mm(states, rows.T, out=logits[: states.shape[0]])  # [n, padded]
        losses_and_gradients_(
            found, labels[chunk], losses[chunk], num_words=num_words, gradients=any(wanted)
        )
        if want_hidden:
            sums = _sum_over_words(found, rows)  # [n, D]
            grad_hidden[chunk] = _unscaled_(sums, dtype).masked_fill_(skipped, 0)
        if want_weight:
            grad_rows = _add_product(grad_rows, found.T, states)
    if grad_rows is None:  # unwanted, or there are no tokens
        grad_weight = weight.new_zeros(weight.shape if want_weight else 0, dtype=torch.float32)
    else:
        grad_weight = _unscaled_(grad_rows[:num_words], dtype)
    return losses.sum(), grad_hidden, grad_weight


def chunk_size(num_tokens: int, rows: Tensor) -> int:
    """Tokens per chunk: equal shares, each within the budget of bytes for its logits."""
    most = max(1, chunk_bytes(rows.device) // (rows.shape[0] * rows.element_size()))
    if most > ROWS_MULTIPLE:
        most -= most % ROWS_MULTIPLE
    num_chunks = max(1, -(-num_tokens // most))
    tiles = -(-num_tokens // (num_chunks * ROWS_MULTIPLE))  # of a chunk, rounded up
    return max(1, min(most, tiles * ROWS_MULTIPLE, num_tokens))


def _padded_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype` with rows of 0 up to the next multiple; itself where it fits."""
    missing = -weight.shape[0] % WORDS_MULTIPLE
    if missing == 0:
        return weight.to(dtype).contiguous()
    rows = weight.new_zeros(weight.shape[0] + missing, weight.shape[1], dtype=dtype)
    rows[: weight.shape[0]] = weight
    return rows


def _sum_over_words(grads: Tensor, rows: Tensor) -> Tensor:
    """grads [n, words] @ rows [words, D] in float32, cut along the words if n x D are few tiles."""
    tiles = triton.cdiv(grads.shape[0], TILE_ROWS) * triton.cdiv(rows.shape[1], TILE_COLUMNS)
    slices = min(MOST_SLICES, triton.next_power_of_2(triton.cdiv(TILES_WANTED, tiles)))
    left = grads.unflatten(1, (slices, -1)).transpose(0, 1)  # [slices, n, words / slices]
    right = rows.unflatten(0, (slices, -1))  # [slices, words / slices, D]
    if left.dtype == torch.float32 or not left.is_cuda:
        sums = torch.bmm(left.float(), right.float())
    else:
        sums = torch.bmm(left, right, out_dtype=torch.float32)
    return sums[0] if slices == 1 else sums.sum(0)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in float32, over `total`."""
    if left.dtype == torch.float32 or not left.is_cuda:
        left, right = left.float(), right.float()
        return left @ right if total is None else total.addmm_(left, right)
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    if _adds_to_float32(left.device, left.dtype):
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.add_(torch.mm(left, right, out_dtype=torch.float32))


@functools.cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """True where `torch.addmm` adds a product of `dtype` to float32; some versions refuse it."""
    total = torch.zeros(16, 16, device=device, dtype=torch.float32)
    operand = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
