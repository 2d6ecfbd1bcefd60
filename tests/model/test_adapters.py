"""Adapters (PEFT): every one trains, and its file holds all that training changed."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe import AirRouter, track_optimizer
from tests.model.common import VARIANTS, batch, build, learn_a_little, logits_of

peft: Any = pytest.importorskip("peft")


def adapted(model: Any, targets: Any, **options: Any) -> Any:
    settings = peft.LoraConfig(
        target_modules=targets, r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(model, settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_adapter_gets_a_gradient(variant: str) -> None:
    model = adapted(build(variant), "all-linear").train()
    model(input_ids=batch(1), labels=batch(1)).loss.backward()
    adapters = {name: w.grad for name, w in model.named_parameters() if "lora_" in name}
    assert ("query" in " ".join(adapters)) == (variant == "peer")
    for name, grad in adapters.items():
        assert grad is not None and grad.abs().sum() > 0, name


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


def test_a_codebook_that_keeps_learning_warns_once(tmp_path: Path) -> None:
    """The routing of a frozen layer then changes, and the adapter's file does not hold that."""
    base = learn_a_little(build("air"))
    with pytest.warns(UserWarning, match="freeze_codebook") as told:
        found, loaded = fine_tuned(base, tmp_path)
    assert sum("freeze_codebook" in str(warning.message) for warning in told) == 1
    assert not torch.equal(found, loaded)


@pytest.mark.parametrize("trained", ["experts", "router", "post_norm", "nothing", "a new codebook"])
def test_no_warning_without_reason(trained: str) -> None:
    """If a part of the layer trains, without gradients, or while the codebook starts."""
    model = build("air")
    if trained != "a new codebook":
        learn_a_little(model)
    model.train().requires_grad_(False)
    for name, weight in model.named_parameters():
        weight.requires_grad_(f"mlp.{trained}" in name or "q_proj" in name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*freeze_codebook")
        with torch.set_grad_enabled(trained != "nothing"):
            model(batch(1), labels=batch(1))
