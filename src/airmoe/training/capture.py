"""Micro-batches as CUDA graphs.

A small model spends more time launching kernels than running them. A CUDA graph repeats what the
device did, without the side effects of the Python code. Python decides two things between
micro-batches: which cached lists are due, and whether gradients are new or add to those of earlier
micro-batches. There is one graph per answer. Where a capture is refused, or modules have hooks,
micro-batches run without graphs, and one line says why.
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
    grads: dict[nn.Parameter, Tensor]  # where it writes them


class CapturedMicroBatches:
    """Runs micro-batches, after a few plain ones, as graphs; gradients add up in `parameter.grad`.

    All micro-batches must have the same shape, and gradients must be None when a step begins.
    """

    def __init__(self, model: nn.Module, forward_backward: ForwardBackward) -> None:
        self._model, self._forward_backward = model, forward_backward
        self._plain_left = PLAIN_MICRO_BATCHES
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._routers = [one for one in model.modules() if isinstance(one, AirRouter)]
        self._inputs: Inputs = {}  # a graph reads and writes at fixed addresses: these,
        self._grads: dict[nn.Parameter, Tensor] = {}  # and these, where gradients add up
        self._graphs: dict[tuple[bool, tuple[Due, ...]], _Graph] = {}
        self._is_on = True

    def run(self, inputs: Inputs) -> Tensor:
        """One micro-batch; returns its loss."""
        self._plain_left -= 1
        if self._plain_left >= 0 or not self._is_on:
            return self._forward_backward(inputs)
        if has_hooks(self._model):
            self._switch_off("a module has a hook, which a graph would not call")
            return self._forward_backward(inputs)
        first = all(one.grad is None for one in self._parameters)  # of its step
        if not first and not self._grads:
            return self._forward_backward(inputs)  # the first graph makes the gradients' buffers
        if not self._inputs:
            self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        if not first:
            self._use_own_gradients()
        before = self._due()
        if (first, before) not in self._graphs:
            try:
                self._graphs[first, before] = self._capture()
            except RuntimeError as error:
                self._switch_off(str(error).strip().partition("\n")[0])
                if first:
                    self._model.zero_grad()  # the capture may have left gradients that nobody wrote
                return self._forward_backward(inputs)
        captured = self._graphs[first, before]
        captured.graph.replay()
        for parameter, grad in captured.grads.items():
            parameter.grad = grad
        self._grads = self._grads or captured.grads
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
        """Have gradients where graphs add to them, with what earlier micro-batches added."""
        for parameter, grad in self._grads.items():
            if parameter.grad is not grad:
                grad.zero_() if parameter.grad is None else grad.copy_(parameter.grad)
                parameter.grad = grad

    def _capture(self) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        # Other threads (a data loader's) may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self._forward_backward(self._inputs)
        grads = {one: one.grad for one in self._parameters if one.grad is not None}
        return _Graph(graph, loss, self._due(), grads)


def has_hooks(model: nn.Module) -> bool:
    """Whether calling the model also calls hooks: of its modules, or torch's for all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = any(getattr(module, kind) for module in model.modules() for kind in kinds)
    return own or bool(_has_any_global_hook())
