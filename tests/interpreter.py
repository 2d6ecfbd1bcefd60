"""A faster interpreter of Triton: where there is no GPU, the kernels' tests run in it.

Results stay the same to the bit. The interpreter repeats two things, which took much of the tests'
time:

- At a launch it puts functions of its own into `triton.language`, for which it looks at every name
  there; and again at each call of a function by a kernel, where they are in place already.
- It makes a table of all types whenever it asks for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np


def spare_repeated_work() -> None:
    """Where there is no Triton, or one that works in another way, nothing changes."""
    try:
        from triton.runtime.interpreter import GridExecutor, _get_np_dtype, _patch_lang
    except ImportError:
        return
    from triton.runtime import interpreter

    patch, launch = once_a_launch(_patch_lang, GridExecutor.__call__)
    setattr(interpreter, "_patch_lang", patch)  # noqa: B010 (it is private)
    setattr(GridExecutor, "__call__", launch)  # noqa: B010
    setattr(interpreter, "_get_np_dtype", once_a_type(_get_np_dtype))  # noqa: B010


def once_a_launch(
    patch: Callable[[FunctionType], Any], launch: Callable[..., None]
) -> tuple[Callable[[FunctionType], Any], Callable[..., None]]:
    """Both, so that a launch patches once for each module that its functions come from."""
    patched: set[int] = set()  # modules, by the id of their names

    def patch_unless_patched(fn: FunctionType) -> Any:
        """Only the launch uses the result, to undo it at its end, and its call is the first."""
        names = id(fn.__globals__)
        if names in patched:
            return None
        patched.add(names)
        return patch(fn)

    def launch_anew(*arguments: Any, **named: Any) -> None:
        patched.clear()
        launch(*arguments, **named)

    return patch_unless_patched, launch_anew


def once_a_type(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A block has the numpy type of its elements."""
    known: dict[str, Any] = {}

    def remembered(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = numpy_type(of)
        return known[name]

    return remembered


@contextmanager
def exact_products() -> Iterator[None]:
    """Every `tl.dot` in float64, rounded once.

    On some processors the matrix product of numpy's BLAS rounds an element differently in another
    row of the block. A GPU does not, so a test that compares bits must not see it.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, a: Any, b: Any, d: Any, *_precision: Any) -> TensorHandle:
        product = np.matmul(a.data, b.data, dtype=np.float64)
        return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    with patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield
