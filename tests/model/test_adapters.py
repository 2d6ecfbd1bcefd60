"""Adapters (PEFT): every one trains, and its file holds all that training changed."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe import AirRouter, PeerRouter, track_optimizer
from tests.model.common import VARIANTS, batch, build, learn_a_little

peft: Any = pytest.importorskip("peft")


def adapted(model: Any, targets: Any, **options: Any) -> Any:
    settings = peft.LoraConfig(
        target_modules=targets, r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(model, settings)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=batch(9)).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_adapter_gets_a_gradient(variant: str) -> None:
    model = adapted(build(variant), "all-linear").train()
    model(input_ids=batch(1), labels=batch(1)).loss.backward()
    adapters = {name: w.grad for name, w in model.named_parameters() if "lora_" in name}
    assert ("query" in " ".join(adapters)) == (variant == "peer")
    for name, grad in adapters.items():
        assert grad is not None and grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_on_queries_is_the_sum_of_both_products(dtype: torch.dtype) -> None:
    """Without one nothing changes: the product is in float32 at any dtype of the weights."""
    torch.manual_seed(0)
    router = PeerRouter.Config(dim=8, num_experts=36, top_k=4, num_heads=2).build().to(dtype)
    hidden = torch.randn(50, 8).to(dtype)
    plain = hidden.float() @ router.query.weight.float().T
    assert list(router.query.state_dict()) == ["weight"]
    assert torch.equal(router.query(hidden), plain)
    before = router.full_logits(hidden)
    settings = peft.LoraConfig(target_modules=["query"], r=2, init_lora_weights=False)
    query = peft.inject_adapter_in_model(settings, router).query
    added = query.lora_B["default"](query.lora_A["default"](hidden)) * query.scaling["default"]
    halves = (plain + added.float()).view(50, 2, 2, 4)  # [T, P, 2, D / 2]
    first, second = torch.einsum("tphd,phsd->tphs", halves, router.keys.float()).unbind(2)
    expected = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(2)
    found = router.full_logits(hidden)
    torch.testing.assert_close(found, expected)
    assert (found - before).abs().max() > 0.1


@pytest.mark.parametrize("items", [None, 40])
def test_an_adapter_on_the_head_counts_in_the_loss(items: int | None) -> None:
    """The chunked loss multiplies with plain heads itself, but calls a head with an adapter."""
    model = adapted(build("topk", router_options={"jitter_std": 0.0}), ["lm_head"])
    labels = batch(2).clone()
    labels[0, 4:] = -100
    output = model(input_ids=batch(2), labels=labels, return_logits=True, num_items_in_batch=items)
    logits = output.logits[:, :-1].flatten(0, 1)
    summed = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    expected = summed / ((labels[:, 1:] != -100).sum() if items is None else items)
    torch.testing.assert_close(output.language_loss, expected)
    adapters = [w for name, w in model.named_parameters() if "lora_" in name]
    wanted = torch.autograd.grad(expected, adapters, retain_graph=True)
    output.loss.backward()
    for weight, grad in zip(adapters, wanted, strict=True):
        assert grad.abs().sum() > 0
        torch.testing.assert_close(weight.grad, grad)


def fine_tuned(base: Any, folder: Path, **options: Any) -> tuple[Tensor, Tensor]:
    """Logits of an adapted copy after training, and of another one that loads its adapter."""
    model = adapted(copy.deepcopy(base), ["q_proj", "v_proj"], **options).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    track_optimizer(model, optimizer)
    for step in range(4):
        model(input_ids=batch(step), labels=batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
    return logits_of(model), logits_of(loaded)


def test_with_a_frozen_codebook_the_adapter_is_all_that_changed(tmp_path: Path) -> None:
    base = learn_a_little(build("air"))
    for module in base.modules():
        if isinstance(module, AirRouter):
            module.freeze_codebook()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # peft's own call, under the name that transformers 5.23 deprecates.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        found, loaded = fine_tuned(base, tmp_path)
    assert torch.equal(found, loaded)
    assert (found - logits_of(base)).abs().max() > 1e-2
