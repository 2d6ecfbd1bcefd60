"""What the model computes: Llama around our layers, losses that add up, padding kept out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from airmoe import ConfigError, MoELayer, load_balance_loss, router_z_loss, shortlist_balance_loss
from airmoe.kernels import linear_cross_entropy as reference
from airmoe.model import AirMoeConfig
from tests.model.common import (
    CAUSAL,
    SMALL,
    VARIANTS,
    assert_close_gradients,
    batch,
    build,
    config_of,
)
from tests.model.test_linear_cross_entropy import LargestTensor
from tests.state.common import assert_same, checkpoint_activations, counting_observe, snapshot

ALL_WEIGHTS = {"load_balance_weight": 0.3, "shortlist_balance_weight": 0.2, "router_z_weight": 0.1}


def masked(ids: Tensor, padding: tuple[int, ...] = (0, 4, 7)) -> tuple[Tensor, Tensor]:
    """Mask and labels of a batch padded on the right."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, ids.shape[1] - count :] = 0
    return mask, ids.masked_fill(mask == 0, -100)


def test_a_dense_model_is_llama() -> None:
    model = build("dense").eval()
    fields = {name: getattr(model.config, name) for name in LlamaConfig().to_dict()}
    llama = LlamaForCausalLM(LlamaConfig(**{**fields, "architectures": None})).eval()
    llama.load_state_dict(model.state_dict())
    ids = batch(0)
    mask, labels = masked(ids)
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(model(**inputs).logits, llama(**inputs).logits)
    expected = llama(**inputs, labels=labels)
    torch.testing.assert_close(model(**inputs, labels=labels).loss, expected.loss)
    for items in (7, torch.tensor(7)):
        expected = llama(**inputs, labels=labels, num_items_in_batch=items)
        found = model(**inputs, labels=labels, num_items_in_batch=items)
        torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_is_that_of_the_logits(variant: str) -> None:
    model, ids = build(variant).eval(), batch(0)
    mask, labels = masked(ids)
    output = model(ids, attention_mask=mask, labels=labels, return_logits=True)
    logits = model(ids, attention_mask=mask).logits
    assert torch.equal(output.logits, logits)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    assert torch.equal(output.loss, output.language_loss)
    assert output.load_balance_loss is None  # evaluation


def test_with_labels_there_are_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("air"), batch(0, (4, 40))
    monkeypatch.setattr(reference, "CPU_CHUNK_BYTES", 8 * 10 * SMALL["vocab_size"])
    for mode in (True, False):
        model.train(mode)
        with LargestTensor() as largest:
            output = model(ids, labels=ids)
            output.loss.backward()
        assert output.logits is None
        assert largest.elements < ids.numel() * SMALL["vocab_size"]
        with LargestTensor() as largest:
            model(ids)
        assert largest.elements == ids.numel() * SMALL["vocab_size"], "the measurement itself"
    assert model(ids, return_logits=False).logits is None
    few = model(ids, logits_to_keep=3).logits
    torch.testing.assert_close(few, model(ids).logits[:, -3:])
    assert torch.equal(model(ids, labels=ids, return_dict=False)[0], output.loss)


@pytest.mark.parametrize("variant", ["air", "hierarchical"])
@pytest.mark.parametrize("items", [None, 100, torch.tensor(100)])
def test_router_losses_are_added_at_their_weights(variant: str, items: Any) -> None:
    """Two MoE layers: summed in the loss, averaged by name, scaled by their part of the window."""
    model = build(variant, moe_layers=[0, 2], **ALL_WEIGHTS)
    routings = []
    for layer in model.model.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.router.register_forward_hook(lambda *args: routings.append(args[2]))
    mask, labels = masked(batch(1))
    output = model(batch(1), attention_mask=mask, labels=labels, num_items_in_batch=items)
    count = int((labels[:, 1:] != -100).sum())
    share = 1.0 if items is None else count / 100
    assert len(routings) == 2
    expected = output.language_loss
    for name, loss, weight in (
        ("load_balance_loss", load_balance_loss, 0.3),
        ("shortlist_balance_loss", shortlist_balance_loss, 0.2),
        ("router_z_loss", router_z_loss, 0.1),
    ):
        raw = torch.stack([loss(routing) for routing in routings]).detach()
        torch.testing.assert_close(output[name], raw.mean())
        assert not output[name].requires_grad
        expected = expected + weight * share * raw.sum()
    torch.testing.assert_close(output.loss.detach(), expected)


def test_micro_batches_of_a_window_add_up() -> None:
    """Uneven micro-batches with num_items_in_batch give the gradients of the mean over targets."""
    whole, parts = (build("topk", router_options={"jitter_std": 0.0}) for _ in range(2))
    for model in (whole, parts):
        model.config.load_balance_weight = 0.0
    mask, labels = masked(batch(2))
    items = int((labels[:, 1:] != -100).sum())
    whole(batch(2), attention_mask=mask, labels=labels).loss.backward()
    for rows in (slice(0, 1), slice(1, 3)):
        inputs = {"attention_mask": mask[rows], "labels": labels[rows]}
        parts(batch(2)[rows], **inputs, num_items_in_batch=items).loss.backward()
    assert_close_gradients(parts, whole)


