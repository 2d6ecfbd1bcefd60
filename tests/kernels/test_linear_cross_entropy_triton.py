"""The loss of a large vocabulary on Triton: the reference's value and gradients, in chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.kernels import linear_cross_entropy as module
from airmoe.kernels.backend import use_backend
from airmoe.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.comparison import DEVICE, DTYPES, Found, assert_as_good
from tests.model.test_linear_cross_entropy import LargestTensor

pytest.importorskip("triton")
from airmoe.kernels import linear_cross_entropy_triton as kernels
from airmoe.kernels.linear_cross_entropy import linear_cross_entropy_op

BUDGET = "CUDA_CHUNK_BYTES" if DEVICE == "cuda" else "CPU_CHUNK_BYTES"
TOKENS, WORDS, DIM = 37, 29, 12


def make_inputs(
    tokens: int = TOKENS,
    words: int = WORDS,
    dim: int = DIM,
    dtype: torch.dtype = torch.float32,
    ignored: float = 0.3,
    scale: float = 1.0,
) -> Found:
    labels = torch.randint(words, (tokens,), device=DEVICE)
    labels[torch.rand(tokens, device=DEVICE) < ignored] = -100
    return {
        "hidden": torch.randn(tokens, dim, device=DEVICE).mul_(scale).to(dtype),
        "weight": torch.randn(words, dim, device=DEVICE).to(dtype),
        "labels": labels,
    }


def loss(inputs: Found) -> Found:
    return {"loss": linear_cross_entropy(inputs["hidden"], inputs["weight"], inputs["labels"])}


def value_and_gradients(inputs: Found, factor: float = 1.0) -> Found:
    hidden, weight = (inputs[name].detach().requires_grad_() for name in ("hidden", "weight"))
    with use_backend("triton"):
        value = linear_cross_entropy(hidden, weight, inputs["labels"])
    (value * factor).backward()
    assert hidden.grad is not None and weight.grad is not None
    return {"loss": value.detach(), "hidden": hidden.grad, "weight": weight.grad}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks, at sizes a test can pay for."""
    monkeypatch.setattr(kernels, "ROW_WARPS", 1)
    monkeypatch.setattr(kernels, "ROW_VECTORS", 1)


def small_chunks(monkeypatch: pytest.MonkeyPatch, tokens: int, inputs: Found) -> None:
    """Room for the logits of so many tokens."""
    weight = inputs["weight"]
    padded = -(-weight.shape[0] // kernels.WORDS_MULTIPLE) * kernels.WORDS_MULTIPLE
    monkeypatch.setattr(module, BUDGET, tokens * padded * weight.element_size())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize(
    ("tokens", "words", "dim"), [(1, 1, 1), (37, 29, 12), (9, 256, 33), (5, 700, 16)]
)
def test_value_and_gradients(
    dtype: torch.dtype, ignored: float, tokens: int, words: int, dim: int
) -> None:
    assert_as_good(loss, make_inputs(tokens, words, dim, dtype, ignored))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("words", "scale"), [(600, 1.0), (768, 1.0), (1023, 1.0), (600, 1e-3), (600, 30.0)]
)
def test_rows_of_several_blocks(dtype: torch.dtype, words: int, scale: float) -> None:
    """Also of logits near 0, where all words count, and in the hundreds, where one does."""
    assert_as_good(loss, make_inputs(7, words, 20, dtype, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, TOKENS - 1, TOKENS])
