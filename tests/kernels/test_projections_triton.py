"""SwiGLU and rotary heads of joined projections, and their joined gradients, on Triton."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from airmoe.kernels.backend import Backend, use_backend
from airmoe.kernels.projections import rotary_heads, swiglu
from tests.kernels.comparison import DEVICE, Found, assert_as_good, dtypes, results_and_grads

pytest.importorskip("triton")


@dtypes
@pytest.mark.parametrize("shape", [(1, 2), (5, 6), (3, 7, 80), (2, 9, 514), (0, 8), (130, 48)])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    joined = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    assert_as_good(lambda given: {"output": swiglu(given["joined"])}, {"joined": joined})


def test_swiglu_of_huge_values() -> None:
    """The exponential overflows, the result does not."""
    gate = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4], device=DEVICE)
    joined = torch.cat([gate, torch.ones(7, device=DEVICE)]).unsqueeze(0)
    assert_as_good(lambda given: {"output": swiglu(given["joined"])}, {"joined": joined})


def angles(batch: int, length: int, width: int, dtype: torch.dtype) -> Found:
    """Both halves differ, which the definition allows."""
    phases = 9 * torch.rand(batch, length, width, device=DEVICE)
    return {"cos": phases.cos().to(dtype), "sin": phases.sin().to(dtype)}


def heads_of(given: Found, num_kv_heads: int) -> Found:
    found = rotary_heads(given["joined"], given["cos"], given["sin"], num_kv_heads)
    return dict(zip(("queries", "keys", "values"), found, strict=True))


@dtypes
@pytest.mark.parametrize("per_text", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "num_heads", "num_kv_heads", "width"),
    [(2, 5, 4, 1, 8), (3, 17, 4, 2, 6), (1, 1, 1, 1, 2), (2, 33, 3, 3, 64), (0, 4, 2, 1, 8)],
)
def test_rotary_heads(
    batch: int, length: int, num_heads: int, num_kv_heads: int, width: int, per_text: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    size = (batch, length, (num_heads + 2 * num_kv_heads) * width)
    given = {
        "joined": torch.randn(size, device=DEVICE).to(dtype),
        **angles(batch if per_text else 1, length, width, dtype),
    }
    constants = {name: given[name] for name in ("cos", "sin")}
    assert_as_good(
        lambda leaves: heads_of(
            leaves | {k: v.to(leaves["joined"].dtype) for k, v in constants.items()}, num_kv_heads
        ),
        given,
        free=["joined"],
    )


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rotary_heads_are_those_of_llama(backend: Backend) -> None:
    """Under autocast: angles are float32, and attention rounds what it is given."""
    joined = torch.randn(2, 6, 8 * 4, device=DEVICE).half()
    given = angles(1, 6, 4, torch.float32)
    queries, keys, values = joined.unflatten(-1, (8, 4)).transpose(1, 2).split([4, 2, 2], dim=1)
    queries, keys = apply_rotary_pos_emb(queries, keys, given["cos"], given["sin"])
    with use_backend(backend):
        found = rotary_heads(joined, given["cos"], given["sin"], 2)
    for part, wanted in zip(found, (queries, keys, values), strict=True):
        assert part.dtype == torch.float16
        torch.testing.assert_close(part.transpose(1, 2), wanted.half(), rtol=1e-3, atol=1e-6)


def test_gradients_as_attention_lays_them_out() -> None:
    """Also of heads that nobody reads, and with heads first in memory."""
    given = {"joined": torch.randn(2, 7, 6 * 4, device=DEVICE)}
    constants = angles(1, 7, 4, torch.float32)

    def heads(leaves: Found) -> list[Tensor]:
        found = rotary_heads(leaves["joined"], constants["cos"], constants["sin"], 1)
        return [part.transpose(1, 2) for part in found]

    def attended(leaves: Found) -> Found:
        queries, keys, values = heads(leaves)
        output = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        return {"output": output}

    def scores(leaves: Found) -> Found:
        queries, keys, _ = heads(leaves)
        return {"output": queries @ keys.transpose(2, 3)}

    for function in (attended, scores):
        with use_backend("reference"):
            wanted = results_and_grads(function, given)
        with use_backend("triton"):
            found = results_and_grads(function, given)
        torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
def test_more_entries_than_a_32_bit_number_counts() -> None:
    joined = torch.randn(1_500_000, 1536, device=DEVICE, dtype=torch.bfloat16)
    last: Tensor = joined[-64:]
    assert torch.equal(swiglu(joined)[-64:], swiglu(last))
