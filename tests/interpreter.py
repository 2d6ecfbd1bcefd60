"""Triton's interpreter, in which the kernels run without a GPU, less the work that it repeats.

At a launch it puts functions of its own into `triton.language`, for which it looks at every name
there. It does the same at each call of a function by a kernel, where they are in place already,
and that took half of the time of the kernels' tests.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


def patch_once_a_launch() -> None:
    """Put them there once a launch for each module that a function of the launch comes from.

    Where there is no Triton, or one that does this in another way, nothing changes.
    """
    try:
        from triton.runtime.interpreter import GridExecutor, _patch_lang
    except ImportError:
        return
    from triton.runtime import interpreter

    launch = GridExecutor.__call__
    patched: set[int] = set()  # modules, by the id of their names

    def patch_unless_patched(fn: FunctionType) -> Any:
        """Only the launch asks for the result, to undo it at its end, and its call is the first."""
        names = id(fn.__globals__)
        if names in patched:
            return None
        patched.add(names)
        return _patch_lang(fn)

    def launch_anew(self: GridExecutor, *arguments: Any, **named: Any) -> None:
        patched.clear()
        launch(self, *arguments, **named)

    setattr(interpreter, "_patch_lang", patch_unless_patched)  # noqa: B010 (private)
    setattr(GridExecutor, "__call__", launch_anew)  # noqa: B010
