"""Cross-entropy of a linear layer's logits, without the logits: for vocabularies of 128,256 words.

Logits of 65,536 tokens would take 34 GB in float32. Here a chunk of tokens exists at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.backend import use_triton
from airmoe.kernels.linear_cross_entropy import reference
from airmoe.kernels.precision import own_precision

IGNORE_INDEX = -100  # Hugging Face's and PyTorch's label of a position without a target


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label]: a float32 scalar.

    hidden [T, D], weight [V, D], labels [T] in [0, V) or `ignore_index`, which adds nothing to
    value or gradient. Any other label is an error on a CPU; on a GPU, which would have to wait to
    have them read, it makes the value and the gradients NaN. Under autocast the products run in its
    dtype, as those of `nn.Linear` would; the softmax is float32 always. The sum and not the mean,
    because the right divisor may count the tokens of several micro-batches and ranks.
    """
    _check(hidden, weight, labels, ignore_index)
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
    return _apply(hidden, weight, labels.long(), ignore_index, dtype)


@own_precision
def _apply(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
    if use_triton(hidden, weight, labels):
        from airmoe.kernels.linear_cross_entropy.operator import run

        return run(hidden, weight, labels, ignore_index, dtype, wanted)
    if any(wanted):
        return reference.LinearCrossEntropy.apply(hidden, weight, labels, ignore_index, dtype)
    return reference.loss_and_gradients(hidden, weight, labels, ignore_index, dtype).loss


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> None:
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
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= weight.shape[0]))]
    if wrong.numel():
        raise ConfigError(
            f"{label}.labels",
            int(wrong[0]),
            f"must be {ignore_index} or in [0, {weight.shape[0]}), the vocabulary",
            "Use the tokenizer the model was built for.",
        )


__all__ = ["IGNORE_INDEX", "linear_cross_entropy"]
