"""A config refuses impossible settings, and JSON does not change it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig

from airmoe import ROUTERS, AirRouter, ConfigError, Routing, TopKRouter
from airmoe.config import config
from airmoe.model import AirMoeConfig, AirMoeForCausalLM
from tests.model.common import CAUSAL, SMALL, VARIANTS, config_of


def test_defaults_are_llama_3_and_the_papers_small_model() -> None:
    config = AirMoeConfig()
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500_000.0}
    assert (config.vocab_size, config.max_position_embeddings) == (128_256, 2048)
    assert (config.bos_token_id, config.eos_token_id) == (128_000, 128_001)
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    assert not config.attention_bias and not config.mlp_bias
    assert (config.num_experts, config.num_experts_per_tok) == (65_536, 512)
    assert config.moe_layers == [8] and config.load_balance_weight == 5e-5
    router = config.router_config()
    assert isinstance(router, AirRouter.Config)
    assert (router.dim, router.top_k, router.shortlist_size) == (256, 512, 2048)
    assert (router.codebook_decay, router.dead_below, router.jitter_std) == (0.95, 1.0, 0.01)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_survives_json_files_and_copies(variant: str, tmp_path: Path) -> None:
    config = config_of(variant, moe_layers=[0, 2], dtype="bfloat16", attn_implementation="eager")
    config.save_pretrained(tmp_path)
    copies = [
        AirMoeConfig.from_dict(config.to_dict()),
        AirMoeConfig(**config.to_dict()),
        AirMoeConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        copy.deepcopy(config),
    ]
    for one in copies:
        assert type(one) is AirMoeConfig
        assert one.to_dict() == config.to_dict() | {"_name_or_path": one.name_or_path}
        assert one.router_config() == config.router_config()


class OwnRouter(TopKRouter):
    """A router from outside the tree, with a setting that has no default."""

    @config
    class Config(TopKRouter.Config):
        label: ClassVar[str] = "own"
        depth: int


def test_a_custom_router_needs_no_budget_if_its_options_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ROUTERS, "own", OwnRouter)
    router: Any = config_of("topk", router="own", router_options={"depth": 3}).router_config()
    assert (router.dim, router.num_experts, router.top_k, router.depth) == (16, 36, 4, 3)
    with pytest.raises(ConfigError, match=r"router_options\.depth: .* must be given. Required: d"):
        config_of("topk", router="own", router_options={})
    with pytest.raises(ConfigError, match=r"model\.router_options\.width: .*: jitter_std, "):
        config_of("topk", router="own", router_options={"depth": 3, "width": 3})


@pytest.mark.parametrize("declared", [None, Routing, "NotThere"])
def test_a_router_must_say_what_it_returns(declared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Vague(TopKRouter):
        def route(self, tokens, plan):  # pyright: ignore
            return super().route(tokens, plan)

    monkeypatch.setitem(ROUTERS, "vague", Vague)
    if declared is not None:
        Vague.route.__annotations__["return"] = declared
    with pytest.raises(ConfigError, match=r"'vague', must say what .* `-> CellRouting` or"):
        config_of("topk", router="vague")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"router": "random"}, "model.router"),
    ({"router_options": {"num_code_words": 3}}, "model.router_options.num_code_words"),
    ({"router_options": {"shortlist_size": 3}}, "model.router_options.shortlist_size"),
    ({"router_options": {"top_k": 3}}, "model.router_options.top_k"),
    ({"router_options": [3]}, "model.router_options"),
    ({"num_experts": 0}, "model.num_experts"),
    ({"num_experts": 36.0}, "model.num_experts"),
    ({"num_experts_per_tok": True}, "model.num_experts_per_tok"),
    ({"num_experts_per_tok": 37}, "model.num_experts_per_tok"),
    ({"expert_size": -1}, "model.expert_size"),
    ({"experts": "huge"}, "model.experts"),
    ({"expert_activation": "sine"}, "model.expert_activation"),
    ({"moe_post_norm": None}, "model.moe_post_norm"),
    ({"moe_post_norm_gain": 0.0}, "model.moe_post_norm_gain"),
    ({"moe_layers": [3]}, "model.moe_layers"),
    ({"moe_layers": [-1]}, "model.moe_layers"),
    ({"moe_layers": [1, 1]}, "model.moe_layers"),
    ({"moe_layers": 1}, "model.moe_layers"),
    ({"load_balance_weight": -1e-5}, "model.load_balance_weight"),
    ({"router_z_weight": float("nan")}, "model.router_z_weight"),
    ({"router": "topk", "shortlist_balance_weight": 0.1}, "model.shortlist_balance_weight"),
    ({"num_key_value_heads": 3}, "model.num_key_value_heads"),
    ({"num_attention_heads": 0}, "model.num_attention_heads"),
    ({"hidden_size": 18}, "model.hidden_size"),
    ({"num_expert": 3}, "model.num_expert"),
    ({"top_k": 3}, "model.top_k"),
]


@pytest.mark.parametrize(("change", "field"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_wrong_values_are_refused_at_once(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        AirMoeConfig(**{**SMALL, **change})
    assert error.value.field == field


def test_unknown_names_list_the_valid_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"num_experts_per_tok, .*moe_layers"):
        config_of("air", expert_count=3)
    with pytest.raises(ConfigError, match="Did you mean 'num_experts'"):
        config_of("air", num_expert=3)


def test_unknown_entries_of_a_saved_config_are_kept(tmp_path: Path) -> None:
    """Tools leave entries in config.json; nothing that was saved may be refused."""
    config = config_of("air")
    config.update({"unsloth_version": "2026.1", "origin": {"step": 3}})
    config.save_pretrained(tmp_path)
    loads: list[Any] = [
        lambda: AirMoeConfig.from_dict(config.to_dict()),
        lambda: AirMoeConfig.from_json_file(tmp_path / "config.json"),
        lambda: AirMoeConfig.from_pretrained(tmp_path),
        lambda: AutoConfig.from_pretrained(tmp_path),
    ]
    for load in loads:
        with pytest.warns(UserWarning, match=r"config: origin, unsloth_version\.") as warned:
            loaded = load()
        assert len(warned) == 1
        assert loaded.to_dict() == config.to_dict() | {"_name_or_path": loaded.name_or_path}
    with pytest.raises(ConfigError, match=r"model\.unsloth_version: .* is not an option"):
        AirMoeConfig(**config.to_dict())  # as options of a program they are refused
    with pytest.raises(ConfigError, match=r"model\.to_dict: .* is not an option"):
        AirMoeConfig.from_dict({**config.to_dict(), "to_dict": 3})  # it means something else


def test_changes_at_loading_are_checked_too(tmp_path: Path) -> None:
    config_of("air").save_pretrained(tmp_path)
    assert AirMoeConfig.from_pretrained(tmp_path, num_experts=49).num_experts == 49
    with pytest.raises(ConfigError, match="num_experts"):
        AirMoeConfig.from_pretrained(tmp_path, num_experts=-1)


def test_only_experts_that_choose_tokens_are_not_causal() -> None:
    assert [name for name in VARIANTS if config_of(name).routes_causally] == CAUSAL
    assert len(VARIANTS) - len(CAUSAL) == 2


# -- edited and damaged files --------------------------------------------------------------

ODD = [None, True, 0, -1, 1.5, float("nan"), 10**30, 10**400, "", "abc"]
ODD += [[], ["x"], {}, {"type": "linear"}]
NOTES = {"architectures", "transformers_version", "model_type"}  # that transformers writes


def test_no_change_of_a_file_makes_a_traceback(tmp_path: Path) -> None:
    """It is refused in one line, or a model can be built from it."""
    config_of("air").save_pretrained(tmp_path)
    saved, refused = tmp_path / "config.json", []
    good = json.loads(saved.read_text())
    for name in good:
        for value in ODD:
            saved.write_text(json.dumps({**good, name: value}))
            try:
                found = AirMoeConfig.from_pretrained(tmp_path)
                with torch.device("meta"):
                    AirMoeForCausalLM(found)
            except ConfigError as error:
                refused.append((name, error))
    assert good.keys() - {name for name, _ in refused} <= NOTES
    assert len(refused) > 350
    for name, error in refused:
        assert "\n" not in str(error) and error.field.startswith("model") and name in str(error)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"[" * 50_000, b'{"router": "\xff"}'])
def test_a_file_that_is_no_config_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for model_class in (AirMoeConfig, AirMoeForCausalLM):
        with pytest.raises(ConfigError, match=r"config: got '.*config\.json', must be the JSON of"):
            model_class.from_pretrained(tmp_path)
