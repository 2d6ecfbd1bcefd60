"""Training: it learns, and checkpointing, compilation, the Trainer and ranks change nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import TrainerCallback

import airmoe
from tests.distributed.launch import run_all
from tests.model.common import VARIANTS, assert_close_gradients, batch, build, trainer_of
from tests.model.ranks import sharded, window
from tests.state.common import EXTRA, assert_same, checkpoint_activations, snapshot, two_steps

pytestmark = pytest.mark.filterwarnings("ignore:codebook:UserWarning")

MOE = [name for name in VARIANTS if name != "dense"]
WEIGHTS = {"load_balance_weight": 0.1, "router_z_weight": 0.1}


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_batch_is_memorised(variant: str) -> None:
    model = build(variant, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    if variant != "dense":
        airmoe.track_optimizer(model, optimizer)
    ids = batch(30, (2, 16))
    losses = [torch.inf]
    while losses[-1] >= 0.05 and len(losses) <= 300:
        output = model(ids, labels=ids)
        losses.append(float(output.language_loss))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.05, losses[-10:]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpu_trains_like_the_cpu(variant: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = build(variant, **WEIGHTS).to(device).train()
        output = model(batch(0).to(device), labels=batch(0).to(device))
        output.loss.backward()
        found.append(snapshot(model) | {"loss": output.loss.detach()})
    for name, value in found[0].items():
        if name.endswith((".entries", ".starts")):
            continue  # the reverse index, which only Triton's kernels need
        other = found[1][name].cpu()
        torch.testing.assert_close(other, value, rtol=2e-4, atol=2e-5, msg=name)


def trained(variant: str, use_reentrant: bool | None) -> dict[str, Tensor]:
    model = build(variant, attention_dropout=0.1, moe_layers=[0, 2], **WEIGHTS).train()
    if use_reentrant is not None:
        checkpoint_activations(model, use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    airmoe.track_optimizer(model, optimizer)
    torch.manual_seed(1)
    return two_steps(model, optimizer, [batch(index) for index in range(4)])


@pytest.mark.parametrize("variant", MOE)
def test_gradient_checkpointing_changes_nothing(variant: str) -> None:
    """Gradients of every loss and the whole state, with jitter and dropout on."""
    plain = trained(variant, None)
    for use_reentrant in (True, False):
        assert_same(trained(variant, use_reentrant), plain, f"use_reentrant={use_reentrant}")


@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("variant", MOE)
def test_a_custom_loss_trains_the_routers_too(variant: str, use_reentrant: bool | None) -> None:
    """With `router_loss` beside it, the cross entropy of the logits has the gradients of `loss`."""
    weights = {**WEIGHTS, "moe_layers": [0, 2]}
    if variant in ("air", "hierarchical"):
        weights["shortlist_balance_weight"] = 0.1
    built_in, own = (build(variant, **weights).train() for _ in range(2))
    if use_reentrant is not None:
        checkpoint_activations(own, use_reentrant)
    ids = batch(0)
    expected = built_in(ids, labels=ids)
    expected.loss.backward()
    found = own(ids)
    language = F.cross_entropy(found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (language + found.router_loss).backward()
    torch.testing.assert_close(language + found.router_loss, expected.loss)
    torch.testing.assert_close(found.router_loss, expected.loss - expected.language_loss)
    assert torch.equal(found.router_loss, expected.router_loss)
    assert_close_gradients(own, built_in)


def test_there_is_no_router_loss_without_weights_or_in_evaluation() -> None:
    unweighted, dense = build("air", load_balance_weight=0.0), build("dense")
    for model in (unweighted.train(), dense.train(), build("air").eval()):
        for labels in (None, batch(0)):
            assert model(batch(0), labels=labels).router_loss is None


@pytest.mark.slow  # the first compilation of a process loads the compiler
@pytest.mark.parametrize("variant", ["air", "peer"])
def test_compiled_and_eager_models_agree(variant: str) -> None:
    eager, model = (build(variant, **WEIGHTS).train() for _ in range(2))
    compiled: Any = torch.compile(model, backend="aot_eager")
    for index in range(2):
        losses = []
        for called in (eager, compiled):
            torch.manual_seed(index)
            losses.append(called(batch(index), labels=batch(index)).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
    assert_close_gradients(model, eager)


def test_the_trainer_trains_and_evaluates_without_logits(tmp_path: Path) -> None:
    """Micro-batches with unequal numbers of targets add up to the mean over all of them."""
    options = {"router_options": {"jitter_std": 0.0}, "load_balance_weight": 0.0}
    model, same = (build("topk", **options) for _ in range(2))
    ids = batch(40, (6, 12))
    labels = ids.clone()
    for row in range(5):
        labels[row, : 2 * row] = -100
    examples: Any = [{"input_ids": ids[row], "labels": labels[row]} for row in range(6)]
    trainer = trainer_of(
        model,
        tmp_path,
        examples,
        save_strategy="no",
        prediction_loss_only=True,
        learning_rate=0.0,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=3,
        max_steps=1,
    )
    trained = trainer.train().training_loss
    measured = trainer.evaluate(examples)["eval_loss"]
    with torch.no_grad():
        whole = same.eval()(ids, labels=labels).loss
        halves = [same(ids[rows], labels=labels[rows]).loss for rows in (slice(3), slice(3, 6))]
    assert trained == pytest.approx(float(whole), rel=1e-5)
    assert measured == pytest.approx(float(sum(halves)) / 2, rel=1e-5)


class NotesRebuilds(TrainerCallback):
    """Which micro-batch each step's lists were built in."""

    def __init__(self, router: Any) -> None:
        self.router, self.built = router, []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.built.append((int(self.router.micro_batches), int(self.router.built_at)))


