"""Which implementation computes: plain PyTorch everywhere, Triton on CUDA devices.

`AIRMOE_BACKEND` (auto, reference, triton) or the context manager `use_backend` overrides the
choice. Where Triton cannot be used, plain PyTorch runs, and one logged line says why.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import Parameter

from airmoe.config import check_choice
from airmoe.errors import ConfigError

Backend = Literal["reference", "triton"]
Choice = Literal["auto", "reference", "triton"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Set for the whole process, not per thread: autograd runs the backward of CUDA tensors in its own
# threads, and a layer that is recomputed there must use what its forward used.
_chosen: list[Choice] = []
_log = logging.getLogger("airmoe")


@contextmanager
def use_backend(name: Choice) -> Iterator[None]:
    """Compute with this backend inside the block, in all threads, whatever the environment says."""
    check_choice("use_backend", name, Choice)
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def use_triton(*operands: object) -> bool:
    """True when Triton computes on the tensors among these, which must be on one device."""
    device, dtypes = None, []
    for operand in operands:
        if not isinstance(operand, Tensor):
            continue
        device = device or operand.device
        if operand.device != device:
            raise ConfigError(
                "device",
                sorted({str(device), str(operand.device)}),
                "must be one device for all operands",
                "Move the layer and its input to the same device.",
            )
        if operand.dtype.is_floating_point:
            dtypes.append(operand.dtype)
    assert device is not None
    return backend_for(device, *dtypes) == "triton"


def backend_for(device: torch.device, *dtypes: torch.dtype) -> Backend:
    """The implementation for operands of these dtypes on this device."""
    choice = (_chosen[-1] if _chosen else os.environ.get("AIRMOE_BACKEND")) or "auto"
    if choice == "auto" and device.type != "cuda":
        return "reference"
    return _decide(choice, os.environ.get("TRITON_INTERPRET"), device.type, dtypes)


def assume_constant(function: Callable[..., Any]) -> None:
    """Compilers call it while they trace and keep what it says.

    What torch.compiler.assume_constant_result does, which would load the compiler here and now.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# A compiler cannot find the backend by tracing (it is in the environment), so a compiled graph
# keeps the one that was chosen when it was made.
assume_constant(backend_for)