def test_scaling_the_loss_in_place_leaves_the_logged_one() -> None:
    """As the Trainer does on several ranks."""
    output = build("dense")(batch(0), labels=batch(0))
    before = output.language_loss.clone()
    output.loss *= 3
    assert torch.equal(output.language_loss, before)
    assert torch.equal(output.loss.detach(), 3 * before)


def test_no_target_at_all_is_a_loss_of_zero() -> None:
    model = build("air", load_balance_weight=0.0)
    output = model(batch(0), labels=torch.full_like(batch(0), -100))
    output.loss.backward()
    assert output.loss == 0
    assert all((weight.grad == 0).all() for weight in model.parameters())


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dense"])
def test_padding_is_as_if_absent(variant: str) -> None:
    """Masked tokens change no statistic, codebook, loss or gradient."""
    states = []
    for filler in (1, 2):
        model = build(variant, router_z_weight=0.1)
        mask, labels = masked(batch(3))
        ids = batch(3).masked_fill(mask == 0, filler)
        output = model(ids, attention_mask=mask, labels=labels)
        output.loss.backward()
        states.append(snapshot(model) | {"loss": output.loss.detach(), "z": output.router_z_loss})
    assert_same(states[1], states[0])


def test_the_mask_reaches_the_router_with_a_cache_too() -> None:
    model, ids = build("air").eval(), batch(4)
    mask, _ = masked(ids)
    seen = []
    model.model.layers[1].mlp.router.register_forward_hook(
        lambda _module, args, _routing: seen.append(args[1].view(3, -1))
    )
    with torch.no_grad():
        start = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
        model(ids[:, 9:], attention_mask=mask, past_key_values=start.past_key_values)
    assert torch.equal(torch.cat(seen, dim=1), mask.bool())


def test_masks_between_positions_leave_all_tokens_in() -> None:
    model, ids = build("air"), batch(4)
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(3, 1, 12, 12)
    with counting_observe(model.model.layers[1].mlp.router) as seen:
        found = model(ids, attention_mask=causal).logits
    assert seen == [36]
    torch.testing.assert_close(found, build("air")(ids).logits)


@pytest.mark.parametrize("variant", CAUSAL)
def test_later_tokens_have_no_influence(variant: str) -> None:
    model, ids = build(variant).eval(), batch(5)
    changed = ids.clone()
    changed[:, 8:] = batch(6)[:, 8:]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, :8], model(changed).logits[:, :8])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_hidden_states_and_attentions_are_recorded(checkpointing: bool) -> None:
    model, ids = build("air", attn_implementation="eager", moe_layers=[0, 2]), batch(7)
    if checkpointing:
        checkpoint_activations(model)
    output = model(ids, labels=ids, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 4 and len(output.attentions) == 3
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ids))
    # The last is normed, and the others are what the layers gave: tensors, not tuples.
    logits = model.lm_head(output.hidden_states[-1])
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.language_loss, expected)
    assert all(hidden.shape == (3, 12, 16) for hidden in output.hidden_states)
    for weights in output.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 12))
        assert (weights.triu(1) == 0).all()


def test_restarting_positions_separate_two_texts() -> None:
    model, ids = build("air").eval(), batch(7)
    positions = torch.cat([torch.arange(5), torch.arange(ids.shape[1] - 5)]).expand_as(ids)
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed[:, :5], model(ids[:, :5]).logits)
        torch.testing.assert_close(packed[:, 5:], model(ids[:, 5:]).logits)


def test_moe_layers_are_where_the_config_says() -> None:
    config = AirMoeConfig(**{**SMALL, "moe_layers": [0, 2], "expert_size": 2})
    model = build(moe_layers=config.moe_layers, expert_size=2, moe_post_norm="none")
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer.mlp, MoELayer) == (index != 1)
    layer = model.model.layers[0].mlp
    assert layer.experts.expert_size == 2 and layer.post_norm is None
    assert layer.router.config == model.config.router_config()


def test_router_logits_are_refused_and_never_ignored() -> None:
    model, ids = build("air"), batch(7)
    assert model(ids, output_router_logits=False).logits.shape == (3, 12, 53)
    for asked in (model, model.model):
        with pytest.raises(ConfigError, match=r"output_router_logits: got True.*full_logits"):
            asked(ids, output_router_logits=True)
    with pytest.raises(ConfigError, match=r"output_router_logits: got True.*is not an option"):
        config_of("air", output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ConfigError, match="output_router_logits: got True"):
        model(ids)
