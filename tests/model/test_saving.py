"""Saving, loading and initial values under transformers' rules: nothing lost or unwritten."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

import airmoe
from airmoe.model import AirMoeForCausalLM, AirMoeModel, draw_weights
from tests.model.common import VARIANTS, batch, build, config_of, learn_a_little, logits_of
from tests.state.common import assert_same, snapshot


@contextmanager
def transformers_log() -> Iterator[list[str]]:
    """What transformers says at level WARNING, where it reports missing and unexpected keys."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Collect(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_model_is_the_saved_one(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = learn_a_little(build(variant)).to(dtype)
    expected = logits_of(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    with transformers_log() as messages:
        result: Any = AirMoeForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, output_loading_info=True
        )
    loaded, info = result
    assert not messages
    assert not any(info.values()), info
    assert_same(snapshot(loaded, derived=False), snapshot(model, derived=False))
    assert torch.equal(logits_of(loaded), expected)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    if dtype == torch.bfloat16:  # `to` rounds the angles of positions, which loading does not
        return
    ends = []
    for one in (model, loaded):  # codebook, noise and counters: training goes on to the bit
        torch.manual_seed(1)
        for step in (10, 11):
            one.train()(batch(step), labels=batch(step)).loss.backward()
        ends.append(snapshot(one))
    assert_same(ends[1], ends[0])


def test_a_model_loaded_in_bfloat16_keeps_exact_statistics(tmp_path: Path) -> None:
    model: Any = learn_a_little(build("air"))
    codebook = {name: b.clone() for name, b in model.named_buffers() if "codebook" in name}
    model.save_pretrained(tmp_path)
    model = AirMoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same({name: model.get_buffer(name) for name in codebook}, codebook)
    router = model.model.layers[1].mlp.router
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert router.training_lists.inverse_norms.dtype == torch.float32
    assert router.noise_seed.dtype == router.micro_batches.dtype == torch.int64
    assert router.micro_batches == 2 and router.codebook.initialized
    assert logits_of(model).dtype == torch.bfloat16


def assert_initialized(model: Any) -> None:
    """Tests fill unwritten memory with NaN and the largest integers; none of it may be left."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device.type == "cpu", name
        if tensor.is_floating_point():
            assert tensor.isfinite().all(), name
        elif tensor.dtype == torch.int64:
            assert (tensor < torch.iinfo(torch.int64).max).all(), name
    for module in model.modules():
        if isinstance(module, airmoe.Router):
            assert module.micro_batches == 0
        if isinstance(module, airmoe.Codebook):
            assert not module.initialized and (module.counts == 0).all()
            torch.testing.assert_close(module.codewords.norm(dim=-1), torch.ones(3))
        if isinstance(module, airmoe.AirRouter):
            assert module.training_lists.key is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_built_without_memory_is_initialised_whole(variant: str) -> None:
    with torch.device("meta"):
        model: Any = AirMoeForCausalLM(config_of(variant))
    model.to_empty(device="cpu").init_weights()
    assert_initialized(model)
    expected = build(variant)
    for name, weight in expected.named_parameters():
        found = model.get_parameter(name)
        if weight.numel() > 100:  # the same distribution: standard deviations of many numbers
            torch.testing.assert_close(found.std(), weight.std(), rtol=0.3, atol=0.0, msg=name)
        else:
            assert torch.equal(found, weight) or weight.std() > 0, name
    learn_a_little(model)
    assert logits_of(model).isfinite().all()


def test_initial_values() -> None:
    model = build("peer", hidden_size=64, num_experts=400)
    layer = model.model.layers[1].mlp
    for weight, std in (
        (model.model.embed_tokens.weight, 64**-0.5),
        (model.model.layers[0].mlp.up_proj.weight, 0.02),
        (layer.experts.up, 0.02),
        (layer.experts.down, 0.02),
        (layer.router.query.weight, 64**-0.5),
    ):
        torch.testing.assert_close(weight.std(), torch.tensor(std), rtol=0.1, atol=0.0)
    torch.testing.assert_close(layer.router.keys.norm(dim=-1), torch.ones(2, 2, 20))
    assert (layer.post_norm.weight == 1).all() and (layer.post_norm.bias == 0).all()


@pytest.mark.parametrize(
    "missing", ["centroids", "codebook.updates", "experts.up", "embed_tokens.weight"]
)
def test_what_a_checkpoint_lacks_is_initialised_and_the_rest_is_kept(
    missing: str, tmp_path: Path
) -> None:
    learn_a_little(build("air")).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (lost,) = [name for name in state if name.endswith(missing)]
    kept = {name: tensor for name, tensor in state.items() if name != lost}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with transformers_log() as messages:
        model: Any = AirMoeForCausalLM.from_pretrained(tmp_path)
    assert any(lost in message for message in messages)
    found = model.state_dict()
    for name, tensor in kept.items():
        assert torch.equal(found[name], tensor), name
    assert found[lost].double().isfinite().all() and not torch.equal(found[lost], state[lost])
    if missing == "centroids":
        torch.testing.assert_close(found[lost].norm(dim=-1), torch.ones(36))


LOAD_PROBE = """
import sys, torch
import airmoe.model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert type(model).__name__ == "AirMoeForCausalLM"
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.mark.slow
def test_auto_classes_know_it_after_one_import(tmp_path: Path) -> None:
    model = learn_a_little(build("air"))
    model.save_pretrained(tmp_path / "model")
    torch.save(batch(9), tmp_path / "ids.pt")
    paths = [str(tmp_path / name) for name in ("model", "ids.pt", "logits.pt")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    probe = subprocess.run(
        [sys.executable, "-c", LOAD_PROBE, *paths], env=env, capture_output=True, text=True
    )
    assert probe.returncode == 0, probe.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits_of(model))


def test_the_body_alone_can_be_loaded(tmp_path: Path) -> None:
    model = learn_a_little(build("air")).eval()
    model.save_pretrained(tmp_path)
    with transformers_log() as messages:
        body = AutoModel.from_pretrained(tmp_path).eval()
    assert type(body) is AirMoeModel and not messages
    with torch.no_grad():
        expected = model.model(batch(9)).last_hidden_state
        assert torch.equal(body(batch(9)).last_hidden_state, expected)


# -- weights drawn from a seed: the modules that two models share start equal --------------------

MOE_LAYER = "model.layers.1.mlp."


def drawn(variant: str, seed: int = 1, before: int = 0) -> dict[str, Tensor]:
    model = build(variant)
    torch.manual_seed(before)
    draw_weights(model, seed)
    return dict(model.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_methods_share_does_not_depend_on_the_method(variant: str) -> None:
    air, other = drawn("air"), drawn(variant)
    body = [name for name in air if not name.startswith(MOE_LAYER)]
    assert len(body) > 20
    if variant in ("topk", "hierarchical", "expert_choice", "air-expert-choice"):
        parts = ("experts.gate", "experts.up", "experts.down", "router.centroids")
        body += [MOE_LAYER + part for part in parts]
    for name in body:
        assert torch.equal(air[name], other[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_seed_decides_and_nothing_else(variant: str) -> None:
    one, again, other = drawn(variant), drawn(variant, before=7), drawn(variant, seed=2)
    assert_same(one, again)
    matrices = [name for name, value in one.items() if value.ndim > 1]
    assert len(matrices) > 10
    for name in matrices:
        if "sums" not in name:  # zeros before the first batch
            assert not torch.equal(one[name], other[name]), name


def test_the_global_generator_is_left_alone() -> None:
    model = build("air")
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    draw_weights(model, 1)
    assert torch.equal(torch.rand(4), wanted)
