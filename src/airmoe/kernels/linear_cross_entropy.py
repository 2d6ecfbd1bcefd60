"""Cross-entropy of a linear layer's logits, without a tensor of all logits.

With a vocabulary of 128,256 words the logits of 65,536 tokens would take 34 GB in float32. Here
they are computed for one chunk of tokens at a time. The result is a scalar, so what comes after it
changes the gradients only by a factor. They are therefore computed in the forward, while the logits
are there, and the backward multiplies them by that factor: no second product of T x V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.backend import chunks, gpu_bytes, operator, own_precision, use_triton

IGNORE_INDEX = -100  # Hugging Face's and PyTorch's label of a position without a target
CPU_CHUNK_BYTES = 256 * 2**20
CUDA_CHUNK_BYTES = 2**30  # products must be large to fill a GPU
CUDA_CHUNK_SHARE = 32  # of the GPU's memory, where that is more
BYTES_PER_LOGIT = 10


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label]: a float32 scalar.

    hidden [T, D], weight [V, D], labels [T] in [0, V) or `IGNORE_INDEX`, which adds nothing to
    value or gradient. Any other label is an error on a CPU; on a GPU, which would have to wait to
    have them read, it makes the value and the gradients NaN. Under autocast the products run in its
    dtype, as those of `nn.Linear` would; the softmax is float32 always. The sum and not the mean,
    because the right divisor may count the tokens of several micro-batches and ranks.
    """
    _check(hidden, weight, labels)
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    if hidden.dtype != weight.dtype and not autocast:
        raise ConfigError(
            "linear_cross_entropy.hidden",
            hidden.dtype,
            f"must have the dtype of the weight, {weight.dtype}",
            "Cast one of them, or run under autocast.",
        )
    return _apply(hidden, weight, labels.long(), dtype)


@own_precision
def _apply(hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
    triton = use_triton(hidden, weight, labels)
    apply: Any = linear_cross_entropy_op if triton else _LinearCrossEntropy.apply
    return apply(hidden, weight, labels, dtype, wanted)[0]


def _check(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    label = "linear_cross_entropy"
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ConfigError(
            f"{label}.hidden",
            tuple(hidden.shape),
            f"must have shape [tokens, D] for a weight [V, D]; this one is {tuple(weight.shape)}",
            "Flatten leading dimensions, and pass the output layer's own weight.",
        )
    if labels.shape != hidden.shape[:1] or labels.is_floating_point():
        raise ConfigError(
            f"{label}.labels",
            (tuple(labels.shape), labels.dtype),
            f"must be whole numbers of shape [{hidden.shape[0]}], one per token",
            "Flatten the labels like the hidden states.",
        )
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return  # reading them would stall a GPU and break a graph: a wrong one shows in the loss
    wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= weight.shape[0]))]
    if wrong.numel():
        raise ConfigError(
            f"{label}.labels",
            int(wrong[0]),
            f"must be {IGNORE_INDEX} or in [0, {weight.shape[0]}), the vocabulary",
            "Use the tokenizer the model was built for.",
        )


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss and the gradients of hidden and weight, empty if unwanted."""
    want_hidden, want_weight = wanted
    loss, grad_hidden, grad_weight = _empty_results(hidden, weight, labels, dtype, wanted)
    grad_weight.zero_()
    rows = weight.to(dtype)
    gradient_rows = rows.to(grad_hidden.dtype)  # the same tensor but for half precision
    losses = loss.new_empty(hidden.shape[0])  # [T]
    for chunk in token_chunks(hidden, weight.shape[0]):
        skipped, states = tokens_that_count(hidden[chunk], labels[chunk], dtype)
        targets = labels[chunk].unsqueeze(-1).masked_fill(skipped, 0)  # [n, 1]
        log_probs = torch.log_softmax(states @ rows.T, -1, dtype=losses.dtype)  # [n, V]
        target_log_probs = log_probs.gather(1, targets)
        losses[chunk] = -target_log_probs.masked_fill(skipped, 0).squeeze(-1)
        if not any(wanted):
            continue
        grads = _softmax_minus_one_hot(log_probs, targets, target_log_probs, gradient_rows.dtype)
        if want_hidden:
            grad_hidden[chunk] = (grads @ gradient_rows).masked_fill_(skipped, 0)
        if want_weight:
            grad_weight += grads.T @ states.to(grads.dtype)
    return losses.sum(), grad_hidden, grad_weight


def tokens_that_count(hidden: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Which tokens are skipped [n, 1], and the states of all [n, D] in `dtype`.

    Skipped tokens are set to 0: they may hold NaN, which would spoil sums that all tokens share.
    """
    skipped = (labels == IGNORE_INDEX).unsqueeze(-1)
    return skipped, hidden.masked_fill(skipped, 0).to(dtype)


