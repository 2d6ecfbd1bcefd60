"""Text from a trained model."""

from __future__ import annotations

import torch

from airmoe.config import check_count, check_number
from airmoe.data import Tokenizer
from airmoe.errors import ConfigError
from airmoe.model import AirMoeForCausalLM


@torch.no_grad()
def generate_text(
    model: AirMoeForCausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    nucleus: float = 0.95,
    seed: int = 0,
) -> str:
    """The prompt continued; `temperature` 0 takes the likeliest token each time."""
    check_count("generate.max_new_tokens", max_new_tokens)
    check_count("generate.seed", seed, least=0)
    check_number("generate.seed", seed, below=2**63)
    check_number("generate.temperature", temperature)
    check_number("generate.nucleus", nucleus, strict=True, below=1.0 + 1e-9)
    # Where nothing stands before a document, it begins after the end of another.
    ids = tokenizer.encode_start(prompt) or [tokenizer.identity.eos_id]
    longest = model.config.max_position_embeddings
    if len(ids) + max_new_tokens > longest:
        raise ConfigError(
            "generate.max_new_tokens",
            max_new_tokens,
            f"must leave prompt ({len(ids)} tokens) and answer together <= {longest} tokens",
            "Shorten the prompt or the answer.",
        )
    torch.manual_seed(seed)
    # A vocabulary may be larger than the tokenizer's; what is over stands for no text.
    unused = list(range(tokenizer.identity.vocab_size, model.config.vocab_size))
    sampling = {"do_sample": True, "temperature": temperature, "top_p": nucleus, "top_k": 0}
    answer = model.eval().generate(
        torch.tensor([ids], device=model.device),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.identity.eos_id,
        suppress_tokens=unused or None,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    new_ids = answer[0, len(ids) :].tolist()
    if new_ids and new_ids[-1] == tokenizer.identity.eos_id:
        new_ids.pop()
    return prompt + tokenizer.decode(new_ids)
