"""`airmoe::softmax_summary`: the Triton path, as compilers and graphs can take it in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.dense.summary_triton import gradients, summarize
from airmoe.kernels.noise import Noise
from airmoe.kernels.operators import operator


def _noise(row_keys: Tensor | None, std: float) -> Noise | None:
    return None if row_keys is None else Noise(row_keys, std)


@operator("airmoe::softmax_summary")
def softmax_summary(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    row_keys: Tensor | None,
    noise_std: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """`reference.softmax_summary`: log Z [T] and mean probabilities [E], float32."""
    tensors = hidden.contiguous(), experts.contiguous(), weights.float().contiguous()
    return summarize(*tensors, _noise(row_keys, noise_std), normalize)


@operator("airmoe::softmax_summary_backward")
def softmax_summary_backward(
    grad_log_z: Tensor | None,
    grad_mean: Tensor | None,
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    log_z: Tensor,
    row_keys: Tensor | None,
    noise_std: float,
    normalize: bool,
    want_hidden: bool,
    want_experts: bool,
) -> list[Tensor]:
    """Gradients of those of (hidden, experts) that are wanted, in this order."""
    return gradients(
        torch.zeros_like(log_z) if grad_log_z is None else grad_log_z.contiguous(),
        log_z.new_zeros(experts.shape[0]) if grad_mean is None else grad_mean,
        hidden.contiguous(), experts.contiguous(), weights.float().contiguous(), log_z,
        _noise(row_keys, noise_std), normalize=normalize,
        want_hidden=want_hidden, want_experts=want_experts,
    )  # fmt: skip


@softmax_summary.register_fake
def _(hidden: Tensor, experts: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    log_z, mean = (
        hidden.new_empty(each.shape[0], dtype=torch.float32) for each in (hidden, experts)
    )
    return log_z, mean


@softmax_summary_backward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    wanted = zip(inputs[2:4], inputs[-2:], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, want in wanted if want]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, experts, weights, row_keys, ctx.noise_std, ctx.normalize = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, experts, weights, output[0], row_keys)


def _backward(
    ctx: Any, grad_log_z: Tensor | None, grad_mean: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_log_z is None and grad_mean is None:
        return (None,) * 6
    wanted = ctx.needs_input_grad[:2]
    found = iter(
        softmax_summary_backward(
            grad_log_z, grad_mean, *ctx.saved_tensors, ctx.noise_std, ctx.normalize, *wanted
        )
    )
    return (*(next(found) if want else None for want in wanted), None, None, None, None)


softmax_summary.register_autograd(_backward, setup_context=_save)
