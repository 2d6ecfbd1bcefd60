"""Whole training steps of the `small` model on random tokens: tokens per second.

A step is forward and backward under bfloat16 autocast, clipping, the optimizer, and the refresh of
the shortlists that the next forward does. A new way to run it is one more line in `WAYS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from airmoe.experiments.bench.measure import Result, guarded
from airmoe.experiments.bench.timing import Limits, Step, Timer, peak_bytes, sample
from airmoe.experiments.presets import preset
from airmoe.kernels.backend import backend_for
from airmoe.model import AirMoeConfig, AirMoeForCausalLM, model_size
from airmoe.routers import track_optimizer

NUM_BATCHES = 4
WARMUP_STEPS = 5  # a compiled step is compiled in the first ones


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

    def config(self) -> AirMoeConfig:
        config = model_size(self.size)
        config.vocab_size = self.vocab_size
        config.check()
        return config


FULL = StepShape()
TOY = StepShape(size="tiny", vocab_size=512, num_sequences=4, block_size=64)

Model = Callable[..., Any]  # what is called with a batch


@dataclass(frozen=True)
class Way:
    """One way of running the same step."""

    key: str
    name: str
    prepare: Callable[[AirMoeForCausalLM], Model]
    gpu_only: bool = False
    captured: bool = False  # in one CUDA graph


def _as_it_is(model: AirMoeForCausalLM) -> Model:
    return model


def _compiled(model: AirMoeForCausalLM) -> Model:
    for layer in model.model.layers:  # as `airmoe train training.compile=true` does
        layer.compile()
    return model


WAYS = {
    way.key: way
    for way in (
        Way("eager", "eager", _as_it_is),
        Way("compiled", "layers compiled", _compiled, gpu_only=True),
        Way("graph", "one CUDA graph", _as_it_is, gpu_only=True, captured=True),
        Way("compiled-graph", "compiled, one CUDA graph", _compiled, gpu_only=True, captured=True),
    )
}


class TrainingStep:
    """A model, its optimizer and some batches; call it with the number of the step."""

    def __init__(self, shape: StepShape, way: Way, timer: Timer, seed: int) -> None:
        recipe = preset(shape.size).training
        torch.manual_seed(seed)
        model = AirMoeForCausalLM(shape.config()).train()
        self.model = model.to(timer.device)  # pyright: ignore[reportArgumentType]
        self.timer, self.call, self.most = timer, way.prepare(self.model), recipe.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            fused=timer.on_gpu,
            capturable=way.captured,
        )
        track_optimizer(self.model, self.optimizer)
        size = (shape.num_sequences, shape.block_size)
        self.batches = [
            torch.randint(shape.vocab_size, size, device=timer.device) for _ in range(NUM_BATCHES)
        ]
        self.losses: list[Tensor] = []

    def capture(self) -> Step:
        """The step as one graph. Parameters have changed since the lists were built, so that the
        refresh is in the graph, as it must be."""
        ids = self.batches[0].clone()
        batches, self.batches = self.batches, [ids]
        stream = torch.cuda.Stream(self.timer.device)
        stream.wait_stream(torch.cuda.current_stream(self.timer.device))
        with torch.cuda.stream(stream):
            self(0)
        torch.cuda.current_stream(self.timer.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        before = len(self.losses)
        with torch.cuda.graph(graph):
            self._run(ids)
        (loss,) = self.losses[before:]
        del self.losses[before:]

        def step(number: int) -> Sequence[Any]:
            ids.copy_(batches[number % len(batches)])
            marks = [self.timer.mark()]
            graph.replay()
            marks.append(self.timer.mark())
            self.losses.append(loss.clone())
            return marks

        return step

    def _run(self, ids: Tensor) -> None:
        with torch.autocast(self.timer.device.type, dtype=torch.bfloat16):
            loss = self.call(input_ids=ids, labels=ids).loss
        loss.backward()
        self._update()
        self.losses.append(loss.detach())

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.most)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self, number: int) -> Sequence[Any]:
        """Marks before and after forward, backward, and clipping with the optimizer."""
        ids = self.batches[number % len(self.batches)]
        marks = [self.timer.mark()]
        with torch.autocast(self.timer.device.type, dtype=torch.bfloat16):
            loss = self.call(input_ids=ids, labels=ids).loss
        marks.append(self.timer.mark())
        loss.backward()
        marks.append(self.timer.mark())
        self._update()
        marks.append(self.timer.mark())
        self.losses.append(loss.detach())
        return marks


def measure_step(way: Way, shape: StepShape, timer: Timer, limits: Limits, seed: int) -> Result:
    """Tokens per second of one way; a step that learns nothing gets no time."""
    result = Result(way.key, way.name, "air")
    if way.gpu_only and not timer.on_gpu:
        result.status, result.reason = "skipped", "measured on a GPU only"
        return result

    def attempt() -> None:
        step = TrainingStep(shape, way, timer, seed)
        _measure(step, shape, limits, result, captured=way.captured)

    return guarded(result, attempt)


def _measure(
    step: TrainingStep, shape: StepShape, limits: Limits, result: Result, *, captured: bool
) -> None:
    result.backend = backend_for(step.timer.device, torch.bfloat16)
    result.parameter_bytes = sum(parameter.nbytes for parameter in step.model.parameters())
    for number in range(WARMUP_STEPS):
        step(number)
    result.peak_bytes = peak_bytes(step.timer, lambda: step(0))
    result.captured = captured
    laps = sample(step.timer, step.capture() if captured else step, limits)
    losses = torch.stack(step.losses).tolist()
    if not (all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]):
        result.status = "wrong"
        result.reason = (
            f"the loss goes from {losses[0]:.2f} to {losses[-1]:.2f}: nothing is learned"
        )
        return
    result.total_ms = [sum(lap) for lap in laps]
    if not captured:
        result.forward_ms = [lap[0] for lap in laps]
        result.apart_ms = {
            "backward": [lap[1] for lap in laps],
            "clipping and optimizer": [lap[2] for lap in laps],
        }
    result.work = {
        "num_tokens": shape.num_tokens,
        "tokens_per_second": [1e3 * shape.num_tokens / ms for ms in result.total_ms],
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