def test_the_trainer_tracks_its_optimizer_with_our_callback(tmp_path: Path) -> None:
    """Lists are built in the first micro-batch of each step, and only there; also resumed."""
    model = build("air", router_options={**EXTRA["air"], "jitter_std": 0.0})
    (router,) = [module for module in model.modules() if isinstance(module, airmoe.AirRouter)]
    notes = NotesRebuilds(router)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*tracked optimizer")
        callbacks = [airmoe.TrackOptimizerCallback(), notes]
        trainer_of(model, tmp_path, callbacks=callbacks, max_steps=4).train()
        assert notes.built == [(2, 1), (4, 3), (6, 5), (8, 7)]
        assert not router.tracked  # the next optimizer may be another
        whole = snapshot(model, derived=False)
        trainer = trainer_of(model, tmp_path, callbacks=callbacks, max_steps=4)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert notes.built[4:] == [(6, 5), (8, 7)]
    assert_same(snapshot(model, derived=False), whole)


def test_our_callback_leaves_a_dense_model_alone(tmp_path: Path) -> None:
    callbacks = [airmoe.TrackOptimizerCallback()]
    trainer = trainer_of(build("dense"), tmp_path, callbacks=callbacks, max_steps=2)
    assert trainer.train().global_step == 2


def test_the_trainer_without_our_callback_warns_once(tmp_path: Path) -> None:
    model = build("air")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(model, tmp_path, max_steps=3).train()
    told = [str(one.message) for one in caught if "tracked optimizer" in str(one.message)]
    assert len(told) == 1 and "callbacks=[airmoe.TrackOptimizerCallback()]" in told[0]


def test_label_smoothing_predicts_the_next_token(tmp_path: Path) -> None:
    """The Trainer knows by the name of a model's class whether to shift its labels."""
    model, ids = build("air").eval(), batch(3)
    trainer = trainer_of(model, tmp_path, label_smoothing_factor=0.1)
    with torch.no_grad():
        found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, expected)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_all({"window": window, "sharded": sharded}, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "shares"), [(window, 1), (sharded, 2)])
def test_two_ranks_train_like_one_process(
    scenario: Any, shares: int, ranks: dict[str, list[Any]]
) -> None:
    """DDP with unequal rows in a window, where losses add up, and FSDP2, where each has its own."""
    first, second = ranks[scenario.__name__]
    for name, value in scenario(None, lambda: None).items():
        if name == "loss":
            torch.testing.assert_close((first[name] + second[name]) / shares, value)
            continue
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("change", ["bias", "hook", "backward hook", "forward", "two layers"])
def test_a_head_of_more_than_one_product_is_called(change: str) -> None:
    model = build("air").train()
    width, words = model.config.hidden_size, model.config.vocab_size
    calls: list[str] = []
    torch.manual_seed(1)
    if change == "bias":
        model.lm_head = torch.nn.Linear(width, words)
        torch.nn.init.normal_(model.lm_head.bias, std=3)
    elif change == "hook":
        model.lm_head.register_forward_hook(lambda _module, _given, logits: 3 * logits)
    elif change == "backward hook":
        model.lm_head.register_full_backward_hook(lambda *_: calls.append("backward"))
    elif change == "forward":  # as offloading and kernels from the hub replace it
        head, plain = model.lm_head, model.lm_head.forward
        head.forward = lambda states: 3 * plain(states)  # type: ignore[method-assign]
    else:
        model.lm_head = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.Linear(width, words)
        )
    ids = batch(3)
    output = model(ids, labels=ids, return_logits=True)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.language_loss, expected.detach())
    output.loss.backward()
    for weight in model.lm_head.parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0
    assert bool(calls) == (change == "backward hook")
