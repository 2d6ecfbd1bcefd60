"""Generation: cache and padding change nothing, and no token depends on later ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe import ConfigError
from tests.model.common import CAUSAL, VARIANTS, batch, build, learn_a_little
from tests.state.common import assert_same, snapshot

PROMPT = batch(20, (2, 6))


def generate(model: Any, ids: Tensor = PROMPT, **options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(ids), **options}
    return model.generate(
        ids, max_new_tokens=8, do_sample=False, pad_token_id=0, output_scores=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("variant", CAUSAL)
def test_cached_and_recomputed_generation_agree(variant: str) -> None:
    model = learn_a_little(build(variant)).eval()
    cached, recomputed = (generate(model, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached.sequences, recomputed.sequences)
    torch.testing.assert_close(cached.scores, recomputed.scores)
    # Each new token is the best one by a single forward over everything before it.
    with torch.no_grad():
        best = model(cached.sequences).logits.argmax(-1)
    assert torch.equal(best[:, 5:-1], cached.sequences[:, 6:])


def test_generation_with_a_static_cache() -> None:
    model = learn_a_little(build("air")).eval()
    static = generate(model, cache_implementation="static")
    assert torch.equal(static.sequences, generate(model).sequences)


def test_codebooks_do_not_learn_while_generating() -> None:
    """Single tokens would replace all codewords."""
    model = learn_a_little(build("air")).train()
    before = snapshot(model)
    generate(model)
    assert_same(snapshot(model), before)
    model(PROMPT, labels=PROMPT)  # a training batch still teaches
    now = model.state_dict()
    assert not all(torch.equal(value, before[name]) for name, value in now.items())


@pytest.mark.parametrize("variant", ["air", "peer"])
def test_left_padding_changes_nothing(variant: str) -> None:
    model = learn_a_little(build(variant)).eval()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), PROMPT], dim=1)
    mask = (torch.arange(9) >= 3).long().expand(2, -1)
    found = generate(model, padded, attention_mask=mask)
    expected = generate(model)
    assert torch.equal(found.sequences[:, 3:], expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in CAUSAL])
def test_experts_that_choose_tokens_are_refused(variant: str) -> None:
    model = build(variant).eval()
    ran: list[object] = []
    model.register_forward_pre_hook(lambda *_: ran.append(_))
    with pytest.raises(ConfigError, match="experts choose tokens"):
        model.generate(PROMPT, max_new_tokens=1)
    assert not ran
