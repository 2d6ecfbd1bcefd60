"""Load a trained model from a run folder, and generate text with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers.utils import logging as transformers_logging

from airmoe.config import check_choice, check_count, check_number
from airmoe.data import Prepared, Tokenizer, load_tokenizer
from airmoe.errors import ConfigError
from airmoe.model import AirMoeForCausalLM
from airmoe.training.checkpoints import best_checkpoint, check_checkpoint, checkpoints
from airmoe.training.run_folder import RunFolder, open_run

Which = Literal["best", "last"]


@dataclass(frozen=True)
class Trained:
    """A run's model with its tokenizer."""

    run: RunFolder
    checkpoint: Path
    model: AirMoeForCausalLM
    tokenizer: Tokenizer


def load_trained(folder: Path, which: Which = "best") -> Trained:
    """The best (by validation loss) or the last checkpoint of a run, ready to evaluate."""
    check_choice("checkpoint", which, Which)
    run = open_run(folder)
    best = best_checkpoint(folder)
    checkpoint = best if which == "best" else checkpoints(folder)[-1]
    check_checkpoint(checkpoint, run.sha256(), to_resume=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers_logging.disable_progress_bar()
    model = AirMoeForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    model.to(device)  # pyright: ignore[reportArgumentType]
    return Trained(run, checkpoint, model.eval(), load_tokenizer(checkpoint))


def check_same_tokenizer(tokenizer: Tokenizer, prepared: Prepared) -> None:
    """Raise unless a text was prepared with the tokenizer the model was trained with."""
    ours, theirs = tokenizer.identity, prepared.manifest.tokenizer
    if ours != theirs:
        raise ConfigError(
            "data.tokenizer",
            f"{theirs.kind} ({theirs.vocab_size:,} ids, {theirs.sha256[:12]})",
            f"must be the model's, {ours.kind} ({ours.vocab_size:,} ids, {ours.sha256[:12]})",
            "Prepare this text again with the tokenizer the model was trained with.",
        )


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
    """Continue a prompt; `temperature` 0 takes the likeliest token each time."""
    check_count("generate.max_new_tokens", max_new_tokens)
    check_count("generate.seed", seed, least=0)
    check_number("generate.seed", seed, below=2**63)
    check_number("generate.temperature", temperature)
    check_number("generate.nucleus", nucleus, strict=True, below=1.0 + 1e-9)
    # In training a document follows the end of another, or what the tokenizer puts in front.
    ids = tokenizer.encode_start(prompt) or [tokenizer.identity.eos_id]
    longest = model.config.max_position_embeddings
    if len(ids) + max_new_tokens > longest:
        rule = f"must leave prompt ({len(ids)} tokens) and answer together <= {longest} tokens"
        remedy = "Shorten the prompt or the answer."
        raise ConfigError("generate.max_new_tokens", max_new_tokens, rule, remedy)
    torch.manual_seed(seed)
    # A vocabulary may be larger than the tokenizer's; the ids beyond it mean nothing.
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
