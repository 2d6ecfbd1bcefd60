"""Swapped models train like any other: gradients, checkpointing, Trainer, compilers, PEFT."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import airmoe
from tests.adapt.models import (
    BUILD,
    EXPERTS,
    SWAPPED,
    build,
    calibrated,
    fitted,
    gradients,
    granular,
    ids,
    logits_of,
    routed,
    run,
    stock_routers,
    swap,
    swapped_routers,
)
from tests.model.common import trainer_of
from tests.state.common import assert_same, checkpoint_activations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:AirRouter is trained without", "ignore:codebook"),
]
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-6}


@pytest.mark.parametrize("family", BUILD)
def test_gradients_are_those_of_the_masked_dense_router(family: str) -> None:
    """Score everything, mask what is outside the shortlist, select: plain autograd."""
    model = calibrated(family).train()
    found = gradients(model)
    routers = swapped_routers(model)

    def dense(router: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = hidden.reshape(-1, router.hidden_dim)
            logits = hidden @ router.weight.T
            logits = logits if router.expert_bias is None else logits + router.bias
            allowed = router.shortlists()[router.codebook.assign(hidden)]
            inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, allowed, True)
            logits = logits.masked_fill(~inside, -torch.inf)
            return logits, *router.select(logits, hidden.dtype)

        return forward

    for router in routers:
        router.forward = dense(router)
    torch.testing.assert_close(found, gradients(model), **CLOSE)
    assert all(router.weight.grad.abs().sum() > 0 for router in routers)


@pytest.mark.parametrize("kind", SWAPPED)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(kind: str, reentrant: bool) -> None:
    """Swapped routers keep their codebooks in training, new experts' codebooks learn once."""
    model, plain = SWAPPED[kind](), SWAPPED[kind]()
    checkpoint_activations(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    for seed in (6, 7):
        found, expected = (run(one, seed, use_cache=False) for one in (model, plain))
    torch.testing.assert_close(found, expected, **CLOSE)
    before = SWAPPED[kind]().state_dict()
    for name in before:
        if kind in BUILD and ".codebook." in name:
            assert torch.equal(model.state_dict()[name], before[name]), name


TEXT = [{"input_ids": ids(index)[0], "labels": ids(index)[0]} for index in range(12)]
STEPS: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
}
STEPS |= {"learning_rate": 1e-2, "save_strategy": "no"}


