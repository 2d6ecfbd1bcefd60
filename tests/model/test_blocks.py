"""Fused projections and norms give the same numbers, and hooks and adapters still run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from airmoe.kernels.backend import use_backend
from airmoe.model.blocks import Attention, FeedForward, add_and_norm, keep_apart, project
from tests.kernels.comparison import DEVICE
from tests.model.common import batch, build
from tests.state.common import checkpoint_activations

CONFIG = LlamaConfig(
    hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2
)
CONFIG._attn_implementation = "sdpa"


def results(module: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """Output and all gradients of a fixed functional of it, in float64."""
    hidden = inputs[0].clone().requires_grad_()
    output = module(hidden, *inputs[1:])
    output = output[0] if isinstance(output, tuple) else output
    output.pow(3).sum().backward()
    grads = {name: weight.grad for name, weight in module.named_parameters()}
    found = {"output": output.detach(), "hidden": hidden.grad, **grads}
    assert all(value is not None for value in found.values())
    return found  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["attention", "feed forward", "feed forward, gelu"])
def test_equal_to_llama(kind: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(2, 5, 24, dtype=torch.float64)
    positions = LlamaRotaryEmbedding(CONFIG)(hidden, torch.arange(5).unsqueeze(0))
    if kind == "attention":
        theirs, ours = LlamaAttention(CONFIG, 0), Attention(CONFIG, 0)
        inputs = (hidden, tuple(part.double() for part in positions))
    else:
        monkeypatch.setattr(CONFIG, "hidden_act", "gelu" if "gelu" in kind else "silu")
        theirs, ours = LlamaMLP(CONFIG), FeedForward(CONFIG)
        inputs = (hidden,)
    ours.load_state_dict(theirs.state_dict())  # the same names
    wanted, found = (results(module.double().train(training), *inputs) for module in (theirs, ours))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def linears() -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(6, 3, bias=False), nn.Linear(6, 5, bias=False)


def test_one_product_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, hidden = linears(), torch.randn(2, 4, 6)
    calls: list[tuple[int, ...]] = []
    real = nn.functional.linear

    def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(tuple(weight.shape))
        return real(hidden, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", linear)
    project(hidden, *layers)
    assert calls == [(8, 6)]
    calls.clear()
    project(hidden, *(layer.eval() for layer in layers))
    assert calls == [(3, 6), (5, 6)]


class Adapter(nn.Linear):
    """What libraries replace a layer with."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def doubled(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 2


def test_adapters_biases_and_hooks_are_respected() -> None:
    hidden = torch.randn(2, 4, 6)
    first, second = linears()
    plain = [first(hidden), second(hidden)]
    adapter = Adapter(6, 3, bias=False)
    adapter.load_state_dict(first.state_dict())
    torch.testing.assert_close(project(hidden, adapter, second), [plain[0] + 1, plain[1]])
    biased = nn.Linear(6, 5)
    torch.testing.assert_close(project(hidden, first, biased), [plain[0], biased(hidden)])
    heard = copy.deepcopy(second)
    heard.register_forward_hook(doubled)
    torch.testing.assert_close(project(hidden, first, heard), [plain[0], plain[1] * 2])


def test_replaced_forwards_global_hooks_and_sharded_layers_are_respected() -> None:
    hidden = torch.randn(2, 4, 6)
    first, second = linears()
    plain = [first(hidden), second(hidden)]
    offloaded = copy.deepcopy(first)
    offloaded.to("meta").forward = lambda input: first(input)  # fetches its weight for the call
    torch.testing.assert_close(project(hidden, offloaded, second), plain)
    with nn.modules.module.register_module_forward_hook(doubled):
        torch.testing.assert_close(project(hidden, first, second), [2 * part for part in plain])
    keep_apart(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", lambda _: pytest.fail("joined"))
        torch.testing.assert_close(project(hidden, first, second), plain)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_norms_are_llamas(training: bool, autocast: bool) -> None:
    norm = LlamaRMSNorm(6).train(training)
    nn.init.normal_(norm.weight)
    hidden, delta = torch.randn(2, 4, 6), torch.randn(2, 4, 6).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for added in (None, delta):
            summed, normed = add_and_norm(norm, hidden, added)
            assert torch.equal(summed, hidden if added is None else hidden + added)
            assert torch.equal(normed, norm(summed))
            rounded = add_and_norm(norm, hidden, added, for_products=True)[1]
            assert torch.equal(nn.functional.linear(rounded, hidden[0]), normed @ hidden[0].T)


class OtherNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1


def test_other_norms_and_hooks_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, norm = torch.randn(2, 4, 6), LlamaRMSNorm(6)
    plain = norm(hidden)
    monkeypatch.setattr("airmoe.model.blocks.add_rms_norm", lambda *_: pytest.fail("fused"))
    torch.testing.assert_close(add_and_norm(OtherNorm(6), hidden)[1], plain + 1)
    with nn.modules.module.register_module_forward_hook(doubled):
        torch.testing.assert_close(add_and_norm(norm, hidden)[1], 2 * plain)
    norm.register_forward_hook(doubled)
    torch.testing.assert_close(add_and_norm(norm, hidden)[1], 2 * plain)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_kernels_give_the_same_model(checkpointing: bool) -> None:
    pytest.importorskip("triton")
    results = []
    for backend in ("reference", "triton"):
        model, ids = build("dense").to(DEVICE).train(), batch(0).to(DEVICE)
        if checkpointing:
            checkpoint_activations(model)
        with use_backend(backend):
            loss = model(ids, labels=ids).loss
            loss.backward()
        grads = {name: weight.grad for name, weight in model.named_parameters()}
        results.append({"loss": loss.detach(), **grads})
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
