"""Micro-batches as CUDA graphs.

A small model spends more time launching kernels than running them. A CUDA graph repeats what the
device did, without the side effects of the Python code. The one thing Python decides between
micro-batches is which cached lists are due, so there is one graph per answer. Where a capture is
refused, or modules have hooks, micro-batches run without graphs, and one line says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from airmoe.routers import AirRouter
from airmoe.routers.lists import Due

Inputs = dict[str, Tensor]
ForwardBackward = Callable[[Inputs], Tensor]  # of one micro-batch; returns its loss
LOG = logging.getLogger("airmoe")
PLAIN_MICRO_BATCHES = 4  # before the first capture, so that compilers and codebooks have started


def uncompiled() -> Any:
    """Run compiled layers as plain Python in this block: every new hook would recompile them."""
    return torch.compiler.set_stance("force_eager")


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    loss: Tensor
    due: tuple[Due, ...]  # of the lists afterwards


class CapturedMicroBatches:
    """Runs micro-batches, after a few plain ones, as graphs; gradients add up in `parameter.grad`.

    All micro-batches must have the same shape.
    """

    def __init__(self, model: nn.Module, forward_backward: ForwardBackward) -> None:
        self._model, self._forward_backward = model, forward_backward
        self._plain_left = PLAIN_MICRO_BATCHES
        self._routers = [one for one in model.modules() if isinstance(one, AirRouter)]
        self._inputs: Inputs = {}  # a graph reads and writes at fixed addresses: these,
        self._grads: dict[nn.Parameter, Tensor] = {}  # and these
        self._graphs: dict[tuple[Due, ...], _Graph] = {}
        self._is_on = True

    def run(self, inputs: Inputs) -> Tensor:
        """One micro-batch; returns its loss."""
        self._plain_left -= 1
        if self._plain_left >= 0 or not self._is_on:
            return self._forward_backward(inputs)
        if has_hooks(self._model):
            self._switch_off("a module has a hook, which a graph would not call")
            return self._forward_backward(inputs)
        if not self._inputs:
            self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
            parameters = [one for one in self._model.parameters() if one.requires_grad]
            self._grads = {one: torch.zeros_like(one) for one in parameters}
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._use_own_gradients()
        before = self._due()
        if before not in self._graphs:
            try:
                self._graphs[before] = self._capture()
            except RuntimeError as error:
                self._switch_off(str(error).strip().partition("\n")[0])
                return self._forward_backward(inputs)
        captured = self._graphs[before]
        captured.graph.replay()
        for router, due, left in zip(self._routers, before, captured.due, strict=True):
            if left != due:
                router.lists_renewed(due)
        return captured.loss.clone()  # the next replay overwrites it

    def _switch_off(self, reason: str) -> None:
        self._is_on = False
        self._graphs.clear()
        for router in self._routers:  # a capture that failed may have noted lists it never built
            router.on_parameters_changed()
        LOG.warning("CUDA graphs are off, so training is slower: %s.", reason)

    def _due(self) -> tuple[Due, ...]:
        return tuple(router.lists_due for router in self._routers)

    def _use_own_gradients(self) -> None:
        """Put the graph's buffers into `parameter.grad`, with what earlier micro-batches added."""
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
        # Other threads (a data loader's) may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self._forward_backward(self._inputs)
        return _Graph(graph, loss, self._due())


def has_hooks(model: nn.Module) -> bool:
    """Whether calling the model also calls hooks: of its modules, or torch's for all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = any(getattr(module, kind) for module in model.modules() for kind in kinds)
    return own or bool(_has_any_global_hook())
