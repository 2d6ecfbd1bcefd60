"""Text from a model: repeatable, greedy where asked, and always text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from airmoe.data import Tokenizer, make_tokenizer
from airmoe.errors import ConfigError
from airmoe.model import AirMoeForCausalLM
from airmoe.training import generate_text
from tests.model.common import CAUSAL, config_of

PROMPT = "the expert "


def model_of(variant: str = "air", **fields: Any) -> AirMoeForCausalLM:
    torch.manual_seed(0)
    fields = {"vocab_size": 257, "eos_token_id": 256, "bos_token_id": None, **fields}
    model = AirMoeForCausalLM(config_of(variant, **fields)).eval()
    with torch.no_grad():  # far enough apart for a greedy choice without ties
        model.lm_head.weight.normal_(std=0.4)
    return model


def text(model: AirMoeForCausalLM, prompt: str = PROMPT, **options: Any) -> str:
    return generate_text(model, tokenizer(), prompt, **({"max_new_tokens": 12} | options))


def tokenizer() -> Tokenizer:
    return make_tokenizer("bytes")


@torch.no_grad()
def greedy(model: AirMoeForCausalLM, prompt: str, count: int) -> str:
    """The likeliest token each time, from the whole text and without a cache."""
    ids = tokenizer().encode(prompt) or [256]
    start = len(ids)
    for _ in range(count):
        logits = model(torch.tensor([ids])).logits[0, -1, :257]
        best = int(logits.argmax())
        if best == 256:
            break
        ids.append(best)
    return prompt + tokenizer().decode(ids[start:])


@pytest.mark.parametrize("variant", CAUSAL)
def test_temperature_zero_takes_the_likeliest_token(variant: str) -> None:
    model = model_of(variant)
    assert text(model, temperature=0.0) == greedy(model, PROMPT, 12)


def test_an_empty_prompt_starts_a_document() -> None:
    model = model_of()
    assert text(model, "", temperature=0.0) == greedy(model, "", 12)
    assert text(model, "") != ""


def test_a_begin_that_training_saw_stands_before_the_prompt() -> None:
    model, begins = model_of(), tokenizer()
    begins.identity = replace(begins.identity, bos_id=7)
    for prompt in (PROMPT, ""):
        answer = generate_text(model, begins, prompt, max_new_tokens=12, temperature=0.0)
        assert "\x07" + answer == greedy(model, "\x07" + prompt, 12)


def test_the_seed_decides() -> None:
    model = model_of()
    texts = [text(model, seed=seed, temperature=5.0) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(each.startswith(PROMPT) and len(each) > len(PROMPT) for each in texts)


def test_a_hot_temperature_and_a_small_nucleus() -> None:
    """A nucleus of almost nothing leaves only the likeliest token, however hot."""
    model = model_of()
    assert text(model, temperature=1.0, nucleus=1e-6) == greedy(model, PROMPT, 12)
    assert text(model, temperature=100.0, nucleus=1.0) != greedy(model, PROMPT, 12)


def test_the_end_of_text_ends_it() -> None:
    """A model that says nothing else: nothing is added, nor the name of that token."""
    model = model_of()
    original = model.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        output = original(*arguments, **named)
        assert output.logits is not None
        output.logits[..., 256] = 1e9
        return output

    model.forward = forward
    assert text(model) == PROMPT
    assert text(model, temperature=0.0) == PROMPT


@pytest.mark.parametrize("temperature", [0.0, 100.0])
def test_ids_beyond_the_tokenizer_are_never_drawn(temperature: float) -> None:
    """A vocabulary may be padded; what is over is no text."""
    model = model_of(vocab_size=1024)
    found = text(model, temperature=temperature, nucleus=1.0, max_new_tokens=30)
    assert found.startswith(PROMPT)
    if temperature == 0:
        assert found == greedy(model, PROMPT, 30)


def test_prompt_and_answer_must_fit() -> None:
    model = model_of(max_position_embeddings=20)
    assert text(model, "a" * 12, max_new_tokens=8, temperature=0.0)
    with pytest.raises(ConfigError, match=r"max_new_tokens: got 9, .*12 tokens.*20 tokens"):
        text(model, "a" * 12, max_new_tokens=9)
    with pytest.raises(ConfigError, match=r"max_new_tokens: got 20, .*1 token.*20 tokens"):
        text(model, "", max_new_tokens=20)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1),
        ("nucleus", 0),
        ("nucleus", 1.1),
        ("seed", -1),
        ("seed", 2**70),
    ],
)
def test_wrong_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generate\.{name}: got {value}"):
        text(model_of(), **{name: value})


def test_training_mode_is_no_obstacle() -> None:
    model = model_of().train()
    assert text(model, temperature=0.0) == greedy(model_of(), PROMPT, 12)
