"""SwiGLU, and splitting and turning of heads: every number is read and written once."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.device_triton import (
    ACTIVATION_CODES,
    activate,
    activation_grads,
    block_size,
    load_rows,
    store_rows,
)

SWIGLU = tl.constexpr(ACTIVATION_CODES["swiglu"])
FORWARD_TILE = 2048  # entries of one program
BACKWARD_TILE = 2048
WIDEST = 256  # columns of a tile
TOKENS = 32  # of one program that turns heads
HEADS = 1  # of it


@triton.jit
def _gate_and_up(joined, row, real, column, FFN: tl.constexpr):
    start = joined + row.to(tl.int64)[:, None] * (2 * FFN) + column[None, :]
    inside = real[:, None] & (column < FFN)[None, :]
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + FFN, mask=inside, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _swiglu_kernel(
    joined, output, num_rows,
    FFN: tl.constexpr, EXACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = row < num_rows
    gate, up = _gate_and_up(joined, row, real, column, FFN)
    store_rows(output, row, real, column, activate(up, gate, SWIGLU, EXACT), FFN)


@triton.jit
def _swiglu_backward_kernel(
    grad, joined, grad_joined, num_rows,
    FFN: tl.constexpr, EXACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = row < num_rows
    gate, up = _gate_and_up(joined, row, real, column, FFN)
    upstream = load_rows(grad, row, real, column, FFN).to(tl.float32)
    grads = activation_grads(up, gate, upstream, SWIGLU, EXACT)
    start = grad_joined + row.to(tl.int64)[:, None] * (2 * FFN) + column[None, :]
    inside = real[:, None] & (column < FFN)[None, :]
    tl.store(start, grads[2].to(grad_joined.dtype.element_ty), mask=inside)
    tl.store(start + FFN, grads[1].to(grad_joined.dtype.element_ty), mask=inside)


def _tiles(num_rows: int, ffn: int, tile: int) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """The grid of tiles over [rows, F], and the sizes of one."""
    columns = block_size(ffn, WIDEST)
    rows = max(1, tile // columns)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(ffn, columns))
    return grid, {"BLOCK_R": rows, "BLOCK_C": columns}


def swiglu(joined: Tensor) -> Tensor:
    """silu(gate) * up: [.., 2 F] -> [.., F]."""
    *shape, width = joined.shape
    ffn, exact = width // 2, joined.dtype == torch.float32
    output = joined.new_empty(*shape, ffn)
    num_rows = output.numel() // max(1, ffn)
    grid, blocks = _tiles(num_rows, ffn, FORWARD_TILE)
    _swiglu_kernel[grid](
        joined.contiguous(), output, num_rows, FFN=ffn, EXACT=exact, **blocks, num_warps=4
    )
    return output


def swiglu_backward(call: Any, wanted: set[str]) -> dict[str, Tensor]:
    """The joined gradient of gate and up."""
    joined, grad = call.joined.contiguous(), call.grad_output
    ffn, exact = grad.shape[-1], joined.dtype == torch.float32
    found = torch.empty_like(joined)
    num_rows = grad.numel() // max(1, ffn)
    grid, blocks = _tiles(num_rows, ffn, BACKWARD_TILE)
    _swiglu_backward_kernel[grid](
        grad, joined, found, num_rows, FFN=ffn, EXACT=exact, **blocks, num_warps=4
    )
    return {"joined": found}


@triton.jit
def _heads_kernel(
    joined, queries, keys, values, cos, sin, num_tokens, num_positions,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A few heads of a few tokens, from `joined` to the others, or back: turned the other way."""
    num_all = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_W)
    wide = token.to(tl.int64)[:, None]
    inside = (token < num_tokens)[:, None] & (column < HALF)[None, :]
    angle = (token % num_positions)[:, None] * (2 * HALF) + column[None, :]
    cos_1 = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    for step in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + step
        some = inside & (head < num_all)
        part, place, count = values, head - NUM_HEADS - NUM_KV_HEADS, NUM_KV_HEADS
        if head < NUM_HEADS:
            part, place, count = queries, head, NUM_HEADS
        elif head < NUM_HEADS + NUM_KV_HEADS:
            part, place = keys, head - NUM_HEADS
        apart = part + (wide * count + place) * (2 * HALF) + column[None, :]
        beside = joined + (wide * num_all + head) * (2 * HALF) + column[None, :]
        source = apart if BACKWARD else beside
        target = beside if BACKWARD else apart
        first = tl.load(source, mask=some, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=some, other=0.0).to(tl.float32)
        if head < NUM_HEADS + NUM_KV_HEADS:
            if BACKWARD:
                first, second = first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
            else:
                first, second = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
        tl.store(target, first.to(joined.dtype.element_ty), mask=some)
        tl.store(target + HALF, second.to(joined.dtype.element_ty), mask=some)


def _turn(
    joined: Tensor, heads: tuple[Tensor, ...], cos: Tensor, sin: Tensor, *, backward: bool
) -> None:
    num_tokens, num_positions = heads[0].shape[:2].numel(), cos.shape[:2].numel()
    num_heads, num_kv_heads = heads[0].shape[2], heads[1].shape[2]
    half = cos.shape[-1] // 2
    grid = (triton.cdiv(num_tokens, TOKENS), triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))
    _heads_kernel[grid](
        joined, *heads, cos.contiguous(), sin.contiguous(), num_tokens, num_positions,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, BACKWARD=backward,
        BLOCK_T=TOKENS, BLOCK_W=triton.next_power_of_2(half), HEADS=HEADS, num_warps=4,
    )  # fmt: skip


def rotary_heads(joined: Tensor, cos: Tensor, sin: Tensor, num_kv_heads: int) -> tuple[Tensor, ...]:
    """Queries and keys, turned, and values: [B, L, heads, W] each."""
    width = cos.shape[-1]
    num_heads = joined.shape[2] // width - 2 * num_kv_heads
    counts = (num_heads, num_kv_heads, num_kv_heads)
    heads = tuple(joined.new_empty(*joined.shape[:2], count, width) for count in counts)
    _turn(joined.contiguous(), heads, cos, sin, backward=False)
    return heads


def rotary_heads_backward(
    queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """The joined gradient of those of the heads, which attention lays out as [B, L, heads, W]."""
    num_heads = queries.shape[2] + 2 * keys.shape[2]
    joined = queries.new_empty(*queries.shape[:2], num_heads * queries.shape[3])
    heads = tuple(grad.contiguous() for grad in (queries, keys, values))
    _turn(joined, heads, cos, sin, backward=True)
    return joined