def token_chunks(hidden: Tensor, num_words: int) -> Iterator[slice]:
    """Runs of tokens whose logits fit the budget: two float32 copies, one of lower precision."""
    step = max(1, chunk_bytes(hidden.device) // (BYTES_PER_LOGIT * max(1, num_words)))
    return chunks(hidden.shape[0], step)


def chunk_bytes(device: torch.device) -> int:
    """How much memory the logits of a chunk may take."""
    if device.type == "cpu":
        return CPU_CHUNK_BYTES
    return max(CUDA_CHUNK_BYTES, gpu_bytes(device) // CUDA_CHUNK_SHARE)


def _softmax_minus_one_hot(
    log_probs: Tensor, targets: Tensor, target_log_probs: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits [n, V] in `dtype`; written over `log_probs` if that is theirs."""
    same = log_probs.dtype == dtype
    grad = torch.exp(log_probs, out=log_probs if same else torch.empty_like(log_probs, dtype=dtype))
    return grad.scatter_(1, targets, (target_log_probs.exp() - 1).to(dtype))


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the gradients before they are scaled.

    float16 has too small a range: a sum over tokens overflows, a small probability vanishes.
    bfloat16 has the range.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def _empty_results(
    hidden: Tensor, weight: Tensor, _labels: Tensor, dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.promote_types(dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=exact),
        hidden.new_empty(hidden.shape if wanted[0] else 0, dtype=gradient_dtype(dtype)),
        weight.new_empty(weight.shape if wanted[1] else 0, dtype=exact),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, *_, ctx.wanted = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients, found beside the loss, times what came after it."""
    if torch.is_grad_enabled():  # create_graph=True
        # The gradients were saved as constants, so their own derivative would be silently 0.
        raise RuntimeError("linear_cross_entropy has no second derivative: use create_graph=False")
    # Not in place: a graph that is retained comes here again. Multiplied before the cast, so
    # that a loss scale reaches half precision's range with the small gradients it is for.
    found = [saved for saved, want in zip(ctx.saved_tensors, ctx.wanted, strict=True) if want]
    if grad.is_cuda:  # the ordinary product with a scalar there is not vectorized: a third slower
        found = torch._foreach_mul(found, grad)  # pyright: ignore[reportPrivateImportUsage]
    else:
        found = [saved * grad for saved in found]
    scaled, kept = iter(found), zip(ctx.dtypes, ctx.wanted, strict=True)
    return *(next(scaled).to(dtype) if want else None for dtype, want in kept), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    forward = staticmethod(loss_and_gradients)
    setup_context = staticmethod(_setup)
    backward = staticmethod(_backward)


# The summed loss and the gradients of hidden and weight, for a factor of 1; empty if unwanted. A
# label on a GPU that is neither a word nor `IGNORE_INDEX` makes all three NaN.
linear_cross_entropy_op = operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, ScalarType dtype, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor)",
    "linear_cross_entropy_triton",
    fake=_empty_results,
)


linear_cross_entropy_op.register_autograd(_backward, setup_context=_setup)
