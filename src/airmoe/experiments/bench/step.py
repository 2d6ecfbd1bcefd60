"""Whole training steps of the `small` model: tokens per second.

A step is forward and backward under bfloat16 autocast, clipping, the optimizer, and the refresh of
the shortlists that the next forward does. A new way to run it is one more line in `WAYS`.

On random tokens the hidden states stay alike and fall into a few cells. On prepared text steps are
timed after enough training that the codebook has spread, as it is for nearly all of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from airmoe.data import BlockDataset, open_prepared
from airmoe.errors import ConfigError
from airmoe.experiments.bench.inputs import NUM_BATCHES, SEED
from airmoe.experiments.bench.results import Result
from airmoe.experiments.bench.timing import Limits, Step
from airmoe.kernels.backend import backend_for
from airmoe.metrics import usage_entropy
from airmoe.model import AirMoeForCausalLM, model_size, with_method
from airmoe.routers import AirRouter, track_optimizer
from airmoe.training import preset
from airmoe.training.devices import compile_layers
from airmoe.training.loop import make_optimizer

WARMUP_STEPS = 5  # a compiled step is compiled in the first ones
TEXT_STEPS = 300  # before the clock, and batches of text that take turns


@dataclass(frozen=True)
class StepShape:
    """Model and batch."""

    size: str = "small"
    vocab_size: int = 128_256  # Llama-3's
    num_sequences: int = 64
    block_size: int = 256

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.block_size

    def toy(self) -> StepShape:
        return StepShape(size="tiny", vocab_size=512, num_sequences=4, block_size=64)

    def __str__(self) -> str:
        return (
            f"{self.size}, {self.num_sequences} x {self.block_size} tokens, "
            f"{self.vocab_size:,} token ids, bfloat16 autocast"
        )


@dataclass(frozen=True)
class Way:
    """One way of running the same step."""

    key: str
    name: str
    compiled: bool = False  # layer by layer, as `airmoe train training.compile=true` does
    captured: bool = False  # in one CUDA graph
    method: str = "air"  # "dense": without routing and experts, so that the difference is theirs

    @property
    def role(self) -> str:
        return self.method if self.method in ("air", "dense") else "baseline"


WAYS = {
    way.key: way
    for way in (
        Way("eager", "eager"),
        Way("compiled", "layers compiled", compiled=True),
        Way("graph", "one CUDA graph", captured=True),
        Way("compiled-graph", "compiled, one CUDA graph", compiled=True, captured=True),
        Way("dense", "the same without experts", compiled=True, captured=True, method="dense"),
        Way("hierarchical", "hierarchical", compiled=True, captured=True, method="hierarchical"),
        Way("peer", "PEER", compiled=True, captured=True, method="peer"),
    )
}


class TrainingStep:
    """A model, its optimizer and some batches, which all take the same place."""

    def __init__(
        self, way: Way, shape: StepShape, device: torch.device, text: BlockDataset | None = None
    ) -> None:
        recipe = preset(shape.size).training
        torch.manual_seed(SEED)
        config = model_size(shape.size)
        config.vocab_size = shape.vocab_size
        model = AirMoeForCausalLM(with_method(config, way.method)).train()
        self.model = model.to(device)  # pyright: ignore[reportArgumentType]
        if way.compiled:
            compile_layers(self.model, may_fail=False)
        self.max_grad_norm = recipe.max_grad_norm
        self.optimizer = make_optimizer(self.model, recipe)
        for group in self.optimizer.param_groups:
            group["capturable"] = way.captured
        if way.method != "dense":
            track_optimizer(self.model, self.optimizer)
        self.batches = [batch.to(device) for batch in _batches(shape, text)]
        self.ids = self.batches[0].clone()
        self.losses: list[Tensor] = []

    def load(self, number: int) -> None:
        self.ids.copy_(self.batches[number % len(self.batches)])

    def forward(self) -> None:
        with torch.autocast(self.ids.device.type, dtype=torch.bfloat16):
            self.loss = self.model(input_ids=self.ids, labels=self.ids).loss

    def backward(self) -> None:
        self.loss.backward()
        self.loss = self.loss.detach()

    def optimize(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def keep_loss(self) -> None:
        """Not in a graph, which writes every loss to the same place."""
        self.losses.append(self.loss.clone())

    def run(self) -> None:
        """A whole step. It refreshes the shortlists too: parameters have changed."""
        self.forward()
        self.backward()
        self.optimize()


def _batches(shape: StepShape, text: BlockDataset | None) -> Sequence[Tensor]:
    """Random tokens, or a permutation of the text's blocks."""
    if text is None:
        size = (shape.num_sequences, shape.block_size)
        return [torch.randint(shape.vocab_size, size) for _ in range(NUM_BATCHES)]
    count = min(TEXT_STEPS, len(text) // shape.num_sequences)
    order = torch.randperm(len(text))[: count * shape.num_sequences].tolist()
    blocks = torch.stack([text[index]["input_ids"] for index in order])
    return blocks.split(shape.num_sequences)


def open_text(folder: Path, shape: StepShape) -> BlockDataset:
    """The training split that `airmoe prepare` wrote, checked against the model."""
    prepared = open_prepared(folder)
    words = prepared.manifest.tokenizer.vocab_size
    if words > shape.vocab_size:
        rule = f"has {words} token ids, the model {shape.vocab_size}"
        raise ConfigError("bench.data", str(folder), rule, "Prepare it with a smaller tokenizer.")
    blocks = prepared.blocks("train", shape.block_size)
    if len(blocks) < shape.num_sequences:
        rule = f"must have {shape.num_tokens} tokens for one step, it has {blocks.num_tokens}"
        raise ConfigError("bench.data", str(folder), rule, "Prepare more text.")
    return blocks


def measure_step(
    way: Way, shape: StepShape, device: torch.device, limits: Limits, text: BlockDataset | None
) -> Result:
    """Tokens per second of one way; a step that learns nothing gets no time."""
    result = Result(way.key, way.name, way.role)
    with result.recorded():
        if (way.compiled or way.captured) and device.type != "cuda":
            rule = "is measured on a GPU only"
            raise ConfigError("bench.step", way.key, rule, "Use --only eager here.")
        training = TrainingStep(way, shape, device, text)
        result.backend = backend_for(device, torch.bfloat16)
        result.parameter_bytes = sum(one.nbytes for one in training.model.parameters())
        parts = [training.forward, training.backward, training.optimize]
        step = Step(device, [*parts, training.keep_loss], training.load)
        for number in range(WARMUP_STEPS):
            step.take(number)
        result.peak_bytes = step.peak_bytes()
        result.captured = way.captured
        if way.captured:
            (replay,) = Step(device, [training.run], training.load).captured().actions
            step = Step(device, [replay, training.keep_loss], training.load)
        laps = step.sample(limits, warmup=max(WARMUP_STEPS, len(training.batches)))
        losses = torch.stack(training.losses).tolist()
        first, last = losses[0], losses[-1]
        if not (math.isfinite(sum(losses)) and last < first):
            result.status = "wrong"
            result.reason = f"the loss goes from {first:.2f} to {last:.2f}: nothing is learned"
            return result
        result.total_ms = [sum(lap[:-1]) for lap in laps]
        if not way.captured:
            result.forward_ms, backward, optimizer = ([lap[n] for lap in laps] for n in range(3))
            result.apart_ms = {"backward": backward, "clipping and optimizer": optimizer}
        result.work = {
            "num_tokens": shape.num_tokens,
            "tokens_per_second": [1e3 * shape.num_tokens / ms for ms in result.total_ms],
            "first_loss": first,
            "last_loss": last,
        }
        for router in training.model.modules():
            if isinstance(router, AirRouter):
                entropy = usage_entropy(router.codebook.counts)
                result.work["codeword_perplexity"] = entropy.exp().item()
    return result