def interpreted() -> bool:
    """True where Triton's interpreter runs the kernels on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache  # asked some thirty times in a forward
def _decide(
    choice: str, interpret: str | None, device_type: str, dtypes: tuple[torch.dtype, ...]
) -> Backend:
    check_choice("AIRMOE_BACKEND", choice, Choice)
    if choice == "reference":
        return "reference"
    reason = _why_not_triton(interpret == "1", device_type, dtypes)
    if reason is None:
        return "triton"
    if device_type != "cuda":
        setting = "use_backend" if _chosen else "AIRMOE_BACKEND"
        raise ConfigError(setting, choice, f"cannot run here: {reason}", "Use auto or reference.")
    _say_once(reason)
    return "reference"


def _why_not_triton(
    interpreter: bool, device_type: str, dtypes: tuple[torch.dtype, ...]
) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'airmoe[kernels]')"
    if device_type != "cuda" and not interpreter:
        return f"Triton has no {device_type} device; TRITON_INTERPRET=1 interprets it, slowly"
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"Triton kernels take float32, float16 and bfloat16, not {dtype}"
    return None


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("Plain PyTorch computes instead of Triton, which is slower: %s.", reason)


def own_precision(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Switch autocast off inside `operation`, whose first argument, or the one after `self` or
    `ctx`, is a tensor."""

    @functools.wraps(operation)
    def without_autocast(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first = args[0] if isinstance(args[0], Tensor) else args[1]
        assert isinstance(first, Tensor)
        device = first.device.type
        if not torch.is_autocast_enabled(device):
            return operation(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return operation(*args, **kwargs)

    return without_autocast


def without_autograd(function: type[torch.autograd.Function], *operands: Any) -> Any:
    """What `function.apply` gives where no backward can follow.

    Autograd's own work takes as long as a small product, which counts for a single token.
    """
    context = SimpleNamespace(save_for_backward=lambda *_: None, needs_input_grad=())
    return function.forward(context, *operands)


def chunks(total: int, step: int) -> Iterator[slice]:
    """Cut `total` rows into runs of at most `step`."""
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


@functools.cache
def gpu_bytes(device: torch.device) -> int:
    """The memory of a GPU, 0 of anything else."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


@dataclass(frozen=True)
class Gradient:
    """An operator's gradient: `of` lists its differentiable inputs, and `saved` the outputs that
    its backward needs."""

    of: tuple[str, ...]
    saved: tuple[str, ...] = ()


def with_kernel(
    module: str,
    *,
    when: Callable[..., bool] | None = None,
    fake: Callable[..., Any] | None = None,
    gradient: Gradient | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a definition in plain PyTorch that has kernels in `module`, under the same name.

    Where Triton computes on the operands, and `when` (if given) agrees, the operator
    `airmoe::<name>` runs, else the definition. The operator has the definition's signature. To
    find the device only tensors passed by position are looked at: pass at least one so. Without a
    `fake`, the definition also tells compilers which shapes the operator gives: one contiguous
    tensor.
    """

    def decorate(definition: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        def contiguous(*args: Any, **kwargs: Any) -> Any:
            result: Any = definition(*args, **kwargs)
            return result.contiguous()

        signature = torch.library.infer_schema(definition, mutates_args=())
        schema = f"{definition.__name__}{signature}"
        op = operator(schema, module, fake=fake or contiguous, gradient=gradient)

        @functools.wraps(definition)
        def choose(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if use_triton(*args) and (when is None or when(*args, **kwargs)):
                return op(*args, **kwargs)
            return definition(*args, **kwargs)

        return choose

    return decorate


def operator(
    schema: str, module: str, *, fake: Callable[..., Any], gradient: Gradient | None = None
) -> Operator:
    """The operator `airmoe::<schema>`. The function of its name in `module`, one of the files of
    Triton kernels, computes it; `fake` gives empty results of the same shapes.

    With a `gradient`, the module's `<name>_backward` computes it. That function takes all inputs,
    saved outputs and gradients (`grad_<output>`, None where there is none) as attributes of one
    object, with `inputs` in order, and the names of those inputs that want a gradient; it returns
    their gradients by name. Outputs have the names that the schema gives them; a single one needs
    no name and is called `output`.
    """
    name = schema.partition("(")[0]

    def find(function: str) -> Callable[..., Any]:
        return getattr(_kernels(module), function)

    op = Operator(schema, lambda *args, **kwargs: find(name)(*args, **kwargs), fake)
    if gradient is not None:
        _Backward(name, op, gradient, lambda *args: find(f"{name}_backward")(*args))
    return op


@functools.cache
def _kernels(module: str) -> Any:
    return importlib.import_module(f"airmoe.kernels.{module}")


class Operator:
    """An operator registered with torch, which compilers and dispatch modes see.

    Where nobody looks, a call goes straight to the kernels: torch's machinery for operators in
    Python takes longer than launching a kernel.
    """

    def __init__(self, schema: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> None:
        name, _, signature = schema.partition("(")
        self.name, self.launch = name, launch
        self.written = re.findall(r"!\) (\w+)", signature)
        op = torch.library.custom_op(
            f"airmoe::{name}", self._run, mutates_args=self.written, schema=f"({signature}"
        )
        op.register_fake(fake)
        self.definition, self.registered = op, op._opoverload
        self.schema = self.registered._schema
        names = [argument.name for argument in self.schema.arguments]
        self._written_places = [names.index(name) for name in self.written]
        self._function: type[torch.autograd.Function] | None = None

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """As of torch's own operators."""
        self.definition.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *args: Any) -> Any:
            output = self._run(*args)
            setup_context(ctx, args, output)
            return output

        def direct_backward(ctx: Any, *grads: Tensor | None) -> Any:
            # Here a list is one argument; to the dispatcher each of its tensors is one.
            found = backward(ctx, *grads)
            return tuple(None if isinstance(grad, list) else grad for grad in found)

        methods = {"forward": forward, "backward": direct_backward}
        methods = {name: staticmethod(method) for name, method in methods.items()}
        self._function = type(self.name, (torch.autograd.Function,), methods)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _watched(args):
            return self.registered(*args, **kwargs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if self._function is None or kwargs:
                return self.registered(*args, **kwargs)
            return self._function.apply(*args)
        result = self._run(*args, **kwargs)
        for place in self._written_places:
            torch.autograd.graph.increment_version(args[place])
        return result

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Triton launches on the current device, so that is set to the one of the first tensor."""
        tensor = next(arg for arg in args if isinstance(arg, Tensor))
        if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
            return self.launch(*args, **kwargs)
        with torch.cuda.device_of(tensor):
            return self.launch(*args, **kwargs)


def _watched(args: tuple[Any, ...]) -> bool:
    """True where an operator must be seen by name: by a mode (selective activation checkpointing,
    counters, tracing), a transform of torch.func, or a tensor that is not torch's own."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or not _plain(args)
    )


def _plain(args: Sequence[Any]) -> bool:
    for arg in args:
        if isinstance(arg, list):
            if not _plain(arg):
                return False
        elif isinstance(arg, Tensor) and (
            type(arg) not in (Tensor, Parameter) or is_legacy_batchedtensor(arg)
        ):
            return False
    return True


class _Backward:
    """The operator `<name>_backward`, and what autograd keeps for it."""

    def __init__(
        self, name: str, op: Operator, gradient: Gradient, function: Callable[..., Any]
    ) -> None:
        inputs = [argument.name for argument in op.schema.arguments]
        outputs = [output.name or "output" for output in op.schema.returns]
        grads = [f"grad_{name}" for name in outputs]
        self.function, self.of = function, gradient.of
        self.names = [*grads, *inputs, *gradient.saved]  # what the operator takes
        self.inputs = slice(len(grads), len(grads) + len(inputs))
        self.of_places = [inputs.index(name) for name in gradient.of]
        self.saved_places = [outputs.index(name) for name in gradient.saved]
        declared = str(op.schema).partition("(")[2].rpartition(") ->")[0]
        parts = [*(f"Tensor? {grad}" for grad in grads), declared]
        parts += [*(f"Tensor {name}" for name in gradient.saved), "bool[] wanted"]
        schema = f"{name}_backward({', '.join(parts)}) -> Tensor[]"
        self.operator = Operator(schema, self.run, self.fake)
        op.register_autograd(self.backward, setup_context=self.save)

    def run(self, *args: Any) -> list[Tensor]:
        call = SimpleNamespace(**dict(zip(self.names, args, strict=False)))
        call.inputs = args[self.inputs]
        wanted = [name for name, want in zip(self.of, args[-1], strict=True) if want]
        found = self.function(call, set(wanted))
        return [found[name] for name in wanted]

    def fake(self, *args: Any) -> list[Tensor]:
        operands = [args[self.inputs][place] for place in self.of_places]
        wanted = [tensor for tensor, want in zip(operands, args[-1], strict=True) if want]
        return [tensor.new_empty(tensor.shape) for tensor in wanted]

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        output = output if isinstance(output, tuple) else (output,)
        values = [*inputs, *(output[place] for place in self.saved_places)]
        ctx.set_materialize_grads(False)
        leaves: list[Any] = []
        for value in values:
            leaves += value if isinstance(value, list) else [value]
        ctx.lengths = [len(value) if isinstance(value, list) else None for value in values]
        ctx.save_for_backward(*(leaf if isinstance(leaf, Tensor) else None for leaf in leaves))
        ctx.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        pairs = zip(ctx.saved_tensors, ctx.constants, strict=True)
        leaves = iter([constant if tensor is None else tensor for tensor, constant in pairs])
        values = [
            next(leaves) if length is None else list(islice(leaves, length))
            for length in ctx.lengths
        ]
        inputs = values[: len(ctx.needs_input_grad)]
        found: list[Any] = [[None] * len(x) if isinstance(x, list) else None for x in inputs]
        if any(grad is not None for grad in grads):
            upstream = [None if grad is None else grad.contiguous() for grad in grads]
            wanted = [ctx.needs_input_grad[place] for place in self.of_places]
            results = iter(self.operator(*upstream, *values, wanted))
            for place, want in zip(self.of_places, wanted, strict=True):
                found[place] = next(results) if want else None
        return tuple(found)
