"""Swapped layers learn neither from padding nor from what the model writes, though decoders pass
them neither mask nor cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe import MoELayer, MoEOutput, swap_ffn
from airmoe.kernels.backend import use_backend
from tests.adapt.models import WIDTH, air, dense, ids, layer_of
from tests.state.common import assert_same, checkpoint_activations

pytestmark = pytest.mark.filterwarnings("ignore:AirRouter is trained without", "ignore:codebook")
PADDED = 4  # positions at the start of the first five rows


def swapped() -> Any:
    """Layers 0 and 2, by two calls, in training."""
    model = dense()
    for layer in (0, 2):
        swap_ffn(model, layers=[layer], router=air())
    return model.train()


def batch(filler: int = 0) -> dict[str, Tensor]:
    """Eight rows whose padding holds `filler`."""
    tokens = ids(batch=8, length=9)
    mask = torch.ones_like(tokens)
    mask[:5, :PADDED] = 0
    return {"input_ids": torch.where(mask == 0, filler, tokens), "attention_mask": mask}


def run(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the routers have learned after one training forward and backward; and the gradients."""
    torch.manual_seed(0)
    logits = model(**inputs, use_cache=False).logits
    logits[inputs["attention_mask"] != 0].square().mean().backward()
    state = {name: value for name, value in model.state_dict().items() if ".router." in name}
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return state | {f"{name}.grad": grad for name, grad in grads.items() if grad is not None}


def test_codebooks_learn_from_real_tokens_only() -> None:
    model = swapped()
    others = [copy.deepcopy(layer_of(model, index).router) for index in (0, 2)]
    seen: list[Tensor] = []
    for index in (0, 2):
        layer_of(model, index).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    state = run(model, batch())
    real = batch()["attention_mask"] != 0
    for index, other, hidden in zip((0, 2), others, seen, strict=True):
        other.observe(hidden.detach()[real])
        prefix, wanted = f"model.layers.{index}.mlp.router.", other.state_dict()
        assert_same({name: state[prefix + name] for name in wanted}, dict(wanted))
    assert float(others[0].codebook.counts.sum()) == pytest.approx(8 * 9 - 5 * PADDED)
    assert_same(run(swapped(), batch(filler=7)), state)  # whatever the padding is


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    model = swapped()
    checkpoint_activations(model, use_reentrant)
    assert_same(run(model, batch()), run(swapped(), batch()))


@pytest.mark.slow
def test_compiled_layers_learn_the_same() -> None:
    model = dense(num_hidden_layers=1).train()
    swap_ffn(model, layers=[0], router=air())
    eager = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend="eager")
    for padded in (0, 7):  # the second time with the mask of its own batch
        inputs = batch()
        inputs["attention_mask"][6, :padded] = 0
        for one in (compiled, eager):
            torch.manual_seed(0)
            one(**inputs)
    actual, expected = (layer_of(one, 0).router.state_dict() for one in (model, eager))
    assert_same(actual, expected)


def test_a_layer_in_one_graph_learns_the_same() -> None:
    """Where Triton computes, the mask is part of the graph."""
    ends = []
    router = air(top_k=2, num_experts=6, shortlist_size=4, num_codewords=2)
    for compiles in (False, True):
        torch.manual_seed(0)
        (layer,) = swap_ffn(dense(), layers=[0], router=router)
        layer.train().requires_grad_(False)
        for _ in range(2):  # until the host knows that the codebook has started
            layer(torch.randn(2, 4, WIDTH))

        def step(x: Tensor, mask: Tensor, layer: Any = layer) -> Tensor:
            layer.attention_mask = mask
            output = layer(x)
            layer.attention_mask = None
            return output

        outputs = {}
        with use_backend("triton"):
            run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiles else step
            for number, mask in enumerate(([[0, 1, 1]], [[0, 0, 1]])):
                torch.manual_seed(number)
                outputs[str(number)] = run(torch.randn(1, 3, WIDTH), torch.tensor(mask))
        ends.append(outputs | layer.router.state_dict())
    assert_same(ends[1], ends[0])


def test_masks_as_decoders_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = swapped(), []

    def forward(layer: Any, x: Tensor, mask: Tensor | None, **_: Any) -> Any:
        seen.append(mask)
        return MoEOutput(x, None)  # type: ignore[arg-type]

    monkeypatch.setattr(MoELayer, "forward_with_routing", forward)
    part = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])  # the first position is in the cache
    layer, x = layer_of(model, 2), torch.randn(2, 3, WIDTH)
    layer.attention_mask = part
    layer.forward_with_routing(x)
    assert torch.equal(seen.pop(), part[:, 1:] != 0)
    for misfit in (torch.ones(4, 3), torch.ones(2, 2)):
        layer.attention_mask = misfit
        layer.forward_with_routing(x)
        assert seen.pop() is None
    decoder, layer.attention_mask = model.get_decoder(), None
    whole = torch.ones(2, 1, 3, 3, dtype=torch.bool)  # who sees whom
    for mask, expected in ((part[:, 1:], part[:, 1:] != 0), (whole, None), (None, None)):
        for args, kwargs in (((), {"attention_mask": mask}), ((mask,), {})):
            decoder(ids(batch=2, length=3), *args, **kwargs)
            first, second = seen.pop(), seen.pop()
            assert first is second is None if expected is None else torch.equal(first, expected)
    assert layer.attention_mask is None and not layer.has_cache


def test_a_mask_is_forgotten_after_its_batch() -> None:
    model = swapped()
    failing = layer_of(model, 2).register_forward_hook(lambda *_: 1 / 0)
    with failing, pytest.raises(ZeroDivisionError):
        model(**batch())
    assert layer_of(model, 0).attention_mask is layer_of(model, 2).attention_mask is None


def test_nothing_is_learned_from_what_a_model_writes() -> None:
    model = swapped()
    run(model, batch())
    before = copy.deepcopy(model.state_dict())
    written = model.generate(**batch(), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert written.shape[1] > batch()["input_ids"].shape[1]
    assert_same(model.state_dict(), before)
