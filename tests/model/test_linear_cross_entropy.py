"""The chunked loss equals that of all logits, and never creates them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from airmoe import ConfigError
from airmoe.kernels import linear_cross_entropy as reference
from airmoe.kernels.backend import use_backend
from airmoe.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.comparison import DEVICE
from tests.state.common import assert_same
from tests.tolerance import assert_close

TOKENS, DIM, WORDS = 37, 12, 29


@dataclass
class Case:
    hidden: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    labels: Tensor  # [T]


def make_case(tokens: int = TOKENS, ignored: float = 0.3) -> Case:
    labels = torch.randint(WORDS, (tokens,))
    labels[torch.rand(tokens) < ignored] = -100
    return Case(torch.randn(tokens, DIM), torch.randn(WORDS, DIM), labels)


@pytest.fixture(params=["reference", "triton"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """For what holds in either implementation."""
    if request.param == "triton":
        pytest.importorskip("triton")
    made = make_case()
    with use_backend(request.param):
        yield Case(made.hidden.to(DEVICE), made.weight.to(DEVICE), made.labels.to(DEVICE))


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The definition, with all logits."""
    return F.cross_entropy(F.linear(hidden, weight).to(hidden.dtype), labels, reduction="sum")


def value_and_gradients(function: Any, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    hidden, weight = (
        tensor.to(dtype, copy=True).requires_grad_() for tensor in (case.hidden, case.weight)
    )
    loss = function(hidden, weight, case.labels)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}


def compare(case: Case, dtype: torch.dtype = torch.float32) -> None:
    rounded = Case(case.hidden.to(dtype).float(), case.weight.to(dtype).float(), case.labels)
    exact = value_and_gradients(plain, rounded, torch.float64)
    same_precision = value_and_gradients(plain, rounded, dtype)
    found = value_and_gradients(linear_cross_entropy, rounded, dtype)
    assert found["loss"].dtype == torch.float32
    for name, value in found.items():
        assert_close(value, exact[name], same_precision[name], f"{dtype} {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_value_and_gradients(dtype: torch.dtype, ignored: float) -> None:
    compare(make_case(ignored=ignored), dtype)


@pytest.mark.parametrize("rows", [1, 2, TOKENS - 1, TOKENS, TOKENS + 1])
def test_chunks_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CPU_CHUNK_BYTES", rows * reference.BYTES_PER_LOGIT * WORDS)
    chunks = list(reference.token_chunks(torch.empty(TOKENS, DIM), WORDS))
    assert len(chunks) == -(-TOKENS // rows)
    compare(make_case())


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_any_combination_of_gradients(needs: tuple[bool, bool], case: Case) -> None:
    expected = value_and_gradients(plain, case, torch.float32)
    hidden, weight = case.hidden.requires_grad_(needs[0]), case.weight.requires_grad_(needs[1])
    loss = linear_cross_entropy(hidden, weight, case.labels)
    assert loss.requires_grad == any(needs)
    torch.testing.assert_close(loss.detach(), expected["loss"])
    if any(needs):
        loss.backward()
    for needed, tensor, name in zip(needs, (hidden, weight), ("hidden", "weight"), strict=True):
        assert (tensor.grad is not None) == needed
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, expected[name])


@pytest.mark.parametrize("tokens", [0, 6])
def test_no_target_is_zero_loss_and_zero_gradients(tokens: int, case: Case) -> None:
    case = Case(case.hidden[:tokens], case.weight, case.labels[:tokens].fill_(-100))
    for value in value_and_gradients(linear_cross_entropy, case, torch.float32).values():
        assert (value == 0).all()


def test_what_an_ignored_token_holds_does_not_matter(case: Case) -> None:
    clean = value_and_gradients(linear_cross_entropy, case, torch.float32)
    case.hidden[case.labels == -100] = torch.nan
    spoiled = value_and_gradients(linear_cross_entropy, case, torch.float32)
    assert_same(spoiled, clean)


def test_second_derivatives_are_refused(case: Case) -> None:
    hidden = case.hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, case.weight, case.labels)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_scaled_gradients_stay_finite(
    dtype: torch.dtype,
) -> None:
    """A GradScaler starts at 65,536; float32 parameters must get the whole of it."""
    case = make_case()
    exact = value_and_gradients(plain, case, torch.float64)

    def under_autocast(function: Any, scale: float) -> dict[str, Tensor]:
        def scaled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return function(hidden, weight, labels).float() * scale

        return value_and_gradients(scaled, case, torch.float32)

    same_precision = under_autocast(plain, 1.0)
    found = under_autocast(linear_cross_entropy, 65_536.0)
    for name, value in found.items():
        assert_close(value / 65_536, exact[name], same_precision[name], f"{dtype} {name}")


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"labels": torch.full((TOKENS,), WORDS)}, "labels"),
        ({"labels": torch.full((TOKENS,), -1)}, "labels"),
        ({"labels": torch.zeros(TOKENS - 1, dtype=torch.int64)}, "labels"),
        ({"labels": torch.zeros(TOKENS)}, "labels"),
        ({"hidden": torch.zeros(TOKENS, DIM + 1)}, "hidden"),
        ({"hidden": torch.zeros(1, TOKENS, DIM)}, "hidden"),
        ({"hidden": torch.zeros(TOKENS, DIM, dtype=torch.float64)}, "hidden"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, Tensor], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        linear_cross_entropy(**{**vars(make_case()), **change})
    assert error.value.field == f"linear_cross_entropy.{field}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_a_real_vocabulary_fits_the_budget(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits would take 8 GB in float32; there may be only chunks of them."""
    monkeypatch.setattr(reference, "CUDA_CHUNK_SHARE", 2**40)  # else a large GPU takes one chunk
    tokens, words, dim = 16_384, 128_256, 256
    hidden = torch.randn(tokens, dim, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(words, dim, device="cuda", dtype=dtype).mul_(0.02).requires_grad_()
    labels = torch.randint(words, (tokens,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, labels).backward()
    extra = torch.cuda.max_memory_allocated() - before
    gradients = 4 * (4 * weight.numel() + 2 * hidden.numel())  # sums, products, scaled, cast
    assert extra < reference.CUDA_CHUNK_BYTES * 1.5 + gradients
