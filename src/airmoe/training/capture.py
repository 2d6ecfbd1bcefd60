"""Micro-batches as CUDA graphs: a small model spends more time launching kernels than running them.

A graph repeats what the device did, and nothing of what Python did beside it. What Python decides
between micro-batches is what of the shortlists is due, so there is a graph for each answer; and
steps that are looked at (hooks of the log) are not captured but run as always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from airmoe.routers import AirRouter
from airmoe.routers.lists import Due

Inputs = dict[str, Tensor]
Step = Callable[[Inputs], Tensor]  # forward and backward of one micro-batch -> its loss


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    loss: Tensor
    due: tuple[Due, ...]  # of the shortlists afterwards


class CapturedSteps:
    """Runs a step on batches of one shape; gradients are added to `parameter.grad` as always."""

    def __init__(self, model: nn.Module, step: Step, example: Inputs) -> None:
        self._step = step
        self._routers = [one for one in model.modules() if isinstance(one, AirRouter)]
        self._inputs = {name: tensor.clone() for name, tensor in example.items()}
        self._grads = {
            parameter: torch.zeros_like(parameter)
            for parameter in model.parameters()
            if parameter.requires_grad
        }
        self._graphs: dict[tuple[Due, ...], _Graph] = {}

    def fits(self, inputs: Inputs) -> bool:
        """Whether these can take the place of those that were captured."""
        shapes, captured = (
            {name: (tensor.shape, tensor.dtype) for name, tensor in given.items()}
            for given in (inputs, self._inputs)
        )
        return shapes == captured

    def run(self, inputs: Inputs) -> Tensor:
        """One micro-batch; the first of each kind is captured on the way."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._use_own_gradients()
        before = self._due()
        if before not in self._graphs:
            self._graphs[before] = self._capture()
        captured = self._graphs[before]
        captured.graph.replay()
        for router, due, left in zip(self._routers, before, captured.due, strict=True):
            if left != due:
                router.lists_renewed(due)
        return captured.loss.clone()  # the next replay writes over it

    def _due(self) -> tuple[Due, ...]:
        return tuple(router.lists_due for router in self._routers)

    def _use_own_gradients(self) -> None:
        """A graph adds to fixed addresses; what is there is 0, or of earlier micro-batches."""
        fresh = []
        for parameter, grad in self._grads.items():
            if parameter.grad is None:
                fresh.append(grad)
            elif parameter.grad is not grad:
                grad.copy_(parameter.grad)
            parameter.grad = grad
        if fresh:
            torch._foreach_zero_(fresh)  # pyright: ignore[reportPrivateImportUsage]

    def _capture(self) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        # Threads of the data loader may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self._step(self._inputs)
        return _Graph(graph, loss, self._due())