def trained(model: Any, folder: Path, resume: str | None = None, **options: Any) -> Any:
    """Three steps of the Trainer, nothing about airmoe in it."""
    torch.manual_seed(0)
    trainer = trainer_of(model, folder, TEXT, **{**STEPS, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("family", BUILD)
def test_three_trainer_steps(family: str, tmp_path: Path) -> None:
    """With all experts as stock; with shortlists those follow the weights, the codebook stays."""
    stock, whole = build(family), calibrated(family, size=EXPERTS)
    for model in (stock, whole):
        trained(model, tmp_path)
    torch.testing.assert_close(logits_of(whole), logits_of(stock), rtol=0, atol=1e-5)
    short = calibrated(family)
    routers = swapped_routers(short)
    lists = [router.shortlists() for router in routers]
    weights = [router.weight.detach().clone() for router in routers]
    codebooks = [copy.deepcopy(router.codebook.state_dict()) for router in routers]
    logits_of(short)  # lists are cached now
    trainer = trained(short, tmp_path)
    short.eval()
    with torch.no_grad():
        for router, old, weight, codebook in zip(routers, lists, weights, codebooks, strict=True):
            assert not torch.equal(router.weight, weight)
            now = router.ranking(router.codebook.representatives())[:, :8].sort(-1).values
            assert torch.equal(router.shortlists(), now)
            assert_same(dict(router.codebook.state_dict()), dict(codebook))
            router.weight.neg_()
            assert not torch.equal(router.shortlists(), old)
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("family", BUILD)
def test_label_smoothing_predicts_the_next_token_as_stock_does(family: str, tmp_path: Path) -> None:
    """The Trainer knows by the name of a model's class whether to shift its labels."""
    found = []
    for model in (build(family).eval(), calibrated(family, size=EXPERTS)):
        inputs = {"input_ids": ids(6), "labels": ids(6)}
        trainer = trainer_of(model, tmp_path, label_smoothing_factor=0.1)
        with torch.no_grad():
            found.append(trainer.compute_loss(model, inputs))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainer_trains_and_saves_new_experts(dtype: torch.dtype, tmp_path: Path) -> None:
    model = granular(dtype)
    before = copy.deepcopy(model.state_dict())
    trained(model, tmp_path, save_strategy="steps", save_steps=3)
    after = model.state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    for part in ("0.mlp.experts.gate", "2.mlp.experts.down", "2.mlp.router.centroids"):
        assert f"model.layers.{part}" in moved, part
    updates = "model.layers.0.mlp.router.codebook.updates"
    assert after[updates] - before[updates] == 3  # once per micro-batch
    # The Trainer's checkpoint is a saved model like any other.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert_same(loaded.state_dict(), after)


def test_the_trainer_resumes(tmp_path: Path) -> None:
    """Bit for bit. Where checkpoints keep experts apart, stock models do not resume either."""
    steps = {"save_strategy": "steps", "save_steps": 2}
    whole, resumed = calibrated("gpt_oss"), swap(build("gpt_oss"))
    trained(whole, tmp_path, **steps)
    trained(resumed, tmp_path, resume=str(tmp_path / "checkpoint-2"), **steps)
    assert_same(resumed.state_dict(), whole.state_dict())
    with routed(resumed) as answers:
        assert torch.equal(logits_of(resumed), logits_of(whole))
    assert not answers[0][0].isfinite().all()  # the codebook came with the checkpoint


def test_shortlists_follow_an_optimizer_that_leaves_no_trace() -> None:
    """`.data` moves no version counter, like fused optimizers."""
    model = calibrated("mixtral")
    router = swapped_routers(model)[0]
    with torch.no_grad():
        before = router.shortlists()
    model(ids(6), labels=ids(6)).loss.backward()  # training in evaluation mode
    router.weight.data.neg_()
    with torch.no_grad():
        assert not torch.equal(router.shortlists(), before)
    model.train()
    router.weight.data.neg_()
    model.eval()
    with torch.no_grad():
        assert torch.equal(router.shortlists(), before)
        router.weight.data.neg_()  # an average of weights, say, tried out in evaluation
        model.eval()
        assert not torch.equal(router.shortlists(), before)


def test_shortlists_follow_a_bias_that_learns_alone() -> None:
    model = calibrated("gpt_oss").train()
    router = swapped_routers(model)[0]
    router.weight.requires_grad_(False)
    assert not torch.equal(router.shortlists(), router.bias.topk(8).indices.sort().values)
    router.bias.data.mul_(1e4)
    only_bias = router.bias.topk(8).indices.sort().values
    assert torch.equal(router.shortlists(), only_bias.expand(4, -1))


def test_lists_made_in_inference_mode_serve_in_training() -> None:
    """The rest of the model trains on, the routers are frozen: their cached lists are used."""
    model = calibrated("mixtral")
    for router in swapped_routers(model):
        router.weight.requires_grad_(False)
    with torch.inference_mode():
        model(ids(1))
    router = swapped_routers(model)[0]
    cached = router._cached
    assert cached is not None
    found = gradients(model)
    assert router._cached is cached
    router._cached = None
    torch.testing.assert_close(gradients(model), found, **CLOSE)


def test_torch_compile() -> None:
    torch._dynamo.reset()
    model = calibrated("mixtral").eval()
    expected = logits_of(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids(1)).logits, expected, rtol=0, atol=1e-5)
        swapped_routers(model)[0].weight.neg_()  # the graph must not keep the old lists
        other = compiled(ids(1)).logits
    torch.testing.assert_close(other, logits_of(model), rtol=0, atol=1e-5)
    assert (other - expected).abs().max() > 1e-3
    expected = gradients(model.train())
    found = {n.removeprefix("_orig_mod."): grad for n, grad in gradients(compiled).items()}
    torch.testing.assert_close(found, expected, **CLOSE)
    torch._dynamo.reset()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_lora_beside_new_experts() -> None:
    from peft import LoraConfig, get_peft_model  # pyright: ignore

    model = granular()
    expected = logits_of(model)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    torch.testing.assert_close(logits_of(wrapped), expected)
    wrapped.train()(input_ids=ids(), labels=ids()).loss.backward()
    grads = [name for name, weight in wrapped.named_parameters() if weight.grad is not None]
    assert grads and all("lora_" in name for name in grads)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("swap_first", [True, False])
def test_lora_on_the_rest_of_the_model(swap_first: bool, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model  # pyright: ignore

    settings = LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
    if swap_first:
        model = get_peft_model(calibrated("mixtral"), settings)
    else:
        model = fitted(get_peft_model(build("mixtral"), settings))
    before = [router.weight.detach().clone() for router in swapped_routers(model)]
    with routed(model.base_model.model) as answers:
        start = logits_of(model)
    assert not answers[0][0].isfinite().all()
    trained(model, tmp_path)
    assert (logits_of(model) - start).abs().max() > 1e-4
    for router, weight in zip(swapped_routers(model), before, strict=True):
        assert torch.equal(router.weight, weight) and not router.weight.requires_grad
    model.save_pretrained(str(tmp_path / "adapter"))
    base = calibrated("mixtral")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    if swap_first:
        torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=1e-5)
    airmoe.restore_routers(model)
    assert not swapped_routers(model)


def test_accelerate_hooks_run_the_swapped_forward() -> None:
    """With a device map Accelerate keeps each module's forward on the instance."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = build("mixtral")
    for router in stock_routers(model):
        add_hook_to_module(router, AlignDevicesHook("cpu"))
    assert torch.equal(logits_of(fitted(model)), logits_of(calibrated("mixtral")))
    airmoe.restore_routers(model)
    assert torch.equal(logits_of(model), logits_of(build("mixtral")))