def test_chunks_do_not_show(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(dtype=dtype)
    small_chunks(monkeypatch, rows, inputs)
    assert_as_good(loss, inputs)


def test_half_precision_holds_what_it_could_not_unscaled() -> None:
    """A probability of 1e-8 is 0 in float16, and a sum of 80,000 is infinite."""
    hidden = torch.full((20, 16), 64.0, device=DEVICE)
    weight = torch.zeros(20, 16, device=DEVICE)
    weight[0] = 18.0 / hidden.shape[1] / hidden[0, 0]  # word 0 leads by 18 nats
    labels = torch.ones(20, device=DEVICE, dtype=torch.int64)
    with torch.autocast(DEVICE, dtype=torch.float16):
        found = value_and_gradients(
            {"hidden": hidden, "weight": weight, "labels": labels}, factor=65_536.0
        )
    grad_logits = torch.softmax(hidden.double() @ weight.half().double().T, -1)  # [T, V]
    grad_logits[:, 1] -= 1
    exact = grad_logits.T @ hidden.double() * 65_536
    assert grad_logits[0, 2].half() == 0 and exact[0].half().isinf().all()
    # Of each entry, however small: the logits alone are rounded to 18 / 2048.
    torch.testing.assert_close(found["weight"].double(), exact, rtol=0.01, atol=0)


def test_a_token_that_is_not_finite_spoils_its_own_row_and_the_sums() -> None:
    inputs = make_inputs(ignored=0.0)
    clean = value_and_gradients(inputs)
    inputs["hidden"][3, 5] = torch.inf
    spoiled = value_and_gradients(inputs)
    assert spoiled["loss"].isnan() and spoiled["hidden"][3].isnan().all()
    others = torch.arange(TOKENS, device=DEVICE) != 3
    assert torch.equal(spoiled["hidden"][others], clean["hidden"][others])


@pytest.mark.parametrize("wrong", [-1, WORDS, 2**40, -(2**40)])
def test_a_label_that_is_no_word_shows(wrong: int) -> None:
    """The CPU's check refuses it; on a GPU, and here below that check, it makes NaN."""
    inputs = make_inputs(ignored=0.0)
    clean = value_and_gradients(inputs)
    inputs["labels"][3] = wrong
    hidden, weight = inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_()
    arguments = hidden, weight, inputs["labels"], torch.float32, [True, True]
    value = linear_cross_entropy_op(*arguments)[0]
    value.backward()
    assert value.isnan() and weight.grad is not None and weight.grad.isnan().all()
    assert hidden.grad is not None and hidden.grad[3].isnan().all()
    others = torch.arange(TOKENS, device=DEVICE) != 3
    assert torch.equal(hidden.grad[others], clean["hidden"][others])


def test_strided_arguments() -> None:
    inputs = make_inputs(ignored=0.2)
    expected = value_and_gradients(inputs)
    strided = {
        "hidden": inputs["hidden"].T.contiguous().T,
        "weight": inputs["weight"].T.contiguous().T,
        "labels": inputs["labels"].repeat_interleave(2)[::2].to(torch.int32),
    }
    for name, value in value_and_gradients(strided).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_autocast_computes_in_its_dtype_and_scaled_gradients_stay_finite(
    dtype: torch.dtype,
) -> None:
    def scaled(inputs: Found) -> Found:
        with torch.autocast(DEVICE, dtype=dtype, enabled=inputs["hidden"].dtype == torch.float32):
            return {name: value * 65_536.0 for name, value in loss(inputs).items()}

    assert_as_good(scaled, make_inputs())


def test_compiles_into_one_graph() -> None:
    inputs = make_inputs()
    expected = value_and_gradients(inputs)
    hidden, weight = inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, backend=backend)
    def halved(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels) / 2

    with use_backend("triton"):
        value = halved(hidden, weight, inputs["labels"])
    value.backward()
    torch.testing.assert_close(value.detach(), expected["loss"] / 2)
    torch.testing.assert_close(hidden.grad, expected["hidden"] / 2)
    torch.testing.assert_close(weight.grad, expected["weight"] / 2)


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(tokens=90, words=500, dim=8)
    small_chunks(monkeypatch, 16, inputs)
    hidden, weight, labels = inputs.values()
    with LargestTensor() as largest:
        kernels.linear_cross_entropy(hidden, weight, labels, torch.float32, [True, True])
    assert largest.elements == 16 * 512 * (1 if DEVICE == "cuda" else 4)  # interpreted: as bytes


@pytest.mark.parametrize(
    ("tokens", "words", "dtype", "expected"),
    [
        (16_384, 128_256, torch.bfloat16, 4096),
        (16_384, 128_256, torch.float32, 2048),
        (5000, 128_256, torch.bfloat16, 2560),  # two chunks of about the same size
        (300, 128_256, torch.bfloat16, 300),
        (0, 256, torch.bfloat16, 1),
        (1000, 2**24, torch.bfloat16, 32),
        (1000, 2**31, torch.bfloat16, 1),
    ],
)
def test_chunks_have_equal_shares_of_whole_tiles(
    tokens: int, words: int, dtype: torch.dtype, expected: int
) -> None:
    rows = torch.empty(words, 1, dtype=dtype, device="meta")
    assert kernels.chunk_size(tokens, rows) == expected


def on_gpu(tokens: int, words: int, dim: int, dtype: torch.dtype) -> Found:
    inputs = make_inputs(tokens, words, dim, dtype)
    inputs["weight"] = inputs["weight"] / dim**0.5
    return inputs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "words", "dim"), [(1000, 50_257, 100), (4099, 32_001, 256), (300, 128_256, 768)]
)
def test_large_odd_shapes(dtype: torch.dtype, tokens: int, words: int, dim: int) -> None:
    assert_as_good(loss, on_gpu(tokens, words, dim, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_vocabulary_in_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = on_gpu(1500, 50_257, 64, dtype)
    small_chunks(monkeypatch, 600, inputs)
    assert_as_good(loss, inputs)


@pytest.mark.gpu
def test_a_gpu_holds_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it: the weight's gradient and its scaled copy, and 256 MiB for all that is smaller."""
    monkeypatch.setattr(module, "CUDA_CHUNK_SHARE", 2**40)  # else a large GPU takes one chunk
    inputs = on_gpu(16_384, 128_256, 256, torch.bfloat16)
    hidden, weight = inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, inputs["labels"]).backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < module.CUDA_CHUNK_BYTES + 2 * 4 * weight.numel() + 256 * 2**20
    assert extra < hidden.shape[0] * weight.shape[0]  # half of all logits in bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same_bits_and_never_waits(dtype: torch.dtype) -> None:
    inputs = on_gpu(500, 5003, 64, dtype)
    first = value_and_gradients(inputs)  # compiles, and cuBLAS starts
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = value_and_gradients(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
