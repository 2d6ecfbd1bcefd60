"""AIR inside a Mixtral: train a small one, swap its routers, calibrate, compare, undo."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import airmoe
from airmoe.data.python_docs import read_python_docs

EXPERTS, CODEWORDS, SHORTLIST = 64, 16, 16
LENGTH, BATCH = 64, 16


def read_text(num_bytes: int) -> Tensor:
    """Python's own documentation, byte by byte: [blocks, LENGTH] in a shuffled order."""
    data = bytearray()
    for document in read_python_docs():
        data += document.text.encode()
        if len(data) >= num_bytes:
            break
    ids = torch.frombuffer(data, dtype=torch.uint8).long()
    blocks = ids[: ids.numel() // LENGTH * LENGTH].view(-1, LENGTH)
    return blocks[torch.randperm(blocks.shape[0])]


def build() -> Any:
    """Two layers of 64 experts, of which a token uses 4."""
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=4,
        max_position_embeddings=LENGTH,
        output_router_logits=True,  # trains with the balance loss
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def train(model: Any, text: Tensor, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    loss = torch.zeros(())
    for step in range(steps):
        batch = text[step * BATCH % (len(text) - BATCH) :][:BATCH]
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return float(loss.detach())


@torch.no_grad()
def logits_and_loss(model: Any, text: Tensor) -> tuple[Tensor, float]:
    output = model(text, labels=text, output_router_logits=False)
    return output.logits, float(output.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps only, for tests")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    start = time.perf_counter()
    text = read_text(50_000 if quick else 500_000)
    held_out, text = text[:32], text[32:]

    model = build()
    loss = train(model, text, steps=5 if quick else 200)
    exact, exact_loss = logits_and_loss(model, held_out)
    print(
        f"A Mixtral of 2 x {EXPERTS} experts, training loss {loss:.2f}, held out {exact_loss:.3f}"
    )

    airmoe.swap_routers(model, num_codewords=CODEWORDS, shortlist_size=SHORTLIST)
    report = airmoe.calibrate(model, text[: 16 * BATCH].split(BATCH))
    print(f"\nRouters swapped: {type(model.model.layers[0].mlp.gate).__name__}\n{report}")

    logits, short_loss = logits_and_loss(model, held_out)
    difference = float((logits - exact).abs().mean())
    spread = float(exact.std())
    print(
        f"\nLogits differ by {difference:.2g} on average, where they spread by {spread:.2g}; "
        f"held-out loss {short_loss:.3f} instead of {exact_loss:.3f}."
    )
    prompt = torch.frombuffer(bytearray(b"The function returns"), dtype=torch.uint8).long()
    written = model.generate(
        prompt.unsqueeze(0), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    print("It writes:", repr(bytes(written[0].tolist()).decode(errors="replace")))

    airmoe.restore_routers(model)
    back = float((logits_and_loss(model, held_out)[0] - exact).abs().max())
    print(f"Restored: logits differ by {back:g}. Done in {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
