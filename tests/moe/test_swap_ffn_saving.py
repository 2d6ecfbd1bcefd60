"""Swapped networks on disk in company: swapped routers, shared configs, shards, tied embeddings."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import airmoe
from airmoe import ConfigError, load_swapped_ffn, swap_ffn
from tests.moe import families
from tests.moe.dense_models import air, dense, ids, layer_of, logits_of


def both(order: str) -> Any:
    """A DeepSeek-V3 whose first layer is dense, with swapped network and swapped routers."""
    model = families.build("deepseek_v3").eval()
    for what in order.split("+"):
        if what == "routers":
            airmoe.swap_routers(model, num_codewords=4, shortlist_size=16)
        elif what == "back":
            airmoe.restore_routers(model)
        else:
            router = air(8, 24, 12, dim=families.WIDTH)
            swap_ffn(model, layers=[0], router=router)
    airmoe.calibrate(model, families.BATCHES, passes=2)
    return model


@pytest.mark.parametrize(
    ("order", "kind", "model_type"),
    [
        ("ffn+routers", "AirDeepseekV3ForCausalLM", "airmoe_deepseek_v3"),
        ("routers+ffn", "AirDeepseekV3ForCausalLM", "airmoe_deepseek_v3"),
        ("ffn+routers+back", "DeepseekV3ForCausalLM", "deepseek_v3"),
        ("routers+ffn+back", "DeepseekV3ForCausalLM", "deepseek_v3"),
        ("routers+ffn+back+routers", "AirDeepseekV3ForCausalLM", "airmoe_deepseek_v3"),
    ],
)
def test_with_swapped_routers(order: str, kind: str, model_type: str, tmp_path: Path) -> None:
    model = both(order)
    assert (type(model).__name__, model.config.model_type) == (kind, model_type)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == f"airmoe_ffn_{model_type}"
    with pytest.raises(ValueError, match=f"airmoe_ffn_{model_type}"):  # and not random networks
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for loaded in (load_swapped_ffn(tmp_path), copy.deepcopy(model)):
        assert (type(loaded).__name__, loaded.config.model_type) == (kind, model_type)
        actual, expected = loaded.state_dict(), model.state_dict()
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], value) for name, value in expected.items())
        assert torch.equal(families.logits_of(loaded), families.logits_of(model))


def test_a_model_that_shares_the_config_stays_dense(tmp_path: Path) -> None:
    model = dense()
    other = transformers.LlamaForCausalLM(model.config).eval()
    swap_ffn(model, layers=[1], router=air())
    swap_ffn(model, layers=[0], router=air())
    # One config for all parts of the model: options set later must reach them.
    configs = [getattr(part, "config", None) for part in model.modules()]
    stock = {id(one) for one in configs if isinstance(one, transformers.PreTrainedConfig)}
    assert stock == {id(model.config)} != {id(other.config)}
    assert set(model.config.airmoe_ffn["layers"]) == {"0", "1"}
    other.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(other))


def test_a_decoder_swapped_inside_its_model(tmp_path: Path) -> None:
    model = dense()
    swap_ffn(model.model, layers=[1], router=air())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="airmoe_ffn_llama"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = load_swapped_ffn(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert torch.equal(logits_of(loaded), logits_of(model))
    named = load_swapped_ffn(tmp_path, model_class=transformers.LlamaForCausalLM)
    assert torch.equal(logits_of(named), logits_of(model))


@pytest.mark.parametrize("name", ["config", "output_loading_info"])
def test_options_that_are_ours(name: str, tmp_path: Path) -> None:
    model = dense()
    swap_ffn(model, layers=[1], router=air())
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"options.*{name}.*is not yours to give"):
        load_swapped_ffn(tmp_path, options={name: model.config})


@pytest.mark.parametrize("family", ["Gemma2", "Qwen2"])
def test_shards_tied_embeddings_and_options(family: str, tmp_path: Path) -> None:
    model = dense(family, tie_word_embeddings=True)
    swap_ffn(model, layers=[1], router=air(12, shortlist_size=24))
    airmoe.calibrate(model, [ids(seed, batch=8) for seed in range(8)])
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for options in ({}, {"device_map": "auto"}, {"dtype": "auto", "use_safetensors": True}):
        loaded = load_swapped_ffn(tmp_path, options=options)
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
        assert torch.equal(logits_of(loaded), logits_of(model))
    narrow = load_swapped_ffn(tmp_path, options={"dtype": torch.bfloat16})
    actual, expected = (layer_of(one, 1).router for one in (narrow, model))
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(actual.codebook.codewords, expected.codebook.codewords)
    assert torch.equal(actual.centroids, expected.centroids.to(torch.bfloat16))
